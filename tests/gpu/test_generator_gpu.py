"""What every generator executor promises, asked on a CUDA device.

Publishing is asked elsewhere (`test_weights_gpu.py`): CUDA IPC leads from one process to another.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llamarl.core.config import EmbeddedConfig
from tests.generator.generator_contract import (  # noqa: F401 - the questions, and `run_dir`
    run_dir,
    test_a_partial_row_is_resumed_from_storage_on_another_replica,
    test_aborted_rows_come_out_marked_whether_running_or_queued,
    test_columns_of_a_row_are_stored_when_collect_returns_it,
    test_offloading_in_the_middle_of_rollouts_changes_nothing,
    test_prefill_decode_and_waiting_have_spans_of_their_own,
)
from tests.generator.generator_replica import EngineCase
from tests.tiny_checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(Path(tmp_path_factory.mktemp("model")) / "checkpoint")


@pytest.fixture(params=["none", "fp8"])
def engine_case(request: pytest.FixtureRequest, checkpoint: str) -> EngineCase:
    return EngineCase(
        config=EmbeddedConfig,
        checkpoint=checkpoint,
        fields={"device": "cuda", "dtype": "float32", "quantization": request.param},
        atol=1e-4,
    )
