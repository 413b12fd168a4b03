"""A tensor-parallel rank of vLLM that takes whole parameters by vLLM's own reload."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from llamarl.config import VllmConfig
from llamarl.generation.vllm.vllm_engine import VllmEngine
from weights_bench.model import NUM_RANKS, Model, config_json
from weights_bench.ranks import form_group, received


class VllmRank:
    """vLLM with random weights; nothing is decoded."""

    def __init__(self, model: Model, rank: int, folder: str) -> None:
        self._model, self._rank, self._folder = model, rank, folder

    def start(self, folder: str, label: str) -> None:
        """Make the engine, then meet trainer rank 0."""
        checkpoint = Path(self._folder) / f"checkpoint-{self._rank}"
        checkpoint.mkdir(parents=True)
        text = json.dumps(config_json(self._model.architecture, self._model.dtype))
        (checkpoint / "config.json").write_text(text)
        self._engine = VllmEngine(
            str(checkpoint),
            VllmConfig(
                num_ranks=NUM_RANKS,
                dtype=self._model.dtype,
                max_model_len=128,
                max_num_seqs=4,
                kv_cache_bytes=1 << 26,
            ),
            rank=self._rank,
            num_ranks=NUM_RANKS,
            rendezvous=f"{self._folder}/vllm-rendezvous",
            run_id="bench",
        )
        memory = self._engine.memory  # the engine has none of its own for its weights
        self._flat = torch.zeros(memory.num_elements, dtype=memory.dtype)
        self._engine.commit(self._engine.process_weights(self._flat), 0)
        self._runner = self._engine._core.model_executor.driver_worker.model_runner
        self._group = form_group(f"{folder}/{label}-all", 1 + self._rank, 1 + NUM_RANKS)

    @torch.no_grad()
    def receive(self) -> None:
        """Layer by layer as parameters come; vLLM slices them."""
        from vllm.model_executor.model_loader.reload import layerwise

        model = self._runner.get_model()
        layerwise.initialize_layerwise_reload(model)
        model.load_weights(received(self._group, self._model))
        layerwise.finalize_layerwise_reload(model, self._engine._core.vllm_config.model_config)

    def check(self) -> None:
        """RuntimeError unless a matrix by rows and one by columns arrived."""
        from weights_bench.model import DTYPES, generator_layouts, values

        layouts, _ = generator_layouts(self._model, self._rank)
        live = dict(self._runner.get_model().named_parameters())
        for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
            expected = values(name, layouts[name].boxes[0], DTYPES[self._model.dtype])
            if not torch.equal(live[name][: len(expected)], expected):
                raise RuntimeError(f"{name} did not arrive as it was sent")
