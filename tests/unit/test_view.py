"""`llamarl view`: what gets into the page, and what it says when it cannot."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llamarl.data.tokenizer import load_tokenizer
from llamarl.view.page import PARTS, render, view
from llamarl.view.selection import KeptPlace, choose, find_places
from tests.e2e.forks import Forks
from tests.places import ROOT, TOOLS_RECIPE
from tests.unit.tokenizer_files import write_tokenizer
from tests.viewed_run import ATTACK, EPISODE, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def data_of(page: Path) -> dict[str, Any]:
    (packed,) = re.findall(r'id="data">([A-Za-z0-9+/=]+)</script>', page.read_text())
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return data


def test_the_page_has_each_rollout_with_its_tokens_and_their_numbers(folder: Path) -> None:
    assert view([str(folder)]) == f"15 rollouts: {folder}/view.html\n"
    data = data_of(folder / "view.html")
    assert (data["run"], data["num_found"]) == (folder.name, 15)
    assert Counter(each["outcome"] for each in data["rollouts"]) == {
        "trained": 10,
        "dropped": 1,
        "evaluated": 4,
    }
    episode = next(each for each in data["rollouts"] if each["row_id"] == 0)
    tokens = episode["tokens"]
    assert "".join(tokens["texts"]) == "".join(text for text, _ in EPISODE)
    assert tokens["texts"][-3:] == ["", "", "\u20ac"], "one character of three tokens"
    assert tokens["generator_logprobs"][:3] == [0.0, -0.125, -0.25]
    assert tokens["trainer_logprobs"][:3] == [-0.2, 0.575, -0.45]
    assert tokens["clipped"][:3] == [0, 1, 0]
    assert tokens["loss_weights"][8:10] == [0, 0], "an observation"
    assert [turn["role"] for turn in episode["turns"]] == ["assistant", "observation", "assistant"]
    assert (episode["staleness"], episode["advantage"], episode["correct"]) == (1, 0.5, True)
    assert data["prompts"][episode["prompt"]]["prompt_id"] == 5
    assert data["curves"]["evaluation"] == [[0, 0.5], [8, 0.5]]
    assert len(data["curves"]["reward"]) == 9


def test_no_text_is_read_as_html_and_nothing_is_loaded(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    view([str(folder), f"--output={page}"])
    text = page.read_text()
    assert ATTACK in json.dumps(data_of(page), ensure_ascii=False).replace('\\"', '"')
    assert "onerror" not in text
    assert "hacked" not in text
    assert len(re.findall("<script", text)) == len(re.findall("</script>", text)) == 2
    assert not re.findall(r"(?:src|href|url|@import)\s*[=(]", text), "no address"
    (script,) = re.findall(r"<script>(.*)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*)</style>", text, re.DOTALL)
    (policy,) = re.findall(r'Security-Policy"\s+content="([^"]*)"', text)
    hashes = [
        base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
        for each in (script, style)
    ]
    wanted = f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'"
    assert policy == wanted
    assert "innerHTML" not in script
    assert "insertAdjacentHTML" not in script


def test_a_page_that_is_cut_says_so_and_has_whole_groups(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = [str(folder), f"--output={page}"]
    said = view([*options, "--max_rollouts=8"])
    data = data_of(page)
    shown = len(data["rollouts"])
    assert said == f"{shown} rollouts of 15 (--max_rollouts, --max_tokens): {page}\n"
    assert 4 <= shown <= 8
    assert data["num_found"] == 15
    sizes = Counter(each["group_id"] for each in data["rollouts"])
    assert all(sizes[group] == 2 for group in sizes if group not in (None, 12))
    assert "of 15" not in view([*options, "--max_tokens=200"])
    assert "of 15" in view([*options, "--max_tokens=60"])


def test_a_run_that_kept_nothing_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "kept-0.jsonl").write_text("")
    for arguments, words in (
        ([str(tmp_path)], "must be the folder of a run that kept rollouts"),
        ([str(tmp_path / "none")], "must be the folder of a run, got"),
        ([], "must be followed by the folder of a run"),
        ([str(tmp_path), "--all"], "must be RUN and its options"),
        ([str(tmp_path), "--max_rollouts=many"], "must be as --help says"),
        ([str(tmp_path), "--max_tokens=0"], "--max_tokens must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words) as raised:
            view(arguments)
        assert "\n" not in str(raised.value)


def test_limits_that_no_group_fits_into_and_a_wrong_output_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="must leave room for the rollouts of one group"):
        view([str(folder), "--max_tokens=1", f"--output={tmp_path / 'p.html'}"])
    with pytest.raises(ValueError, match="--output must name a file that can be written"):
        view([str(folder), f"--output={tmp_path / 'none' / 'p.html'}"])
    assert not [*tmp_path.iterdir()]


def test_a_line_that_a_kill_left_unfinished_is_not_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "archive" / "kept-0.jsonl"
    with path.open("a") as file:
        file.write('{"row_id": 99, "outc')
    assert len(find_places(folder)) == 15
    (folder / "tokenizer" / "tokenizer.json").unlink()
    (folder / "tokenizer").rename(tmp_path / "gone")
    assert view([str(folder)]).startswith("15 rollouts")
    rollouts = data_of(folder / "view.html")["rollouts"]
    assert not [each for each in rollouts if "tokens" in each], "without a tokenizer: whole texts"


def test_damaged_lines_are_left_out_and_the_others_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "archive" / "kept-0.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    values = [None, -1, 1.5, "x", [], {}, [None], ["a"], {"a": 1}]
    for seed in range(40):
        rng = random.Random(seed)
        damaged = [dict(line) for line in lines]
        for line in rng.sample(damaged, rng.randint(1, 5)):
            name = rng.choice([*line])
            line.pop(name) if rng.random() < 0.5 else line.update({name: rng.choice(values)})
        path.write_text("".join(json.dumps(line) + "\n" for line in damaged))
        words = view([str(folder)])
        shown = {each["row_id"] for each in data_of(folder / "view.html")["rollouts"]}
        assert shown <= {*range(-1, 15)}
        whole = {line["row_id"] for line in damaged if line in lines}
        assert all(row in shown for row in whole), (seed, words)


def test_what_is_chosen_fits_is_whole_and_spread_evenly() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        places = []
        for step in range(rng.randint(1, 40)):
            for group in range(rng.randint(1, 3)):
                key = (False, step, str(group))
                places += [
                    KeptPlace(Path("a"), 0, key, rng.randint(0, 50))
                    for _ in range(rng.randint(1, 8))
                ]
        places += [
            KeptPlace(Path("b"), 0, (True, i % 20, ""), 5) for i in range(rng.choice([0, 60]))
        ]
        rng.shuffle(places)
        most_rollouts, most_tokens = rng.randint(1, 400), rng.randint(1, 9000)
        chosen = choose(places, most_rollouts, most_tokens)
        assert chosen.num_found == len(places)
        assert len(chosen.places) <= most_rollouts, seed
        assert sum(place.num_tokens for place in chosen.places) <= most_tokens, seed
        whole, shown = (Counter(p.together for p in some) for some in (places, chosen.places))
        assert all(whole[key] == count for key, count in shown.items()), seed
        if len(places) <= most_rollouts and sum(p.num_tokens for p in places) <= most_tokens:
            assert len(chosen.places) == len(places), seed
        sizes: Counter[Any] = Counter()
        for place in places:
            sizes[place.together] += place.num_tokens
        fitting = [k for k in whole if whole[k] <= most_rollouts and sizes[k] <= most_tokens]
        assert bool(shown) == bool(fitting), (seed, "something is shown if anything fits")
        keys = sorted(key for key in fitting if not key[0])
        ranks = [i for i, key in enumerate(keys) if key in shown]
        if len(ranks) > 1:
            gaps = [later - rank for rank, later in pairwise(ranks)]
            assert max(gaps) - min(gaps) <= 1, (seed, "as far from each other")


@pytest.mark.parametrize("text", ["", "a", "gr\u00fcn \U0001f600 \ufffd x", "  two  blanks "])
def test_the_pieces_of_a_text_are_the_text(tmp_path: Path, text: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.encode(text, special=False)
    found = tokenizer.pieces(ids)
    assert len(found) == len(ids)
    assert "".join(found) == text
    broken = [*ids, *tokenizer.encode("\U0001f600", special=False)[:2]]
    assert "".join(tokenizer.pieces(broken)) == tokenizer.decode_raw(broken)


def test_the_pieces_of_random_ids_are_what_these_say_together() -> None:
    tokenizer = load_tokenizer(TOOLS_RECIPE / "checkpoint")
    rng = random.Random(1)
    for _ in range(50):
        ids = [rng.randrange(tokenizer.num_ids) for _ in range(rng.randint(0, 30))]
        assert "".join(tokenizer.pieces(ids)) == tokenizer.decode_raw(ids), ids


def test_the_page_is_in_a_wheel() -> None:
    names = [path.name for path in PARTS.iterdir()]
    assert sorted(names) == ["page.css", "page.html", "page.js", "tokens.js"]
    assert '"view/parts/*"' in (ROOT / "pyproject.toml").read_text()
    assert "$" not in re.sub(r"\$(style|script|style_hash|script_hash|data)\b", "", _template())
    assert render({"run": "</script>"}).count("</script>") == 2


def _template() -> str:
    return (PARTS / "page.html").read_text()


def test_the_command_says_what_it_wrote(folder: Path, forks: Forks) -> None:
    done = forks.run("view", str(folder))
    assert (done.returncode, done.stdout) == (0, f"15 rollouts: {folder}/view.html\n")
    done = forks.run("view", str(folder / "archive"))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert forks.run("view", "--help").stdout.startswith("usage: llamarl view RUN")
