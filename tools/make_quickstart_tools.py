"""Make what `recipes/quickstart_tools` begins with: questions, tokenizer, demonstrations, weights.

    python tools/make_quickstart_tools.py --out FOLDER           all, for `llamarl sft`
    python tools/make_quickstart_tools.py --check CHECKPOINT     is what came of it half-good?

The task: products of two to four numbers, with a tool that multiplies two. A patient answer to
`What is 12*34*56?` takes three turns, and each call needs the result of the one before:

    <calculator>12*34</calculator>      408
    <calculator>408*56</calculator>     22848
    Answer: 22848

A hasty one is `Answer: 22848` at once, which no model of this size can know. The checkpoint first
imitates patient demonstrators, then some that are hasty the more often the more numbers there are.
So it asks the tool for short products and guesses long ones, though it could ask. Reinforcement
learning finds out that asking pays.

Three sets of questions, disjoint by construction: the numbers of a product, in any order, hash to
one set only. Everything is drawn from fixed seeds.

A checkpoint is half-good if its greedy held-out accuracy is 30 to 50 %, and at least 97 % once its
first turn is made to begin with a call.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from half_good import (
    DEMONSTRATIONS,
    HELD_OUT,
    PROMPTS,
    Figures,
    Numbers,
    Row,
    answer_greedily,
    draw_evenly,
    mean,
    run,
    split_of,
    train_tokenizer,
    write_rows,
)
from tokenizers import Tokenizer

from llamarl.model.transformer import Transformer

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
NUM_PATIENT, NUM_MIXED = 144_000, 48_000

Turn = tuple[str, str]
"""Who wrote a turn, and its text."""


def question_of(numbers: Sequence[int]) -> str:
    """The question, such as `What is 12*34*56?`."""
    return f"What is {'*'.join(map(str, numbers))}?"


def hasty_answer(numbers: Sequence[int]) -> list[Turn]:
    """One turn, the bare answer."""
    return [("assistant", f"Answer: {math.prod(numbers)}")]


def patient_answer(numbers: Sequence[int]) -> list[Turn]:
    """A call for each number but the first, with what the tool answers, then the answer."""
    turns: list[Turn] = []
    product = numbers[0]
    for number in numbers[1:]:
        turns.append(("assistant", f"<calculator>{product}*{number}</calculator>"))
        product *= number
        turns.append(("tool", str(product)))
    return [*turns, ("assistant", f"Answer: {product}")]


def draw_products(split: str, seed: int) -> Iterator[Numbers]:
    """Products of one set without end: 2 to 4 numbers of two digits."""
    rng = random.Random(f"products {split} {seed}")
    while True:
        numbers = tuple(rng.randint(LEAST, MOST) for _ in range(rng.randint(2, 4)))
        if split_of(numbers) == split:
            yield numbers


def draw_demonstrations(seed: int, *, are_mixed: bool) -> Iterator[list[Turn]]:
    """What the checkpoint is trained on, without end; none is hasty unless they are mixed."""
    rng = random.Random(f"haste {seed}")
    for numbers in draw_products(DEMONSTRATIONS, seed):
        is_hasty = rng.random() < HASTY_SHARE[len(numbers)] and are_mixed
        answer = hasty_answer(numbers) if is_hasty else patient_answer(numbers)
        yield [("user", question_of(numbers)), *answer]


def rows_of(split: str, seed: int) -> list[Row]:
    """The data rows of `held_out.jsonl` or `prompts.jsonl`."""
    drawn = draw_products(split, seed)
    return [
        {"question": question_of(numbers), "answer": str(math.prod(numbers))}
        for numbers in draw_evenly(drawn, [*HASTY_SHARE], NUM_ROWS[split], seed)
    ]


def write_tokenizer(folder: Path, seed: int) -> None:
    """Write the tokenizer of such conversations, with their chat template."""
    demonstrations = islice(draw_demonstrations(seed, are_mixed=True), 2000)
    pieces = [text for turns in demonstrations for _, text in turns]
    settings = {"chat_template": CHAT_TEMPLATE}
    train_tokenizer(folder, pieces, signs="*?", special_tokens=SPECIAL_TOKENS, settings=settings)


def write(folder: Path, seed: int, num_rows: int | None) -> None:
    """Write questions, demonstrations and tokenizer; only demonstrations differ by seed."""
    for split in NUM_ROWS:
        write_rows(folder / f"{split}.jsonl", rows_of(split, 0))
    for name, num_all in (("patient", NUM_PATIENT), ("mixed", NUM_MIXED)):
        drawn = draw_demonstrations(seed, are_mixed=name == "mixed")
        rows = (
            {"messages": [{"role": role, "content": text} for role, text in turns]}
            for turns in islice(drawn, num_rows or num_all)
        )
        write_rows(folder / f"{name}.jsonl", rows)
    write_tokenizer(folder / "checkpoint", 0)


def play(
    model: Transformer, tokenizer: Tokenizer, rows: Sequence[Row], start: str = ""
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


def evaluate(model: Transformer, tokenizer: Tokenizer, num_rows: int | None) -> Figures:
    """Greedy accuracy, by size too; the share that call the tool; accuracy once they are made to;
    and accuracy of those that do not."""
    rows = rows_of(HELD_OUT, 0)[:num_rows]
    played, made = play(model, tokenizer, rows), play(model, tokenizer, rows, "<calculator>")
    right = [_is_right(turns, row) for turns, row in zip(played, rows, strict=True)]
    sizes = [row["question"].count("*") + 1 for row in rows]
    hasty = [r for r, turns in zip(right, played, strict=True) if len(turns) == 1]
    return {
        "accuracy": mean(right),
        "calling_share": mean([len(turns) > 1 for turns in played]),
        "made_to_call_accuracy": mean(
            [_is_right(turns, row) for turns, row in zip(made, rows, strict=True)]
        ),
        "hasty_accuracy": mean(hasty),
        **{
            f"accuracy_{n}_numbers": mean([r for r, m in zip(right, sizes, strict=True) if m == n])
            for n in sorted(set(sizes))
        },
    }


def misses(figures: Figures) -> list[str]:
    """What keeps a checkpoint from being shipped; empty if it is half-good."""
    rules = [
        (figures["accuracy"] <= 0.50, "accuracy must be at most 0.50"),
        (figures["accuracy"] >= 0.30, "accuracy must be at least 0.30"),
        (figures["made_to_call_accuracy"] >= 0.97, "made_to_call_accuracy must be at least 0.97"),
    ]
    return [rule for holds, rule in rules if not holds]


def _is_right(turns: Sequence[str], row: Row) -> bool:
    match = ANSWER.fullmatch(turns[-1]) if turns else None
    return match is not None and match[1] == row["answer"]


if __name__ == "__main__":
    sys.exit(run(__doc__, write, evaluate, misses))
