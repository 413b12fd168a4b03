"""llamarl's executors under a loop of the caller's own (docs/library.md).

Owns: the calls that such a loop makes, and the order that they must keep. Does not own: the
executors, or anything else that the controller's loop is made of too. Invariant: when the block of
`start_engines` ends, however it ends, no process is left and no call waits.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llamarl import build
from llamarl.checkpoints import checkpoint
from llamarl.cluster.inline import InlineGroup
from llamarl.config import Config
from llamarl.config.check import require
from llamarl.data.tokenizer import Tokenizer
from llamarl.environments.prompts import PromptStream, make_prompt
from llamarl.executor_groups import Executors, name_parts, running_cluster, spawn_executors
from llamarl.experience.columns import COLUMNS
from llamarl.jobs import claim
from llamarl.loop.groups_in_flight import GroupsInFlight
from llamarl.metrics.provenance import record_provenance
from llamarl.metrics.span import Spans
from llamarl.planner.memory.fit import check_fit
from llamarl.recipe.composition import compose, to_config, to_yaml
from llamarl.recipe.inputs import Inputs, check_lengths, read_frozen, read_inputs
from llamarl.recipe.sampling_rules import replace_sampling, train_sampling
from llamarl.recipe.starting_point import starting_point
from llamarl.types import (
    RESPONSE_IDS,
    REWARD,
    Columns,
    Dropped,
    Group,
    Prompt,
    Score,
    ScoreStatus,
    StepStats,
)
from llamarl.weights.sync.publisher import Publisher
from llamarl.weights.sync.replicas import PublishStats
from llamarl.weights.transports.registry import TRANSPORTS, named

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from llamarl.executors.weight_source import SourcePart

Question = Prompt | Group | str | Mapping[str, Any] | Sequence[Any]
"""What rollouts are asked for: a prompt of the recipe's, a group of the gate's, or a text, the
messages of a chat, a data row or token ids of the caller's own."""


@asynccontextmanager
async def start_engines(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    parts: Collection[str] | None = None,
) -> AsyncIterator["Engines"]:
    """The executors of a recipe, started; at the block's end none of their processes is left.

    `recipe` is its folder, `overrides` are KEY=VALUE as on the command line. `parts` are those to
    start besides storage (None: all): generator, trainer, scorer, reference, stages of the recipe's
    own. Without the trainer, generators start with the checkpoint's weights as version 0. `run_dir`
    must be new. ValueError, in one line, for what the caller must change.
    """
    composed = compose(recipe, overrides, run_dir)
    config = to_config(composed)
    must = "be false under a loop of one's own, for it has no phases"
    config.require(not config.placement.colocated, "placement.colocated", must)
    must = "be none under a loop of one's own, whose order is its own"
    config.require(config.dispatch.ranker == "none", "dispatch.ranker", must)
    must = "be off under a loop of one's own, which calls load_state"
    config.require(config.checkpoint.resume == "off", "checkpoint.resume", must)
    inputs = read_inputs(config)
    known = name_parts(inputs.graph)
    chosen = known if parts is None else set(parts)
    must = f"be some of {', '.join(sorted(known))}"
    require(chosen <= known and bool(chosen), "parts", must, ", ".join(sorted(chosen)) or "none")
    if chosen == known:
        check_fit(config, inputs.architecture, read_frozen(config, inputs.graph))
    folder = os.path.abspath(config.run_dir)
    os.makedirs(folder, exist_ok=True)
    with claim(folder, is_new=True):
        record_provenance(folder, sys.argv, to_yaml(composed))
        async with running_cluster(config, folder) as cluster:
            executors = await spawn_executors(
                config, inputs, cluster, folder, parts=chosen, report=lambda name, state: None
            )
            async with Engines(config, inputs, executors, folder, chosen).running() as engines:
                yield engines


class Engines:
    """What `start_engines` gives. All methods belong to the event loop that entered its block.

    `version` is the trainer's, or the one that `sync_weights` last took from the caller. `gate`
    bounds the age of what is trained, for loops that use it (see `loop/gate.py`). `held_out` are
    the recipe's held-out prompts, `tokenizer` its tokenizer.

    RuntimeError for calls in a wrong order, after the end, or of a part that was not started;
    GroupLost or NoGenerator once an executor that the call needs is lost.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        executors: Executors,
        run_dir: str,
        parts: Collection[str],
    ) -> None:
        assert isinstance(inputs.tokenizer, Tokenizer)
        self.config, self.run_dir, self.version = config, run_dir, 0
        self.held_out, self.tokenizer = inputs.held_out, inputs.tokenizer
        self._inputs, self._executors, self._parts = inputs, executors, {*parts, "storage"}
        self._spans = Spans("controller", f"{run_dir}/spans", config.metrics.spans_bytes)
        self._dispatch = build.make_dispatch(config, executors)
        self.gate = build.make_gate(config, inputs, executors, self._dispatch, self._spans, {})
        self._rules = build.make_rules(config, inputs)
        self._sampling = train_sampling(config, inputs)
        stages = {stage: group.call_one for stage, group in executors.stages.items()}
        self._storage = executors.storage
        self._groups = GroupsInFlight(self._dispatch, stages, inputs.graph, self._storage)
        self._publisher: Publisher | None = None
        self._source: SourcePart | None = None  # of the caller's own weights
        self._trained: list[tuple[Sequence[Group], int]] = []  # in this step, and oldest versions

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Engines"]:
        """Connected, and with the background tasks that calls rely on, while the block runs."""
        try:
            if self._executors.trainer is not None and self._executors.generators:
                await self._connect()
            self._groups.start()
            yield self
            await self._groups.retire_rest()
        finally:
            await self._groups.close(RuntimeError("calls must come before the end of the block"))
            await self._dispatch.close()
            if self._publisher is not None:
                await self._publisher.close()
            if self._source is not None:
                self._source.close()
            self._spans.close()

    @property
    def prompts(self) -> PromptStream:
        """The recipe's prompts, in the order of a run and without end: an iterator."""
        return self.gate.prompts

    async def submit(
        self, questions: Iterable[Question], num_rollouts: int | None = None, **sampling: Any
    ) -> list[asyncio.Future[Group]]:
        """Ask for a group of rollouts per question; each future is done when its group is written.

        `sampling` are fields of `types.Sampling` that differ from the recipe's, `num_rollouts`
        replaces `sampling.rollouts_per_prompt`. No rollout starts on weights older than those that
        `sync_weights` brought last (one of a gate's group: than the gate allows). Cancelling a
        future stops its rollouts. Prompts that are equal in id and epoch get equal seeds.
        """
        self._require("generate", "generator")
        if "trainer" in self._parts and self._published < 0:
            raise RuntimeError("generate must come after the first sync_weights, got no weights")
        drawn = replace_sampling(self._sampling, sampling, self.tokenizer)
        groups = [self._make_group(question, num_rollouts) for question in questions]
        prompts = [group.prompt for group in groups]
        check_lengths(self._replace_sampling(max_tokens=drawn.max_tokens), prompts, [])
        asked = (self._rules.make_requests(group, sampling=drawn) for group in groups)
        return await self._groups.submit(groups, [*chain.from_iterable(asked)])

    async def generate(
        self, questions: Iterable[Question], num_rollouts: int | None = None, **sampling: Any
    ) -> list[Group]:
        """What `submit` asks for, once all of it is written."""
        return await asyncio.gather(*await self.submit(questions, num_rollouts, **sampling))

    async def texts(self, group: Group) -> list[str]:
        """The completions of a group, one per rollout."""
        columns = await self.get_experience(group.row_ids, [RESPONSE_IDS])
        return list(map(self.tokenizer.decode, columns[RESPONSE_IDS]))

    async def score(self, groups: Sequence[Group]) -> None:
        """Pass the rollouts through the recipe's stages between generation and training, as far as
        those were started: rewards go into `Group.scores` and storage. A group passes once."""
        self._require("score", "storage" if self._executors.stages else "scorer")
        await self._groups.score(groups)

    async def settle(self, group: Group, rewards: Sequence[float] | None = None) -> str | None:
        """Set the group's advantages by the recipe's algorithm; or the reason to drop the group.

        `rewards`, one per rollout, take the place of `score`'s, or of those given before.
        """
        self._require("settle", "storage")
        row_ids = self._groups.rows([group])
        self._replace_sampling(rollouts_per_prompt=len(row_ids))  # may be too few for a baseline
        if rewards is not None:
            require(len(rewards) == len(row_ids), "rewards", "be one per rollout", rewards)
            await self._storage.erase(row_ids, [REWARD], 0)
            await self.put_experience(row_ids, {REWARD: [[reward] for reward in rewards]})
            for row_id, reward in zip(row_ids, rewards, strict=True):
                score = Score(row_id=row_id, status=ScoreStatus.OK, reward=float(reward))
                group.scores[row_id] = score
        if not group.scores.keys() >= group.rollouts.keys() - group.dropped.keys():
            raise RuntimeError("settle must come after score, or get rewards")
        verdict = self._rules.filter_group(group)
        if isinstance(verdict, Dropped):
            return verdict.reason
        await self._groups.leave_out(group)
        group.advantages = verdict.advantages
        return None

    async def put_experience(self, row_ids: Sequence[int], columns: Mapping[str, Any]) -> None:
        """Write columns of rollouts into storage: by name, one 1-D array (or list) per row."""
        self._require("put_experience", "storage")
        dtypes = {name: COLUMNS[name].dtype if name in COLUMNS else None for name in columns}
        arrays = {n: [np.asarray(cell, dtypes[n]) for cell in cs] for n, cs in columns.items()}
        await self._storage.write(list(row_ids), arrays)

    async def get_experience(self, row_ids: Sequence[int], columns: Sequence[str]) -> Columns:
        """The named columns: one array per row each. KeyError for what was never written."""
        self._require("get_experience", "storage")
        return await self._storage.read(list(row_ids), list(columns))

    async def forward_backward(self, groups: Sequence[Group], oldest_version: int = 0) -> None:
        """Add the gradients of these groups, which have advantages, to the step under way. Tokens
        of a version below `oldest_version` get no weight; else their age is the caller's affair."""
        trainer = self._require("forward_backward", "trainer").call_one
        require(bool(self._groups.rows(groups)), "groups", "hold at least one rollout", "none")
        for group in groups:
            self._check_trainable(group)
        await trainer.accumulate(self._rules.make_batch(groups, self.version, oldest_version))
        self._trained.append((groups, oldest_version))

    async def optim_step(self, keep: Sequence[Group] = ()) -> StepStats:
        """Make the next version from the gradients, and retire the groups that they are of, but for
        those to `keep` for a later step and those that the gate's sampler has not consumed."""
        stats: StepStats = await self._require("optim_step", "trainer").call_one.step()
        trained, self._trained = self._trained, []
        before, self.version = self.version, stats.version
        kept = {group.group_id for group in (*keep, *self.gate.kept)}
        for groups, oldest in trained:
            done = {group.group_id: group for group in groups if group.group_id not in kept}
            await self.retire([*done.values()], "trained", version=before, oldest_version=oldest)
            kept |= done.keys()
        return stats

    async def retire(
        self, groups: Sequence[Group], outcome: str, **details: str | int | float
    ) -> None:
        """Free the groups' arrays; the archive says what became of them. `optim_step` does it for
        those that were trained on."""
        self._require("retire", "storage")
        await self._groups.retire(groups, {"outcome": outcome, **details})

    async def sync_weights(
        self, source: "Module | Mapping[str, Tensor] | None" = None, version: int | None = None
    ) -> PublishStats:
        """Bring the trainer's version to the generators, verified, while they decode.

        Without a trainer among the parts: `source`, a torch module of the caller's or its
        state_dict with the checkpoint's names, as `version` (None: the next one). Its tensors must
        not change until this returns. ValueError for a wrong name or shape.
        """
        self._require("sync_weights", "generator")
        if source is None:
            self._require("sync_weights without a source", "trainer")
            assert self._publisher is not None
            return await self._publisher.publish(self.version)
        version = self.version + 1 if version is None else version
        publisher, part = await self._show(source, version)
        try:
            stats = await publisher.publish(version)
        finally:
            await asyncio.to_thread(part.withdraw)
        self.version = version
        return stats

    async def save_state(self) -> str:
        """Write a checkpoint of the trainer and the prompts' position; returns its folder."""
        trainer, gate = self._require("save_state", "trainer").call_one, self.gate
        gate.next_group_id = max(gate.next_group_id, gate.prompts.position)  # drawn, not submitted
        gate.next_row_id = max(gate.next_row_id, gate.next_group_id)
        state = {"version": self.version, "evaluated": -1, **gate.state(self.version)}
        keep = self.config.checkpoint.keep
        return str(await checkpoint.save(self.run_dir, trainer, state, keep))

    async def load_state(self, folder: str | Path) -> int:
        """Go on from a checkpoint of this recipe; returns its version. Comes before all rollouts,
        steps and syncs. ValueError for a damaged one."""
        trainer = self._require("load_state", "trainer").call_one
        if self.gate.next_row_id or self.version or self._published >= 0:
            raise RuntimeError(
                "load_state must come before rollouts, steps and syncs, got it after"
            )
        resumed = replace(self.config.checkpoint, resume=os.path.abspath(folder))
        config = replace(self.config, checkpoint=resumed)
        state, _ = starting_point(config, self._inputs, self.run_dir)
        self.version = await trainer.restore(resumed.resume)
        places = self._executors, self._dispatch
        self.gate = build.make_gate(config, self._inputs, *places, self._spans, state)
        return self.version

    async def save_weights(self, folder: str | Path, dtype: str | None = None) -> None:
        """Write the trainer's weights in the Hugging Face layout, as `checkpoint.export_dtype`."""
        trainer, config = self._require("save_weights", "trainer"), self.config.checkpoint
        dtype = replace(config, export_dtype=dtype or config.export_dtype).export_dtype
        await trainer.call_one.export(os.path.abspath(folder), dtype)

    @property
    def _published(self) -> int:
        return -1 if self._publisher is None else self._publisher.version

    def _require(self, call: str, part: str) -> Any:
        """The trainer, if there is one. Raises what ended the background tasks, or RuntimeError."""
        if self._groups.error is not None:
            raise self._groups.error
        if part not in self._parts:
            started = ", ".join(sorted(self._parts))
            raise RuntimeError(f"{call} must have the {part} among parts, got {started}")
        return self._executors.trainer

    def _replace_sampling(self, **fields: Any) -> Config:
        """The recipe with these fields of `sampling`; ValueError if they do not suit the rest."""
        return replace(self.config, sampling=replace(self.config.sampling, **fields))

    def _make_group(self, question: Question, num_rollouts: int | None) -> Group:
        if isinstance(question, Group):
            return question  # of the gate
        gate, config = self.gate, self.config.sampling
        group_id, gate.next_group_id = gate.next_group_id, gate.next_group_id + 1
        if not isinstance(question, Prompt):
            number = -1 - group_id  # no line of the recipe's file, and another one each time
            question = make_prompt(question, number, self.config.data, self.tokenizer)
        if num_rollouts is not None:
            config = replace(config, rollouts_per_prompt=num_rollouts)
        return Group(
            group_id=group_id,
            prompt=question,
            row_ids=gate.allocate_rows(config.rollouts_per_prompt),
            min_version=max(0, self._published),
        )

    def _check_trainable(self, group: Group) -> None:
        name, found = f"group {group.group_id}", group.advantages
        is_set = len(found) == len(group.row_ids) and all(map(isfinite, found))
        must = f"be {len(group.row_ids)} finite numbers, one per rollout (see settle)"
        require(is_set, f"advantages of {name}", must, found)
        newest = max((span.version for r in group.rollouts.values() for span in r.spans), default=0)
        if newest > self.version:
            must = f"be written by versions up to {self.version}, the trainer's"
            raise RuntimeError(f"{name} must {must}, got tokens of version {newest}")
        drawn, own = self._groups.request(group.row_ids[0]).sampling, self._sampling
        is_own = (drawn.temperature, drawn.top_k, drawn.top_p) == (own.temperature, 0, 1.0)
        must = f"be sampled as the recipe says (temperature {own.temperature:g}) to be trained on"
        require(is_own, name, must, f"temperature {drawn.temperature:g}")

    async def _show(
        self, source: "Module | Mapping[str, Tensor]", version: int
    ) -> tuple[Publisher, "SourcePart"]:
        """Label the caller's tensors with `version`; the first time, connect them."""
        from llamarl.executors.weight_source import SourcePart  # here, for they import torch
        from llamarl.models.hf import as_parameters
        from llamarl.weights.layout.shards import whole_boxes

        if "trainer" in self._parts:
            raise RuntimeError("source must come without the trainer among parts, got both")
        if version <= self.version:
            raise RuntimeError(f"version must be above {self.version}, got {version}")
        tensors = as_parameters(source, self._inputs.architecture)
        if self._source is None:
            config, must = self.config.weights, f"be {named('is_mapped')} with a source"
            is_mapped = TRANSPORTS[config.transport].is_mapped
            self.config.require(is_mapped, "weights.transport", must)
            boxes, spans = whole_boxes(tensors), self._spans
            part = SourcePart(0, *boxes, config=config, rdma=None, spans=spans)
            await self._connect(InlineGroup("trainer", [part], [spans]).call_all)
            self._source = part
        assert self._publisher is not None
        self._source.tensors.label(version, tensors)
        return self._publisher, self._source

    async def _connect(self, source: Any = None) -> None:
        owned = self._executors, self._dispatch, self._spans, self.run_dir
        publisher = build.make_publisher(self.config, *owned, source=source)
        await publisher.connect()
        self._publisher = publisher
