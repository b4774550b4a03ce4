"""Inference by SMC, divide and conquer, filtering and tempering."""
