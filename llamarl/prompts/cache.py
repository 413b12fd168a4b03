"""Sources of prompts, or of demonstrations, tokenised: those of large files once, by several
processes, into a cache where later runs find them.

A folder of the cache with its final name is whole, and is that of equal files, tokenizer and rules;
so what a run reads does not depend on whether it was there."""

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from llamarl import __version__
from llamarl.core.config import DataConfig, RewardConfig
from llamarl.core.fields import DAY_S
from llamarl.core.files import read_object
from llamarl.core.records import Prompt, read_json
from llamarl.model.prompt_rules import DROPPED, TRUNCATED, PromptRules, no_tools
from llamarl.model.tokenizer import Tokenizer, load_tokenizer, tokenizer_files
from llamarl.prompts.demonstrations import DemonstrationRules
from llamarl.prompts.files import FilePiece, cut_files
from llamarl.prompts.rows import (
    INDEX_FILE,
    ROWS_FILE,
    PromptRows,
    rows_in_folder,
    rows_in_memory,
    write_rows,
)
from llamarl.scoring.agent.tasks import TASK_FILE
from llamarl.scoring.definition import Kinds, as_kinds, schemas_of
from llamarl.scoring.rewards import check_answer
from llamarl.scoring.user_code.pool import Call, UserCode, run_once

log = logging.getLogger(__name__)

DONE = {DROPPED: "left out (data.overlong=drop)", TRUNCATED: "cut (data.overlong=truncate)"}
LEAST_BYTES = 8 * 1024 * 1024  # of a source's files; less is tokenised faster than processes start
FACTS_FILE, STOP_FILE = "facts.json", "stop-"
FORMAT = 2  # of the files
POLL_S = 0.1
LIMIT_S = 7 * DAY_S

Rules = PromptRules | DemonstrationRules
ShowPieces = Callable[[str, int, int], None]
"""Called with a source's name, how many of its pieces are done, and how many there are."""


def show_nothing(source: str, num_done: int, num_pieces: int) -> None:
    """Show nothing: no display is there."""


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """A source of prompts has a `name` for a display and a `place` for messages, local files or
    else rows, and the rules that make prompts of these."""

    name: str
    place: str
    files: Sequence[Path] = ()
    made: Iterable[dict[str, Any]] = ()
    data: DataConfig
    tokenizer: Tokenizer
    limit: str = "data.max_prompt_tokens"
    kinds: Kinds = field(default_factory=dict)
    reward: RewardConfig | None = None
    has_answers: bool = False
    """True for demonstrations."""

    @property
    def has_tasks(self) -> bool:
        """Whether its files are those of tasks, of which each has more files beside it."""
        return any(path.name == TASK_FILE for path in self.files[:1])

    def rules(self) -> Rules:
        """Return the rules, ready to be used."""
        if self.has_answers:
            return DemonstrationRules(data=self.data, tokenizer=self.tokenizer, limit=self.limit)
        return PromptRules(
            data=self.data,
            tokenizer=self.tokenizer,
            limit=self.limit,
            tools=partial(schemas_of, kinds=self.kinds) if self.kinds else no_tools,
            check=None if self.reward is None else partial(check_answer, self.reward),
        )

    def as_data(self) -> dict[str, Any]:
        """Return the rules, as JSON."""
        return {
            "data": asdict(self.data),
            "tokenizer": os.path.abspath(self.tokenizer.folder),
            "limit": self.limit,
            "kinds": {name: asdict(kind) for name, kind in self.kinds.items()},
            "reward": None if self.reward is None else asdict(self.reward),
            "has_answers": self.has_answers,
        }


def read_source(
    source: PromptSource, *, most: int | None = None, show: ShowPieces = show_nothing
) -> PromptRows:
    """Return all prompts of a source, or the first `most`. The log says how many rows were left out
    or cut. ValueError as `PromptRules.make_all`, if there is no prompt, or if the cache cannot be
    written."""
    is_small = source.has_tasks or sum(each.stat().st_size for each in source.files) < LEAST_BYTES
    if is_small or most is not None:
        rules, first = source.rules(), [FilePiece(str(path)) for path in source.files[:1]]
        pieces = cut_files(source.files) if most is None or source.has_tasks else first
        made = rules.make_all(enumerate(source.made, start=1), source.place)
        prompts = chain(*(_make(piece, rules) for piece in pieces), made)
        rows, counts = rows_in_memory(islice(prompts, most)), rules.counts
    else:
        rows, counts = _cached(source, show)
    tokens = f"{source.data.max_prompt_tokens} tokens ({source.limit})"
    contents, must = "prompts", "hold at least one prompt"
    if source.has_answers:
        contents, must = "demonstrations", "hold at least one demonstration"
    if not len(rows.index):
        of = f" of at most {tokens}" if counts[DROPPED] else ""
        raise ValueError(f"{source.place} must {must}{of}, got none")
    num_rows = len(rows.index) + counts[DROPPED]
    for name, done in DONE.items() if most is None else ():
        if counts[name]:
            words = f"%d of %d {contents} in %s have more than %s and are %s"
            log.warning(words, counts[name], num_rows, source.place, tokens, done)
    return rows


def _cached(source: PromptSource, show: ShowPieces) -> tuple[PromptRows, Counter[str]]:
    """Return the prompts, and how many rows were left out or cut."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(home, "llamarl", "prompts")  # what lies there may be deleted
    folder = cache / _key(source)
    try:
        return _read(folder)
    except (OSError, ValueError, KeyError):  # not there, or damaged
        shutil.rmtree(folder, ignore_errors=True)
    try:
        _fill(source, folder, show)
        return _read(folder)
    except OSError as error:
        must = "must be a folder with room to write (XDG_CACHE_HOME moves it)"
        raise ValueError(f"the cache {cache} {must}, got: {error.strerror}") from error


def load(setup: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return the service of a worker: (folder, [[number, piece], ...]) -> what it counted, or
    {"mistake": one line, "piece": number}."""
    data, reward = DataConfig(**setup["data"]), setup["reward"]
    rules = PromptSource(
        name="",
        place="",
        data=data,
        tokenizer=load_tokenizer(setup["tokenizer"], data.chat_template_kwargs, data.date),
        limit=setup["limit"],
        kinds=as_kinds(setup["kinds"]),
        reward=None if reward is None else read_json(RewardConfig, reward),
        has_answers=setup["has_answers"],
    ).rules()

    def tokenise(_: None, folder: str, pieces: list[tuple[int, list[Any]]]) -> dict[str, Any]:
        parts = Path(folder)
        for number, values in pieces:
            stops = [int(path.name.removeprefix(STOP_FILE)) for path in parts.glob(f"{STOP_FILE}*")]
            if number > min(stops, default=number):
                break
            try:
                with (parts / f"{number}.rows").open("wb") as file:
                    index, digest = write_rows(file, _make(FilePiece(*values), rules))
                np.save(parts / f"{number}.index.npy", index)
                (parts / f"{number}.digest").write_text(digest)  # last: the piece is done
            except (ValueError, OSError) as error:
                _stop(parts, number)
                is_full = isinstance(error, OSError)
                return {"mistake": str(error), "piece": number, "is_full": is_full}
        return {"counts": dict(rules.counts)}

    return tokenise


def _make(piece: FilePiece, rules: Rules) -> Iterator[Prompt]:
    for prompt in rules.make_all(piece.rows(), piece.path):
        yield replace(prompt, prompt_id=piece.before + prompt.prompt_id) if piece.before else prompt


def _stop(folder: Path, number: int) -> None:
    """Write no piece after this one: so the first mistake of a source is the one that is named."""
    (folder / f"{STOP_FILE}{number}").touch()


def _key(source: PromptSource) -> str:
    """Return the hash of whatever the prompts depend on. A file counts as changed with its size or
    its time."""
    stats = [(os.path.abspath(path), path.stat()) for path in source.files]
    facts = {
        "files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        "tokenizer": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in tokenizer_files(source.tokenizer.folder)
        },
        "version": [__version__, FORMAT],
        **source.as_data(),
    }
    for name in ("prompts", "held_out", "weights", "shuffle", "repeat_share"):
        del facts["data"][name]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(folder: Path) -> tuple[PromptRows, Counter[str]]:
    facts = read_object(folder / FACTS_FILE)
    return rows_in_folder(folder, str(facts["digest"])), Counter(facts["counts"])


def _fill(source: PromptSource, folder: Path, show: ShowPieces) -> None:
    """Write the folder of a source."""
    parts = folder.with_name(f"{folder.name}.{os.getpid()}.{threading.get_ident()}")
    parts.mkdir(parents=True)
    try:
        pieces = cut_files(source.files)
        counts = _tokenise(source, pieces, parts, show)
        whole = parts / "whole"
        whole.mkdir()
        digest, indices, start = hashlib.sha256(), [], 0
        with (whole / ROWS_FILE).open("wb") as file:
            for number in range(len(pieces)):
                index = np.load(parts / f"{number}.index.npy", allow_pickle=False)
                index["start"] += start
                indices.append(index)
                path = parts / f"{number}.rows"
                start += path.stat().st_size
                with path.open("rb") as piece:
                    shutil.copyfileobj(piece, file, 2**20)
                path.unlink()
                digest.update((parts / f"{number}.digest").read_bytes())
        np.save(whole / INDEX_FILE, np.concatenate(indices))
        facts = {"digest": digest.hexdigest(), "counts": counts}
        (whole / FACTS_FILE).write_text(json.dumps(facts))
        with suppress(OSError):  # another run has made it meanwhile
            os.rename(whole, folder)
    finally:
        _stop(parts, -1)
        shutil.rmtree(parts, ignore_errors=True)


def _tokenise(
    source: PromptSource, pieces: Sequence[FilePiece], folder: Path, show: ShowPieces
) -> Counter[str]:
    """Write all pieces, in as many processes as there are processors; return what they counted."""
    num_workers = min(len(pieces), len(os.sched_getaffinity(0)))
    code = UserCode(
        service=__name__,
        setup=source.as_data(),
        timeout_s=LIMIT_S,
        label="prompts",
        keys="a fixed ",
    )
    answers: list[dict[str, Any]] = []
    errors: list[Exception] = []

    def work(first: int) -> None:
        numbers = range(first, len(pieces), num_workers)
        own = [(n, astuple(pieces[n])) for n in numbers]
        try:
            answers.append(run_once(code, Call(None, (str(folder), own))))
        except Exception as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)
            _stop(folder, -1)

    # Daemons: a process of a worker ends with its thread, so Ctrl-C leaves none.
    workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(num_workers)]
    for each in workers:
        each.start()
    while any(each.is_alive() for each in workers):
        show(source.name, len([*folder.glob("*.digest")]), len(pieces))
        time.sleep(POLL_S)
    show(source.name, len([*folder.glob("*.digest")]), len(pieces))
    if mistakes := [each for each in answers if "mistake" in each]:
        first = min(mistakes, key=lambda each: int(each["piece"]))
        if first["is_full"]:
            raise OSError(0, first["mistake"])
        raise ValueError(first["mistake"])
    if errors:
        raise errors[0]
    return sum((Counter(each["counts"]) for each in answers), Counter())
