"""Conditionals known in closed form."""
