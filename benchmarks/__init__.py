"""Benchmarks: ratios taken in one run, each with the command that repeats it."""
