"""What the README and the recipe's page tell a reader to type, open or read is really there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llamarl.main import COMMANDS
from tests.e2e.forks import Forks
from tests.test_house import FILES, RANK, room
from tests.unit.composing import compose_recipe

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "recipes" / "quickstart" / "README.md"]
TEXT = README.read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+/[\w./-]*|[\w-]+\.(?:py|md|yaml|jsonl|json|txt|toml)")
LINK = re.compile(r"\]\((?!https?://)([^)#]+)\)")
OWN_RECIPE = "recipes/mine"
NOT_SHIPPED = (OWN_RECIPE, "runs/", "task.py")  # what a reader or a run makes
NOT_PATHS = {"pi/mu", "logprob_check/difference", "kl/generator_trainer"}


def blocks(text: str, language: str = "") -> list[str]:
    return [body for found, body in FENCED.findall(text) if found == language]


def commands(page: Path, word: str) -> list[list[str]]:
    """Every command with this first word, in code blocks and in code within a line."""
    text = page.read_text()
    lines = [line.removeprefix("$ ") for body in blocks(text) for line in body.splitlines()]
    lines += INLINE.findall(FENCED.sub("", text))
    found = []
    for line in lines:
        without_variables = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)
        if without_variables.startswith(f"{word} "):
            found.append(shlex.split(without_variables)[1:])
    return found


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped recipe, and the README's own recipe typed in beside it."""
    folder = tmp_path_factory.mktemp("workplace")
    mine = folder / OWN_RECIPE
    mine.mkdir(parents=True)
    for recipe in (ROOT / "recipes").iterdir():
        (folder / "recipes" / recipe.name).symlink_to(recipe)
    (recipe,), (task,) = blocks(TEXT, "yaml"), blocks(TEXT, "python")
    assert len((recipe + task).splitlines()) == 10, "the README says: two files, ten lines"
    (mine / "run.yaml").write_text(recipe)
    (mine / "task.py").write_text(task)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_make_commands_name_targets(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = commands(page, "make")
    assert found
    for arguments in found:
        assert arguments[0] in targets


def test_llamarl_commands_compose(workplace: Path) -> None:
    lines = [line for page in PAGES for line in commands(page, "llamarl")]
    assert {line[0] for line in lines} == set(COMMANDS), "the README shows every command"
    configured = {tuple(line) for line in lines if "--config-dir" in line}
    assert len(configured) >= 8
    for _, flag, recipe, *words in configured:
        assert flag == "--config-dir"
        flags = {word for word in words if word.startswith("--")}
        assert flags <= {"--cfg", "--multirun", "--sweep", "--json", "--html", "--trace"}
        overrides = [re.sub(r",.*", "", word) for word in words if "=" in word]
        compose_recipe(workplace / recipe, overrides)


def test_the_readmes_own_recipe_runs_and_leaves_what_it_promises(
    workplace: Path, forks: Forks
) -> None:
    lines = [line for line in commands(README, "llamarl") if "cluster=inline" in line]
    assert [OWN_RECIPE in line for line in lines] == [True]
    small = ["trainer.groups_per_step=4", "evaluation.max_prompts=8"]
    done = forks.run(*lines[0], *small, where=workplace)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (workplace / "runs").iterdir()
    (listing,) = [body for body in blocks(TEXT) if body.startswith("config.yaml")]
    promised = {line.split()[0] for line in listing.splitlines()}
    promised.remove("logs/")  # processes of their own write these; here all is one process
    made = {f"{path.name}/" if path.is_dir() else path.name for path in run_dir.iterdir()}
    made = {name for name in made if not name.startswith(".")}
    assert promised == made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_paths_named_in_the_text_exist(page: Path) -> None:
    text = page.read_text()
    named = {code for code in INLINE.findall(FENCED.sub("", text)) if PATH.fullmatch(code)}
    named |= set(LINK.findall(text))
    named = {name for name in named if not name.startswith(NOT_SHIPPED)} - NOT_PATHS
    assert len(named) > 4
    for name in named:
        places = [ROOT, ROOT / "llamarl", ROOT / "recipes" / "quickstart"]
        assert any((place / name).exists() for place in places), f"{page}: {name}"


def test_every_room_has_one_line_in_order() -> None:
    table = re.findall(r"^\| `([\w./]+)` \|", TEXT, re.MULTILINE)
    rooms = [name.rstrip("/").removesuffix(".py") for name in table]
    assert set(rooms) == {room(path) for path in FILES} - {"__init__", "__main__"}
    assert len(rooms) == len(set(rooms))
    ranks = [RANK[name] for name in rooms]
    assert ranks == sorted(ranks)


def test_every_algorithm_and_reward_named_is_one() -> None:
    from llamarl.config.reward import REWARDS

    (line,) = [line for line in TEXT.splitlines() if line.startswith("Algorithms: ")]
    files = {path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml")}
    assert set(INLINE.findall(line)) == files
    (line,) = re.findall(r"Rewards that ship: ([^\n]+)", TEXT)
    assert {*INLINE.findall(line), "task"} == set(REWARDS)


def test_the_loops_picture_names_the_controllers_stages() -> None:
    source = (ROOT / "llamarl" / "loop" / "controller.py").read_text()
    (picture,) = [body for body in blocks(TEXT) if body.startswith("controller:")]
    stages = set(re.findall(r"def _(\w+)_stage", source))
    assert stages == {"admit", "collect", "score", "infer", "settle", "train"}
    assert stages | {"publish"} <= set(re.findall(r"[a-z]+", picture))
