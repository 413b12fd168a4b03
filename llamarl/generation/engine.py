"""The embedded engine: continuous batching of rollouts under the newest weights.

Owns: the step (admit, prefill, decode one token, stop), the version label, and where each rollout
sits. Does not own: the memory that a publish writes, threads, storage. Invariant: weights change
only between two steps, and every token is labelled with the version whose weights computed it.

A rollout in a slot has all tokens but its last in the KV cache; a decode step feeds the last one.
So starting, resuming and recomputing are one operation: prefill everything but the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from llamarl.config import EmbeddedConfig
from llamarl.generation.boxes import load_boxes
from llamarl.generation.cpu_kv_cache import PLAN_STEPS, CpuKVCache
from llamarl.generation.cuda_kv_cache import CudaKVCache
from llamarl.generation.decoder import Decoder
from llamarl.generation.graphs import CudaGraphs
from llamarl.generation.parameters import (
    DTYPES,
    Weights,
    bind,
    buffer_layout,
    overwrite,
    quantize,
    tensors,
)
from llamarl.generation.protocol import Memory, RequestOutput
from llamarl.generation.quantized import make_scratch
from llamarl.generation.ranks import Ranks
from llamarl.generation.running_rollouts import RunningRollouts
from llamarl.generation.sampling import SamplingRows, sample
from llamarl.generation.scheduler import (
    PartialOutput,
    PrefixIndex,
    Queue,
    QueuedRequest,
    check_request,
    fewest_free,
    nothing_written,
    place,
)
from llamarl.generation.steps import EagerSteps, PaddedSteps, Steps
from llamarl.models.architecture import Architecture
from llamarl.models.process_group import compute_device
from llamarl.types import FinishReason, Request

PREFILL_TOKENS = 8192  # most tokens of one packed prefill: bounds its activations


class EmbeddedEngine:
    """One tensor-parallel rank of one replica, as `generation.protocol.Engine` says.

    The ranks meet at the file `rendezvous`, which no others use, and must get the same calls in the
    same order. `is_padded` chooses between the two ways of `steps.py` (None: by device). ValueError
    if the ranks cannot split the model evenly, or if `config.device` is cuda and there is none.
    """

    def __init__(
        self,
        architecture: Architecture,
        config: EmbeddedConfig,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        rendezvous: str = "",
        is_padded: bool | None = None,
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.architecture = architecture
        self.config = config
        self.layout = buffer_layout(architecture, config.dtype, rank, num_ranks)
        self.decode_text = decode_text
        self.version = -1
        self.num_prefilled_tokens = 0  # since the start
        self._device = compute_device(config.device, "generator.device")
        dtype = DTYPES[config.dtype]
        self.memory = Memory(
            parameters=self.layout.parameters,
            num_elements=self.layout.num_elements,
            dtype=dtype,
            is_staged=config.quantization != "none",
        )
        widest = max(architecture.intermediate_size, architecture.num_heads * architecture.head_dim)
        widest = max(widest, architecture.hidden_size)
        self._scratch = make_scratch(widest, dtype, self._device) if self.memory.is_staged else None
        self._ranks = Ranks(rendezvous, rank, num_ranks, self._device) if num_ranks > 1 else None
        is_cuda = self._device.type == "cuda"
        self._make_steps(is_cuda if is_padded is None else is_padded, self._ranks)
        self._running = RunningRollouts(config.max_num_seqs, config.max_model_len, self._device)
        self._queue = Queue()
        self._prefixes = PrefixIndex()
        self._done: list[RequestOutput] = []
        self._must_recompute = False
        self._may_start = False  # something changed since the queue was last asked
        self._arrange()

    def _make_steps(self, is_padded: bool, ranks: Ranks | None) -> None:
        architecture, config = self.architecture, self.config
        num_ranks = ranks.num_ranks if ranks is not None else 1
        sizes = {
            "num_layers": architecture.num_layers,
            "num_slots": config.max_num_seqs,
            "num_heads": architecture.num_heads // num_ranks,
            "num_kv_heads": architecture.num_kv_heads // num_ranks,
            "num_positions": config.max_model_len,
            "head_dim": architecture.head_dim,
        }
        dtype, device = DTYPES[config.dtype], self._device
        self._cache: CpuKVCache | CudaKVCache
        self._steps: Steps
        if is_padded:
            self._cache = slots = CudaKVCache(**sizes, dtype=dtype, device=device)
            self._decoder = Decoder(architecture, slots, ranks)
            # With several ranks NCCL's kernels would be captured too, which nobody has tried.
            captures = config.cuda_graphs and device.type == "cuda" and ranks is None
            graphs = CudaGraphs(device) if captures else None
            self._steps = PaddedSteps(self._decoder, slots, graphs)
        else:
            self._cache = tables = CpuKVCache(**sizes, dtype=dtype, device=device)
            self._decoder = Decoder(architecture, tables, ranks)
            self._steps = EagerSteps(self._decoder, tables)

    @property
    def num_running(self) -> int:
        """Rollouts in slots."""
        return int(self._running.occupied.sum())

    @property
    def num_waiting(self) -> int:
        """Rollouts in the queue, also those that wait for a newer version."""
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        """True if the next step would do something."""
        if self._done or (self.version >= 0 and self.num_running):
            return True
        return self.version >= 0 and self._queue.has_startable(self.version)

    def load(self, flat: Tensor, folder: str) -> None:
        """Fill `flat` with a checkpoint's weights; ValueError if they do not fit or are damaged."""
        load_boxes(self.layout.parameters, flat, folder, self.architecture)

    @torch.inference_mode()
    def process_weights(self, flat: Tensor) -> Weights:
        """Views of `flat` (see `layout`), or quantised copies that need it no longer."""
        weights = bind(self.layout, self.architecture, flat)
        if self._scratch is None:
            return weights
        return quantize(weights, self.config.quantization, self._scratch)

    @torch.inference_mode()
    def commit(self, processed: Weights | Tensor, version: int) -> int:
        """Use these weights as `version` from the next token on; a flat tensor is prepared here.

        Returns the number of running rollouts. With kv_after_flip=recompute their keys and values
        are computed anew before their next token.
        """
        weights = self.process_weights(processed) if isinstance(processed, Tensor) else processed
        held = self._decoder.weights
        if held is not None and self._steps.keeps_addresses and self._lie_together(held, weights):
            overwrite(held, weights)
        else:
            self._decoder.weights = weights
            self._steps.forget()
        self.version = version
        self._must_recompute = self.config.kv_after_commit == "recompute"
        self._may_start = True
        return self.num_running

    def _lie_together(self, one: Weights, other: Weights) -> bool:
        """True unless the two are views of different memories."""
        return self.memory.is_staged or one.embedding.data_ptr() == other.embedding.data_ptr()

    def submit(self, request: Request, written: PartialOutput | None = None) -> None:
        """Queue a rollout; `written` is what a resumed one has so far.

        ValueError if the prompt leaves no room for a token, is empty, or has ids outside the
        vocabulary.
        """
        check_request(
            request,
            context=self.config.max_model_len,
            vocab_size=self.architecture.vocab_size,
            reads_text=self.decode_text is not None,
        )
        self._queue.add(QueuedRequest(request=request, written=written or nothing_written()))
        self._may_start = True

    def abort_requests(self, row_ids: Sequence[int]) -> None:
        """Stop these rollouts; the next step returns them, marked ABORTED. Unknown ids: ignored."""
        wanted = set(row_ids)
        for waiting in self._queue.remove(wanted):
            self._done.append(
                RequestOutput(
                    request=waiting.request, written=waiting.written, reason=FinishReason.ABORTED
                )
            )
        for slot in np.flatnonzero(self._running.occupied).tolist():
            request = self._running.requests[slot]
            if request is not None and request.row_id in wanted:
                self._stop(slot, FinishReason.ABORTED)

    def movable(self, kind: str) -> list[Tensor]:
        """The KV cache; of the weights, what was quantised. Graphs are captured anew afterwards."""
        self._steps.forget()
        if kind == "kv":
            return [self._cache.keys, self._cache.values]
        weights = self._decoder.weights
        return list(tensors(weights)) if self._scratch is not None and weights is not None else []

    def forget_prompts(self) -> None:
        """Compute every prompt anew, whatever the KV cache holds of it."""
        self._prefixes.clear()

    def close(self) -> None:
        """Leave the other ranks."""
        if self._ranks is not None:
            self._ranks.close()

    def step(self) -> list[RequestOutput]:
        """Admit what fits, decode one token for every running rollout, return what stopped."""
        self.admit()
        return self.decode()

    @torch.inference_mode()
    def admit(self) -> int:
        """Start waiting rollouts in free slots; returns the number of tokens prefilled."""
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
        """One token for every running rollout; returns what stopped since the last call."""
        if self._steps_left == 0:
            self._arrange()
        running, slots = self._running, self._slots
        if len(slots):
            positions = running.cached[slots]
            # First, because copying to a GPU waits for what it has been asked before.
            uniform = torch.from_numpy(running.uniform[slots, positions + 1]).to(self._device)
            logits = self._steps.compute(running.sequence[slots, positions], positions)
            ids, logprobs = sample(logits, self._sampling, uniform.unsqueeze(1))
            self._steps_left -= 1
            live = self._live
            ended = running.append(
                slots[live], ids.cpu().numpy()[live], logprobs.cpu().numpy()[live], self.version
            )
            if running.watches_text.any():
                ended = self._stop_at_text(ended)
            for slot, reason in ended:
                self._stop(slot, reason)
        done, self._done = self._done, []
        return done

    def _start_waiting(self) -> None:
        """Fill the free slots from the queue, once there are enough to be worth a prefill."""
        free = set(np.flatnonzero(~self._running.occupied).tolist())
        if len(free) < fewest_free(self.config.max_num_seqs, len(self._queue)):
            return
        self._may_start = False
        starting = self._queue.take(self.version, len(free))
        if not starting:
            return
        placements = place(starting, free, self._prefixes, self.version)
        for placement in placements:
            self._running.start(placement.slot, placement.waiting)
        self._prefill([p.slot for p in placements if p.source is None])
        for p in placements:
            if p.source is not None and p.source != p.slot:
                length = len(p.waiting.request.prompt_ids) - 1
                self._cache.copy_prefix(p.source, p.slot, length)
        self._steps_left = 0

    def _stop(self, slot: int, reason: FinishReason) -> None:
        # The slot stays a gap until the next step, so that a waiting rollout may take it first.
        request, written = self._running.release(slot)
        self._steps_left = 0
        self._may_start = True
        self._done.append(RequestOutput(request=request, written=written, reason=reason))

    def _stop_at_text(
        self, ended: list[tuple[int, FinishReason]]
    ) -> list[tuple[int, FinishReason]]:
        """Add the rollouts whose newest token completed a stop string."""
        reasons = dict(ended)
        assert self.decode_text is not None
        for slot in np.flatnonzero(self._running.watches_text).tolist():
            request = self._running.requests[slot]
            assert request is not None
            # A token is at least one byte, so the text of this many tokens holds the longest
            # string, and a few more keep characters whole at the window's left edge.
            longest = max(len(text.encode()) for text in request.sampling.stop_strings)
            end = int(self._running.cached[slot]) + 1
            start = max(int(self._running.prompt_length[slot]), end - longest - 8)
            text = self.decode_text(self._running.sequence[slot, start:end].tolist())
            if any(stop in text for stop in request.sampling.stop_strings):
                reasons[slot] = FinishReason.STOP
        return sorted(reasons.items())

    def _prefill(self, slots: list[int]) -> None:
        """Compute the keys and values of everything but the last token of these slots."""
        pack: list[tuple[int, np.ndarray]] = []
        num_tokens = 0
        for slot in slots:
            length = int(self._running.cached[slot])
            if not length:
                continue
            if pack and num_tokens + length > PREFILL_TOKENS:
                self._decoder.prefill(pack)
                pack, num_tokens = [], 0
            pack.append((slot, self._running.sequence[slot, :length]))
            num_tokens += length
            self.num_prefilled_tokens += length
        if pack:
            self._decoder.prefill(pack)

    def _recompute(self) -> None:
        """Bring every running rollout's keys and values to the present version."""
        self._must_recompute = False
        slots = np.flatnonzero(self._running.occupied).tolist()
        self._prefill(slots)
        for slot in slots:
            request = self._running.requests[slot]
            assert request is not None
            self._prefixes.put(slot, request.prompt_ids, self.version)

    def _arrange(self) -> None:
        """Recompute what the next decode steps need to know about the slots."""
        self._slots, self._live = self._steps.arrange(self._running)
        self._sampling: SamplingRows = self._running.sampling_rows(self._slots)
        self._steps_left = PLAN_STEPS
