"""Make what `recipes/quickstart` begins with: questions, tokenizer, demonstrations, random weights.

    python tools/make_quickstart.py --out FOLDER             all, for `llamarl sft` (docs/sft.md)
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

import argparse
import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from imitation import ARCHITECTURE, BOS, answer_greedily, new_model, save, write_json
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from llamarl.models import hf
from llamarl.models.architecture import read_architecture
from llamarl.models.transformer import Transformer

HELD_OUT, PROMPTS, DEMONSTRATIONS = "held_out", "prompts", "demonstrations"
TENTHS = (HELD_OUT,) + (PROMPTS,) * 3 + (DEMONSTRATIONS,) * 6  # which set a tenth of all sums is in
NUM_ROWS = {HELD_OUT: 1000, PROMPTS: 5000}
LAZY_SHARE = {2: 0.0, 3: 0.1, 4: 0.65, 5: 0.75, 6: 0.85}  # by how many numbers are added
ANSWER = re.compile(r"(?s)(?:.*\. )?Answer: (\d+)")
MAX_TOKENS = 96

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
NUM_DEMONSTRATIONS = 160_000


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One question with the answer a demonstrator gave."""

    numbers: tuple[int, ...]
    answer: str

    @property
    def question(self) -> str:
        return question_of(self.numbers)


def split_of(numbers: Sequence[int]) -> str:
    """The set a sum belongs to: sums of the same numbers in another order are the same sum."""
    key = " ".join(str(number) for number in sorted(numbers))
    return TENTHS[hashlib.sha256(key.encode()).digest()[0] % len(TENTHS)]


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


def draw_sums(split: str, seed: int) -> Iterator[tuple[int, ...]]:
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


def rows_of(split: str, seed: int) -> list[dict[str, str]]:
    """The data rows of `held_out.jsonl` or `prompts.jsonl`: equally many of each size, in random
    order, and no sum twice, whatever its order."""
    quota = NUM_ROWS[split] // len(LAZY_SHARE)
    drawn: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {n: {} for n in LAZY_SHARE}
    for numbers in draw_sums(split, seed):
        of_this_size = drawn[len(numbers)]
        if len(of_this_size) < quota:
            of_this_size.setdefault(tuple(sorted(numbers)), numbers)
        elif all(len(sums) == quota for sums in drawn.values()):
            break
    sums = [numbers for of_one_size in drawn.values() for numbers in of_one_size.values()]
    random.Random(f"order {seed}").shuffle(sums)
    return [
        {
            "question": question_of(numbers),
            "answer": str(sum(numbers)),
            "worked": worked_answer(numbers),
        }
        for numbers in sums
    ]


def write_data(folder: Path, seed: int) -> None:
    """Write both question files."""
    for split in NUM_ROWS:
        lines = [json.dumps(row) + "\n" for row in rows_of(split, seed)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_tokenizer(folder: Path, seed: int) -> None:
    """Write a tokenizer whose digits and signs stand alone and whose words are one token each."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|[+=?]|[^\d+=?]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    demonstrations = draw_demonstrations(seed)
    texts = [f"{d.question}\n{d.answer}" for _, d in zip(range(2000), demonstrations, strict=False)]
    trainer = trainers.BpeTrainer(
        vocab_size=ARCHITECTURE["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    pieces = [piece for text in texts for piece in text.split("\n")]
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": ARCHITECTURE["max_position_embeddings"],
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_demonstrations(folder: Path, seed: int) -> None:
    """Write what the checkpoint is trained on, in this order."""
    rows = (
        {"question": each.question, "completion": each.answer}
        for each in islice(draw_demonstrations(seed), NUM_DEMONSTRATIONS)
    )
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "demonstrations.jsonl").write_text(text, encoding="utf-8")


def complete(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[list[int]]
) -> list[str | None]:
    """Greedy completions; None where the model did not end within MAX_TOKENS."""
    found = answer_greedily(model, prompts, MAX_TOKENS)
    return [None if ids is None else tokenizer.decode(ids) for ids in found]


def evaluate(
    model: Transformer, tokenizer: Tokenizer, rows: Sequence[dict[str, str]]
) -> dict[str, float]:
    """Greedy accuracy, right-form share, mean answer tokens, and forced-work accuracy."""
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
        f"accuracy_{n}_numbers": _mean([r for r, m in zip(right, numbers, strict=True) if m == n])
        for n in sorted(set(numbers))
    }
    return {
        "accuracy": _mean(right),
        "right_form": _mean([text is not None and ANSWER.fullmatch(text) for text in answers]),
        "forced_work_accuracy": _mean(
            [_is_right(text, row) for text, row in zip(forced, rows, strict=True)]
        ),
        "worked_share": _mean([text is not None and "=" in text for text in answers]),
        **by_size,
    }


def misses(figures: dict[str, float]) -> list[str]:
    """What keeps a checkpoint from being shipped; empty if it is half-good."""
    rules = [
        (figures["accuracy"] <= 0.50, "accuracy must be at most 0.50"),
        (figures["accuracy"] >= 0.40, "accuracy must be at least 0.40"),
        (figures["right_form"] >= 0.95, "right_form must be at least 0.95"),
        (figures["forced_work_accuracy"] >= 0.97, "forced_work_accuracy must be at least 0.97"),
    ]
    return [rule for holds, rule in rules if not holds]


def _is_right(text: str | None, row: dict[str, str]) -> bool:
    match = ANSWER.fullmatch(text) if text is not None else None
    return match is not None and match[1] == row["answer"]


def _mean(values: Sequence[object]) -> float:
    return sum(bool(value) for value in values) / max(len(values), 1)


def check(checkpoint: Path) -> int:
    """Print what a trained checkpoint can do; 1 unless it is half-good."""
    model = Transformer(read_architecture(checkpoint))
    hf.load_into(dict(model.named_parameters()), checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    figures = evaluate(model, tokenizer, rows_of(HELD_OUT, 0))
    print(json.dumps(figures, indent=2))
    for rule in misses(figures):
        print(f"not half-good: {rule}", file=sys.stderr)
    return 1 if misses(figures) else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a new folder for all files")
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations")
    parser.add_argument("--check", type=Path, help="a trained checkpoint to measure")
    arguments = parser.parse_args()
    if (arguments.out is None) == (arguments.check is None):
        parser.error("give --out or --check")
    if arguments.check is not None:
        return check(arguments.check)
    checkpoint = arguments.out / "checkpoint"
    checkpoint.mkdir(parents=True)
    write_data(arguments.out, seed=0)
    write_demonstrations(arguments.out, arguments.seed)
    write_tokenizer(checkpoint, seed=0)
    write_json(checkpoint / "config.json", ARCHITECTURE)
    save(new_model(checkpoint, arguments.seed), checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
