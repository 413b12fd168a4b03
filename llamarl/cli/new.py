"""The command `llamarl new`: it writes a recipe of ten lines, which composes to a checked config.
It fetches nothing and replaces no file."""

import argparse
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from llamarl.core.config.inputs import ENVIRONMENT
from llamarl.core.device.names import CPU, DEVICES, GPU, has_driver, is_gpu
from llamarl.core.extensions import FILE
from llamarl.core.fields import require, require_choice
from llamarl.core.files import read_object
from llamarl.core.records import FALLBACKS, find_value
from llamarl.model.architecture import read_settings
from llamarl.prompts.files import read_rows
from llamarl.recipe.composition import compose, to_config
from llamarl.recipe.hub import is_hub_name
from llamarl.recipe.local_inputs import CHECKPOINT, HELD_OUT, PROMPTS, path_here
from llamarl.scoring import judge
from llamarl.scoring.rewards import REWARDS, TASK

REWARD_CHOICES = [name for name in REWARDS if name != ENVIRONMENT]  # it has tools
USAGE = f"""\
usage: llamarl new FOLDER --model MODEL --data PROMPTS [OPTION VALUE ...]

Writes FOLDER/run.yaml, and with --reward task a FOLDER/{FILE} to be filled in.

  --model MODEL          a checkpoint's folder, or hf:ORG/NAME
  --data PROMPTS         a .jsonl, .parquet or .arrow file, or hf:ORG/NAME[/CONFIG][/SPLIT]
  --held-out PROMPTS     the same for evaluation (none by default)
  --reward REWARD        {", ".join(REWARD_CHOICES)} (math by default)
  --prompt-field FIELD   of the question (found in the first row, if the data are here)
  --answer-field FIELD   of the expected answer (the same)
  --chat                 questions go into the model's chat template (as for a model that is
                         here and has one)
  --device DEVICE        {", ".join(DEVICES)} (what this machine has)
"""
# The first of each is the key's default.
PROMPT_FIELDS = ("question", "problem", "query", "instruction", "input", "messages")
ANSWER_FIELDS = (
    *("answer", "solution", "ground_truth", "target", "label", "final_answer", "output"),
    *("completion", "response"),
)
HALVES = ("input", "context")  # of a question, beside an instruction, as in Alpaca's rows
JUDGE = {"url": "http://127.0.0.1:8000/v1", "model": "judge"}  # to be changed
FORM = "Solve the problem step by step and put the final answer into \\boxed{}."
CONTEXT = 1024  # tokens of prompt and completion, or what the model allows
ANSWER_SHARE = 0.75  # of the context, at most
TRY_TOKENS = 32  # of a completion, where a recipe is only tried
TASK_TEXT = '''\
def reward(prompt, completion):
    """1 or more counts as correct; `prompt.fields` is the row of the prompt file."""
    return {value}
'''
ENDS = "float(completion.strip().endswith(str(prompt.fields{answer})))"
ANY = "float(bool(completion.strip()))"


def new(arguments: list[str]) -> str:
    """Write the recipe that the arguments ask for; return a text about what was written and what
    comes next. ValueError for arguments that make no recipe, or a folder that has one."""
    options = _parse(arguments)
    folder = Path(options.folder)
    for name in ("run.yaml", FILE) if options.reward == TASK else ("run.yaml",):
        require(not (folder / name).exists(), "FOLDER", f"not hold a {name}", options.folder)
    model, data = path_here(CHECKPOINT, options.model), path_here(PROMPTS, options.data)
    for flag, text, path in (("--model", options.model, model), ("--data", options.data, data)):
        require(path is not None or is_hub_name(text), flag, "exist, or be hf:ORG/NAME", text)
    if options.held_out is not None:
        is_there = path_here(HELD_OUT, options.held_out) or is_hub_name(options.held_out)
        require(bool(is_there), "--held-out", "exist, or be hf:ORG/NAME", options.held_out)
    row = next((row for _, row in read_rows(data)), {}) if data is not None else None
    fields = _fields(options, row)
    recipe = _recipe(options, fields, model, row)
    files = {"run.yaml": "".join(f"{key}: {_flow(value)}\n" for key, value in recipe.items())}
    if options.reward == TASK:
        value = ANY
        if (answer := fields.get("answer_field")) is not None:
            place = _place(answer, row)
            names = [place] if row is None or place in row else place.split(".")
            value = ENDS.format(answer="".join(f"[{name!r}]" for name in names))
        files[FILE] = TASK_TEXT.format(value=value)
    _write(folder, files)
    written = " and ".join(str(folder / name) for name in files)
    from_row = "" if row is not None else " (the rows are not here yet: change what differs)"
    plain = "" if options.chat or model is not None else "questions are plain text (else: --chat)\n"
    asked = f"{judge.KEY} names {JUDGE['model']} at {JUDGE['url']}: change it to your judge\n"
    plain += asked if options.reward == judge.NAME else ""
    what = ["question", "expected answer are"] if len(fields) > 1 else ["question is"]
    places = " and ".join(_place(field, row) for field in fields.values())
    small = ["cluster=inline", "num_steps=2", "trainer.groups_per_step=2", "algorithm.filters=[]"]
    small += [f"sampling.max_tokens={min(TRY_TOKENS, recipe['sampling']['max_tokens'])}"]
    small += ["evaluation.max_prompts=8"] * (options.held_out is not None)
    train = ["llamarl", "train", "--config-dir", str(folder)]
    return (
        f"written: {written}\n"
        f"{' and '.join(what)} in {places}{from_row}\n{plain}"
        f"try it:  {shlex.join([*train, *small])}\n"
        f"train:   {shlex.join(train)}\n"
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("folder", nargs="?")
    for name in ("model", "data", "held-out", "prompt-field", "answer-field"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--reward", default="math")
    parser.add_argument("--device", default=GPU if has_driver() else CPU)
    try:
        options, others = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        must = f"{error.argument_name} must have a value (llamarl new --help), got none"
        raise ValueError(must) from error
    for flag, choices in (("reward", REWARD_CHOICES), ("device", DEVICES)):
        require_choice(f"--{flag}", getattr(options, flag), choices)
    require(not others, "an option of `llamarl new`", "be one of its help", others[:1])
    for name in ("folder", "model", "data"):
        label = "FOLDER" if name == "folder" else f"--{name}"
        require(bool(getattr(options, name)), label, "be given (llamarl new --help)", None)
    return options


def _fields(options: argparse.Namespace, row: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the fields of question and answer; by default those that a row has, if there is one. A
    reward of one's own needs no answer."""
    is_graded = REWARDS[options.reward].find_answer
    fields = {}
    for key, given, usual in (
        ("prompt_field", options.prompt_field, PROMPT_FIELDS),
        ("answer_field", options.answer_field, ANSWER_FIELDS),
    ):
        flag = f"--{key.replace('_', '-')}"
        is_question = key == "prompt_field"
        is_needed = is_question or is_graded
        kinds: Any = object if is_question else str | int | float  # an answer is no list
        values = {name: find_value(row, name) if row is not None else "" for name in usual}
        held = (n for n, value in values.items() if value is not None and isinstance(value, kinds))
        found = given or next(held, None)
        names = ", ".join(row) if row else "none"
        must = f"name a field of the rows, which have {names}"
        is_there = row is None or not is_needed or find_value(row, found or "") is not None
        require(is_there, flag, must, given)
        half = next((name for name in HALVES if row and row.get(name)), None)
        if is_question and given is None and found == "instruction" and half is not None:
            must = "name a field with the whole question (join them, or name the one that counts)"
            require(False, flag, must, f"rows with {found} and {half}")
        if found is not None or is_needed or options.reward != TASK:
            fields[key] = found or usual[0]
    return fields


def _place(field: str, row: Mapping[str, Any] | None) -> str:
    """Return the name by which the row has the field."""
    is_other = row is not None and field not in row and field in FALLBACKS
    return FALLBACKS[field] if is_other else field


def _recipe(
    options: argparse.Namespace,
    fields: Mapping[str, str],
    model: Path | None,
    row: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the keys and values of the file, in order; values that are the default are left
    out."""
    folder, reward, device = Path(options.folder), options.reward, options.device
    is_chat = options.chat or (model is not None and _has_template(model))
    groups = {"data": "chat"} if is_chat else {}
    groups |= {"reward": reward} if reward != "math" else {}
    groups |= {"weights": "cuda_ipc", "placement": "colocated"} if is_gpu(device) else {}
    model_here, *files = (  # paths from here as those from the recipe's folder
        text if is_hub_name(text) or os.path.isabs(text) else os.path.relpath(text, folder)
        for text in (options.model, options.data, options.held_out)
        if text is not None
    )
    data = dict(zip(("prompts", "held_out"), files, strict=False))
    data |= {} if (field := fields["prompt_field"]) == PROMPT_FIELDS[0] else {"prompt_field": field}
    if is_chat and reward == "math" and not isinstance(find_value(row or {}, field), list):
        data["system"] = FORM
    positions: Any = read_settings(model)[0].get("max_position_embeddings") if model else None
    is_known = type(positions) is int and positions > 1
    context = min(CONTEXT, positions) if is_known else CONTEXT
    answer = fields.get("answer_field", ANSWER_FIELDS[0])
    settings: dict[str, Any] = {} if answer == ANSWER_FIELDS[0] else {"answer_field": answer}
    settings |= {"pattern": "Answer: (.+)"} if REWARDS[reward].num_groups is not None else {}
    settings |= {"judge": JUDGE} if reward == judge.NAME else {}
    recipe: dict[str, Any] = {
        "defaults": ["config", *({f"override /{k}": v} for k, v in groups.items()), "_self_"],
        "num_steps": 100,
        "model": {"checkpoint": model_here},
        "data": data,
        **({"reward": settings} if settings else {}),
        "sampling": {"max_tokens": int(context * ANSWER_SHARE)},
        "generator": {"max_model_len": context},
        "trainer": {"groups_per_step": 32, "lr": 1e-6},
    }
    if is_gpu(device):
        recipe["generator"] |= {"device": device, "dtype": "bfloat16", "max_num_seqs": 256}
        recipe["trainer"] |= {"device": device, "compute_dtype": "bfloat16"}
        recipe["trainer"] |= {"activation_checkpointing": "selective"}
        recipe |= {"staleness": {"max_staleness": 0}, "cluster": {"num_gpus_per_host": 1}}
    return recipe


def _has_template(model: Path) -> bool:
    path = model / "tokenizer_config.json"
    has_file = any(model.glob("chat_template*"))
    return has_file or (path.is_file() and bool(read_object(path).get("chat_template")))


def _flow(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files; remove them again if they make no recipe."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"FOLDER must be one that can be written to, got {error}") from error
    try:
        to_config(compose(folder, []))
    except ValueError:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise
