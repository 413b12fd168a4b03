"""The rollouts of a simulation: how long they are, which groups teach something.

A rollout's length depends on its seed and prompt alone, so two systems that are compared write the
same rollouts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamarl.core.config import Config
from llamarl.core.config.generator import pools_of
from llamarl.core.config.rank_assignment import num_storage_units, units_near
from llamarl.core.records import REWARD, EpisodeState, Prompt, Request, StageResult, TurnResult
from llamarl.scoring.stages import Stage
from llamarl.storage.columns import NUMBER

NUM_DRAWN = 1 << 14  # lengths drawn; a rollout's seed picks one of them
NUM_PROMPTS = 1 << 11
USUAL_PROMPT_TOKENS = 200
USUAL_MEDIAN_TOKENS = 400
USUAL_TURNS = 4
USUAL_OBSERVATION_TOKENS = 100


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The rollouts of a simulation. `lengths` are tokens of finished rollouts; a rollout's seed
    picks one of them.

    With a `correlation` above 0 the prompt counts too: with the `normals` a of the prompt and b of
    the seed, its length has the rank in `lengths`, which ascend then, that

        sqrt(correlation) a + sqrt(1 - correlation) b

    has among all normal deviates, so that lengths as a whole are spread as before. `equal_share` is
    the share of the groups whose rollouts all get one reward, so that their advantages are 0.
    """

    lengths: tuple[int, ...]
    prompt_tokens: int
    equal_share: float = 0.0
    row_step: int = 1
    """The difference between successive row ids of a group, as `controller/balance.py` gives them
    out."""
    num_turns: int = 1
    """The turns of each episode, or of each of its conversations; the tokens of its rollout, or
    of the conversation, are spread over them evenly."""
    num_conversations: int = 1
    """The conversations of each episode: each begins with the prompt of the rollout, and has a
    length of its own."""
    are_parallel: bool = False
    """Whether they are written side by side; otherwise each begins once the one before has
    ended."""
    tool_seconds: tuple[float, ...] = (0.0,)
    """The seconds that environments take for a turn; each turn picks one of these."""
    observation_tokens: int = 0
    correlation: float = 0.0
    normals: tuple[float, ...] = ()

    @property
    def response_share(self) -> float:
        """The share of a finished rollout's tokens that do not belong to its prompt."""
        answers = (self.num_turns - 1) * self.observation_tokens
        mean = sum(self.lengths) / len(self.lengths) + answers
        return mean / (self.prompt_tokens + mean)

    def length(self, request: Request) -> int:
        """Return the tokens that the model will write of this rollout."""
        if not self.correlation:
            return self.lengths[request.seed % len(self.lengths)]
        prompt = request.prompt.prompt_id if request.prompt is not None else request.prompt_ids[0]
        of_prompt = self.normals[-1 - prompt % len(self.normals)]
        of_seed = self.normals[request.seed % len(self.normals)]
        share, other = math.sqrt(self.correlation), math.sqrt(1 - self.correlation)
        rank = (1 + math.erf((share * of_prompt + other * of_seed) / math.sqrt(2))) / 2
        return self.lengths[min(int(rank * len(self.lengths)), len(self.lengths) - 1)]

    def turn_end(self, request: Request, num_generated: int) -> int:
        """Return how many tokens the model will have written when its present turn ends."""
        length, n = self.length(request), self.num_turns
        ends = (-(-length * turn // n) for turn in range(1, n + 1))
        return next((end for end in ends if end > num_generated), num_generated + 1)

    def conversations_of(self, row_id: int) -> int:
        """Return the number of conversations of an episode."""
        return self.num_conversations

    def answer(self, row_id: int, turn: int) -> tuple[float, TurnResult]:
        """Return the seconds that the environment takes for the n-th turn of an episode, or of the
        conversation in this row, and its result; the last turn calls nothing."""
        number = spread((row_id * 0.618033988749895) + turn * 0.7548776662466927)
        seconds = self.tool_seconds[int(number * len(self.tool_seconds))]
        is_done = turn >= self.num_turns
        state = EpisodeState.DONE if is_done else EpisodeState.GOES_ON
        result = TurnResult(row_id=row_id, attempt=0, state=state, numbers={"turns": turn})
        return 0.0 if is_done else seconds, result

    def score(self, row_id: int, prompt: Prompt) -> StageResult:
        """Return the reward 1 for every second row of a group and 0 for the others; 0 for all rows
        of `equal_share` of the groups."""
        number = prompt.prompt_id * 0.618033988749895 + prompt.epoch * 0.7548776662466927
        reward = 0.0 if spread(number) < self.equal_share else float(row_id // self.row_step % 2)
        numbers, parts = {REWARD: reward}, {"made up": reward}
        return StageResult(row_id=row_id, numbers=numbers, parts=parts, correct=reward >= 1)

    def pass_stage(self, stage: Stage, row_id: int) -> StageResult:
        """Return the result of a stage of the recipe's own for a rollout: 0 in all columns that it
        writes."""
        numbers = {column.name: 0.0 for column in stage.writes if column.length == NUMBER}
        return StageResult(row_id=row_id, numbers=numbers)

    def prompts(self) -> list[Prompt]:
        """Return prompts that differ in their first token."""
        rest = (0,) * (self.prompt_tokens - 1)
        return [
            Prompt(prompt_id=i, text="", token_ids=(i, *rest), fields={})
            for i in range(NUM_PROMPTS)
        ]


def spread(number: float) -> float:
    """Return the fractional part, which multiples of an irrational number spread evenly over 0 to
    1."""
    return math.modf(number)[0]


def with_lengths(config: Config) -> Config:
    """Return the recipe with lengths in `plan` where it leaves them open, within its own limits."""
    plan, most = config.plan, config.sampling.max_tokens
    room = min(pool.generator.max_model_len for pool in pools_of(config.generator)) - most
    prompt_tokens = plan.prompt_tokens or max(1, min(USUAL_PROMPT_TOKENS, room))
    median_tokens = plan.median_tokens or max(1, min(USUAL_MEDIAN_TOKENS, most // 2))
    num_turns, observation_tokens = _turns(config)
    plan = replace(
        plan,
        prompt_tokens=prompt_tokens,
        median_tokens=median_tokens,
        num_turns=num_turns,
        observation_tokens=observation_tokens,
    )
    return replace(config, plan=plan)


def _turns(config: Config) -> tuple[int, int]:
    """Return (turns of an episode, tokens of an observation): as the recipe says, or a guess that
    leaves the model a token of each turn."""
    given, most = config.plan, config.sampling.max_tokens
    room = 1 + (most - 1) // ((given.observation_tokens or 1) + 1)
    num_turns = given.num_turns or min(USUAL_TURNS, config.environment.max_turns, room)
    half = max(1, most // 2 // max(1, num_turns - 1))
    return num_turns, given.observation_tokens or min(USUAL_OBSERVATION_TOKENS, half)


def shrunk_guesses(config: Config) -> str | None:
    """Return a line about the turns assumed of this recipe, if it leaves them open and has no room
    for the usual ones; else None."""
    if not config.environment.is_used:
        return None
    usual = {"num_turns": USUAL_TURNS, "observation_tokens": USUAL_OBSERVATION_TOKENS}
    found = with_lengths(config).plan
    open_ones = {name: most for name, most in usual.items() if not getattr(config.plan, name)}
    less = [name for name, most in open_ones.items() if getattr(found, name) < most]
    if not less:
        return None
    assumed = " and ".join(f"plan.{name}={getattr(found, name)}" for name in less)
    return f"assumed: {assumed}, which sampling.max_tokens and environment.max_turns leave room for"


def make_workload(
    config: Config, *, lengths: Sequence[int] | None = None, equal_share: float = 0.0
) -> Workload:
    """Return the workload that `config.plan` describes, or the given lengths with its prompts.

    Lengths are log-normal: exp(N(ln median, spread^2)), rounded, at least 1, cut at
    sampling.max_tokens.
    """
    config = with_lengths(config)
    more: dict[str, Any] = {}
    if lengths is None:
        rng = np.random.default_rng(config.seed)
        draws = rng.normal(math.log(config.plan.median_tokens), config.plan.spread, NUM_DRAWN)
        logarithms = np.minimum(draws, math.log(config.sampling.max_tokens))
        lengths = np.round(np.exp(logarithms)).astype(int).tolist()
        if correlation := config.plan.group_correlation:
            lengths = sorted(lengths)
            normals = np.random.default_rng(config.seed + 2).normal(size=NUM_DRAWN)
            more = {"correlation": correlation, "normals": tuple(normals.tolist())}
    plan, longest = config.plan, config.sampling.max_tokens
    if config.environment.is_used:
        longest -= (plan.num_turns - 1) * plan.observation_tokens
        must = "leave room for plan.num_turns and plan.observation_tokens"
        config.require(longest >= plan.num_turns, "sampling.max_tokens", must)
        waits = np.random.default_rng(config.seed + 1).normal(0.0, plan.tool_spread, NUM_DRAWN)
        more |= {
            "num_turns": plan.num_turns,
            "observation_tokens": plan.observation_tokens,
            "tool_seconds": tuple((plan.tool_s * np.exp(waits)).tolist()),
        }
    cut = tuple(min(max(1, int(n)), longest) for n in lengths)
    return Workload(
        lengths=cut,
        **more,
        prompt_tokens=config.plan.prompt_tokens,
        equal_share=equal_share,
        row_step=num_storage_units(config) if units_near(config) else 1,
    )
