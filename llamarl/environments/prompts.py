"""Prompts: made of data rows, handed out in an order that can be resumed.

Owns: the file formats (JSON lines, Parquet, Arrow), their errors, and the order over epochs and
after a resume. Does not own: rows that a task.py makes (`task_prompts.py`), or how often a prompt
is used and when (the gate). Invariant: the prompt at a position is a pure function of the rows, the
seed and the position.
"""

import hashlib
import json
import logging
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.config import DataConfig
from llamarl.data.kept_rollouts import is_kept
from llamarl.data.tokenizer import Tokenizer
from llamarl.json_file import parse
from llamarl.types import Prompt

log = logging.getLogger(__name__)

ARROW_MAGIC = b"ARROW1"  # begins a file of it, and not a stream
SLACK = 10  # tokenizers drop blanks, and give one token to a word that they do not know
NumberedRow = tuple[int, dict[str, Any]]
"""A data row and its number, from 1: the line of a .jsonl file, or the place of any other row."""


Tools = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""A data row -> the schemas of what the model may call."""


def no_tools(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Of rollouts that are one answer."""
    return ()


class PromptTooLong(ValueError):  # noqa: N818 - what was found
    """A prompt has more tokens than it may have."""


def tokenize_rows(
    rows: Iterable[NumberedRow],
    place: str | Path,
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    most: int | None = None,
    limit: str = "data.max_prompt_tokens",
    tools: Tools = no_tools,
) -> list[Prompt]:
    """The prompts of these rows, or of the first `most`, in order; `prompt_id` is the row's number.
    `limit` names where their largest length comes from; `tools` are shown at the head of each chat.

    Raises a one-line ValueError that names `place` and number if there are no rows, if
    `config.prompt_field` is missing or has a wrong type, or if a prompt is too long; with
    `config.too_long` drop those are left out, and it is an error if no other is there.
    """
    if config.chat and not tokenizer.has_chat_template:
        must = "data.chat must be false for a tokenizer without a chat template"
        raise ValueError(f"{must}, got true with {tokenizer.folder}")
    prompts: list[Prompt] = []
    num_dropped = 0
    for number, row in rows:
        if len(prompts) == most:
            break
        try:
            prompts.append(_prompt(number, row, config, tokenizer, tools))
        except ValueError as error:
            if isinstance(error, PromptTooLong) and config.too_long == "drop":
                num_dropped += 1
            else:
                raise ValueError(f"{place}:{number}: {error}") from error
    tokens = f"{config.max_prompt_tokens} tokens ({limit})"
    if not prompts:
        of = f" of at most {tokens}" if num_dropped else ""
        raise ValueError(f"{place} must hold at least one prompt{of}, got none")
    if num_dropped and most is None:
        words = "%d of %d prompts in %s have more than %s and are left out (data.too_long=drop)"
        log.warning(words, num_dropped, num_dropped + len(prompts), place, tokens)
    return prompts


def make_prompt(
    question: str | Mapping[str, Any] | Sequence[Any],
    number: int,
    config: DataConfig,
    tokenizer: Tokenizer,
    tools: Tools = no_tools,
) -> Prompt:
    """A prompt of the caller's own: a text or the messages of a chat, a data row that holds one, or
    token ids, which are taken as they are. ValueError as for a line of a file."""
    if isinstance(question, Mapping):
        return _prompt(number, dict(question), config, tokenizer, tools)
    if isinstance(question, str) or not all(isinstance(each, Integral) for each in question):
        return _prompt(number, {config.prompt_field: question}, config, tokenizer, tools)
    token_ids = tuple(map(int, question))
    if not token_ids or not all(0 <= each < tokenizer.num_ids for each in token_ids):
        raise ValueError(f"token ids must be 0 to {tokenizer.num_ids - 1}, got {_show(token_ids)}")
    return Prompt(prompt_id=number, text=tokenizer.decode(token_ids), token_ids=token_ids)


class PromptStream(Iterator[Prompt]):
    """Hands out prompts without end, each one once per epoch, with `Prompt.epoch` set.

    `position` counts the prompts drawn; a new stream given that position continues exactly. With
    `shuffle`, each epoch's order is drawn from (seed, epoch) alone; else it is file order. Of the
    share `keep` of them all, `Prompt.is_kept` is set. `first` lists (epoch, prompt_id) of prompts
    to hand out before. `identity` is saved with the state: what must be equal in a run that resumes
    from it. ValueError if `first` names an unknown prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        keep: float = 0.0,
        position: int = 0,
        first: Sequence[tuple[int, int]] = (),
        identity: Mapping[str, object] | None = None,
    ) -> None:
        self.position = position
        self.num_prompts = len(prompts)
        self._prompts, self._seed, self._shuffle, self._keep = prompts, seed, shuffle, keep
        self._identity = dict(identity or {})
        self._order: tuple[int, Sequence[int]] = (-1, ())  # epoch, places of its prompts
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        for _, prompt_id in first:
            if prompt_id not in by_id:
                raise ValueError(f"open prompts must be among data.prompts, got line {prompt_id}")
        self._first = deque(self._drawn(by_id[prompt_id], epoch) for epoch, prompt_id in first)

    def __next__(self) -> Prompt:
        if self._first:
            return self._first.popleft()
        epoch, place = divmod(self.position, len(self._prompts))
        if epoch != self._order[0]:
            self._order = epoch, self._draw_order(epoch)
        self.position += 1
        return self._drawn(self._prompts[self._order[1][place]], epoch)

    def state(self) -> dict[str, object]:
        """What a checkpoint saves. With the gate's open groups it names every prompt that was drawn
        and not yet trained, so a run may be killed at any time, also right after a resume."""
        return {
            "position": self.position,
            "backlog": [[prompt.epoch, prompt.prompt_id] for prompt in self._first],
            "identity": self._identity,
        }

    def _drawn(self, prompt: Prompt, epoch: int) -> Prompt:
        prompt = replace(prompt, epoch=epoch)
        return replace(prompt, is_kept=is_kept(prompt, self._keep, self._seed))

    def _draw_order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        # Sorts raw PCG64 words: numpy guarantees their stream, so a run can resume under another
        # version of numpy. It does not guarantee that of `Generator.permutation`.
        digest = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
        words = np.random.PCG64(int.from_bytes(digest)).random_raw(len(self._prompts))
        order: list[int] = np.argsort(words, kind="stable").tolist()
        return order


def _prompt(
    number: int, row: dict[str, Any], config: DataConfig, tokenizer: Tokenizer, tools: Tools
) -> Prompt:
    if config.prompt_field not in row:
        must = f"the row must have the field {config.prompt_field!r} (data.prompt_field)"
        raise ValueError(f"{must}, got {', '.join(map(repr, row)) or 'no field at all'}")
    question = row[config.prompt_field]
    if config.chat:
        text = tokenizer.render_chat(messages_of(question, config), tools(row))
    else:
        text = _text(question, config.prompt_field)
    most = config.max_prompt_tokens
    must = f"the prompt must have at most {most} tokens (data.max_prompt_tokens)"
    if len(text) > SLACK * most * tokenizer.max_token_chars:  # before minutes go into its tokens
        raise PromptTooLong(f"{must}, got {len(text):,} characters")
    token_ids = tuple(tokenizer.encode(text, special=not config.chat))
    if not token_ids:
        raise ValueError(f"{config.prompt_field!r} must hold at least one token, got {question!r}")
    if len(token_ids) > most:
        raise PromptTooLong(f"{must}, got {len(token_ids)}")
    return Prompt(prompt_id=number, text=text, token_ids=token_ids, fields=row)


def _text(question: object, field: str) -> str:
    if isinstance(question, list):
        raise ValueError(f"{field!r} must be text unless data.chat is true, got a list")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{field!r} must be text that is not blank, got {_show(question)}")
    return question


def messages_of(question: object, config: DataConfig) -> list[dict[str, Any]]:
    """The chat that a question, a text or messages, begins. ValueError for anything else."""
    field = config.prompt_field
    if not isinstance(question, list):
        question = [{"role": "user", "content": _text(question, field)}]
    if not question:
        raise ValueError(f"{field!r} must hold at least one message, got an empty list")
    for message in question:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            must = f"{field!r} must be text or a list of messages with 'role' and 'content'"
            raise ValueError(f"{must}, got {_show(message)} in the list")
    if config.system is None:
        return question
    if question[0]["role"] == "system":
        must = "the messages must not start with a system message when data.system is set"
        raise ValueError(f"{must}, got both")
    return [{"role": "system", "content": config.system}, *question]


def read_rows(path: Path) -> Iterator[NumberedRow]:
    """The rows of a .jsonl, .parquet or .arrow file, or of all that a folder has, in the order of
    their names and numbered on; ValueError, naming file and line, if malformed."""
    if path.is_dir():
        return _read_folder(path)
    reader = READERS.get(path.suffix)
    if reader is None:
        must = "a prompt file must end in .jsonl, .parquet or .arrow"
        raise ValueError(f"{must}, got {str(path)!r}")
    if not path.is_file():
        raise ValueError(f"the prompt file must exist, got {str(path)!r}")
    return reader(path)


def _read_folder(folder: Path) -> Iterator[NumberedRow]:
    files = sorted(path for path in folder.iterdir() if path.suffix in READERS)
    if not files:
        raise ValueError(f"a folder of prompts must hold {', '.join(READERS)} files, got {folder}")
    last = 0
    for path in files:
        first = last
        for number, row in read_rows(path):
            last = first + number
            yield last, row


def _read_jsonl(path: Path) -> Iterator[NumberedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = parse(line.removeprefix(BOM_UTF8).rstrip(b"\r\n"))
                if not isinstance(row, dict):
                    raise ValueError(_show(row))
            except ValueError as error:
                must = f"{path}:{number}: the line must be a JSON object"
                raise ValueError(f"{must}, got {error}") from error
            yield number, row


def _read_parquet(path: Path) -> Iterator[NumberedRow]:
    from pyarrow import parquet

    with _arrow_errors(path, "Parquet"), parquet.ParquetFile(path) as file:
        rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
        yield from enumerate(rows, start=1)


def _read_arrow(path: Path) -> Iterator[NumberedRow]:
    """Both forms: a stream, as data sets are saved, and a file with a table of contents."""
    from pyarrow import ipc

    with _arrow_errors(path, "Arrow"), path.open("rb") as file:
        is_stream = file.read(len(ARROW_MAGIC)) != ARROW_MAGIC
        file.seek(0)
        reader = ipc.open_stream(file) if is_stream else ipc.open_file(file)
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


@contextmanager
def _arrow_errors(path: Path, kind: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:  # a damaged page is an OSError
        reason = (str(error).splitlines() or ["an empty file"])[0]
        raise ValueError(f"{path} must be a readable {kind} file, got: {reason}") from error


READERS: dict[str, Callable[[Path], Iterator[NumberedRow]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""By the ending of a file."""


def _show(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
