"""Figures of posteriors and pictures of graphs."""
