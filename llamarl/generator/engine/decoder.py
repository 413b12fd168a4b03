"""The decoder of the embedded engine, and the runner of its steps."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from llamarl.core.device.devices import platform_of
from llamarl.core.device.platform import Graphs, Replay
from llamarl.core.process_group import JOIN, form_group, meet
from llamarl.generator.engine.kv_cache import PLAN_STEPS, CpuKVCache, PaddedKVCache, PaddedRows
from llamarl.generator.engine.sampling import sample
from llamarl.generator.engine.scheduler import DecodeStep, RunningBatch
from llamarl.generator.engine.weights import (
    AdaptedMatrix,
    Experts,
    LayerWeights,
    Matrix,
    Weights,
    widened_mm,
)
from llamarl.model.architecture import Architecture
from llamarl.model.attention import attend_causally
from llamarl.model.experts import (
    arrange,
    choose,
    combine,
    gates,
    grouped_mm,
    router_probs,
    spread,
)
from llamarl.model.transformer import rope_tables

Cache = CpuKVCache | PaddedKVCache
LIMIT = timedelta(minutes=10)  # between two ranks within a step


class TensorParallelGroup:
    """The tensor-parallel ranks of one replica, which meet at the file `rendezvous` that no other
    group uses. `sum` and `gather` return equal values on all of them, bit for bit, so all sample
    the same tokens.

    It waits for all ranks. It and its methods must be called from the compute thread."""

    def __init__(self, rendezvous: str, rank: int, num_ranks: int, device: torch.device) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._platform = platform_of(device)
        store = meet(rendezvous, rank, num_ranks, JOIN)
        self._group = form_group(device, store, rank, num_ranks, LIMIT)

    def sum(self, x: Tensor) -> Tensor:
        """Sum a contiguous tensor over the ranks, in place, and return it."""
        self._group.allreduce([x]).wait()
        return x

    def gather(self, columns: Tensor) -> Tensor:
        """Return the ranks' columns [n, m] side by side: [n, m * num_ranks]."""
        num_rows, width = columns.shape
        parts = columns.new_empty(self.num_ranks * num_rows, width)
        self._group._allgather_base(parts, columns.contiguous()).wait()
        return parts.view(-1, num_rows, width).transpose(0, 1).reshape(num_rows, -1)

    def close(self) -> None:
        """Leave the group; a rank that is still computing fails."""
        if self._platform.runs_ahead and self._group is not None:
            self._group.abort()
        self._group = None


class Decoder:
    """Runs `weights`, which the engine sets at a commit, over `cache`; with a `group`, one rank's
    part of both.

    A row of the fused qkv product is [heads + 2 * kv_heads, head_dim]: queries, keys, values."""

    def __init__(
        self, architecture: Architecture, cache: Cache, group: TensorParallelGroup | None = None
    ) -> None:
        self.architecture = architecture
        self.cache = cache
        self.weights: Weights | None = None
        self._group = group
        num_ranks = group.num_ranks if group is not None else 1
        self._num_heads = architecture.num_heads // num_ranks
        self._num_rotated = self._num_heads + architecture.num_kv_heads // num_ranks
        self._add = add_product if group is None else self._add_sum
        # A layer with experts -> its place among these.
        self._sparse = {layer: place for place, layer in enumerate(architecture.sparse_layers)}
        cos, sin = rope_tables(architecture, cache.num_positions)
        # The tables cover both halves of a head, so that the rotation is x * cos + roll(x) * sin:
        # in float32, as in the trainer, whatever the dtype of x.
        self._cos = torch.cat([cos, cos], dim=1).to(cache.device)
        self._sin = torch.cat([-sin, sin], dim=1).to(cache.device)
        width = architecture.hidden_size
        self._norm_floor, self._head_norm_floor = (
            torch.full((), (size * architecture.norm_eps) ** 0.5, device=cache.device)
            for size in (width, architecture.head_dim)
        )

    def prefill(
        self,
        sequences: list[tuple[int, int, np.ndarray]],
        *,
        recorded: dict[int, int] | None = None,
    ) -> None:
        """Compute keys and values of tokens, but no logits, for each (slot, position of the first,
        int tokens [t]). The positions before are in the slot's cache. The experts of the tokens
        before position `recorded[slot]` are recorded (None: of all).

        Whole sequences of equal length share one attention call."""
        whole = sorted((each for each in sequences if not each[1]), key=lambda each: len(each[2]))
        later = [each for each in sequences if each[1]]
        sequences = [*whole, *later]
        lengths = [len(ids) for *_, ids in sequences]
        same = itertools.groupby(lengths[: len(whole)])
        runs = [(len(list(equal)), length) for length, equal in same]
        tokens = np.concatenate([ids for *_, ids in sequences])
        positions = np.concatenate(
            [np.arange(start, start + len(ids)) for _, start, ids in sequences]
        )
        slots = np.repeat(np.array([slot for slot, *_ in sequences]), lengths)
        chosen_rows = np.arange(len(tokens))
        if recorded is not None:
            ends = np.repeat([recorded[slot] for slot, *_ in sequences], lengths)
            chosen_rows = np.flatnonzero(positions < ends)
        weights = self.weights
        assert weights is not None, "there is a version"
        fed = [torch.from_numpy(tokens), torch.from_numpy(positions), *_continued_rows(later)]
        where = self.cache.write_index(slots, positions)
        of_record = self.cache.write_index(slots[chosen_rows], positions[chosen_rows])
        host = [*fed, *where, *of_record, torch.from_numpy(chosen_rows)]
        sent = platform_of(self.cache.device).send(host, self.cache.device)
        ids, rows, *continued = sent[: len(fed)]
        places, kept = sent[len(fed) : len(fed) + len(where)], sent[len(fed) + len(where) :]
        record = Record(kept[:-1], kept[-1])
        x = self._embed(weights, ids)
        cos, sin = (table.index_select(0, rows).unsqueeze(1) for table in (self._cos, self._sin))
        for index, layer in enumerate(weights.layers):
            queries, keys, values = self._qkv(layer, x, cos, sin)
            self.cache.write(index, places, keys, values)
            # The last layer's output is not used, but its experts are recorded.
            if index < len(weights.layers) - 1 or index in self._sparse:
                attended = self._causal(queries, keys, values, runs)
                attended += self._continued(index, queries, later, *continued)
                self._finish_layer(index, layer, x, torch.cat(attended), record)

    def decode(
        self, tokens: Tensor, positions: Tensor, write_index: Sequence[Tensor], plan: Any
    ) -> Tensor:
        """Return float32 logits [n, vocab] after one more token in each of n slots.

        `tokens` int [n] are at `positions` int64 [n]; the cache's `write_index` and `plan` say
        where the keys and values of these rows go, and what the tokens attend to."""
        weights = self.weights
        assert weights is not None, "there is a version"
        x = self._embed(weights, tokens)
        # They are expanded to all heads once, so that all layers' rotations read contiguous memory.
        shape = (len(positions), self._num_rotated, self.architecture.head_dim)
        cos = self._cos.index_select(0, positions).unsqueeze(1).expand(shape).contiguous()
        sin = self._sin.index_select(0, positions).unsqueeze(1).expand(shape).contiguous()
        for index, layer in enumerate(weights.layers):
            queries, keys, values = self._qkv(layer, x, cos, sin)
            self.cache.write(index, write_index, keys, values)
            attended = self.cache.attend(index, queries, plan)
            self._finish_layer(index, layer, x, attended, Record(write_index))
        logits = float32_product(normalize(x, weights.norm, self._norm_floor), weights.head)
        return logits if self._group is None else self._group.gather(logits)

    def _embed(self, weights: Weights, tokens: Tensor) -> Tensor:
        """Return the rows [n, hidden] of the embedding, of which each rank holds a range."""
        if self._group is None:
            return weights.embedding.index_select(0, tokens)
        num_held = len(weights.embedding)
        local = tokens - self._group.rank * num_held
        is_held = (local >= 0) & (local < num_held)
        x = weights.embedding.index_select(0, local.clamp_(0, num_held - 1))
        return self._group.sum(x.mul_(is_held.unsqueeze(1)))

    def _add_sum(self, total: Tensor, x: Tensor, matrix: Matrix) -> None:
        """Add all ranks' `x` times `matrix` to `total`, in place."""
        assert self._group is not None
        total.add_(self._group.sum(product(x, matrix)))

    def _qkv(
        self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [n, heads, head_dim], and rotated keys and values [n, kv_heads,
        head_dim]."""
        h = normalize(x, layer.input_norm, self._norm_floor)
        qkv = product(h, layer.qkv, layer.qkv_bias)
        num_heads, dim = self._num_heads, self.architecture.head_dim
        qkv = qkv.view(x.shape[0], -1, dim)
        heads = qkv[:, : self._num_rotated]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = self._normalize_heads(heads[:, :num_heads], layer.q_norm)
            others = self._normalize_heads(heads[:, num_heads:], layer.k_norm)
            heads = torch.cat([queries, others], 1)
        rotated = (heads * cos).addcmul_(torch.roll(heads, dim // 2, 2), sin).to(x.dtype)
        return rotated[:, :num_heads], rotated[:, num_heads:], qkv[:, self._num_rotated :]

    def _normalize_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Normalise heads [n, heads, head_dim], each by itself or all together."""
        if not self.architecture.norms_all_heads:
            return normalize(heads, weight, self._head_norm_floor)
        floor = (weight.shape[0] * self.architecture.norm_eps) ** 0.5
        flat = heads.flatten(1)
        return normalize(flat, weight, flat.new_full((), floor, dtype=torch.float32)).view_as(heads)

    def _finish_layer(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        attended: Tensor,
        record: Record,
    ) -> None:
        """Add the attention's output and the MLP of the layer with this `index` to the residual
        stream `x`, in place; where it has experts, the tokens' are recorded."""
        self._add(x, attended, layer.output)
        if layer.output_bias is not None:
            x.add_(layer.output_bias)
        h = normalize(x, layer.mlp_norm, self._norm_floor)
        if layer.router is not None:
            self._add_experts(index, layer, x, h, record)
            return
        assert layer.gate_up is not None
        assert layer.down is not None
        gate, up = product(h, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
        self._add(x, functional.silu(gate).mul_(up), layer.down)
        if layer.down_bias is not None:
            x.add_(layer.down_bias)

    def _add_experts(
        self, index: int, layer: LayerWeights, x: Tensor, h: Tensor, record: Record
    ) -> None:
        """Add the outputs of the chosen experts for `h` to `x`, in place, and record the choice.
        With a group each rank has an equal share of the experts, and the ranks' sums are added."""
        sizes = self.architecture.experts
        assert sizes is not None
        assert layer.router is not None
        assert layer.expert_gate_up is not None
        assert layer.expert_down is not None
        probs = router_probs(h, layer.router.t())
        chosen = choose(probs, sizes.num_chosen)
        noted = chosen if record.rows is None else chosen[record.rows]
        self.cache.record(self._sparse[index], record.places, noted)
        group, num_held, ordered = self._group, sizes.num_experts, chosen
        if group is not None:  # rows of this rank's experts come first
            num_held //= group.num_ranks
            ordered = (chosen - group.rank * num_held) % sizes.num_experts
        arrangement = arrange(ordered, sizes.num_experts)
        rows, counts = spread(h, arrangement, sizes.num_chosen), arrangement.counts[:num_held]
        gate, up = expert_product(rows, layer.expert_gate_up, counts).chunk(2, dim=1)
        found = expert_product(functional.silu(gate).mul_(up), layer.expert_down, counts)
        if group is not None:  # the others have no product here
            is_other = torch.arange(len(found), device=found.device) >= counts.sum()
            found.masked_fill_(is_other[:, None], 0.0)
        mixed = combine(found, arrangement, gates(probs, chosen, sizes))
        x.add_(mixed if self._group is None else self._group.sum(mixed))

    def _causal(
        self, queries: Tensor, keys: Tensor, values: Tensor, runs: list[tuple[int, int]]
    ) -> list[Tensor]:
        """Return causal attention inside each sequence, for each of `runs` of (sequences, length):
        [n, width]."""
        parts = []
        start = 0
        for count, length in runs:
            q, k, v = (
                part[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)
                for part in (queries, keys, values)
            )
            out = attend_causally(q, k, v)
            parts.append(out.transpose(1, 2).reshape(count * length, -1))
            start += count * length
        return parts

    def _continued(
        self,
        layer: int,
        queries: Tensor,
        later: list[tuple[int, int, np.ndarray]],
        *rows: Tensor,
    ) -> list[Tensor]:
        """Return the attention of the last rows of `queries`, which belong to `later` sequences,
        over their slots' caches up to themselves, in one call for all: [n, width], or nothing.
        `rows` are the sequences' `_continued_rows`."""
        if not later:
            return []
        slots, seen = rows
        nums = [len(ids) for *_, ids in later]
        q = nn.utils.rnn.pad_sequence(
            list(queries[len(queries) - sum(nums) :].split(nums)), batch_first=True
        )
        k, v = self.cache.read(layer, slots, seen.shape[-1])
        # Query heads that share a key head become query positions: fused kernels of GPUs take
        # masks, or grouped heads, not both.
        num_rows, num_kv_heads, width = len(q), k.shape[1], q.shape[1]
        grouped = q.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        mask = seen.repeat(1, 1, grouped.shape[2], 1)
        out = functional.scaled_dot_product_attention(grouped.flatten(2, 3), k, v, attn_mask=mask)
        out = out.view(num_rows, num_kv_heads, -1, width, out.shape[-1])
        attended = out.permute(0, 3, 1, 2, 4).flatten(2)
        return [row[:num] for row, num in zip(attended, nums, strict=True)]


class Record(NamedTuple):
    """The tokens whose experts are recorded: `rows` of those at hand (None: all), and where the
    cache has their record (its `write_index`)."""

    places: Sequence[Tensor]
    rows: Tensor | None = None


def _continued_rows(later: list[tuple[int, int, np.ndarray]]) -> list[Tensor]:
    """Return the slots int64 [n] of sequences of which the cache has the beginning, and the
    positions of the cache that each of their tokens sees, bool [n, 1, longest of the tokens,
    longest]; [] without any."""
    if not later:
        return []
    slots, starts = (torch.tensor([each[field] for each in later]) for field in (0, 1))
    nums = torch.tensor([len(ids) for *_, ids in later])
    place = starts[:, None] + torch.arange(int(nums.max()))  # of each query
    seen = torch.arange(int((starts + nums).max())) <= place[:, :, None]
    return [slots, seen.unsqueeze(1)]


def float32_product(x: Tensor, matrix: Matrix) -> Tensor:
    """Return `x` [n, in] times `matrix`: float32 [n, out], with operands of any dtype.

    It is for logits: rounding them to bfloat16 would change log-probs by hundredths, and so
    pi/mu."""
    if isinstance(matrix, Tensor):
        return widened_mm(x, matrix)
    return matrix.product(x, torch.float32)


def product(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """Return `x` [n, in] times `matrix`, plus `bias`: [n, out]."""
    if isinstance(matrix, Tensor):
        return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)
    out = matrix.product(x)
    return out if bias is None else out.add_(bias)


def expert_product(x: Tensor, experts: Experts, counts: Tensor) -> Tensor:
    """Return the products [rows, out] of `x` [rows, in], sorted by expert, with the matrix of each
    row's expert; `counts` int64 [experts]."""
    if isinstance(experts, Tensor):
        return grouped_mm(x, experts, counts)
    return experts.product(x, counts)


def add_product(total: Tensor, x: Tensor, matrix: Matrix) -> None:
    """Add `x` times `matrix` to `total`, in place."""
    if isinstance(matrix, AdaptedMatrix):
        add_product(total, x, matrix.base)
        matrix.add(total, x)
    elif isinstance(matrix, Tensor):
        torch.addmm(total, x, matrix, out=total)
    else:
        total.add_(matrix.product(x))


def normalize(x: Tensor, weight: Tensor, floor: Tensor) -> Tensor:
    """Return the RMSNorm over the last dimension: x / sqrt(mean(x^2) + eps) * w, computed in
    float32.

    `weight` is w * sqrt(size), float32, and `floor` sqrt(size * eps): with these the quotient is x
    / hypot(|x|, floor) * weight, which takes few operations."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.div(x, torch.hypot(norm, floor, out=norm)).mul_(weight).to(x.dtype)


class EagerRunner:
    """Launches every operation by itself, over occupied slots only.

    `keeps_addresses`: at a commit weights must be overwritten, not replaced. `num_ahead`: steps
    that may be running while another one is launched."""

    keeps_addresses = False
    num_ahead = 0

    def __init__(self, decoder: Decoder, cache: CpuKVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._plan: list[PaddedRows] = []
        self._slots = np.empty(0, np.int64)
        self._num_computed = 0  # since `arrange`

    def arrange(self, running: RunningBatch) -> None:
        """Prepare rows and sampling parameters for the next PLAN_STEPS steps."""
        self._slots = running.by_length()
        self._plan = self._cache.plan(self._slots, running.cached[self._slots] + 1)
        self._sampling = running.sampling_rows(self._slots)
        self._num_computed = 0

    def launch(self, running: RunningBatch, version: int) -> DecodeStep:
        """Launch one step of all rollouts."""
        slots = self._slots
        positions = running.cached[slots]
        uniform = torch.from_numpy(running.uniform[slots, positions + 1])
        tokens, places = map(torch.from_numpy, (running.sequence[slots, positions], positions))
        if self._num_computed:
            self._cache.lengthen(self._plan, places)
        self._num_computed += 1
        index = self._cache.write_index(slots, positions)
        logits = self._decoder.decode(tokens, places, index, self._plan)
        num_kept = running.kept.shape[2]
        drawn = sample(logits, self._sampling, uniform.unsqueeze(1), num_kept)
        ids, logprobs, kept = (each.numpy() for each in drawn)
        running.in_flight[slots] += 1
        read = lambda: (ids, logprobs, kept)  # noqa: E731
        return DecodeStep(slots, running.num_released[slots], version, read)

    def forget(self) -> None:
        """Drop what refers to addresses of weights or cache, which is nothing here."""


class PaddedRunner:
    """Runs steps of few shapes, each recorded by `graphs` when it first occurs; without `graphs`
    every operation is launched by itself.

    A step needs nothing of the step before from the host: tokens that only the device has yet are
    taken from there. So one step may be running while the next is launched, and the host's work on
    a step overlaps the next one."""

    num_ahead = 1

    def __init__(self, decoder: Decoder, cache: PaddedKVCache, graphs: Graphs | None) -> None:
        self.keeps_addresses = graphs is not None
        self._decoder, self._cache, self._graphs = decoder, cache, graphs
        self._platform = platform_of(cache.device)
        self._num_rows = self._length = 0
        # Inputs have five rows of slots: positions, tokens of the host, whether these count, random
        # numbers (as float64), lengths to attend to. They are in host memory once for each step
        # that may be running, and at the address that the graphs read.
        shape = (5, cache.num_slots)
        self._inputs = deque(
            self._platform.empty_host(shape, torch.int64) for _ in range(1 + self.num_ahead)
        )
        for each in self._inputs:
            each.numpy().fill(0)
        self._static = torch.zeros(shape, dtype=torch.int64, device=cache.device)
        self._newest = torch.zeros(cache.num_slots, dtype=torch.int64, device=cache.device)
        self._replays: dict[tuple[int, int], Replay] = {}

    def arrange(self, running: RunningBatch) -> None:
        """See `EagerRunner.arrange`."""
        occupied = np.flatnonzero(running.occupied)
        if not len(occupied):
            return
        self._num_rows = padded_rows(int(occupied[-1]) + 1, self._cache.num_slots)
        longest = int((running.cached + running.in_flight)[occupied].max()) + PLAN_STEPS
        self._length = self._cache.bucket(longest)
        self._sampling = running.sampling_rows(np.arange(self._num_rows))

    def launch(self, running: RunningBatch, version: int) -> DecodeStep:
        """See `EagerRunner.launch`."""
        rows = np.arange(self._num_rows)
        slots = rows[running.occupied[rows]]
        self._inputs.rotate()
        self._static.copy_(self._fill(running, rows), non_blocking=True)
        uniform = self._static[3, : self._num_rows].view(torch.float64).float()
        num_kept = running.kept.shape[2]
        drawn = sample(self._compute(), self._sampling, uniform.unsqueeze(1), num_kept)
        ids, logprobs, kept = drawn
        self._newest[: self._num_rows] = ids
        columns = torch.stack([ids.int(), logprobs.view(torch.int32)])
        written = self._platform.fetch(torch.cat([columns, kept.t()]))
        running.in_flight[slots] += 1

        def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            found = written.wait().numpy()[:, slots]
            return found[0], found[1].view(np.float32), found[2:].T

        return DecodeStep(slots, running.num_released[slots], version, read)

    def forget(self) -> None:
        self._replays.clear()
        if self._graphs is not None:
            self._graphs.forget()

    def _fill(self, running: RunningBatch, rows: np.ndarray) -> Tensor:
        """Fill in the host's part of a step and return it. A rollout that will turn out to have
        ended at its last position is computed there once more. A row without a rollout reads one
        position only."""
        last = running.sequence.shape[1] - 1
        is_known = running.in_flight[rows] == 0
        positions = np.minimum(running.cached[rows] + running.in_flight[rows], last)
        filled = self._inputs[0].numpy()[:, : len(rows)]
        filled[0], filled[1] = positions, running.sequence[rows, positions]
        filled[2], filled[4] = is_known, np.where(running.occupied[rows], positions + 1, 1)
        filled[3].view(np.float64)[:] = running.uniform[rows, np.minimum(positions + 1, last)]
        return self._inputs[0]

    def _compute(self) -> Tensor:
        """Return float32 logits [rows, vocab], from a graph if there are graphs."""
        if self._graphs is None:
            return self._decode()
        shape = (self._num_rows, self._length)
        if shape not in self._replays:
            self._replays[shape] = self._graphs.record(self._decode)
        return self._replays[shape]()

    def _decode(self) -> Tensor:
        """Return float32 logits [rows, vocab]. Run twice, it writes the same keys and values
        twice."""
        positions, known, is_known, _, lengths = self._static[:, : self._num_rows]
        tokens = torch.where(is_known > 0, known, self._newest[: self._num_rows])
        index = self._cache.next_index(positions)
        plan = self._cache.plan(lengths, self._length)
        return self._decoder.decode(tokens, positions, index, plan)


ModelRunner = EagerRunner | PaddedRunner


def padded_rows(num_rows: int, most: int) -> int:
    """Return `num_rows` rounded up to a power of two or one and a half of it, and at most to
    `most`."""
    power = 1 << (num_rows - 1).bit_length()
    between = power * 3 // 4
    return min(between if power >= 4 and num_rows <= between else power, most)
