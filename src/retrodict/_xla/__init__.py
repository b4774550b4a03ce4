"""Everything that exists because of XLA or CPU speed; it knows nothing of models or inference."""
