"""Write the pages that follow from the code: docs/config.md, docs/metrics.md, docs/glossary.md.

    python tools/write_reference_pages.py

The config reference comes from the config's dataclasses, the metrics from
`llamarl/metrics/tensorboard.py`, the glossary from the docstrings of
`llamarl/core/records.py` and `llamarl/core/groups.py`.
tests/project/test_docs.py compares the pages with what this writes.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from json import dumps
from pathlib import Path

from llamarl.core import groups, records
from llamarl.metrics.tensorboard import DESCRIPTIONS, chart_tag
from llamarl.recipe.composition import reference
from llamarl.recipe.names_elsewhere import ELSEWHERE
from llamarl.recipe.reference import Choice, Key

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    for name, text in pages().items():
        path = DOCS / name
        is_new = not path.is_file() or path.read_text() != text
        path.write_text(text)
        print(f"docs/{name}: {'renewed' if is_new else 'as it was'}")


def pages() -> dict[str, str]:
    """File name in docs/ -> its text."""
    return {
        "config.md": config_page(),
        "metrics.md": metrics_page(),
        "glossary.md": glossary_page(),
    }


def config_page() -> str:
    known = reference()
    scalars = [key for key in known.keys.values() if "." not in key.name]
    blocks = [
        "# Config reference",
        "Written by `tools/write_reference_pages.py` from the dataclasses of `core/config/` "
        "and `trainer/losses/`. "
        "`llamarl config KEY` prints the same for one key, a section, or a name of TRL or verl.",
        "A recipe chooses one of a group by `GROUP=CHOICE` (the first is the default) and sets "
        "a key by `KEY=VALUE`:",
        table(
            ["group", "choices"],
            [[f"`{name}`", code(*choices)] for name, choices in known.groups.items()],
        ),
        "## The run",
        key_table(scalars),
    ]
    for section, choices in known.sections.items():
        blocks += [f"## {section}", *section_texts(section, choices)]
        keys = [key for key in known.keys.values() if key.name.startswith(f"{section}.")]
        blocks.append(key_table(keys))
    return "\n\n".join(blocks) + "\n"


def section_texts(section: str, choices: dict[str, Choice]) -> list[str]:
    """What the section is for, or what each choice of its group means."""
    if "" in choices:
        return [docstring(choices[""].section)]
    documents = {choice: docstring(each.section) for choice, each in choices.items()}
    is_shared = len(set(documents.values())) == 1
    lines = []
    for choice, each in choices.items():
        words = [] if is_shared else [documents[choice]]
        if each.values:
            sets = ", ".join(f"`{name}: {dumps(value)}`" for name, value in each.values.items())
            words.append(f"Sets {sets}.")
        lines.append(f"- `{section}={choice}`" + (f": {' '.join(words)}" if words else ""))
    return [*([documents.popitem()[1]] if is_shared else []), "\n".join(lines)]


def key_table(keys: list[Key]) -> str:
    rows = []
    for key in keys:
        meaning = key.meaning
        if not key.is_everywhere:
            group = key.name.partition(".")[0]
            meaning += f" Only with {code(*(f'{group}={choice}' for choice in key.choices))}."
        if key.name in ELSEWHERE:
            meaning += f" Elsewhere: {code(*ELSEWHERE[key.name].split())}."
        default = code(key.default)
        for choice, value in key.defaults.items():
            default += f", {choice}: {code(value)}" if value != key.default else ""
        rows.append([code(key.name), f"{key.type}{key.limits}", default, meaning])
    return table(["key", "type", "default", "meaning"], rows)


def metrics_page() -> str:
    rows: dict[str, list[list[str]]] = {}
    for tag, meaning in DESCRIPTIONS.items():
        shown = f"{tag}*" if tag.endswith("/") else tag
        rows.setdefault(chart_tag(tag).partition("/")[0], []).append([code(shown), meaning])
    blocks = [
        "# Metrics",
        "Written by `tools/write_reference_pages.py` from "
        "[tensorboard.py](../llamarl/metrics/tensorboard.py). TensorBoard shows a run's metrics in "
        "these sections, with these descriptions. Its tags are those below behind their section: "
        '`reward/mean` is "1_outcome/reward/mean" there, for it sorts sections by name. '
        "metrics.jsonl, W&B, MLflow and trackio have the tags as they stand here. A tag that "
        "ends in `*` stands for several.",
    ]
    for section in sorted(rows):
        number, _, name = section.partition("_")
        blocks += [f"## {number}. {name}", table(["tag", "meaning"], rows[section])]
    return "\n\n".join(blocks) + "\n"


def glossary_page() -> str:
    rows = [
        [f"**{name}**", " ".join((found.__doc__ or "").partition("\n\n")[0].split())]
        for module in (records, groups)
        for name, found in vars(module).items()
        if inspect.isclass(found) and found.__module__ == module.__name__
        if dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
    ]
    return (
        "# Glossary\n\nOne word per thing, the same in code, config and metrics. Written by "
        "`tools/write_reference_pages.py` from the docstrings of "
        "[records.py](../llamarl/core/records.py) and [groups.py](../llamarl/core/groups.py), "
        "where each record has its shapes and units.\n\n"
        + table(["word", "meaning"], sorted(rows))
        + "\n"
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def code(*words: str) -> str:
    return ", ".join(f"`{word}`" for word in words)


def docstring(section: type) -> str:
    return " ".join((section.__doc__ or "").split())


if __name__ == "__main__":
    main()
