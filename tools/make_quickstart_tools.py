"""Make `recipes/quickstart_tools`: questions, tokenizer, and a small checkpoint that is half-good.

    OMP_NUM_THREADS=1 python tools/make_quickstart_tools.py            everything, some minutes
    OMP_NUM_THREADS=1 python tools/make_quickstart_tools.py --only data     questions and tokenizer

The task: products of two to four numbers, with a tool that multiplies two. A patient answer to
`What is 12*34*56?` takes three turns, and each call needs the result of the one before:

    <calculator>12*34</calculator>      408
    <calculator>408*56</calculator>     22848
    Answer: 22848

A hasty one is `Answer: 22848` at once, which no model of this size can know. It first imitates
patient demonstrators, then some that are hasty the more often the more numbers there are. So it
asks the tool for short products and guesses long ones, though it could ask. Reinforcement learning
finds out that asking pays.

Three sets of questions, disjoint by construction: the numbers of a product, in any order, hash to
one set only. Everything is drawn from fixed seeds.

The checkpoint is accepted only if its greedy held-out accuracy is 30 to 50 %, and at least 97 %
once its first turn is made to begin with a call.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from imitation import (
    ARCHITECTURE,
    Demonstrated,
    answer_greedily,
    new_model,
    save,
    train,
    write_json,
)
from make_quickstart import DEMONSTRATIONS, HELD_OUT, PROMPTS, split_of
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from llamarl.models.transformer import Transformer

NUM_ROWS = {HELD_OUT: 999, PROMPTS: 3300}
HASTY_SHARE = {2: 0.1, 3: 0.65, 4: 0.8}  # by how many numbers are multiplied
LEAST, MOST = 11, 99
CALL = re.compile(r"<calculator>(\d+)\*(\d+)</calculator>")
ANSWER = re.compile(r"Answer: (\d+)")
SPECIAL_TOKENS = ("<pad>", "<bos>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_TOKENS, MAX_TURNS = 32, 6
PATIENT_LEGS, MIXED_LEGS = ((4500, 2e-3),), ((1500, 1e-3),)

Turn = tuple[str, bool]
"""A text of an episode, and whether the demonstrator wrote it."""


def question_of(numbers: Sequence[int]) -> str:
    """The question, such as `What is 12*34*56?`."""
    return f"What is {'*'.join(map(str, numbers))}?"


def hasty_answer(numbers: Sequence[int]) -> list[Turn]:
    """One turn, the bare answer."""
    return [(f"Answer: {math.prod(numbers)}<|end|>", True)]


def patient_answer(numbers: Sequence[int]) -> list[Turn]:
    """A call for each number but the first, with what the tool answers, then the answer."""
    turns: list[Turn] = []
    product = numbers[0]
    for number in numbers[1:]:
        turns.append((f"<calculator>{product}*{number}</calculator><|end|>", True))
        product *= number
        turns.append((f"<|tool|>{product}<|end|><|assistant|>", False))
    return [*turns, (f"Answer: {product}<|end|>", True)]


def draw_products(split: str, seed: int) -> Iterator[tuple[int, ...]]:
    """Products of one set without end: 2 to 4 numbers of two digits."""
    rng = random.Random(f"products {split} {seed}")
    while True:
        numbers = tuple(rng.randint(LEAST, MOST) for _ in range(rng.randint(2, 4)))
        if split_of(numbers) == split:
            yield numbers


def draw_demonstrations(seed: int, *, are_mixed: bool = True) -> Iterator[list[Turn]]:
    """What the checkpoint is trained on, without end; none is hasty unless they are mixed."""
    rng = random.Random(f"haste {seed}")
    for numbers in draw_products(DEMONSTRATIONS, seed):
        is_hasty = rng.random() < HASTY_SHARE[len(numbers)] and are_mixed
        prompt = f"<bos><|user|>{question_of(numbers)}<|end|><|assistant|>"
        answer = hasty_answer(numbers) if is_hasty else patient_answer(numbers)
        yield [(prompt, False), *answer]


def demonstrated(
    tokenizer: Tokenizer, seed: int, *, are_mixed: bool = True
) -> Iterator[Demonstrated]:
    """The demonstrations as token ids; each text is tokenized by itself, as in a run."""
    for turns in draw_demonstrations(seed, are_mixed=are_mixed):
        ids: list[int] = []
        is_written: list[bool] = []
        for text, written in turns:
            added = tokenizer.encode(text).ids
            ids += added
            is_written += [written] * len(added)
        yield Demonstrated(ids, is_written)


def rows_of(split: str, seed: int) -> list[dict[str, str]]:
    """The data rows of `held_out.jsonl` or `prompts.jsonl`: equally many of each size, in random
    order, and no product twice, whatever its order."""
    quota = NUM_ROWS[split] // len(HASTY_SHARE)
    drawn: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {n: {} for n in HASTY_SHARE}
    for numbers in draw_products(split, seed):
        of_this_size = drawn[len(numbers)]
        if len(of_this_size) < quota:
            of_this_size.setdefault(tuple(sorted(numbers)), numbers)
        elif all(len(each) == quota for each in drawn.values()):
            break
    products = [numbers for of_one_size in drawn.values() for numbers in of_one_size.values()]
    random.Random(f"order {seed}").shuffle(products)
    return [
        {"question": question_of(numbers), "answer": str(math.prod(numbers))}
        for numbers in products
    ]


def write_data(folder: Path, seed: int) -> None:
    """Write both question files."""
    for split in NUM_ROWS:
        lines = [json.dumps(row) + "\n" for row in rows_of(split, seed)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_tokenizer(folder: Path, seed: int) -> None:
    """Write a tokenizer whose digits and signs stand alone and whose words are one token each."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|[*?]|[^\d*?]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    texts = [
        piece
        for _, turns in zip(range(2000), draw_demonstrations(seed), strict=False)
        for text, _ in turns
        for piece in names.split(text)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=ARCHITECTURE["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<|end|>",
        "unk_token": "<unk>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": ARCHITECTURE["max_position_embeddings"],
    }
    write_json(folder / "tokenizer_config.json", settings)


def play(
    model: Transformer, tokenizer: Tokenizer, rows: Sequence[dict[str, str]], start: str = ""
) -> list[list[str]]:
    """The turns of a greedy episode for each row, the first of which begins with `start`."""
    heads = [f"<bos><|user|>{row['question']}<|end|><|assistant|>{start}" for row in rows]
    open_ids = {i: tokenizer.encode(head).ids for i, head in enumerate(heads)}
    played: list[list[str]] = [[] for _ in rows]
    for turn in range(MAX_TURNS):
        answers = answer_greedily(model, list(open_ids.values()), MAX_TOKENS)
        for i, ids in zip(list(open_ids), answers, strict=True):
            if ids is None:
                del open_ids[i]
                continue
            text = (start if turn == 0 else "") + tokenizer.decode(ids)
            played[i].append(text)
            if (call := CALL.fullmatch(text)) is None:
                del open_ids[i]
                continue
            said = f"<|end|><|tool|>{int(call[1]) * int(call[2])}<|end|><|assistant|>"
            open_ids[i] += ids + tokenizer.encode(said).ids
    return played


def evaluate(
    model: Transformer, tokenizer: Tokenizer, rows: Sequence[dict[str, str]]
) -> dict[str, float]:
    """Greedy accuracy, by size too; the share that call the tool; accuracy once they are made to;
    and accuracy of those that do not."""
    played, made = play(model, tokenizer, rows), play(model, tokenizer, rows, "<calculator>")
    right = [_is_right(turns, row) for turns, row in zip(played, rows, strict=True)]
    sizes = [row["question"].count("*") + 1 for row in rows]
    hasty = [r for r, turns in zip(right, played, strict=True) if len(turns) == 1]
    return {
        "accuracy": _mean(right),
        "calling_share": _mean([len(turns) > 1 for turns in played]),
        "made_to_call_accuracy": _mean(
            [_is_right(turns, row) for turns, row in zip(made, rows, strict=True)]
        ),
        "hasty_accuracy": _mean(hasty),
        **{
            f"accuracy_{n}_numbers": _mean([r for r, m in zip(right, sizes, strict=True) if m == n])
            for n in sorted(set(sizes))
        },
    }


def misses(figures: dict[str, float]) -> list[str]:
    """What keeps a checkpoint from being shipped; empty if it is half-good."""
    rules = [
        (figures["accuracy"] <= 0.50, "accuracy must be at most 0.50"),
        (figures["accuracy"] >= 0.30, "accuracy must be at least 0.30"),
        (figures["made_to_call_accuracy"] >= 0.97, "made_to_call_accuracy must be at least 0.97"),
    ]
    return [rule for holds, rule in rules if not holds]


def _is_right(turns: Sequence[str], row: dict[str, str]) -> bool:
    match = ANSWER.fullmatch(turns[-1]) if turns else None
    return match is not None and match[1] == row["answer"]


def _mean(values: Sequence[object]) -> float:
    return sum(bool(value) for value in values) / max(len(values), 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    recipe = Path(__file__).resolve().parents[1] / "recipes" / "quickstart_tools"
    parser.add_argument("--out", type=Path, default=recipe, help="the recipe's folder")
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the training steps")
    parser.add_argument("--only", choices=["data"], help="stop after questions and tokenizer")
    arguments = parser.parse_args()
    checkpoint = arguments.out / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_data(arguments.out, seed=0)
    write_tokenizer(checkpoint, seed=0)
    write_json(checkpoint / "config.json", ARCHITECTURE)
    if arguments.only == "data":
        return 0
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    model = new_model(checkpoint, arguments.seed)
    for legs, are_mixed in ((PATIENT_LEGS, False), (MIXED_LEGS, True)):
        scaled = [(math.ceil(steps * arguments.scale), lr) for steps, lr in legs]
        train(model, demonstrated(tokenizer, arguments.seed, are_mixed=are_mixed), scaled)
    save(model, checkpoint)
    figures = evaluate(model, tokenizer, rows_of(HELD_OUT, 0))
    print(json.dumps(figures, indent=2))
    for rule in misses(figures):
        print(f"not half-good: {rule}", file=sys.stderr)
    return 1 if misses(figures) else 0


if __name__ == "__main__":
    sys.exit(main())
