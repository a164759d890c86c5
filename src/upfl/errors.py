"""Errors that a user can act on: each message names what is wrong, where, and what to do about it."""


class UpflError(Exception):
    """Base of all errors that the command line shows as a message, without a traceback."""


class DataError(UpflError):
    """A data file is missing, damaged or not what its name says, or a partition cannot be made from it."""


class BundleError(DataError):
    """A bundle cannot be written, or what is found in one does not fit."""


class ConfigError(UpflError):
    """A name or a value in a configuration, on the command line or in a call does not fit."""


class RunError(UpflError):
    """A run cannot start, go on or be read."""


class StoppedError(RunError):
    """A run that was under way had to stop; it can be resumed."""


class BadClientError(UpflError):
    """What a client sent cannot be used: it is left out of the round."""
