"""The vLLM engine in this process, and the requests that it gets."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.core.config import LoraConfig, VllmConfig
from llamarl.core.device.names import CPU
from llamarl.core.fields import require
from llamarl.core.groups import turn_start
from llamarl.core.records import FinishReason, Request
from llamarl.generator.engine.sampling import NONE
from llamarl.generator.engine.scheduler import (
    Queue,
    QueuedRequest,
    check_request,
    completes_stop_string,
)
from llamarl.generator.engine.weights import DTYPES, load_adapter_boxes, load_boxes, sums_of_boxes
from llamarl.generator.protocol import PartialOutput, RequestOutput
from llamarl.generator.vllm.experts import RolloutRecord, RouterCapture
from llamarl.generator.vllm.limits import check_adapters, check_installed, check_temperature
from llamarl.generator.vllm.recorder import record
from llamarl.generator.vllm.settings import end_core, make_core, set_environment
from llamarl.generator.vllm.staging import (
    VllmAdapters,
    adapter_request,
    check_quantiser,
    is_as_loaded,
    process,
)
from llamarl.model.adapter_inventory import adapter_shapes
from llamarl.model.architecture import Architecture, read_any_architecture
from llamarl.model.inventory import file_pieces, parameter_shapes
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.fingerprint import key_of
from llamarl.publish.layout import format_of

LENGTH_BITS = 25  # expected tokens are below 2^25
PURPOSE_BITS = LENGTH_BITS + 34  # so are steps below 2^34, and priorities below 2^63


@dataclass(slots=True)
class VllmRollout:
    """A rollout that vLLM decodes, with everything written so far (earlier segments included); its
    present turn begins at `turn`, and `num_kept` of its tokens were in the prefix cache."""

    key: str
    request: Request
    limit: int  # response tokens at which it must stop
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    turn: int = 0
    num_kept: int = 0
    record: RolloutRecord | None = None
    num_returned: int = 0  # rows of the record that vLLM has returned itself
    num_kept_ids: int = 0
    kept: list[np.ndarray] = field(default_factory=list)  # of each part, int32 [n, num_kept_ids]

    def written(self) -> PartialOutput:
        """Return the tokens so far as arrays."""
        experts = {}
        if self.record is not None:
            num_fed = len(self.request.prompt_ids) + len(self.ids) - 1
            experts = {"experts": self.record.rows(num_fed)}
        return PartialOutput(
            **experts,
            ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            kept=np.concatenate([np.empty((0, self.num_kept_ids), np.int32), *self.kept]),
            num_kept=self.num_kept,
        )


def priority(request: Request) -> int:
    """Return `Request.urgency` as vLLM's priority, of which the lowest starts first."""
    purpose, step, tokens = request.urgency
    return (purpose << PURPOSE_BITS) + (step << LENGTH_BITS) + tokens


def start(
    waiting: QueuedRequest,
    number: int,
    version: int,
    max_model_len: int,
    adapter: Any = None,
    num_kept_ids: int = 0,
) -> tuple[VllmRollout, Any]:
    """Return the rollout's state, and vLLM's request for its next segment, which may use an
    adapter.

    `number` counts these requests: among equal priorities the lowest starts first."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    request, written = waiting.request, waiting.written
    # The row id alone is not unique, as a resumed rollout has it again.
    key = f"{request.row_id}-{number}"
    sampling = request.sampling
    num_prompt, num_written = len(request.prompt_ids), len(written.ids)
    limit = min(request.replay_tokens or sampling.max_tokens, max_model_len - num_prompt)
    wanted = limit - num_written
    if request.segment_tokens:
        wanted = min(wanted, request.segment_tokens)
    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=wanted,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # stop_token_ids holds the end-of-sequence ids
        seed=segment_seed(request.seed, num_written),
        logprobs=num_kept_ids,
        detokenize=False,
    )
    core_request = EngineCoreRequest(
        request_id=key,
        prompt_token_ids=[*request.prompt_ids, *written.ids.tolist()],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=float(number),
        priority=priority(request),
        lora_request=adapter,
        cache_salt=str(version),  # a prompt's keys and values are shared only within a version
        data_parallel_rank=None,
    )
    before = (column.tolist() for column in (written.ids, written.logprobs, written.versions))
    ids, logprobs, versions = before
    rollout = VllmRollout(
        key, request, limit, ids, logprobs, versions, turn=turn_start(written.versions)
    )
    if num_kept_ids:
        rollout.num_kept_ids = num_kept_ids
        rollout.kept = [written.kept] * (num_written > 0)
    return rollout, core_request


def segment_seed(seed: int, num_written: int) -> int:
    """Return the seed of a segment that begins after `num_written` tokens.

    vLLM cannot start in the middle of a random stream, so each segment has its own: the same
    whenever and wherever the rollout is resumed, but not that of an uncut rollout."""
    if num_written == 0:
        return seed % 2**63
    key = f"{seed}/{num_written}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


log = logging.getLogger(__name__)


class VllmEngine:
    """One rank of one replica; a `generator.protocol.Engine`.

    `checkpoint` gives the architecture; weights come with the first commit. `rendezvous` is a path
    that no other replica uses. With `keeps_addresses` weights are copied to where vLLM allocated
    them (None: if captured graphs need it). With `records_experts` rollouts have the experts of
    their tokens. Raises ValueError if vLLM is not the supported version,
    or cannot run this checkpoint or config here."""

    def __init__(
        self,
        checkpoint: str,
        config: VllmConfig,
        *,
        rank: int,
        num_ranks: int,
        rendezvous: str,
        run_id: str,
        lora: LoraConfig | None = None,
        keeps_addresses: bool | None = None,
        records_experts: bool = False,
        num_kept_ids: int = 0,
    ) -> None:
        check_installed()
        self._num_kept_ids = num_kept_ids
        if records_experts and config.device != CPU:  # vLLM begins a preempted one's again
            must = "be keep with generator=vllm on GPUs and trainer.routing_replay=auto"
            is_kept = config.kv_after_commit == "keep"
            require(is_kept, "generator.kv_after_commit", must, config.kv_after_commit)
        set_environment(config.device)
        self.architecture = read_any_architecture(checkpoint)
        self.version = -1
        self.num_written_tokens = 0  # since the start
        self.decode_text: Callable[[Sequence[int]], str] | None = None
        self._config = config
        lora = lora or LoraConfig()
        self._core = make_core(
            checkpoint,
            config,
            self.architecture,
            rank=rank,
            num_ranks=num_ranks,
            rendezvous=rendezvous,
            run_id=run_id,
            lora=lora,
            records_experts=records_experts,
            num_kept_ids=num_kept_ids,
        )
        try:
            self._prepare(checkpoint, rank, num_ranks, lora, keeps_addresses, records_experts)
        except Exception:
            end_core(self._core)
            raise

    def _prepare(
        self,
        checkpoint: str,
        rank: int,
        num_ranks: int,
        lora: LoraConfig,
        keeps_addresses: bool | None,
        records_experts: bool,
    ) -> None:
        """Find out how vLLM's model takes new weights, and what is recorded of its rollouts."""
        config = self._config
        self._runner = self._core.model_executor.driver_worker.model_runner
        self._model = self._runner.get_model()
        self._format = format_of(config, self.architecture)
        self._place = rank, num_ranks
        self._adapters: VllmAdapters | None = None
        self._adapter = adapter_request() if lora.is_used else None  # of every rollout
        self._base: Tensor | None = None  # flat memory beside adapters, if layers read it
        if lora.is_used:
            shapes = adapter_shapes(self.architecture, lora)
            self._adapters = VllmAdapters(self._runner, lora, shapes, DTYPES[config.dtype])
        with self._without_adapters():
            self._record(checkpoint, keeps_addresses)
        check_adapters(config, lora, has_experts=bool(self._experts))
        dtypes = {layout.dtype for layout in self._whole.parameters.values()}
        is_plain = config.quantization != "none" or len(dtypes) == 1
        must = f"be 0 with a {self.architecture.model_type} (vLLM keeps some weights in float32)"
        lora.require(is_plain or not lora.is_used, "rank", must)
        self.memory = self._whole if self._adapters is None else self._adapters.memory
        self._records_experts = records_experts
        self._capture: RouterCapture | None = None
        if records_experts and config.device == CPU:
            assert isinstance(self.architecture, Architecture)
            self._capture = RouterCapture(self._runner, self.architecture)
        self._queue = Queue()
        self._running: dict[str, VllmRollout] = {}
        self._num_started = 0
        self._done: list[RequestOutput] = []

    def _record(self, checkpoint: str, keeps_addresses: bool | None) -> None:
        """Find out where the whole model lies in flat memory, and how vLLM gets it from there."""
        config = self._config
        self._parameters = dict(self._model.named_parameters())
        shapes, dtype = parameter_shapes(self.architecture), DTYPES[config.dtype]
        pieces = file_pieces(self.architecture)
        recording = record(self._model, shapes, dtype, self._format, pieces)
        self._places, self._turned = recording.places, recording.turned
        self._experts = recording.experts
        self._is_derived = recording.memory.is_staged
        if self._turned:
            self._check_quantiser()
        if self._is_derived:
            how = "repacks" if config.quantization == "none" else "quantises and repacks"
            log.warning("vLLM %s the weights of %s: they are staged", how, checkpoint)
        if keeps_addresses is None:
            keeps_addresses = not config.enforce_eager  # graphs read where they were captured
        self._whole = replace(recording.memory, is_staged=self._is_derived or keeps_addresses)
        if not self._whole.is_staged:  # views of the flat memory will replace them
            for parameter in self._parameters.values():
                parameter.data = parameter.data.new_empty(0)

    def _without_adapters(self) -> AbstractContextManager[None]:
        """Make the model, inside the block, as vLLM builds it without adapters."""
        return nullcontext() if self._adapters is None else self._adapters.detached()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        if self._done or self._running:
            return True
        return self.version >= 0 and self._queue.num_startable(self.version) > 0

    def load(self, flat: Tensor, folder: str) -> None:
        if self._adapters is not None:
            return load_adapter_boxes(self.memory.parameters, flat, folder)
        load_boxes(self.memory.parameters, flat, folder, self.architecture, self._format)

    def load_base(self, folder: str, dtype: str = "float32") -> dict[str, Fingerprints]:
        whole = self._whole
        device = next(iter(self._runner.kv_caches)).device
        flat = torch.zeros(whole.num_elements, dtype=whole.dtype, device=device)
        number = getattr(torch, dtype)
        load_boxes(whole.parameters, flat, folder, self.architecture, self._format, number)
        sums = sums_of_boxes(whole.parameters, flat, *self._place)
        with self._without_adapters():
            views = self._views(flat)
            self._install(views)
            self._check_bound(views)
        self._base = None if whole.is_staged else flat
        return {key_of(self._format or self._config.dtype): sums}

    def process_weights(self, flat: Tensor) -> dict[str, Tensor]:
        """Return vLLM's parameters as views of `flat`: in the form in which they are loaded or,
        quantised, in the form that vLLM computes with; with adapters, the adapters."""
        return self._views(flat) if self._adapters is None else self._adapters.views(flat)

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        views = {name: place.view(flat) for name, place in self._places.items()}
        return views | {name: views[name].t() for name in self._turned}

    def commit(self, processed: Mapping[str, Tensor], version: int) -> int:
        """See `Engine`. With kv_after_commit=recompute every running rollout is preempted, and its
        keys and values are recomputed before its next token."""
        self._drain()
        if self._adapters is not None:
            self._adapters.commit(processed)
        else:
            self._install(processed)
            if self.version < 0:
                self._check_bound(processed)
        if self._config.kv_after_commit == "recompute":
            self._core.reset_prefix_cache(reset_running_requests=True)
        self.version = version
        return self.num_running

    def _install(self, views: Mapping[str, Tensor]) -> None:
        """Let vLLM compute with the whole model that lies in these views."""
        if self._is_derived:
            process(self._model, self._core.vllm_config.model_config, views, self._experts)
        elif self._whole.is_staged:
            for name, view in views.items():
                self._parameters[name].data.copy_(view)
        else:
            for name, view in views.items():
                self._parameters[name].data = view

    def submit(self, request: Request, written: PartialOutput | None = None) -> None:
        """Queue a rollout. Raises ValueError also if vLLM would sample at another temperature."""
        check_request(
            request,
            context=self._config.max_model_len,
            vocab_size=self.architecture.vocab_size,
            reads_text=self.decode_text is not None,
        )
        check_temperature(f"temperature of row {request.row_id}", request.sampling.temperature)
        self._queue.add(QueuedRequest(request=request, written=written or PartialOutput()))

    def abort_requests(self, row_ids: Sequence[int]) -> None:
        wanted = set(row_ids)
        self._done += self._queue.abort(wanted)
        for running in list(self._running.values()):
            if running.request.row_id in wanted:
                self._stop(running, FinishReason.ABORTED)

    def peek(self, row_id: int) -> Sequence[int]:
        same = (each for each in self._running.values() if each.request.row_id == row_id)
        running = next(same, None)
        return [] if running is None else running.ids[running.turn :]

    def admit(self) -> int:
        """Give vLLM as many rollouts as it may run. Returns 0, because `decode` prefills them."""
        if self.version >= 0:
            free = self._config.max_num_seqs - len(self._running)
            for waiting in self._queue.take(self.version, free):
                number, self._num_started = self._num_started, self._num_started + 1
                length, own = self._config.max_model_len, (self._adapter, self._num_kept_ids)
                running, request = start(waiting, number, self.version, length, *own)
                self._running[running.key] = running
                if self._records_experts:
                    num_prompt = len(waiting.request.prompt_ids)
                    running.record = RolloutRecord(waiting.written.experts, num_prompt)
                if self._capture is not None and running.record is not None:
                    self._capture.records[running.key] = running.record
                self._core.add_request(*self._core.preprocess_add_request(request))
        return 0

    def decode(self) -> list[RequestOutput]:
        """Take one step of vLLM, which prefills, and computes a token for each rollout that it
        schedules."""
        if self._running or self._core.batch_queue:
            self._step()
        done, self._done = self._done, []
        return done

    def movable(self, tag: str) -> list[Tensor]:
        """Return the KV cache, or the weights that are not views of the flat memory."""
        if tag == "kv":
            return list(self._runner.kv_caches)
        own = [] if self._base is None else [self._base]
        return [each.data for each in self._parameters.values()] if self._whole.is_staged else own

    def forget_prompts(self) -> None:
        if not self._core.reset_prefix_cache():
            raise RuntimeError("vLLM's prefix cache must not be in use when its contents are lost")

    def close(self) -> None:
        """End vLLM's core and leave its process group. A second call does nothing."""
        if self._core is not None:
            end_core(self._core)
        self._core = self._runner = self._model = None
        self._parameters = {}

    def _check_quantiser(self) -> None:
        """Raise ValueError unless a trainer quantises as vLLM would, which is tried with one
        layer."""
        assert self._format is not None
        names = [name for name in self._places if name in self._turned]
        prefix = names[0].rpartition("layers.")[0] + "layers.0."
        shapes = {n: self._places[n].shape for n in names if n.startswith(prefix)}
        config = self._core.vllm_config.model_config
        check_quantiser(self._model, config, shapes, self._format)
        self._parameters = dict(self._model.named_parameters())

    def _check_bound(self, processed: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError, at the first commit, unless vLLM's parameters equal the flat
        memory."""
        held = dict(self._model.named_parameters())
        as_loaded = {n for n in processed if is_as_loaded(held[n], processed[n])} - self._experts
        is_copied = self._whole.is_staged
        for name in as_loaded if self._is_derived else processed:
            mine, theirs = held[name].data, processed[name]
            theirs = theirs.to(mine.device) if is_copied else theirs  # it may be host memory
            if not (torch.equal(mine, theirs) if is_copied else mine.is_set_to(theirs)):
                raise RuntimeError(f"vLLM's {name} must equal the weight buffer after a commit")
        how = "copied at a commit" if is_copied else "direct"
        derived = sorted({".".join(n.split(".")[-2:]) for n in processed.keys() - as_loaded})
        rest = f"; derived at a commit: {len(processed) - len(as_loaded)}, {', '.join(derived)}"
        log.info(
            "vLLM: parameters as loaded, %s: %d%s", how, len(as_loaded), rest if derived else ""
        )

    def _step(self) -> None:
        outputs, was_executed = self._core.step_fn()
        self._core.post_step(model_executed=was_executed)
        for output in outputs[0].outputs if outputs else ():
            running = self._running.get(output.request_id)
            if running is not None:  # else: aborted while its token was computed
                self._append(running, output)

    def _append(self, running: VllmRollout, output: Any) -> None:
        if output.prefill_stats is not None and running.request.resume:
            running.num_kept = output.prefill_stats.num_cached_tokens
        if output.routed_experts is not None and running.record is not None:
            running.record.add(running.num_returned, output.routed_experts)
            running.num_returned += len(output.routed_experts)
        if output.new_token_ids:
            running.ids += output.new_token_ids
            found = output.new_logprobs
            running.logprobs += found.logprobs[:, 0].tolist()
            if self._num_kept_ids:  # the first column is the token itself
                kept = np.asarray(found.logprob_token_ids[:, 1:], np.int32)
                is_out = np.isneginf(np.asarray(found.logprobs[:, 1:]))
                running.kept.append(np.where(is_out, np.int32(NONE), kept))
            running.versions += [self.version] * len(output.new_token_ids)
            self.num_written_tokens += len(output.new_token_ids)
        reason = None if output.finish_reason is None else str(output.finish_reason)
        if reason not in (None, "stop", "length"):
            raise RuntimeError(f"vLLM ended row {running.request.row_id} with {reason}")
        if reason == "stop":
            self._retire(running, FinishReason.STOP)
        elif completes_stop_string(
            running.request.sampling, running.ids[running.turn :], self.decode_text
        ):
            self._stop(running, FinishReason.STOP)
        elif reason == "length":
            is_full = len(running.ids) >= running.limit
            self._retire(running, FinishReason.LENGTH if is_full else FinishReason.SEGMENT)

    def _stop(self, running: VllmRollout, reason: FinishReason) -> None:
        """End a rollout that vLLM would continue."""
        self._core.abort_requests([running.key])
        self._retire(running, reason)

    def _retire(self, running: VllmRollout, reason: FinishReason) -> None:
        num_fed = len(running.request.prompt_ids) + len(running.ids) - 1
        is_ended = reason is not FinishReason.ABORTED
        if running.record is not None and is_ended and running.record.num_rows < num_fed:
            raise RuntimeError(
                f"vLLM must return the experts of {num_fed} tokens of row "
                f"{running.request.row_id}, got those of {running.record.num_rows}"
            )
        del self._running[running.key]
        if self._capture is not None:
            self._capture.records.pop(running.key, None)
        self._done.append(
            RequestOutput(request=running.request, written=running.written(), reason=reason)
        )

    def _drain(self) -> None:
        """Finish the steps in flight: with asynchronous scheduling (CUDA) there may be some."""
        if not self._core.batch_queue:
            return
        from vllm.v1.core.sched.interface import PauseState

        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._core.batch_queue:
            self._step()
        self._core.scheduler.set_pause_state(PauseState.UNPAUSED)
