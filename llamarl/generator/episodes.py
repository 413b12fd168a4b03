"""The part of a generator rank that takes turns: an episode goes on here until it ends.

    open -> waits -> engine -> its turn ends: waits -> engine ... -> out, whole or cut

Only rank 0 asks the environment. Each rank queues a command for the answer; rank 0 queues its own
once it has the answer, and the ranks share its tokens in it."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from llamarl.core.batcher import Gathering
from llamarl.core.errors import cancel_all
from llamarl.core.groups import last_turn
from llamarl.core.records import (
    NO_VERSION,
    EpisodeState,
    FinishReason,
    Request,
    TurnItem,
    TurnResult,
)
from llamarl.generator.protocol import PartialOutput, RequestOutput
from llamarl.scoring.environment import Environments


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The services of a rank that episodes need: `post` a command to its compute thread, with a key
    that is the same on all ranks; there `share` rank 0's tokens, `resume` a rollout in the engine,
    and `put` out one that has stopped; `call_soon` in the event loop; `fail` with an error."""

    number: int
    post: Callable[[Callable[[], None], object], None]
    share: Callable[[Sequence[int] | None], Sequence[int]]
    resume: Callable[[Request, PartialOutput], None]
    put: Callable[[RequestOutput], None]
    call_soon: Callable[[Callable[[], None]], object]
    fail: Callable[[BaseException], None]


@dataclass(slots=True, eq=False)
class OpenEpisode:
    """An episode on this rank. `num_asked` counts the questions to its environment, `num_resumed`
    the times that the engine went on with it here, and `num_kept` those of these times at which its
    keys and values were still there."""

    request: Request
    written: PartialOutput
    environment: int
    waits: bool = False
    num_asked: int = 0
    num_resumed: int = 0
    num_kept: int = 0


class EpisodePart:
    """The open episodes of one rank. Methods belong to the compute thread, except `use` and
    coroutines."""

    def __init__(
        self, rank: Rank, environments: Environments | None, gathering: Gathering | None = None
    ) -> None:
        self._rank, self._environments = rank, environments
        self._open: dict[int, OpenEpisode] = {}
        self._unasked: deque[tuple[OpenEpisode, TurnItem, object]] = deque()
        self._is_called = False  # the event loop will look there
        self._asking: set[asyncio.Task[None]] = set()  # of the event loop
        self._gathering = gathering or Gathering()

    @property
    def environments(self) -> Environments:
        """The environments of this run. Raises RuntimeError if there are none."""
        if self._environments is None:
            raise RuntimeError("a run without environments must not get requests with turns")
        return self._environments

    def use(self, environments: Environments | None) -> None:
        """Ask these environments from now on; no episode may be open."""
        if self._environments is not None:
            self._environments.close()
        self._environments = environments

    def open(self, request: Request, written: PartialOutput) -> None:
        """Begin an episode, or go on with one that was cut and has `written` so far."""
        own = self.environments.own
        environment = own if request.environment is None else request.environment
        episode = self._open[request.row_id] = OpenEpisode(request, written, environment)
        if request.resume:
            episode.num_resumed += 1
            self._rank.resume(request, written)
        else:
            begin = TurnItem(row_id=request.row_id, attempt=request.attempt, prompt=request.prompt)
            self._wait(episode, begin)

    def leave_engine(self, item: RequestOutput) -> None:
        """Take an episode that has stopped in the engine: its turn has ended, or it was cut or
        aborted."""
        episode = self._open[item.request.row_id]
        episode.written = written = item.written
        episode.num_kept += written.num_kept > 0
        if item.reason in (FinishReason.SEGMENT, FinishReason.ABORTED):
            return self._leave(episode, item.reason)
        request, num_tokens = episode.request, len(written.ids)
        num_left = request.sampling.max_tokens - num_tokens
        context = self.environments.context - len(request.prompt_ids) - num_tokens
        turn = TurnItem(
            row_id=request.row_id,
            attempt=request.attempt,
            ids=tuple(last_turn(written.ids, written.versions).tolist()),
            is_cut=item.reason is not FinishReason.STOP,
            room=min(num_left, context) - 1,
        )
        self._wait(episode, turn)

    def abort(self, row_ids: Sequence[int]) -> None:
        """Put out the waiting episodes among these rows; the engine aborts the others."""
        for row_id in row_ids:
            episode = self._open.get(row_id)
            if episode is not None and episode.waits:
                self._leave(episode, FinishReason.ABORTED)

    def reset(self) -> None:
        """Close all episodes, and ignore the answers that come for them."""
        self._open.clear()

    async def forget(self, row_ids: Sequence[int]) -> None:
        """Tell the environments that these episodes do not go on."""
        if self._environments is not None and self._rank.number == 0:
            await self._environments.forget(row_ids)

    async def stop_asking(self) -> None:
        """Cancel the questions that are on their way."""
        await cancel_all(self._asking)

    async def close(self) -> None:
        """Cancel the questions that are on their way, and disconnect from the environments."""
        await cancel_all(self._asking)
        if self._environments is not None:
            self._environments.close()

    def _wait(self, episode: OpenEpisode, turn: TurnItem) -> None:
        episode.waits = True
        episode.num_asked += 1
        key = "turn", turn.row_id, turn.attempt, episode.num_asked
        if self._rank.number > 0:
            return self._rank.post(partial(self._answered, episode, turn, None), key)
        self._unasked.append((episode, turn, key))
        if not self._is_called:  # once for all that end in one step
            self._is_called = True
            self._rank.call_soon(self._start)

    def _start(self) -> None:
        self._is_called = False
        while self._unasked:
            task = asyncio.create_task(self._ask(*self._unasked.popleft()))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, episode: OpenEpisode, turn: TurnItem, key: object) -> None:
        try:
            asked = self.environments.answer(episode.environment, turn)
            result = await self._gathering.join(asked)
            self._rank.post(partial(self._answered, episode, turn, result), key)
        except Exception as error:  # noqa: BLE001 - raised where rollouts are collected
            self._rank.fail(error)

    def _answered(self, episode: OpenEpisode, turn: TurnItem, result: TurnResult | None) -> None:
        """Go on from the answer, which only rank 0 has, or put the episode out."""
        begins, found = turn.prompt is not None, None
        if result is not None:
            ids = (result.prompt_ids or ()) if begins else result.observation
            found = [int(result.goes_on), *ids]
        goes_on, *tokens = self._rank.share(found)
        if self._open.get(turn.row_id) is not episode or not episode.waits:
            return  # it was aborted meanwhile, and may have begun again
        if not goes_on:
            is_done = result is not None and result.state is EpisodeState.DONE
            reason = FinishReason.STOP if is_done else FinishReason.LENGTH
            return self._leave(episode, reason, result)
        episode.waits = False
        if begins:
            prompt_ids = tuple(tokens) or episode.request.prompt_ids
            episode.request = replace(episode.request, prompt_ids=prompt_ids)
        else:
            episode.written = _with_observation(episode.written, tokens)
            episode.request = replace(episode.request, resume=True)
            episode.num_resumed += 1
        self._rank.resume(episode.request, episode.written)

    def _leave(
        self, episode: OpenEpisode, reason: FinishReason, result: TurnResult | None = None
    ) -> None:
        request = episode.request
        del self._open[request.row_id]
        if result is None:
            result = TurnResult(
                row_id=request.row_id, attempt=request.attempt, state=EpisodeState.GOES_ON
            )
        here = {"resumed": float(episode.num_resumed), "kept": float(episode.num_kept)}
        result = replace(
            result, numbers=result.numbers | here, environment=episode.environment, observation=()
        )
        self._rank.put(
            RequestOutput(request=request, written=episode.written, reason=reason, episode=result)
        )


def _with_observation(written: PartialOutput, tokens: Sequence[int]) -> PartialOutput:
    num_tokens = len(tokens)
    return PartialOutput(
        ids=np.concatenate([written.ids, np.array(tokens, np.int32)]),
        logprobs=np.concatenate([written.logprobs, np.zeros(num_tokens, np.float32)]),
        versions=np.concatenate([written.versions, np.full(num_tokens, NO_VERSION, np.int32)]),
        experts=written.experts,
    )
