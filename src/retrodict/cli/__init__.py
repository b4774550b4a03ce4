"""The command line."""

from retrodict.cli.main import main

__all__ = ["main"]
