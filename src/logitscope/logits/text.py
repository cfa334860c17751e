"""The table of a sequence in a terminal: one line a row, coloured by surprise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logitscope.logits.view import ViewRow, percent, view_rows, visible

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from logitscope.logits.sequence import Logits

# Green to red, each of relative luminance 0.18: at least 4.5 : 1 against black and against white.
COLOURS: tuple[str, ...] = ("#008920", "#4f8300", "#887500", "#af6200", "#d04700", "#eb0c0c")
_BARS = "▁▂▃▅▆█"
_WIDEST_TOKEN = 16


def table(logits: Logits, top: int = 5) -> Table:
    """A ``rich`` table: position, kind, token → scored token, log-probability, rank, entropy, best tokens.

    The colour and the bar tell the surprise of the scored token, ``-log p`` in nats. Numbers that were
    not kept are blank.

    Args:
        logits: one sequence.
        top: how many of the best tokens are shown.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    made.caption = "log p and entropy in nats; colour and bar: surprise of the scored token"
    made.caption_justify = "left"
    for name in ("pos", "kind", "token → scored"):
        made.add_column(name, justify="right" if name == "pos" else "left", no_wrap=True)
    for name in ("log p", "rank", "entropy"):
        made.add_column(name, justify="right", no_wrap=True)
    shown = min(top, logits.best_known)
    if shown:
        made.add_column(f"{shown} most likely")
    rows = view_rows(logits, top)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        cells = [
            Text(str(row.position)),
            Text(row.kind, style="dim"),
            _step(row),
            _logprob(row),
            Text("" if row.rank is None else f"{row.rank:,}"),
            Text("" if row.entropy is None else f"{row.entropy:.3f}"),
            *([_best(row)] if row.alternatives else []),
        ]
        made.add_row(*cells, end_section=following is not None and following.kind != row.kind)
    return made


def _step(row: ViewRow) -> Text:
    from rich.text import Text

    scored = Text("(next)", "dim") if row.target is None else _short(row.target, _style(row))
    return Text.assemble(_short(row.token, "dim"), " → ", scored)


def _logprob(row: ViewRow) -> Text:
    from rich.text import Text

    if row.logprob is None or row.level is None:
        return Text("")
    return Text(f"{_BARS[row.level]} {row.logprob:7.3f}", _style(row))


def _best(row: ViewRow) -> Text:
    from rich.text import Text

    made = Text(no_wrap=True, overflow="ellipsis")  # so the column gives way first on a narrow terminal
    for alternative in row.alternatives:
        chosen = alternative.token_id == row.target_id
        made.append("  " if made else "")
        made.append(_short(alternative.text, f"{_style(row)} underline" if chosen else ""))
        made.append(f" {percent(alternative.probability)}", "" if chosen else "dim")
    return made


def _style(row: ViewRow) -> str:
    return "" if row.level is None else f"bold {COLOURS[row.level]}"


def _short(text: str, style: str = "") -> Text:
    from rich.text import Text

    made = Text(visible(text), style)
    made.truncate(_WIDEST_TOKEN, overflow="ellipsis")
    return made
