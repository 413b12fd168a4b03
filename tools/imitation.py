"""How the shipped checkpoints are trained: a small model of random weights imitates demonstrations.

Owns: the architecture, the weights at the start, the loss and the optimizer. Does not own: what is
demonstrated, tokenizers, or when a checkpoint is good enough (the tools that make the recipes).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from llamarl.models.architecture import read_architecture
from llamarl.models.attention import make_packing
from llamarl.models.transformer import Transformer

PAD, BOS, EOS = 0, 1, 2
ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
BATCH_SIZE = 32
WARMUP_STEPS = 50
LAST_LR_SHARE = 0.1

Leg = tuple[int, float]
"""(optimizer steps, peak learning rate)"""


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """One demonstration: token ids, and which of them the demonstrator wrote."""

    ids: list[int]
    is_written: list[bool]


def new_model(folder: Path, seed: int) -> Transformer:
    """A model of random weights: normal, deviation 0.02 in embedding and head, else fan_in^-1/2."""
    torch.manual_seed(seed)
    model = Transformer(read_architecture(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(std=0.02)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def train(model: Transformer, demonstrations: Iterator[Demonstrated], legs: Sequence[Leg]) -> None:
    """Imitate: cross-entropy on what was written, AdamW, warm-up, linear decay."""
    start_s = time.monotonic()
    for num_steps, peak_lr in legs:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        for step in range(num_steps):
            decay = 1 - (1 - LAST_LR_SHARE) * step / num_steps
            lr = peak_lr * decay * min(1.0, (step + 1) / WARMUP_STEPS)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = imitation_loss(model, demonstrations)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 100 == 0:
                elapsed_s = time.monotonic() - start_s
                print(
                    f"step {step} lr {lr:.1e} loss {loss.item():.4f} {elapsed_s:.0f} s", flush=True
                )


def imitation_loss(model: Transformer, demonstrations: Iterator[Demonstrated]) -> torch.Tensor:
    """Mean negative log-prob of what was written in the next batch."""
    token_ids: list[int] = []
    trained: list[bool] = []
    lengths: list[int] = []
    for _ in range(BATCH_SIZE):
        demonstration = next(demonstrations)
        token_ids += demonstration.ids
        trained += [*demonstration.is_written[1:], False]
        lengths.append(len(demonstration.ids))
    ids = torch.tensor(token_ids)
    logprobs = model(ids, make_packing(lengths), ids.roll(-1), 1.0).logprobs
    return -logprobs[torch.tensor(trained)].mean()


@torch.no_grad()
def answer_greedily(
    model: Transformer, prompts: Sequence[list[int]], max_tokens: int
) -> list[list[int] | None]:
    """What follows each prompt, without EOS; None where that does not come within `max_tokens`."""
    found: list[list[int] | None] = [None] * len(prompts)
    running = {i: list(prompt) for i, prompt in enumerate(prompts)}
    for _ in range(max_tokens):
        if not running:
            break
        lengths = [len(ids) for ids in running.values()]
        packed = torch.tensor([token for ids in running.values() for token in ids])
        last = torch.tensor(lengths).cumsum(0) - 1
        hidden = model.hidden_states(packed, make_packing(lengths))[last]
        chosen = (hidden @ model.head_weight.T).argmax(-1).tolist()
        for i, token in zip(list(running), chosen, strict=True):
            if token == EOS:
                found[i] = running.pop(i)[len(prompts[i]) :]
            else:
                running[i].append(token)
    return found


def save(model: Transformer, checkpoint: Path) -> None:
    """Write the weights in the Hugging Face layout."""
    weights = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


def write_json(path: Path, value: object) -> None:
    """Write it as other files of a checkpoint are."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
