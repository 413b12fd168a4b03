"""A stage's rollouts for a process outside the run, in batches, as from PyTorch's DataLoader.

    from llamarl.scoring.loader import StageLoader

    for batch in StageLoader("outputs/run", "judge", batch_size=32):
        batch.finish(quality=[grade(text) for text in batch["completion"]])

It must run on a host of the run, as the run's user: arrays come through shared memory.

A batch that is not finished in time, or whose loader is gone, goes to another consumer."""

import asyncio
import atexit
import itertools
import queue
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np

from llamarl.cluster.sockets import Connection
from llamarl.core.errors import NotStored
from llamarl.core.faces import Storage
from llamarl.core.fields import require
from llamarl.core.groups import last_turn
from llamarl.core.records import RESPONSE_IDS, TOKEN_VERSIONS, Columns, Prompt, read_json
from llamarl.model.tokenizer import Tokenizer, load_tokenizer
from llamarl.scoring.stages import Stage, from_data
from llamarl.storage.client import Store, Unit
from llamarl.storage.columns import COMPLETION, NUMBER, PROMPT_RECORD, stored_columns
from llamarl.storage.wire import columns_message

SOCKETS = ".rendezvous-stages"  # folder in the run's, of a socket per stage
RETRY_S = 0.2

T = TypeVar("T")


class StageBatch(dict[str, list[Any]]):
    """A batch of a stage's rollouts: by column, one entry per rollout.

    A column of one number per rollout gives floats, any other one arrays; "prompt" gives Prompts
    and "completion" texts: the response, or the last turn of an episode. `row_ids` has the
    rollouts' row ids; `groups` the number of rollouts of each item, which follow each other: 1, or
    the size of the group with per="group"."""

    def __init__(
        self,
        loader: "StageLoader",
        lease: int,
        items: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> None:
        super().__init__(columns)
        self.row_ids = [row_id for item in items for row_id in item]
        self.groups = [len(item) for item in items]
        self._loader, self._lease = loader, lease

    def finish(
        self,
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        drop: Mapping[int, str] | None = None,
        **more: Sequence[Any],
    ) -> None:
        """Write the stage's columns, one entry per rollout, and hand the batch back.

        `drop` has the reason for each row that is not to be trained on. Raises ValueError for other
        columns or lengths, and if the batch was not finished in time. It has no effect once the run
        has ended, which then needs no results."""
        self._loader.finish(self._lease, self.row_ids, {**(columns or {}), **more}, drop or {})


class StageLoader:
    """An iterator over the batches of one stage, until the run ends.

    `batch_size` counts items: rollouts, or groups with per="group". `prefetch` batches are read
    ahead; the stage's timeout_s runs for them too. In a consumer with ranks, `data_rank` is the
    process's data rank, and `peer` its place among the processes that get the same share; only peer
    0 may `finish`. The run may start up to `wait_s` later than the loader."""

    def __init__(
        self,
        run_dir: str | Path,
        stage: str,
        *,
        batch_size: int = 8,
        prefetch: int = 2,
        data_rank: int = 0,
        peer: int = 0,
        wait_s: float = 60.0,
    ) -> None:
        for key, value, least in (("batch_size", batch_size, 1), ("prefetch", prefetch, 1)):
            require(value >= least, key, f"be at least {least}", value)
        self._path, self._name = Path(run_dir, SOCKETS, stage), stage
        self._who = {"count": batch_size, "data_rank": data_rank, "peer": peer}
        self._batches: queue.SimpleQueue[StageBatch | Exception | None] = queue.SimpleQueue()
        self._room = asyncio.Semaphore(prefetch)
        self._closing = threading.Lock()
        self._is_closed = False
        self._connections: list[Connection | Unit] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        atexit.register(self.close)  # no thread outlives the interpreter
        self._tokenizer: Tokenizer | None = None
        try:
            self._wait(self._connect(wait_s))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StageBatch]:
        while (batch := self._batches.get()) is not None:
            if isinstance(batch, Exception):
                raise batch
            with suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._room.release)
            yield batch
        self._batches.put(None)  # for other threads that iterate

    def finish(
        self,
        lease: int,
        row_ids: list[int],
        columns: Mapping[str, Sequence[Any]],
        drop: Mapping[int, str],
    ) -> None:
        written = {column.name: column for column in self.stage.writes}
        require(columns.keys() == written.keys(), "columns", f"be {[*written]}", [*columns])
        arrays: Columns = {}
        for name, entries in columns.items():
            require(
                len(entries) == len(row_ids), name, f"have {len(row_ids)} entries", len(entries)
            )
            is_number = written[name].length == NUMBER
            shaped = [np.atleast_1d(np.asarray(each, written[name].dtype)) for each in entries]
            is_right = all(len(each) == 1 for each in shaped) or not is_number
            require(is_right, name, "have one number per rollout", [each.shape for each in shaped])
            arrays[name] = shaped
        # A rank that has no rollouts of a batch has no arrays that would show a dtype.
        self._wait(self._finish(lease, arrays if row_ids else {}, drop))

    def close(self) -> None:
        """Disconnect. Unfinished batches go to other consumers, iterations end, and a `finish` in
        progress raises ConnectionError."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        atexit.unregister(self.close)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels what is left
            runner.get_loop().run_forever()
            for each in self._connections:
                each.close()
        with suppress(queue.Empty):
            while True:
                self._batches.get_nowait()
        self._batches.put(None)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with self._closing:  # nothing is left to a loop that has ended
            if self._is_closed:
                work.close()
                raise ConnectionError(f"the loader of stage {self._name} is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ConnectionError(f"the loader of stage {self._name} was closed") from None

    async def _connect(self, wait_s: float) -> None:
        end_s = time.monotonic() + wait_s
        while True:
            try:
                self._connection = Connection(self._path, f"stage {self._name}")
                self._connections.append(self._connection)
                break
            except OSError as error:
                if time.monotonic() > end_s:
                    raise ValueError(
                        f"stage {self._name} must run External in the run, got no socket at "
                        f"{self._path}: {error}"
                    ) from error
                await asyncio.sleep(RETRY_S)
        about = (await self._connection.ask(({"ask": "stage"}, []))).header
        units = [Unit(name, cast(Storage, _NoCalls()), path) for name, path in about["units"]]
        self._connections += units
        self._store = Store(units)
        self.stage: Stage = from_data(about["stage"])
        self._has_ranks = about["has_ranks"]
        if COMPLETION in self.stage.reads:
            self._tokenizer = load_tokenizer(about["tokenizer"])
        self._taking = asyncio.create_task(self._take_all())

    async def _take_all(self) -> None:
        """Take batch after batch, while fewer than `prefetch` are in the queue."""
        missed: NotStored | None = None
        try:
            for number in itertools.count():
                await self._room.acquire()
                try:
                    batch = await self._take(number)
                except NotStored as error:  # retired: others finished it late, or the run ends
                    missed = error
                    self._room.release()
                    continue
                if missed is not None and self._has_ranks:
                    raise missed  # the other processes have had a batch that this one has not
                self._batches.put(batch)
        except ConnectionError:  # the run has ended
            pass
        except Exception as error:  # noqa: BLE001 - raised in the consumer's loop
            self._batches.put(error)
        self._batches.put(None)

    async def _take(self, number: int) -> StageBatch:
        answer = await self._connection.ask(({"ask": "take", "batch": number, **self._who}, []))
        lease, items, prompts = (answer.header[key] for key in ("lease", "items", "prompts"))
        row_ids = [row_id for item in items for row_id in item]
        reads = self.stage.reads
        stored = await self._store.read(row_ids, stored_columns(reads))
        columns: dict[str, list[Any]] = {**stored}
        found = {name: columns[name] for name in reads if name in columns}
        if self._tokenizer is not None:
            written = map(last_turn, columns[RESPONSE_IDS], columns[TOKEN_VERSIONS])
            found[COMPLETION] = [self._tokenizer.decode(ids) for ids in written]
        if PROMPT_RECORD in reads:
            pairs = zip(items, prompts, strict=True)
            found[PROMPT_RECORD] = [
                read_json(Prompt, prompt) for item, prompt in pairs for _ in item
            ]
        return StageBatch(self, lease, items, found)

    async def _finish(self, lease: int, columns: Columns, drop: Mapping[int, str]) -> None:
        names, arrays = columns_message(columns) if columns else ([], [])
        pairs = [*drop.items()]
        header = {"ask": "finish", "lease": lease, "drop": pairs, "columns": names}
        with suppress(ConnectionError):  # the run has ended
            (await self._connection.ask((header, arrays))).close()


class _NoCalls:
    """The calls to a storage unit for a client on another host, where a loader cannot run: each
    raises ConnectionError."""

    async def usage(self) -> dict[str, int]:
        raise ConnectionError("storage units must be on the loader's host")

    write = read = usage
