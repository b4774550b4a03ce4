"""Weighted particles: weights, resampling, genealogy, diagnostics and the posterior."""
