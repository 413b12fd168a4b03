"""A Hub that answers with something else than it should, or hardly at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.recipe import hub as hub_files
from tests.hub_server import Hub
from tests.unit.hub_client import MODEL, client_of_hub
from tests.unit.test_hub import error_of, recipe


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with client_of_hub(tmp_path) as hub:
        yield hub


@pytest.mark.parametrize(
    "listed",
    [
        {"error": 5},
        ["config.json", 3, None],
        [{"type": "file", "path": 7, "size": 1, "oid": "0" * 40}],
        [{"type": "file", "path": "config.json", "size": 1, "oid": "0", "lfs": "many"}],
        [{"type": "file", "path": "config.json", "size": 1, "oid": "0", "lfs": {}}],
        *(
            [{"type": "file", "path": "config.json", "size": size, "oid": "0" * 40}]
            for size in ("many", None, -1, 1.5, True, [], {})
        ),
    ],
)
def test_a_list_of_other_types_is_one_line(hub: Hub, listed: object) -> None:
    hub.lists[MODEL] = listed
    assert "model.checkpoint must " in error_of(recipe())


@pytest.mark.parametrize("size", ["many", None, -1, 1.5, True])
def test_a_size_of_another_type_is_one_line(hub: Hub, size: object) -> None:
    hub.sizes["model.safetensors"] = size
    assert "model.checkpoint must " in error_of(recipe())


def test_a_hub_that_sends_a_byte_a_second_is_one_line(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_files, "ANSWER_S", 0.5)
    monkeypatch.setattr(hub_files, "PACE_S", 0.5)
    hub.dribbles = True
    assert "the Hub gave no whole answer in 0.5 s" in error_of(recipe())
    hub.dribbles = False
    hub.slow.add("model.safetensors")
    monkeypatch.setattr(hub_files, "PACE_BYTES", 10**6)
    line = error_of(recipe())
    assert "the Hub sent " in line
    assert " bytes in 0.5 s" in line
