"""What can be said on the command line, with its help: the grammar, and nothing done yet."""

import argparse
from pathlib import Path
from typing import Any, NoReturn, get_args

from retrodict.errors import InputError
from retrodict.inference.samplers import InferMethod
from retrodict.inverse.inverse import Method

_EXAMPLES = {
    "": """
examples:
  retrodict graph   model.py:rates --observed t,y -o rates.svg
  retrodict compile model.py:rates --observed t,y -o rates.rd --minutes 5
  retrodict infer   rates.rd data.json -o posterior.nc
  retrodict check   rates.rd -o report.html
  retrodict demo

exit status: 0 done; 1 the answer is not to be trusted; 2 the input was wrong; 3 retrodict failed
""",
    "graph": """
examples:
  retrodict graph model.py:rates --observed t,y -o rates.svg
  retrodict graph model.py:rates --observed t,y --inverse faithful -o inverse.png
  retrodict graph mypackage.models:rates --observed t,y --kwargs '{"n": 20}' --json
""",
    "compile": """
examples:
  retrodict compile model.py:rates --observed t,y -o rates.rd
  retrodict compile model.py:rates --observed t,y -o rates.rd --minutes 5 --report report.html
  retrodict compile model.py:rates --observed t,y -o rates.rd --minutes 5 --resume rates.rd

Ctrl-C ends the training: what has been learned is saved, and the exit status is 0. A second Ctrl-C
ends it at once. A compiled model that is there already is replaced when the new one is whole.
""",
    "infer": """
examples:
  retrodict infer rates.rd data.json
  retrodict infer rates.rd data.csv -o posterior.nc --particles 5000
  retrodict infer rates.rd data.npz -o summary.csv --model elsewhere/model.py:rates
  echo '{"t": [94.3, 15.7], "y": [5, 1]}' | retrodict infer rates.rd - --kwargs '{"n": 2}' --json

data:
  .json  an object of site → number or nested lists; a list of such objects is several data sets
  .csv   a column for each site, a row for each element; y[0], y[1], … for a site of two axes; if
         every site is whole in a row, each row is a data set
  .npz   an array for each site
  .nc    NetCDF: the group observed_data, or the variables of the file
  With one axis more in front of every site, these are several data sets.
""",
    "check": """
examples:
  retrodict check rates.rd -o report.html
  retrodict check rates.rd --datasets 500 --json

The exit status is 1 if the answers are not calibrated.
""",
    "demo": """
examples:
  retrodict demo
  retrodict demo --minutes 1 -o out
""",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(_count, _names(text)))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def parser() -> argparse.ArgumentParser:
    """The grammar of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    root = _Parser(
        prog="retrodict",
        description="Compile a NumPyro model into fast, corrected amortized inference.",
        epilog=_EXAMPLES[""],
        formatter_class=raw,
    )
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers(dest="command", metavar="command", parser_class=_Parser)

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=summary, description=summary, epilog=_EXAMPLES[name], formatter_class=raw
        )
        made.add_argument("--json", action="store_true", help="print the answer as JSON")
        made.add_argument("--quiet", action="store_true", help="no progress and no notes")
        made.add_argument("--debug", action="store_true", help="show where an error came from")
        return made

    def output(made: argparse.ArgumentParser, what: str, **options: Any) -> None:
        made.add_argument("-o", "--output", type=Path, metavar="FILE", help=what, **options)

    def model(made: argparse.ArgumentParser) -> None:
        made.add_argument("model", help="file.py:function or package.module:function")
        made.add_argument(
            "--observed", type=_names, required=True, metavar="SITES",
            help="the sites that are data, with commas between",
        )  # fmt: skip
        kwargs(made)

    def kwargs(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "--kwargs", metavar="JSON",
            help="arguments to call the model with, or @file.json; lists become arrays",
        )  # fmt: skip

    def compiled(made: argparse.ArgumentParser) -> None:
        made.add_argument("artefact", type=Path, help="what `retrodict compile` made")

    def elsewhere(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "--model", help="the model it was compiled from, if it is not where it was"
        )

    def checking(made: argparse.ArgumentParser) -> None:
        made.add_argument("--datasets", type=_count, default=200, help="how many to try (200)")

    def particles(made: argparse.ArgumentParser) -> None:
        made.add_argument("--particles", type=_count, default=1000, help="a data set (1000)")

    def seed(made: argparse.ArgumentParser) -> None:
        made.add_argument("--seed", type=int, default=0, help="same seed, same answer (0)")

    made = command("graph", "show the structure of a model, and how it is turned round")
    model(made)
    made.add_argument(
        "--inverse", choices=get_args(Method), help="draw the model turned round, and in which way"
    )
    output(made, "a picture: .svg, .png or .dot")

    made = command("compile", "train networks that answer any data of a model; minutes, once")
    model(made)
    output(made, "the compiled model, for instance model.rd", required=True)
    made.add_argument("--minutes", type=_minutes, help="train no longer than this")
    made.add_argument("--steps", type=_count, help="gradient steps a network, at most")
    made.add_argument("--hidden", type=_sizes, metavar="SIZES", help="units a layer, as 128,128")
    made.add_argument("--components", type=_count, help="components of each mixture")
    made.add_argument("--inverse", choices=get_args(Method), default="auto", help="(auto)")
    made.add_argument("--resume", type=Path, metavar="FILE", help="go on training this one")
    made.add_argument("--force", action="store_true", help="replace a file of any kind")
    made.add_argument("--report", type=Path, metavar="FILE", help="check it too, see `check`")
    checking(made)
    particles(made)
    seed(made)

    made = command("infer", "the posterior of a data set, and whether to trust it")
    compiled(made)
    made.add_argument("data", help=".json, .csv, .npz or .nc; - for JSON on standard input")
    output(made, "the posterior: .nc for ArviZ, or its summary as .json or .csv")
    elsewhere(made)
    particles(made)
    seed(made)
    made.add_argument("--method", choices=get_args(InferMethod), default="auto", help="(auto)")
    made.add_argument("--plot", type=Path, metavar="FILE", help="a figure: .png, .svg or .pdf")
    kwargs(made)

    made = command("check", "try a compiled model on synthetic data, and report")
    compiled(made)
    output(made, "the report: .html")
    elsewhere(made)
    checking(made)
    particles(made)
    seed(made)

    made = command("demo", "run an example that comes with retrodict")
    made.add_argument("name", nargs="?", help="which; the first if none is named")
    made.add_argument("--minutes", type=_minutes, help="train no longer than this")
    made.add_argument(
        "-o", "--output", type=Path, default=Path("out"), metavar="FOLDER", help="(out)"
    )
    return root
