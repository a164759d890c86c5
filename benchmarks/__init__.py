"""Measurements of speed: run them with `python -m benchmarks.NAME` from the project's root."""
