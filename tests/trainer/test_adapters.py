"""Adapters over real ranks: every layout trains as one process, and counts frozen weights once."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

from llamarl.core.config import EmbeddedConfig, LoraConfig, TrainerConfig, TransformersConfig
from llamarl.core.process_group import join, leave
from llamarl.core.records import PROMPT_IDS, RESPONSE_IDS
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.engine.weights import BufferLayout, load_boxes, sums_of_boxes
from llamarl.model import adapters as adapter_files
from llamarl.model.architecture import read_architecture
from llamarl.publish.comparison import Fingerprints, add_up, compare_frozen
from llamarl.publish.fingerprint import key_of, shard_sums
from llamarl.trainer.parallel import gather, make_mesh, mesh_shape, parameter_placements
from llamarl.trainer.passes import micro_batch
from llamarl.trainer.policy import Policy, SavedShards
from tests.adapter_oracle import deltas, random_adapters
from tests.quantised_oracle import make_formats
from tests.tiny_checkpoints import load, write_checkpoint

pytestmark = pytest.mark.full

LORA = LoraConfig(rank=3, alpha=5.0)
FORMATS = make_formats()
KINDS = ["float32", "bfloat16", *FORMATS.values()]
LENGTHS = (30, 5, 11)


def rollouts() -> dict[str, list[np.ndarray]]:
    source = np.random.default_rng(1)
    rows = [source.integers(0, 62, length) for length in LENGTHS]
    return {PROMPT_IDS: [row[:1] for row in rows], RESPONSE_IDS: [row[1:] for row in rows]}


async def train(
    rank: int, num_ranks: int, rendezvous: str, checkpoint: str, adapter: str, configs: list
) -> list[dict[str, Any]]:
    """What each layout makes of one micro-batch per data rank."""
    join(rendezvous, rank, num_ranks, torch.device("cpu"))
    try:
        return [train_one(rank, num_ranks, checkpoint, adapter, config) for config in configs]
    finally:
        leave()


def train_one(
    rank: int, num_ranks: int, checkpoint: str, adapter: str, config: TrainerConfig
) -> dict[str, Any]:
    policy = Policy.load(checkpoint, make_mesh("cpu", config), config, 0, adapter=adapter)
    columns, data_rank = rollouts(), rank // config.tensor_parallel
    rows = range(len(LENGTHS))[data_rank :: config.num_data_ranks]
    packed = micro_batch(columns, rows, policy.model.num_tensor_ranks)
    policy.model(packed, 0.8).logprobs.sum().backward()
    assert all(parameter.grad is None for parameter in policy.frozen.values())
    expected = parameter_placements(read_architecture(checkpoint), config)
    is_sharded = config.num_shard_ranks > 1  # else FSDP leaves the frozen weights alone
    for name, each in {**policy.parameters, **(policy.frozen if is_sharded else {})}.items():
        assert tuple(each.device_mesh.shape) == (*mesh_shape(config).values(),), name
        assert each.placements == expected[name], name
    gradients = {name: gather(p.grad).clone().numpy() for name, p in policy.parameters.items()}
    policy.scale_gradients(2.0, 1e-3)
    policy.update(0.1)
    return {
        "gradients": gradients,
        "updated": {name: gather(p).numpy() for name, p in policy.parameters.items()},
        "sums": shard_sums(policy.frozen, KINDS, rank, num_ranks, config.replicate),
    }


def in_one_process(checkpoint: str, adapters: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Gradients of the same loss, through W + scale B A."""
    model = load(checkpoint)
    own = {name: each.detach() for name, each in model.named_parameters()}
    leaves = {name: each.clone().requires_grad_() for name, each in adapters.items()}
    added = deltas(leaves, LORA)
    whole = {name: each + added[name] if name in added else each for name, each in own.items()}
    packed = micro_batch(rollouts(), range(len(LENGTHS)), 1)
    functional_call(model, whole, (packed, 0.8)).logprobs.sum().backward()
    return {name: each.grad.numpy() for name, each in leaves.items() if each.grad is not None}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 44}
    return write_checkpoint(folder, vocab_size=76, attention_bias=True, **sizes)


LAYOUTS: dict[int, list[TrainerConfig]] = {
    1: [TrainerConfig(lora=LORA), TransformersConfig(lora=LORA)],
    2: [
        TrainerConfig(num_ranks=2, tensor_parallel=2, lora=LORA, reshard_after="step"),
        TransformersConfig(num_ranks=2, lora=LORA, activation_checkpointing="full"),
    ],
    4: [
        TrainerConfig(num_ranks=4, lora=LORA, activation_checkpointing="selective"),
        TrainerConfig(num_ranks=4, tensor_parallel=2, lora=LORA, activation_checkpointing="full"),
        TrainerConfig(num_ranks=4, replicate=2, lora=LORA, reshard_after="backward"),
        TrainerConfig(num_ranks=4, replicate=2, tensor_parallel=2, lora=LORA),
    ],
}


@pytest.mark.parametrize(
    "num_ranks", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2)), 4]
)
def test_every_layout_gives_adapters_the_gradients_of_one_process(
    ranks: Any, checkpoint: str, tmp_path: Path, num_ranks: int
) -> None:
    architecture = read_architecture(checkpoint)
    adapters = random_adapters(architecture, LORA)
    folder = str(tmp_path / "adapter")
    adapter_files.save(
        folder, adapters.items(), lora=LORA, source_folder=checkpoint, dtype=torch.float32
    )
    expected, replicas = in_one_process(checkpoint, adapters), [*replica_sums(checkpoint)]
    rendezvous = str(tmp_path / uuid.uuid4().hex)
    layouts = LAYOUTS[num_ranks]
    answers = ranks(num_ranks).run(train, rendezvous, checkpoint, folder, layouts)
    for config, of_ranks in zip(layouts, zip(*answers, strict=True), strict=True):
        for seen in of_ranks:
            assert seen["gradients"].keys() == expected.keys()
            for name, gradient in seen["gradients"].items():
                error = np.linalg.norm(gradient - expected[name])
                assert error <= 1e-5 * np.linalg.norm(expected[name]), (config, name)
                changed = seen["updated"][name] - adapters[name].numpy()
                assert np.abs(changed).max() > 0, (config, name)
        for replica in replicas:
            compare_frozen([seen["sums"] for seen in of_ranks], replica, 0)


def replica_sums(checkpoint: str) -> Iterator[list[dict[str, Fingerprints]]]:
    """What the ranks of replicas of any size and format have."""
    architecture = read_architecture(checkpoint)
    for kind in KINDS:
        form = None if isinstance(kind, str) else kind
        dtype = form.base_dtype if form else str(kind)
        for num_ranks in (1, 2, 4):
            found = []
            for rank in range(num_ranks):
                layout = BufferLayout(architecture, dtype, rank, num_ranks, form)
                memory = layout.memory
                flat = torch.zeros(memory.num_elements, dtype=memory.dtype)
                load_boxes(memory.parameters, flat, checkpoint, architecture, form)
                sums = sums_of_boxes(memory.parameters, flat, rank, num_ranks)
                found.append({key_of(kind): sums})
            names = add_up(rank[key_of(kind)] for rank in found)
            assert len(names) >= 2 * 9
            assert all(names.values())
            yield found


def test_weights_of_another_checkpoint_beside_adapters_are_named(
    checkpoint: str, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", vocab_size=76, attention_bias=True,
                             num_attention_heads=8, num_key_value_heads=4, intermediate_size=44,
                             rms_norm_eps=1e-5)  # fmt: skip
    engines = [
        EmbeddedEngine(read_architecture(folder), EmbeddedConfig(), lora=LORA)
        for folder in (checkpoint, other)
    ]
    first, second = (each.load_base(folder) for each, folder in zip(engines, (checkpoint, other),
                                                                    strict=True))  # fmt: skip
    compare_frozen([first], [second], 0)  # the same numbers
    assert engines[1]._base is not None
    with torch.no_grad():
        layout = engines[1].layout
        layout.parameter(engines[1]._base, "model.layers.1.mlp.up_proj.weight")[0, 0] += 1e-3
    second = {"float32": sums_of_boxes(layout.parameters, engines[1]._base, 0, 1)}
    words = (
        "beside adapters of generator 3 must be the trainer's, got others for model.layers.1.mlp"
    )
    with pytest.raises(RuntimeError, match=words):
        compare_frozen([first], [second], 3)


async def export(
    rank: int, num_ranks: int, rendezvous: str, checkpoint: str, folder: str, config: TrainerConfig
) -> None:
    """Save, restore and export adapters."""
    join(rendezvous, rank, num_ranks, torch.device("cpu"))
    try:
        policy = Policy.load(checkpoint, make_mesh("cpu", config), config, 7)
        Path(folder, "saved").mkdir(parents=True, exist_ok=True)
        dist.barrier()
        policy.snapshot.write(f"{folder}/saved", policy.state(4))
        before = {name: gather(each).clone() for name, each in policy.parameters.items()}
        with torch.no_grad():
            for each in policy.parameters.values():
                each.to_local().add_(1.0)
        assert policy.restore(f"{folder}/saved") == 4
        assert all(torch.equal(gather(policy.parameters[n]), each) for n, each in before.items())
        policy.export(f"{folder}/export-{num_ranks}", "float32")
    finally:
        leave()


def test_checkpoints_hold_adapters_alone_and_first_values_do_not_depend_on_ranks(
    ranks: Any, checkpoint: str, tmp_path: Path
) -> None:
    found = []
    for num_ranks, slices in ((1, 1), (2, 1), (2, 2), (4, 2)):
        config = TrainerConfig(num_ranks=num_ranks, tensor_parallel=slices, lora=LORA)
        folder = str(tmp_path / uuid.uuid4().hex)
        rendezvous = str(tmp_path / uuid.uuid4().hex)
        ranks(num_ranks).run(export, rendezvous, checkpoint, folder, config)
        file = Path(folder, f"export-{num_ranks}", "adapter_model.safetensors")
        found.append(file.read_bytes())
        names = SavedShards(f"{folder}/saved").shapes().keys()
        states = {f"random.cpu.{data_rank}" for data_rank in range(config.num_data_ranks)}
        assert {name for name in names if "lora_" not in name} == states | {"version"}
    assert all(each == found[0] for each in found)
