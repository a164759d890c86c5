"""What a node runs."""

from upfl.flower.client import app

__all__ = ["app"]
