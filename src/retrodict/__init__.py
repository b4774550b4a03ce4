"""retrodict: compile a NumPyro model into fast, corrected amortized inference."""
