"""The trainer: batch, optimizer, precision.

Owns: the fields of `trainer`. Does not own: the loss (`algorithm.py`). Invariant: of these fields
only compute_dtype, lora.alpha and lora.dropout change the gradient of a given batch and given
parameters before clipping.
"""

from dataclasses import dataclass, field

from llamarl.config.check import Section, choice, choice_of, number
from llamarl.device.names import DEVICES, dtype_for

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
        """Whether adapters are trained, not all weights."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """What the adapter's output is multiplied by."""
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
    parts: str = choice("dynamic", "fixed", "batch")
    """When forward and backward of a step start: dynamic (once enough tokens are ready to keep the
    trainer busy, which is measured during the run) | fixed (once `groups_per_part` groups are) |
    batch (once all are). In any case one optimizer step follows from all its groups."""
    groups_per_part: int = number(0, least=0, most=2**20)
    """Groups that `parts=fixed` waits for, and only with it; they divide `groups_per_step`."""
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
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters, which are trained instead of all weights if lora.rank is above 0."""

    def check(self) -> None:
        self.compute_dtype = dtype_for(self.device, self.compute_dtype)
        is_one = not (self.warmup_steps and self.warmup_share)
        self.require(is_one, "warmup_share", "be 0 with trainer.warmup_steps, which says the same")
        if self.parts == "fixed":
            size, total = self.groups_per_part, self.groups_per_step
            must = f"divide trainer.groups_per_step ({total}) with trainer.parts=fixed"
            self.require(size > 0 and total % size == 0, "groups_per_part", must)
        else:
            must = f"be 0 with trainer.parts={self.parts} (it is for parts=fixed)"
            self.require(self.groups_per_part == 0, "groups_per_part", must)
        are_betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        self.require(are_betas, "betas", "be two numbers from 0 to below 1")
        slices, copies = self.tensor_parallel, self.replicate
        must = f"be a multiple of tensor_parallel ({slices}) times replicate ({copies})"
        self.require(self.num_ranks % (slices * copies) == 0, "num_ranks", must)
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
        """Optimizer steps from one batch."""
        return self.num_mini_batches * self.num_passes

    @property
    def num_data_ranks(self) -> int:
        """Ranks with different rollouts: tensor-parallel ranks work on the same ones."""
        return self.num_ranks // self.tensor_parallel

    @property
    def num_shard_ranks(self) -> int:
        """Ranks that one copy of each parameter (or of its tensor-parallel slice) is cut over."""
        return self.num_data_ranks // self.replicate


@dataclass(kw_only=True)
class TransformersConfig(TrainerConfig):
    """The same, with the model code of the transformers library: for families that the native model
    lacks."""

    def check(self) -> None:
        TrainerConfig.check(self)
        for name, value in (("tensor_parallel", 1), ("compile", "none")):
            must = f"be {value} with trainer=transformers"
            self.require(getattr(self, name) == value, name, must)
