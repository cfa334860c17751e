"""The command line: results on stdout; log, progress and one-line errors on stderr."""

from logitscope.cli.commands import app, main

__all__ = ["app", "main"]
