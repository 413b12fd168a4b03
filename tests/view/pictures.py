"""Take the pictures of docs/view.md from the page of a run that has episodes.

python -m tests.view.pictures RUN

Writes docs/pictures/view.png, a rollout whose turns were written by several versions, and
docs/pictures/view_evaluations.png. RUN/view.html must be there (`llamarl view RUN`), and chromium.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.places import ROOT
from tests.view.browser import browser

PICTURES = ROOT / "docs" / "pictures"
SIZE = 1120, 700
MIXED = """data.rollouts.filter((each) => each.tokens && each.advantage && each.turns.length > 4
  && each.version_min < each.version_max).map((each) => each.row_id)[0]"""
NEWEST = """((each) => each.tokens.token_versions.indexOf(each.version_max))(byRow.get('{}'))"""


def main() -> None:
    address = f"file://{Path(sys.argv[1]).resolve()}/view.html"
    with browser() as page:
        page.show(address, *SIZE)
        row = page.value(MIXED)
        page.show(f"{address}#outcome=trained&row={row}", *SIZE)
        page.value("document.querySelector('#colours').scrollIntoView()")
        page.point(f"[data-token='{page.value(NEWEST.format(row))}']")
        page.picture(PICTURES / "view.png")
        page.show(f"{address}#tab=evaluations&kind=learnt", *SIZE, theme="dark")
        page.picture(PICTURES / "view_evaluations.png")


if __name__ == "__main__":
    main()
