"""Plain training: a recipe of prompts and answers in one turn, everything from fixed seeds.

Rollout i of a run writes exactly as many tokens as entry i of lengths.json says, on both sides.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from bench_generate import TAIL_MEAN, tail_lengths
from generate_bench.engines import ARCHITECTURE, random_model
from tokenizers import Tokenizer, models, pre_tokenizers

EQUAL, LONG_TAIL = "equal lengths", "long tail"
NUM_PROMPTS = 512
PROMPT_TOKENS = 16
EQUAL_TOKENS = 128
SPECIAL = ("<pad>", "<eos>", "<unk>")
TASK = '''"""The share of even words: about 0.5 at the start."""


def reward(prompt, completion):
    words = completion.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)
'''
RUN = """defaults: [config, {{override /algorithm: aipo}}, {{override /reward: task}}, _self_]

model: {{checkpoint: checkpoint}}
data: {{prompts: prompts.jsonl, max_prompt_tokens: {prompt_tokens}}}
sampling: {{max_tokens: {most}, replay_lengths: lengths.json}}
algorithm: {{filters: []}}
staleness: {{max_staleness: 1}}
generator: {{max_num_seqs: 128, max_model_len: {context}}}
trainer: {{groups_per_step: 8, tokens_per_micro_batch: 4096, lr: 2.0e-3, warmup_steps: 2}}
"""


def write_plain_recipe(folder: Path, lengths: str) -> Path:
    """The recipe for `lengths`: EQUAL, or LONG_TAIL (log-normal, 99th percentile six times the
    mean)."""
    folder.mkdir()
    replayed = [EQUAL_TOKENS] if lengths == EQUAL else tail_lengths()
    most = EQUAL_TOKENS if lengths == EQUAL else 8 * TAIL_MEAN
    (folder / "lengths.json").write_text(json.dumps(replayed))
    (folder / "task.py").write_text(TASK)
    sizes = {"prompt_tokens": PROMPT_TOKENS, "most": most, "context": PROMPT_TOKENS + most}
    (folder / "run.yaml").write_text(RUN.format(**sizes))
    words = np.random.default_rng(0).integers(
        0, ARCHITECTURE.vocab_size - len(SPECIAL), (NUM_PROMPTS, PROMPT_TOKENS)
    )
    rows = [{"question": " ".join(f"w{word}" for word in prompt)} for prompt in words]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _write_checkpoint(folder / "checkpoint")
    return folder


def _write_checkpoint(folder: Path) -> None:
    """Random weights, and a token for each word that is separated by spaces."""
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    random_model(ARCHITECTURE, torch.float32, **ids).save_pretrained(folder)
    names = [*SPECIAL, *(f"w{i}" for i in range(ARCHITECTURE.vocab_size - len(SPECIAL)))]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **kinds}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
