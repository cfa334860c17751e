"""The views: what the table and the HTML say is what the rows say, and nothing in a token breaks them."""

from __future__ import annotations

import io
import math
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from samples import make_logits, reference

from logitscope.logits import Logits
from logitscope.logits.html import DARK, LIGHT, html_fragment, html_page
from logitscope.logits.text import COLOURS
from logitscope.logits.view import mean_nll, percent, surprise_level, view_rows, visible


class Texts:
    """A vocabulary with the given texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def pieces(self, token_ids: Any) -> list[str]:
        return [self.texts[int(i) % len(self.texts)] for i in token_ids]


HOSTILE = Texts(
    "[red]x[/red]",
    "\x1b[31m",
    "</style><script>alert(1)</script>",
    "\n",
    "\r\n",
    "\t",
    "&lt;",
    '"',
    "\u202e",
    "",
)


def printed(logits: Logits, *, width: int = 160, top: int = 5, **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width, **options).print(logits.table(top=top))
    return out.getvalue()


def lines_of(logits: Logits, **options: Any) -> list[str]:
    return [
        line
        for line in printed(logits, **options).splitlines()
        if re.match(r" *\d+ +(prompt|gen|next)", line)
    ]


class Page(HTMLParser):
    """Parses a page strictly, and remembers what it held."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data

    def values(self, name: str) -> list[str]:
        return [value or "" for _, found, value in self.attributes if found == name]


# -- what the views show -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_length", "new_tokens"), [(5, 0), (5, 3), (1, 0), (1, 1)])
def test_view_rows_say_what_the_rows_say(prompt_length: int, new_tokens: int) -> None:
    logits = make_logits(prompt_length, new_tokens)
    want = reference(logits)
    rows = view_rows(logits, 4)
    assert [row.position for row in rows] == logits.positions.tolist()
    assert [row.kind for row in rows] == logits.kinds
    for i, row in enumerate(rows):
        probabilities = np.exp(logits.to_numpy()[i].astype(np.float64) - want["logsumexp"][i])
        best = np.argsort(-probabilities, kind="stable")[:4]
        assert [one.token_id for one in row.alternatives] == best.tolist()
        assert [one.probability for one in row.alternatives] == pytest.approx(probabilities[best], rel=1e-5)
        assert [one.text for one in row.alternatives] == [f" w{i}" for i in best]
        assert row.entropy == pytest.approx(want["entropy"][i], rel=1e-5)
        assert row.token == f" w{logits.token_ids[row.position]}"
        if row.kind == "next":
            assert (row.target, row.logprob, row.rank, row.level) == (None, None, None, None)
        else:
            assert row.target == f" w{logits.token_ids[row.position + 1]}"
            assert row.logprob == pytest.approx(want["target_logprob"][i], rel=1e-5)
            assert row.rank == want["target_rank"][i]


def test_mean_nll_has_its_standard_error() -> None:
    logits = make_logits(6, 0)
    nll = -reference(logits)["target_logprob"][:-1]
    found = mean_nll(logits)
    assert found is not None
    assert found.n == 5
    assert found.mean == pytest.approx(nll.mean(), rel=1e-5)
    assert found.standard_error == pytest.approx(nll.std(ddof=1) / math.sqrt(5), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-5)


def test_mean_nll_of_one_token_has_no_error_and_of_none_is_none() -> None:
    one = mean_nll(make_logits(2, 0))
    assert one is not None
    assert one.n == 1
    assert math.isnan(one.standard_error)
    assert mean_nll(make_logits(1, 0)) is None
    assert mean_nll(make_logits(5, 0, values=None, summary={"entropy": np.zeros(5, np.float32)})) is None


def test_surprise_levels_split_at_the_stated_probabilities() -> None:
    assert [surprise_level(math.log(p)) for p in (1, 0.91, 0.89, 0.49, 0.19, 0.049, 0.0049)] == [
        0,
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    assert surprise_level(-math.inf) == 5


@given(st.floats(0, 1))
def test_percent_is_right_to_its_last_digit(probability: float) -> None:
    shown = percent(probability)
    if shown == "<0.1%":
        assert probability < 0.0005
        return
    digit = 0.1 if "." in shown else 1.0
    assert abs(float(shown[:-1]) - 100 * probability) <= digit / 2 + 1e-9


@given(st.text())
def test_visible_is_one_printable_line(text: str) -> None:
    shown = visible(text)
    assert shown
    assert shown.isprintable()
    assert " " not in shown
    assert "\x1b" not in shown


# -- table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_has_one_line_a_row(width: int) -> None:
    logits = make_logits(5, 3)
    assert len(lines_of(logits, width=width)) == len(logits)
    assert max(map(len, printed(logits, width=width).splitlines())) <= width


def test_the_table_shows_the_numbers() -> None:
    logits = make_logits(5, 3)
    want = reference(logits)
    for i, line in enumerate(lines_of(logits)):
        position, kind, token, arrow, target, _bar, logprob, rank, entropy, *_ = line.split()
        assert (int(position), kind, arrow) == (i, logits.kinds[i], "→")
        assert token == f"␣w{logits.token_ids[i]}"
        assert target == f"␣w{logits.token_ids[i + 1]}"
        assert float(logprob) == pytest.approx(want["target_logprob"][i], abs=6e-4)
        assert int(rank) == want["target_rank"][i]
        assert float(entropy) == pytest.approx(want["entropy"][i], abs=6e-4)
        assert len(re.findall(r"%", line)) == 5


def test_the_surprise_shows_without_colour() -> None:
    bars = [re.search("[▁▂▃▅▆█]", line) for line in lines_of(make_logits(5, 3))]
    levels = [row.level for row in view_rows(make_logits(5, 3), 0)]
    assert ["▁▂▃▅▆█".index(bar[0]) for bar in bars if bar] == levels


def test_the_colours_are_used() -> None:
    text = printed(make_logits(5, 3), force_terminal=True, color_system="truecolor")
    for level in {row.level for row in view_rows(make_logits(5, 3), 0)}:
        assert level is not None
        red, green, blue = (int(COLOURS[level][i : i + 2], 16) for i in (1, 3, 5))
        assert f"38;2;{red};{green};{blue}" in text


def test_the_next_row_has_alternatives_and_no_score() -> None:
    line = lines_of(make_logits(3, 0))[-1]
    assert "(next)" in line
    assert re.search("[▁▂▃▅▆█]", line) is None
    assert line.count("%") == 5


def test_the_table_of_summaries_alone() -> None:
    full = make_logits(5, 0)
    kept = make_logits(5, 0, values=None, summary={"entropy": full.entropy()})
    text = printed(kept)
    assert "most likely" not in text
    assert f"{full.entropy()[0]:.3f}" in text


def test_hostile_tokens_stay_inert_in_the_table() -> None:
    logits = make_logits(20, 0, vocabulary=HOSTILE)
    text = printed(logits, width=250)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]x[/red]" in text
    assert len(lines_of(logits, width=250)) == 20


def test_no_more_alternatives_than_tokens() -> None:
    assert lines_of(make_logits(2, 0, vocab=3), top=9)[0].count("%") == 3
    assert "%" not in printed(make_logits(2, 0), top=0)


# -- HTML --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "logits",
    [
        make_logits(5, 3),
        make_logits(5, 0),
        make_logits(1, 0),
        make_logits(5, 3, positions=[2, 6]),
        make_logits(5, 3, vocabulary=None),
        make_logits(20, 0, vocabulary=HOSTILE),
        make_logits(5, 0, values=None, summary={"entropy": np.ones(5, np.float32)}),
        make_logits(3, 0, values=np.full((3, 13), np.nan, np.float32)),
        make_logits(
            3, 0, values=np.where(np.arange(13) < 2, 1, -np.inf).astype(np.float32)[None].repeat(3, 0)
        ),
    ],
    ids=["generated", "scored", "one", "selected", "ids", "hostile", "summaries", "nan", "masked"],
)
def test_pages_and_fragments_are_whole_and_alone(logits: Logits) -> None:
    for source in (html_page(logits), html_fragment(logits)):
        page = Page(source)
        ids = page.values("id")
        assert len(ids) == len(set(ids))
        assert set(page.values("aria-describedby")) <= set(ids)
        assert len(page.values("aria-describedby")) == len(logits)
        assert not re.search(r"https?:|url\(|@import|<script|<link|<img| src=| on\w+=", source)
        assert "nan%" not in source


def test_the_page_shows_the_text_the_numbers_and_the_facts() -> None:
    logits = make_logits(5, 3)
    want = reference(logits)
    page = Page(html_page(logits, title="A <title> & more"))
    assert "A <title> & more" in page.text
    for fact in (
        "tiny",
        "float32",
        "[7, 13] float32, raw",
        "fake (1), cpu",
        "prompt tokens",
        "generated tokens",
    ):
        assert fact in page.text
    nll = -want["target_logprob"][:4]
    assert f"{nll.mean():.3f} ± {nll.std(ddof=1) / 2:.3f} nats (standard error, n = 4)" in page.text
    for i in range(len(logits)):
        assert f" w{logits.token_ids[i]}" in page.text
        assert f"{want['target_logprob'][i]:.3f} nats".replace("-", "−") in page.text
        assert f"entropy{want['entropy'][i]:.3f} nats" in page.text
        assert f"rank{int(want['target_rank'][i])}" in page.text


def test_each_token_can_have_the_focus_and_is_coloured_by_its_level() -> None:
    logits = make_logits(5, 3)
    page = Page(html_page(logits))
    assert page.values("tabindex") == ["0"] * len(logits)
    classes = [value.split() for value in page.values("class") if value.startswith("t ")]
    levels = [f"l{row.level}" for row in view_rows(logits, 0)]
    assert [found[1] for found in classes[6:]] == levels  # the first six are the legend


def test_line_ends_show_and_break() -> None:
    source = html_page(make_logits(3, 0, vocabulary=Texts("a\nb")))
    assert source.count('a<i class="sign">↵</i><br>b') == 3


def test_several_sequences_make_one_page() -> None:
    page = Page(html_page([make_logits(3, 0), make_logits(4, 2, seed=1)]))
    assert "Sequence 1 of 2" in page.text
    assert "Sequence 2 of 2" in page.text
    assert len(page.values("tabindex")) == 3 + 5


def test_fragments_do_not_share_names() -> None:
    logits = make_logits(3, 2)
    both = Page(html_fragment(logits) + html_fragment(logits))
    assert len(both.values("id")) == len(set(both.values("id")))


def test_the_style_of_a_fragment_stays_in_it() -> None:
    source = html_fragment(make_logits(3, 0))
    name = re.findall(r'<div class="logitscope cell" id="([^"]+)"', source)[0]
    (style,) = re.findall("<style>(.*?)</style>", source, re.DOTALL)
    for rule in re.sub(r"@media[^{]*\{", "", style).split("}"):
        selectors, _, body = rule.strip().partition("{")
        if body:
            assert all(selector.startswith(f"#{name}") for selector in selectors.split(","))


def test_a_fragment_is_limited_and_says_so() -> None:
    logits = make_logits(30, 10)
    page = Page(html_fragment(logits, limit=25))
    assert "15 more tokens" in page.text
    assert len(page.values("tabindex")) == 24
    assert "n = 29" in page.text  # the totals are over all rows


def test_the_size_does_not_grow_with_the_vocabulary() -> None:
    small, large = (html_page(make_logits(4, 0, vocab=vocab)) for vocab in (100, 50_000))
    assert len(large) < 1.1 * len(small)


def test_logits_give_their_views(tmp_path: Any) -> None:
    logits = make_logits(4, 2)
    assert logits.to_html(tmp_path / "page.html") == html_page(logits)
    assert (tmp_path / "page.html").read_text("utf-8") == html_page(logits)
    assert 'class="logitscope cell"' in logits._repr_html_()
    assert logits.table(top=2).columns[-1].header == "2 most likely"


# -- colours -----------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", COLOURS)
def test_terminal_colours_are_readable_on_black_and_on_white(colour: str) -> None:
    assert contrast(colour, "#000000") >= 4.5
    assert contrast(colour, "#ffffff") >= 4.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_page_colours_are_readable(scheme: dict[str, Any]) -> None:
    for background in (scheme["page"], scheme["card"], *scheme["levels"]):
        assert contrast(scheme["text"], background) >= 7
    for background in (scheme["page"], scheme["card"]):
        assert contrast(scheme["faint"], background) >= 4.5
    for mark in scheme["marks"][2:]:
        assert contrast(mark, scheme["page"]) >= 2
    assert contrast(scheme["bar"], scheme["line"]) >= 2
