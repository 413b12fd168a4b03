"""What data.repeat_share saves: the share of generated tokens that reach the trainer.

    python tools/bench_curriculum.py [--json FILE] [--prompts 7473] [--steps 300]

Simulated with the real order of prompts, as a stand-in for Llama 3.2 1B Instruct on GSM8K: 7473
prompts, groups of 8, 64 groups a step. The chance that a rollout of a prompt is right is drawn from
Beta(0.4, 0.5), whose mean is about 44 % (published for Llama 3.2 1B Instruct, 8-shot); most prompts
are nearly always right or nearly always wrong. All rollouts are taken to be equally long. The
policy either stays as it is, or learns: the log-odds of every prompt grow by 2 over the run, which
brings the mean to about 67 %. A group whose rollouts are all right or all wrong is dropped.

`trained_share` is groups trained over groups generated, which is that share of the tokens;
`later_share` the same from the second epoch on, where a repeat_share has an effect; `epochs` how
often the prompts were walked for the same number of steps; `vs_all` generated groups over those of
repeat_share 1.
"""

from __future__ import annotations

import math
import random

from harness import Bench, Values

from llamarl.environments.prompt_stream import PromptStream
from llamarl.types import Prompt

GROUP_ROLLOUTS, STEP_GROUPS = 8, 64
ALPHA, BETA = 0.4, 0.5
GROWTH = {"fixed": 0.0, "learning": 2.0}  # of the log-odds, over the run
SHARES = (1.0, 0.5, 0.25, 0.1)


def odds_of(num_prompts: int) -> list[float]:
    """The log-odds of a right rollout, by prompt."""
    drawn = random.Random(0)
    chances = (drawn.betavariate(ALPHA, BETA) for _ in range(num_prompts))
    bounded = (min(max(chance, 1e-9), 1 - 1e-9) for chance in chances)
    return [math.log(chance / (1 - chance)) for chance in bounded]


def simulate(num_prompts: int, num_steps: int, growth: float, repeat_share: float) -> Values:
    """A run of so many steps."""
    odds, drawn = odds_of(num_prompts), random.Random(1)
    prompts = [Prompt(prompt_id=i + 1, text="", token_ids=(1,)) for i in range(num_prompts)]
    stream = PromptStream(prompts, seed=0, shuffle=True, repeat_share=repeat_share)
    num_wanted, trained, asked = num_steps * STEP_GROUPS, [0, 0], [0, 0]  # first epoch, later
    while sum(trained) < num_wanted:
        prompt = next(stream)
        now = odds[prompt.prompt_id - 1] + growth * sum(trained) / num_wanted
        chance = 1 / (1 + math.exp(-now))
        num_right = sum(drawn.random() < chance for _ in range(GROUP_ROLLOUTS))
        has_signal = 0 < num_right < GROUP_ROLLOUTS
        stream.learn(prompt, has_signal=has_signal)
        is_later = prompt.epoch > 0
        asked[is_later] += 1
        trained[is_later] += has_signal
    return {
        "trained_share": sum(trained) / sum(asked),
        "later_share": trained[1] / asked[1] if asked[1] else math.nan,
        "epochs": stream.take_metrics()["prompts/epoch"],
        "groups": sum(asked),
    }


def main() -> None:
    """Simulate all."""
    bench = Bench(__doc__)
    bench.option("--prompts", type=int, default=7473)
    bench.option("--steps", type=int, default=300)
    arguments, rounds = bench.parse(), {}
    for name, growth in GROWTH.items():
        for share in SHARES:
            case = f"{name} policy, repeat_share {share:g}"
            found = simulate(arguments.prompts, arguments.steps, growth, share)
            all_groups = rounds.setdefault(f"{name} policy, repeat_share 1", [found])[0]["groups"]
            found["vs_all"] = found["groups"] / all_groups
            rounds[case] = [found]
            bench.add_all(found, case)
    bench.write(rounds)


if __name__ == "__main__":
    main()
