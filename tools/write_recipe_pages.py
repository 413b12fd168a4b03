"""Write what the planner prints today into the pages that show it.

    python tools/write_recipe_pages.py [--check] [RECIPE ...]

Every page with a block that begins with `$ llamarl plan --config-dir RECIPE` (the recipes' pages
and docs/planning.md) gets that block again; all else in it stays. RECIPE limits the work to some.
--check writes nothing, and fails if a page would be written.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLANNING = ROOT / "docs" / "planning.md"
PAGES = [*sorted(ROOT.glob("recipes/*/README.md")), PLANNING]
BLOCK = re.compile(
    r"^```console\n(\$ llamarl plan --config-dir (\S+)\n).*?^```$", re.MULTILINE | re.DOTALL
)
COMPARED = ": published (LlamaRL"  # from here on, a table that docs/planning.md shows
SHORT_KINDS = (  # memory that docs/planning.md leaves out
    *("snapshot", "transfer", "unsharded", "recomputation"),
    *("reduction", "logits"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipes", nargs="*", help="names, such as llama31_8b_math; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it would")
    arguments = parser.parse_args()
    wanted, is_stale = set(arguments.recipes), False
    for page in PAGES:
        text = page.read_text()

        def renew(found: re.Match[str], page: Path = page) -> str:
            command, recipe = found.groups()
            if wanted and Path(recipe).name not in wanted:
                return found.group()
            return f"```console\n{command}" + "\n".join(excerpt(page, report(recipe))) + "\n```"

        renewed = BLOCK.sub(renew, text)
        if renewed != text and not arguments.check:
            page.write_text(renewed)
        is_stale |= renewed != text
        found = "as it was" if renewed == text else "stale" if arguments.check else "renewed"
        print(f"{page.relative_to(ROOT)}: {found}", flush=True)
    sys.exit(arguments.check and is_stale)


@lru_cache
def report(recipe: str) -> str:
    """What `llamarl plan` prints."""
    command = [sys.executable, "-m", "llamarl", "plan", "--config-dir", recipe]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def excerpt(page: Path, printed: str) -> Iterator[str]:
    """The lines that a page shows; "..." stands for those after them."""
    for line in printed.splitlines():
        is_short = page == PLANNING
        if line.startswith("- ") if is_short else COMPARED in line:
            yield "..."
            return
        if not (is_short and line.startswith(SHORT_KINDS)):
            yield line


if __name__ == "__main__":
    main()
