"""What TRL's trainers log of each step, as lines with llamarl's names."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class StepLog(TrainerCallback):
    """Writes a line per step into metrics.jsonl of `out`: `figures` of TRL's logs that have `key`.
    Seconds count from when training began."""

    def __init__(
        self, out: str, key: str, figures: Callable[[Mapping[str, float]], dict[str, float]]
    ) -> None:
        self._path, self._key, self._figures = Path(out) / "metrics.jsonl", key, figures
        self._began_s = self._ended_s = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began_s = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._ended_s = time.perf_counter()

    def on_log(
        self, _: Any, state: Any, __: Any, logs: dict[str, float] | None = None, **___: Any
    ) -> None:
        if not logs or self._key not in logs or not state.is_world_process_zero:
            return
        seconds = self._ended_s - self._began_s
        line = {"step": state.global_step, "time/step_s": seconds, **self._figures(logs)}
        self._began_s = self._ended_s
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
