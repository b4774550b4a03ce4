"""Calibration on synthetic data, and the report."""
