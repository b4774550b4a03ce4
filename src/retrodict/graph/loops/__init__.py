"""Lift the Python loops of a model over numbered sites into scans and plates."""
