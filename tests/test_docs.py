"""The documents cannot rot: their Python runs and prints what they show, their links lead somewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
NO_RUN = re.compile(r"<!-- no-run: \S.* -->")
OUTPUT = "<!-- output -->"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, its first line's number, and the line before the fence."""

    language: str
    text: str
    line: int
    before: str


def blocks(document: pathlib.Path) -> list[Block]:
    """Fenced blocks of a document, in order."""
    found, opened, before = [], None, ""
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if opened is None and line.startswith("```"):
            opened, language, lines = number, line[3:].strip(), list[str]()
        elif opened is not None and line == "```":
            found.append(Block(language, "\n".join(lines) + "\n", opened + 1, before))
            opened, before = None, ""
        elif opened is not None:
            lines.append(line)
        elif line.strip():
            before = line.strip()
    assert opened is None, f"{document.name}:{opened}: the block is never closed"
    return found


def runs(block: Block) -> bool:
    """Whether the block is Python that is meant to run here."""
    return block.language == "python" and not NO_RUN.fullmatch(block.before)


WITH_PYTHON = [document for document in DOCUMENTS if any(map(runs, blocks(document)))]


def name(document: pathlib.Path) -> str:
    """Path of a document from the root."""
    return document.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", WITH_PYTHON, ids=name)
def test_python_blocks_run_and_print_what_they_show(
    document: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks(document):
        if block.before == OUTPUT:
            assert printed == block.text, f"{name(document)}:{block.line}: prints something else"
        elif runs(block):
            code = compile("\n" * (block.line - 1) + block.text, str(document), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(code, namespace)
            printed = stdout.getvalue()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_relative_links_lead_to_files_and_headings(document: pathlib.Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = [
        link
        for link in ("".join(match.groups(default="")) for match in LINK.finditer(text))
        if not re.match(r"[a-z]+:", link) and not leads_somewhere(document, link)
    ]
    assert not broken


def leads_somewhere(document: pathlib.Path, link: str) -> bool:
    """Whether the linked file exists, and has the heading that the link names."""
    path, _, anchor = link.partition("#")
    target = (document.parent / path) if path else document
    return target.exists() and (not anchor or anchor in headings(target))


def headings(document: pathlib.Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_architecture_names_every_module() -> None:
    package = ROOT / "src" / "logitscope"
    modules = {
        ".".join(file.relative_to(package).with_suffix("").parts)
        for file in package.rglob("*.py")
        if not file.name.startswith("__")
    }
    named = set(
        re.findall(
            r"^\|[^|]*\| `([\w.]+)` \|", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.M
        )
    )
    assert named == modules


def test_readme_starts_with_an_example_and_a_short_result() -> None:
    first, second = blocks(ROOT / "README.md")[:2]
    assert runs(first)
    assert len(first.text.splitlines()) <= 10
    assert second.before == OUTPUT
    assert len(second.text.splitlines()) <= 8
