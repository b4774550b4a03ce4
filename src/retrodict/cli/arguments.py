"""Define the arguments of the command line and their help texts."""

import argparse
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
_GRAPH_EXAMPLES = """
examples:
  retrodict graph model.py:rates --observed t,y -o rates.svg
  retrodict graph model.py:rates --observed t,y --inverse faithful -o inverse.png
  retrodict graph mypackage.models:rates --observed t,y --kwargs '{"n": 20}' --json
"""
_COMPILE_EXAMPLES = """
examples:
  retrodict compile model.py:rates --observed t,y -o rates.rd
  retrodict compile model.py:rates --observed t,y -o rates.rd --minutes 5 --report report.html
  retrodict compile model.py:rates --observed t,y -o rates.rd --minutes 5 --resume rates.rd

Ctrl-C ends the training, saves the networks as trained so far, and exits with status 0. A second
Ctrl-C stops at once and saves nothing. An existing compiled model is replaced only when the new one
is complete.
"""
_INFER_EXAMPLES = """
examples:
  retrodict infer rates.rd data.json
  retrodict infer rates.rd data.csv -o posterior.nc --particles 5000
  retrodict infer rates.rd data.npz -o summary.csv --model elsewhere/model.py:rates
  echo '{"t": [94.3, 15.7], "y": [5, 1]}' | retrodict infer rates.rd - --kwargs '{"n": 2}' --json

data:
  .json  an object of site → number or nested lists; a list of such objects is several data sets
  .csv   one column per site and one row per element; columns y[0], y[1], … for a site with two
         axes; if every row holds all elements of every site, each row is a data set
  .npz   one array per site
  .nc    NetCDF: the group observed_data, or the variables of the file
  If every site has an additional first axis, the file holds several data sets.
"""
_CHECK_EXAMPLES = """
examples:
  retrodict check rates.rd -o report.html
  retrodict check rates.rd --datasets 500 --json

The exit status is 1 if the inference is not calibrated.
"""
_DEMO_EXAMPLES = """
examples:
  retrodict demo
  retrodict demo --minutes 1 -o out
"""


class _Parser(argparse.ArgumentParser):
    """A parser that raises `InputError` instead of exiting, and keeps line breaks in the help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = _Parser(
        prog="retrodict",
        description="Compile a NumPyro model into fast, corrected amortized inference.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=_Parser)
    for name, summary, epilog, add_arguments in (
        ("graph", "show the dependency graph and its inverse", _GRAPH_EXAMPLES, _add_graph),
        ("compile", "train the inference networks of a model", _COMPILE_EXAMPLES, _add_compile),
        ("infer", "compute the posterior of a data set", _INFER_EXAMPLES, _add_infer),
        ("check", "test the calibration on synthetic data", _CHECK_EXAMPLES, _add_check),
        ("demo", "run an example of the paper", _DEMO_EXAMPLES, _add_demo),
    ):
        command = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        command.add_argument("--quiet", action="store_true", help="print no progress and no notes")
        command.add_argument("--debug", action="store_true", help="print the traceback of an error")
        add_arguments(command)
    return parser


def _add_graph(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    command.add_argument(
        "--inverse", choices=get_args(Method), help="draw the inverse, by this inversion method"
    )
    _add_output(command, "picture: .svg, .png or .dot")


def _add_compile(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    _add_output(command, "file for the compiled model, for example model.rd", required=True)
    _add_minutes(command)
    command.add_argument("--steps", type=_positive_int, help="limit of gradient steps per network")
    command.add_argument(
        "--hidden", type=_positive_ints, metavar="SIZES", help="units per layer, such as 128,128"
    )
    command.add_argument("--components", type=_positive_int, help="components of each mixture")
    command.add_argument(
        "--inverse",
        choices=get_args(Method),
        default="auto",
        help="inversion method (default: auto)",
    )
    command.add_argument(
        "--resume", type=Path, metavar="FILE", help="continue the training of this compiled model"
    )
    command.add_argument("--force", action="store_true", help="replace a file of any type")
    command.add_argument(
        "--report", type=Path, metavar="FILE", help="test the calibration too, as `check` does"
    )
    _add_datasets(command)
    _add_particles_and_seed(command)


def _add_infer(command: argparse.ArgumentParser) -> None:
    _add_artefact(command)
    command.add_argument("data", help=".json, .csv, .npz or .nc; - for JSON on standard input")
    _add_output(command, "the posterior: .nc for ArviZ, or its summary as .json or .csv")
    _add_particles_and_seed(command)
    command.add_argument(
        "--method",
        choices=get_args(InferMethod),
        default="auto",
        help="inference method (default: auto)",
    )
    command.add_argument("--plot", type=Path, metavar="FILE", help="figure: .png, .svg or .pdf")
    _add_kwargs(command)


def _add_check(command: argparse.ArgumentParser) -> None:
    _add_artefact(command)
    _add_output(command, "the report: .html")
    _add_datasets(command)
    _add_particles_and_seed(command)


def _add_demo(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", help="name of the example (default: the first)")
    _add_minutes(command)
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("out"),
        metavar="FOLDER",
        help="folder for the results (default: out)",
    )


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="file.py:function or package.module:function")
    command.add_argument(
        "--observed",
        type=_names,
        required=True,
        metavar="SITES",
        help="names of the observed sites, separated by commas",
    )
    _add_kwargs(command)


def _add_kwargs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--kwargs",
        metavar="JSON",
        help="keyword arguments of the model, or @file.json; lists become arrays",
    )


def _add_artefact(command: argparse.ArgumentParser) -> None:
    command.add_argument("artefact", type=Path, help="file that `retrodict compile` wrote")
    command.add_argument("--model", help="the model it was compiled from, if that has been moved")


def _add_output(command: argparse.ArgumentParser, summary: str, **options: Any) -> None:
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help=summary, **options)


def _add_minutes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--minutes", type=_positive_float, help="time limit for training")


def _add_datasets(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--datasets", type=_positive_int, default=200, help="number of data sets (default: 200)"
    )


def _add_particles_and_seed(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--particles",
        type=_positive_int,
        default=1000,
        help="number of particles per data set (default: 1000)",
    )
    command.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positive_ints(text: str) -> tuple[int, ...]:
    return tuple(map(_positive_int, _names(text)))


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
