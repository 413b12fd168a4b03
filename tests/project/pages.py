"""The pages a reader sees, and what stands in them: blocks, commands, links, paths, tables."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.places import ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "recipes/*/README.md")
    for path in ROOT.glob(pattern)
    if "_build" not in path.parts
)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNABLE = re.compile(r"^<!-- runs -->\n```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str, language: str = "") -> list[str]:
    return [body for found, body in FENCED.findall(text) if found == language]


def prose(text: str) -> str:
    """The text without its blocks."""
    return FENCED.sub("", text)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of this page may say after the #, as the forge makes it."""
    headings = HEADING.findall(prose(page.read_text()))
    words = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings)
    return {word.replace(" ", "-") for word in words}


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every table, without its head."""
    found = re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE)
    rows = [[_cells(line) for line in table.splitlines()] for table in found]
    return [table[2:] for table in rows]


def _cells(line: str) -> list[str]:
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@dataclass(frozen=True)
class Command:
    """A command that a page shows for the reader to type: the program's name, and what follows."""

    page: Path
    program: str
    arguments: tuple[str, ...]


def commands(page: Path) -> list[Command]:
    """After `$ ` in console blocks, and in code within a line if it begins as one of ours does."""
    text = page.read_text()
    lines = [
        line.removeprefix("$ ")
        for body in blocks(text, "console")
        for line in body.splitlines()
        if line.startswith("$ ")
    ]
    lines += [code for code in INLINE.findall(prose(text)) if re.match(r"(make|llamarl) \S", code)]
    found = []
    for line in lines:
        words = shlex.split(re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line))
        found.append(Command(page, Path(words[0]).name, tuple(words[1:])))
    return found


ALL_COMMANDS = [command for page in PAGES for command in commands(page)]
