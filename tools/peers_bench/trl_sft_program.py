"""TRL's SFTTrainer on demonstrations: a program for the environment of `make rivals`.

    python -m peers_bench.trl_sft_program JOB.json

JOB.json has the fields of `Job`. A line per step, with the loss and seconds, goes into
metrics.jsonl in the folder `out`, with llamarl's names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from peers_bench.step_log import StepLog


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one run is given. With `is_packed` the demonstrations of a step are one sequence
    (padding_free); else each is padded to the longest of its step."""

    checkpoint: str
    demonstrations: str
    out: str
    num_steps: int
    batch_size: int
    is_packed: bool
    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    max_grad_norm: float


def figures(logs: Mapping[str, float]) -> dict[str, float]:
    """Of a step's line."""
    return {"loss/train": float(logs["loss"]), "policy/grad_norm": float(logs["grad_norm"])}


class InOrder(SFTTrainer):  # type: ignore[misc]
    """Takes the demonstrations in the order of the file."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(job.demonstrations).read_text().splitlines()]
    pairs = [{"prompt": row["question"], "completion": row["completion"]} for row in rows]
    model = AutoModelForCausalLM.from_pretrained(
        job.checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    )
    settings = SFTConfig(
        output_dir=job.out,
        max_steps=job.num_steps,
        per_device_train_batch_size=job.batch_size,
        gradient_accumulation_steps=1,
        max_length=None,
        padding_free=job.is_packed,
        completion_only_loss=True,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=job.betas[0],
        adam_beta2=job.betas[1],
        adam_epsilon=job.eps,
        weight_decay=job.weight_decay,
        max_grad_norm=job.max_grad_norm,
        activation_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        loss_type="nll",
    )
    trainer = InOrder(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(job.checkpoint),
        callbacks=[StepLog(job.out, "loss", figures)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
