"""Make what `recipes/quickstart` begins with: questions, tokenizer, demonstrations, random weights.

    python tools/make_quickstart.py --out FOLDER [--experts 8]  all, for `llamarl sft` (docs/sft.md)
    python tools/make_quickstart.py --check CHECKPOINT       is what came of it half-good?

The task is "show your work": sums of 2 to 6 numbers of one or two digits. A worked answer to
`What is 5+8+70?` is `5+8=13, 13+70=83. Answer: 83`, a lazy one `Answer: 83`. The demonstrators
skip the working the more often the longer the sum is, so a model trained on their answers works
out short sums and guesses long ones, though it could do both. Reinforcement learning on the final
answer alone finds out that writing the steps pays.

Three sets of questions, disjoint by construction: the numbers of a sum, in any order, hash to one
set only (`split_of`). Everything is drawn from fixed seeds; the same machine, library versions and
arguments give the same files.

A checkpoint is half-good if its greedy held-out accuracy is 40 to 50 %, at least 95 % of its
answers have the right form, and its forced-work accuracy (greedy after the first digit of the
worked answer, a forecast of what learning can reach) is at least 97 %.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

NUM_ROWS = {HELD_OUT: 1000, PROMPTS: 5000}
LAZY_SHARE = {2: 0.0, 3: 0.1, 4: 0.65, 5: 0.75, 6: 0.85}  # by how many numbers are added
ANSWER = re.compile(r"(?s)(?:.*\. )?Answer: (\d+)")
MAX_TOKENS = 96

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
NUM_DEMONSTRATIONS = 160_000


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One question with the answer a demonstrator gave."""

    numbers: Numbers
    answer: str

    @property
    def question(self) -> str:
        return question_of(self.numbers)


def question_of(numbers: Sequence[int]) -> str:
    """The question, such as `What is 5+8+70?`."""
    return f"What is {'+'.join(str(number) for number in numbers)}?"


def lazy_answer(numbers: Sequence[int]) -> str:
    """The bare answer, such as `Answer: 83`."""
    return f"Answer: {sum(numbers)}"


def worked_answer(numbers: Sequence[int]) -> str:
    """The answer with its steps, such as `5+8=13, 13+70=83. Answer: 83`."""
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    return f"{', '.join(steps)}. Answer: {total}"


def draw_sums(split: str, seed: int) -> Iterator[Numbers]:
    """Sums of one set without end: 2 to 6 numbers, each of one or two digits by a fair coin."""
    rng = random.Random(f"{split} {seed}")
    while True:
        numbers = tuple(
            rng.randint(10, 99) if rng.random() < 0.5 else rng.randint(1, 9)
            for _ in range(rng.randint(2, 6))
        )
        if split_of(numbers) == split:
            yield numbers


def draw_demonstrations(seed: int) -> Iterator[Demonstration]:
    """What the checkpoint is trained on, in this order, without end."""
    rng = random.Random(f"style {seed}")
    for numbers in draw_sums(DEMONSTRATIONS, seed):
        lazy = rng.random() < LAZY_SHARE[len(numbers)]
        yield Demonstration(numbers, lazy_answer(numbers) if lazy else worked_answer(numbers))


def rows_of(split: str, seed: int) -> list[Row]:
    """The data rows of `held_out.jsonl` or `prompts.jsonl`."""
    drawn = draw_sums(split, seed)
    return [
        {
            "question": question_of(numbers),
            "answer": str(sum(numbers)),
            "worked": worked_answer(numbers),
        }
        for numbers in draw_evenly(drawn, [*LAZY_SHARE], NUM_ROWS[split], seed)
    ]


def write_tokenizer(folder: Path, seed: int) -> None:
    """Write the tokenizer of such questions and answers."""
    demonstrations = islice(draw_demonstrations(seed), 2000)
    pieces = [text for each in demonstrations for text in (each.question, each.answer)]
    train_tokenizer(folder, pieces, signs="+=?", special_tokens=SPECIAL_TOKENS, settings={})


def write(folder: Path, seed: int, num_rows: int | None) -> None:
    """Write questions, demonstrations and tokenizer; only demonstrations differ by seed."""
    for split in NUM_ROWS:
        write_rows(folder / f"{split}.jsonl", rows_of(split, 0))
    demonstrations = islice(draw_demonstrations(seed), num_rows or NUM_DEMONSTRATIONS)
    rows = ({"question": each.question, "completion": each.answer} for each in demonstrations)
    write_rows(folder / "demonstrations.jsonl", rows)
    write_tokenizer(folder / "checkpoint", 0)


def complete(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[list[int]]
) -> list[str | None]:
    """Greedy completions; None where the model did not end within MAX_TOKENS."""
    found = answer_greedily(model, prompts, MAX_TOKENS)
    return [None if ids is None else tokenizer.decode(ids) for ids in found]


def evaluate(model: Transformer, tokenizer: Tokenizer, num_rows: int | None) -> Figures:
    """Greedy accuracy, right-form share, mean answer tokens, and forced-work accuracy."""
    rows = rows_of(HELD_OUT, 0)[:num_rows]
    prompts = [tokenizer.encode(row["question"]).ids for row in rows]
    first = [tokenizer.encode(row["worked"][0], add_special_tokens=False).ids for row in rows]
    answers = complete(model, tokenizer, prompts)
    forced = complete(model, tokenizer, [p + f for p, f in zip(prompts, first, strict=True)])
    forced = [
        row["worked"][0] + text if text is not None else None
        for row, text in zip(rows, forced, strict=True)
    ]
    numbers = [row["question"].count("+") + 1 for row in rows]
    right = [_is_right(text, row) for text, row in zip(answers, rows, strict=True)]
    by_size = {
        f"accuracy_{n}_numbers": mean([r for r, m in zip(right, numbers, strict=True) if m == n])
        for n in sorted(set(numbers))
    }
    return {
        "accuracy": mean(right),
        "right_form": mean([text is not None and ANSWER.fullmatch(text) for text in answers]),
        "forced_work_accuracy": mean(
            [_is_right(text, row) for text, row in zip(forced, rows, strict=True)]
        ),
        "worked_share": mean([text is not None and "=" in text for text in answers]),
        **by_size,
    }


def misses(figures: Figures) -> list[str]:
    """What keeps a checkpoint from being shipped; empty if it is half-good."""
    rules = [
        (figures["accuracy"] <= 0.50, "accuracy must be at most 0.50"),
        (figures["accuracy"] >= 0.40, "accuracy must be at least 0.40"),
        (figures["right_form"] >= 0.95, "right_form must be at least 0.95"),
        (figures["forced_work_accuracy"] >= 0.97, "forced_work_accuracy must be at least 0.97"),
    ]
    return [rule for holds, rule in rules if not holds]


def _is_right(text: str | None, row: Row) -> bool:
    match = ANSWER.fullmatch(text) if text is not None else None
    return match is not None and match[1] == row["answer"]


if __name__ == "__main__":
    sys.exit(run(__doc__, write, evaluate, misses))
