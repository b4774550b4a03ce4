"""A NumPyro model, its program and its lifted dependency graph."""
