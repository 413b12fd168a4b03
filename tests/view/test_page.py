"""The page of `llamarl view` in a browser: what is seen, clicked and linked to."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from llamarl.view.page import view
from tests.random_search import searched
from tests.view.browser import Browser, browser
from tests.viewed_run import ADDED, ATTACK, DAMAGED_JSON, change_value, write_run

pytestmark = pytest.mark.browser
EPISODE = "#row=0"  # of two turns; its tokens are of versions 3 and 4


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_run(tmp_path_factory.mktemp("run"))
    view([str(folder)])
    return f"file://{folder}/view.html"


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def page(opened: Browser, address: str) -> Iterator[Browser]:
    """The page as it first appears; in the end, what holds after each test."""
    opened.leave()
    opened.requests.clear()
    opened.errors.clear()
    opened.show(address)
    yield opened
    assert opened.errors == []
    assert {each.partition("#")[0] for each in opened.requests} <= {address}, "nothing is loaded"
    assert opened.value("window.hacked") is None
    assert opened.value("document.querySelectorAll('img, #b, iframe').length") == 0
    assert opened.value("document.scripts.length") == 2


def rows(page: Browser) -> list[str]:
    found: list[str] = page.value(
        "[...document.querySelectorAll('#list li')].map((each) => each.dataset.row)"
    )
    return found


def hash_of(page: Browser) -> str:
    found: str = page.value("location.hash")
    return found


def test_all_rollouts_are_listed_and_a_click_shows_one(page: Browser, address: str) -> None:
    assert page.text("#shown") == "15 kept rollouts"
    assert page.text("#count") == "15 of 15 rollouts"
    assert len(rows(page)) == 15
    page.click("#list li[data-row='0']")
    assert hash_of(page) == EPISODE
    assert page.text("#rollout h2") == "rollout 0, step 5, group 11"
    facts = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))
    assert facts["prompt"] == "train.jsonl:5"
    assert (facts["outcome"], facts["reward"], facts["advantage"]) == ("trained", "1", "0.5")
    assert facts["written by versions"] == "3 to 4"
    assert (facts["trained at version"], facts["staleness"]) == ("4", "1")
    speakers = page.texts(".speaker")
    assert speakers[:4] == ["prompt", "model, turn 1", "observation", "model, turn 2"]
    assert page.texts(".text")[1:4] == ["ask: 6*7", "42", " 42 \u20ac"]
    page.press("ArrowDown")
    assert hash_of(page) == "#row=1"
    assert page.text("#rollout h2").startswith("rollout 1,")


def test_tokens_are_coloured_by_what_is_chosen_and_observations_never(
    page: Browser, address: str
) -> None:
    page.show(address + EPISODE)
    first, later, observed = (f"[data-token='{i}']" for i in (0, 10, 8))

    def colours() -> tuple[str, ...]:
        return tuple(page.style(each, "background-color") for each in (first, later, observed))

    clear = "rgba(0, 0, 0, 0)"
    assert page.texts("#legend > span") == ["version 3", "version 4"]
    seen = {"version": colours()}
    assert len(set(seen["version"])) == 3, "two versions, and none"
    for mode in ("ratio", "advantage", "clip", "difference", "log-prob", "none"):
        page.click(f"[data-colour='{mode}']")
        assert f"colour={mode}" in hash_of(page)
        assert page.value(f"document.querySelector('[data-colour={mode}]').ariaPressed") == "true"
        seen[mode] = colours()
    assert {each[2] for each in seen.values()} == {clear}
    assert seen["none"] == (clear,) * 3
    assert len({each[:2] for each in seen.values()}) == 7, "each choice looks different"
    page.show(address + f"{EPISODE}&colour=clip")
    clipped, kept = (page.style(f"[data-token='{i}']", "background-color") for i in (1, 0))
    assert clipped != kept
    assert page.style(observed, "color") == page.style(".text.observation", "color")
    assert page.style(".text.observation", "background-color") != clear, "grey"


def test_a_tooltip_has_the_numbers_of_a_token(page: Browser, address: str) -> None:
    page.show(address + EPISODE)
    page.point("[data-token='1']")
    page.wait("!document.querySelector('#tip').hidden")
    lines = dict(line.split(maxsplit=1) for line in page.text("#tip").splitlines()[1:])
    assert page.text("#tip").startswith('"s"  id')
    assert lines == {
        "version": "3, staleness 1",
        "generator": "-0.125",
        "trainer": "0.575",
        "difference": "0.7",
        "ratio": "2.014",
        "weight": "1, clipped",
        "advantage": "0.5",
    }
    page.point("[data-token='9']")
    page.wait("document.querySelector('#tip').innerText.includes('no version wrote it')")
    page.point("h1")
    page.wait("document.querySelector('#tip').hidden")


FILTERS = {
    "step_from=7&step_to=8": {"4", "5", "6", "7", "13", "14"},
    "reward_from=0.9": {"0", "12", "13"},
    "reward_from=0.5&reward_to=0.5": {"3", "5", "7", "9"},
    "length_from=10&length_to=14": {"2", "4", "6"},
    "staleness_from=1": {"0", "3", "5", "7", "9"},
    "outcome=dropped%3A+equal_rewards": {"10"},
    "prompt=SUM+6": {"4", "5"},
    "prompt=train.jsonl%3A5": {"0", "1"},
    "text=yyyyyyyyyyyyyy": {"6", "8"},
    "text=hacked": {"10"},
    "prompt=nowhere": set(),
}


@pytest.mark.parametrize("query", FILTERS)
def test_a_link_shows_what_its_filters_let_through(page: Browser, address: str, query: str) -> None:
    page.show(address + f"#{query}")
    assert {*rows(page)} == FILTERS[query]
    assert page.text("#count") == f"{len(FILTERS[query])} of 15 rollouts"
    names = [pair.partition("=")[0] for pair in query.split("&")]
    fields = "document.querySelector('#filters').elements"
    values = page.value(f"{json.dumps(names)}.map((name) => {fields}[name].value)")
    assert all(values), "the fields say so too"


def test_what_is_written_into_a_filter_is_in_the_address(page: Browser, address: str) -> None:
    page.write("[name=step_from]", "7")
    page.write("[name=step_to]", "7")
    assert hash_of(page) == "#step_from=7&step_to=7"
    assert {*rows(page)} == {"4", "5"}
    page.write("[name=prompt]", "sum")
    assert "prompt=sum" in hash_of(page)
    link = page.value("location.href")
    page.leave()
    page.show(link)
    assert {*rows(page)} == {"4", "5"}
    page.value("document.querySelector('[name=sort]').value = 'reward'")
    page.value(
        "document.querySelector('[name=sort]').dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert rows(page) == ["5", "4"], "the best first"


def test_texts_of_models_and_prompts_stay_text(page: Browser, address: str) -> None:
    page.show(address + "#row=10")
    assert page.texts(".text")[:2] == [ATTACK + ADDED, ATTACK]
    page.click("[data-colour='ratio']")
    assert "had no pass" in page.text("#legend")
    assert ATTACK in page.text("#list li[data-row='10']")
    page.show(address + "#tab=evaluations")
    assert page.texts("td.question") == [f"held 1? {ATTACK}", f"held 2? {ATTACK}"]
    page.show(address + "#prompt=%3Cimg+src%3Dx+onerror%3D%22window.hacked%3D1%22%3E")
    assert {*rows(page)} == {"10", "11", "12", "13", "14"}
    assert page.value("document.querySelector('[name=prompt]').value").startswith("<img")


def test_evaluations_are_shown_by_prompt_and_version(page: Browser, address: str) -> None:
    page.click("#tab-evaluations")
    assert hash_of(page) == "#tab=evaluations"
    assert page.texts("#prompts th") == ["line", "prompt", "version 0", "version 8"]
    cells = page.texts("#prompts td")
    assert [cells[i] for i in (0, 2, 3, 4, 6, 7)] == ["1", "0", "1", "2", "1", "0"]
    good, bad = page.style("td .good", "color"), page.style("td .bad", "color")
    assert good != bad
    page.click("#prompts td button")
    facts = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))
    assert facts["prompt"] == "easy:1", "the set, not its file"
    page.show(address + "#tab=evaluations&kind=lost")
    assert page.text("#num-prompts") == "1 of 2 prompts"
    assert page.texts("#prompts td")[0] == "2"
    page.click("#prompts td button")
    assert page.text("#rollout h2").endswith("evaluation of version 0")
    assert "said 1" in page.texts(".text")
    assert "tokens of this rollout are not in the page" in page.text("#rollout")


def test_the_overview_has_a_curve_each_and_a_click_chooses_the_step(
    page: Browser, address: str
) -> None:
    captions = page.texts("figcaption")
    assert captions == [
        "reward 0.1 to 0.9 over steps 1 to 9",
        "accuracy 0.05 to 0.45 over steps 1 to 9",
        "held-out accuracy 0.5 to 0.5 over steps 0 to 8",
    ]
    page.click("[data-curve=reward] svg")
    assert hash_of(page) == "#step_from=5&step_to=5"
    assert {*rows(page)} == {"0", "1"}
    page.click("[data-curve=reward] svg")
    assert hash_of(page) == ""


def test_it_is_dark_where_the_system_is(page: Browser, address: str) -> None:
    def brightness() -> list[int]:
        texts = (page.style("body", name) for name in ("background-color", "color"))
        return [sum(map(int, text[4:-1].split(","))) for text in texts]

    back, ink = brightness()
    assert back > 700 > 150 > ink
    page.show(address, theme="dark")
    back, ink = brightness()
    assert back < 150 < 600 < ink
    page.show(address + EPISODE, width=500, theme="light")
    assert page.value("document.documentElement.scrollWidth") <= 500, "fits a narrow window"


def test_a_page_that_is_cut_says_so(opened: Browser, address: str, tmp_path: Path) -> None:
    output = tmp_path / "cut.html"
    folder = Path(address.removeprefix("file://")).parent
    view([str(folder), f"--output={output}", "--max_rollouts=8"])
    opened.show(f"file://{output}")
    assert "of the 15 kept rollouts, spread evenly" in opened.text("#shown")
    assert "--max_rollouts" in opened.text("#shown")


EACH = """
(() => {
  for (const { row_id } of data.rollouts)
    for (const colour of COLOURS) {
      at("rollout").replaceChildren();
      showRollout({ row: String(row_id), colour });
      if (!at("rollout").childElementCount) throw new Error(`rollout ${row_id} is not shown`);
      for (const token of document.querySelectorAll("[data-token]")) showTip(token);
    }
  for (const kind of ["", "wrong", "learnt", "lost"]) showEvaluations({ kind });
  for (const sort of ["step", "reward", "num_tokens", "staleness"]) showList({ sort, prompt: "a" });
  return data.rollouts.length;
})()
"""


@searched(few=100, many=1000)
def test_lines_that_were_damaged_and_are_shown_do_no_harm(
    opened: Browser, tmp_path: Path, seeds: Iterable[int]
) -> None:
    """All in one page; each is of a sound line, with one value that is another."""
    folder = write_run(tmp_path / "run")
    path = folder / "archive" / "kept-0.jsonl"
    lines = path.read_text().splitlines()
    with path.open("ab") as file:
        for seed in seeds:
            rng = random.Random(seed)
            line = json.loads(rng.choice(lines)) | {"row_id": 100 + seed}
            file.write(change_value(line, rng.choice(DAMAGED_JSON), rng) + b"\n")
    view([str(folder), "--max_rollouts=100000", "--max_tokens=10000000"])
    opened.leave()
    opened.errors.clear()
    opened.show(f"file://{folder}/view.html")
    assert opened.value(EACH) > len(lines)
    assert opened.errors == []
