"""Calibration of compiled models on synthetic data, and the HTML report."""
