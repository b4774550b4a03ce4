"""Compile a NumPyro model into fast, corrected amortized inference.

An implementation of, and beyond, "Inference Networks for Sequential Monte Carlo in Graphical
Models" (Paige & Wood, ICML 2016).
"""

from retrodict.artefact import DamagedFile, NewerFormat
from retrodict.calibrate import Calibration, calibrate
from retrodict.compiled import Compiled, History, compile
from retrodict.errors import DataError, UnsupportedModel
from retrodict.factors import Factor
from retrodict.graph import Graph, Site
from retrodict.inverse import Inverse, invert
from retrodict.networks import MADE
from retrodict.posterior import Posterior
from retrodict.reading import trace
from retrodict.saving import WrongModel, load
from retrodict.train import Training

__all__ = [
    "MADE",
    "Calibration",
    "Compiled",
    "DamagedFile",
    "DataError",
    "Factor",
    "Graph",
    "History",
    "Inverse",
    "NewerFormat",
    "Posterior",
    "Site",
    "Training",
    "UnsupportedModel",
    "WrongModel",
    "calibrate",
    "compile",
    "invert",
    "load",
    "trace",
]
