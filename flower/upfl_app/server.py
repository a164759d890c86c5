"""What the SuperLink runs."""

from upfl.flower.server import app

__all__ = ["app"]
