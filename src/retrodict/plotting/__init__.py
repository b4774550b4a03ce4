"""Figures of posteriors and pictures of dependency graphs."""
