"""How a command ends: exit codes, one-line errors, and the terminal left as it was."""

from __future__ import annotations

import logging
import os
import sys
import traceback as traces
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from logitscope.engines.base import Progress as Report
from logitscope.errors import LogitscopeError

FAILED = 1
USAGE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

_WIDTH_WITHOUT_TERMINAL = 160


def say(text: str) -> None:
    """One line on stderr."""
    typer.echo(" ".join(text.split()), err=True)


def stdout() -> Console:
    """A console for results; wide where nobody's window limits it."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # tokens are any Unicode, terminals are not
    return Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL, soft_wrap=False)


@contextmanager
def command(*, traceback: bool) -> Iterator[None]:
    """Run a command's body: its errors become one line and an exit code.

    With ``traceback``, where the error came from is printed before that line.
    """
    _quiet_libraries()
    try:
        with _log():
            yield
        sys.stdout.flush()
    except typer.Exit:
        raise
    except BrokenPipeError as error:
        # Python flushes stdout once more when it ends; nobody reads it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from error
    except KeyboardInterrupt as error:
        say("interrupted")
        raise typer.Exit(INTERRUPTED) from error
    except Exception as error:
        if hasattr(error, "format_message"):
            raise  # Typer's own: a usage error
        if traceback:
            traces.print_exc()
        say(f"error: {_one_line(error, traced=traceback)}")
        raise typer.Exit(FAILED) from error


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """A line on stderr with the time that went by, while something runs; nothing without a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with _shown(Progress(*columns, console=Console(stderr=True), transient=True)) as bar:
        bar.add_task(text, total=None)
        yield


@contextmanager
def row_progress(text: str) -> Iterator[Report]:
    """A bar of rows on stderr; nothing without a terminal. Yields what engines call with (done, in all)."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeElapsedColumn(),
    )
    with _shown(Progress(*columns, console=Console(stderr=True), transient=True)) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _shown(bar: Progress) -> Iterator[Progress]:
    bar.disable = not sys.stderr.isatty()
    with bar:
        yield bar


def _one_line(error: Exception, *, traced: bool) -> str:
    if isinstance(error, LogitscopeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    hint = "" if traced else ". --traceback shows where"
    return f"{type(error).__name__}: {error}{hint}"


def _quiet_libraries() -> None:
    """Transformers and the hub keep their warnings and bars to themselves, unless the user says otherwise."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def _log() -> Iterator[None]:
    """Our own log as plain lines on stderr."""
    logger = logging.getLogger("logitscope")
    handler, level = logging.StreamHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
