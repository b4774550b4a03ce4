"""Conditional density estimators: coordinates, encoders, heads and the conditional MADE."""
