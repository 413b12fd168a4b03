"""What README, docs and recipe pages tell a reader to type, open or read is really there."""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.cli.main import COMMANDS
from llamarl.metrics.tensorboard import DESCRIPTIONS
from llamarl.recipe.composition import reference
from llamarl.recipe.names_elsewhere import ELSEWHERE
from llamarl.scoring.rewards import REWARDS
from llamarl.scoring.stages import INFER, SCORE
from tests.e2e.forks import Forks
from tests.project.pages import (
    ALL_COMMANDS,
    DOCS,
    INLINE,
    LINK,
    PAGES,
    README,
    ROOT,
    RUNNABLE,
    Command,
    anchors,
    blocks,
    commands,
    name_of,
    prose,
    tables,
)
from tests.recipe.composing import compose_recipe
from tests.test_house import FILES, RANK, TREES, room

PATH = re.compile(r"[\w.-]+/[\w./-]*|[\w-]+\.(?:py|md|yaml|jsonl|json|txt|toml)")
KEY = re.compile(r"([a-z_]+)\.([a-z_]+)(?:=.*)?")
OWN_RECIPE = "recipes/mine"
# What a reader, a run or a session makes.
MADE_LATER = (OWN_RECIPE, "runs/", "docs/_build", ".venv", ".gpu/", "gpu-session/")
OF_A_RUN = {
    *("command.txt", "config.yaml", "environment.json", "evaluations.jsonl", "metrics.jsonl"),
    *("summary.json", "trace.json", "trackers.json", "logs/scorer-0.log"),
}
OF_A_RECIPE = {
    *("task.py", "run.yaml", "config.json", "adapter_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
}
TAGS = {*DESCRIPTIONS, "pi/mu"}
FOREIGN_PROGRAMS = {"pip", "hf", "tensorboard", "git", "sbatch"}
FLAGS = {
    *("--cfg", "--config-name", "--multirun", "--sweep", "--only"),
    *("--json", "--trace", "--mermaid", "--run"),
    *("--policy", "--against", "--prompts", "--faults"),
}
MOST_README_LINES, MOST_README_WIDTH = 110, 120
MOST_BENCHMARKS_LINES = 100


def of(program: str) -> list[Command]:
    return [command for command in ALL_COMMANDS if command.program == program]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped recipes, and the README's own recipe typed in beside them."""
    folder = tmp_path_factory.mktemp("workplace")
    mine = folder / OWN_RECIPE
    mine.mkdir(parents=True)
    for recipe in (ROOT / "recipes").iterdir():
        if recipe.name != mine.name:  # a reader may have typed it in here
            (folder / "recipes" / recipe.name).symlink_to(recipe)
    text = README.read_text()
    (recipe,), (task,) = blocks(text, "yaml"), blocks(text, "python")
    assert len((recipe + task).splitlines()) == 10, "the README says: two files, ten lines"
    (mine / "run.yaml").write_text(recipe)
    (mine / "task.py").write_text(task)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in LINK.findall(prose(page.read_text())):
        path = (page.parent / target).resolve() if target else page
        assert path.is_file(), f"{name_of(page)}: {target}"
        assert path.is_relative_to(ROOT), f"{name_of(page)}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{name_of(page)}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_named_in_the_text_exist(page: Path) -> None:
    codes = INLINE.findall(prose(page.read_text()))
    named = {code for code in codes if PATH.fullmatch(code)} - TAGS - OF_A_RUN - OF_A_RECIPE
    for name in named:
        if not name.startswith(MADE_LATER):
            places = [ROOT, page.parent, ROOT / "llamarl"]
            assert any((place / name).exists() for place in places), f"{name_of(page)}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_named_in_the_text_are_keys(page: Path) -> None:
    known = reference()
    for code in INLINE.findall(prose(page.read_text())):
        for word in shlex.split(code) if code.count("'") % 2 == 0 else []:
            key = KEY.fullmatch(word)
            if key and key[1] in known.sections and not PATH.fullmatch(word):
                name = f"{key[1]}.{key[2]}"
                is_of_verl = page.name == "coming-from-trl-and-verl.md"
                is_section = name in known.section_keys.values()
                assert name in known.keys or is_section or is_of_verl, f"{name_of(page)}: {word}"


def test_make_commands_name_targets() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(of("make")) > 10
    for command in of("make"):
        assert command.arguments[0] in targets, command


def test_every_command_is_of_a_known_program() -> None:
    known = {"make", "llamarl", "python", "bash"} | FOREIGN_PROGRAMS
    assert {command.program for command in ALL_COMMANDS} <= known
    assert all((ROOT / command.arguments[0]).is_file() for command in of("bash"))


@pytest.mark.full
def test_llamarl_commands_compose(workplace: Path) -> None:
    assert {command.arguments[0] for command in of("llamarl")} >= set(COMMANDS)
    composed = {c.arguments for c in of("llamarl") if "--config-dir" in c.arguments}
    composed -= {tuple(arguments) for _, arguments, _ in runnable()}  # may be mistakes, to show one
    assert len(composed) >= 20
    for _, flag, recipe, *words in composed:
        assert flag == "--config-dir"
        assert {word for word in words if word.startswith("--")} <= FLAGS
        file = words[words.index("--config-name") + 1] if "--config-name" in words else "run"
        # Of a sweep the first value; other commas are inside a list.
        values = r",.*" if "--multirun" in words else "$^"
        overrides = [re.sub(values, "", word) for word in words if "=" in word]
        compose_recipe(workplace / recipe, overrides, file)


class Parsed(Exception):  # noqa: N818 - what happened, and no error
    """The arguments of a tool were read without a mistake."""


@pytest.mark.parametrize(
    "arguments",
    sorted({c.arguments for c in of("python") if c.arguments[0].startswith("tools/")}),
    ids=lambda arguments: " ".join(arguments),
)
def test_a_tools_arguments_are_its_own(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, args: None = None) -> None:
        parse(parser, args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", list(arguments))
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")


def runnable() -> Iterator[tuple[str, list[str], str]]:
    """(page, arguments of llamarl, what the page shows of its output) of each marked command."""
    for page in PAGES:
        for body in RUNNABLE.findall(page.read_text()):
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, _, output = part.partition("\n")
                program, *arguments = shlex.split(line)
                assert program == "llamarl", f"{name_of(page)}: {line}"
                yield name_of(page), arguments, output


@pytest.mark.full
@pytest.mark.parametrize(("page", "arguments", "output"), list(runnable()))
def test_a_marked_command_prints_what_the_page_shows(
    page: str, arguments: list[str], output: str, workplace: Path, forks: Forks
) -> None:
    done = forks.run(*arguments, where=workplace)
    assert done.stdout + done.stderr == output, page


@pytest.mark.full
def test_the_readmes_own_recipe_runs_and_leaves_what_the_pages_promise(
    workplace: Path, forks: Forks
) -> None:
    lines = [c.arguments for c in commands(README) if "cluster=inline" in c.arguments]
    assert [OWN_RECIPE in line for line in lines] == [True]
    small = ["trainer.groups_per_step=4", "evaluation.max_prompts=8"]
    done = forks.run(*lines[0], *small, where=workplace)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (workplace / "runs").iterdir()
    listings = blocks((DOCS / "running.md").read_text(), "text")
    (listing,) = [body for body in listings if body.startswith("config.yaml")]
    promised = {line.split()[0] for line in listing.splitlines()}
    made = {f"{path.name}/" if path.is_dir() else path.name for path in run_dir.iterdir()}
    assert promised == {name for name in made if not name.startswith(".")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    sorted(
        {
            c.arguments
            for c in commands(DOCS / "running.md")
            if c.arguments[:2] == ("train", "--config-dir") and "wandb" not in str(c.arguments)
        }
    ),
    ids=lambda arguments: " ".join(arguments[3:]) or "plain",
)
def test_a_train_command_of_the_docs_runs(
    arguments: tuple[str, ...], forks: Forks, tmp_path: Path
) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    small = ["num_steps=2", "trainer.groups_per_step=16", "evaluation.max_prompts=8"]
    done = forks.run(*arguments, *small, where=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_index_of_extending_links_to_all_its_pages() -> None:
    index = DOCS / "extending" / "index.md"
    linked = {target for target, _ in LINK.findall(index.read_text())}
    assert linked == {path.name for path in index.parent.glob("*.md")} - {index.name}


def test_the_readme_is_short_and_reads_well_as_text() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= MOST_README_LINES
    assert [line for line in lines if len(line) > MOST_README_WIDTH] == []
    assert len((ROOT / "BENCHMARKS.md").read_text().splitlines()) <= MOST_BENCHMARKS_LINES


def test_every_room_has_one_line_in_order() -> None:
    (rows,) = tables((DOCS / "architecture.md").read_text().partition("## The rooms")[2])
    rooms = [cell.strip("`").rstrip("/").removesuffix(".py") for cell, _ in rows]
    assert set(rooms) == {room(path) for path in FILES} - {"__init__", "__main__"}
    assert len(rooms) == len(set(rooms))
    ranks = [RANK[name] for name in rooms]
    assert ranks == sorted(ranks)


def test_the_table_of_algorithms_says_what_the_config_says() -> None:
    known, shown = reference(), {}
    for row in tables((DOCS / "algorithms.md").read_text())[0]:
        shown[row[0].strip("`")] = row[2:]
    assert shown.keys() == known.groups["algorithm"].keys()
    words = {"mean_std": "mean, std", "leave_one_out": "leave one out"}
    for name, choice in known.groups["algorithm"].items():
        needed = {"teacher": "folder"} if name == "distill" else {}
        fields = vars(choice.section(**choice.values, **needed))
        advantage = words.get(fields["advantage"], fields["advantage"])
        drops = "dropped" if "equal_rewards" in fields["filters"] else "kept"
        expected = [advantage, fields["normalization"], drops, f"{fields['kl_coefficient']:g}"]
        assert shown[name] == expected, name


def test_the_table_of_rewards_has_them_all() -> None:
    (rows,) = [
        rows for rows in tables((DOCS / "recipes.md").read_text()) if "math-verify" in rows[0][1]
    ]
    assert {row[0].strip("`") for row in rows} == set(REWARDS)


def test_names_elsewhere_lead_to_the_keys_that_the_config_reference_knows() -> None:
    known = reference()
    meant = {name: key for key, names in ELSEWHERE.items() for name in names.split()}
    ours = known.keys.keys() | known.sections.keys() | known.groups.keys()
    for table in tables((DOCS / "coming-from-trl-and-verl.md").read_text()):
        assert len(table) > 30
        for theirs, here, *_ in table:
            name, key = theirs.strip("`"), here.strip("`")
            said = known.about(name)
            assert key in ours, name
            leads = meant.get(name) or meant.get(name.rpartition(".")[2]) or key
            assert leads.partition(".")[0] == key.partition(".")[0], name
            assert re.search(rf"^(== )?{re.escape(leads)}\b", said, re.M), name


def test_the_loops_picture_names_what_the_controller_does() -> None:
    source = (ROOT / "llamarl" / "controller" / "controller.py").read_text()
    (picture,) = blocks(README.read_text(), "mermaid")
    (line,) = re.findall(r"^    (admit -> .*)$", source, re.M)
    steps = set(re.findall(r"[a-z]+", line)) - {"roll", "out"}
    assert {"admit", "generate", "settle", "train", "publish"} <= steps
    assert steps | {SCORE, INFER} <= set(re.findall(r"[a-z]+", picture))


def test_errors_of_the_troubleshooting_page_are_ones_of_the_code() -> None:
    texts = {
        " ".join(node.value.split())
        for path in FILES
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    said = "\n".join(texts)
    rows = itertools.chain(*tables((DOCS / "troubleshooting.md").read_text()))
    errors = [row[0].strip("`") for row in rows]
    assert len(errors) > 40
    values = r"\w[\w.]*=\S*|\.\.\.|, got | must | in |KEY|FILE|LINE|'|\?|did you"
    pieces = {piece.strip(" :();,"): error for error in errors for piece in re.split(values, error)}
    assert {piece: e for piece, e in pieces.items() if " " in piece and piece not in said} == {}


def test_generated_pages_are_what_the_code_says_today() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "write_reference_pages.py"))
    for name, text in tool["pages"]().items():
        assert (DOCS / name).read_text() == text, "run tools/write_reference_pages.py"


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*sphinx, "-c", str(DOCS), str(ROOT), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "docs" / "index.html").is_file()
