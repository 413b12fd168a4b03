"""The part of a generator rank that takes turns: an episode goes on here until it ends.

    open -> waits -> engine -> its turn ends: waits -> engine ... -> out, whole or cut

An episode of several conversations waits in each of them, and for the next one, at once; each is a
request of its own to the engine. Such an episode stays here until it ends, also where others are
cut.

Only rank 0 asks the environment. Each rank queues a command for the answer; rank 0 queues its own
once it has the answer, and the ranks share its tokens in it."""

import asyncio
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from llamarl.core.batcher import Gathering
from llamarl.core.errors import cancel_all
from llamarl.core.groups import turn_start
from llamarl.core.records import (
    NO_VERSION,
    EpisodeState,
    FinishReason,
    Request,
    TurnItem,
    TurnOptions,
    TurnResult,
    conversation_row,
    episode_of,
)
from llamarl.generator.protocol import PartialOutput, RequestOutput
from llamarl.scoring.environment import Environments

OVER, GOES_ON, CLOSED, HAS_MORE = range(4)  # what an answer says, as the ranks share it
STREAM_S = 0.1  # at least between two pieces of a turn that streams
Told = tuple[int, TurnOptions, Sequence[int]]
"""An answer, as the ranks share it: one of the above, the options of the next turn, tokens."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The services of a rank that episodes need: `post` a command to its compute thread, with a key
    that is the same on all ranks; there `share` rank 0's tokens, `resume` a rollout in the engine,
    `abort` some there, and `put` out one that has stopped; `call_soon` in the event loop; `fail`
    with an error."""

    number: int
    post: Callable[[Callable[[], None], object], None]
    share: Callable[[Sequence[int] | None], Sequence[int]]
    resume: Callable[[Request, PartialOutput], None]
    abort: Callable[[Sequence[int]], None]
    put: Callable[[RequestOutput], None]
    call_soon: Callable[[Callable[[], None]], object]
    fail: Callable[[BaseException], None]


@dataclass(slots=True, eq=False)
class OpenConversation:
    """A conversation of an episode: its request to the engine, what it has written, the `options`
    of the present turn, of which `num_told` tokens were streamed, and for what `reason` it stopped
    last; None while it is in the engine, or waits for its first turn."""

    request: Request
    written: PartialOutput
    options: TurnOptions = field(default_factory=TurnOptions)
    num_told: int = 0
    reason: FinishReason | None = None
    is_running: bool = False


@dataclass(slots=True, eq=False)
class OpenEpisode:
    """An episode on this rank. With `has_more` other conversations may begin. `num_asked` counts
    the questions to its environment, `num_resumed` the times that the engine went on with it here,
    and `num_kept` those of these times at which its keys and values were still there. `end` says
    how it ended, while the engine still has some of it."""

    request: Request
    environment: int
    conversations: list[OpenConversation]
    has_more: bool = False
    num_asked: int = 0
    num_resumed: int = 0
    num_kept: int = 0
    end: tuple[FinishReason, TurnResult | None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the engine has some of it."""
        return any(each.is_running for each in self.conversations)


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
        self._streaming: dict[int, tuple[OpenEpisode, OpenConversation]] = {}  # by row
        self._streamed_s = 0.0  # when pieces were told last

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
        first = OpenConversation(request, written)
        episode = self._open[request.row_id] = OpenEpisode(request, environment, [first])
        if request.resume:
            self._resume(episode, first)
        else:
            self._wait_for_opening(episode, 0, request)

    def leave_engine(self, item: RequestOutput) -> None:
        """Take a conversation that has stopped in the engine: its turn has ended, or it was cut or
        aborted."""
        row_id, number = episode_of(item.request.row_id)
        episode = self._open[row_id]
        conversation = episode.conversations[number]
        conversation.is_running, conversation.reason = False, item.reason
        conversation.written = written = item.written
        episode.num_kept += written.num_kept > 0
        if episode.end is not None:
            if not episode.is_running:
                self._leave(episode)
            return
        if item.reason is FinishReason.SEGMENT and episode.has_more:
            return self._resume(episode, conversation)
        if item.reason in (FinishReason.SEGMENT, FinishReason.ABORTED):
            return self._end(episode, item.reason)
        self._streaming.pop(item.request.row_id, None)
        request, num_tokens = conversation.request, len(written.ids)
        num_left = episode.request.sampling.max_tokens - num_tokens
        context = self.environments.context - len(request.prompt_ids) - num_tokens
        start = turn_start(written.versions)
        logprobs = written.logprobs[start:].tolist() if conversation.options.has_logprobs else ()
        turn = TurnItem(
            row_id=row_id,
            attempt=request.attempt,
            ids=tuple(written.ids[start:].tolist()),
            is_cut=item.reason is not FinishReason.STOP,
            room=min(num_left, context) - 1,
            conversation=number,
            start=start,
            logprobs=tuple(logprobs),
        )
        self._wait(episode, turn)

    def stream(self, peek: Callable[[int], Sequence[int]]) -> None:
        """Tell the environments what turns that stream have written since they were told last.
        `peek` returns the ids of a turn that the engine writes, by row id."""
        if not self._streaming or time.monotonic() < self._streamed_s + STREAM_S:
            return
        self._streamed_s = time.monotonic()
        pieces: dict[int, list[TurnItem]] = {}  # by environment
        for row_id, (episode, conversation) in self._streaming.items():
            ids = peek(row_id)[conversation.num_told :]
            if not ids:
                continue
            piece = TurnItem(
                row_id=episode.request.row_id,
                attempt=episode.request.attempt,
                ids=tuple(ids),
                conversation=episode_of(row_id)[1],
                start=turn_start(conversation.written.versions) + conversation.num_told,
            )
            conversation.num_told += len(ids)
            pieces.setdefault(episode.environment, []).append(piece)
        if pieces:
            self._rank.call_soon(partial(self._tell, pieces))

    def abort(self, row_ids: Sequence[int]) -> None:
        """Put out the episodes among these rows, those that are in the engine as soon as it has
        stopped them."""
        for row_id in row_ids:
            episode = self._open.get(row_id)
            if episode is not None and episode.end is None:
                self._end(episode, FinishReason.ABORTED)

    def reset(self) -> None:
        """Close all episodes, and ignore the answers that come for them."""
        self._open.clear()
        self._streaming.clear()

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

    def _wait_for_opening(self, episode: OpenEpisode, number: int, begun: Request | None) -> None:
        """Ask for the prompt of this conversation, of an episode that begins as it was `begun`, or
        that goes on."""
        question = TurnItem(
            row_id=episode.request.row_id,
            attempt=episode.request.attempt,
            prompt=None if begun is None else begun.prompt,
            room=self.environments.context - 1,
            conversation=number,
        )
        self._wait(episode, question)

    def _wait(self, episode: OpenEpisode, turn: TurnItem) -> None:
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

    def _tell(self, pieces: dict[int, list[TurnItem]]) -> None:
        for environment, turns in pieces.items():
            task = asyncio.create_task(self.environments.progress(environment, turns))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, episode: OpenEpisode, turn: TurnItem, key: object) -> None:
        try:
            asked = self.environments.answer(episode.environment, turn)
            # An answer that may take as long as a program likes holds up no other.
            result = await (asked if episode.has_more else self._gathering.join(asked))
            self._rank.post(partial(self._answered, episode, turn, result), key)
        except Exception as error:  # noqa: BLE001 - raised where rollouts are collected
            self._rank.fail(error)

    def _answered(self, episode: OpenEpisode, turn: TurnItem, result: TurnResult | None) -> None:
        """Go on from the answer, which only rank 0 has, or put the episode out."""
        found = None if result is None else _packed(turn, result)
        what, options, tokens = _unpacked(self._rank.share(found))
        if self._open.get(turn.row_id) is not episode or episode.end is not None:
            return  # it was aborted meanwhile, and may have begun again
        if what == OVER:
            is_done = result is not None and result.state is EpisodeState.DONE
            return self._end(episode, FinishReason.STOP if is_done else FinishReason.LENGTH, result)
        if what == CLOSED:
            return
        if not turn.opens:
            conversation = episode.conversations[turn.conversation]
            conversation.written = _with_observation(conversation.written, tokens)
            conversation.options, conversation.num_told = options, 0
            return self._resume(episode, conversation)
        episode.has_more = what == HAS_MORE
        request = _request(episode.request, turn.conversation, tokens)
        conversation = OpenConversation(request, PartialOutput(), options)
        episode.conversations[turn.conversation :] = [conversation]
        if turn.conversation == 0:
            episode.request = request
        self._run(episode, conversation)
        if episode.has_more:
            self._wait_for_opening(episode, turn.conversation + 1, None)

    def _resume(self, episode: OpenEpisode, conversation: OpenConversation) -> None:
        conversation.request = replace(conversation.request, resume=True)
        episode.num_resumed += 1
        self._run(episode, conversation)

    def _run(self, episode: OpenEpisode, conversation: OpenConversation) -> None:
        """Let the engine write the next turn of a conversation, or the rest of one."""
        options, num_before = conversation.options, turn_start(conversation.written.versions)
        request, sampling = conversation.request, episode.request.sampling
        if options.max_tokens:
            most = min(sampling.max_tokens, num_before + options.max_tokens)
            sampling = replace(sampling, max_tokens=most)
        if options.stop_strings:
            stop_strings = (*sampling.stop_strings, *options.stop_strings)
            sampling = replace(sampling, stop_strings=stop_strings)
        conversation.request = request = replace(request, sampling=sampling)
        conversation.is_running, conversation.reason = True, None
        if options.streams and self._rank.number == 0:
            self._streaming[request.row_id] = episode, conversation
        self._rank.resume(request, conversation.written)

    def _end(
        self, episode: OpenEpisode, reason: FinishReason, result: TurnResult | None = None
    ) -> None:
        """End the stay of an episode here, once the engine has nothing of it."""
        episode.end = reason, result
        running = [each.request.row_id for each in episode.conversations if each.is_running]
        if running:
            self._rank.abort(running)
        else:
            self._leave(episode)

    def _leave(self, episode: OpenEpisode) -> None:
        assert episode.end is not None
        request, (reason, result) = episode.request, episode.end
        del self._open[request.row_id]
        for each in episode.conversations:
            self._streaming.pop(each.request.row_id, None)
        if result is None:
            result = TurnResult(
                row_id=request.row_id, attempt=request.attempt, state=EpisodeState.GOES_ON
            )
        here = {"resumed": float(episode.num_resumed), "kept": float(episode.num_kept)}
        result = replace(
            result, numbers=result.numbers | here, environment=episode.environment, observation=()
        )
        for each in episode.conversations:  # the limits of single turns were the program's
            each.request = replace(each.request, sampling=request.sampling)
        outputs = [_output(each, reason) for each in episode.conversations]
        first, further = outputs[0], tuple(each for each in outputs[1:] if len(each.written.ids))
        # The first conversation may have been given up before the model wrote in it.
        self._rank.put(replace(first, request=request, episode=result, conversations=further))


def _packed(turn: TurnItem, result: TurnResult) -> list[int]:
    """Return an answer as whole numbers: what it says, the most tokens of the next turn, the number
    of bytes of the texts that end it, these bytes, and tokens. Only rank 0 streams."""
    what = HAS_MORE if result.has_more else GOES_ON
    if not result.goes_on:
        what = CLOSED if result.state is EpisodeState.CLOSED else OVER
    options = result.options or TurnOptions()
    texts = json.dumps(options.stop_strings).encode() if options.stop_strings else b""
    flags = options.streams + 2 * options.has_logprobs
    tokens = (result.prompt_ids or ()) if turn.opens else result.observation
    return [what, options.max_tokens, flags, len(texts), *texts, *tokens]


def _unpacked(numbers: Sequence[int]) -> Told:
    what, max_tokens, flags, num_bytes, *rest = numbers
    texts = json.loads(bytes(rest[:num_bytes])) if num_bytes else ()
    options = TurnOptions(
        max_tokens=max_tokens,
        stop_strings=tuple(texts),
        streams=bool(flags & 1),
        has_logprobs=bool(flags & 2),
    )
    return what, options, rest[num_bytes:]


def _request(request: Request, number: int, prompt_ids: Sequence[int]) -> Request:
    """Return the request of this conversation of an episode: with the prompt that its environment
    gave it, and a seed of its own."""
    if number == 0:
        return replace(request, prompt_ids=tuple(prompt_ids) or request.prompt_ids)
    digest = hashlib.blake2b(f"{request.seed}/{number}".encode(), digest_size=8).digest()
    return replace(
        request,
        row_id=conversation_row(request.row_id, number),
        prompt_ids=tuple(prompt_ids),
        seed=int.from_bytes(digest, "big") >> 11,  # float64 holds it exactly
        resume=False,
    )


def _output(conversation: OpenConversation, end: FinishReason) -> RequestOutput:
    """Return a conversation of an episode that ended in this way. If the environment, or the model,
    has ended it, a turn that a limit cut, or that nobody waits for any more, still counts as
    cut."""
    is_cut = end is FinishReason.STOP and conversation.reason is not FinishReason.STOP
    reason = FinishReason.LENGTH if is_cut else end
    request, written = conversation.request, conversation.written
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        written = _without_last_observation(request, written)
    return RequestOutput(request=request, written=written, reason=reason)


def _without_last_observation(request: Request, written: PartialOutput) -> PartialOutput:
    """Return the tokens up to the last one that the model wrote."""
    end = turn_start(written.versions)
    if end < len(written.ids) or not end:
        return written
    num_tokens = int(np.flatnonzero(written.versions != NO_VERSION)[-1]) + 1
    return PartialOutput(
        ids=written.ids[:num_tokens],
        logprobs=written.logprobs[:num_tokens],
        versions=written.versions[:num_tokens],
        experts=written.experts[: len(request.prompt_ids) + num_tokens - 1],
        kept=written.kept[:num_tokens],
    )


def _with_observation(written: PartialOutput, tokens: Sequence[int]) -> PartialOutput:
    num_tokens = len(tokens)
    return PartialOutput(
        ids=np.concatenate([written.ids, np.array(tokens, np.int32)]),
        logprobs=np.concatenate([written.logprobs, np.zeros(num_tokens, np.float32)]),
        versions=np.concatenate([written.versions, np.full(num_tokens, NO_VERSION, np.int32)]),
        experts=written.experts,
        kept=np.concatenate(
            [written.kept, np.full((num_tokens, written.kept.shape[1]), -1)]
        ).astype(np.int32),
    )
