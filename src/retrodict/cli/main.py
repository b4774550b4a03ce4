"""Entry point of the command line.

The result goes to standard output, everything else to standard error. Exit status: 0 success; 1 the
result is not to be trusted; 2 invalid input, explained in one line; 3 error in retrodict; 130
interrupted.
"""

import argparse
import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from retrodict._xla.cache import enable_compilation_cache
from retrodict.artefact import DamagedFile, NewerFormat, OlderFormat
from retrodict.cli.arguments import build_parser
from retrodict.cli.commands import COMMANDS
from retrodict.cli.modelfiles import find_error_line
from retrodict.cli.resultfiles import to_json
from retrodict.errors import DataError, InputError, UnsupportedModel
from retrodict.saving import WrongModel

INVALID_INPUT, INTERNAL_ERROR, INTERRUPTED = 2, 3, 130
_INPUT_ERRORS = (
    *(InputError, DataError, UnsupportedModel, WrongModel),
    *(DamagedFile, NewerFormat, OlderFormat, OSError),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; `argv` defaults to that of the process."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Print question marks where the terminal's encoding lacks Greek letters.
            stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Defaults for errors that are raised before or while the arguments are parsed.
    debug = "--debug" in arguments
    options = argparse.Namespace(command=None, debug=debug, model_file=None, quiet=False)
    try:
        try:
            build_parser(COMMANDS).parse_args(arguments, options)
        except SystemExit:
            return 0  # after --help
        with _warnings_as_notes():
            return _run(options)
    except KeyboardInterrupt:
        _print_error("interrupted, nothing was written", options)
        return INTERRUPTED
    except _INPUT_ERRORS as error:
        _print_error(_explain(error, options), options)
        return INVALID_INPUT
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if location := _model_location(error, options):
            _print_error(f"{message} {location}", options)
            return INVALID_INPUT
        _print_error(f"error in retrodict (--debug prints the traceback): {message}", options)
        return INTERNAL_ERROR


def _run(options: argparse.Namespace) -> int:
    if getattr(options, "version", False):
        from importlib.metadata import version

        _print(f"retrodict {version('retrodict')}", sys.stdout)
        return 0
    if options.command is None:
        raise InputError(f"name a command: {', '.join(COMMANDS)}; see retrodict --help")
    enable_compilation_cache()
    options.progress = not options.quiet and sys.stderr.isatty()

    def note(message: str) -> None:
        if not options.quiet:
            _print(f"retrodict: {message}", sys.stderr)

    # The model may print; standard output is for the result only.
    with contextlib.redirect_stdout(sys.stderr):
        result = COMMANDS[options.command](options, note)
    _print(to_json(result.record) if options.json else result.text, sys.stdout)
    return result.status


@contextlib.contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Print each warning as a note of one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            _print(f"retrodict: note: {_one_line(message)}", sys.stderr)

        warnings.showwarning = show
        yield


def _explain(error: BaseException, options: argparse.Namespace) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = str(error)
    location = _model_location(error, options) if isinstance(error, UnsupportedModel) else ""
    if location:
        message += f" {location}"
    if isinstance(error, DataError) and "model_kwargs" in message:
        message += " (on the command line: --kwargs)"
    return message


def _model_location(error: BaseException, options: argparse.Namespace) -> str:
    """Return the line of the model's file where the error occurred, or an empty string."""
    line = find_error_line(error, options.model_file)
    return "" if line is None else f"({os.path.relpath(options.model_file)}, line {line})"


def _print_error(message: str, options: argparse.Namespace) -> None:
    if options.debug:
        traceback.print_exc()
    _print(f"retrodict: error: {_one_line(message)}", sys.stderr)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # The reader of the pipe has closed it, as `head` does. That is not a failure; redirect the
        # stream so that flushing it at exit does not raise again.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
