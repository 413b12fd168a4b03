"""Write the pages of the benchmarks from docs/benchmarks/*.json: one each, and the table of all.

    python tools/write_benchmark_pages.py

docs/benchmarks/NAME.md shows all of NAME.json: how it was measured, its figures, its notes. The
table of BENCHMARKS.md, between two marks there, has the figures that "headlines" name. A benchmark
that is run with `--json docs/benchmarks/NAME.json` renews the figures and keeps title, headlines
and notes. tests/unit/test_docs.py compares the pages with what this writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from harness import ROOT, shown

FOLDER = ROOT / "docs" / "benchmarks"
SUMMARY = ROOT / "BENCHMARKS.md"
MARKS = "<!-- figures, written by tools/write_benchmark_pages.py -->", "<!-- end of figures -->"
ORDER = (  # of the table; what is not here comes last
    *(
        "quickstart",
        "generate",
        "adapters",
        "training",
        "weights",
        "routes",
        "staging",
        "async",
        "streams",
        "peers",
        "sft",
        "turns",
        "store",
    ),
    *("links", "sites", "controller", "packing", "ranker", "checkpoints", "offload", "planner"),
    *("planner_external", "pools", "chaos", "searches", "fuzz"),
)
Document = dict[str, Any]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for path, text in pages().items():
        is_new = not path.is_file() or path.read_text() != text
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {'renewed' if is_new else 'as it was'}")


def pages() -> dict[Path, str]:
    """Path -> the page's text."""
    documents = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    places = {name: place for place, name in enumerate(ORDER)}
    documents.sort(key=lambda each: places.get(each["bench"], len(places)))
    found = {FOLDER / f"{each['bench']}.md": page(each) for each in documents}
    before, _, rest = SUMMARY.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return found | {SUMMARY: f"{before}{MARKS[0]}\n\n{summary(documents)}\n\n{MARKS[1]}{after}"}


def page(document: Document) -> str:
    """All that one file says."""
    console = "\n".join(f"$ {line}" for line in document["command"].splitlines())
    machine = ", ".join(f"{name} {each}" for name, each in document["machine"].items())
    blocks = [
        f"# {document.get('title', document['bench'])}",
        f"Written by `tools/write_benchmark_pages.py` from [{document['bench']}.json]"
        f"({document['bench']}.json). [All benchmarks](../../BENCHMARKS.md).",
        f"```console\n{console}\n```",
        f"Commit {document['commit']}, {document['date']}. On: {machine}.",
        *tables(document["figures"]),
        *document.get("notes", []),
    ]
    return "\n\n".join(blocks) + "\n"


def tables(figures: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Neighbouring cases with figures of the same names share a table, a line each."""
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for figure in figures:
        cases.setdefault(figure.get("case", ""), []).append(figure)

    def names(item: tuple[str, list[Mapping[str, Any]]]) -> list[str]:
        return [figure["name"] for figure in item[1]]

    for columns, group in groupby(cases.items(), names):
        items = list(group)
        if items[0][0]:
            rows = [[case, *map(shown, found)] for case, found in items]
            yield table(["", *(f"`{name}`" for name in columns)], rows)
        else:
            rows = [[f"`{each['name']}`", shown(each)] for _, found in items for each in found]
            yield table(["", "figure"], rows)


def summary(documents: Iterable[Document]) -> str:
    """The figures that matter most, with what gives them."""
    rows = []
    for document in documents:
        figures = {(each["name"], each.get("case", "")): each for each in document["figures"]}
        name = document["bench"]
        for number, headline in enumerate(document.get("headlines", [])):
            figure = figures[headline["name"], headline.get("case", "")]
            link = f"[{document['title']}](docs/benchmarks/{name}.md)" if not number else ""
            rows.append(
                [link, headline["says"], shown(figure), "" if number else program(document)]
            )
    return table(["", "what", "figure", "command"], rows)


def program(document: Document) -> str:
    """The program that measures, without its arguments."""
    words = document["command"].splitlines()[-1].split(" --")[0].split(" ARGS=")[0].split()
    words = [word for word in words if "=" not in word]
    return f"`{' '.join(['python', *words[1:]] if words[0].endswith('python') else words)}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
