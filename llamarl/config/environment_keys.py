"""The environments and tools that rollouts take turns with. A rollout without any is one answer,
and costs nothing more than before."""

from dataclasses import dataclass, field

from llamarl.config.check import DAY_S, Section, choice, number


@dataclass(kw_only=True)
class EnvironmentConfig(Section):
    """Episodes: what the model may call, how its calls are read, and their limits."""

    tools: list[str] = field(default_factory=list)
    """What rollouts take turns with, any of: task (the list `tools` of the recipe's own task.py,
    its `environment`, or both) | python (a tool that runs programs which the model writes,
    contained). []: nothing, a rollout is one answer."""
    calls: str = choice("auto", "hermes", "llama", "xml", "tagged", "template")
    """How the model writes a call: hermes (JSON in <tool_call>, as Qwen 2.5 and 3 do) | llama (JSON
    alone, as Llama 3 does) | xml (<function=NAME> in <tool_call>, as Qwen 3.5 does) | tagged
    (<NAME>argument</NAME>) | template (the tokenizer's own response_template) | auto (what the chat
    template shows)."""
    split_special_tokens: bool = True
    """A special token in what an environment or a tool says, such as <|im_end|>, is text: the model
    reads its characters | false: it is that token, so a tool's result may end turns and begin
    others."""
    max_turns: int = number(8, least=1, most=10_000)
    """Turns of the model in an episode. A call in the last one is not run: the rollout ends as at
    sampling.max_tokens."""
    timeout_s: float = number(30.0, above=0, most=DAY_S)
    """Longest time for an environment's reset, for all calls of one turn, or for its reward. Beyond
    it the episode has failed."""
    episode_timeout_s: float = number(600.0, above=0, most=DAY_S)
    """Longest time that the calls of one episode may take together. Beyond it the episode has
    failed."""
    num_workers: int = number(1, least=1, most=1024)
    """Processes that run environments and tools; each plays many episodes at once."""
    max_restarts: int = number(3, least=0, most=1000)
    """How often an episode begins again because its environment's process was lost. Once more, and
    it has failed. Replicas that are lost do not count."""
    max_failure_rate: float = number(0.1, least=0, most=1)
    """The run stops when more than this share of the last 1000 turns failed (after 50): their
    environment raised, hung or returned what it must not. Such a rollout is not trained on, the
    rest of its group is. A tool that raises is no failure: the model is told the error."""

    @property
    def is_used(self) -> bool:
        """Whether rollouts take turns."""
        return bool(self.tools)
