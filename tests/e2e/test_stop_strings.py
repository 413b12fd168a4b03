"""Stop strings in a run: a text, and a special token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.e2e.commands import RECIPE, read_rollouts
from tests.e2e.forks import Forks

OPTIONS = ["num_steps=2", "trainer.groups_per_step=8", "trainer.warmup_steps=0"]
OPTIONS += ["data.held_out=null", "checkpoint.export=false", "metrics.trackers=[]"]


@pytest.mark.parametrize("cluster", ["inline", pytest.param("monarch", marks=pytest.mark.long)])
def test_rollouts_end_at_stop_strings_also_at_one_that_is_a_special_token(
    forks: Forks, tmp_path: Path, cluster: str
) -> None:
    done = forks.run(
        "train",
        f"--config-dir={RECIPE}",
        f"run_dir={tmp_path}",
        *OPTIONS,
        f"cluster={cluster}",
        "experience.keep_rollouts=1",
        "sampling.temperature=100",  # any token is as likely as another
        "sampling.stop_strings=['=','<pad>']",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2
    tokenizer = AutoTokenizer.from_pretrained(RECIPE / "checkpoint")
    (pad,) = tokenizer.encode("<pad>", add_special_tokens=False)
    rows = [row for row in read_rollouts(tmp_path) if "response_ids" in row]
    by_text = [row for row in rows if "=" in tokenizer.decode(row["response_ids"])]
    by_token = [row for row in rows if pad in row["response_ids"]]
    assert by_text
    assert by_token
    for row in by_text:
        assert tokenizer.decode(row["response_ids"]).index("=") == (
            len(tokenizer.decode(row["response_ids"])) - 1
        )
    for row in by_token:
        assert row["response_ids"].index(pad) == row["num_tokens"] - 1
    assert {row["finish"] for row in (*by_text, *by_token)} == {"stop"}
