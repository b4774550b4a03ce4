"""Compile a NumPyro model into fast, corrected amortized inference.

An implementation of, and beyond, "Inference Networks for Sequential Monte Carlo in Graphical
Models" (Paige & Wood, ICML 2016).
"""

from retrodict.artefact import DamagedFile, NewerFormat, OlderFormat
from retrodict.compiled import Compiled, History, compile, load
from retrodict.errors import DataError, UnsupportedModel
from retrodict.estimators.conditional import MADE
from retrodict.evaluation.calibrate import Calibration, calibrate
from retrodict.graph.graph import Graph, Site
from retrodict.graph.trace import trace
from retrodict.inverse.factors import Factor
from retrodict.inverse.inverse import Inverse, invert
from retrodict.particles.posterior import Posterior
from retrodict.saving import WrongModel
from retrodict.training.schedule import Training

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
    "OlderFormat",
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
