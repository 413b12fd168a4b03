"""The config of the trainer: the options that all algorithms have, batch, optimizer, precision,
adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from llamarl.core.device.names import DEVICES, dtype_for
from llamarl.core.fields import Section, choice, choice_of, number


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
    is_sft: ClassVar[bool] = False  # True: it learns from demonstrations, not from rollouts

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
        """Check that a mask's bounds and its measure are set together."""
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
        """Whether the loss needs log-probs of the reference model."""
        return self.kl_coefficient > 0

    @property
    def reference(self) -> str:
        """The reference model's checkpoint; empty: the policy's own."""
        return ""

    def runs_reference(self, lora: LoraConfig) -> bool:
        """Return whether a frozen model runs beside the policy. A policy with adapters is its own
        reference without them."""
        return self.has_reference and (bool(self.reference) or not lora.is_used)


ALL_LINEAR = "all-linear"


@dataclass(kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters: beside each target matrix W two small ones are trained, and W stays. The
    layer computes W x + (alpha / rank) B A x, where B starts as zeros."""

    key = "trainer.lora"

    rank: int = number(0, least=0, most=4096)
    """Rows of A and columns of B; 0 trains all weights."""
    alpha: float = number(32.0, above=0, most=1e6)
    """The adapter's output is multiplied by alpha / rank."""
    dropout: float = number(0.0, least=0, most=0.9)
    """Share of the inputs of A that a training pass drops. Above 0 the trainer's log-probs are not
    those of the policy that generators sample from, and ratios are noisy."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Which matrices get an adapter: all-linear (every linear layer of the decoder's layers; never
    embedding and head), or ends of their names, such as [q_proj, v_proj] or [self_attn.q_proj]."""

    def check(self) -> None:
        self.require(bool(self.targets), "targets", "name at least one matrix")

    @property
    def is_used(self) -> bool:
        """Whether adapters are trained, instead of all weights."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """The factor by which the adapter's output is multiplied."""
        return self.alpha / self.rank


@dataclass(kw_only=True)
class TrainerConfig(Section):
    """One optimizer step per `groups_per_step` groups."""

    num_ranks: int = number(1, least=1, most=65536)
    """Trainer processes, one per GPU: `replicate` copies x FSDP shards x `tensor_parallel`. The
    number of shards follows from the other two."""
    tensor_parallel: int = number(1, least=1, most=1024)
    """Ranks that split every matrix (and, between matrices, the tokens: sequence parallel) and work
    on the same rollouts; keep it within one host."""
    replicate: int = number(1, least=1, most=65536)
    """Copies of the sharded parameters (HSDP): gradients are summed over them, gathers stay within
    one."""
    expert_parallel: int = number(1, least=1, most=1024)
    """Ranks that share the experts of a mixture of experts: each has a part of every layer's, and
    tokens travel to the ranks that have theirs. It divides `num_ranks` / `replicate`; the ranks
    that are left share each expert. Keep it within one host."""
    device: str = choice_of(DEVICES)
    """Where trainer and reference compute: cpu (gloo) | cuda (NCCL, one GPU per rank)."""
    groups_per_step: int = number(32, least=1, most=2**20)
    """Groups (prompts with all their rollouts) that one optimizer step learns from (P)."""
    num_mini_batches: int = number(1, least=1, most=1024)
    """Mini-batches of `groups_per_step` groups that make a batch. Each is one optimizer step, so a
    batch is trained in `num_mini_batches` x `num_passes` steps; `algorithm.proximal` is about the
    policy before the first of them."""
    num_passes: int = number(1, least=1, most=1024)
    """Times that a batch is trained on, one mini-batch after another."""
    parts: str = choice("dynamic", "batch")
    """When forward and backward of a step start: dynamic (once enough tokens are ready to keep the
    trainer busy, which is measured during the run) | batch (once all groups are). In any case one
    optimizer step follows from all its groups."""
    tokens_per_micro_batch: int = number(4096, least=1, most=2**30)
    """Most tokens packed into one micro-batch; a rollout longer than that gets a micro-batch of its
    own."""
    compute_dtype: str = choice("auto", "float32", "bfloat16")
    """Forward and backward in float32 | bfloat16 | auto (bfloat16 on cuda, float32 on cpu); master
    weights are always float32."""
    activation_checkpointing: str = choice("none", "selective", "full")
    """What the backward pass computes again instead of storing it: none | selective (all but
    matrix products and attention) | full (each whole block)."""
    reshard_after: str = choice("forward", "backward", "step")
    """How long gathered weights are kept: forward (gathered again for the backward pass; least
    memory) | backward (one gather per micro-batch) | step (one gather per optimizer step)."""
    compile: str = choice("none", "inductor", "aot_eager")
    """torch.compile of each block, attention left out: none | inductor (needs a C++ compiler or
    CUDA) | aot_eager (for debugging). Not with tensor_parallel or selective checkpointing."""
    optimizer: str = choice("adamw", "sgd")
    """The optimizer: adamw | sgd."""
    lr: float = number(1e-6, least=0, most=100)
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's moment decays."""
    eps: float = number(1e-8, least=1e-20, most=1)
    """AdamW's denominator offset."""
    weight_decay: float = number(0.0, least=0, most=100)
    """Decoupled weight decay of matrices; norms and biases do not decay."""
    warmup_steps: int = number(0, least=0, most=10**9)
    """Steps over which the learning rate grows linearly to `lr`."""
    warmup_share: float = number(0.0, least=0, most=1)
    """The same as a share of the run's steps, rounded up; in place of `warmup_steps`."""
    schedule: str = choice("constant", "linear", "cosine")
    """After warm-up: constant | linear | cosine, which fall towards `lr * min_lr_share` and would
    reach it one step after the last, so that no step runs at learning rate 0."""
    min_lr_share: float = number(0.0, least=0, most=1)
    """Share of `lr` that a linear or cosine schedule falls towards."""
    max_grad_norm: float = number(1.0, least=1e-9, most=1e9)
    """Gradients are clipped to this global norm."""
    routing_replay: str = choice("auto", "off")
    """Which experts a token goes to, in a mixture of experts: auto (those that the generator chose
    when it wrote the token; gates are the trainer's own) | off (those that the trainer's routers
    choose, which may differ by a rounding or an update, so that the ratio is one of two models)."""
    router_aux_loss_coefficient: float = number(0.0, least=0, most=100)
    """Weight of the load-balancing loss of the routers (Switch Transformer), a mean over layers and
    tokens; RL leaves it out."""
    freeze_router: bool = False
    """Leave the routers of a mixture of experts as they are."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters, which are trained instead of all weights if lora.rank is above 0."""

    def check(self) -> None:
        self.compute_dtype = dtype_for(self.device, self.compute_dtype)
        is_one = not (self.warmup_steps and self.warmup_share)
        self.require(is_one, "warmup_share", "be 0 with trainer.warmup_steps, which says the same")
        are_betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        self.require(are_betas, "betas", "be two numbers from 0 to below 1")
        slices, copies = self.tensor_parallel, self.replicate
        must = f"be a multiple of tensor_parallel ({slices}) times replicate ({copies})"
        self.require(self.num_ranks % (slices * copies) == 0, "num_ranks", must)
        must = (
            f"be a multiple of expert_parallel ({self.expert_parallel}) times replicate ({copies})"
        )
        self.require(self.num_ranks % (self.expert_parallel * copies) == 0, "num_ranks", must)
        is_plain = self.compile == "none"
        is_selective = self.activation_checkpointing == "selective"
        must = (
            f"be none with trainer.tensor_parallel={slices} (torch compiles sequence-parallel "
            "blocks to wrong gradients)"
        )
        self.require(is_plain or slices == 1, "compile", must)
        must = (
            "be none with trainer.activation_checkpointing=selective (what a compiled block keeps "
            "is the compiler's choice)"
        )
        self.require(is_plain or not is_selective, "compile", must)

    @property
    def steps_per_batch(self) -> int:
        """The number of optimizer steps from one batch."""
        return self.num_mini_batches * self.num_passes

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks with different rollouts: tensor-parallel ranks work on the same
        ones."""
        return self.num_ranks // self.tensor_parallel

    @property
    def num_shard_ranks(self) -> int:
        """The number of ranks that one copy of each parameter (or of its tensor-parallel slice) is
        cut over."""
        return self.num_data_ranks // self.replicate

    @property
    def num_expert_shard_ranks(self) -> int:
        """The number of ranks that share each expert of one copy of the model."""
        return self.num_ranks // (self.replicate * self.expert_parallel)


OF_EXPERTS = {"expert_parallel": 1, "router_aux_loss_coefficient": 0.0, "freeze_router": False}
"""The options of mixtures of experts that must have these values for any other model."""


@dataclass(kw_only=True)
class TransformersConfig(TrainerConfig):
    """The same, with the model code of the transformers library: for families that the native model
    lacks."""

    def check(self) -> None:
        TrainerConfig.check(self)
        for name, value in {"tensor_parallel": 1, "compile": "none", **OF_EXPERTS}.items():
            must = f"be {value} with trainer=transformers"
            self.require(getattr(self, name) == value, name, must)
