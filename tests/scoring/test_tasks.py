"""Tasks in Harbor's form: what is read of their folders, what is refused, and the rewards that
their tests leave, in each sandbox that can hold them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.core.config import DataConfig
from llamarl.model.tokenizer import load_tokenizer
from llamarl.scoring.agent.command import AgentCommand, CommandEnvironment
from llamarl.scoring.agent.tasks import HarborTask, find_tasks, read_row, reward_of, task_of
from tests.containers import make_engine
from tests.harbor_tasks import TEST, TOML, write_task
from tests.model.tokenizer_files import write_tokenizer
from tests.prompt_files import read_prompts

BASE64 = "ZGF0YQo="  # of "data\n"
BWRAP = shutil.which("bwrap") is not None
PLACES = ["local", "docker"] * BWRAP


def task_in(folder: Path) -> HarborTask:
    task = task_of(read_row(folder / "task.toml"))
    assert task is not None
    return task


def test_a_task_is_a_row_with_all_that_its_episode_needs(tmp_path: Path) -> None:
    row = read_row(write_task(tmp_path / "greet") / "task.toml")
    task = task_of(row)
    assert task is not None
    assert row["question"] == "Write the answer into /app/answer.txt.\n"
    assert row["task"] == task.name == "greet"
    assert row["image"] == task.image
    assert task.image.startswith("llamarl-task:")
    assert task.build == str(tmp_path / "greet" / "environment")
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (25, 20)
    assert (task.num_cpus, task.memory_mib, task.storage_mib) == (2, 1024, 300)
    assert (task.variables, task.verifier_variables) == ({"COLOUR": "red"}, {"MODE": "strict"})
    assert (task.workdir, task.needs_image, task.has_internet) == ("/app", "", False)
    assert sorted(task.files) == ["/app/in/data.txt", "/app/in/deep/list.txt"]
    assert task.files["/app/in/data.txt"] == BASE64
    assert sorted(task.tests) == ["data/expected.txt", "test.sh"]
    assert task.programs == ("test.sh",)
    (tmp_path / "greet" / "environment" / "data.txt").write_text("other")
    assert task_in(tmp_path / "greet").image != task.image, "an image is that of its files"


def test_what_a_task_leaves_open_has_harbors_defaults(tmp_path: Path) -> None:
    task = task_in(write_task(tmp_path / "a", toml='[task]\nname = "org/short"\n'))
    assert task.name == "org/short"
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (None, 600)
    assert (task.num_cpus, task.memory_mib, task.storage_mib) == (None, None, None)
    assert task.has_internet
    toml = '[environment]\ndocker_image = "a/b:1"\nnetwork_mode = "no-network"\nworkdir = "/w"\n'
    task = task_in(write_task(tmp_path / "b", toml=toml, dockerfile=None))
    assert (task.image, task.build, task.workdir, task.has_internet) == ("a/b:1", "", "/w", False)
    assert task.needs_image == "it has no environment/Dockerfile"


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("FROM a\nWORKDIR /app\nRUN make\n", "has RUN make"),
        ("FROM a AS b\nWORKDIR /app\n", "has FROM a AS b"),
        ("FROM a\nWORKDIR /app\nCOPY --chown=1 data.txt .\n", "has COPY --chown=1"),
        ("FROM a\nWORKDIR /app\nCOPY *.txt .\n", "has COPY *.txt"),
        ("FROM a\nWORKDIR /app\nCOPY data.txt /etc/data\n", "copies /etc/data, outside of /app"),
        ("FROM a\nENV A=1\nWORKDIR /app\n", "has ENV A=1"),
        ("FROM a\n", "has no WORKDIR"),
    ],
)
def test_a_dockerfile_that_does_more_than_copy_needs_an_image(
    tmp_path: Path, dockerfile: str, why: str
) -> None:
    task = task_in(write_task(tmp_path / "a", dockerfile=dockerfile))
    assert why in task.needs_image
    assert task.files == {}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"toml": "[verifier\n"}, r"a/task\.toml must be a readable TOML file"),
        ({"toml": "verifier = 3\n"}, "verifier must be a table, got 3"),
        ({"toml": "[verifier]\ntimeout_sec = 'x'\n"}, "verifier.timeout_sec must be a number"),
        ({"toml": "[agent]\ntimeout_sec = 0\n"}, "agent.timeout_sec must be a number above 0"),
        ({"toml": "[agent]\nuser = 'me'\n"}, "agent.user must be left out"),
        ({"toml": "[[steps]]\nname = 'one'\n"}, "steps must be left out"),
        ({"toml": "[verifier]\nenvironment_mode = 'separate'\n"}, "environment_mode must be left"),
        ({"toml": "[environment]\nmemory = 'big'\n"}, "environment.memory must be such as 2G"),
        ({"toml": "[environment]\ngpus = 1\n"}, "environment.gpus must be left out"),
        ({"toml": "[environment]\nos = 'windows'\n"}, "environment.os must be linux"),
        ({"toml": "[environment]\nnetwork_mode = 'allowlist'\n"}, "network_mode must be public"),
        ({"toml": "[verifier]\nenv = {KEY = '${KEY}'}\n"}, "verifier.env.KEY must be a text"),
        ({"test": None}, r"a must hold tests/test\.sh, got no such file"),
        ({"dockerfile": "FROM a\nWORKDIR /app\nCOPY no.txt .\n"}, r"copy files .* got no\.txt"),
    ],
)
def test_a_task_that_is_not_whole_or_asks_for_more_is_refused_by_name(
    tmp_path: Path, changed: dict[str, str | None], words: str
) -> None:
    path = write_task(tmp_path / "a", **changed) / "task.toml"
    with pytest.raises(ValueError, match=words):
        read_row(path)


def test_files_that_a_row_cannot_carry_are_refused(tmp_path: Path) -> None:
    tests = write_task(tmp_path / "a") / "tests"
    (tests / "link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"must be plain files, got .*link"):
        task_in(tmp_path / "a")
    (tests / "link").unlink()
    with (tests / "large").open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(ValueError, match="must hold at most 16 MiB"):
        task_in(tmp_path / "a")
    (tests / "large").unlink()
    (tmp_path / "a" / "environment" / "docker-compose.yaml").touch()
    with pytest.raises(ValueError, match="must be a task without docker-compose"):
        task_in(tmp_path / "a")


def test_a_folder_of_tasks_is_prompts_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_task(tmp_path / "tasks" / name, instruction=f"Do {name}.")
    (tmp_path / "tasks" / "notes").mkdir()
    (tmp_path / "tasks" / "README.md").touch()
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t"))
    config = DataConfig(prompts="tasks")
    prompts = read_prompts(tmp_path / "tasks", config, tokenizer)
    assert [each.text for each in prompts] == ["Do a.", "Do b.", "Do c."]
    assert [each.prompt_id for each in prompts] == [1, 2, 3]
    assert [task_of(each.fields).name for each in prompts] == ["a", "b", "c"]
    few = read_prompts(tmp_path / "tasks", config, tokenizer, most=2)
    assert [each.text for each in few] == ["Do a.", "Do b."]
    (one,) = read_prompts(tmp_path / "tasks" / "b", config, tokenizer)
    assert one.text == "Do b."
    for name in ("instruction.md", "task.toml"):
        shutil.copytree(tmp_path / "tasks" / "c", tmp_path / "tasks" / "d")
        (tmp_path / "tasks" / "d" / name).unlink()
        with pytest.raises(ValueError, match=f"d must hold {name} beside"):
            find_tasks(tmp_path / "tasks")
        shutil.rmtree(tmp_path / "tasks" / "d")


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [
        ("reward.txt", "1\n", 1.0),
        ("reward.txt", " -0.25 ", -0.25),
        ("reward.txt", "", ValueError),
        ("reward.txt", "good", ValueError),
        ("reward.txt", "nan", ValueError),
        ("reward.json", '{"reward": 0.5, "style": 1}', 0.5),
        ("reward.json", '{"passed": 1}', 1.0),
        ("reward.json", '{"a": 1, "b": 2}', ValueError),
        ("reward.json", '{"reward": 1, "b": "x"}', ValueError),
        ("reward.json", '{"reward": 1e309}', ValueError),
        ("reward.json", "{}", ValueError),
        ("reward.json", "0.5", ValueError),
        ("reward.json", "{", ValueError),
    ],
)
def test_a_reward_is_a_finite_number(
    name: str, text: str, reward: float | type[ValueError]
) -> None:
    if isinstance(reward, float):
        assert reward_of(name, text) == reward
    else:
        with pytest.raises(reward):
            reward_of(name, text)


async def played(place: str, folder: Path, agent: str, limit_s: float = 60.0) -> float:
    """Return the reward of an episode in which a shell runs this text as agent."""
    row = read_row(folder / "task.toml")
    spec = AgentCommand(command=["sh", "-c", agent], check=[], timeout_s=limit_s)
    if place == "docker":
        shutil.rmtree(folder.parent / "engine", ignore_errors=True)
        (folder.parent / "image" / "app" / "in").mkdir(parents=True, exist_ok=True)
        (folder.parent / "image" / "app" / "in" / "data.txt").write_text("data\n")
        image = {"config": {"WorkingDir": "/app"}, "folder": str(folder.parent / "image")}
        engine = make_engine(folder.parent / "engine", {row["image"]: image})
        spec = replace(spec, image="{image}", engine=engine)
    return await CommandEnvironment(spec).play("http://127.0.0.1:40009/x/v1", **row)


STRICT = """#!/bin/bash
[ "$MODE $COLOUR $(pwd)" = "strict red /app" ] || exit 3
[ "$(cat /tests/data/expected.txt)" = expected ] || exit 4
[ "$(ls -A /tests /logs/verifier | tr '\\n' ' ')" = "/logs/verifier:  /tests: data test.sh " ] \\
  || exit 5
cat answer.txt > /logs/verifier/reward.txt
"""


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
async def test_the_reward_is_what_the_tests_leave_and_nothing_that_the_agent_planted(
    tmp_path: Path, place: str
) -> None:
    folder = write_task(tmp_path / "a", test=STRICT)
    plant = "[ $COLOUR = red ] && [ $(cat in/data.txt) = data ] && echo 0.75 > answer.txt\n"
    plant += "touch /logs/agent/trace /logs/artifacts/own || exit 127\n"
    plant += "mkdir -p /logs/verifier /tests/data; echo 1 > /logs/verifier/reward.txt\n"
    plant += "echo '{{\"reward\": 1}}' > /logs/verifier/reward.json; echo no > /tests/planted\n"
    plant += "ln -s /app /tests/link; (while true; do echo 9 > /logs/verifier/reward.json; done) &"
    assert await played(place, folder, plant) == 0.75
    link = "echo -1 > answer.txt; rm -rf /logs/verifier; ln -s /app /logs/verifier"
    assert await played(place, folder, link) == -1.0


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
async def test_work_that_took_too_long_is_tested_as_it_is(tmp_path: Path, place: str) -> None:
    toml = TOML.replace("timeout_sec = 25.0", "timeout_sec = 2.0")
    test = "cat /app/answer.txt > /logs/verifier/reward.txt"  # without #! too
    folder = write_task(tmp_path / "a", toml=toml, test=test)
    assert await played(place, folder, "echo 0.5 > answer.txt; sleep 600") == 0.5


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("echo bad >&2; exit 7", r"leave a reward in .* got exit code 7 and no such file: bad"),
        ("exit 0", "leave a reward in .* got exit code 0 and no such file"),
        ("echo good > /logs/verifier/reward.txt", r"finite number in .*reward\.txt, got could not"),
        ("touch /logs/verifier/reward.txt", r"finite number in .*reward\.txt, got could not"),
        (
            "echo 1 > /logs/verifier/reward.txt; echo '{' > /logs/verifier/reward.json",
            r"finite number in .*reward\.json, got Expecting",
        ),
        ("sleep 600", r"keep their limits \(of time 2 s\), got too much time"),
    ],
)
async def test_tests_that_leave_no_reward_fail_the_episode(
    tmp_path: Path, place: str, test: str, words: str
) -> None:
    toml = TOML.replace("timeout_sec = 20.0", "timeout_sec = 2.0") if "sleep" in test else TOML
    folder = write_task(tmp_path / "a", toml=toml, test=f"#!/bin/sh\n{test}\n")
    with pytest.raises(RuntimeError, match=f"the tests of task a must .*{words}"):
        await played(place, folder, "true")


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
async def test_an_agent_that_does_not_start_gets_no_tests(tmp_path: Path, place: str) -> None:
    folder = write_task(tmp_path / "a", test=TEST)
    with pytest.raises(RuntimeError, match="the agent must start"):
        await played(place, folder, "exit 127")


def test_the_task_of_a_plain_row_is_none() -> None:
    assert task_of({"question": "a", "task": "b"}) is None
