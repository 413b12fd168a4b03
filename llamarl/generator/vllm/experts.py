"""The record of the experts that vLLM sends tokens to.

On GPUs vLLM returns it itself (`enable_return_routed_experts`). On CPUs it cannot, so its routers
are asked here. Rows lie by place in the KV cache too, so that a prompt of the prefix cache has
those that it was computed with."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.model.architecture import Architecture


class RolloutRecord:
    """The record of one rollout in vLLM: `rows` [fed, layers, k] of its tokens from the prompt's
    first one on, beginning with `before`, those of earlier segments."""

    def __init__(self, before: np.ndarray, num_prompt: int) -> None:
        self._parts = [before] if len(before) else []
        self._num_before, self._num_prompt = len(before), num_prompt
        self.num_rows = len(before)

    def add(self, first: int, rows: np.ndarray) -> None:
        """Add the rows of tokens that were fed, from position `first` on. A row that is there stays
        that of the weights that wrote the token behind it, but for the tokens of a prompt before
        its last one, behind which none was written."""
        assert first <= self.num_rows, "a token was fed before its record began"
        renewed = min(first + len(rows), self._num_prompt - 1, self.num_rows)
        if renewed > max(first, self._num_before):
            whole, start = self.rows(self.num_rows), max(first, self._num_before)
            whole[start:renewed] = rows[start - first : renewed - first]
        if (added := rows[self.num_rows - first :]).size:
            self._parts.append(added)
            self.num_rows += len(added)

    def rows(self, num_fed: int) -> np.ndarray:
        """Return the first `num_fed` rows, or as many as there are."""
        if len(self._parts) != 1:
            empty = np.empty((0, 0, 0), np.uint8)
            self._parts = [np.concatenate(self._parts) if self._parts else empty]
        elif not self._parts[0].flags.writeable:
            self._parts = [self._parts[0].copy()]
        return self._parts[0][:num_fed]


class RouterCapture:
    """Captures what the routers of vLLM's model choose in each step of `runner`, on a CPU.

    Raises ValueError if the model's layers with experts are not the architecture's."""

    def __init__(self, runner: Any, architecture: Architecture) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        sizes, layers = architecture.experts, architecture.sparse_layers
        assert sizes is not None
        self._runner = runner
        modules = [each for each in runner.get_model().modules() if isinstance(each, MoERunner)]
        if len(modules) != len(layers):
            raise ValueError(f"vLLM must have experts in {len(layers)} layers, got {len(modules)}")
        self._chosen: list[Tensor | None] = [None] * len(modules)
        for place, module in enumerate(modules):
            module.router.set_capture_fn(partial(self._capture, place))
        self._dtype = np.dtype(sizes.index_dtype)
        cache = runner.vllm_config.cache_config
        self._block_size = cache.block_size
        shape = (cache.num_gpu_blocks * cache.block_size, len(modules), sizes.num_chosen)
        self._by_slot = np.zeros(shape, self._dtype)
        self.records: dict[str, RolloutRecord] = {}
        """By the key of a request; the engine adds and removes them."""
        self._execute = runner.execute_model
        runner.execute_model = self._observed

    def _capture(self, place: int, chosen: Tensor) -> None:
        self._chosen[place] = chosen

    def _observed(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run vLLM's step, and keep what its routers chose."""
        self._chosen = [None] * len(self._chosen)
        found = self._execute(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self._keep(scheduler_output.num_scheduled_tokens)
        return found

    def _keep(self, num_scheduled: dict[str, int]) -> None:
        chosen = [each for each in self._chosen if each is not None]
        assert len(chosen) == len(self._chosen), "a router was not asked"
        rows = torch.stack(chosen, 1).numpy().astype(self._dtype)
        batch, start = self._runner.input_batch, 0
        table = batch.block_table[0].get_numpy_array()
        for index, key in enumerate(batch.req_ids):
            num, first = num_scheduled[key], int(batch.num_computed_tokens_cpu[index])
            own, start = rows[start : start + num], start + num
            self._by_slot[self._slots(table[index], first, first + num)] = own
            record = self.records.get(key)
            if record is None:
                continue  # it was given up
            if record.num_rows < first:  # the rest was in the prefix cache
                slots = self._slots(table[index], record.num_rows, first)
                record.add(record.num_rows, self._by_slot[slots])
            record.add(first, own)

    def _slots(self, blocks: np.ndarray, first: int, last: int) -> np.ndarray:
        """Return the places in the KV cache of the positions from `first` to before `last`."""
        size, positions = self._block_size, np.arange(first, last)
        return blocks[positions // size] * size + positions % size
