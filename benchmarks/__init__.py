"""Measurements and comparisons: `python -m benchmarks --help`."""
