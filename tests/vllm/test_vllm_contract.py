"""What every generator executor promises, asked of vLLM.

Two questions are not for it: a resumed rollout draws other numbers than an uncut one
(`segment_seed`), and two replicas cannot live in one process.
"""

from __future__ import annotations

import pytest

from llamarl.core.config import VllmConfig
from tests.generator.generator_contract import *  # noqa: F403 - the questions
from tests.generator.generator_replica import EngineCase
from tests.vllm.checkpoints import write_versions

del test_a_partial_row_is_resumed_from_storage_on_another_replica  # noqa: F821
del test_a_replica_passes_on_what_it_received  # noqa: F821

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    ((folder, _), _) = write_versions(tmp_path_factory.mktemp("checkpoint"), "llama")
    return folder


@pytest.fixture(params=["plain", pytest.param("fp8", marks=pytest.mark.slow)])
def engine_case(request: pytest.FixtureRequest, checkpoint: str) -> EngineCase:
    is_quantised = request.param == "fp8"
    quantised = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    return EngineCase(
        config=VllmConfig,
        checkpoint=checkpoint,
        fields={"kv_cache_bytes": 1 << 24} | (quantised if is_quantised else {}),
        counts_prefill=False,
        atol=1e-2 if is_quantised else 1e-5,
    )
