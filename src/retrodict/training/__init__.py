"""Simulation from the prior and training of the networks."""
