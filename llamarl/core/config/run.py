"""The config sections about the run itself, and the root of the tree.

Rules between two sections are in `Config.check` and what it calls, and nowhere else."""

from dataclasses import dataclass, field

from llamarl.core.config.cluster import ClusterConfig
from llamarl.core.config.evaluation import HELD_OUT, CheckpointConfig, EvaluationConfig
from llamarl.core.config.generator import (
    DispatchConfig,
    GeneratorConfig,
    SamplingConfig,
    VllmConfig,
    alone,
    pools_of,
)
from llamarl.core.config.inputs import DataConfig, EnvironmentConfig, ModelConfig, RewardConfig
from llamarl.core.config.trainer import AlgorithmConfig, TrainerConfig
from llamarl.core.device.names import GPU, is_gpu
from llamarl.core.fields import DAY_S, Section, choice, number, require, require_choice


@dataclass(kw_only=True)
class PlanConfig(Section):
    """Lengths that `llamarl plan` assumes: log-normal, cut at sampling.max_tokens."""

    prompt_tokens: int = number(0, least=0, most=2**24)
    """Tokens of a prompt. 0: the mean of the first 256 prompts, if they and the tokenizer are
    there; else 200, or what sampling.max_tokens leaves of generator.max_model_len."""
    median_tokens: int = number(0, least=0, most=2**24)
    """Tokens that half of the rollouts stay below. 0: 400, or half of sampling.max_tokens if that
    is less."""
    spread: float = number(0.8, least=0, most=1e6)
    """Standard deviation of the logarithm of a rollout's length; 0 makes all equally long."""
    group_correlation: float = number(0.5, least=0, most=1)
    """How alike the lengths of one group are: the correlation of their logarithms, as a hard prompt
    has long answers; 0: not at all, 1: all equal. An assumption."""
    attention: str = choice("flash2", "flash3")
    """Kernels of the trainer's attention: flash2, which PyTorch has, or flash3, where installed, of
    H100 and H200."""
    kernels: str = choice("auto", "eager", "fused")
    """What the trainer computes between matrix products with: auto (as trainer.compile says) |
    eager | fused, to forecast another trainer."""
    reserves_kv: bool = False
    """Whether an engine starts a rollout only when its KV cache has room for the longest answer, as
    TensorRT-LLM does. false: it starts what fits, and when the cache is full it takes back the
    rollout that started last and computes it again later, as vLLM does."""
    num_turns: int = number(0, least=0, most=10_000)
    """Turns of every episode, if there are any; a rollout's tokens are spread over them evenly. 0:
    4, or as many as environment.max_turns and sampling.max_tokens leave room for."""
    observation_tokens: int = number(0, least=0, most=2**24)
    """Tokens of an observation. 0: 100, or what fills half of sampling.max_tokens if that is
    less."""
    tool_s: float = number(1.0, least=0, most=DAY_S)
    """Seconds that half of the turns wait for their environment less than."""
    tool_spread: float = number(1.0, least=0, most=10)
    """Standard deviation of the logarithm of those seconds: with 1, one turn in a hundred waits ten
    times as long as half of them, with 2 a hundred times."""
    num_steps: int = number(8, least=3, most=10_000)
    """Steps simulated, or as many more as staleness.max_staleness asks for; the first ones, until
    the pipeline is full, are left out of the figures."""


DEFAULT_STEPS, MOST_STEPS = 100, 10**9
LONGEST_TAG = 64  # that W&B takes
MAX_OPEN_ROLLOUTS = 2**20  # about a gigabyte of the controller's memory


@dataclass(kw_only=True)
class StalenessConfig(Section):
    """The limit on how far the generator may run ahead."""

    max_staleness: int = number(1, least=0, most=1000)
    """Bound S on the age, in versions, of every trained token; 0 is synchronous on-policy RL. Each
    optimizer step makes a version, so where a batch has N of them S is at least N - 1."""
    late: str = choice("wait", "mask")
    """What the trainer does when the oldest group is not ready: wait (for it) | mask (train on
    other groups first; once it is ready, its tokens older than S versions get zero loss weight)."""


@dataclass(kw_only=True)
class WeightsConfig(Section):
    """The way of a new version into the generators."""

    transport: str = "shared_memory"
    """What carries the bytes: shared_memory (one host, CPU memory) | cuda_ipc (one host, GPU
    memory) | collective (gloo or NCCL, point to point)."""
    staging: str = choice("double_buffer", "host")
    """Where a version waits for its commit: double_buffer (a second copy beside the active weights)
    | host (a second copy in host memory, copied over at the commit)."""
    straggler_timeout_s: float = number(1.0, least=0, most=DAY_S)
    """A publish that has reached its first replica waits this long for the others. A slower replica
    takes the newest version on its own afterwards."""
    timeout_s: float = number(60.0, least=0.001, most=DAY_S)
    """Longest time that one call of a publish may take. A generator replica that takes longer
    counts as lost; a trainer that takes longer ends the run. Raise it for models that take long to
    copy."""
    logprob_check: str = choice("fail", "warn", "off")
    """After a publish the log-probs of a short rollout of each replica are compared with the
    trainer's. If a replica's weights are not those published: fail (end the run) | warn | off
    (nothing is compared)."""


@dataclass(kw_only=True)
class PlacementConfig(Section):
    """The devices of generators and trainer: shared, or of their own."""

    colocated: bool = False
    """True: they share devices and alternate; the idle side's memory is offloaded. False: each has
    its own devices, and both work at once."""
    offload: str = choice("file", "pinned", "none")
    """Where the memory of the side that waits goes: file (a memory-mapped file) | pinned (pinned
    host memory, for GPUs) | none (it stays where it is)."""
    offload_folder: str | None = None
    """Folder of the offload files, on a real disk; null takes the run's folder."""


@dataclass(kw_only=True)
class ExperienceConfig(Section):
    """Storage: the processes that keep the arrays of rollouts between the stages."""

    units_per_host: int = number(1, least=1, most=256)
    """Storage processes on each host of the trainer's site. A rollout is kept on the host whose
    generator writes it, if that has one."""
    max_bytes: int = number(4 * 1024**3, least=0, most=2**50)
    """Memory that rollouts may take on each host; 0: no limit. Beyond it the oldest complete ones
    go to files under run_dir/spill until they are trained. 4 GiB hold 250 million response tokens,
    which is more than most runs have open."""
    stages: list[str] = field(default_factory=list)
    """Stages of the recipe's own task.py that each rollout passes between generation and training,
    by their names in its list `stages`."""
    sampler: str = "admission"
    """Which settled groups the trainer takes next: admission (the oldest ones, in order) |
    group_complete (those of the next step in the order in which they settle; it makes a difference
    unless `trainer.parts=batch`) | task (`sample` of the recipe's own task.py chooses; only with
    `staleness.late=mask`)."""
    keep_rollouts: float = number(0.01, least=0, most=1)
    """Share of the prompts whose rollouts are kept whole in the archive, to be read after the run
    (`llamarl view`): texts, rewards, and of each token the version that wrote it and its log-probs.
    Seed, epoch and line decide which prompts these are. Of evaluations the texts and rewards are
    always kept. 1 keeps all, which takes about 40 bytes per token."""


@dataclass(kw_only=True)
class MetricsConfig(Section):
    """The numbers and texts that are recorded, and where they go."""

    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where the numbers go beside metrics.jsonl: any of tensorboard | wandb | mlflow | trackio, and
    those that the recipe's own task.py adds. wandb, mlflow and trackio come with `pip install
    'llamarl[trackers]'`."""
    project: str | None = None
    """Where wandb and trackio file the run; mlflow's experiment. null takes their own variable
    (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME), or llamarl."""
    run_name: str | None = None
    """What wandb, mlflow and trackio call the run; null takes WANDB_NAME for wandb, or the name of
    run_dir's folder. A run that resumes goes on in the same run of theirs."""
    tags: list[str] = field(default_factory=list)
    """Words by which wandb and mlflow find the run again. trackio, which has no tags, gets them as
    a key of the recipe."""
    sample_rollouts: int = number(4, least=0, most=1000)
    """Rollouts per step shown as text, with prompt, reward and the answer expected."""
    live: bool = True
    """Draw the live progress display when standard output is a terminal."""

    def check(self) -> None:
        for name in ("project", "run_name"):
            text = getattr(self, name)
            self.require(text is None or bool(text.strip()), name, "be null or a name")
        is_each = all(0 < len(tag.strip()) <= LONGEST_TAG for tag in self.tags)
        must = f"be words of 1 to {LONGEST_TAG} characters, each once"
        self.require(is_each and len({*self.tags}) == len(self.tags), "tags", must)


@dataclass(kw_only=True)
class Config(Section):
    """A whole recipe."""

    run_dir: str = "."
    """Folder of this run: config, metrics, traces, checkpoints, exported weights. A relative path
    starts where you are, unlike those of inputs such as `model.checkpoint`."""
    recipe_dir: str = "."
    """Folder that relative paths start at; the command line fills it with --config-dir."""
    seed: int = number(0, least=0, most=2**53 - 1)
    """Seed of prompt order, sampling and every other random choice."""
    num_steps: int = number(0, least=0, most=MOST_STEPS)
    """Optimizer steps of the run; 0: as many as the limits below allow, 100 without one. The run
    ends at whichever comes first."""
    num_epochs: float = number(0.0, least=0, most=1e6)
    """The run ends after it has drawn this many times as many prompts as there are, with the last
    whole step; 0: no limit. Groups that are dropped are drawn too, so it may have fewer steps than
    prompts divided by `trainer.groups_per_step`, times `trainer.num_passes`, which is where the
    learning rate's schedule ends."""
    max_hours: float = number(0.0, least=0, most=1e6)
    """The step in which this many hours have passed since the command was started is the last one;
    0: no limit. A run that resumes has them once more, so that the same command in each of several
    jobs of a cluster goes on from the one before."""
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    algorithm: AlgorithmConfig
    generator: GeneratorConfig
    trainer: TrainerConfig
    weights: WeightsConfig
    placement: PlacementConfig
    cluster: ClusterConfig
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    experience: ExperienceConfig = field(default_factory=ExperienceConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def has_reference_model(self) -> bool:
        """Whether a frozen reference model runs (see `AlgorithmConfig.runs_reference`)."""
        return self.algorithm.runs_reference(self.trainer.lora)

    @property
    def held_out_sets(self) -> dict[str, str]:
        """The file of each held-out set, or "task", by the set's name: HELD_OUT is that of
        data.held_out."""
        one = {} if self.data.held_out is None else {HELD_OUT: self.data.held_out}
        return self.evaluation.sets or one

    def check(self) -> None:
        self._check_steps()
        self._check_evaluation()
        self._check_episodes()
        self._check_pools()
        self._check_lengths()
        self._check_batches()
        self._check_groups()
        self._check_generators()
        self._check_processes()
        self._check_memory()

    @property
    def most_steps(self) -> int:
        """The limit of steps as far as it is known without the prompts."""
        has_other = self.num_epochs or self.max_hours
        return self.num_steps or (MOST_STEPS if has_other else DEFAULT_STEPS)

    @property
    def last_step(self) -> int | None:
        """`most_steps`; None if there is no such limit."""
        return self.most_steps if self.most_steps < MOST_STEPS else None

    def _check_steps(self) -> None:
        """Check the fields that depend on which step is the last one."""
        is_constant = self.trainer.schedule == "constant"
        is_known = self.last_step is not None or self.num_epochs > 0
        must = "be constant without num_steps or num_epochs (it would have no end)"
        self.require(is_known or is_constant, "trainer.schedule", must)
        must = "be 0 without num_steps or num_epochs (of which it is a share)"
        self.require(is_known or not self.trainer.warmup_share, "trainer.warmup_share", must)
        is_warm = is_constant or self.trainer.warmup_steps < self.most_steps
        must = f"be below num_steps ({self.most_steps})"
        self.require(is_warm, "trainer.warmup_steps", must)

    def _check_evaluation(self) -> None:
        """Check that held-out prompts have one source, and that the best version can be chosen."""
        must = "be null with evaluation.sets, which name every held-out set"
        is_one = self.data.held_out is None or not self.evaluation.sets
        self.require(is_one, "data.held_out", must)
        if self.checkpoint.best:
            must = "stay empty without data.held_out or evaluation.sets"
            self.require(bool(self.held_out_sets), "checkpoint.best", must)
            has_answers = self.reward.functions[0] in ("exact", "math", "task")
            metrics = self.evaluation.metrics(has_answers)
            require_choice("checkpoint.best", self.checkpoint.best, metrics)
        is_judged = bool(self.checkpoint.best) or not self.evaluation.patience
        self.require(is_judged, "evaluation.patience", "be 0 without checkpoint.best")

    def _check_episodes(self) -> None:
        """Check the fields that episodes need, and those that need episodes."""
        is_used = self.environment.is_used
        must = "be true with environment.tools (a chat template says what is between two turns)"
        self.require(self.data.chat or not is_used, "data.chat", must)
        gives_reward = self.reward.is_of_episode
        must = "not name environment without environment.tools"
        self.require(is_used or not gives_reward, "reward.functions", must)

    def _check_lengths(self) -> None:
        """Check that prompts and completions fit into the context."""
        longest, context = self.sampling.max_tokens, self.generator.max_model_len
        must = f"hold a prompt token and sampling.max_tokens ({longest})"
        self.require(longest < context, "generator.max_model_len", must)
        must = f"be below generator.max_model_len ({context})"
        self.require(self.evaluation.max_tokens < context, "evaluation.max_tokens", must)
        fits = self.algorithm.overlong_penalty_tokens <= longest
        must = f"be at most sampling.max_tokens ({longest})"
        self.require(fits, "algorithm.overlong_penalty_tokens", must)

    def _check_batches(self) -> None:
        """Check the fields that several steps per batch need."""
        trainer, num_steps = self.trainer, self.trainer.steps_per_batch
        must = (
            f"be at least {num_steps - 1} with trainer.num_mini_batches={trainer.num_mini_batches} "
            f"and trainer.num_passes={trainer.num_passes} (it counts optimizer steps, and so many "
            "come between the first and the last one of a batch)"
        )
        is_enough = self.staleness.max_staleness >= num_steps - 1
        self.require(is_enough, "staleness.max_staleness", must)
        must = (
            "be admission or group_complete with several optimizer steps per batch (task says "
            "itself how often a group is trained on)"
        )
        is_one = self.experience.sampler != "task" or num_steps == 1
        self.require(is_one, "experience.sampler", must)

    def _check_groups(self) -> None:
        """Check the fields that steps, and the groups that are open, need."""
        num_rollouts, advantage = self.sampling.rollouts_per_prompt, self.algorithm.advantage
        must = (
            f"be at least 2 for algorithm.advantage={advantage} (one rollout is its own baseline, "
            "so nothing would be learnt)"
        )
        has_baseline = num_rollouts >= 2 or advantage in ("none", "task")
        self.require(has_baseline, "sampling.rollouts_per_prompt", must)
        must = "be batch with algorithm.advantage=gdpo (which needs the rewards of a whole batch)"
        is_whole = advantage != "gdpo" or self.trainer.parts == "batch"
        self.require(is_whole, "trainer.parts", must)
        num_steps = self.staleness.max_staleness + 1
        num_open = self.trainer.groups_per_step * num_steps * num_rollouts
        must = (
            "keep groups_per_step x (staleness.max_staleness + 1) x sampling.rollouts_per_prompt, "
            f"the rollouts open at once ({num_open}), at most {MAX_OPEN_ROLLOUTS}"
        )
        self.require(num_open <= MAX_OPEN_ROLLOUTS, "trainer.groups_per_step", must)
        can_overtake = self.experience.sampler != "task" or self.staleness.late == "mask"
        must = (
            "be mask with experience.sampler=task (which may take a group later than its step, or "
            "again)"
        )
        self.require(can_overtake, "staleness.late", must)

    def _check_generators(self) -> None:
        """Check the fields that collectors, rankers, and replicas that come and go need."""
        generator = self.generator
        must = f"be at most generator.num_replicas ({generator.num_replicas})"
        is_enough = generator.num_collectors <= generator.num_replicas
        self.require(is_enough, "generator.num_collectors", must)
        is_known = self.dispatch.ranker != "oracle" or self.sampling.replay_lengths is not None
        must = "be none, history or model without sampling.replay_lengths (no length is known)"
        self.require(is_known, "dispatch.ranker", must)
        if generator.elastic:
            must = "be at least 1 with generator.elastic"
            self.require(generator.max_restarts > 0, "generator.max_restarts", must)
            must = (
                "be [] with placement=colocated (replicas start and stop with the trainer's side)"
            )
            self.require(not self.placement.colocated, "generator.elastic", must)

    def _check_pools(self) -> None:
        """Check that each pool goes together with the rest of the recipe, as if it were the only
        one."""
        if not (texts := self.generator.pools):
            return
        pools = pools_of(self.generator)
        total = pools[-1].replicas.stop
        must = f"be left out, or the sum of generator.pools ({total})"
        self.require(self.generator.num_replicas in (1, total), "generator.num_replicas", must)
        self.generator.num_replicas = total
        must = "be False with generator.pools (which share no device with the trainer)"
        self.require(not self.placement.colocated, "placement.colocated", must)
        for pool, text in zip(pools, texts, strict=True):
            alone(self, pool)
            is_placed = bool(pool.site) == bool(pools[0].site)
            require(is_placed, pool.key, "name a site, as every pool or none does", text)
            is_known = pool.site in ("", *self.cluster.sites)
            must = f"be one of cluster.sites ({', '.join(self.cluster.sites) or 'none'})"
            require(is_known, f"{pool.key}.site", must, pool.site)

    def _check_processes(self) -> None:
        """Check for features that cannot run with all executors in one process."""
        if self.cluster.backend == "inline":
            has_vllm = isinstance(self.generator, VllmConfig)
            must = "be monarch with generator=vllm (its processes are its own)"
            self.require(not has_vllm, "cluster.backend", must)
            for name, size in (
                ("cluster.num_hosts", self.cluster.size),
                ("trainer.num_ranks", self.trainer.num_ranks),
                ("generator.num_ranks", self.generator.num_ranks),
            ):
                self.require(size == 1, name, "be 1 with cluster.backend=inline")

    def _check_memory(self) -> None:
        """Check that devices and offload go together."""
        generator = self.generator
        devices = generator.device, self.trainer.device
        is_able = self.placement.offload != "pinned" or all(map(is_gpu, devices))
        must = f"be {GPU} with placement.offload=pinned"
        require(is_able, "generator.device and trainer.device", must, " and ".join(devices))
        graphs = isinstance(generator, VllmConfig) and not generator.enforce_eager
        is_moved = self.placement.colocated and self.placement.offload != "none"
        must = (
            "be true with generator=vllm and placement=colocated (what is offloaded comes back at "
            "other addresses than captured graphs read)"
        )
        self.require(not graphs or not is_moved, "generator.enforce_eager", must)
