"""The text of a sequence as HTML: coloured by surprise, with the numbers and alternatives of each token.

No script and no network: a token's details are elements beside it that appear when the pointer is over
it, or when it has the keyboard's focus.
"""

from __future__ import annotations

import html
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from logitscope.logits.view import (
    LEVEL_PROBABILITIES,
    Alternative,
    ViewRow,
    mean_nll,
    percent,
    pieces,
    view_rows,
    visible,
)

if TYPE_CHECKING:
    from logitscope.logits.sequence import Logits

LIGHT = {
    "text": "#1c1d20",
    "faint": "#5c6068",
    "page": "#ffffff",
    "card": "#ffffff",
    "line": "#d5d8dd",
    "bar": "#4a7bd0",
    "levels": ("#dff2e1", "#eaf1c0", "#faeaa6", "#fdd495", "#f9b387", "#f18e82"),
    "marks": ("#8cc79a", "#a3b350", "#c29c1e", "#cb7d1c", "#c4541f", "#b3202c"),
}
DARK = {
    "text": "#eceef1",
    "faint": "#a4a9b3",
    "page": "#16181c",
    "card": "#23262c",
    "line": "#3d424b",
    "bar": "#6d9cf0",
    "levels": ("#173622", "#2e3d14", "#47390a", "#5b340d", "#6c2b17", "#821f26"),
    "marks": ("#35704a", "#6a8030", "#a88a26", "#d08a35", "#e77a4c", "#ff7a80"),
}
"""Colours of both schemes. Text is at least 4.5 : 1 against every background that it stands on."""

_TOP = 5


def html_page(logits: Logits | Sequence[Logits], title: str | None = None) -> str:
    """A self-contained HTML page with one or more sequences.

    Its size grows with the tokens, never with the vocabulary: about 1 kB a token.

    Args:
        logits: one sequence, or several.
        title: heading of the page; ``Logits of`` the model by default.
    """
    from logitscope.logits.sequence import Logits

    members = [logits] if isinstance(logits, Logits) else list(logits)
    heading = html.escape(title or f"Logits of {members[0].identity.model}")
    sections = []
    for i, member in enumerate(members):
        name = f"<h2>Sequence {i + 1} of {len(members)}</h2>" if len(members) > 1 else ""
        sections.append(f"<section>{name}{_facts(member)}{_text(member, f's{i}')}</section>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{heading}</title><style>{_style('.logitscope')}{_PAGE_STYLE}</style></head>\n"
        f'<body><main class="logitscope page"><h1>{heading}</h1>{_legend()}\n'
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )


def html_fragment(logits: Logits, limit: int = 256) -> str:
    """One sequence for a notebook cell; several fit one document.

    Args:
        logits: one sequence.
        limit: the most tokens that are shown; the rest is counted.
    """
    name = f"ls-{secrets.token_hex(4)}"
    rest = len(logits.token_ids) - limit
    more = f'<p class="faint">{rest:,} more tokens: to_html() shows all.</p>' if rest > 0 else ""
    return (
        f'<div class="logitscope cell" id="{name}">'
        f"<style>{_style(f'#{name}')}{_CELL_RULES.replace('&', f'#{name}')}</style>"
        f"{_facts(logits)}{_legend()}{_text(logits, name, limit)}{more}"
        '<p class="hint faint">Point at a token, or move to it with the tab key.</p></div>'
    )


def _text(logits: Logits, name: str, limit: int | None = None) -> str:
    """The tokens in order, each coloured by the row that scores it, each with its card."""
    ids = logits.token_ids[:limit]
    shown = logits if limit is None else logits[np.flatnonzero(logits.positions < limit)]
    rows = {row.position: row for row in view_rows(shown, _TOP)}
    known = logits.vocabulary is not None
    parts = []
    for i, text in enumerate(pieces(logits, ids)):
        if i == logits.prompt_length:
            parts.append('<span class="part">generated</span>')
        parts.append(_token(text if known else f"{text} ", rows.get(i - 1), f"{name}-{i}"))
    following = rows.get(len(logits.token_ids) - 1)
    if following is not None:
        parts.append(_token("next", following, f"{name}-next"))
    return f'<div class="text">{"".join(parts)}</div>'


def _token(text: str, row: ViewRow | None, name: str) -> str:
    shown = _flowing(text)
    if row is None:
        return f'<span class="t">{shown}</span>'
    kind = "next" if row.target is None else f"l{row.level}" if row.level is not None else ""
    return (
        f'<span class="t {kind}" tabindex="0" aria-describedby="{name}">{shown}</span>'
        f'<div class="card" role="tooltip" id="{name}">{_card(row)}</div>'
    )


def _flowing(text: str) -> str:
    """A token inside running text: line ends are shown and break, other invisible characters are shown."""
    shown = html.escape(visible(text, space=" "))
    return shown.replace("↵", '<i class="sign">↵</i><br>') if "\n" in text else shown


def _card(row: ViewRow) -> str:
    scored = "the next token" if row.target is None else f"<b>{_inline(row.target)}</b>"
    probability = "" if row.logprob is None else f" {_percent(math.exp(row.logprob))}"
    numbers = {
        "log-probability": None if row.logprob is None else f"{row.logprob:.3f} nats".replace("-", "−"),
        "rank": None if row.rank is None else f"{row.rank:,}",
        "entropy": None if row.entropy is None else f"{row.entropy:.3f} nats",
        "row": f"{row.position}, {row.kind}",
    }
    facts = "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in numbers.items() if v is not None)
    return f"<div><p>{_inline(row.token)} → {scored}{probability}</p><dl>{facts}</dl></div>{_table(row)}"


def _table(row: ViewRow) -> str:
    if not row.alternatives:
        return ""
    lines = "".join(_line(one, chosen=one.token_id == row.target_id) for one in row.alternatives)
    return f"<table><caption>most likely</caption><tbody>{lines}</tbody></table>"


def _line(one: Alternative, *, chosen: bool) -> str:
    text = f"<b>{_inline(one.text)}</b>" if chosen else _inline(one.text)
    width = f"{100 * one.probability:.1f}%"
    return (
        f'<tr><th scope="row">{text}</th><td class="bar"><span><i style="width:{width}"></i></span></td>'
        f"<td>{_percent(one.probability)}</td></tr>"
    )


def _percent(probability: float) -> str:
    return html.escape(percent(probability))


def _inline(text: str) -> str:
    shown = visible(text)
    return f"<bdi>{html.escape(shown if len(shown) <= 40 else shown[:39] + '…')}</bdi>"


def _facts(logits: Logits) -> str:
    identity = logits.identity
    values = "only summaries" if logits.values is None else str(logits.dtype).removeprefix("torch.")
    rows, vocab = logits.shape
    facts = {
        "model": identity.model,
        "weights": f"{identity.dtype}{f' ({identity.quantization})' if identity.quantization else ''}",
        "logits": f"[{rows:,}, {vocab:,}] {values}, {logits.stage}",
        "engine": f"{identity.engine} ({identity.engine_version}), {identity.device}",
        **{f"{name} tokens": text for name, text in _totals(logits)},
    }
    items = "".join(
        f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items()
    )
    return f'<dl class="facts">{items}</dl>'


def _totals(logits: Logits) -> Iterator[tuple[str, str]]:
    for name, part in (("prompt", logits.prompt), ("generated", logits.generated)):
        nll = mean_nll(part)
        if nll is not None:
            error = "" if math.isnan(nll.standard_error) else f" ± {nll.standard_error:.3f}"
            yield (
                name,
                f"mean −log p {nll.mean:.3f}{error} nats (standard error, n = {nll.n:,}), "
                f"perplexity {nll.perplexity:,.2f}",
            )


def _legend() -> str:
    bounds = [f"p ≥ {p:g}" for p in LEVEL_PROBABILITIES] + [f"p < {LEVEL_PROBABILITIES[-1]:g}"]
    items = "".join(f'<span class="t l{i}">{html.escape(text)}</span> ' for i, text in enumerate(bounds))
    return f'<p class="legend">probability of the token: {items}</p>'


def _variables(scheme: Mapping[str, Sequence[str]]) -> str:
    single = "".join(f"--{k}:{v};" for k, v in scheme.items() if isinstance(v, str))
    levels = "".join(f"--l{i}:{colour};" for i, colour in enumerate(scheme["levels"]))
    return single + levels + "".join(f"--m{i}:{colour};" for i, colour in enumerate(scheme["marks"]))


def _style(root: str) -> str:
    """The look of everything inside ``root``, a CSS selector."""
    levels = "".join(
        f"{root} .l{i}{{background:var(--l{i});border-bottom:{i}px solid var(--m{i})}}"
        for i in range(len(LEVEL_PROBABILITIES) + 1)
    )
    return (
        f"{root}{{{_variables(LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{{root}{{{_variables(DARK)}}}}}"
        + levels
        + _RULES.replace("&", root)
    )


_RULES = """
&{color-scheme:light dark;color:var(--text);background:var(--page);font:15px/1.5 system-ui,sans-serif;
text-align:left}
& .text{font:16px/2.15 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre-wrap;
overflow-wrap:anywhere;margin:.5em 0}
& .t{padding:.18em 0 .1em;border-radius:3px;-webkit-box-decoration-break:clone;box-decoration-break:clone}
& .text .t{box-shadow:inset -1px 0 var(--page)}
& .text .t[tabindex]{cursor:default}
& .t:focus,& .text .t[tabindex]:hover{outline:2px solid var(--text);outline-offset:1px}
& .next{border:1px dashed var(--faint);color:var(--faint);padding:.1em .5em;margin-left:.3em}
& .sign{font-style:normal}
& .part{font:600 12px/1 system-ui,sans-serif;color:var(--faint);border-left:2px solid var(--faint);
padding:.2em .5em;margin:0 .2em 0 .5em;white-space:nowrap}
& .faint{color:var(--faint)}
& .legend{color:var(--faint);margin:.6em 0;line-height:2}
& .legend .t{color:var(--text);padding:.1em .5em;white-space:nowrap}
& dl{margin:0}
& dt{color:var(--faint)}
& dd{margin:0}
& .facts{display:grid;gap:.1em 1em}
& .facts div{display:grid;grid-template-columns:9.5em 1fr;gap:1em}
& .card{display:none;box-sizing:border-box;color:var(--text);background:var(--card);
border:1px solid var(--line);border-radius:8px;padding:.7em 1em;z-index:9;
font:14px/1.45 system-ui,sans-serif;white-space:normal;gap:.4em 2em}
& .t:hover+.card,& .t:focus+.card{display:flex;flex-wrap:wrap}
& .t:hover+.card{z-index:10}
& .card p{margin:0 0 .4em;font-size:15px}
& .card bdi{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
& .card dl div{display:grid;grid-template-columns:8em 1fr}
& .card table{border-collapse:collapse;border:0;margin:0;font:inherit;color:inherit}
& .card caption{text-align:left;color:var(--faint);padding:0}
& .card tr,& .card td,& .card th{background:none;border:0;padding:0 .8em 0 0;font-weight:400;text-align:left;
line-height:1.45}
& .card td:last-child{text-align:right;padding:0;font-variant-numeric:tabular-nums}
& .card b{font-weight:700}
& .card td.bar{padding-right:.8em}
& .bar span{display:block;width:8em;background:var(--line);border-radius:2px}
& .bar i{display:block;height:.7em;background:var(--bar);border-radius:2px;min-width:1px}
@media (forced-colors:active){& .bar i{background:CanvasText}}
"""

_PAGE_STYLE = """
body{margin:0;background:#fff}
@media (prefers-color-scheme:dark){body{background:#16181c}}
.page{max-width:62rem;margin:0 auto;padding:1.5rem 1.5rem 14rem}
.page h1{font-size:1.5rem;line-height:1.2;margin:0 0 .3em}
.page h2{font-size:1.1rem;margin:1.6em 0 .3em}
.page .legend{position:sticky;top:0;background:var(--page);padding:.3em 0;z-index:5}
.page .card{position:fixed;bottom:1rem;left:1rem;max-width:calc(100vw - 2rem);
box-shadow:0 4px 18px rgb(0 0 0/.22)}
@supports (anchor-name:--a){
.page .t:hover,.page .t:focus{anchor-name:--token}
.page .text:has(.t:hover) .t:focus:not(:hover){anchor-name:none}
.page .text:has(.t:hover) .t:focus:not(:hover)+.card{display:none}
.page .card{position-anchor:--token;position-area:bottom span-right;bottom:auto;left:auto;margin:6px 0;
position-try-fallbacks:flip-block,flip-inline,flip-block flip-inline;width:max-content}
}
@media print{.page{padding:0}.page .card{display:none!important}}
"""


_CELL_RULES = """
&{position:relative;padding:.6em .8em 12.5em;border-radius:6px}
& .hint,& .card{position:absolute;left:.8em;right:.8em;bottom:.8em;box-sizing:border-box;margin:0}
& .hint{height:11.3em;border:1px dashed var(--line);border-radius:8px;padding:.7em 1em}
& .card{height:12.1em;overflow:auto}
& .text:has(.t:hover) .t:focus:not(:hover)+.card{display:none}
"""
"""In a notebook the details stand below the text, where nothing can cut them off."""
