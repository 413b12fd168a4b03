"""The options that all algorithms have. Those of a single one are beside its loss
(`algorithms/losses/`).
"""

from dataclasses import dataclass, field
from typing import ClassVar

from llamarl.config.check import Section, choice, number
from llamarl.config.trainer_keys import LoraConfig


@dataclass(kw_only=True)
class AlgorithmConfig(Section):
    """Fields that every algorithm shares."""

    advantage: str = "mean"
    """What is subtracted from a reward: mean (of its group) | mean_std (the same, then divided by
    the group's standard deviation) | leave_one_out (the mean of the others) | none | gdpo (mean_std
    of each of `reward.functions` and `reward_columns` apart, before they are summed by their
    weights; then divided by the batch's standard deviation) | task (`advantages` of the recipe's
    own task.py computes advantages)."""
    filters: list[str] = field(default_factory=list)
    """Groups that are not trained on; others are sampled in their place, and each is counted under
    its reason: equal_rewards (all rewards are equal, so all advantages are 0: DAPO's dynamic
    sampling, on for dapo, cispo and aipo; without this filter such groups are trained on: the
    rewards give no gradient, KL and entropy terms do, and their tokens count in the divisor) | task
    (those for which `drop` of the recipe's own task.py returns a reason)."""
    reward_columns: list[str] = field(default_factory=lambda: ["reward"])
    """Columns of numbers whose weighted sum is a rollout's reward: reward (what `reward.functions`
    give) and those that stages of the recipe's own task.py write (`experience.stages`)."""
    reward_column_weights: list[float] = field(
        default_factory=lambda: [1.0], metadata={"least": -1e6, "most": 1e6}
    )
    """One weight per column; 0 only records it."""
    loss_columns: list[str] = field(default_factory=list)
    """Columns with an entry per response token that a loss of task.py gets besides its own inputs,
    as `inputs.columns[name]`."""
    normalization: str = choice("tokens", "rollouts", "constant")
    """What the summed loss of a step is divided by: tokens (its response tokens) | rollouts (its
    rollouts, after the loss of each was averaged over its own tokens) | constant (its rollouts
    times sampling.max_tokens)."""
    kl_coefficient: float = number(0.0, least=0, most=1000)
    """Weight of the KL penalty to the reference model; 0 starts no reference executor."""
    kl_estimator: str = choice("k3", "k1", "k2")
    """Estimator of that penalty: k1 | k2 | k3 (Schulman's names)."""
    entropy_coefficient: float = number(0.0, least=-100, most=100)
    """Weight of an entropy bonus per response token."""
    proximal: str = choice("none", "recompute", "interpolate")
    """Decoupled PPO (arXiv 2505.24298): the policy that the ratio is taken to, and clipped around.
    none: the generator's, with its recorded log-probs | recompute: the trainer's before the first
    step of the batch, which computes the log-probs of the batch's other mini-batches then |
    interpolate: an estimate of the same between the generator's and the present log-probs, by the
    versions in between, without a forward. With the last two a weight beside the loss, prox/mu,
    corrects for the age of the token."""
    proximal_rho: float = number(5.0, least=1, most=1e6)
    """Upper bound of that weight."""
    overlong_penalty_tokens: int = number(0, least=0, most=2**24)
    """DAPO's soft length penalty: the reward falls linearly to -1 over the last this many tokens
    before sampling.max_tokens, observations counted as there; 0 switches it off."""
    mask_truncated: bool = False
    """Give rollouts cut at max_tokens zero loss weight (DAPO's overlong filtering)."""
    mask_rollouts: str = choice("off", "geometric_mean", "product", "k3")
    """Give whole rollouts zero loss weight that the trainer's policy has left, as measured over
    their tokens with r = pi/mu: geometric_mean (of r) | product (of r: TRL's sequence_mask) | k3
    (the mean of r - 1 - log r) | off. Set `mask_below`, `mask_above` or both with it."""
    mask_below: float = number(0.0, least=0, most=1)
    """A rollout is masked if that measure is below this; 0: none is."""
    mask_above: float = number(1e9, above=0, most=1e9)
    """A rollout is masked if it is above this; 1e9: none is. Examples: geometric_mean 0.98 to 1.02,
    product 3, k3 0.01. The difference between the two engines counts too."""
    mask_negative_only: bool = False
    """Mask only rollouts with a negative advantage. With mask_rollouts=geometric_mean and
    mask_below exp(-d) this is DeepSeek-V3.2's mask of threshold d."""
    max_drops_in_row: int = number(2048, least=1, most=2**31)
    """Groups dropped one after another before the run stops and says why."""

    reads_columns: ClassVar[bool] = False  # True: the loss may read algorithm.loss_columns
    scales_with_advantage: ClassVar[bool] = True
    # False: a rollout with advantage 0 may have a gradient, so its forward is not skipped.
    imitates: ClassVar[bool] = False  # True: it learns from demonstrations, not from rollouts

    def check(self) -> None:
        self._check_mask()
        self.require(bool(self.reward_columns), "reward_columns", "name at least one column")
        num = len(self.reward_columns)
        is_whole = len(self.reward_column_weights) == num
        self.require(is_whole, "reward_column_weights", f"have one weight per column ({num})")
        for name in ("reward_columns", "loss_columns"):
            columns = getattr(self, name)
            self.require(len({*columns}) == len(columns), name, "name each column once")

    def _check_mask(self) -> None:
        """Bounds and the measure that they are of come together."""
        kind, names = self.mask_rollouts, ("mask_below", "mask_above", "mask_negative_only")
        is_set = {name: getattr(self, name) != getattr(AlgorithmConfig, name) for name in names}
        for name in names:
            must = "be left out without algorithm.mask_rollouts, which it is for"
            self.require(kind != "off" or not is_set[name], name, must)
        must = f"be a bound (or algorithm.mask_below one) for algorithm.mask_rollouts={kind}"
        has_bound = is_set["mask_below"] or is_set["mask_above"]
        self.require(kind == "off" or has_bound, "mask_above", must)
        must = "be 0 for algorithm.mask_rollouts=k3, which is 0 where nothing has moved"
        self.require(kind != "k3" or self.mask_below == 0, "mask_below", must)

    @property
    def has_reference(self) -> bool:
        """True if the loss needs log-probs of the reference model."""
        return self.kl_coefficient > 0

    @property
    def reference(self) -> str:
        """The reference model's checkpoint; empty: the policy's own."""
        return ""

    def runs_reference(self, lora: LoraConfig) -> bool:
        """True if a frozen model runs beside the policy. A policy with adapters is its own
        reference without them."""
        return self.has_reference and (bool(self.reference) or not lora.is_used)
