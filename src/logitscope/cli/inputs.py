"""Where prompts come from: arguments, a file, or stdin."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from logitscope.errors import EmptyInputError, InputError


def prompts(texts: list[str] | None, file: Path | None, *, whole: bool) -> list[str]:
    """The prompts that were asked for, one or more.

    Raises:
        InputError: the file is no UTF-8 text, or holds no prompt.
        OSError: the file cannot be read.
    """
    if texts and (file is not None or whole):
        raise typer.BadParameter("give either TEXT or a file, not both.")
    if texts:
        return [_text(text.encode(errors="surrogateescape"), "TEXT") for text in texts]
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give TEXT or --file, or pipe text in.")
    from_stdin = file is None or str(file) == "-"
    where = "stdin" if from_stdin else str(file)
    content = _text(sys.stdin.buffer.read() if from_stdin else Path(where).read_bytes(), where)
    found = [content] if whole else [line for line in content.splitlines() if line.strip()]
    if not content or not found:
        raise EmptyInputError("no prompt", where=where, fix="Give a line of text or more.")
    return found


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("no UTF-8 text", where=where, got=f"byte {error.start}: {error.reason}") from error
