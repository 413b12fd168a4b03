"""Plays the rounds of a rehearsal: the same episodes one after another, again, in the other order,
all at once, and with faults. Each round has fresh processes."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from llamarl.cluster.inline import InlineExecutor
from llamarl.controller.library import LibraryEngines
from llamarl.controller.starter import environment_spec, running_cluster, spawn_executors
from llamarl.controller.wiring import Wiring
from llamarl.core.config import (
    AlgorithmConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DispatchConfig,
    EmbeddedConfig,
    EvaluationConfig,
    MetricsConfig,
    PlacementConfig,
    StalenessConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.core.config.generator import pools_of
from llamarl.core.faces import Environment, RunObserver
from llamarl.core.groups import Group
from llamarl.core.records import (
    NO_VERSION,
    PROMPT_IDS,
    RESPONSE_IDS,
    REWARD,
    TOKEN_VERSIONS,
    EpisodeState,
    FinishReason,
    Prompt,
    RolloutInfo,
    StageStatus,
    episode_of,
)
from llamarl.metrics.span import Spans
from llamarl.model.prompt_rules import make_prompt
from llamarl.model.tokenizer import Tokenizer
from llamarl.recipe.inputs import Inputs
from llamarl.recipe.prompt_inputs import context_of
from llamarl.rehearsal.environment import EpisodeLog, Held, RehearsedEnvironment, Transcript
from llamarl.rehearsal.faults import Faults, Injector
from llamarl.rehearsal.policies import Policy
from llamarl.rehearsal.replica import RehearsalReplica
from llamarl.scoring.environment import EnvironmentLink
from llamarl.scoring.stages import SCORE

NO_FAULTS = Faults()
LONGEST_PROMPT = 2**24
SHOWN_TOKENS = 6  # on each side of the place where ids differ
MAX_LOSSES = 20  # that faults may cause an episode, beside those of its own


@dataclass(frozen=True, slots=True)
class Difference:
    """The place where the ids of a sequence differ from a rendering of its messages: the turns that
    were written before it, the text there as it was written, and as it is rendered."""

    turn: int
    written: str
    rendered: str


@dataclass(slots=True, kw_only=True)
class PlayedRollout:
    """An episode as it ended: its reward, NaN if it has none, and `status` and `error` if it failed
    or its reward did. `log` is what was seen of it; `num_tokens` counts what the policy wrote,
    `num_rendered` the conversations that were compared with a rendering of their messages.
    `limit` names the limit that ended it, empty if none did."""

    prompt: Prompt
    number: int
    log: EpisodeLog
    reward: float
    status: StageStatus
    error: str
    num_tokens: int
    num_observed: int
    num_conversations: int
    limit: str
    numbers: Mapping[str, float]
    num_rendered: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        """The line of the prompt and the place among its rollouts: equal in all rounds."""
        return self.prompt.prompt_id, self.number

    @property
    def has_failed(self) -> bool:
        """Whether the episode, or its reward, has failed."""
        return self.status is not StageStatus.OK

    @property
    def said(self) -> list[str]:
        """The texts of all that the environment said."""
        return [str(each.get("content")) for turn in self.log.turns for each in turn.said]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The episodes of one round by key, the faults that were injected, and what the processes of
    the environment held before the first episode, after a few, and at the end."""

    rollouts: Mapping[tuple[int, int], PlayedRollout]
    injected: Mapping[str, int] = field(default_factory=dict)
    held: Sequence[Held] = ()


def rehearsed(config: Config, num_rollouts: int, run_dir: str) -> Config:
    """Return the recipe with executors that fit into one process, without what the policy and its
    training need, and with failures that end nothing."""
    algorithm = AlgorithmConfig(
        reward_columns=config.algorithm.reward_columns,
        reward_column_weights=config.algorithm.reward_column_weights,
    )
    context = min(pool.generator.max_model_len for pool in pools_of(config.generator))
    sampling = replace(
        config.sampling,
        rollouts_per_prompt=num_rollouts,
        segment_tokens=0,
        replay_lengths=None,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
    )
    environment = replace(config.environment, max_failure_rate=1.0)
    return replace(
        config,
        run_dir=run_dir,
        num_steps=1,
        num_epochs=0.0,
        max_hours=0.0,
        data=replace(config.data, held_out=None),
        model=replace(config.model, adapter=""),
        reward=replace(config.reward, max_failure_rate=1.0),
        environment=environment,
        algorithm=algorithm,
        generator=EmbeddedConfig(max_model_len=context),
        trainer=TrainerConfig(groups_per_step=1),
        weights=WeightsConfig(),
        placement=PlacementConfig(),
        cluster=ClusterConfig(backend="inline"),
        sampling=sampling,
        staleness=StalenessConfig(),
        dispatch=DispatchConfig(),
        experience=replace(config.experience, sampler="admission", keep_rollouts=0.0),
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(),
        metrics=MetricsConfig(),
    )


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What the rounds have in common: the recipe as `rehearsed` returns it, what it reads, and the
    prompts that are played."""

    config: Config
    inputs: Inputs
    tokenizer: Tokenizer
    prompts: Sequence[Prompt]
    policy: Policy

    async def play(
        self,
        *,
        at_once: int,
        is_reversed: bool = False,
        faults: Faults = NO_FAULTS,
    ) -> Round:
        """Play every prompt's group, with at most so many episodes at a time, in their order or
        from the last to the first, with these faults."""
        injector = Injector(faults, self.config.seed)
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="llamarl-rehearsal-"))
            environment, replica, engines = await stack.enter_async_context(
                self._running(folder, injector, at_once, is_reversed)
            )
            held = [await environment.held()]
            is_alone = at_once == 1 and not is_reversed
            few = max(1, len(self.prompts) // 4) if is_alone else 0
            groups: list[Group] = []
            for some in (self.prompts[:few], self.prompts[few:]):
                groups += await engines.generate(some)
                held.append(await environment.held())
            await engines.score(groups[::-1] if is_reversed else groups)
            rollouts = await self._read(engines, environment, replica, groups)
            await engines.retire(groups, "dropped", reason="rehearsed")
            return Round(rollouts=rollouts, injected=dict(injector.counts), held=held)

    @asynccontextmanager
    async def _running(
        self, folder: str, injector: Injector, at_once: int, is_reversed: bool
    ) -> AsyncIterator[tuple[RehearsedEnvironment, RehearsalReplica, LibraryEngines]]:
        config, inputs = self.config, self.inputs
        if injector.faults != NO_FAULTS:
            own = config.environment
            most = own.max_restarts + MAX_LOSSES
            config = replace(config, environment=replace(own, max_restarts=most))
        if at_once == 1:  # then what comes after what is known
            config = replace(
                config,
                environment=replace(config.environment, num_workers=1),
                reward=replace(config.reward, num_workers=1),
            )
        stages = {"scorer"} | {
            stage.name
            for stage in inputs.graph.between
            if not (stage.is_model or stage.is_external or stage.name == SCORE)
        }
        spec = environment_spec(config, inputs, f"{folder}/environment")
        spans = Spans("rehearsal", None)
        environment = RehearsedEnvironment(spec, injector, spans)
        async with running_cluster(config, folder) as cluster:
            started = await spawn_executors(
                config, inputs, cluster, folder, names=stages, report=lambda name, state: None
            )
            played = InlineExecutor("environment-0", [environment], [spans])
            link = EnvironmentLink("environment-0", played.one(Environment), spec.socket)
            replica = RehearsalReplica(
                self.policy,
                environment,
                link,
                started.storage,
                self.tokenizer,
                injector,
                context=context_of(config),
                at_once=at_once,
                is_reversed=is_reversed,
            )
            generator = InlineExecutor("generator-0", [replica], [spans])
            async with AsyncExitStack() as stack:
                stack.push_async_callback(played.stop)
                await environment.start()
                stack.push_async_callback(generator.stop)
                by_name = started.by_name | {generator.name: generator}
                wiring = Wiring(config, inputs, replace(started, by_name=by_name), folder, spans)
                fields = wiring.engine_fields(RunObserver())
                engines = LibraryEngines(**fields, wiring=wiring, names={"generator", *stages})
                await stack.enter_async_context(engines.running())
                yield environment, replica, engines

    async def _read(
        self,
        engines: LibraryEngines,
        environment: RehearsedEnvironment,
        replica: RehearsalReplica,
        groups: Sequence[Group],
    ) -> dict[tuple[int, int], PlayedRollout]:
        found: dict[tuple[int, int], PlayedRollout] = {}
        for group in groups:
            for row_id in group.row_ids:
                log = environment.logs[row_id]
                played = self._played(group, row_id, replica.numbers[row_id], log)
                if not played.has_failed:
                    await self._compare(engines, group.rollouts[row_id], played)
                found[played.key] = played
        return found

    def _played(self, group: Group, row_id: int, number: int, log: EpisodeLog) -> PlayedRollout:
        rollout, score = group.rollouts[row_id], group.scores.get(row_id)
        numbers = group.episodes.get(row_id, {})
        status = StageStatus.OK if score is None else score.status
        error = "" if score is None else score.error
        reward, columns = 0.0, self.config.algorithm
        for name, weight in zip(columns.reward_columns, columns.reward_column_weights, strict=True):
            own = None if score is None else score.reward
            part = own if name == REWARD else group.numbers.get(row_id, {}).get(name)
            reward += weight * (float("nan") if part is None else part)
        limits = [name.partition("/")[2] for name in numbers if name.startswith("limited/")]
        is_limit = rollout.episode is not None and rollout.episode.state is EpisodeState.LIMIT
        if is_limit and not limits:
            is_full = numbers.get("turns", 0) >= self.config.environment.max_turns
            limits = ["turns" if is_full else "overlong" if numbers.get("overlong") else "tokens"]
        is_cut = any(each.finish_reason is FinishReason.LENGTH for each in rollout.sequences)
        return PlayedRollout(
            prompt=group.prompt,
            number=number,
            log=log,
            reward=reward,
            status=status,
            error=error or group.errors.get(row_id, ""),
            num_tokens=sum(each.num_generated for each in rollout.sequences),
            num_observed=sum(each.num_tokens - each.num_generated for each in rollout.sequences),
            num_conversations=len(rollout.sequences),
            limit=limits[0] if limits else "tokens" if is_cut else "",
            numbers=numbers,
        )

    async def _compare(
        self, engines: LibraryEngines, rollout: RolloutInfo, played: PlayedRollout
    ) -> None:
        """Compare the ids of each conversation, up to what the environment said last, with those of
        a rendering of its messages."""
        rows = [each.row_id for each in rollout.sequences]
        columns = await engines.get_experience(rows, [PROMPT_IDS, RESPONSE_IDS, TOKEN_VERSIONS])
        for place, row_id in enumerate(rows):
            transcript = played.log.transcripts.get(episode_of(row_id)[1])
            prompt, ids, versions = (columns[name][place].tolist() for name in columns)
            observed = [n for n, version in enumerate(versions) if version == NO_VERSION]
            if transcript is None or not (observed or transcript.num_before):
                continue
            num_turns = sum(a != NO_VERSION == b for a, b in pairwise(versions))
            written = [*prompt, *ids[: observed[-1] + 1 if observed else 0]]
            rendered = self._rendered(played.prompt, transcript, num_turns)
            if rendered is None:
                continue
            played.num_rendered += 1
            if rendered != written:
                played.differences.append(
                    self._difference(written, rendered, len(prompt), versions)
                )

    def _rendered(self, prompt: Prompt, transcript: Transcript, num_turns: int) -> list[int] | None:
        """Return the ids of a rendering of the messages before the turn that follows so many; None
        if the chat template refuses them."""
        messages = transcript.before(num_turns)
        data = replace(
            self.config.data, system=None, max_prompt_tokens=LONGEST_PROMPT, overlong="error"
        )
        row: dict[str, Any] = {**prompt.fields, data.prompt_field: messages}
        shown = lambda row: transcript.schemas  # noqa: E731
        try:
            return [*make_prompt(row, prompt.prompt_id, data, self.tokenizer, shown).token_ids]
        except ValueError:
            return None

    def _difference(
        self, written: list[int], rendered: list[int], num_prompt: int, versions: list[int]
    ) -> Difference:
        pairs = enumerate(zip(written, rendered, strict=False))
        shorter = min(len(written), len(rendered))
        place = next((n for n, (a, b) in pairs if a != b), shorter)
        around = slice(max(0, place - SHOWN_TOKENS), place + SHOWN_TOKENS)
        before = versions[: max(0, place - num_prompt)]
        turn = sum(a != NO_VERSION == b for a, b in pairwise([0, *before]))
        decode = self.tokenizer.decode_raw
        return Difference(turn, decode(written[around]), decode(rendered[around]))
