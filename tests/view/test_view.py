"""`llamarl view`: what gets into the page, and what it says when it cannot."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from fuzzing.mutations import JSON_LINES

from llamarl.cli.main import main
from llamarl.model.tokenizer import load_tokenizer
from llamarl.view.page import KeptPlace, choose, find_places, read_kept, view
from tests.model.tokenizer_files import write_tokenizer
from tests.random_search import case, searched
from tests.viewed_run import ATTACK, DAMAGED_JSON, EPISODE, change_value, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def data_of(page: Path) -> dict[str, Any]:
    (packed,) = re.findall(r'id="data">([A-Za-z0-9+/=]+)</script>', page.read_text())
    text = gzip.decompress(base64.b64decode(packed))
    data: dict[str, Any] = json.loads(text, parse_constant=_refuse)
    return data


def _refuse(word: str) -> None:
    raise AssertionError(f"no browser reads {word} as JSON")


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
    assert data["sets"] == {"test.jsonl": "easy"}


@pytest.mark.parametrize(
    "config", [None, b"", b"- 1", b"evaluation: {sets: [a]}", b"evaluation: [", b"\xff", b"a: *b"]
)
def test_a_page_without_a_config_has_files_for_sets(config: bytes | None, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.yaml").unlink()
    if config is not None:
        (run / "config.yaml").write_bytes(config)
    view([str(run)])
    assert data_of(run / "view.html")["sets"] == {}


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


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "kept-0.jsonl").symlink_to("/proc/self/mem")  # root may read all others
    with pytest.raises(ValueError, match="RUN must have files that can be read"):
        view([str(tmp_path)])


def test_limits_without_room_and_wrong_outputs_are_refused(folder: Path, tmp_path: Path) -> None:
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
    assert len(find_places(folder)[0]) == 15
    (folder / "tokenizer" / "tokenizer.json").unlink()
    (folder / "tokenizer").rename(tmp_path / "gone")
    assert view([str(folder)]).startswith("15 rollouts")
    rollouts = data_of(folder / "view.html")["rollouts"]
    assert not [each for each in rollouts if "tokens" in each], "without a tokenizer: whole texts"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> DamagedRun:
    return DamagedRun(write_run(tmp_path_factory.mktemp("sound")))


@dataclass
class DamagedRun:
    """A run whose kept rollouts are damaged, case by case; `shown` is what the page has of each of
    its sound lines."""

    folder: Path
    lines: list[bytes] = field(init=False)
    shown: dict[bytes, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.folder / "archive" / "kept-0.jsonl"
        self.lines = self.path.read_bytes().splitlines()
        self.metrics = self.folder / "metrics.jsonl"
        self.steps = self.metrics.read_bytes().splitlines()
        _, rollouts = self.view(b"\n".join([*self.lines, b""]))
        of_row = {each["row_id"]: each for each in rollouts}
        self.shown = {line: of_row[json.loads(line)["row_id"]] for line in self.lines}

    def view(self, data: bytes) -> tuple[str, list[dict[str, Any]]]:
        """What the command says, and the rollouts of the page."""
        self.path.write_bytes(data)
        page = self.folder / "view.html"
        page.unlink(missing_ok=True)
        try:
            said = view([str(self.folder)])
        except ValueError as error:
            return str(error), []
        found = data_of(page)
        return said, [
            each | {"prompt": found["prompts"][each["prompt"]]["prompt_id"]}
            for each in found["rollouts"]
        ]


def damaged(lines: list[bytes], rng: random.Random) -> bytes:
    """One to five lines with a damaged value, or the file with damaged bytes."""
    if rng.random() < 0.4:
        return rng.choice(JSON_LINES)(b"\n".join([*lines, b""]), rng)
    found = list(lines)
    for place in rng.sample(range(len(lines)), rng.randint(1, 5)):
        found[place] = change_value(json.loads(lines[place]), rng.choice(DAMAGED_JSON), rng)
    return b"\n".join([*found, b""])


REFUSED = [  # the changed value of the first line, and what is said of it
    ({"num_tokens": -1}, "num_tokens must be a count, got -1"),
    ({"num_tokens": 7}, "num_tokens must be the length of each list of tokens, got {"),
    ({"clipped": []}, "num_tokens must be the length of each list of tokens, got {"),
    ({"step": 5.0}, "step must be a whole number, got 5.0"),
    ({"row_id": 2**53}, "row_id must be a whole number, got 9007199254740992"),
    ({"group_id": None}, "group_id must be there in training, got None"),
    ({"is_held_out": None}, "is_held_out must be true or false, got None"),
    ({"correct": 1}, "correct must be true or false, got 1"),
    ({"reward": 10**400}, "reward must be a number, got 1000"),
    ({"reward": True}, "reward must be a number, got True"),
    ({"advantage": math.inf}, "advantage must be a number, got inf"),
    ({"rewards": {"exact": math.nan}}, "rewards must be an object of numbers, got {'exact': nan}"),
    ({"rewards": [1]}, "rewards must be an object of numbers, got [1]"),
    ({"numbers": "[]"}, "numbers must be an object of numbers, as text, got []"),
    ({"numbers": '{"turns": "2"}'}, "numbers must be an object of numbers, as text, got {"),
    ({"numbers": "{"}, "a mistake at column 2"),
    ({"fields": {}}, "fields must be a text, got {}"),
    ({"prompt": "\ud800"}, "half of a character"),
    ({"error": "x" * 500, "turns": "x" * 500}, "turns must be messages, got 'xxxxxxxxxxxx...xx"),
    ({"turns": [{"role": "a", "content": None}]}, "turns must be messages, got [{"),
    ({"turns": [{"role": "a"}]}, "turns must be messages, got [{"),
    ({"prompt_ids": None}, "prompt_ids must be there with response_ids, got None"),
    ({"token_versions": None}, "token_versions must be there with response_ids, got None"),
    ({"response_ids": [-1]}, "response_ids must be a list of token ids, got [-1]"),
    ({"response_ids": [2**31]}, "response_ids must be a list of token ids, got [2147483648]"),
    ({"token_versions": [-2]}, "token_versions must be a list of versions, got [-2]"),
    ({"ref_logprobs": [math.nan]}, "ref_logprobs must be a list of numbers, got [nan]"),
    ({"ref_logprobs": [False]}, "ref_logprobs must be a list of numbers, got [False]"),
]


def test_what_is_said_of_a_damaged_line_is_short(sound: DamagedRun) -> None:
    line = json.loads(sound.lines[0])
    for changes, words in REFUSED:
        with pytest.raises(ValueError, match=re.escape(words)) as raised:
            read_kept(json.dumps(line | changes).encode())
        assert len(str(raised.value)) < 200
    for text in (b"[]", b"{}", b"\xff", b"[" * 10**5):
        with pytest.raises(ValueError, match=r"the line must be|not UTF-8|too deep"):
            read_kept(text)


def test_damaged_lines_are_all_counted(sound: DamagedRun, caplog: pytest.LogCaptureFixture) -> None:
    said, rollouts = sound.view(b"\n".join([*sound.lines, *[b"{}"] * 40, b""]))
    assert len(rollouts) == 15
    assert said == f"15 rollouts, without 40 damaged lines: {sound.folder}/view.html\n"
    named = [f"kept-0.jsonl:{number} is not shown: the line must be" for number in range(16, 26)]
    assert len(caplog.messages) == len(named)
    assert all(words in text for words, text in zip(named, caplog.messages, strict=True))
    said, _ = sound.view(b"{}\n" * 40)
    assert said.endswith(f", got 40 damaged lines in {sound.folder}/archive/kept-*.jsonl")


@searched(few=60, many=3000)
def test_damage_costs_its_line_and_no_other(sound: DamagedRun, seeds: Iterable[int]) -> None:
    for seed in seeds:
        with case(seed):
            rng = random.Random(seed)
            data = damaged(sound.lines, rng)
            sound.metrics.write_bytes(damaged(sound.steps, rng))
            said, rollouts = sound.view(data)
            assert said.count("\n") <= 1
            *whole, unfinished = data.split(b"\n")
            for line in whole:
                if line in sound.shown:
                    assert sound.shown[line] in rollouts, said
            if not rollouts:
                assert "must be the folder of a run that kept rollouts" in said
                continue
            (words,) = re.findall(r"without (\d+) damaged", said) or ["0"]
            assert len(rollouts) + int(words) in (len(whole), len(whole) + bool(unfinished))


def test_what_is_chosen_fits_is_whole_and_spread_evenly() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        places = []
        for step in range(rng.randint(1, 40)):
            for group in range(rng.randint(1, 3)):
                key = (False, step, group)
                places += [
                    KeptPlace(Path("a"), 0, key, rng.randint(0, 50))
                    for _ in range(rng.randint(1, 8))
                ]
        places += [
            KeptPlace(Path("b"), 0, (True, i % 20, 0), 5) for i in range(rng.choice([0, 60]))
        ]
        rng.shuffle(places)
        most_rollouts, most_tokens = rng.randint(1, 400), rng.randint(1, 9000)
        chosen = choose(places, most_rollouts, most_tokens)
        assert len(chosen) <= most_rollouts, seed
        assert sum(place.num_tokens for place in chosen) <= most_tokens, seed
        whole, shown = (Counter(p.together for p in some) for some in (places, chosen))
        assert all(whole[key] == count for key, count in shown.items()), seed
        if len(places) <= most_rollouts and sum(p.num_tokens for p in places) <= most_tokens:
            assert len(chosen) == len(places), seed
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


def test_the_command_says_what_it_wrote(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argument: str) -> None:
        monkeypatch.setattr(sys, "argv", ["llamarl", "view", argument])
        main()

    run(str(folder))
    assert capsys.readouterr().out == f"15 rollouts: {folder}/view.html\n"
    run("--help")
    assert capsys.readouterr().out.startswith("usage: llamarl view RUN")
    with pytest.raises(SystemExit) as stop:
        run(str(folder / "archive"))
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert (out, len(error.splitlines())) == ("", 1)
