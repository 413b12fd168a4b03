"""What the tools share that make the recipes with a small half-good checkpoint."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from llamarl.model import hf
from llamarl.model.architecture import read_architecture
from llamarl.model.attention import make_packing
from llamarl.model.transformer import Transformer

PAD, BOS, EOS = 0, 1, 2
ARCHITECTURE: dict[str, Any] = {
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
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts_per_tok": 2,
    "moe_intermediate_size": ARCHITECTURE["intermediate_size"],
    "norm_topk_prob": True,
}
"""What differs with experts in place of each feed-forward, which are as large as that was."""
HELD_OUT, PROMPTS, DEMONSTRATIONS = "held_out", "prompts", "demonstrations"
TENTHS = (HELD_OUT,) + (PROMPTS,) * 3 + (DEMONSTRATIONS,) * 6  # the set of a tenth of all questions

Numbers = tuple[int, ...]
Row = dict[str, str]
Figures = dict[str, float]


def split_of(numbers: Sequence[int]) -> str:
    """The set a question belongs to: the same numbers in another order are the same question."""
    key = " ".join(str(number) for number in sorted(numbers))
    return TENTHS[hashlib.sha256(key.encode()).digest()[0] % len(TENTHS)]


def draw_evenly(
    drawn: Iterator[Numbers], sizes: Sequence[int], num_rows: int, seed: int
) -> list[Numbers]:
    """The first `num_rows` of `drawn`, equally many of each size, in random order, and none twice,
    whatever its order."""
    quota = num_rows // len(sizes)
    found: dict[int, dict[Numbers, Numbers]] = {n: {} for n in sizes}
    for numbers in drawn:
        of_this_size = found[len(numbers)]
        if len(of_this_size) < quota:
            of_this_size.setdefault(tuple(sorted(numbers)), numbers)
        elif all(len(each) == quota for each in found.values()):
            break
    rows = [numbers for of_one_size in found.values() for numbers in of_one_size.values()]
    random.Random(f"order {seed}").shuffle(rows)
    return rows


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write them as a .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(
    folder: Path,
    pieces: Sequence[str],
    *,
    signs: str,
    special_tokens: Sequence[str],
    settings: Mapping[str, str],
) -> None:
    """Write a tokenizer whose digits and `signs` stand alone and whose words are one token each.

    The first four special tokens are those of padding, begin, end and unknown text. With a chat
    template in `settings` that writes the begin, the tokenizer does not.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    pattern = Regex(rf"\d|[{signs}]|[^\d{signs}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=ARCHITECTURE["vocab_size"],
        special_tokens=list(special_tokens),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    if "chat_template" not in settings:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = zip(("pad_token", "bos_token", "eos_token", "unk_token"), special_tokens, strict=False)
    all_settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(names),
        **settings,
        "clean_up_tokenization_spaces": False,
        "model_max_length": ARCHITECTURE["max_position_embeddings"],
    }
    write_json(folder / "tokenizer_config.json", all_settings)


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


def mean(values: Sequence[object]) -> float:
    """The share that is true; 0 of none."""
    return sum(bool(value) for value in values) / max(len(values), 1)


def run(
    words: str | None,
    write: Callable[[Path, int, int | None], None],
    evaluate: Callable[[Transformer, Tokenizer, int | None], Figures],
    misses: Callable[[Figures], list[str]],
) -> int:
    """The command line of a tool: `write(FOLDER, seed, rows)` all files, or evaluate a checkpoint;
    of so many demonstrations or questions, None for all."""
    parser = argparse.ArgumentParser(
        description=words, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a new folder for all files")
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations")
    parser.add_argument("--check", type=Path, help="a trained checkpoint to measure")
    parser.add_argument("--rows", type=int, help="only so many demonstrations, or questions")
    parser.add_argument("--experts", type=int, help="a mixture of so many experts per layer")
    arguments = parser.parse_args()
    if (arguments.out is None) == (arguments.check is None):
        parser.error("give --out or --check")
    if arguments.check is not None:
        return _check(arguments.check, evaluate, misses, arguments.rows)
    checkpoint = arguments.out / "checkpoint"
    checkpoint.mkdir(parents=True)
    write(arguments.out, arguments.seed, arguments.rows)
    mixture = MIXTURE | {"num_experts": arguments.experts} if arguments.experts else {}
    write_json(checkpoint / "config.json", ARCHITECTURE | mixture)
    save(new_model(checkpoint, arguments.seed), checkpoint)
    return 0


def _check(
    checkpoint: Path,
    evaluate: Callable[[Transformer, Tokenizer, int | None], Figures],
    misses: Callable[[Figures], list[str]],
    num_rows: int | None,
) -> int:
    """Print what a trained checkpoint can do; 1 unless it is half-good."""
    model = Transformer(read_architecture(checkpoint))
    hf.load_into(dict(model.named_parameters()), checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    figures = evaluate(model, tokenizer, num_rows)
    print(json.dumps(figures, indent=2))
    for rule in misses(figures):
        print(f"not half-good: {rule}", file=sys.stderr)
    return 1 if misses(figures) else 0
