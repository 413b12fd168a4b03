"""The engine against transformers: random requests, commits and aborts in tiny slots."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from llamarl.core.config import EmbeddedConfig
from llamarl.core.device.devices import PLATFORMS
from llamarl.core.records import NO_VERSION, FinishReason, Request
from llamarl.generator.engine import decoder, kv_cache, scheduler
from llamarl.generator.engine import engine as engine_module
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.protocol import PartialOutput, RequestOutput
from llamarl.model.transformer import Transformer
from tests.generator.engine_cases import ARCHITECTURES, Options
from tests.generator.engine_models import (
    flat_weights,
    in_transformers,
    quantize_model,
)
from tests.generator.engine_oracle import check_experts, check_tokens, first_end
from tests.random_search import case, searched
from tests.tiny_checkpoints import make_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_WEIGHTS = 3  # versions up to two apart differ
MOST_MOMENTS = 3000  # a search whose engine stands still ends there


@functools.cache
def model(variant: str, number: int) -> Transformer:
    return make_model(ARCHITECTURES[variant], number)


@functools.cache
def reference(variant: str, quantization: str, number: int) -> PreTrainedModel:
    plain = model(variant, number)
    return in_transformers(plain if quantization == "none" else quantize_model(plain, quantization))


@functools.cache
def flat(variant: str, quantization: str, number: int) -> torch.Tensor:
    config = EmbeddedConfig(max_num_seqs=1, max_model_len=2, quantization=quantization)
    engine = EmbeddedEngine(ARCHITECTURES[variant], config)
    return flat_weights(engine, model(variant, number))


@dataclass
class Open:
    """A rollout that has not ended, and what it had when the engine got it. `chain`: the versions
    that computed the keys and values of the last tokens of that, if they may still be there."""

    request: Request
    before: PartialOutput = field(default_factory=PartialOutput)
    chain: list[int] = field(default_factory=list)


class Search:
    """One engine and what is known of its rollouts."""

    def __init__(self, options: Options, rng: random.Random) -> None:
        self.options, self.rng = options, rng
        self.engine = options.engine()
        memory = self.engine.memory
        self.memories = [
            torch.zeros(memory.num_elements, dtype=memory.dtype)
            for _ in range(1 + options.alternates)
        ]
        self.models: dict[int, PreTrainedModel] = {}  # by version
        self.number = 0  # of the newest weights
        self.ready: tuple[int, Any] | None = None  # a version that is processed but not committed
        self.open: dict[int, Open] = {}
        self.partial: dict[int, Open] = {}  # that may be submitted again
        self.aborted: dict[int, int] = {}  # that the next step returns; after how many steps
        self.history: list[int] = []  # the version of each step
        self.away: list[torch.Tensor] | None = None  # the KV cache, while it is offloaded
        self.num_requests, self.num_submitted = rng.randint(1, 24), 0
        self.chain: list[int] = []  # of the rollout that was checked last
        self.num_kept = 0

    def run(self) -> None:
        """Until every rollout has ended; then nothing is left."""
        engine = self.engine
        busy = [self.submit] * 3 + [self.resume] * 3 + [self.commit] * 4 + [self.process]
        busy += [self.abort, self.offload, self.refuse]
        idle = [self.submit] * 4 + [self.resume] * 4 + [self.commit, self.abort, self.offload]
        for _ in range(MOST_MOMENTS):
            if self.rng.random() < (0.35 if engine.has_work else 0.9):
                self.rng.choice(busy if engine.has_work else idle)()
            elif self.rng.random() < 0.01:
                self.reset()
            else:
                self.step()
            if self.num_submitted >= self.num_requests and not self.open and not self.partial:
                break
        else:
            raise AssertionError("the engine stands still")
        assert not engine.has_work
        assert engine.num_running == len(engine._queue) == 0
        assert engine.step() == []

    def submit(self) -> None:
        for _ in range(min(self.rng.randint(1, 8), self.num_requests - self.num_submitted)):
            request = self.options.request(self.rng, self.num_submitted, self.engine.version)
            self.num_submitted += 1
            self.put(Open(request))

    def put(self, rollout: Open) -> None:
        self.open[rollout.request.row_id] = rollout
        self.engine.submit(rollout.request, rollout.before)

    def resume(self) -> None:
        """Partial rollouts go on, under this version or a later one."""
        for row_id in self.rng.sample(sorted(self.partial), self.rng.randint(0, len(self.partial))):
            self.put(self.partial.pop(row_id))

    def refuse(self) -> None:
        request = self.options.request(self.rng, 10**6, 0)
        unknown = ARCHITECTURES[self.options.variant].vocab_size
        for prompt in ((), (unknown,), (0,) * self.options.context):
            with pytest.raises(ValueError, match=r"must (have|be)"):
                self.engine.submit(replace(request, prompt_ids=prompt))

    def abort(self) -> None:
        """Some that are open, and some that the engine does not know."""
        some = [row_id for row_id in self.open if self.rng.random() < 0.25]
        self.aborted |= dict.fromkeys(some, len(self.history))
        self.engine.abort_requests([*some, *self.partial, self.num_submitted])

    def process(self) -> None:
        """The weights of the next version are there; some steps later they are committed."""
        if self.ready is not None:
            return
        version = self.engine.version + self.rng.randint(1, 2)
        self.number = (self.number + self.rng.randint(1, NUM_WEIGHTS - 1)) % NUM_WEIGHTS
        options = self.options
        weights: Any = flat(options.variant, options.quantization, self.number)
        if options.alternates:
            self.memories.reverse()
            self.memories[0].copy_(weights)
            weights = self.engine.process_weights(self.memories[0])
        self.ready = version, weights

    def commit(self) -> None:
        options, engine = self.options, self.engine
        for _ in range(self.rng.choice([1, 1, 2])):
            self.process()
            assert self.ready is not None
            (version, weights), self.ready = self.ready, None
            if not options.alternates:
                self.memories[0].copy_(weights)
            if not options.alternates or self.rng.random() < 0.5:
                weights = self.memories[0]
            assert engine.commit(weights, version) == engine.num_running
            self.models[version] = reference(options.variant, options.quantization, self.number)
            for memory in self.memories[1:]:
                memory.view(torch.uint8).fill_(255)  # nan; the next version may be written there

    def offload(self) -> None:
        """The KV cache leaves the device, as in `generator/decoding.py`."""
        if self.away is not None:
            return
        is_kept = self.engine.num_running > 0
        if not is_kept:
            self.engine.forget_prompts()
        tensors = self.engine.movable("kv")
        self.away = [each.clone() if is_kept else torch.zeros_like(each) for each in tensors]
        for each in tensors:
            each.fill_(torch.nan)

    def onload(self) -> None:
        if self.away is not None:
            for tensor, kept in zip(self.engine.movable("kv"), self.away, strict=True):
                tensor.copy_(kept)
            self.away = None

    def reset(self) -> None:
        """Another run begins, as in `generator/decoding.py`: its versions may be the same ones."""
        self.onload()
        self.engine.abort_requests([*self.open])
        self.aborted |= dict.fromkeys(self.open, len(self.history))
        self.end(self.engine.decode(), len(self.history))
        assert self.engine.decode() == []
        self.engine.forget_prompts()
        self.engine.version = -1
        self.ready = None
        self.partial.clear()
        self.models.clear()

    def step(self) -> None:
        self.onload()
        engine = self.engine
        if not engine.has_work:
            assert engine.step() == []
            return
        engine.admit()
        self.check_waiting()
        self.history.append(engine.version)
        self.end(engine.decode(), len(self.history) - self.options.engine_runs_ahead)
        assert engine.num_running + len(engine._queue) == len(self.open)
        assert engine.num_running <= self.options.slots

    def check_waiting(self) -> None:
        """What may start does so once enough slots are free, whatever else waits."""
        ended = {item.request.row_id for item in self.engine._done} | self.aborted.keys()
        live = [each.request for row_id, each in self.open.items() if row_id not in ended]
        may_run = [request for request in live if request.min_version <= self.engine.version]
        num_running = self.engine.num_running
        if self.engine.version >= 0 and len(may_run) > num_running:
            fewest = scheduler.fewest_free(self.options.slots, len(may_run) - num_running)
            assert self.options.slots - num_running < fewest

    def end(self, done: list[RequestOutput], last: int) -> None:
        """`last`: how many steps the engine had made when it knew that these had stopped."""
        for item in done:
            self.check(item, last)
            row_id = item.request.row_id
            del self.open[row_id]
            is_aborted = item.reason is FinishReason.ABORTED
            if self.options.engine_runs_ahead and not is_aborted:  # it had ended before
                self.aborted.pop(row_id, None)
            assert is_aborted == (row_id in self.aborted)
            self.aborted.pop(row_id, None)
            is_turn = item.reason is FinishReason.STOP and item.request.has_turns
            if is_turn and self.rng.random() < 0.8:
                self.observe(item)
            elif item.reason is FinishReason.SEGMENT or (is_aborted and self.rng.random() < 0.5):
                request = replace(item.request, resume=True)
                self.partial[row_id] = Open(request, item.written, self.chain)
        assert not self.aborted, "what was aborted comes out of the next step"

    def observe(self, item: RequestOutput) -> None:
        """An environment answers a turn, unless that would leave no room; or it is lost, and the
        episode begins again."""
        rng, request, written = self.rng, item.request, item.written
        if rng.random() < 0.1:
            self.partial[request.row_id] = Open(replace(request, resume=False))
            return
        num = rng.randint(1, 5)
        most = request.replay_tokens or request.sampling.max_tokens
        length = len(written.ids) + num
        if length < most and len(request.prompt_ids) + length < self.options.context:
            tokens = range(ARCHITECTURES[self.options.variant].vocab_size)
            ids = np.array(rng.choices(tokens, k=num), np.int32)
            more = PartialOutput(
                ids=np.concatenate([written.ids, ids]),
                logprobs=np.concatenate([written.logprobs, np.zeros(num, np.float32)]),
                versions=np.concatenate([written.versions, np.full(num, NO_VERSION, np.int32)]),
                experts=written.experts,
            )
            self.partial[request.row_id] = Open(replace(request, resume=True), more, self.chain)

    def check(self, item: RequestOutput, last: int) -> None:
        options, written = self.options, item.written
        rollout = self.open[item.request.row_id]
        assert item.request is rollout.request
        num_before = len(rollout.before.ids)
        for name in ("ids", "logprobs", "versions"):
            now, then = getattr(written, name), getattr(rollout.before, name)
            assert now.dtype == then.dtype
            assert now[:num_before].tobytes() == then.tobytes()
        ids, labels = written.ids.tolist(), written.versions.tolist()
        assert len(ids) == len(labels) == len(written.logprobs)
        by_model = [label for label in labels if label != NO_VERSION]
        assert by_model == sorted(by_model)
        new = labels[num_before:]
        # It was in a slot until the last step, and each step wrote one token of it.
        is_aborted = item.reason is FinishReason.ABORTED
        if is_aborted:
            last = self.aborted[item.request.row_id]
        assert new == self.history[last - len(new) : last]
        assert min(new, default=item.request.min_version) >= item.request.min_version
        turn = max((i + 1 for i, label in enumerate(labels) if label == NO_VERSION), default=0)
        end = first_end(item.request, ids, num_before, options.context, options.decode_text, turn)
        assert end == (None if is_aborted else (len(ids), item.reason))
        # What was kept was computed before; what was added since, under the first new version.
        self.chain = new or rollout.chain
        if written.num_kept and new:
            num_computed = written.num_kept - len(item.request.prompt_ids) + 1
            assert 0 < num_computed <= num_before
            assert rollout.chain, "nothing of it was computed here"
            self.num_kept += 1
            added = [new[0]] * (num_before - num_computed)
            self.chain = [*rollout.chain, *added, *new]
        check_tokens(
            self.models, item.request, ids, written.logprobs, new, options.recomputes, self.chain
        )
        check_experts(
            self.models, item.request, written, rollout.before, options.recomputes, self.chain
        )
        if is_aborted and new:  # it was in a slot, which is free for others
            self.chain = []


def patch(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Sizes that are chosen for speed, so small that a few tokens pass them."""
    steps = rng.choice([1, 2, 8])
    for module in (kv_cache, engine_module, decoder):
        monkeypatch.setattr(module, "PLAN_STEPS", steps)
    monkeypatch.setattr(kv_cache, "BLOCK", rng.choice([1, 4, 32]))
    monkeypatch.setattr(kv_cache, "BLOCK", rng.choice([1, 4, 32]))
    monkeypatch.setattr(kv_cache, "CALL_COST", rng.choice([0, 5, 500]))
    monkeypatch.setattr(kv_cache, "SHORTEST", rng.choice([1, 8, 128]))
    monkeypatch.setattr(scheduler, "START_SHARE", rng.choice([1, 2, 16]))
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", rng.choice([1, 20, 8192]))
    monkeypatch.setattr(PLATFORMS["cpu"], "num_tiled", rng.choice([500, 1 << 19]))


@searched(few=100, many=1000)
def test_every_token_is_what_transformers_gives_under_its_version(
    seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        with case(seed):
            patch(monkeypatch, rng)
            Search(Options.draw(rng), rng).run()
