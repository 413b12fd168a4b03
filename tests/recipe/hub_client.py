"""The real client of the Hub, which asks one on the loopback interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hub_server import Hub, serving
from tests.places import CHECKPOINT

MODEL, DATA = "models/org/tiny", "datasets/org/sums"
ROWS = [{"question": f"What is {i}+8?", "answer": str(i + 8)} for i in range(5)]
JSONL = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
LINE = JSONL[: JSONL.index(b"\n") + 1]
UNWANTED = ("pytorch_model.bin", "modeling_tiny.py", "tokenizer.pkl", "README.md", "x/y.json")
WANTED = {"config.json", "tokenizer.json", "tokenizer_config.json"}


@contextmanager
def client_of_hub(folder: Path) -> Iterator[Hub]:
    """A Hub with the model and the data set, which the library asks meanwhile; its cache is in
    `folder`."""
    with serving(Hub()) as hub, pytest.MonkeyPatch.context() as patch:
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        patch.setattr(constants, "HF_ASSETS_CACHE", str(folder / "assets"))
        files = {path.name: path.read_bytes() for path in CHECKPOINT.iterdir()}
        hub.add(MODEL, files | dict.fromkeys(UNWANTED, b"{}"))
        hub.add(DATA, {"train.jsonl": JSONL, "test.jsonl": LINE, "sums.py": b"", "x.csv": b""})
        yield hub
