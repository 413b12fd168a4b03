"""The part of a generator rank that writes rollouts, and rollouts as rows of storage.

Owns: the calls of `protocols.GeneratorReplica`, and the translation between what an engine writes
and storage's columns. Does not own: either. Invariant: a row's spans are the runs of its token
versions.
"""

import asyncio
from functools import partial

import numpy as np

from llamarl.data.tokenizer import load_tokenizer
from llamarl.episode import version_spans
from llamarl.executors.compute import Background
from llamarl.executors.decoding import Decoding
from llamarl.executors.engine_output import EngineOutput, KeptRows
from llamarl.executors.environment_link import Environments
from llamarl.executors.specs import GeneratorSpec
from llamarl.generation.protocol import PartialOutput, RequestOutput
from llamarl.metrics.span import Spans
from llamarl.protocols import ColumnStore, Environment, Report
from llamarl.storage.store import RecordingStore
from llamarl.types import (
    EPISODE_REWARD,
    EPISODE_REWARDS,
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    FinishReason,
    Request,
    RolloutInfo,
)

STORE_S = 1.0


class RolloutPart:
    """protocols.GeneratorReplica for one rank; ranks other than 0 return no rollouts."""

    def __init__(
        self, spec: GeneratorSpec, decoding: Decoding, output: EngineOutput, spans: Spans
    ) -> None:
        self._spec, self._decoding, self._output = spec, decoding, output
        self._spans = spans
        self._storage = RecordingStore(spec.storage, spans)
        self.background = Background()  # what has to do with storage
        self._loading = asyncio.Lock()  # of the tokenizer
        self._kept = KeptRows[RolloutInfo]()
        self._taking = asyncio.Lock()  # a question whose asker is lost may still wait

    async def submit(self, requests: list[Request]) -> None:
        """Queue rollouts; resumed ones are read back from storage first."""
        engine, session = self._decoding.engine, self._output.session
        self._decoding.check()
        self._output.expect(requests)
        if any(request.sampling.stop_strings for request in requests):
            async with self._loading:
                if engine.decode_text is None:
                    tokenizer = await asyncio.to_thread(load_tokenizer, self._spec.tokenizer)
                    engine.decode_text = tokenizer.decode
        resumed = [request for request in requests if request.resume]
        written: dict[int, PartialOutput] = {}
        if resumed:
            written = await self.background.wait_for(read_written(self._storage, resumed))
        key = ("submit", [(request.row_id, request.resume) for request in requests])
        submit = partial(self._decoding.submit, requests, written, session)
        await self._decoding.run(submit, key)

    async def collect(self, received: int) -> Report:
        """See `protocols.GeneratorReplica`; after `heartbeat_s` whatever there is.

        The trainer needs whole groups, so it waits for one, and a little longer for more. What
        stops meanwhile is stored every `STORE_S`, so that no more is lost with the process. An
        exception of the engine is raised here, with its own traceback.
        """
        return await self.background.wait_for(self._collect(received))

    async def _collect(self, received: int) -> Report:
        self._kept.forget(received)
        async with self._taking:
            if not self._kept:
                await self._take()
        return self._kept.report()

    async def _take(self) -> None:
        """Store what stops, and keep its rows."""
        clock = asyncio.get_running_loop().time
        end_s, is_ready = clock() + self._spec.config.heartbeat_s, False
        storage = self._storage
        while not is_ready and (left_s := end_s - clock()) > 0:
            finished, is_ready = await self._output.take(min(left_s, STORE_S))
            if finished:
                await write_finished(storage, finished)
                self._kept.add(rollout_info(item, self._spec.replica) for item in finished)

    async def drained(self, limit_s: float) -> None:
        """Wait until all calls have ended, then forget what they reported; RuntimeError if that
        takes longer than `limit_s`."""
        await self._decoding.episodes.stop_asking()
        await self.background.drained(limit_s)
        self._kept = KeptRows[RolloutInfo]()

    def use(self, storage: ColumnStore, environments: Environments | None) -> None:
        """Write there, and take turns with these, from now on."""
        self._storage = RecordingStore(storage, self._spans)
        self._decoding.episodes.use(environments)

    async def renew_environment(self, name: str, calls: Environment) -> None:
        """See `protocols.GeneratorReplica`."""
        self._decoding.episodes.environments.renew(name, calls)

    async def abort_requests(self, row_ids: list[int]) -> None:
        """Stop these rollouts; each comes out of `collect`, marked ABORTED."""
        abort = partial(self._decoding.abort, row_ids)
        await self._decoding.run(abort, ("abort_requests", row_ids))
        await self._decoding.episodes.forget(row_ids)

    async def close(self) -> None:
        """Ask nothing more of environments."""
        await self._decoding.episodes.close()


async def read_written(storage: ColumnStore, requests: list[Request]) -> dict[int, PartialOutput]:
    """What these resumed rollouts have written so far, by row id."""
    row_ids = [request.row_id for request in requests]
    names = [RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS]
    columns = await storage.read(row_ids, names)
    return {
        row_id: PartialOutput(ids=ids, logprobs=logprobs, versions=versions)
        for row_id, ids, logprobs, versions in zip(
            row_ids, *(columns[name] for name in names), strict=True
        )
    }


async def write_finished(
    storage: ColumnStore, finished: list[RequestOutput], writer: str = ""
) -> None:
    """Store the columns of these rollouts, but for those that begin again."""
    kept = [item for item in finished if item.episode is None or not item.episode.is_lost]
    alike: dict[tuple[str, ...], list[RequestOutput]] = {}
    for item in kept:
        alike.setdefault(tuple(_rewards(item)), []).append(item)
    for some in alike.values():
        await _write(storage, some, writer)


def _rewards(item: RequestOutput) -> dict[str, np.ndarray]:
    """The columns with what rewarded an episode at its end."""
    if (episode := item.episode) is None:
        return {}
    cells = {} if episode.reward is None else {EPISODE_REWARD: np.array([episode.reward])}
    return cells | ({EPISODE_REWARDS: np.array(episode.rewards)} if episode.rewards else {})


async def _write(storage: ColumnStore, finished: list[RequestOutput], writer: str) -> None:
    """Rollouts with the same columns."""
    columns = {
        PROMPT_IDS: [np.array(item.request.prompt_ids, np.int32) for item in finished],
        RESPONSE_IDS: [item.written.ids for item in finished],
        GENERATOR_LOGPROBS: [item.written.logprobs for item in finished],
        TOKEN_VERSIONS: [item.written.versions for item in finished],
        SAMPLING: [_sampling_row(item.request, item.reason) for item in finished],
    }
    rewards = [*map(_rewards, finished)]
    columns |= {name: [cells[name] for cells in rewards] for name in rewards[0]}
    await storage.write([item.request.row_id for item in finished], columns, writer)


def rollout_info(finished: RequestOutput, replica: int) -> RolloutInfo:
    """What the controller gets of it."""
    return RolloutInfo(
        row_id=finished.request.row_id,
        num_prompt_tokens=len(finished.request.prompt_ids),
        num_tokens=len(finished.written.ids),
        spans=version_spans(finished.written.versions),
        finish_reason=finished.reason,
        replica=replica,
        logprob=float(finished.written.logprobs.sum(dtype=np.float64)),
        episode=finished.episode,
    )


def _sampling_row(request: Request, reason: FinishReason) -> np.ndarray:
    sampling = request.sampling
    values = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens]
    return np.array([*values, request.seed, FINISH_CODES[reason]], np.float64)
