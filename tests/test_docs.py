"""The documents cannot rot: their Python runs and prints what they show, their links lead somewhere.

A page with ``<!-- serves: MODEL at HOST:PORT -->`` is run beside a server of that model; what it says of that
address is asked of the server, by its Python and by its ``curl``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from test_server import commanded, fake, serving

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
NO_RUN = re.compile(r"<!-- no-run: \S.* -->")
SERVES = re.compile(r"<!-- serves: (\S+) at (\S+) -->")
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


def asks(block: Block) -> bool:
    """Whether the block asks a server from the command line."""
    return block.language == "sh" and block.text.startswith("curl ")


@contextlib.contextmanager
def served(document: pathlib.Path) -> Iterator[tuple[str, str]]:
    """The address that a page names, and where a server that it asks for really is."""
    asked = SERVES.search(document.read_text(encoding="utf-8"))
    if asked is None:
        yield "", ""
        return
    with commanded(asked[1]) as (address, _):
        yield asked[2], address.removeprefix("http://")


WITH_PYTHON = [document for document in DOCUMENTS if any(map(runs, blocks(document)))]


def name(document: pathlib.Path) -> str:
    """Path of a document from the root."""
    return document.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", WITH_PYTHON, ids=name)
def test_python_blocks_run_and_print_what_they_show(
    document: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGITSCOPE_CACHE", str(tmp_path / "cache"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    with served(document) as (named, address):
        for block in blocks(document):
            text = block.text.replace(named, address) if named else block.text
            if block.before == OUTPUT:
                assert printed == block.text, f"{name(document)}:{block.line}: prints something else"
            elif runs(block):
                code = compile("\n" * (block.line - 1) + text, str(document), "exec")
                with contextlib.redirect_stdout(io.StringIO()) as stdout:
                    exec(code, namespace)
                printed = stdout.getvalue()
            elif named and asks(block):
                printed = curl(text, tmp_path)
        for value in namespace.values() if named else ():
            if hasattr(value, "close") and not isinstance(value, type):
                value.close()  # a connection, before its server ends


def curl(command: str, folder: pathlib.Path) -> str:
    """What a command with ``curl`` prints; an answer with another status than 200 is an error."""
    (folder / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
    found = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        env={**os.environ, "CURL_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout, command
    return found.stdout


def test_a_command_that_is_refused_is_an_error(tmp_path: pathlib.Path) -> None:
    with serving(fake()) as address:
        assert '"status":"ok"' in curl(f"curl {address}/health", tmp_path)
        with pytest.raises(AssertionError, match="Not Found"):
            curl(f"curl {address}/nothing", tmp_path)


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
