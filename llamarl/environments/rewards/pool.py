"""The pool of processes that runs reward code.

Owns: the worker processes, one thread for each, the queue in front of them, the time limit. Does
not own: reading completions (`executors/scorer.py`) or what failures mean for the run. Invariant:
every completion gets exactly one Score; a failure carries its cause and no reward; and whatever
reward code does to its process, the pool goes on.

There is a thread per process for two reasons: the kernel ends a worker with the thread that started
it, so that thread must live as long as the pool; and a blocking thread measures the time of its
worker however busy the event loop is.
"""

import asyncio
import logging
import queue
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any

from llamarl.config import RewardConfig
from llamarl.types import Prompt, Score, ScoreStatus
from llamarl.user_code.process import WorkerError, WorkerProcess

CHUNK_COMPLETIONS = 16  # per message: small enough to spread over workers, large enough to be cheap
TOKEN_BYTES = 8
SERVICE = "llamarl.environments.rewards.functions"
PROMPT_FIELDS = tuple(field.name for field in fields(Prompt))
START_S = 120.0  # imports are slow on a busy machine; this limit only ends a start that hangs
SHOWN_PROMPT_CHARS = 60
FAILURES = {status.value: status for status in ScoreStatus if status is not ScoreStatus.OK}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a reward scores: the `text` after `prompt`, and whether it `finished` by itself."""

    row_id: int
    prompt: Prompt
    text: str
    finished: bool


_Job = tuple[Sequence[Completion], "Future[list[Score]]"]


class RewardPool:
    """Scores completions in `config.num_workers` processes.

    `task_source` is the content of the recipe's task.py. A worker that needs longer than
    `config.timeout_s` for one completion is killed and replaced, and that completion is HUNG. If a
    worker dies (segmentation fault, out of memory) the completion is RAISED, and so it is if the
    worker writes anything but its answer, which must repeat the completion's random token.
    """

    def __init__(self, config: RewardConfig, task_source: str | None = None) -> None:
        self._config = config
        self._setup = {"config": asdict(config), "task_source": task_source}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: dict[int, WorkerProcess] = {}
        self._closed = threading.Event()

    async def start(self) -> None:
        """Start the processes and wait until all are ready. ValueError if task.py does not load."""
        ready: list[Future[None]] = [Future() for _ in range(self._config.num_workers)]
        for index, future in enumerate(ready):
            thread = threading.Thread(
                target=self._serve, args=(index, future), name=f"reward-{index}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            await asyncio.gather(*map(asyncio.wrap_future, ready))
            on_failure.pop_all()

    async def score(self, completions: Sequence[Completion]) -> list[Score]:
        """One Score per completion, in order. RuntimeError if the pool is closed."""
        if not self._threads or self._closed.is_set():
            raise RuntimeError("a reward pool must be started, and not closed, before it scores")
        share = -(-len(completions) // self._config.num_workers)
        size = max(1, min(CHUNK_COMPLETIONS, share))
        futures: list[Future[list[Score]]] = []
        for start in range(0, len(completions), size):
            futures.append(Future())
            self._jobs.put((completions[start : start + size], futures[-1]))
        chunks = await asyncio.gather(*map(asyncio.wrap_future, futures))
        return [score for chunk in chunks for score in chunk]

    def close(self) -> None:
        """End every process at once; a second call does nothing."""
        self._closed.set()
        for process in list(self._processes.values()):
            process.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [process.pid for process in list(self._processes.values())]

    def _serve(self, index: int, ready: Future[None]) -> None:
        """Run one thread: start a process, then score chunks until `close`."""
        try:
            self._start_process(index)
            ready.set_result(None)
        except BaseException as error:  # noqa: BLE001 - passed on to the caller
            ready.set_exception(error)
        while (job := self._jobs.get()) is not None:
            completions, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._score_chunk(index, completions))
            except BaseException as error:  # noqa: BLE001 - passed on to the caller
                future.set_exception(error)
        self._end_process(index)

    def _score_chunk(self, index: int, completions: Sequence[Completion]) -> list[Score]:
        scores: list[Score] = []
        while len(scores) < len(completions):
            rest = completions[len(scores) :]
            try:
                process = self._ready_process(index)
            except (OSError, RuntimeError, ValueError) as error:
                if self._closed.is_set():
                    raise RuntimeError("the reward pool was closed while it scored") from error
                why = f"the reward process could not be started again: {error}"
                return scores + [_failure(item, ScoreStatus.RAISED, why) for item in rest]
            tokens = [secrets.token_hex(TOKEN_BYTES) for _ in rest]
            process.send(_message(rest, tokens))
            for completion, token in zip(rest, tokens, strict=True):
                score = self._await_score(process, completion, token)
                if self._closed.is_set():  # `close` killed the process: the score means nothing
                    raise RuntimeError("the reward pool was closed while it scored")
                scores.append(score)
                if score.status is ScoreStatus.HUNG or process.ended:
                    self._end_process(index)
                    break
        return scores

    def _await_score(self, process: WorkerProcess, completion: Completion, token: str) -> Score:
        try:
            answer = process.receive(self._config.timeout_s, token)
            if answer is not None:
                return self._read_score(completion, answer)
        except WorkerError as error:
            return _failure(completion, ScoreStatus.RAISED, str(error))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            process.close()
            why = f"reward code must leave the answers of its process alone, got {error!r} from one"
            return _failure(completion, ScoreStatus.RAISED, why)
        return _failure(
            completion,
            ScoreStatus.HUNG,
            f"a reward must end within {self._config.timeout_s:g} s (reward.timeout_s), "
            f"got no answer; it was at\n{process.stack()}",
        )

    def _read_score(self, completion: Completion, answer: dict[str, Any]) -> Score:
        if "error" in answer:
            return _failure(completion, FAILURES[answer["status"]], str(answer["error"]))
        parts = {name: float(answer["parts"][name]) for name in self._config.functions}
        pairs = zip(self._config.functions, self._config.weights, strict=True)
        reward = sum(weight * parts[name] for name, weight in pairs)
        if not isfinite(reward):
            why = f"the weighted sum of rewards must be finite, got {reward} from {parts}"
            return _failure(completion, ScoreStatus.INVALID, why)
        return Score(row_id=completion.row_id, status=ScoreStatus.OK, reward=reward, parts=parts)

    def _ready_process(self, index: int) -> WorkerProcess:
        """The worker; a new one if it ended, or wrote something without a request."""
        process = self._processes.get(index)
        if process is not None and not process.is_quiet():
            logger.warning(
                "reward worker %d ended, or wrote unasked, between two rewards: replaced",
                process.pid,
            )
            self._end_process(index)
            process = None
        return process or self._start_process(index)

    def _start_process(self, index: int) -> WorkerProcess:
        process = WorkerProcess("reward", SERVICE)
        self._processes[index] = process
        if self._closed.is_set():  # `close` may have read the processes before the line above
            process.kill()
        with ExitStack() as on_failure:
            on_failure.callback(self._end_process, index)
            token = secrets.token_hex(TOKEN_BYTES)
            process.send({"token": token, "service": SERVICE, "setup": self._setup})
            answer = process.receive(START_S, token)
            if answer is None:
                raise RuntimeError(
                    f"a reward process must be ready within {START_S:g} s, got no answer; "
                    f"it was at\n{process.stack()}"
                )
            if "error" in answer:
                raise ValueError(f"the reward functions must load, got {answer['error']}")
            process.pid = int(answer["pid"])
            on_failure.pop_all()
        return process

    def _end_process(self, index: int) -> None:
        process = self._processes.pop(index, None)
        if process is not None:
            process.close()


async def try_loading(config: RewardConfig, task_source: str | None) -> None:
    """Start a reward process and end it. ValueError, in one line, if the functions do not load."""
    pool = RewardPool(replace(config, num_workers=1), task_source)
    await pool.start()
    pool.close()


def _failure(completion: Completion, status: ScoreStatus, why: str) -> Score:
    text = completion.prompt.text
    shown = text if len(text) <= SHOWN_PROMPT_CHARS else text[:SHOWN_PROMPT_CHARS] + "..."
    error = f"on the prompt of line {completion.prompt.prompt_id} ({shown!r}):\n{why}"
    return Score(row_id=completion.row_id, status=status, error=error)


def _message(completions: Sequence[Completion], tokens: Sequence[str]) -> dict[str, Any]:
    """The request for these completions; a prompt that several share is sent once."""
    places: dict[int, int] = {}
    prompts: list[dict[str, Any]] = []
    for completion in completions:
        if id(completion.prompt) not in places:
            places[id(completion.prompt)] = len(prompts)
            prompts.append({name: getattr(completion.prompt, name) for name in PROMPT_FIELDS})
    return {
        "prompts": prompts,
        "calls": [
            (places[id(item.prompt)], (item.text, item.finished), token)
            for item, token in zip(completions, tokens, strict=True)
        ],
    }
