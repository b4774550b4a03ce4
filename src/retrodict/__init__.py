"""Compile a NumPyro model into fast, corrected amortized inference.

An implementation of, and beyond, "Inference Networks for Sequential Monte Carlo in Graphical
Models" (Paige & Wood, ICML 2016).
"""

from retrodict.errors import DataError, UnsupportedModel
from retrodict.factors import Factor
from retrodict.graph import Graph, Site, trace
from retrodict.inverse import Inverse, invert

__all__ = [
    "DataError",
    "Factor",
    "Graph",
    "Inverse",
    "Site",
    "UnsupportedModel",
    "invert",
    "trace",
]
