r"""Write prompt files out of GSM8K and MATH, as their authors publish them.

    python tools/prepare_prompts.py gsm8k/train.jsonl --output recipes/mine/prompts.jsonl
    python tools/prepare_prompts.py MATH/train --output recipes/mine/prompts.jsonl
    python tools/prepare_prompts.py math-500/test.jsonl --output recipes/mine/held_out.jsonl

A source is a .jsonl or .parquet file, or a folder of .json files with one problem each, at any
depth. Its rows are either of

    GSM8K   question, answer: the working, then "#### 42"
    MATH    problem, solution: the working, with the answer in \boxed{...} (the last one counts);
            level, type or subject, and a separate answer may be there or not

and become lines of question, answer, source, and level and subject if known. Rows whose answer the
`math` reward cannot compare (not even with itself) are left out and counted; a question
that came before is left out too. A row that is neither ends everything with one line that names it.

The form of the answer: with a chat template, state it in the recipe's
`data.system`; for a base model without one, `--instruction` puts it below every question.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llamarl.core.config import RewardConfig
from llamarl.core.records import Prompt
from llamarl.prompts.files import read_rows
from llamarl.scoring import math_reward
from llamarl.scoring.reward_functions import GSM8K_MARK

BOXES = ("\\boxed", "\\fbox")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read every source, write one file; a mistake is one line and exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", type=Path, help=".jsonl, .parquet or a folder")
    parser.add_argument("--output", required=True, type=Path, help="the .jsonl to write")
    parser.add_argument("--instruction", default="", help="text put below every question")
    options = parser.parse_args(arguments)
    try:
        counts = prepare(options.sources, options.output, options.instruction)
    except (ValueError, OSError) as error:
        sys.exit(f"prepare_prompts: {error}")
    left_out = ", ".join(f"{count} {why}" for why, count in counts.items() if why != "written")
    print(f"{options.output}: {counts['written']} prompts (left out: {left_out or 'none'})")


def prepare(sources: Sequence[Path], output: Path, instruction: str = "") -> Counter[str]:
    """Write `output`; returns how many rows were "written" and how many left out for which reason.

    ValueError, naming file and line, for a row of neither form. Nothing is written then.
    """
    if output.suffix != ".jsonl":
        raise ValueError(f"--output must end in .jsonl, got {str(output)!r}")
    counts: Counter[str] = Counter(written=0)
    lines: dict[str, str] = {}
    for source in sources:
        for place, row in _rows(source):
            try:
                prompt = convert(row)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            question = prompt["question"]
            if question in lines:
                counts["seen before"] += 1
            elif not is_comparable(prompt["answer"]):
                counts["with an answer that the math reward cannot compare"] += 1
            else:
                counts["written"] += 1
                text = f"{question}\n\n{instruction}" if instruction else question
                lines[question] = json.dumps(prompt | {"question": text}, ensure_ascii=False)
    if not lines:
        raise ValueError(f"the sources must hold at least one usable row, got {dict(counts)}")
    output.write_text("\n".join(lines.values()) + "\n", encoding="utf-8")
    return counts


def convert(row: dict[str, Any]) -> dict[str, str]:
    r"""Our row of a published one; ValueError if it is neither of GSM8K's nor of MATH's form.

    Example: {"problem": "...", "solution": "... \boxed{\frac{1}{2}}", "level": "Level 2"} becomes
    {"question": "...", "answer": "\frac{1}{2}", "source": "math", "level": "Level 2"}.
    """
    if "problem" in row:
        answer = row.get("answer")
        found = {
            "question": _text(row, "problem"),
            "answer": _text(row, "answer") if answer else last_boxed(_text(row, "solution")),
            "source": "math",
        }
        subject = row.get("subject", row.get("type"))
        more = {"level": row.get("level"), "subject": subject}
        return found | {name: str(value) for name, value in more.items() if value is not None}
    if "question" in row:
        answer = _text(row, "answer")
        _, mark, final = answer.rpartition(GSM8K_MARK)
        if not mark or not final.strip():
            raise ValueError(f"'answer' must end with '#### ' and a number, got {answer[-40:]!r}")
        return {"question": _text(row, "question"), "answer": final.strip(), "source": "gsm8k"}
    raise ValueError(
        "the row must have question and answer (GSM8K) or problem and solution (MATH), got "
        f"{', '.join(map(repr, row)) or 'no field'}"
    )


def last_boxed(solution: str) -> str:
    r"""What the last \boxed{...} or \fbox{...} holds, nested braces included; `\boxed 5` is "5".

    ValueError if there is none, or if its brace is never closed.
    """
    start, mark = max((solution.rfind(box), box) for box in BOXES)
    if start < 0:
        raise ValueError(f"'solution' must hold \\boxed{{...}}, got {solution[-40:]!r}")
    rest = solution[start + len(mark) :].lstrip()
    if not rest.startswith("{"):
        words = rest.replace("$", " ").split()
        answer = words[0] if words else ""
    else:
        answer = rest[1 : _closing_brace(rest)]
    if not answer.strip():
        raise ValueError(f"'solution' must hold an answer in {mark}, got {solution[start:][:40]!r}")
    return answer.strip()


def _closing_brace(text: str) -> int:
    """Where the brace that opens `text` is closed; escaped braces are text."""
    depth = 0
    for i, letter in enumerate(text):
        escaped = (len(text[:i]) - len(text[:i].rstrip("\\"))) % 2
        if letter in "{}" and not escaped:
            depth += 1 if letter == "{" else -1
            if depth == 0:
                return i
    raise ValueError(f"'solution' must close every brace of its answer, got {text[:40]!r}")


def is_comparable(answer: str) -> bool:
    """Whether the `math` reward can compare with this answer: it counts the answer as correct."""
    prompt = Prompt(prompt_id=0, text="", token_ids=(), fields={"answer": answer})
    try:
        return math_reward.reward(prompt, f"$\\boxed{{{answer}}}$", RewardConfig()) == 1.0
    except Exception:  # noqa: BLE001 - math-verify raises what it likes on text it cannot parse
        return False


def _rows(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row of a source, with the file and line that a message names."""
    if not source.is_dir():
        for number, row in read_rows(source):
            yield f"{source}:{number}", row
        return
    paths = sorted(source.rglob("*.json"), key=lambda path: [*path.parts[:-1], _number(path)])
    if not paths:
        raise ValueError(f"the folder {source} must hold .json files, got none")
    for path in paths:
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} must be JSON, got a mistake: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(row).__name__}")
        yield str(path), row


def _number(path: Path) -> str:
    """A sort key that puts 2.json before 10.json, as MATH counts its problems."""
    return path.stem.zfill(12)


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name!r} must be text that is not blank, got {value!r}")
    return value.strip()


if __name__ == "__main__":
    main()
