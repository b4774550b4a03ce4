"""Define the arguments of the command line and their help texts."""

import argparse
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

from retrodict.errors import InputError
from retrodict.inference.samplers import InferMethod
from retrodict.inverse.inverse import Method

_EXAMPLES = """
examples:
  retrodict graph   model.py:rates --observed t,y -o rates.svg
  retrodict compile model.py:rates --observed t,y -o rates.rd --minutes 5
  retrodict infer   rates.rd data.json -o posterior.nc
  retrodict check   rates.rd -o report.html
  retrodict demo

exit status: 0 success; 1 the result is not to be trusted; 2 invalid input; 3 error in retrodict
"""


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positive_ints(text: str) -> tuple[int, ...]:
    return tuple(map(_positive_int, _names(text)))


def _observed(text: str) -> dict[str, tuple[int, ...] | None]:
    """Names of sites, each with a shape if it is followed by one, as in `t,y=9x2`."""
    pairs = (name.partition("=") for name in _names(text))
    return {
        name: tuple(map(_positive_int, sizes.split("x"))) if sizes else None
        for name, _, sizes in pairs
    }


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found {text!r}")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, found {text!r}")
    return value


_FLAG: dict[str, Any] = {"action": "store_true"}
_FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
_INVERSION: dict[str, Any] = {"choices": get_args(Method)}
_METHOD: dict[str, Any] = {"choices": get_args(InferMethod), "default": "auto"}
# Names of the argument, commands that take it, help, and other settings.
_ARGUMENTS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("--json", "graph compile infer check demo", "print the result as JSON", _FLAG),
    ("--quiet", "graph compile infer check demo", "print no progress and no notes", _FLAG),
    ("--debug", "graph compile infer check demo", "print the traceback of an error", _FLAG),
    ("model", "graph compile", "file.py:function or package.module:function", {}),
    ("artefact", "infer check", "file that `retrodict compile` wrote", {"type": Path}),
    ("data", "infer", ".json, .csv, .npz or .nc; - for JSON on standard input", {}),
    ("name", "demo", "name of the example (default: the first)", {"nargs": "?"}),
    ("--model", "infer check", "the model it was compiled from, if that has been moved", {}),
    (
        "--observed",
        "graph compile",
        "names of the observed sites, separated by commas; y=9x2 states the shape of data",
        {"type": _observed, "required": True, "metavar": "SITES"},
    ),
    (
        "--kwargs",
        "graph compile infer",
        "keyword arguments of the model, or @file.json; lists become arrays",
        {"metavar": "JSON"},
    ),
    ("--inverse", "graph", "draw the inverse, by this inversion method", _INVERSION),
    ("--inverse", "compile", "inversion method (default: auto)", _INVERSION | {"default": "auto"}),
    ("-o --output", "graph", "picture: .svg, .png or .dot", _FILE),
    ("-o --output", "compile", "file for the compiled model", _FILE | {"required": True}),
    ("-o --output", "infer", "the posterior: .nc for ArviZ, or its summary: .json, .csv", _FILE),
    ("-o --output", "check", "the report: .html", _FILE),
    (
        "-o --output",
        "demo",
        "folder for the results (default: out)",
        {"type": Path, "metavar": "FOLDER", "default": Path("out")},
    ),
    ("--minutes", "compile demo", "time limit for training", {"type": _positive_float}),
    ("--steps", "compile", "limit of gradient steps per network", {"type": _positive_int}),
    (
        "--hidden",
        "compile",
        "units per layer, such as 128,128",
        {"type": _positive_ints, "metavar": "SIZES"},
    ),
    ("--components", "compile", "components of each mixture", {"type": _positive_int}),
    ("--resume", "compile", "continue the training of this compiled model", _FILE),
    ("--force", "compile", "replace a file of any type", _FLAG),
    ("--report", "compile", "test the calibration too, as `check` does", _FILE),
    (
        "--datasets",
        "compile check",
        "number of data sets (default: 200)",
        {"type": _positive_int, "default": 200},
    ),
    (
        "--particles",
        "compile infer check",
        "number of particles per data set (default: 1000)",
        {"type": _positive_int, "default": 1000},
    ),
    ("--seed", "compile infer check", "random seed (default: 0)", {"type": int, "default": 0}),
    ("--method", "infer", "inference method (default: auto)", _METHOD),
    ("--plot", "infer", "figure: .png, .svg or .pdf", _FILE),
)


class _Parser(argparse.ArgumentParser):
    """A parser that raises `InputError` instead of exiting, and keeps line breaks in the help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def build_parser(commands: Mapping[str, Callable[..., Any]]) -> argparse.ArgumentParser:
    """Build the parser of the command line.

    Args:
        commands: the commands by name; the first paragraph of a docstring is the summary, the
            rest follows the options in the help.
    """
    parser = _Parser(
        prog="retrodict",
        description="Compile a NumPyro model into fast, corrected amortized inference.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", **_FLAG, help="print the version")
    subparsers = parser.add_subparsers(dest="command", metavar="command", parser_class=_Parser)
    parsers = {}
    for name, run in commands.items():
        summary, _, examples = (inspect.getdoc(run) or "").partition("\n\n")
        parsers[name] = subparsers.add_parser(
            name, help=summary, description=summary, epilog=examples
        )
    for names, commands_of_argument, summary, settings in _ARGUMENTS:
        for command in commands_of_argument.split():
            parsers[command].add_argument(*names.split(), help=summary, **settings)
    return parser
