"""A pool that does not fit into memory is refused by its name, before a run starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamarl.planner.memory.fit import check_fit
from tests.unit.planner_recipes import LLAMA
from tests.unit.test_config import MINIMUM, make_config

GPUS = [
    *("trainer.device=cuda", "generator.device=cuda", "weights=collective"),
    *("trainer.num_ranks=8", "cluster.num_hosts=4"),
]
WIDE = replace(LLAMA, num_layers=32, hidden_size=2048, num_heads=16, num_kv_heads=8, head_dim=128)


def test_a_pool_that_does_not_fit_is_named_in_one_line() -> None:
    pools = ["num_replicas=2", "num_replicas=2 max_num_seqs=4096"]
    with pytest.raises(ValueError, match=r"^the fullest generator\.pools\[1\] must fit") as raised:
        check_fit(make_config(f"generator.pools={pools}", *GPUS, *MINIMUM), WIDE)
    assert "\n" not in str(raised.value)
    check_fit(make_config(f"generator.pools={pools[:1] * 2}", *GPUS, *MINIMUM), WIDE)
