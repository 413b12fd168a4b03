"""The embedded engine: continuous batching of rollouts under the newest weights.

A rollout in a slot has all tokens but its last in the KV cache; a decode step feeds the last one.
So starting, resuming and recomputing are one operation: prefill everything but the last token. On a
GPU a step is launched before the host reads the tokens of the step before: a rollout that has
stopped is then computed once more, and that token is dropped.

Weights change only between two steps, and every token is labelled with the version whose weights
computed it."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from llamarl.core.config import EmbeddedConfig, LoraConfig
from llamarl.core.device.devices import compute_device, platform_of
from llamarl.core.records import FinishReason, Request
from llamarl.generator.engine.decoder import (
    Cache,
    Decoder,
    EagerRunner,
    ModelRunner,
    PaddedRunner,
    TensorParallelGroup,
)
from llamarl.generator.engine.kv_cache import PLAN_STEPS, CpuKVCache, PaddedKVCache
from llamarl.generator.engine.scheduler import (
    DecodeStep,
    KeptEpisode,
    PrefixIndex,
    Queue,
    QueuedRequest,
    RunningBatch,
    assign_slots,
    check_request,
    completes_stop_string,
    fewest_free,
)
from llamarl.generator.engine.weights import (
    DTYPES,
    AdapterLayout,
    BufferLayout,
    Weights,
    bind,
    load_adapter_boxes,
    load_boxes,
    make_scratch,
    overwrite,
    sums_of_boxes,
)
from llamarl.generator.protocol import PartialOutput, RequestOutput
from llamarl.model.architecture import Architecture
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.fingerprint import key_of
from llamarl.publish.layout import format_of

PREFILL_TOKENS = 8192  # most tokens of one packed prefill: bounds its activations


class EmbeddedEngine:
    """One tensor-parallel rank of one replica; a `generator.protocol.Engine`.

    The ranks meet at the file `rendezvous`, which no other replica uses, and must get the same
    calls in the same order. Of each token `num_kept_ids` are recorded among which it was drawn.
    `is_padded` chooses the model runner (None: by device). With `lora` a
    publish fills adapters alone, and the matrices beside them are the engine's own. Raises
    ValueError if the ranks cannot split the model evenly, or if `config.device` is cuda and there
    is none."""

    def __init__(
        self,
        architecture: Architecture,
        config: EmbeddedConfig,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        rendezvous: str = "",
        is_padded: bool | None = None,
        lora: LoraConfig | None = None,
        num_kept_ids: int = 0,
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.architecture, self.config = architecture, config
        form = format_of(config, architecture)
        self.layout = BufferLayout(architecture, config.dtype, rank, num_ranks, form)
        self.decode_text = decode_text
        self.version = -1
        self.num_prefilled_tokens = 0  # since the start
        self._device = compute_device(config.device, "generator.device")
        self.memory = self.layout.memory
        self._adapters: AdapterLayout | None = None
        self._base: Tensor | None = None  # flat, as `layout` says; with adapters
        if lora is not None and lora.is_used:
            self._adapters = AdapterLayout(architecture, lora, config.dtype, rank, num_ranks)
            whole, self.memory = self.memory, self._adapters.memory
            self._base = torch.zeros(whole.num_elements, dtype=whole.dtype, device=self._device)
        a = architecture
        widest = max(a.hidden_size, a.active_channels, a.num_heads * a.head_dim)
        self._scratch = make_scratch(widest, DTYPES[config.dtype], self._device) if form else None
        self._group = (
            TensorParallelGroup(rendezvous, rank, num_ranks, self._device)
            if num_ranks > 1
            else None
        )
        runs_ahead = platform_of(self._device).runs_ahead
        self._make_runner(runs_ahead if is_padded is None else is_padded)
        shape = config.max_num_seqs, config.max_model_len
        self._running = RunningBatch(*shape, self._device, num_kept_ids)
        self._queue = Queue()
        self._prefixes = PrefixIndex()
        self._done: list[RequestOutput] = []
        self._must_recompute = False
        self._may_start = False  # something changed since the queue was last checked
        self._steps_left = 0  # that the runner's arrangement serves
        self._launched: deque[DecodeStep] = deque()
        self._sparse_layers = len(architecture.sparse_layers)
        self._records: dict[int, np.ndarray] = {}  # of earlier segments, by slot

    def _make_runner(self, is_padded: bool) -> None:
        config, device, group = self.config, self._device, self._group
        num_ranks = group.num_ranks if group is not None else 1
        kind: type[Cache] = PaddedKVCache if is_padded else CpuKVCache
        self._cache = cache = kind(self.architecture, config, num_ranks, device)
        self._decoder = Decoder(self.architecture, cache, group)
        self._runner: ModelRunner
        if isinstance(cache, CpuKVCache):
            self._runner = EagerRunner(self._decoder, cache)
        else:
            # With several ranks the collectives' kernels would be captured too, which is untested.
            # Those of experts have rows of any number.
            is_dense = self.architecture.experts is None
            captures = not config.enforce_eager and group is None and is_dense
            graphs = platform_of(device).graphs(device) if captures else None
            self._runner = PaddedRunner(self._decoder, cache, graphs)

    @property
    def num_running(self) -> int:
        return len(self._running.requests)

    @property
    def num_written_tokens(self) -> int:
        return self._running.num_written

    @property
    def has_work(self) -> bool:
        if self._done or (self.version >= 0 and self.num_running):
            return True
        return self.version >= 0 and self._queue.num_startable(self.version) > 0

    def load(self, flat: Tensor, folder: str) -> None:
        if self._adapters is not None:
            load_adapter_boxes(self._adapters.parameters, flat, folder)
        else:
            self._load_whole(flat, folder)

    def load_base(self, folder: str, dtype: str = "float32") -> dict[str, Fingerprints]:
        assert self._base is not None, "an engine without adapters has no weights of its own"
        self._load_whole(self._base, folder, getattr(torch, dtype))
        kind = key_of(self.layout.format or self.config.dtype)
        place = (0, 1) if self._group is None else (self._group.rank, self._group.num_ranks)
        return {kind: sums_of_boxes(self.layout.parameters, self._base, *place)}

    def _load_whole(
        self, flat: Tensor, folder: str, rounded_to: torch.dtype = torch.float32
    ) -> None:
        whole, architecture = self.layout, self.architecture
        load_boxes(whole.parameters, flat, folder, architecture, whole.format, rounded_to)

    @torch.inference_mode()
    def process_weights(self, flat: Tensor) -> Weights:
        """Return the weights as views of `flat`; with adapters, as views of `flat` and of the
        engine's own weights."""
        whole = flat if self._base is None else self._base
        weights = bind(self.layout, self.architecture, whole, self._scratch)
        return weights if self._adapters is None else self._adapters.adapt(weights, flat)

    @torch.inference_mode()
    def commit(self, processed: Weights | Tensor, version: int) -> int:
        """See `Engine`; a flat tensor is processed here. If keys and values are recomputed, it is
        before the next token."""
        self._finish_steps()
        weights = self.process_weights(processed) if isinstance(processed, Tensor) else processed
        held = self._decoder.weights
        is_same = held is not None and held.embedding.data_ptr() == weights.embedding.data_ptr()
        if held is not None and self._runner.keeps_addresses and is_same:
            overwrite(held, weights)
        else:
            self._decoder.weights = weights
            self._runner.forget()
        self.version = version
        self._must_recompute = self.config.kv_after_commit == "recompute"
        self._may_start = True
        return self.num_running

    def submit(self, request: Request, written: PartialOutput | None = None) -> None:
        check_request(
            request,
            context=self.config.max_model_len,
            vocab_size=self.architecture.vocab_size,
            reads_text=self.decode_text is not None,
        )
        self._queue.add(QueuedRequest(request=request, written=written or PartialOutput()))
        self._may_start = True

    def abort_requests(self, row_ids: Sequence[int]) -> None:
        self._finish_steps()
        wanted = set(row_ids)
        self._done += self._queue.abort(wanted)
        for slot, request in sorted(self._running.requests.items()):
            if request.row_id in wanted:
                self._stop(slot, FinishReason.ABORTED)

    def peek(self, row_id: int) -> Sequence[int]:
        """See `Engine`; tokens of launched steps that were not read are not among them."""
        running = self._running
        for slot, request in running.requests.items():
            if request.row_id == row_id:
                part = slice(int(running.turn_start[slot]), int(running.cached[slot]) + 1)
                return running.sequence[slot, part].tolist()
        return []

    def movable(self, tag: str) -> list[Tensor]:
        """Return the KV cache, or the weights beside adapters; all other weights are in the flat
        memory. Graphs are captured again afterwards. The record of experts stays, because a rollout
        may be given up meanwhile."""
        self._finish_steps()
        self._runner.forget()
        if tag == "kv":
            return [self._cache.keys, self._cache.values]
        return [] if self._base is None else [self._base]

    def forget_prompts(self) -> None:
        self._prefixes.clear()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def step(self) -> list[RequestOutput]:
        """Admit what fits, decode one token for every running rollout, and return what stopped."""
        self.admit()
        return self.decode()

    @torch.inference_mode()
    def admit(self) -> int:
        if self.version < 0:
            return 0
        before = self.num_prefilled_tokens
        if self._must_recompute:
            self._recompute()
        if self._may_start:
            self._start_waiting()
        return self.num_prefilled_tokens - before

    @torch.inference_mode()
    def decode(self) -> list[RequestOutput]:
        if self._steps_left == 0:
            self._runner.arrange(self._running)
            self._steps_left = PLAN_STEPS
        if self.num_running:
            self._launched.append(self._runner.launch(self._running, self.version))
            self._steps_left -= 1
        self._finish_steps(self._runner.num_ahead if self.num_running else 0)
        done, self._done = self._done, []
        return done

    def _finish_steps(self, num_ahead: int = 0) -> None:
        """Take over the tokens of the launched steps, except the newest `num_ahead` steps."""
        running = self._running
        while len(self._launched) > num_ahead:
            step = self._launched.popleft()
            ended = running.append(step, *step.read())
            if running.watches_text.any():
                ended = self._stop_at_text(ended)
            for slot, reason in ended:
                self._stop(slot, reason)

    def _start_waiting(self) -> None:
        """Fill the free slots from the queue, once they are enough to be worth a prefill."""
        free = set(np.flatnonzero(~self._running.occupied).tolist())
        num_startable = self._queue.num_startable(self.version)
        if len(free) < fewest_free(self.config.max_num_seqs, num_startable):
            return
        self._may_start = False
        starting = self._queue.take(self.version, len(free))
        if not starting:
            return
        is_kept = self.config.kv_after_commit == "keep"
        assignments = assign_slots(starting, free, self._prefixes, self.version, is_kept=is_kept)
        for each in assignments:
            self._running.start(each.slot, each.waiting, each.num_cached)
            if self._sparse_layers:
                self._records[each.slot] = each.waiting.written.experts
        self._prefill({each.slot: each.num_cached for each in assignments if each.source is None})
        for waiting, slot, source, _ in assignments:
            if source not in (None, slot):
                self._cache.copy_prefix(source, slot, len(waiting.request.prompt_ids) - 1)
        self._steps_left = 0

    def _stop(self, slot: int, reason: FinishReason) -> None:
        # The slot stays empty until the next step, so that a waiting rollout may take it first.
        num_fed = int(self._running.cached[slot])
        request, written = self._running.release(slot)
        self._add_record(slot, num_fed, written)
        is_turn = request.has_turns and reason is FinishReason.STOP
        if is_turn or reason is FinishReason.SEGMENT:
            self._prefixes.keep(request.row_id, KeptEpisode(slot, written.ids, self.version))
        self._steps_left = 0
        self._may_start = True
        self._done.append(RequestOutput(request=request, written=written, reason=reason))

    def _add_record(self, slot: int, num_fed: int, written: PartialOutput) -> None:
        """Add to the record of a rollout's experts, which has those of its earlier segments, the
        tokens that were fed in this slot."""
        if not self._sparse_layers:
            return
        before = self._records.pop(slot)
        first = len(before)
        fed = self._cache.experts[:, slot, first:num_fed].transpose(0, 1)
        added = platform_of(self._device).fetch(fed).wait().numpy()
        written.experts = np.concatenate([before, added]) if first else added.copy()

    def _stop_at_text(
        self, ended: list[tuple[int, FinishReason]]
    ) -> list[tuple[int, FinishReason]]:
        """Add the rollouts whose newest token completed a stop string, if they have one."""
        reasons = dict(ended)
        running = self._running
        for slot in np.flatnonzero(running.watches_text).tolist():
            sampling = running.requests[slot].sampling
            ids = running.sequence[slot, running.turn_start[slot] : running.cached[slot] + 1]
            if completes_stop_string(sampling, ids, self.decode_text):
                reasons[slot] = FinishReason.STOP
        return sorted(reasons.items())

    def _prefill(self, slots: dict[int, int], recorded: dict[int, int] | None = None) -> None:
        """Compute the keys and values of all but the last token of these slots, from the given
        position of each on; `recorded` as in `Decoder.prefill`."""
        pack: list[tuple[int, int, np.ndarray]] = []
        num_tokens = 0
        for slot, start in slots.items():
            end = int(self._running.cached[slot])
            length = end - start
            if length <= 0:
                continue
            if pack and num_tokens + length > PREFILL_TOKENS:
                self._decoder.prefill(pack, recorded=recorded)
                pack, num_tokens = [], 0
            pack.append((slot, start, self._running.sequence[slot, start:end]))
            num_tokens += length
            self.num_prefilled_tokens += length
        if pack:
            self._decoder.prefill(pack, recorded=recorded)

    def _recompute(self) -> None:
        """Recompute every running rollout's keys and values under the present version."""
        self._must_recompute = False
        running = sorted(self._running.requests.items())
        # The record of a token stays that of the weights that wrote the token behind it. Behind a
        # prompt's tokens but its last none was written, and other rollouts share them as they are.
        prompts = {slot: len(request.prompt_ids) - 1 for slot, request in running}
        self._prefill({slot: 0 for slot, _ in running}, prompts)
        for slot, request in running:
            self._prefixes.put(slot, request.prompt_ids, self.version)
