"""Writes ``docs/cli.md`` from the command line's own help: ``python tools/cli_docs.py [--check]``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from logitscope.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

INTRODUCTION = """\
# Command line

<!-- Written by tools/cli_docs.py from the commands' own help: change it there. -->

Results go to stdout; log, progress bars and errors go to stderr. An error is one line that says what to do
about it; `--traceback` (or `LOGITSCOPE_TRACEBACK=1`) shows where it came from.

| exit code | means |
|---|---|
| 0 | done |
| 1 | the command failed |
| 2 | it was not called as its help says |
| 130 | interrupted |
| 141 | what read its output was closed |

`LOGITSCOPE_CACHE` is the folder for converted GGUF models and fetched heads; by default it is the
platform's cache folder.

In the table, `log p` is the log-probability of the scored token and `entropy` that of the whole distribution,
both in nats; `rank` 1 is the best token. Spaces show as `␣`, line ends as `↵`.

"""

JSON = """\
## JSON

With `--json`, `logits` and `generate` print one document for each result, one a line, in ASCII. Arrays with
an entry a row are in the order of `positions`. Full rows never come as JSON: save them with `--out`.

| field | holds |
|---|---|
| `model`, `quantization`, `engine`, `model_dtype` | what made the result |
| `dtype`, `shape`, `stage` | of the kept logits `[rows, vocab_size]`; `dtype` null: only summaries |
| `prompt_length`, `token_ids`, `tokens` | the whole sequence; incomplete UTF-8 shows as U+FFFD |
| `positions`, `kinds` | of each row; kinds are `prompt`, `generated`, `next` |
| `targets` | the token that each row scores; -1 where the sequence ends |
| `summary` | `target_logprob`, `target_rank`, `entropy` of each row; with `--summary` all |
| `top_k` | `token_ids`, `tokens`, `logprobs` of the best tokens of each row, as many as `--top` |
| `text`, `finish_reason`, `stop`, `seed`, `prompt_index`, `sample_index` | of a generation |

JSON has no NaN and no infinities: they are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. A row without
a target has `"NaN"` in its target's numbers and -1 in its rank. Other numbers are float32 in their shortest
form.
"""


def page() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name="logitscope")
    parts = [
        INTRODUCTION,
        *(section(name, command, context) for name, command in group.commands.items()),
        JSON,
    ]
    return "".join(parts)


def section(name: str, command: Any, parent: Any) -> str:
    """One command: what it does, its usage, its arguments and options."""
    context = command.context_class(command, info_name=name, parent=parent)
    records = [parameter.get_help_record(context) for parameter in command.params]
    lines = "".join(f"| `{escaped(names)}` | {escaped(meaning)} |\n" for names, meaning in records)
    return (
        f"## {context.command_path}\n\n{command.help.strip()}\n\n"
        f"```text\n{' '.join([context.command_path, '[OPTIONS]', *arguments(command)])}\n```\n\n"
        f"| argument or option | meaning |\n|---|---|\n{lines}\n"
    )


def arguments(command: Any) -> Iterator[str]:
    """The arguments as a usage line names them."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            many = "..." if parameter.nargs == -1 else ""
            yield f"{parameter.metavar}{many}" if parameter.required else f"[{parameter.metavar}]{many}"


def escaped(text: str) -> str:
    """Text inside a table's cell."""
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write the page, or compare it; 1 when it is not current."""
    if "--check" not in arguments:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.name} is not current: run python tools/cli_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
