"""The executors of a run with one external stage, in this process, and consumers in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.core.records import PROMPT_IDS, RESPONSE_IDS, Prompt, StageItem
from llamarl.metrics.span import Spans
from llamarl.scoring.external import ExternalSpec, ExternalWorker
from llamarl.scoring.loader import SOCKETS, StageBatch, StageLoader
from llamarl.scoring.stages import External, Stage
from llamarl.storage.client import Store, Unit
from llamarl.storage.worker import StorageSpec, StorageWorker

PROMPT = Prompt(prompt_id=3, text="what?", token_ids=(1, 2), fields={"answer": "4"})
READS = ("prompt", RESPONSE_IDS)
NUM_ROWS = 40


class Run:
    """The executors of a run with one external stage, in this process."""

    def __init__(self, folder: Path, stage: Stage, tokenizer: str = "") -> None:
        self.folder = folder
        socket = str(folder / "units" / "0")
        spec = StorageSpec(
            unit=0,
            archive_folder=None,
            socket=socket,
            spill_folder=str(folder / "spill"),
            max_bytes=0,
        )
        place: dict[str, Any] = {"rank": 0, "num_ranks": 1, "spans": Spans("x", None)}
        self.unit = StorageWorker(spec, **place)
        self.store = Store([Unit("storage-0", self.unit, socket)])
        self.stage = ExternalWorker(
            ExternalSpec(
                stage=stage,
                socket=str(folder / SOCKETS / stage.name),
                units=(("storage-0", socket),),
                tokenizer=tokenizer,
                storage=self.store,
            ),
            **place,
        )

    async def __aenter__(self) -> Run:
        await self.unit.start()
        await self.stage.start()
        lengths = [1 + 7 * i % 40 for i in range(NUM_ROWS)]
        cells = [np.arange(length, dtype=np.int32) for length in lengths]
        prompts = [np.array(PROMPT.token_ids, np.int32)] * NUM_ROWS
        rows = list(range(NUM_ROWS))
        await self.store.write(rows, {RESPONSE_IDS: cells, PROMPT_IDS: prompts})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stage.close()
        await self.unit.close()

    async def written(self, name: str, row_ids: list[int]) -> list[list[float]]:
        cells = (await self.store.read(row_ids, [name]))[name]
        return [cell.tolist() for cell in cells]


def make(external: External | None = None, reads: tuple[str, ...] = READS, **more: Any) -> Stage:
    options = {"writes": ["quality"], "timeout_s": 60.0, "max_failure_rate": 1.0, **more}
    return Stage("judge", external or External(), reads, **options)


def alone(first: int = 0, end: int = NUM_ROWS) -> list[StageItem]:
    return [((row_id,), PROMPT) for row_id in range(first, end)]


def lengths_of(batch: StageBatch) -> list[float]:
    return [float(len(ids)) for ids in batch[RESPONSE_IDS]]


def consume(
    folder: Path, batches: list[list[int]], work: Callable[[StageBatch], None], **options: Any
) -> threading.Thread:
    """A consumer in a thread, until the run ends."""

    def take() -> None:
        with StageLoader(folder, "judge", **options) as loader:
            for batch in loader:
                batches.append(batch.row_ids)
                work(batch)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread
