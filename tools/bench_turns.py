"""What a turn of an episode costs beside its tokens, with a tool that answers at once.

    python tools/bench_turns.py [--rounds 3] [--steps 30] [--json FILE]

The recipe is `recipes/quickstart_tools`, with so many episodes in a step and no step ahead of the
trainer, so no more are under way at once; a step's episodes take their turns nearly in lockstep.
`turn_ms` is the time from the decode step in which a turn of the model ended to the request with
which the engine goes on: reading the turn, the tool in its process, the observation's tokens, and
the wait for other answers (`llamarl/executors/gathering.py`). It is the generator's own record, the
spans "turn" of its span file, without those of the first step. Each case gives the median and the
90th percentile of its turns, of these the median over the rounds.
--quick: one short round of four episodes.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from harness import ROOT, Bench, Values, turns
from live_run import INLINE, QUIET, train

from llamarl.metrics.span import SpanFolder

RECIPE = ROOT / "recipes" / "quickstart_tools"
GROUPS = {2: 1, 4: 1, 32: 4, 512: 64}  # of so many episodes


def measure(num_episodes: int, num_steps: int, *more: str) -> Values:
    """The turns of one run with so many episodes in a step."""
    num_groups = GROUPS[num_episodes]
    options = (
        f"trainer.groups_per_step={num_groups}",
        f"sampling.rollouts_per_prompt={num_episodes // num_groups}",
        f"num_steps={num_steps}",
        "staleness.max_staleness=0",
        "data.held_out=null",  # an evaluation has hundreds at once
    )
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        run = train(RECIPE, Path(folder) / "run", *QUIET, *options, *more)
        spans = SpanFolder(run.run_dir / "spans", executor="generator").read()
        found = sorted((span for _, span in spans if span.name == "turn"), key=lambda s: s.end_ns)
    waits_ms = [(span.end_ns - span.start_ns) / 1e6 for span in found[num_episodes:]]
    return {
        "num_turns": len(waits_ms),
        "turn_ms": statistics.median(waits_ms),
        "turn_p90_ms": statistics.quantiles(waits_ms, n=10)[-1],
    }


def main() -> None:
    bench = Bench(__doc__, {"turn_ms": "<= 20"})
    bench.option("--rounds", type=int, default=3)
    bench.option("--steps", type=int, default=30, help="optimizer steps of a run")
    bench.option("--quick", action="store_true", help="one short round of four episodes")
    arguments = bench.parse()
    num_rounds, num_steps = (1, 6) if arguments.quick else (arguments.rounds, arguments.steps)
    rounds: dict[str, list[Values]] = {}
    for _, num_episodes in turns([4] if arguments.quick else GROUPS, num_rounds):
        steps = min(num_steps, 10) if num_episodes > 100 else num_steps
        values = measure(num_episodes, steps, *([INLINE] if arguments.quick else []))
        rounds.setdefault(f"{num_episodes} episodes", []).append(values)
    bench.add_medians(rounds)
    bench.write(rounds)


if __name__ == "__main__":
    main()
