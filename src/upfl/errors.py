"""Errors that a user can act on: each message names what is wrong, where, and what to do about it."""

from typing import Self


class UpflError(Exception):
    """Base of all errors that the command line shows as a message, without a traceback."""

    reason = "it failed; its own log says why"  # what other machines may know of it: the message may name files or data

    def public(self) -> Self:
        """The same error, whose message other machines may know."""
        self.reason = str(self)
        return self


class DataError(UpflError):
    """A data file is missing, damaged or not what its name says, or a partition cannot be made from it."""

    reason = "its data cannot be used; its own log says why"


class BundleError(DataError):
    """A bundle cannot be written, or what is found in one does not fit."""


class ConfigError(UpflError):
    """A name or a value in a configuration, on the command line or in a call does not fit."""

    reason = "its node-config does not fit, or the run is not one for it; its own log says why"


class RunError(UpflError):
    """A run cannot start, go on or be read."""


class StoppedError(RunError):
    """A run that was under way had to stop; it can be resumed."""


class WriteError(StoppedError):
    """The system refused to write: the disk is full, the folder is read-only, a quota is used up."""


class BadClientError(UpflError):
    """What a client sent cannot be used: it is left out of the round."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.reason = message
