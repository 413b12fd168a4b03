"""Write what the planner prints today into the pages that show it.

    python tools/write_recipe_pages.py [--check] [RECIPE ...]

Every recipe's page with a block that begins with `$ llamarl plan --config-dir RECIPE` gets that
block again; all else in it stays. RECIPE limits the work to some.
--check writes nothing, and fails if a page would be written.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(ROOT.glob("recipes/*/README.md"))
BLOCK = re.compile(
    r"^```console\n(\$ llamarl plan --config-dir (\S+)\n).*?^```$", re.MULTILINE | re.DOTALL
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipes", nargs="*", help="names, such as llama31_8b_math; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it would")
    arguments = parser.parse_args()
    wanted, is_stale = set(arguments.recipes), False
    for page in PAGES:
        text = page.read_text()

        def renew(found: re.Match[str]) -> str:
            command, recipe = found.groups()
            if wanted and Path(recipe).name not in wanted:
                return found.group()
            return f"```console\n{command}{report(recipe)}```"

        renewed = BLOCK.sub(renew, text)
        if renewed != text and not arguments.check:
            page.write_text(renewed)
        is_stale |= renewed != text
        found = "as it was" if renewed == text else "stale" if arguments.check else "renewed"
        print(f"{page.relative_to(ROOT)}: {found}", flush=True)
    sys.exit(arguments.check and is_stale)


def report(recipe: str) -> str:
    """What `llamarl plan` prints."""
    command = [sys.executable, "-m", "llamarl", "plan", "--config-dir", recipe]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main()
