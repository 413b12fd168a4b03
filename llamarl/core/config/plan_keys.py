"""What `llamarl plan` assumes of a workload and an engine; nothing here changes a run."""

from dataclasses import dataclass

from llamarl.core.fields import DAY_S, Section, choice, number


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
