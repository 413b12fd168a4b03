"""The examples of docs/extending/ work as they stand there."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from llamarl.core.config import TrainerConfig, WeightsConfig
from llamarl.core.errors import TaskError
from llamarl.core.extensions import load
from llamarl.core.groups import Dropped, Group, Kept
from llamarl.core.records import REWARD, FinishReason, Prompt, StageResult
from llamarl.generator.engine.weights import BufferLayout
from llamarl.metrics import trackers
from llamarl.model import architecture
from llamarl.model.architecture import read_architecture
from llamarl.publish.layout import Box, ParameterLayout
from llamarl.publish.reshard import plan, split
from llamarl.publish.source import Writer
from llamarl.publish.target import Memory, WeightBuffer
from llamarl.publish.transports import routes
from llamarl.recipe.inputs import read_inputs
from llamarl.scoring.samplers import ReadyItem, draw, make_sampler
from llamarl.trainer.advantages import filter_group
from llamarl.trainer.loss_inputs import LossInputs
from llamarl.trainer.losses import find_loss
from llamarl.trainer.losses.aipo import AIPOConfig
from llamarl.trainer.losses.task_loss import TaskConfig
from llamarl.trainer.parallel import parameter_placements
from llamarl.trainer.policy_loss import policy_loss
from tests.e2e.forks import Forks
from tests.fakes import group_of, stopped
from tests.json_lines import read_lines
from tests.places import ROOT
from tests.recipe.composing import compose_recipe
from tests.tiny_checkpoints import (
    LENGTHS,
    reference_logits,
    relative_error,
    token_ids,
    write_reference,
)
from tests.tiny_checkpoints import load as load_model

pytestmark = pytest.mark.full

OTHERS = ("advantage", "group_filter", "group_reward", "sampler", "prompts")
PAGES = ("loss", "reward", *OTHERS)


SECTIONS = {  # heading by name
    **{"prompts": "Prompts", "reward": "A reward", "group_reward": "A reward of a group"},
    **{"loss": "A loss", "advantage": "An advantage", "group_filter": "A group filter"},
    **{"sampler": "A sampler", "stage": "A stage of your own"},
    **{"consumer": "A stage outside the run", "model_family": "A model family"},
    **{"transport": "A transport", "tracker": "A tracker"},
}


def block(section: str, language: str) -> str:
    """The only fenced block of this language in a section."""
    pages = sorted((ROOT / "docs" / "extending").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    own = text.split(f"\n## {SECTIONS[section]}\n")[1].split("\n## ")[0]
    (body,) = re.findall(rf"^```{language}\n(.*?)^```", own, re.MULTILINE | re.DOTALL)
    return body


def write_recipe(folder: Path, run: str, task: str) -> Path:
    recipe = folder / "recipes" / "mine"
    recipe.mkdir(parents=True)
    (folder / "recipes" / "quickstart").symlink_to(ROOT / "recipes" / "quickstart")
    (recipe / "run.yaml").write_text(run)
    (recipe / "task.py").write_text(task)
    return recipe


@pytest.mark.parametrize(
    "page", ["loss", "reward", *(pytest.param(page, marks=pytest.mark.long) for page in OTHERS)]
)
def test_the_recipe_of_a_page_composes_and_its_task_is_checked(page: str, tmp_path: Path) -> None:
    task = block(page, "python")
    assert 10 <= len(task.splitlines()) <= 30
    recipe = write_recipe(tmp_path, block(page, "yaml"), task)
    config = compose_recipe(recipe, [f"recipe_dir='{recipe}'"])
    assert read_inputs(config).task_source == {"task.py": task}
    name = re.findall(r"^def (\w+)\(", task, re.MULTILINE)[0]
    (recipe / "task.py").write_text(task.replace(f"def {name}(", f"def {name}(other, "))
    with pytest.raises(ValueError, match=rf"task\.py:\d+: {name} must be {name}\(.*got {name}\(o"):
        read_inputs(config)


def test_the_loss_of_the_page_is_its_paper_s() -> None:
    pi = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    inputs = LossInputs(
        trainer_logprobs=pi,
        generator_logprobs=pi.detach() - torch.tensor([4.0, 4.0, 0.5]).log(),
        advantages=torch.tensor([1.0, -1.0, -1.0]),
        weights=torch.ones(3),
        entropy=torch.zeros(3),
        rollout_index=torch.tensor([0, 1, 1]),
        rollout_lengths=torch.tensor([1, 2]),
    )
    config = TaskConfig()
    outputs = policy_loss(inputs, config, find_loss(config, {"task.py": block("loss", "python")}))
    outputs.loss.backward()
    assert pi.grad is not None
    assert pi.grad.tolist() == pytest.approx([-1.0, 1.0, 0.5])  # weights 1, 1 (of 4), 1/2
    assert outputs.sums["clipped"].item() == 1
    short = find_loss(config, {"task.py": "def loss(inputs):\n    return inputs.ratio[1:]\n"})
    with pytest.raises(TaskError, match=r"one value per token, a tensor \(3,\), got \(2,\)"):
        policy_loss(inputs, config, short)


def group(rewards: list[float], num_cut: int) -> Group:
    reasons = [FinishReason.LENGTH] * num_cut + [FinishReason.STOP] * (len(rewards) - num_cut)
    rows = {i: stopped(i, (0, 4), reason=reason) for i, reason in enumerate(reasons)}
    scores = {
        i: StageResult(row_id=i, numbers={REWARD: reward}) for i, reward in enumerate(rewards)
    }
    return group_of(*rows, rollouts=rows, scores=scores)


def test_the_advantage_of_the_page_is_a_rank() -> None:
    task = load({"task.py": block("advantage", "python")}, ["advantages"])
    config = AIPOConfig(advantage="task")
    verdict = filter_group(group([5.0, 0.0, 1.0, 1.0], 0), max_tokens=8, config=config, task=task)
    assert verdict == Kept((1.0, -1.0, 0.0, 0.0))
    for body, got in (("rewards[1:]", r"\(0.0,"), ("[None] * 4", r"\[None"), ("3", "3")):
        wrong = load({"task.py": f"def advantages(rewards):\n    return {body}\n"}, ["advantages"])
        with pytest.raises(TaskError, match=rf"must be 4 finite numbers, .*, got {got}"):
            filter_group(group([5.0, 0.0, 1.0, 1.0], 0), max_tokens=8, config=config, task=wrong)


def test_the_filter_of_the_page_drops_groups_that_were_cut() -> None:
    task = load({"task.py": block("group_filter", "python")}, ["drop"])
    config = AIPOConfig(filters=["equal_rewards", "task"])

    def decide(rewards: list[float], num_cut: int, task: dict = task) -> Kept | Dropped:
        return filter_group(group(rewards, num_cut), max_tokens=8, config=config, task=task)

    assert decide([1.0, 0.0], 1) == Kept((0.5, -0.5))
    assert decide([1.0, 0.0], 2) == Dropped("cut_short")
    assert decide([1.0, 1.0], 2) == Dropped("equal_rewards")
    wrong = load({"task.py": "def drop(group):\n    return True\n"}, ["drop"])
    with pytest.raises(TaskError, match=r"must be None or a reason of small .*, got True"):
        decide([1.0, 0.0], 1, wrong)


def test_the_reward_of_the_page_grades() -> None:
    reward = load({"task.py": block("reward", "python")}, ["reward"])["reward"]
    prompt = Prompt(prompt_id=0, text="", token_ids=(), fields={"answer": 4})
    assert reward(prompt, "2 + 2 = 4. Answer: 4") == 1.0
    assert reward(prompt, "2 + 2 = 5. Answer: 5") == 0.1
    assert reward(prompt, "word " * 30 + "Answer: 4") == pytest.approx(1 - 0.12)


def test_the_group_reward_of_the_page_prefers_the_shortest_right_one() -> None:
    function = load({"task.py": block("group_reward", "python")}, ["group_reward"])["group_reward"]
    prompt = Prompt(prompt_id=0, text="", token_ids=(), fields={"answer": 4})
    texts = ["2 + 2 = 4. Answer: 4", "Answer: 5", "Answer: 4", "no"]
    assert function(prompt, texts) == [1.0, 0.0, 1.5, 0.0]
    assert function(prompt, ["no"]) == [0.0]


def test_the_sampler_of_the_page_prefers_groups_that_differ_but_takes_the_oldest() -> None:
    task = load({"task.py": block("sampler", "python")}, ["sample"])
    ready = [
        ReadyItem(
            item_id=i,
            group_id=i,
            group_size=2,
            num_rollouts=2,
            num_prompt_tokens=2,
            num_tokens=8,
            advantages=(advantage, -advantage),
        )
        for i, advantage in enumerate([0.1, 0.2, 0.5, 0.4])
    ]
    assert draw(make_sampler("task", task), ready, 2) == ([0, 2], [0, 2])
    assert draw(make_sampler("task", task), ready[:2], 2) == ([], [])


RUN = """
defaults: [config, {override /algorithm: task}, {override /reward: task}, _self_]
num_steps: 1
model: {checkpoint: ../quickstart/checkpoint}
data: {prompts: ../quickstart/prompts.jsonl}
sampling: {max_tokens: 96}
generator: {max_model_len: 128}
trainer: {groups_per_step: 2}
algorithm: {advantage: task, filters: [task]}
reward: {functions: [task, group], weights: [1, 0.1]}
experience: {sampler: task}
staleness: {late: mask}
"""


def run_of(folder: Path, forks: Forks, more: str = "") -> subprocess.CompletedProcess[str]:
    """A run whose task.py is the text of all pages, and `more`."""
    pages = [block(page, "python").replace("MOST_CUT = 0.5", "MOST_CUT = 1") for page in PAGES]
    write_recipe(folder, RUN, "\n\n".join([*pages, more]))
    command = ["train", "--config-dir=recipes/mine", "cluster=inline", "run_dir=run"]
    return forks.run(*command, where=folder)


@pytest.mark.full
def test_a_run_learns_by_the_functions_of_the_pages(tmp_path: Path, forks: Forks) -> None:
    done = run_of(tmp_path, forks)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "export").is_dir()
    (step,) = read_lines(tmp_path / "run" / "metrics.jsonl")[-1:]
    parts = {name: step[f"reward_parts/{name}"] for name in ("task", "group")}
    assert 0 < parts["group"] <= 1.5
    assert step["reward/mean"] == pytest.approx(parts["task"] + 0.1 * parts["group"])


@pytest.mark.long
def test_a_run_passes_the_four_stages_of_the_page(tmp_path: Path, forks: Forks) -> None:
    task = block("stage", "python")
    functions = re.findall(r"^def \w+\(.*?(?=\n\n\n|\Z)", task, re.MULTILINE | re.DOTALL)
    assert len(functions) == 4
    assert all(len(function.splitlines()) <= 10 for function in functions)
    recipe = write_recipe(tmp_path, block("stage", "yaml"), task.replace("> 90", "> 20"))
    small = ("trainer.groups_per_step=4", "checkpoint.export=false", "run_dir=run")
    done = forks.run("train", f"--config-dir={recipe}", "cluster=inline", *small, where=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(step.get("dropped_rollouts/rambling", 0) for step in steps) > 0
    assert {"columns/quality", "columns/ranked"} <= steps[-1].keys()
    shown = forks.run("graph", f"--config-dir={recipe}", "--mermaid=graph.mmd", where=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"judge of task\.py +rollout +1 \+ 2", shown.stdout), shown.stdout
    assert 'rank -- "ranked" --> settle' in (tmp_path / "graph.mmd").read_text()


@pytest.mark.slow
def test_a_run_is_served_by_the_consumer_of_the_page(tmp_path: Path, forks: Forks) -> None:
    recipe = write_recipe(tmp_path, block("consumer", "yaml"), block("consumer", "text"))
    command = [sys.executable, "-c", block("consumer", "python"), str(tmp_path / "run")]
    consumers = [subprocess.Popen(command) for _ in range(2)]
    small = ("trainer.groups_per_step=4", "checkpoint.export=false", "run_dir=run")
    done = forks.run("train", f"--config-dir={recipe}", *small, where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [consumer.wait(20) for consumer in consumers] == [0, 0], "they end with the run"
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert 0 < json.loads(last)["columns/quality"] < 1
    shown = forks.run("graph", f"--config-dir={recipe}", "--run=run", where=tmp_path)
    assert re.search(r"^score +settle +reward \(metadata\)", shown.stdout, re.MULTILINE)
    assert re.search(r"^generate +judge .* rows/s, .*B/s$", shown.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "got"), [("loss", "inputs"), ("drop", "group"), ("sample", "ready, count")]
)
def test_a_run_ends_in_one_line_if_a_function_of_its_task_fails(
    name: str, got: str, tmp_path: Path, forks: Forks
) -> None:
    done = run_of(tmp_path, forks, f"def {name}({got}):\n    return {got}.nothing\n")
    assert done.returncode == 2, done.stderr
    line, *others = done.stderr.strip().splitlines()
    assert line.startswith(f"llamarl: {name} of task.py must not raise, got AttributeError: ")
    assert line.endswith(f": return {got}.nothing)")
    assert others == ["llamarl: no version is saved in run"]


def test_the_family_of_the_page_computes_what_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"num_key_value_heads": 1, "sliding_window": None}
    expected = reference_logits(write_reference(tmp_path, "mistral", **changes))
    with pytest.raises(ValueError, match=r"model_type .* must be one of llama, .*, got 'mistral'"):
        read_architecture(tmp_path)
    monkeypatch.setattr(architecture, "FAMILIES", architecture.FAMILIES.copy())
    monkeypatch.setattr(architecture, "FAMILIES", architecture.FAMILIES)
    exec(block("model_family", "python"), {})
    assert relative_error(load_model(tmp_path).logits(token_ids(), LENGTHS), expected) <= 1e-5
    found = read_architecture(tmp_path)
    placed = BufferLayout(found, "float32").parameters.keys()
    assert placed == parameter_placements(found, TrainerConfig()).keys()
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"sliding_window": null', '"sliding_window": 64'))
    with pytest.raises(ValueError, match=r"sliding_window .* must be false or absent.*, got 64"):
        read_architecture(tmp_path)


def test_the_transport_of_the_page_carries_a_version_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "TRANSPORTS", routes.TRANSPORTS.copy())
    module = ModuleType("files")
    monkeypatch.setitem(sys.modules, "files", module)
    exec(block("transport", "python"), module.__dict__)
    assert routes.named("crosses_hosts") == "collective or files"

    def parameters(buffer: str, strides: tuple[int, int]) -> dict[str, ParameterLayout]:
        box = Box(start=(0, 0), stop=(40, 30), buffer=buffer, offset=0, strides=strides)
        return {"w": ParameterLayout(shape=(40, 30), dtype="float32", boxes=(box,))}

    weights = torch.randn(40, 30)
    writer = Writer(0, "a", {"w": weights}, parameters("w", (30, 1)))
    boxes = parameters("weights", (1, 40))
    memory = Memory(parameters=boxes, num_elements=1200, dtype=torch.float32)
    target = WeightBuffer(memory, WeightsConfig(), replica=0, rank=0, run_id="test", host="b")
    sending, receiving = split(
        plan([writer.layout()], [target.layout()]),
        source="trainer",
        replica=0,
        transport="files",
        rendezvous=str(tmp_path / "route"),
        message_bytes=1000,
    )
    target.connect(receiving.for_rank(0))
    writer.connect(0, sending.for_rank(0))
    writer.tensors.label(0)
    written = writer.write(0, [target.prepare(0)])
    assert target.verify(0) == written
    assert torch.equal(target.commit(0).view(30, 40).T, weights)
    target.close()


@pytest.mark.full
def test_an_installed_package_adds_a_transport_a_family_and_a_tracker(tmp_path: Path) -> None:
    """As pip leaves it: the modules of the pages, and the entry points of their pyproject.toml."""
    info = tmp_path / "mine-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0.1\n")
    lines = ""
    for page in ("transport", "model_family", "tracker"):
        project = tomllib.loads(block(page, "toml"))
        for group, entries in project["project"]["entry-points"].items():
            for name, module in entries.items():
                lines += f"[{group}]\n{name} = {module}\n"
                assert project["tool"]["setuptools"]["py-modules"] == [module]
                (tmp_path / f"{module}.py").write_text(block(page, "python"))
    (info / "entry_points.txt").write_text(lines)
    script = (
        "from llamarl.model.architecture import FAMILIES\n"
        "from llamarl.recipe.composition import reference\n"
        "from llamarl.publish.transports.routes import TRANSPORTS\n"
        "from llamarl.metrics.trackers import check_trackers\n"
        "import pkgutil\n"
        "print(*FAMILIES, *TRANSPORTS, *reference().groups['weights'])\n"
        "pkgutil.resolve_name(TRANSPORTS['files'].sender)\n"
        "check_trackers(['csv'])\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ask = functools.partial(
        subprocess.run, [sys.executable, "-c", script], env=environment, capture_output=True
    )
    done = ask(text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("files") == 2, "a transport, and a choice of weights"
    assert "mistral" in done.stdout.split()
    (tmp_path / "mistral_family.py").write_text("1 / 0\n")
    broken = ask(text=True)
    wanted = "while mistral_family, the entry point mistral of llamarl.families, loads"
    assert wanted in broken.stderr


def test_the_tracker_of_the_page_writes_every_scalar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "TRACKERS", trackers.TRACKERS.copy())
    exec(block("tracker", "python"), {})
    trackers.check_trackers(["csv"])
    tracker = trackers.open_trackers(["csv"], tmp_path, {}, 0)["csv"]
    tracker.log(3, {"reward/mean": 0.5, "trainer/lr": 1e-6}, {}, {})
    tracker.close()
    rows = (tmp_path / "metrics.csv").read_text().split()
    assert rows == ["3,reward/mean,0.5", "3,trainer/lr,1e-06"]
