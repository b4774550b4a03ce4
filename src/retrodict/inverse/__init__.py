"""The inverse of a dependency graph: orderings, variable elimination and factors."""
