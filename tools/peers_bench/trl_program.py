"""TRL's GRPOTrainer on a recipe: a program for the environment of `make rivals`.

    python -m peers_bench.trl_program JOB.json

JOB.json has the fields of `Job`. In the folder `out`, weights go into checkpoint/ and a line per
step, with llamarl's names, into metrics.jsonl. With several processes (torchrun) each has its share
of the rollouts, and the first one writes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import parse_response

from peers_bench.chat import load_tokenizer
from peers_bench.replayed_lengths import replay
from peers_bench.step_log import StepLog

END_LIMIT = timedelta(minutes=2)  # from the last step until the first process has written


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one run is given; sizes are those of all processes together."""

    recipe: str
    out: str
    num_steps: int
    seed: int
    num_prompts: int  # of a step
    num_generations: int
    micro_batch: int
    num_processes: int
    max_tokens: int
    max_turns: int
    temperature: float
    lr: float
    warmup_steps: int
    betas: Sequence[float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    pattern: str
    are_calls_gathered: bool
    lengths: Sequence[int]  # plain training: of the rollouts, in their order, again and again


class FirstRate(TrainerCallback):
    """Advances the schedule by one: TRL's first step would have learning rate 0."""

    def on_train_begin(self, *_: Any, lr_scheduler: Any, **__: Any) -> None:
        lr_scheduler.step()


def figures(job: Job, logs: Mapping[str, float]) -> dict[str, float]:
    """Of a step's line."""
    num_rollouts = job.num_prompts * job.num_generations
    num_tokens = round(logs["completions/mean_length"] * num_rollouts)
    return {"trainer/num_tokens": num_tokens, "reward/mean": logs["reward"]}


class Reward:
    """The recipe's reward: 1 if the last turn stopped and is the answer, else 0."""

    __name__ = "exact"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pattern: str) -> None:
        self._tokenizer, self._pattern = tokenizer, re.compile(pattern)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        answer: Sequence[str],
        last_turn: Sequence[str] | None = None,
        **_: Any,
    ) -> list[float]:
        texts = last_turn or [messages[-1]["content"] for messages in completions]
        rewards = []
        for text, ids, expected in zip(texts, completion_ids, answer, strict=True):
            match = self._pattern.search(text)
            is_stopped = ids[-1] == self._tokenizer.eos_token_id
            rewards.append(float(is_stopped and match is not None and match[1] == expected))
        return rewards


class PlainReward:
    """`reward` of the recipe's task.py."""

    __name__ = "task"

    def __init__(self, recipe: Path) -> None:
        self._reward = load_task(recipe).reward

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        return [self._reward(*pair) for pair in zip(prompts, completions, strict=True)]


class GatheredCalls:
    """A `rollout_func` that runs the calls of all rollouts of a turn together.

    TRL's own loop runs the calls of one rollout together, and one rollout after another.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], job: Job) -> None:
        self._tools = {tool.__name__: tool for tool in tools}
        self._job = job

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        tools = list(self._tools.values())
        heads: list[list[int]] = tokenizer.apply_chat_template(
            prompts, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        ids: list[list[int]] = [[] for _ in prompts]
        mask: list[list[int]] = [[] for _ in prompts]
        last = [""] * len(prompts)
        going = list(range(len(prompts)))
        for turn in range(1, self._job.max_turns + 1):
            prefixes = [heads[i] + ids[i] for i in going]
            answers, _ = trainer._generate_single_turn(prefixes, None, {}, num_generations=1)
            calls: dict[int, list[dict[str, Any]]] = {}
            for i, prefix, answer in zip(going, prefixes, answers, strict=True):
                written = answer[: self._job.max_tokens - len(ids[i])]
                ids[i] += written
                mask[i] += [1] * len(written)
                message = parse_response(tokenizer, written, prefix=prefix, tools=tools)
                last[i] = message["content"]
                if found := message.get("tool_calls"):
                    calls[i] = found
            if not calls or turn == self._job.max_turns:
                break
            going = []
            for i, said in zip(calls, asyncio.run(self._run_all(calls)), strict=True):
                observed = trainer._get_tool_suffix_ids(said)
                if len(ids[i]) + len(observed) <= self._job.max_tokens:
                    ids[i] += observed
                    mask[i] += [0] * len(observed)
                    going.append(i)
            if not going:
                break
        return {
            "prompt_ids": heads,
            "completion_ids": ids,
            "logprobs": None,
            "env_mask": mask,
            "last_turn": last,
        }

    async def _run_all(self, calls: dict[int, list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        runs = (asyncio.gather(*map(self._run, each)) for each in calls.values())
        return await asyncio.gather(*runs)

    async def _run(self, call: dict[str, Any]) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            result = await self._tools[name](**arguments)
        except Exception as error:  # noqa: BLE001  TRL's own loop says so too of a tool that raises
            result = {"error": str(error)}
        return {"role": "tool", "name": name, "content": str(result)}


def load_task(recipe: Path) -> Any:
    """The recipe's task.py."""
    spec = importlib.util.spec_from_file_location("task", recipe / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_rows(path: Path, *, is_plain: bool) -> Dataset:
    """The prompts in the order of the file: texts, or messages with their answers."""
    rows = map(json.loads, path.read_text().splitlines())
    if is_plain:
        return Dataset.from_list([{"prompt": row["question"]} for row in rows])
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
            for row in rows
        ]
    )


def make_settings(job: Job) -> GRPOConfig:
    """What TRL gets: the job, AIPO's loss on policy, and nothing that costs time for memory."""
    own = job.num_prompts * job.num_generations // job.num_processes
    micro_batch = min(own, job.micro_batch)
    settings = {
        "output_dir": job.out,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": job.num_steps,
        "seed": job.seed,
        "shuffle_dataset": False,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": own // micro_batch,
        "num_generations": job.num_generations,
        "max_completion_length": job.max_tokens,
        "max_tool_calling_iterations": job.max_turns - 1,
        "temperature": job.temperature,
        "loss_type": "dapo",
        "scale_rewards": "none",
        "beta": 0.0,
        "learning_rate": job.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": job.warmup_steps,
        "adam_beta1": job.betas[0],
        "adam_beta2": job.betas[1],
        "adam_epsilon": job.eps,
        "weight_decay": job.weight_decay,
        "max_grad_norm": job.max_grad_norm,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(**settings)


def make_trainer(job: Job) -> GRPOTrainer:
    """With the recipe's tools, or for plain training with the lengths of the job."""
    recipe = Path(job.recipe)
    checkpoint = recipe / "checkpoint"
    given: dict[str, Any]
    if job.lengths:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        given = {"reward_funcs": PlainReward(recipe)}
    else:
        tokenizer, tools = load_tokenizer(checkpoint), load_task(recipe).tools
        gathered = {"rollout_func": GatheredCalls(tools, job)}
        given = gathered if job.are_calls_gathered else {"tools": tools}
        given["reward_funcs"] = Reward(tokenizer, job.pattern)
    trainer = GRPOTrainer(
        model=str(checkpoint),
        args=make_settings(job),
        train_dataset=load_rows(recipe / "prompts.jsonl", is_plain=bool(job.lengths)),
        processing_class=tokenizer,
        callbacks=[FirstRate(), StepLog(job.out, "reward", partial(figures, job))],
        **given,
    )
    if job.lengths:
        replay(
            trainer.model,
            job.lengths,
            num_rows=job.num_prompts * job.num_generations // job.num_processes,
            rank=trainer.accelerator.process_index,
            num_ranks=job.num_processes,
            eos_token_id=tokenizer.eos_token_id,
        )
    return trainer


def train(job: Job) -> None:
    """Train and save."""
    trainer = make_trainer(job)
    trainer.train()
    if trainer.is_world_process_zero():
        out = Path(job.out)
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(out / "checkpoint")


def leave() -> NoReturn:
    """End this process, when the first one has written and all have no more to say to each other.

    An orderly end would close the process group and join threads, each of which may wait for
    another process that is at its own end.
    """
    if torch.distributed.is_initialized():
        torch.distributed.monitored_barrier(timeout=END_LIMIT)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    train(Job(**json.loads(Path(sys.argv[1]).read_text())))
    leave()
