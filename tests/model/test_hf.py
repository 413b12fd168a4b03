"""Checkpoints in and out: what transformers and a rank read; exports are whole or not there."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from llamarl.core.config import TrainerConfig
from llamarl.model import hf, inventory
from llamarl.model.architecture import split_dimension
from llamarl.model.safetensors_file import INDEX_FILE, SINGLE_FILE
from llamarl.model.transformer import Transformer
from llamarl.trainer.parallel import make_mesh, parallelize
from tests.model.tokenizer_files import write_tokenizer
from tests.places import ROOT
from tests.tiny_checkpoints import (
    CASES,
    LENGTHS,
    load,
    reference_logits,
    token_ids,
    write_reference,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    write_reference(folder, **CASES["qwen25"])
    return folder


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in load(folder).named_parameters()}


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("case", CASES)
def test_an_export_loads_in_transformers_with_equal_logits(tmp_path: Path, case: str) -> None:
    source, folder = tmp_path / "source", tmp_path / "export"
    reference = write_reference(source, **CASES[case])
    model = load(source)
    with torch.no_grad():
        theirs = dict(reference.named_parameters())
        for name, mine in model.named_parameters():
            mine.mul_(1.01)  # as training would, so that the source's weights cannot pass
            theirs[name].mul_(1.01)
    backwards = reversed(list(model.named_parameters()))
    hf.save(folder, backwards, source_folder=source, dtype=torch.float32, max_shard_bytes=30_000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(reference_logits(loaded), reference_logits(reference))
    assert torch.equal(
        load(folder).logits(token_ids(), LENGTHS), model.logits(token_ids(), LENGTHS)
    )


def test_files_stay_below_the_limit_and_the_index_is_true(checkpoint: Path, tmp_path: Path) -> None:
    limit = 30_000
    hf.save(
        tmp_path / "out",
        parameters(checkpoint).items(),
        source_folder=checkpoint,
        dtype=torch.float32,
        max_shard_bytes=limit,
    )
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    total = 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        tensors = safetensors.torch.load_file(path)
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(
            tensors
        )
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        assert num_bytes <= limit or len(tensors) == 1
        total += num_bytes
    assert index["metadata"]["total_size"] == total


def test_everything_else_of_the_source_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    write_tokenizer(checkpoint, chat=True, generation_eos=[2, 5])
    (checkpoint / "LICENSE").write_text("be kind")
    (checkpoint / "prompts.jsonl").write_text("not ours to copy")
    (checkpoint / "pytorch_model.bin").write_text("stale weights")

    def add(values: dict[str, Any]) -> None:
        values.pop("dtype")
        values |= {"torch_dtype": "float32", "a_future_field": {"x": [1, None]}}

    edit_config(checkpoint, add)
    out = tmp_path / "out"
    weights = parameters(checkpoint)
    hf.save(out, weights.items(), source_folder=checkpoint, dtype=torch.bfloat16)
    before = json.loads((checkpoint / "config.json").read_text())
    after = json.loads((out / "config.json").read_text())
    assert after == before | {"torch_dtype": "bfloat16"}
    assert inventory.check_checkpoint(out) == inventory.check_checkpoint(checkpoint)
    for name, tensor in safetensors.torch.load_file(out / SINGLE_FILE).items():
        assert torch.equal(tensor, weights[name].bfloat16()), name
    names = {path.name for path in out.iterdir()}
    assert {"LICENSE", "generation_config.json", "tokenizer.json"} <= names
    assert not {"prompts.jsonl", "pytorch_model.bin", INDEX_FILE} & names
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (checkpoint, out)]
    assert tokenizers[0]("What is 5+8?").input_ids == tokenizers[1]("What is 5+8?").input_ids
    assert tokenizers[0].chat_template == tokenizers[1].chat_template is not None


def test_an_export_takes_its_tokenizer_from_another_folder_if_asked(
    checkpoint: Path, tmp_path: Path
) -> None:
    write_tokenizer(checkpoint, chat=False)
    (tmp_path / "other").mkdir()
    write_tokenizer(tmp_path / "other", chat=True, generation_eos=[2, 5])
    hf.save(
        tmp_path / "out",
        parameters(checkpoint).items(),
        source_folder=checkpoint,
        tokenizer_folder=tmp_path / "other",
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template is not None
    ours, kept = (folder / "generation_config.json" for folder in (tmp_path / "out", checkpoint))
    assert ours.read_text() == kept.read_text(), "that is the model's"


LAYOUTS = [(1, 2, 1, 1), (2, 5, 1, 1), (39, 40, 1, 1), (3, 4, 2, 2), (5, 8, 2, 2), (1, 2, 2, 1)]


@pytest.mark.parametrize(("rank", "num_ranks", "tensor_parallel", "replicate"), LAYOUTS)
def test_a_rank_reads_its_own_shards(
    checkpoint: Path, rank: int, num_ranks: int, tensor_parallel: int, replicate: int
) -> None:
    whole = parameters(checkpoint)
    config = TrainerConfig(
        num_ranks=num_ranks, tensor_parallel=tensor_parallel, replicate=replicate
    )
    num_shards, shard = config.num_shard_ranks, rank // tensor_parallel % config.num_shard_ranks
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        with torch.device("meta"):
            model = Transformer(inventory.check_checkpoint(checkpoint))
        parallelize(model, make_mesh("cpu", config), config)
        model.to_empty(device="cpu")
        hf.load_into(dict(model.named_parameters()), checkpoint)
        for name, parameter in model.named_parameters():
            mine = whole[name]
            split = split_dimension(name)
            if tensor_parallel > 1 and split is not None:
                mine = mine.chunk(tensor_parallel, split)[rank % tensor_parallel]
            rows = -(-len(mine) // num_shards)  # FSDP2 cuts dimension 0 as torch.chunk does
            mine = mine[shard * rows : (shard + 1) * rows]
            assert torch.equal(parameter.to_local(), mine), name
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


def truncate(folder: Path, num_bytes: int) -> None:
    path = folder / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:num_bytes])


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = safetensors.torch.load_file(folder / SINGLE_FILE)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / SINGLE_FILE, {"format": "pt"})


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def into_folder(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / SINGLE_FILE).mkdir()


NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda f: (f / SINGLE_FILE).unlink(), "must hold model.safetensors"),
    "weights are a folder": (into_folder, "must hold model.safetensors"),
    "empty file": (lambda f: truncate(f, 0), "whole safetensors file, got header too small"),
    "cut in the header": (lambda f: truncate(f, 100), "whole safetensors file, got invalid header"),
    "cut in the data": (lambda f: truncate(f, 90_000), "file, got incomplete metadata, file not"),
    "Git LFS pointer": (
        lambda f: (f / SINGLE_FILE).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "whole safetensors file",
    ),
    "missing tensor": (
        lambda f: rewrite(f, lambda t: t.pop(NORM)),
        "must hold the tensor model.norm.weight",
    ),
    "extra tensor": (
        lambda f: rewrite(f, lambda t: t.update({"model.x": torch.zeros(1)})),
        "only the tensors that its config.json implies, got model.x",
    ),
    "wrong shape": (
        lambda f: rewrite(f, lambda t: t.update({NORM: torch.zeros(47)})),
        r"model.norm.weight in .* must have shape \(48,\) as config.json says, got \(47,\)",
    ),
    "wrong config": (
        lambda f: edit_config(f, lambda c: c.update(vocab_size=98)),
        r"embed_tokens.weight in .* must have shape \(98, 48\)",
    ),
    "quantised tensor": (
        lambda f: rewrite(f, lambda t: t.update({NORM: torch.zeros(48, dtype=torch.int8)})),
        "must be one of F32, F16, BF16, got I8",
    ),
    "missing shard": (
        lambda f: (write_index(f, {NORM: "model-9.safetensors"}), (f / SINGLE_FILE).unlink()),
        "model-9.safeten",
    ),
    "escaping shard": (lambda f: write_index(f, {NORM: "../x.safetensors"}), "files beside it"),
    "no weight map": (lambda f: write_index(f, []), "must have a weight_map"),
    "damaged index": (lambda f: (f / INDEX_FILE).write_text("{"), "must be JSON"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_line(checkpoint: Path, damage: str) -> None:
    weights = parameters(checkpoint)
    breaks, message = BROKEN[damage]
    breaks(checkpoint)
    with pytest.raises(ValueError, match=message) as caught:
        inventory.check_checkpoint(checkpoint)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="must"):
        hf.load_into(weights, checkpoint)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({NORM: None}, r"model.norm.weight of the model .* \(48,\), got None"),
        ({"other": torch.zeros(1)}, r"other of the model .* None, got \(1,\)"),
        ({NORM: torch.zeros(47)}, r"model.norm.weight of the model .* got \(47,\)"),
    ],
    ids=["missing", "too many", "shape"],
)
def test_tensors_of_another_model_are_refused(
    changed: dict[str, Any], words: str, checkpoint: Path
) -> None:
    weights = parameters(checkpoint) | changed
    with pytest.raises(ValueError, match=words):
        hf.load_into({name: t for name, t in weights.items() if t is not None}, checkpoint)


def test_constants_and_tied_heads_that_old_files_store_are_ignored(tmp_path: Path) -> None:
    write_reference(tmp_path, **CASES["llama32"])
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    before = parameters(tmp_path)
    rewrite(tmp_path, lambda t: t.update({name: torch.zeros(4), HEAD: t[EMBEDDING].clone()}))
    after = parameters(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_head_that_is_another_matrix_than_the_embedding_it_is_tied_to_is_refused(
    tmp_path: Path,
) -> None:
    write_reference(tmp_path, **CASES["llama32"])
    rewrite(tmp_path, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    inventory.check_checkpoint(tmp_path)
    inventory.check_checkpoint(tmp_path, is_any=True)
    for change in (lambda head: head + head[-1:].abs(), lambda head: head.to(torch.float16)):
        rewrite(tmp_path, lambda t, change=change: t.update({HEAD: change(t[EMBEDDING])}))
        for is_any in (False, True):
            with pytest.raises(ValueError, match=r"lm_head\.weight in .* must equal model\.embed"):
                inventory.check_checkpoint(tmp_path, is_any=is_any)


def test_a_module_whose_head_is_not_tied_as_the_checkpoint_says_is_refused(tmp_path: Path) -> None:
    write_reference(tmp_path, **CASES["llama32"])
    architecture, found = inventory.check_checkpoint(tmp_path), parameters(tmp_path)
    hf.as_parameters(found | {HEAD: found[EMBEDDING]}, architecture)
    with pytest.raises(ValueError, match=r"lm_head\.weight of source must equal"):
        hf.as_parameters(found | {HEAD: found[EMBEDDING] + 0.3}, architecture)


def test_of_two_sets_of_weights_the_one_is_read_that_transformers_reads(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, source = tmp_path / "out", parameters(checkpoint)
    shards = {name: torch.zeros_like(each) for name, each in source.items()}.items()
    options = {"source_folder": checkpoint, "dtype": torch.float32}
    hf.save(folder, shards, max_shard_bytes=30_000, **options)
    hf.save(tmp_path / "single", source.items(), **options)
    shutil.copy(tmp_path / "single" / SINGLE_FILE, folder)
    found = parameters(folder)
    assert all(torch.equal(found[name], each) for name, each in source.items())
    (line,) = caplog.messages
    assert line.startswith(f"{folder} has two sets of weights: {SINGLE_FILE} is read")


MEMORY_SCRIPT = """
import sys, threading, time
from pathlib import Path
import torch
from llamarl.core.config import TrainerConfig
from llamarl.model import hf, inventory
from llamarl.model.transformer import Transformer

torch.set_num_threads(1)

def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

class Peak:
    def __enter__(self):
        self.start = self.peak = anonymous_bytes()
        self.running = True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while self.running:
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.0005)
    def __exit__(self, *error):
        self.running = False
        self.thread.join()
        self.num_bytes = max(self.peak, anonymous_bytes()) - self.start

with torch.device("meta"):
    model = Transformer(inventory.check_checkpoint(sys.argv[1]))
with Peak() as load:
    model.to_empty(device="cpu")
    hf.load_into(dict(model.named_parameters()), sys.argv[1])
with Peak() as save:
    hf.save(sys.argv[2], model.named_parameters(), source_folder=sys.argv[1],
            dtype=torch.bfloat16, max_shard_bytes=int(sys.argv[3]))
print(load.num_bytes, save.num_bytes, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_the_model_alone_and_saving_one_more_file(
    checkpoint: Path, tmp_path: Path
) -> None:
    changes = {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
    }
    edit_config(checkpoint, lambda c: c.update(changes, num_hidden_layers=4))
    shapes = inventory.parameter_shapes(hf.read_any_architecture(checkpoint))
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    safetensors.torch.save_file(tensors, checkpoint / SINGLE_FILE, {"format": "pt"})
    shard_bytes = 8 * 10**6
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(checkpoint), str(tmp_path / "out")]
    command.append(str(shard_bytes))
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000"}  # freed memory goes back
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    load_bytes, save_bytes, model_bytes = map(int, result.stdout.split())
    slack_bytes = 6 * 10**6
    assert model_bytes > 4 * (shard_bytes + slack_bytes), "else a whole copy would pass"
    assert load_bytes <= model_bytes + slack_bytes
    assert save_bytes <= shard_bytes + slack_bytes


Weights = dict[str, torch.Tensor]


def test_weights_that_are_not_numbers_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    weights = parameters(checkpoint)
    weights["model.norm.weight"][3] = torch.inf
    hf.save(tmp_path / "out", weights.items(), source_folder=checkpoint, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"model\.norm\.weight in .* must hold finite numbers"):
        hf.load_into(parameters(checkpoint), tmp_path / "out")


def breaking(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights.items())[:5]
    raise OSError("the disk is gone")


FIRST = "model.embed_tokens.weight"
WRONG: dict[str, tuple[Callable[[Weights], Any], type[Exception], str]] = {
    "disk gone": (breaking, OSError, "the disk is gone"),
    "one missing": (
        lambda w: [(name, w[name]) for name in w if name != "model.norm.weight"],
        RuntimeError,
        r"got none of \['model.norm.weight'\]",
    ),
    "one too many": (
        lambda w: [*w.items(), ("other", torch.zeros(1))],
        ValueError,
        "model's parameters, each once, got 'other'",
    ),
    "shape": (lambda w: [(FIRST, torch.zeros(3, 3))], ValueError, f"{FIRST} must have shape"),
    "twice": (lambda w: [*w.items(), (FIRST, w[FIRST])], ValueError, f"each once, got '{FIRST}'"),
}


@pytest.mark.parametrize(("wrong", "kind", "words"), WRONG.values(), ids=WRONG)
def test_a_failed_save_leaves_what_stood_there_and_nothing_else(
    wrong: Callable[[Weights], Any],
    kind: type[Exception],
    words: str,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    out, weights = tmp_path / "out", parameters(checkpoint)
    hf.save(out, weights.items(), source_folder=checkpoint, dtype=torch.float32)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(kind, match=words):
        hf.save(out, wrong(weights), source_folder=checkpoint, dtype=torch.float32)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out"]


def test_a_disk_that_refuses_a_file_is_an_error_of_the_operating_system(
    checkpoint: Path, tmp_path: Path
) -> None:
    weights = parameters(checkpoint)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            hf.save(
                tmp_path / "out", weights.items(), source_folder=checkpoint, dtype=torch.float32
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_good_save_replaces_the_folder_whole_even_its_own_source(checkpoint: Path) -> None:
    doubled = {name: tensor * 2 for name, tensor in parameters(checkpoint).items()}
    (checkpoint / "stale.safetensors").write_bytes(b"")
    hf.save(checkpoint, doubled.items(), source_folder=checkpoint, dtype=torch.float32)
    assert not (checkpoint / "stale.safetensors").exists()
    for name, tensor in parameters(checkpoint).items():
        assert torch.equal(tensor, doubled[name])
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint"]


def test_a_failed_rename_puts_the_old_folder_back(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if "unfinished" in self.name:
            raise PermissionError("the file system says no")
        return rename(self, target)

    weights = parameters(checkpoint)
    names = sorted(path.name for path in checkpoint.iterdir())
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError):
        hf.save(checkpoint, weights.items(), source_folder=checkpoint, dtype=torch.float32)
    assert sorted(path.name for path in checkpoint.iterdir()) == names
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint"]


def test_a_save_killed_between_its_renames_loses_nothing(checkpoint: Path) -> None:
    out = checkpoint.with_name("out")
    shutil.copytree(checkpoint, checkpoint.with_name(".out.replaced"))  # the state after the kill
    with pytest.raises(ValueError, match="got 'unknown'"):
        hf.save(out, [("unknown", torch.zeros(1))], source_folder=checkpoint, dtype=torch.float32)
    names = [sorted(path.name for path in folder.iterdir()) for folder in (checkpoint, out)]
    assert names[0] == names[1]


def test_a_full_disk_is_an_error_before_anything_is_written(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(checkpoint)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    asked: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        asked.append("a tensor")
        yield from parameters(checkpoint).items()

    out = checkpoint.with_name("out")
    with pytest.raises(
        OSError, match=r"No space left on device: the weights need .* 1000 are free"
    ):
        hf.save(out, tensors(), source_folder=checkpoint, dtype=torch.float32)
    assert not asked
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint"]
