"""The generator of a rehearsal: it takes turns with environments as a replica does, but a policy
writes the turns."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from llamarl.core.errors import cancel_all
from llamarl.core.faces import ColumnStore, Environment, GeneratorReplica, Report, Worker
from llamarl.core.records import (
    NO_VERSION,
    EpisodeState,
    FinishReason,
    Request,
    RolloutInfo,
    TurnResult,
    episode_of,
)
from llamarl.generator.decoding import KeptRows
from llamarl.generator.episodes import EpisodePart, Rank
from llamarl.generator.protocol import PartialOutput, RequestOutput
from llamarl.generator.worker import rollout_info, write_finished
from llamarl.model.tokenizer import Tokenizer
from llamarl.rehearsal.environment import RehearsedEnvironment
from llamarl.rehearsal.faults import Injector
from llamarl.rehearsal.policies import AskedTurn, Policy
from llamarl.scoring.environment import EnvironmentLink, Environments

IDLE_S = 30.0  # between two reports without rows


class RehearsalReplica(Worker, GeneratorReplica):
    """Plays at most `at_once` episodes of `environment` at a time, reached through `link`, in the
    order in which they were asked for, or from the last to the first if `is_reversed`. Prompt and
    response have at most `context` tokens together. `numbers` has the place of each row in its
    prompt's group."""

    def __init__(
        self,
        policy: Policy,
        environment: RehearsedEnvironment,
        link: EnvironmentLink,
        storage: ColumnStore,
        tokenizer: Tokenizer,
        injector: Injector,
        *,
        context: int,
        at_once: int,
        is_reversed: bool,
    ) -> None:
        self._policy, self._environment, self._link = policy, environment, link
        self._storage, self._tokenizer, self._injector = storage, tokenizer, injector
        self._at_once, self._is_reversed = at_once, is_reversed
        self._environments = Environments((link,), 0, context)
        self._waiting: deque[Request] = deque()
        self._open: dict[int, Request] = {}
        self._writing: dict[int, asyncio.Task[None]] = {}  # by the row of a conversation
        self._asked_for: dict[int, tuple[Request, PartialOutput]] = {}  # the same
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept, self._news = KeptRows[RolloutInfo](), asyncio.Event()
        self._error: BaseException | None = None
        self._version, self._num_of_prompt = 0, Counter[int]()
        self.numbers: dict[int, int] = {}
        self._part = self._new_part()

    async def submit(self, requests: list[Request]) -> None:
        for request in sorted(requests, key=lambda each: each.row_id):
            if request.row_id not in self.numbers:
                assert request.prompt is not None, "a rehearsal plays episodes"
                prompt_id = request.prompt.prompt_id
                self.numbers[request.row_id] = self._num_of_prompt[prompt_id]
                self._num_of_prompt[prompt_id] += 1
            self._waiting.append(request)
        if self._is_reversed:
            self._waiting = deque(sorted(self._waiting, key=lambda each: -each.row_id))
        asyncio.get_running_loop().call_soon(self._begin)

    async def collect(self, received: int) -> Report:
        self._kept.forget(received)
        if not self._kept:
            self._news.clear()
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._news.wait()
            except TimeoutError:
                pass
        if self._error is not None:
            raise self._error
        return self._kept.report()

    async def abort_requests(self, row_ids: list[int]) -> None:
        self._part.abort(row_ids)
        await self._part.forget(row_ids)

    async def renew_environment(self, name: str, calls: Environment) -> None:
        self._link.renew(calls)

    async def close(self) -> None:
        await cancel_all({*self._writing.values(), *self._tasks})
        await self._part.close()

    def _new_part(self) -> EpisodePart:
        rank = Rank(
            number=0,
            post=lambda call, key: call(),
            share=lambda numbers: [] if numbers is None else numbers,
            resume=self._resume,
            abort=self._abort,
            put=self._put,
            call_soon=lambda call: asyncio.get_running_loop().call_soon(call),
            fail=self._fail,
        )
        return EpisodePart(rank, self._environments)

    def _begin(self) -> None:
        """Open episodes, as many as there may be at a time."""
        while self._waiting and len(self._open) < self._at_once:
            request = self._waiting.popleft()
            self._open[request.row_id] = request
            self._part.open(request, PartialOutput())

    def _resume(self, request: Request, written: PartialOutput) -> None:
        row_id = episode_of(request.row_id)[0]
        place = request.row_id, len(written.ids)
        if self._injector.meets("drop", row_id, request.attempt, place):
            for each in self._open:  # all that it carries
                self._environment.logs[each].faults.add("drop")
            self._link.close()
        if self._injector.meets("lose", row_id, request.attempt, place):
            return self._lose()
        self._asked_for[request.row_id] = request, written
        self._writing[request.row_id] = asyncio.create_task(self._write(request, written))

    async def _write(self, request: Request, written: PartialOutput) -> None:
        """Have the policy write a turn, and take it from there."""
        try:
            ids, is_stopped = self._ended(
                request, await self._policy.write(self._asked(request, written))
            )
            del self._writing[request.row_id], self._asked_for[request.row_id]
            self._leave_engine(request, written, ids, is_stopped)
        except Exception as error:  # noqa: BLE001 - raised where rollouts are collected
            self._fail(error)

    def _leave_engine(
        self, request: Request, written: PartialOutput, ids: Sequence[int], is_stopped: bool
    ) -> None:
        """Pass on a turn, perhaps with a commit in its middle."""
        versions = np.full(len(ids), self._version, np.int32)
        row_id = episode_of(request.row_id)[0]
        place = request.row_id, len(written.ids)
        if self._injector.meets("commit", row_id, request.attempt, place):
            self._version += 1
            self._policy.commit()
            versions[len(ids) // 2 :] = self._version
            self._environment.logs[row_id].faults.add("commit")
        output = PartialOutput(
            ids=np.concatenate([written.ids, np.array(ids, np.int32)]),
            logprobs=np.zeros(len(written.ids) + len(ids), np.float32),
            versions=np.concatenate([written.versions, versions]),
        )
        reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
        self._part.leave_engine(RequestOutput(request=request, written=output, reason=reason))

    def _asked(self, request: Request, written: PartialOutput) -> AskedTurn:
        row_id, conversation = episode_of(request.row_id)
        assert request.prompt is not None, "a rehearsal plays episodes"
        num_tokens = len(written.ids)
        left = self._environments.context - len(request.prompt_ids) - num_tokens
        is_observed = np.concatenate([[False], written.versions == NO_VERSION])
        return AskedTurn(
            prompt=request.prompt,
            number=self.numbers[row_id],
            conversation=conversation,
            turn=int((is_observed[1:] & ~is_observed[:-1]).sum()),
            ids=(*request.prompt_ids, *written.ids.tolist()),
            form=self._environment.form_of(row_id, conversation),
            room=max(1, min(request.sampling.max_tokens - num_tokens, left)),
        )

    def _ended(self, request: Request, ids: Sequence[int]) -> tuple[Sequence[int], bool]:
        """Return the ids of a turn up to its end, and whether it has one."""
        sampling = request.sampling
        ends = {*self._tokenizer.eos_token_ids, *sampling.stop_token_ids}
        num_tokens = next((n for n, each in enumerate(ids, start=1) if each in ends), 0)
        found = ids[:num_tokens] if num_tokens else ids

        def has_stop(number: int) -> bool:
            text = self._tokenizer.decode(found[:number])
            return any(stop in text for stop in sampling.stop_strings)

        if sampling.stop_strings and has_stop(len(found)):
            first = bisect_left(range(len(found) + 1), x=True, key=has_stop)
            return found[:first], True
        return found, bool(num_tokens)

    def _abort(self, row_ids: Sequence[int]) -> None:
        """Stop writing these conversations; each leaves as it was before its turn."""
        for row_id in row_ids:
            if (writing := self._writing.pop(row_id, None)) is not None:
                writing.cancel()
                request, written = self._asked_for.pop(row_id)
                output = RequestOutput(
                    request=request, written=written, reason=FinishReason.ABORTED
                )
                asyncio.get_running_loop().call_soon(self._stopped, self._part, output)

    def _stopped(self, part: EpisodePart, output: RequestOutput) -> None:
        if part is self._part:  # else it was lost meanwhile
            part.leave_engine(output)

    def _lose(self) -> None:
        """End as a replica whose process is killed: another one begins all its episodes again."""
        for task in self._writing.values():
            task.cancel()
        self._writing.clear()
        self._asked_for.clear()
        lost = [*self._open.values()]
        self._part.reset()
        self._link.close()
        old, self._part = self._part, self._new_part()
        self._start(old.stop_asking())
        for request in lost:
            self._environment.logs[request.row_id].faults.add("lose")
            result = TurnResult(
                row_id=request.row_id, attempt=request.attempt, state=EpisodeState.LOST
            )
            output = RequestOutput(
                request=request, written=PartialOutput(), reason=FinishReason.LENGTH, episode=result
            )
            self._put(output)

    def _put(self, output: RequestOutput) -> None:
        self._open.pop(output.request.row_id, None)
        self._start(self._store(output))
        asyncio.get_running_loop().call_soon(self._begin)

    async def _store(self, output: RequestOutput) -> None:
        try:
            await write_finished(self._storage, [output])
        except Exception as error:  # noqa: BLE001 - raised where rollouts are collected
            return self._fail(error)
        self._kept.add([rollout_info(output, 0)])
        self._news.set()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._news.set()
