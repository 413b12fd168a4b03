"""The way of a turn from a generator rank to the environment executor on its host, which has the
turn answered by the process that plays the episode.

Every turn gets an answer. An episode is played once: a turn of an earlier attempt, or of one that
the executor does not know because it was lost, is answered LOST."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from llamarl.cluster.sockets import Answer, Channel, Connection, LocalServer, Packet
from llamarl.core.config import DataConfig, EnvironmentConfig
from llamarl.core.errors import ExecutorLost, UserCodeError, cancel_all
from llamarl.core.extensions import TaskSource
from llamarl.core.faces import Environment, Worker
from llamarl.core.records import (
    EpisodeState,
    Prompt,
    StageStatus,
    TurnItem,
    TurnResult,
    as_json,
    read_json,
)
from llamarl.metrics.span import Spans
from llamarl.model.prompt_rules import make_prompt, messages_of
from llamarl.model.tokenizer import Tokenizer, load_tokenizer
from llamarl.scoring.agent.command import AgentCommand
from llamarl.scoring.agent.conversations import Conversations
from llamarl.scoring.definition import Kind, Kinds, kind_of
from llamarl.scoring.sandbox import sandboxes
from llamarl.scoring.sandbox.containers import ProgramLimits
from llamarl.scoring.sandbox.folders import remove_left
from llamarl.scoring.stage_worker import FailureRate, WorkSpans
from llamarl.scoring.turn_format import TurnFormat, TurnFormats, TurnText
from llamarl.scoring.user_code.pool import Call, Failure, UserCode, WorkerPool

MAX_CALLS = 65536  # of a process at once: each episode of an agent has one that waits
RETRY_S = 0.1  # while the environment's executor is started again


class EnvironmentLink:
    """The client of the environment executor `name`, through its socket at `path`, or by `calls`
    where that is None. It can be pickled. A restarted executor listens at the same path; its new
    `calls` are passed to `renew`."""

    def __init__(self, name: str, calls: Environment, path: str | None) -> None:
        self.name = name
        self._calls, self._path = calls, path
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._renewed = asyncio.Event()

    def __reduce__(self) -> Any:
        return EnvironmentLink, (self.name, self._calls, self._path)

    def renew(self, calls: Environment) -> None:
        """Use these calls from now on."""
        self._calls = calls
        self._renewed.set()
        self._renewed = asyncio.Event()

    async def answer(self, turn: TurnItem) -> TurnResult:
        """See `faces.Environment`. The turn is LOST if its environment is lost; a turn that begins
        an episode waits for the executor to be restarted."""
        begins, connection = turn.prompt is not None, None
        while True:
            renewed = self._renewed
            try:
                if self._path is None:
                    return await self._calls.answer(turn)
                connection = await self._connected(self._path)
                packet = await connection.ask(({"ask": "answer", "turn": as_json(turn)}, []))
                packet.close()
                return read_json(TurnResult, packet.header["result"])
            except ConnectionError:
                if self._connection is connection:  # else another turn has found it, too
                    self._connection = None
            except ExecutorLost:
                if begins:
                    await renewed.wait()
            if not begins:
                return lost(turn)

    async def progress(self, turns: Sequence[TurnItem]) -> None:
        """See `faces.Environment`. For a lost executor nothing streams."""
        with suppress(ConnectionError, ExecutorLost):
            if self._path is None:
                await self._calls.progress([*turns])
            elif (connection := self._connection) is not None:
                told = [*map(as_json, turns)]
                (await connection.ask(({"ask": "progress", "turns": told}, []))).close()

    async def forget(self, row_ids: Sequence[int]) -> None:
        """See `faces.Environment`. A lost executor has forgotten the episodes already."""
        with suppress(ConnectionError, ExecutorLost):
            if self._path is None:
                await self._calls.forget([*row_ids])
            elif (connection := self._connection) is not None:
                (await connection.ask(({"ask": "forget", "rows": [*row_ids]}, []))).close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    async def _connected(self, path: str) -> Connection:
        async with self._connecting:
            while self._connection is None:
                try:
                    self._connection = Connection(path, self.name)
                except OSError:
                    await asyncio.sleep(RETRY_S)
            return self._connection


@dataclass(frozen=True)
class Environments:
    """A run's environments, as one replica reaches them. New episodes begin in the one of index
    `own`; prompt and response of a rollout have at most `context` tokens together."""

    links: tuple[EnvironmentLink, ...]
    own: int
    context: int

    async def answer(self, environment: int, turn: TurnItem) -> TurnResult:
        """Return the answer of the environment of this index. When an episode begins again,
        environments on other hosts forget it, as they do not see that its replica is gone."""
        if turn.prompt is not None and turn.attempt:
            others = [link for link in self.links if link is not self.links[environment]]
            await asyncio.gather(*(link.forget([turn.row_id]) for link in others))
        return await self.links[environment].answer(turn)

    async def progress(self, environment: int, turns: Sequence[TurnItem]) -> None:
        """Tell the environment of this index of pieces of turns that stream."""
        await self.links[environment].progress(turns)

    def renew(self, name: str, calls: Environment) -> None:
        """Use these calls for the executor of this name from now on."""
        for link in self.links:
            if link.name == name:
                link.renew(calls)

    async def forget(self, row_ids: Sequence[int]) -> None:
        """Drop these episodes in every environment."""
        await asyncio.gather(*(link.forget(row_ids) for link in self.links))

    def close(self) -> None:
        """Close all connections."""
        for link in self.links:
            link.close()


def lost(turn: TurnItem) -> TurnResult:
    """Return the answer to a turn of a lost episode."""
    error = "the process of its environment was lost"
    state = EpisodeState.LOST
    return TurnResult(row_id=turn.row_id, attempt=turn.attempt, state=state, error=error)


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """The executor that plays the environments of `config`, defined in `task_source` or ready, of
    these `kinds`. `data` says how prompts are rendered; `limits` are those of programs that the
    model writes. Generators on its host connect to `socket` (None: it answers calls only).
    `rewards` names the functions of `episode_rewards` that the recipe uses."""

    executor: ClassVar[str] = "llamarl.scoring.environment:EnvironmentWorker"

    config: EnvironmentConfig
    kinds: Kinds
    limits: ProgramLimits
    task_source: TaskSource | None
    data: DataConfig
    tokenizer: str
    socket: str | None = None
    rewards: list[str] = field(default_factory=list)
    agent: AgentCommand | None = None
    """The program that plays its episodes, if the recipe names one."""


@dataclass(slots=True)
class PlayedEpisode:
    """An episode in progress: the `attempt` of a rollout, played in the pool of index `pool`, for
    the replica whose last turn came by `channel`. `format` is that of its kind unless its
    environment has opened it with tools of its own. `numbers` goes into its TurnResults."""

    row_id: int
    attempt: int
    prompt: Prompt
    kind: Kind
    pool: int
    format: TurnFormat
    channel: Channel | None = None
    conversations: Conversations | None = None  # of an agent
    numbers: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))

    def result(self, state: EpisodeState, **found: Any) -> TurnResult:
        """Return the result of a turn of this episode."""
        numbers = dict(self.numbers)
        return TurnResult(
            row_id=self.row_id, attempt=self.attempt, state=state, numbers=numbers, **found
        )


class EnvironmentWorker(Worker, Environment):
    """The executor of environments. It has `config.num_workers` pools of one process each, since an
    episode stays in its process."""

    service = "llamarl.scoring.episodes"
    """The service of its processes."""

    def __init__(self, spec: EnvironmentSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._spec, self._config = spec, spec.config
        self._work = WorkSpans(spans, "environment")
        code = UserCode(
            service=self.service,
            setup={
                "task_source": spec.task_source,
                "tools": spec.config.tools,
                "limits": asdict(spec.limits),
                "rewards": spec.rewards,
                "agent": None if spec.agent is None else asdict(spec.agent),
            },
            timeout_s=spec.config.timeout_s,
            label="environment",
            keys="environment.",
            max_calls=MAX_CALLS,
        )
        self._pools: list[WorkerPool[dict[str, Any]]] = [
            WorkerPool(code, 1, lambda _, answer: answer) for _ in range(spec.config.num_workers)
        ]
        self._num_played: Counter[int] = Counter(dict.fromkeys(range(len(self._pools)), 0))
        self._episodes: dict[int, PlayedEpisode] = {}  # by row
        self._failures = FailureRate(spec.config.max_failure_rate, code.label, code.keys)
        self._server: LocalServer | None = None
        self._forgetting: set[asyncio.Task[Any]] = set()
        self._tokenizer: Tokenizer  # once it is started, as the next
        self._formats: TurnFormats

    async def start(self) -> None:
        """Start the processes. Raises ValueError if task.py or the tokenizer does not load, or its
        chat template cannot hold observations."""
        data = self._spec.data
        self._tokenizer = load_tokenizer(self._spec.tokenizer, data.chat_template_kwargs, data.date)
        self._formats = TurnFormats(self._tokenizer, self._spec.kinds, self._config)
        for pool in self._pools:
            await pool.start()
        if self._spec.socket is not None:
            self._server = LocalServer(Path(self._spec.socket), self._respond, self._lose)
        self._work.start()

    async def answer(self, turn: TurnItem, channel: Channel | None = None) -> TurnResult:
        """See `faces.Environment`; `channel` is the connection that the turn came by, None for a
        call."""
        known, begins = self._episodes.get(turn.row_id), turn.prompt is not None
        is_known = known is not None and known.attempt == turn.attempt
        is_late = known is not None and known.attempt >= turn.attempt
        if is_late if begins else not is_known:
            return lost(turn)
        if begins and known is not None:
            self._end(known)
        episode = known if known is not None and is_known else self._new(turn)
        episode.channel, agent = channel, episode.conversations
        # Most of the time, the program of an agent waits for the model.
        with self._work.working(1) if agent is None else nullcontext():
            try:
                if agent is not None:
                    result = await (agent.begin(turn) if begins else agent.answer(turn))
                else:
                    result = await (self._begin(episode) if begins else self._turn(episode, turn))
            except Failure as failure:
                self._forget([episode])
                if failure.is_lost:  # it begins again, any other one has ended
                    result = episode.result(EpisodeState.LOST, error=failure.error)
                else:
                    told = {"status": failure.status, "error": failure.error}
                    result = episode.result(EpisodeState.DONE, **told)
        if agent is not None and not (result.goes_on or result.state is EpisodeState.CLOSED):
            self._end(episode)
        try:
            self._failures.add([result])
        except UserCodeError as error:
            return replace(result, error=str(error), ends_run=True)
        return result

    def conversation_of(self, row_id: int, number: int) -> tuple[int, TurnFormat]:
        """Return the key in its process, and the format of the turns, of the conversation of this
        number in an episode that is played here; it is 0 unless an agent plays."""
        episode = self._episodes[row_id]
        if episode.conversations is None:
            return 0, episode.format
        played = episode.conversations.played[number]
        return played.key, played.format

    async def progress(self, turns: list[TurnItem]) -> None:
        """See `faces.Environment`."""
        for turn in turns:
            episode = self._episodes.get(turn.row_id)
            if episode is not None and episode.attempt == turn.attempt and episode.conversations:
                episode.conversations.progress(turn)

    async def forget(self, row_ids: Sequence[int]) -> None:
        """See `faces.Environment`."""
        self._forget([each for row_id in row_ids if (each := self._episodes.get(row_id))])

    async def close(self) -> None:
        """End the processes."""
        if self._server is not None:
            self._server.close()
        for episode in [*self._episodes.values()]:
            self._end(episode)
        await cancel_all(self._forgetting)
        for pool in self._pools:
            pool.close()
        if self._spec.agent is not None:  # they were ended amid episodes
            await asyncio.to_thread(remove_left, sandboxes.PREFIX)

    async def _respond(self, packet: Packet) -> Answer:
        if packet.header["ask"] == "forget":
            await self.forget(packet.header["rows"])
            return {}, (), ()
        if packet.header["ask"] == "progress":
            await self.progress([read_json(TurnItem, each) for each in packet.header["turns"]])
            return {}, (), ()
        result = await self.answer(read_json(TurnItem, packet.header["turn"]), packet.channel)
        return {"result": as_json(result)}, (), ()

    def _lose(self, channel: Channel) -> None:
        """Forget the episodes of a replica that is gone; they begin again elsewhere."""
        self._forget([each for each in self._episodes.values() if each.channel is channel])

    def _forget(self, episodes: Sequence[PlayedEpisode]) -> None:
        """End these episodes, and make their processes drop them."""
        by_pool: dict[int, list[int]] = {}
        for episode in episodes:
            self._end(episode)
            by_pool.setdefault(episode.pool, []).append(episode.row_id)
        for pool, row_ids in by_pool.items():
            forgetting = self._pools[pool].run([Call(None, ("forget", [row_ids]))])
            task = asyncio.create_task(forgetting)
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    def _end(self, episode: PlayedEpisode) -> None:
        if episode.conversations is not None:
            episode.conversations.close()
        if self._episodes.get(episode.row_id) is episode:
            del self._episodes[episode.row_id]
            self._num_played[episode.pool] -= 1

    def _new(self, turn: TurnItem) -> PlayedEpisode:
        assert turn.prompt is not None, "it begins"
        name = kind_of(turn.prompt.fields, self._spec.kinds)
        kind, form = self._spec.kinds[name], self._formats.of(name)
        pool = min(self._num_played, key=self._num_played.__getitem__)
        episode = PlayedEpisode(turn.row_id, turn.attempt, turn.prompt, kind, pool, form)
        if kind.is_agent:
            episode.conversations = Conversations(
                turn.prompt,
                self._formats,
                form,
                self._tokenizer,
                self._spec.data,
                self._config,
                partial(self._ask, episode),
                episode.result,
                episode.numbers,
            )
        self._episodes[turn.row_id] = episode
        self._num_played[pool] += 1
        return episode

    async def _begin(self, episode: PlayedEpisode) -> TurnResult:
        prompt_ids = None
        if episode.kind.is_kept:
            messages = messages_of(episode.prompt.fields, self._spec.data)
            found = await self._ask(episode, "begin", messages)
            if found["messages"] is not None:  # those of its row are replaced, perhaps tools too
                data = replace(self._spec.data, system=None)  # it is the first message
                row = {**episode.prompt.fields, data.prompt_field: found["messages"]}
                number = episode.prompt.prompt_id
                try:
                    if found["schemas"]:
                        episode.format = self._formats.of("", found["schemas"])
                    shown = lambda row: episode.format.kind.schemas  # noqa: E731
                    prompt = make_prompt(row, number, data, self._tokenizer, shown)
                except ValueError as error:
                    raise Failure(StageStatus.INVALID, f"reset: {error}") from None
                prompt_ids = prompt.token_ids
        return episode.result(EpisodeState.GOES_ON, prompt_ids=prompt_ids)

    async def _turn(self, episode: PlayedEpisode, turn: TurnItem) -> TurnResult:
        """Answer a turn, or end the episode."""
        numbers, has_step = episode.numbers, episode.kind.has_step
        numbers["turns"] += 1
        written = episode.format.read(turn.ids)
        if turn.is_cut:
            return await self._finish(episode, EpisodeState.LIMIT, written)
        is_last = numbers["turns"] >= self._config.max_turns
        if not (written.calls or has_step):
            return await self._finish(episode, EpisodeState.DONE, written)
        if is_last and not has_step:
            return await self._finish(episode, EpisodeState.LIMIT, written)
        messages = await self._say(episode, written)
        if not messages or is_last:
            state = EpisodeState.LIMIT if messages else EpisodeState.DONE
            return await self._finish(episode, state)
        try:
            observation = episode.format.observation(messages, turn.ids[-1])
        except ValueError as error:
            raise Failure(StageStatus.INVALID, str(error)) from None
        if len(observation) > turn.room:  # and one of the model's
            numbers["overlong"] += 1
            return await self._finish(episode, EpisodeState.LIMIT)
        numbers["observed_tokens"] += len(observation)
        return episode.result(EpisodeState.GOES_ON, observation=tuple(observation.tolist()))

    async def _say(self, episode: PlayedEpisode, written: TurnText) -> list[dict[str, Any]]:
        """Return the messages by which the environment answers a turn, and count its calls by
        tool."""
        found = await self._ask(episode, "take_turn", *written)
        known = {schema["function"]["name"] for schema in episode.format.kind.schemas}
        for (name, seconds, has_failed), call in zip(found["calls"], written.calls, strict=True):
            tool = name if name in known else "unknown"
            episode.numbers[f"calls/{tool}"] += 1
            episode.numbers[f"seconds/{tool}"] += seconds
            episode.numbers[f"errors/{tool}"] += has_failed
            episode.numbers["malformed"] += bool(call.error)
        messages: list[dict[str, Any]] = found["messages"]
        return messages

    async def _finish(
        self, episode: PlayedEpisode, state: EpisodeState, last: TurnText | None = None
    ) -> TurnResult:
        """End the episode with its reward; `last` is a turn that its process has not seen yet."""
        found: dict[str, Any] = {"reward": None}
        if episode.kind.is_kept:
            sent = last if last is not None and episode.kind.is_read else ()
            found = await self._ask(episode, "finish", *sent)
        self._end(episode)
        reward = None if found["reward"] is None else float(found["reward"])
        rewards = tuple(map(float, found.get("rewards", ())))
        return episode.result(state, reward=reward, rewards=rewards)

    async def _ask(self, episode: PlayedEpisode, method: str, *arguments: Any) -> dict[str, Any]:
        """Call this method of the episode's process and return its answer. Raises Failure if it
        fails, or if all calls of the episode together take too long."""
        start_s = time.monotonic()
        prompt = episode.prompt if method == "begin" else None
        call = Call(prompt, (method, [episode.row_id, *arguments]))
        (found,) = await self._pools[episode.pool].run([call])
        if isinstance(found, Failure):
            raise found
        if "unknown" in found:
            raise Failure(StageStatus.RAISED, "its process was lost", is_lost=True)
        seconds = found.get("working_s", time.monotonic() - start_s)  # without waiting for turns
        episode.numbers["environment_s"] += seconds
        if episode.numbers["environment_s"] > self._config.episode_timeout_s:
            must = f"take at most {self._config.episode_timeout_s:g} s in all"
            why = f"the calls of an episode must {must} (environment.episode_timeout_s)"
            raise Failure(StageStatus.HUNG, why)
        return found
