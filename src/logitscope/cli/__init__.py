"""The command line: results on stdout; log, progress and one-line errors on stderr."""

from logitscope.cli.app import app, main

__all__ = ["app", "main"]
