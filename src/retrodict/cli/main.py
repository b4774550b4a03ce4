"""The command line in; the answer on standard output, all else on standard error.

Exit status: 0 done; 1 the answer is not to be trusted; 2 the input was wrong, with one line that
says how; 3 retrodict itself failed; 130 interrupted.
"""

import argparse
import contextlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from retrodict._xla.cache import keep_programs
from retrodict.artefact import DamagedFile, NewerFormat
from retrodict.cli.arguments import parser
from retrodict.cli.commands import COMMANDS
from retrodict.cli.modelfiles import line_at_fault
from retrodict.errors import DataError, InputError, UnsupportedModel
from retrodict.saving import WrongModel

WRONG_INPUT, FAILED, INTERRUPTED = 2, 3, 130
_USERS = (InputError, DataError, UnsupportedModel, WrongModel, DamagedFile, NewerFormat, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal without Greek letters gets question marks, not a traceback.
            stream.reconfigure(errors="replace")
    given = list(sys.argv[1:] if argv is None else argv)
    options = argparse.Namespace(command=None, debug="--debug" in given, file=None, quiet=False)
    try:
        try:
            parser().parse_args(given, options)
        except SystemExit:
            return 0  # --help has been printed
        with _quietly():
            return _run(options)
    except KeyboardInterrupt:
        _complain("interrupted, and nothing was written", options)
        return INTERRUPTED
    except _USERS as error:
        _complain(_explained(error, options), options)
        return WRONG_INPUT
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        line = line_at_fault(error, options.file)
        if line is not None:
            _complain(f"{told} ({_short(options.file)}, line {line})", options)
            return WRONG_INPUT
        _complain(f"this is an error in retrodict; --debug shows where: {told}", options)
        return FAILED


def _run(options: argparse.Namespace) -> int:
    if getattr(options, "version", False):
        from importlib.metadata import version

        _print(f"retrodict {version('retrodict')}", sys.stdout)
        return 0
    if options.command is None:
        raise InputError(f"name a command: {', '.join(COMMANDS)}; see retrodict --help")
    keep_programs()
    options.progress = not options.quiet and sys.stderr.isatty()

    def say(note: str) -> None:
        if not options.quiet:
            _print(f"retrodict: {note}", sys.stderr)

    # What a model prints is no answer.
    with contextlib.redirect_stdout(sys.stderr):
        answer = COMMANDS[options.command](options, say)
    if options.json:
        _print(json.dumps(answer.record, ensure_ascii=False, allow_nan=False), sys.stdout)
    else:
        _print(answer.text, sys.stdout)
    return answer.status


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Warnings as notes of one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            _print(f"retrodict: note: {_one_line(message)}", sys.stderr)

        warnings.showwarning = show
        yield


def _explained(error: BaseException, options: argparse.Namespace) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    told = str(error)
    line = line_at_fault(error, options.file) if isinstance(error, UnsupportedModel) else None
    if line is not None:
        told += f" ({_short(options.file)}, line {line})"
    if isinstance(error, DataError) and "model_kwargs" in told:
        told += " (on the command line: --kwargs)"
    return told


def _complain(message: str, options: argparse.Namespace) -> None:
    if options.debug:
        traceback.print_exc()
    _print(f"retrodict: error: {_one_line(message)}", sys.stderr)


def _short(file: str) -> str:
    return os.path.relpath(file)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # Who was to read it has left, as `head` does; what was to be done is done nevertheless.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
