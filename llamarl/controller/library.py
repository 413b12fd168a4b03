"""The executors of a run under a loop of the caller's own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llamarl.cluster.inline import InlineExecutor
from llamarl.controller.colocation import Phase
from llamarl.controller.engines import Engines
from llamarl.controller.logprob_check import LogprobCheck
from llamarl.controller.wiring import Wiring
from llamarl.core import checkpoint
from llamarl.core.config import Config
from llamarl.core.errors import NoGenerator, all_at_once, cancel_all, mark_seen
from llamarl.core.fields import require
from llamarl.core.groups import Evaluation, Group, StepStats
from llamarl.core.records import (
    RESPONSE_IDS,
    REWARD,
    Columns,
    Prompt,
    Request,
    StageResult,
)
from llamarl.model.prompt_rules import make_prompt
from llamarl.model.tokenizer import Tokenizer
from llamarl.prompts.stream import PromptStream
from llamarl.publish.layout import formats_of
from llamarl.publish.publisher import PublishStats
from llamarl.publish.transports.routes import TRANSPORTS, named
from llamarl.recipe.prompt_inputs import check_length
from llamarl.recipe.rules import replace_sampling, train_sampling
from llamarl.recipe.starting_point import starting_point
from llamarl.storage.archive import is_kept
from llamarl.storage.columns import COLUMNS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from llamarl.publish.source import SourcePart


Question = Prompt | Group | str | Mapping[str, Any] | Sequence[Any]
"""A question to generators: a prompt of the recipe's, a group of the gate's, or a text, the
messages of a chat, a data row or token ids of the caller's own."""


@dataclass(kw_only=True)
class LibraryEngines(Engines):
    """The object that `start_engines` gives: the verbs of a run, with their arguments checked, and
    what a caller's loop needs beside them.

    `version` is the trainer's, or the one that `sync_weights` last took from the caller. `gate`
    bounds the age of what is trained, for loops that use it (see `controller/gate.py`).

    RuntimeError for calls in a wrong order, after the end, or of an executor that was not started;
    ExecutorLost or NoGenerator once an executor that the call needs is lost.
    """

    wiring: Wiring
    names: Collection[str]
    """The names of the executors that were started, besides storage."""

    def __post_init__(self) -> None:
        self.config, self.inputs = self.wiring.config, self.wiring.inputs
        self.executors, self.run_dir = self.wiring.executors, self.wiring.run_dir
        assert isinstance(self.inputs.tokenizer, Tokenizer)
        self.tokenizer = self.inputs.tokenizer
        self._names = {*self.names, "storage"}
        self._storage = self.executors.storage
        self._sampling = train_sampling(self.config, self.inputs)
        self._colocation = self.wiring.make_colocation()
        self._phase: Phase | None = None
        self._evaluator = self.wiring.make_evaluator(self)
        self._logprob_check: LogprobCheck | None = None
        self._scored: set[int] = set()  # group ids
        self._source: SourcePart | None = None
        """The caller's own weights, once they were published."""
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connect the executors, and keep the background tasks that calls rely on running during
        the block."""
        try:
            if self.trainer is not None and self.executors.generators:
                await self._connect()
                self._logprob_check = self.wiring.make_logprob_check(self)
                await self._colocation.begin()
            self._start(self._serve())
            yield
            await self.retire_rest()
        finally:
            self.rollouts.fail(RuntimeError("calls must come before the end of the block"))
            await cancel_all(self._tasks)
            await self.close()
            if self._source is not None:
                self._source.close()

    @property
    def prompts(self) -> PromptStream:
        """The recipe's prompts, in the order of a run: an iterator without end, unless num_epochs
        sets one."""
        return self.gate.prompts

    @property
    def held_out(self) -> list[Prompt]:
        """The recipe's held-out prompts."""
        return self.inputs.held_out

    async def submit(
        self, questions: Iterable[Question], num_rollouts: int | None = None, **sampling: Any
    ) -> list[asyncio.Future[Group]]:
        """Ask for a group of rollouts per question; each future is done when its group is written.

        `sampling` are fields of `types.Sampling` that differ from the recipe's, `num_rollouts`
        replaces `sampling.rollouts_per_prompt`. No rollout starts on weights older than those that
        `sync_weights` brought last; for a group of the gate's, the gate sets the oldest version.
        Cancelling a future stops its rollouts. Prompts that are equal in id and epoch get equal
        seeds.
        """
        self._require("generate", "generator")
        if "trainer" in self._names and self.published < 0:
            raise RuntimeError("generate must come after the first sync_weights, got no weights")
        must = "be a list of questions"
        require(not isinstance(questions, str | Mapping), "questions", must, questions)
        drawn = replace_sampling(self._sampling, sampling, self.tokenizer, self.config)
        groups = [self._make_group(question, num_rollouts) for question in questions]
        longest = max((len(group.prompt.token_ids) for group in groups), default=0)
        own_config = self._replace_sampling(max_tokens=drawn.max_tokens)
        check_length(own_config, "sampling", longest)
        futures = []
        for group in groups:
            future: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
            requests = self.rules.make_requests(group, sampling=drawn)
            self._start(self._write(group, requests, future))
            future.add_done_callback(partial(self._stop_if_cancelled, group))
            futures.append(future)
        return futures

    async def generate(
        self, questions: Iterable[Question], num_rollouts: int | None = None, **sampling: Any
    ) -> list[Group]:
        """Submit the questions as `submit` does, and return the groups once all are written."""
        self._require_generators("generate")
        return await asyncio.gather(*await self.submit(questions, num_rollouts, **sampling))

    async def texts(self, group: Group) -> list[str]:
        """Return the completions of a group, one per rollout."""
        columns = await self.get_experience(group.row_ids, [RESPONSE_IDS])
        return list(map(self.tokenizer.decode, columns[RESPONSE_IDS]))

    async def score(self, groups: Sequence[Group]) -> None:
        """Pass the rollouts through those of the recipe's stages between generation and training
        that were started: rewards go into `Group.scores` and storage. A group passes once."""
        self._require("score", "storage" if self.executors.stage_of else "scorer")
        self._rows(groups)
        ids = {group.group_id for group in groups}
        if ids & self._scored:
            raise RuntimeError("score must get each group once, got one again")
        self._scored |= ids
        await self.rollouts.until_failed(all_at_once(map(self.rollouts.pass_stages, groups)))

    async def settle(self, group: Group, rewards: Sequence[float] | None = None) -> str | None:
        """Set the group's advantages by the recipe's algorithm; return None, or the reason to drop
        the group.

        `rewards`, one per rollout, take the place of `score`'s, or of those given before.
        """
        self._require("settle", "storage")
        row_ids = self._rows([group])
        self._replace_sampling(rollouts_per_prompt=len(row_ids))  # may be too few for a baseline
        if rewards is not None:
            require(len(rewards) == len(row_ids), "rewards", "be one per rollout", rewards)
            await self._storage.erase(row_ids, [REWARD])
            await self.put_experience(row_ids, {REWARD: [[reward] for reward in rewards]})
            for row_id, reward in zip(row_ids, rewards, strict=True):
                score = StageResult(row_id=row_id, numbers={REWARD: float(reward)})
                group.scores[row_id] = score
        if not group.scores.keys() >= group.rollouts.keys() - group.dropped.keys():
            raise RuntimeError("settle must come after score, or get rewards")
        return await super().settle(group)

    async def put_experience(self, row_ids: Sequence[int], columns: Mapping[str, Any]) -> None:
        """Write columns of rollouts into storage: by name, one 1-D array (or list) per row."""
        self._require("put_experience", "storage")
        dtypes = {name: COLUMNS[name].dtype if name in COLUMNS else None for name in columns}
        arrays = {n: [np.asarray(cell, dtypes[n]) for cell in cs] for n, cs in columns.items()}
        await self._storage.write(list(row_ids), arrays)

    async def get_experience(self, row_ids: Sequence[int], columns: Sequence[str]) -> Columns:
        """Return the named columns, each with one array per row. KeyError for a cell that was never
        written."""
        self._require("get_experience", "storage")
        return await self._storage.read(list(row_ids), list(columns))

    async def forward_backward(self, groups: Sequence[Group], oldest_version: int = 0) -> None:
        """Add the gradients of these groups, which have advantages, to the step under way. Tokens
        of a version below `oldest_version` get no weight; apart from that, their age is up to the
        caller."""
        self._require("forward_backward", "trainer", Phase.TRAIN)
        require(bool(self._rows(groups)), "groups", "hold at least one rollout", "none")
        for group in groups:
            self._check_trainable(group)
        await super().forward_backward(groups, oldest_version)

    async def look_ahead(self, groups: Sequence[Group]) -> None:
        """Store the trainer's present log-probs of groups that a later step of the batch will train
        (`gate.num_ahead` of them), with algorithm.proximal=recompute."""
        self._require("look_ahead", "trainer", Phase.TRAIN)
        require(bool(self._rows(groups)), "groups", "hold at least one rollout", "none")
        await super().look_ahead(groups)

    async def optim_step(
        self,
        keep: Sequence[Group] = (),
        found: Mapping[str, float] | None = None,
        made: Callable[[], None] = lambda: None,
    ) -> StepStats:
        """Make the next version from the gradients, log it, and retire the groups that it was
        trained on. Not retired are those in `keep`, which a later step needs, and those that the
        gate's sampler has not consumed. `found` are figures of the caller's own for the metrics, by
        name."""
        self._require("optim_step", "trainer", Phase.TRAIN)
        return await super().optim_step(keep, found, made)

    async def retire(
        self, groups: Sequence[Group], outcome: str, **details: str | int | float
    ) -> None:
        """Free the groups' arrays; the archive says what became of them. `optim_step` does it for
        the groups that were trained on."""
        self._require("retire", "storage")
        self._rows(groups)
        await super().retire(groups, outcome, **details)

    async def evaluate(self) -> Evaluation:
        """Answer the held-out prompts with the version published last, as `evaluation.*` says.
        NoGenerator if replicas were lost with some of the prompts."""
        self._require("evaluate", "generator")
        self._require("evaluate", "scorer")
        self._require_generators("evaluate")
        require(bool(self.held_out), "data.held_out", "name a file to evaluate on", None)
        version = self.version if self.publisher is None else self.published
        evaluating = self._evaluator.evaluate(version, is_last=True)
        found = await self.rollouts.until_failed(evaluating)
        if found is None:
            raise NoGenerator("generators were lost with prompts of the evaluation")
        return found

    async def check_logprobs(self) -> dict[str, float]:
        """Compare the log-probs of what each replica writes with the trainer's, as
        `weights.logprob_check` says. Returns figures for `optim_step(found=)`; RuntimeError if a
        replica writes with another policy. Comes after `sync_weights`, before the next
        `optim_step`."""
        self._require("check_logprobs", "trainer")
        self._require("check_logprobs", "generator")
        must = "be false for check_logprobs, which needs both sides at once"
        self.config.require(not self.config.placement.colocated, "placement.colocated", must)
        assert self._logprob_check is not None
        if self.published != self.version:
            must = f"come when generators have the trainer's version, {self.version}"
            raise RuntimeError(f"check_logprobs must {must}, got {self.published}")
        for replica in self.dispatch.replicas:
            self._logprob_check.committed(replica, self.version)
        await self.rollouts.until_failed(self._logprob_check.arrive())
        return await self._logprob_check.check(self.version)

    @asynccontextmanager
    async def phase(self, phase: str) -> AsyncIterator[None]:
        """Hold the device for a phase, with `placement=colocated`: "sync" for sync_weights, then
        "train" for everything that the trainer does. Between the end of "sync" and "train" the
        generators have it. Phases alternate and begin with "sync". Where both sides have devices of
        their own, phases change nothing."""
        known = ", ".join(Phase)
        require(phase in list(Phase), "phase", f"be one of {known}", phase)
        async with self._colocation.phase(Phase(phase)):
            self._phase = Phase(phase)
            try:
                yield
            finally:
                self._phase = None

    async def sync_weights(
        self, source: Module | Mapping[str, Tensor] | None = None, version: int | None = None
    ) -> PublishStats:
        """Bring the trainer's version to the generators, verified, while they decode.

        Without a trainer among the executors, bring `source` as `version` (None: the next one): a
        torch module of the caller's, or its state_dict with the checkpoint's names. Its tensors
        must not change until this returns. ValueError for a wrong name or shape.
        """
        self._require("sync_weights", "generator", Phase.SYNC)
        if source is None:
            self._require("sync_weights without a source", "trainer")
            return await super().sync_weights(version=version)
        from llamarl.model.hf import as_parameters  # here, for it imports torch

        version = self.version + 1 if version is None else version
        if self.trainer is not None:
            raise RuntimeError("source must come without the trainer among executors, got both")
        if version <= self.version:
            raise RuntimeError(f"version must be above {self.version}, got {version}")
        lora = self.config.trainer.lora
        lora.require(not lora.is_used, "rank", "be 0 where weights of the caller's are published")
        tensors = as_parameters(source, self.inputs.architecture)
        if self._source is None:
            self._source = await self._open_source(tensors)
        assert self.publisher is not None
        await asyncio.to_thread(self._source.label, version, tensors)
        try:
            stats = await self.publisher.publish(version)
        finally:
            await asyncio.to_thread(self._source.withdraw)
        self.version = version
        return stats

    async def save_state(self) -> str:
        """Write a checkpoint of the trainer and the prompts' position; return its folder."""
        trainer, gate = self._require("save_state", "trainer", Phase.TRAIN), self.gate
        gate.next_group_id = max(gate.next_group_id, gate.prompts.position)  # drawn, not submitted
        gate.next_row_id = max(gate.next_row_id, gate.next_group_id)
        state = {"version": self.version, "evaluated": -1, **gate.state(self.version)}
        keep = self.config.checkpoint.keep
        return str(await checkpoint.save(self.run_dir, trainer, state, keep))

    async def save_if_due(self) -> str | None:
        """Call `save_state` at every multiple of `checkpoint.every_steps`, and at `num_steps`."""
        is_due = self.config.checkpoint.is_due(self.version, self.config.most_steps)
        return await self.save_state() if is_due else None

    async def load_state(self, folder: str | Path) -> int:
        """Go on from a checkpoint of this recipe; return its version. Comes before all rollouts,
        steps and syncs. ValueError for a damaged one."""
        trainer = self._require("load_state", "trainer")
        if self.gate.next_row_id or self.version or self.published >= 0:
            raise RuntimeError(
                "load_state must come before rollouts, steps and syncs, got it after"
            )
        resumed = replace(self.config.checkpoint, resume=os.path.abspath(folder))
        config = replace(self.config, checkpoint=resumed)
        state, _ = starting_point(config, self.inputs, self.run_dir)
        self.version = await trainer.restore(resumed.resume)
        self.gate = replace(self.wiring, state=state).make_gate(self.dispatch)
        return self.version

    async def save_weights(self, folder: str | Path, dtype: str | None = None) -> None:
        """Write the trainer's weights in the Hugging Face layout, in `dtype` or
        `checkpoint.export_dtype`."""
        trainer = self._require("save_weights", "trainer", Phase.TRAIN)
        config = self.config.checkpoint
        dtype = replace(config, export_dtype=dtype or config.export_dtype).export_dtype
        await trainer.export(os.path.abspath(folder), dtype)

    def _make_group(self, question: Question, num_rollouts: int | None) -> Group:
        """Return the group of a question, with ids of the gate's; a group of the gate's is returned
        as it is."""
        if isinstance(question, Group):
            return question
        gate, config = self.gate, self.config
        group_id, gate.next_group_id = gate.next_group_id, gate.next_group_id + 1
        if not isinstance(question, Prompt):
            number = -1 - group_id  # no line of the recipe's file, and another one each time
            question = make_prompt(question, number, config.data, self.tokenizer)
            share = config.experience.keep_rollouts
            question = replace(question, is_kept=is_kept(question, share, config.seed))
        sampling = config.sampling
        if num_rollouts is not None:
            sampling = replace(sampling, rollouts_per_prompt=num_rollouts)
        return Group(
            group_id=group_id,
            prompt=question,
            row_ids=gate.allocate_rows(sampling.rollouts_per_prompt),
            min_version=max(0, self.published),
        )

    def _check_trainable(self, group: Group) -> None:
        """Raise ValueError or RuntimeError unless the group has advantages and was sampled as the
        recipe says, by versions up to the trainer's."""
        name, found, own = f"group {group.group_id}", group.advantages, self._sampling
        is_set = len(found) == len(group.row_ids) and all(map(isfinite, found))
        must = f"be {len(group.row_ids)} finite numbers, one per rollout (see settle)"
        require(is_set, f"advantages of {name}", must, found)
        newest = max((span.version for r in group.sequences for span in r.spans), default=0)
        if newest > self.version:
            must = f"be written by versions up to {self.version}, the trainer's"
            raise RuntimeError(f"{name} must {must}, got tokens of version {newest}")
        drawn = self.rollouts.open[group.row_ids[0]].sampling
        names = ("temperature", "top_k", "top_p", "min_p")
        is_own = all(getattr(drawn, name) == getattr(own, name) for name in names)
        must = f"be sampled as the recipe says (temperature {own.temperature:g}) to be trained on"
        require(is_own, name, must, f"temperature {drawn.temperature:g}")

    async def _serve(self) -> None:
        with suppress(Exception):  # raised by the calls that wait, and by later ones
            await self.serve()

    async def _write(
        self, group: Group, requests: Sequence[Request], future: asyncio.Future[Group]
    ) -> None:
        try:
            await self.rollouts.until_failed(self.rollouts.write(group, requests))
        except Exception as error:  # noqa: BLE001 - raised where the group is awaited
            if not future.done():
                future.set_exception(error)
                mark_seen(future)
            return
        if future.cancelled():
            await self.retire([group], "dropped", reason="cancelled")
        else:
            future.set_result(group)

    def _stop_if_cancelled(self, group: Group, future: asyncio.Future[Group]) -> None:
        if future.cancelled() and self.rollouts.error is None:
            self._start(self.rollouts.abort(group.row_ids))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _require(self, call: str, name: str, phase: Phase | None = None) -> Any:
        """Return the trainer, if there is one. Raises the error that ended the background tasks, or
        RuntimeError if the call may not come now."""
        if self.rollouts.error is not None:
            raise self.rollouts.error
        if name not in self._names:
            started = ", ".join(sorted(self._names))
            raise RuntimeError(f"{call} must have the {name} among executors, got {started}")
        if phase not in (None, self._phase) and self.config.placement.colocated:
            got = "none" if self._phase is None else f'"{self._phase}"'
            raise RuntimeError(f'{call} must come in phase "{phase}" when colocated, got {got}')
        return self.trainer

    def _require_generators(self, call: str) -> None:
        """Raise RuntimeError for a call that would wait without end for generators that are
        offloaded."""
        if self.config.placement.colocated and self._phase is not None:
            raise RuntimeError(f'{call} must come outside of phases, got "{self._phase}"')

    def _rows(self, groups: Sequence[Group]) -> list[int]:
        """Return the row ids of the groups. RuntimeError unless they are all written and not
        retired."""
        for group in groups:
            if not self.rollouts.is_written(group):
                is_open = self.rollouts.open.keys() >= {*group.row_ids}
                now = "being written" if is_open else "retired"
                raise RuntimeError(f"groups must be written and open, got {group.group_id}, {now}")
        return [row_id for group in groups for row_id in group.row_ids]

    def _replace_sampling(self, **fields: Any) -> Config:
        """Return the recipe with these fields of `sampling`; ValueError if they do not suit the
        rest."""
        return replace(self.config, sampling=replace(self.config.sampling, **fields))

    async def _connect(self, source: Any = None) -> None:
        publisher = self.wiring.make_publisher(self.dispatch, source=source)
        await publisher.connect()
        self.publisher = publisher

    async def _open_source(self, tensors: Mapping[str, Tensor]) -> SourcePart:
        """Return the source of weights in the caller's process, which generators are connected
        to."""
        from llamarl.publish.shards import shard_boxes
        from llamarl.publish.source import SourcePart

        config, spans, must = (
            self.config,
            self.wiring.spans,
            f"be {named('is_mapped')} with a source",
        )
        is_mapped = TRANSPORTS[config.weights.transport].is_mapped
        config.require(is_mapped, "weights.transport", must)
        found = SourcePart(
            0,
            *shard_boxes(tensors),
            config=config.weights,
            spans=spans,
            formats=formats_of(config.generator, self.inputs.architecture),
        )
        await self._connect(InlineExecutor("trainer", [found], [spans]))
        return found
