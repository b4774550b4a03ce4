"""Benchmarks against other packages; `python -m benchmarks` runs them."""
