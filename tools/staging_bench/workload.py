"""What is run: the long-tailed recipe of bench_async.py with two replicas and larger weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_async import write_long_tail_recipe
from live_run import PROGRAM, QUIET, RECIPE, LiveRun, train
from safetensors.torch import save_file

from llamarl.models.architecture import read_architecture
from llamarl.models.inventory import parameter_shapes
from staging_bench import variants

NUM_BUCKETS = 16
LAYER = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@dataclass(frozen=True, slots=True)
class Form:
    """How a version reaches the generators: "blocking" or `weights.staging`, and who commits
    when."""

    staging: str
    commits: str  # staggered | together
    max_staleness: int = 1

    @property
    def name(self) -> str:
        age = f", staleness {self.max_staleness}" * (self.max_staleness != 1)
        return f"{self.staging}, {self.commits}{age}"

    @property
    def variants(self) -> list[str]:
        """What of it no setting has: see variants.py."""
        return [name for name in ("blocking", "together") if name in (self.staging, self.commits)]


FORMS = [
    Form("blocking", "together"),
    Form("blocking", "staggered"),
    Form("bucket", "staggered"),
    Form("double_buffer", "together"),
    Form("double_buffer", "staggered"),
    Form("host", "together"),
    Form("host", "staggered"),
    Form("double_buffer", "staggered", max_staleness=2),
]


@dataclass(frozen=True, slots=True)
class Workload:
    """A recipe, its model's size in float32, how long it is trained, and further overrides."""

    recipe: Path
    model_bytes: int
    num_steps: int
    more: tuple[str, ...]

    def run(self, form: Form, run_dir: Path, seed: int) -> LiveRun:
        """Train once in real processes."""
        program = PROGRAM
        if form.variants:
            program = (str(Path(variants.__file__)), ",".join(form.variants))
        staging = "double_buffer" if form.staging == "blocking" else form.staging
        return train(
            self.recipe,
            run_dir,
            *(f"seed={seed}", f"num_steps={self.num_steps}"),
            f"staleness.max_staleness={form.max_staleness}",
            f"generator.num_replicas={variants.NUM_REPLICAS}",
            "generator.max_num_seqs=4",  # so that generation is the longer side
            *("trainer.groups_per_step=4", "trainer.parts=fixed", "trainer.groups_per_part=2"),
            "trainer.compute_dtype=bfloat16",
            "trainer.lr=1e-6",  # the weights are random: nothing is to be learned
            "sampling.rollouts_per_prompt=4",
            f"weights.staging={staging}",
            f"weights.bucket_bytes={self.model_bytes // NUM_BUCKETS}",
            "weights.logprob_check=off",  # its rollouts would hide what a replica waits for
            *("checkpoint.every_steps=0", *QUIET, *self.more),
            program=program,
        )


def make_workload(folder: Path, *more: str, num_layers: int, num_steps: int) -> Workload:
    """Write the recipe and a checkpoint of random weights; 0 layers keep the quickstart's."""
    recipe = folder / "recipe"
    write_long_tail_recipe(recipe)
    checkpoint = RECIPE / "checkpoint"
    if num_layers:
        checkpoint = folder / "checkpoint"
        (recipe / "checkpoint").unlink()
        (recipe / "checkpoint").symlink_to(checkpoint)
        _write_checkpoint(checkpoint, num_layers)
    model_bytes = (checkpoint / "model.safetensors").stat().st_size
    return Workload(recipe, model_bytes, num_steps, more)


def _write_checkpoint(folder: Path, num_layers: int) -> None:
    folder.mkdir()
    source = RECIPE / "checkpoint"
    for path in source.glob("*token*"):
        (folder / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    config |= LAYER | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.empty(shape).normal_(0.0, 0.02, generator=random)
        for name, shape in parameter_shapes(read_architecture(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
