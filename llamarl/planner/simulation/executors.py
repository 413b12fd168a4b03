"""Simulated trainer, stages, storage and run logger without a model: they answer as the real ones
do, in the time that the real ones would take; the values that they return are made up."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

from llamarl.core.config.generator import number_of, pools_of
from llamarl.core.errors import StaleVersion
from llamarl.core.faces import RunObserver
from llamarl.core.groups import Batch, Group, StepStats, Verdict
from llamarl.core.records import (
    Columns,
    EpisodeState,
    Outcome,
    RolloutInfo,
    StageItem,
    StageResult,
    StageStatus,
    TurnItem,
    TurnResult,
    conversation_row,
    episode_of,
)
from llamarl.planner.simulation.clock import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.setting import (
    PARAMETER,
    Layouts,
    Setting,
    SimulatedExecutor,
    SimulatedTimeline,
)
from llamarl.publish.layout import StagingHandle
from llamarl.scoring.environment import lost
from llamarl.scoring.stages import Stage
from llamarl.trainer.policy_loss import is_inert


class SimulatedStorage(SimulatedExecutor):
    """A faces.Storage that takes time and holds no arrays; retired rollouts leave `rollouts`."""

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None:
        await self._serve("write_rows", row_ids)

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        await self._serve("read_rows", row_ids)
        return {name: [] for name in names}

    async def find(self, row_ids: list[int]) -> list[RolloutInfo]:
        await self._travel()
        return self._rollouts.find(row_ids)

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        await self._serve("retire_rows", row_ids)
        self._rollouts.forget(row_ids)

    async def erase(self, row_ids: list[int], names: list[str]) -> None:
        await self._travel()

    async def fence(self, writer: str) -> None:
        await self._travel()

    async def usage(self) -> dict[str, int]:
        return {"num_rows": 0, "memory_bytes": 0, "spilled_bytes": 0, "is_full": 0}

    async def _serve(self, name: str, row_ids: list[int]) -> None:
        await self._travel()
        with self._timeline.bar("storage", name):
            await self._cores.work(self._costs.store_row_s * len(row_ids))


class SimulatedScorer(SimulatedExecutor):
    """A faces.Processor with the workload's scores; a further conversation of an episode has
    none."""

    async def process(self, items: list[StageItem]) -> list[StageResult]:
        await self._travel()
        num_rows = sum(len(row_ids) for row_ids, _ in items)
        seconds = self._costs.score_row_s * num_rows / self._config.reward.num_workers
        async with self._lock:
            with self._timeline.bar("scorer", "score"):
                await self._cores.work(self._costs.score_call_s + seconds)
        scores = [
            StageResult(row_id=row_id)
            if episode_of(row_id)[1]
            else self._workload.score(row_id, prompt)
            for row_ids, prompt in items
            if prompt is not None
            for row_id in row_ids
        ]
        own = [score for score in scores if not episode_of(score.row_id)[1]]
        await self._rollouts.add_rewards(own, self.writer)
        return scores


class SimulatedModel(SimulatedExecutor):
    """The faces.Processor of a frozen model, for all ranks, on `device`, which the trainer computes
    on too."""

    def __init__(self, setting: Setting, costs: Costs, cores: Cores, device: Cores) -> None:
        super().__init__(setting, costs, cores)
        self._device = device

    async def process(self, items: list[StageItem]) -> list[StageResult]:
        await self._travel()
        rollouts = await self._rollouts.get([row_id for row_ids, _ in items for row_id in row_ids])
        lengths = [each.num_prompt_tokens + each.num_tokens for each in rollouts]
        async with self._lock:
            with self._timeline.bar("reference", "infer"):
                seconds = self._costs.infer_s(lengths)
                await self._device.work(seconds, self._config.trainer.num_ranks)
        return []


class SimulatedStage(SimulatedExecutor):
    """The faces.Processor of a recipe's own function, which takes as long as a reward and returns
    the workload's results."""

    def __init__(self, setting: Setting, costs: Costs, cores: Cores, stage: Stage) -> None:
        super().__init__(setting, costs, cores)
        self._stage = stage

    async def process(self, items: list[StageItem]) -> list[StageResult]:
        await self._travel()
        row_ids = [row_id for row_ids, _ in items for row_id in row_ids]
        seconds = self._costs.score_row_s * len(row_ids) / self._stage.workers
        async with self._lock:
            with self._timeline.bar(self._stage.name, "stage"):
                await self._cores.work(self._costs.score_call_s + seconds)
        return [self._workload.pass_stage(self._stage, row_id) for row_id in row_ids]


@dataclass(slots=True, eq=False)
class SimulatedEpisode:
    """An episode in progress, as `begun`: the turns of each conversation so far, the number of
    conversations that are open, tokens and seconds of its environment. With `has_more` its replica
    asks for the next conversation; `asked` is answered once that begins, or the episode ends. Then
    `end` is its result, if that is not the usual one."""

    begun: TurnItem
    has_more: bool
    num_turns: list[int] = field(default_factory=lambda: [0])
    num_open: int = 1
    num_observed: int = 0
    environment_s: float = 0.0
    asked: asyncio.Future[TurnResult] | None = None
    end: TurnResult | None = None

    def result(self, found: TurnResult) -> TurnResult:
        """Return the result of a turn, with the numbers of the episode so far that a program's
        have."""
        numbers: dict[str, float] = {
            "environment_s": self.environment_s,
            "turns": sum(self.num_turns),
            "conversations": len(self.num_turns),
        }
        if self.num_observed:
            numbers["observed_tokens"] = self.num_observed
        return replace(found, numbers=numbers) if self.has_more else found


class SimulatedEnvironment(SimulatedExecutor):
    """A faces.Environment that answers as the workload says, many turns at once. Several
    conversations are those of a program, which goes on where a limit has cut one."""

    def __init__(self, setting: Setting, costs: Costs, cores: Cores) -> None:
        super().__init__(setting, costs, cores)
        self._played: dict[int, SimulatedEpisode] = {}  # by row

    async def answer(self, turn: TurnItem) -> TurnResult:
        await self._travel()
        episode = self._played.get(turn.row_id)
        attempt = -1 if episode is None else episode.begun.attempt
        if attempt >= turn.attempt if turn.prompt is not None else attempt != turn.attempt:
            return lost(turn)
        if turn.prompt is not None:
            self._forget(turn.row_id)
            has_more = self._workload.num_conversations > 1
            self._played[turn.row_id] = SimulatedEpisode(turn, has_more)
            return replace(lost(turn), state=EpisodeState.GOES_ON, has_more=has_more)
        assert episode is not None
        if turn.opens:
            episode.asked = asyncio.get_running_loop().create_future()
            self._go_on(episode)
            return await episode.asked
        result = await self._take_turn(episode, turn)
        if result.goes_on:
            return episode.result(result)
        if not episode.has_more:
            self._drop(episode)
            return result
        episode.num_open -= 1
        if result.status is not StageStatus.OK:
            episode.end = episode.end or result
        self._go_on(episode)
        return replace(lost(turn), state=EpisodeState.CLOSED)

    async def forget(self, row_ids: list[int]) -> None:
        await self._travel()
        for row_id in row_ids:
            self._forget(row_id)

    async def _take_turn(self, episode: SimulatedEpisode, turn: TurnItem) -> TurnResult:
        """Return what the workload says about a turn of a conversation."""
        episode.num_turns[turn.conversation] += 1
        row_id, num_turns = conversation_row(turn.row_id, turn.conversation), episode.num_turns
        seconds, found = self._workload.answer(row_id, num_turns[turn.conversation])
        await self._cores.sleep(seconds)
        episode.environment_s += seconds
        result, num_tokens = replace(found, row_id=turn.row_id, attempt=turn.attempt), 0
        if turn.is_cut or (found.goes_on and self._workload.observation_tokens > turn.room):
            result = replace(result, state=EpisodeState.LIMIT)
        if result.goes_on:
            num_tokens = self._workload.observation_tokens
        episode.num_observed += num_tokens
        return replace(result, observation=(1,) * num_tokens)

    def _go_on(self, episode: SimulatedEpisode) -> None:
        """Begin the next conversation if it is asked for and due, or end the episode that has no
        other."""
        asked, begun = episode.asked, episode.begun
        if asked is None or asked.done():
            return
        result = TurnResult(row_id=begun.row_id, attempt=begun.attempt, state=EpisodeState.DONE)
        has_next = len(episode.num_turns) < self._workload.conversations_of(begun.row_id)
        is_due = self._workload.are_parallel or not episode.num_open
        if episode.end is None and has_next and is_due:
            assert begun.prompt is not None
            episode.num_turns.append(0)
            episode.num_open += 1
            ids = begun.prompt.token_ids
            result = replace(result, state=EpisodeState.GOES_ON, prompt_ids=ids, has_more=True)
            asked.set_result(episode.result(result))
        elif episode.end is not None or not (has_next or episode.num_open):
            self._drop(episode)
            asked.set_result(episode.result(episode.end or result))

    def _forget(self, row_id: int) -> None:
        if (episode := self._played.get(row_id)) is not None:
            episode.end = lost(episode.begun)
            self._go_on(episode)
            self._drop(episode)

    def _drop(self, episode: SimulatedEpisode) -> None:
        if self._played.get(episode.begun.row_id) is episode:
            del self._played[episode.begun.row_id]


class SimulatedTrainer(Layouts):
    """The Trainer, WeightSource and Offloadable of `core/faces.py` for all ranks: the slowest one
    paces each micro-batch. It computes on `device`; work beside that takes `cores`.

    Like the real one it leaves out rows without a gradient, and can write the version before its
    present one, from a snapshot.
    """

    def __init__(
        self, setting: Setting, costs: Costs, cores: Cores, *, hosts: tuple[str, ...], device: Cores
    ) -> None:
        super().__init__(setting, costs, cores, hosts=hosts)
        self._device = device
        self._weight = self._config.trainer.num_ranks
        self._pools = pools_of(self._config.generator)
        self._idle_since_s = 0.0
        self._num_writing = 0
        self._away: set[str] = set()
        self.version = 0
        self._num_tokens = 0
        self._ages: Counter[int] = Counter()

    # Trainer

    async def accumulate(self, batch: Batch) -> None:
        async with self._lock:
            await self._begin(batch)
            rollouts = await self._rollouts.get([row.row_id for row in batch.rows])
            for row, rollout in zip(batch.rows, rollouts, strict=True):
                for span in rollout.spans:
                    if span.version >= row.oldest_version:
                        self._ages[batch.version - span.version] += span.num_tokens
            self._num_tokens += sum(row.num_generated for row in batch.rows)
            await self._cores.work(self._costs.store_row_s * len(batch.rows))
            self._end_idle("batch")
            await self._compute(self._costs.part_s + self._passes_s(batch), "accumulate")

    async def _begin(self, batch: Batch) -> None:
        await self._travel()
        assert batch.version == self.version, (batch.version, self.version)
        assert not self._away, f"trained while {self._away} are off the device"

    async def store_proximal(self, batch: Batch) -> None:
        async with self._lock:
            await self._begin(batch)
            await self._cores.work(self._costs.store_row_s * len(batch.rows))
            self._end_idle("batch")
            passes_s = self._passes_s(batch) * self._costs.forward_share
            await self._compute(self._costs.part_s + passes_s, "proximal")

    async def step(self) -> StepStats:
        async with self._lock:
            await self._travel()
            if self._num_writing:
                await self._compute(self._costs.snapshot_s, "snapshot")
            await self._compute(self._costs.optimizer_s, "optimizer_step")
            self.version += 1
            self._timeline.num_tokens.append(self._num_tokens)
            self._timeline.ages.append(dict(self._ages))
            self._num_tokens, self._ages = 0, Counter()
        if self._costs.turnaround_s:
            await asyncio.sleep(self._costs.turnaround_s)
        return StepStats(version=self.version, scalars={})

    async def snapshot(self) -> bool:
        assert not self._away, f"copied while {self._away} are off the device"
        return True

    async def save(self, folder: str, from_snapshot: bool = False) -> None:
        version = self.version
        await self._cores.work(self._costs.save_s)
        is_same = (self.version, self._away) == (version, set())
        assert from_snapshot or is_same, "changed amid a save"

    async def export(self, folder: str, dtype: str) -> None:
        assert not self._away, f"exported while {self._away} are off the device"

    async def restore(self, folder: str) -> int:
        assert not self._away, f"restored while {self._away} are off the device"
        return self.version

    async def infer(self, row_ids: list[int]) -> list[float]:
        async with self._lock:
            self._end_idle("batch")
            rollouts = await self._rollouts.get(row_ids)
            lengths = [each.num_prompt_tokens + each.num_tokens for each in rollouts]
            per_rank = lengths[:: self._config.trainer.num_data_ranks]
            seconds = self._costs.arithmetic_s(per_rank) * self._costs.forward_share
            await self._compute(self._costs.micro_batch_s + seconds, "infer")
        return [each.difference for each in rollouts]

    # WeightSource

    async def write(self, version: int, handles: list[StagingHandle]) -> list[dict[str, int]]:
        await self._travel()
        replica = handles[0].replica
        self._num_writing += 1
        with self._timeline.bar(f"publish-{replica}", "write", "publish"):
            costs = self._costs.of_pool(number_of(self._pools, replica))
            await self._cores.work(costs.write_s)
        self._num_writing -= 1
        if version not in (self.version, self.version - 1):
            raise StaleVersion(f"version {version} is gone, the present one is {self.version}")
        return [{PARAMETER: version * len(handles)}]

    # Offloadable

    async def offload(self, tags: list[str]) -> None:
        await self._move("offload", [tag for tag in tags if tag not in self._away])
        self._away |= set(tags)

    async def prefetch(self, tags: list[str]) -> None: ...

    async def onload(self, tags: list[str]) -> None:
        await self._move("onload", [tag for tag in tags if tag in self._away])
        self._away -= set(tags)

    async def _move(self, name: str, tags: list[str]) -> None:
        seconds = sum(self._costs.moves_s.get(f"trainer {tag}", 0.0) for tag in tags)
        async with self._lock:
            await self._travel()
            if name == "onload":
                self._end_idle("phase")
            await self._compute(seconds, name)

    def _passes_s(self, batch: Batch) -> float:
        """Return the seconds of forward and backward of all micro-batches."""
        algorithm = self._config.algorithm
        lengths = [
            0
            if is_inert(row.advantage, algorithm) or not row.num_tokens
            else row.num_prompt_tokens + row.num_tokens - 1
            for row in batch.rows
        ]
        return self._costs.batch_s(lengths, batch.assignment)

    async def _compute(self, seconds: float, name: str) -> None:
        with self._timeline.bar("trainer", name):
            await self._device.work(seconds, self._weight)
        self._idle_since_s = asyncio.get_running_loop().time()

    def _end_idle(self, reason: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._timeline.record("trainer", reason, self._idle_since_s, now_s, "wait")


class SimulatedRunLogger(RunObserver):
    """Notes steps and publishes in the timeline."""

    def __init__(self, timeline: SimulatedTimeline) -> None:
        self._timeline = timeline

    def log_group(self, group: Group, verdict: Verdict) -> None:
        """Note the tokens that each replica has written of the group."""
        now_s = asyncio.get_running_loop().time()
        for row in group.sequences:
            self._timeline.written.append((now_s, row.replica, row.num_generated))

    def log_publish(self, seconds: float) -> None:
        """Note the time of the publish on the loop's clock: the publisher's own clock is the
        machine's, so `seconds` means nothing here."""
        if self._timeline.offered_s:  # else replicas are in other processes
            now_s = asyncio.get_running_loop().time()
            newest = max(self._timeline.offered_s)
            self._timeline.publishes_s.append(now_s - self._timeline.offered_s[newest])

    async def log_step(self, stats: StepStats, *details: object) -> None:
        """Note the end of an optimizer step."""
        self._timeline.step_ends_s.append(asyncio.get_running_loop().time())
