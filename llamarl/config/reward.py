"""Reward functions and the pool that runs them. A reward that fails is counted; it becomes a number
only with on_failure=zero."""

from dataclasses import dataclass, field

from llamarl.config.check import DAY_S, Section, choice, number

OF_EPISODE = "environment."  # before the name of a function of episode_rewards
LARGEST = 1e9
"""What a reward may be at most, with either sign: squares of gradients that it scales must not
overflow float32."""


@dataclass(kw_only=True)
class RewardConfig(Section):
    """What is rewarded, and how long a reward may take."""

    functions: list[str] = field(default_factory=lambda: ["math"])
    """Reward functions: math | exact | format | code (the program in the completion passes tests) |
    task (`reward` of the recipe's own task.py) | group (`group_reward` there, which scores all
    rollouts of a prompt at once) | environment (what the episode's environment gives, and
    `episode_reward` of task.py) | environment.NAME (the function NAME of the list `episode_rewards`
    of task.py, a reward of its own). In an episode the others get the model's last turn. Accuracy
    is the share of completions to which the first one gives full marks."""
    weights: list[float] = field(
        default_factory=lambda: [1.0], metadata={"least": -1e6, "most": 1e6}
    )
    """One weight per function; the reward is the weighted sum."""
    full_marks: float = number(1.0, least=-LARGEST, most=LARGEST)
    """What the first function gives to a right completion, or more: what accuracy counts, and what
    makes a group whose rewards are all equal `solved`. Set it for rewards on another scale than 0
    to 1."""
    answer_field: str = "answer"
    """Field of the data row that holds the expected answer; `a.b` is field b of the object in a.
    Rows without `answer` may have it in `reward_model.ground_truth`, as those for verl do."""
    pattern: str = r"(?s)^.*Answer: *(.+?)\s*$"
    """Regular expression searched in the completion: `exact` compares its group 1 with the
    answer, `format` gives 1 if it matches."""
    require_stop: bool = True
    """`exact` and `format` give 0 to a completion that did not end by itself."""
    num_workers: int = number(1, least=1, most=1024)
    """Processes of the reward pool."""
    timeout_s: float = number(10.0, above=0, most=DAY_S)
    """A reward that runs longer is killed and counted as hung."""
    on_failure: str = choice("drop", "zero")
    """What happens when the reward of a rollout fails (its code raises, exceeds the time limit or
    returns no number from -1e9 to 1e9): drop (its group is not trained on: a baseline over the
    others would favour completions that reward code can process) | zero (its reward is 0, for
    reward code that fails on wrong answers, such as a verifier that runs out of time). Failures are
    counted."""
    max_failure_rate: float = number(0.1, least=0, most=1)
    """The run stops when more than this share of the last 1000 rewards failed (after 50), with
    any `on_failure`; 1 never stops it."""

    contained: bool = True
    """Programs that a model wrote (reward `code`, tool `python`) run contained by the kernel: no
    network, no files but a scratch folder. The run refuses to start where that is not possible, and
    says in one line what a machine lacks; false lets them run with the rights of the run, on
    purpose."""
    program_s: float = number(5.0, above=0, most=DAY_S)
    """Longest time of one program; a reward's `timeout_s` is for all its programs."""
    program_memory_bytes: int = number(256 * 1024**2, least=32 * 1024**2, most=2**50)
    """Memory of one program and all that it starts, together."""
    program_disk_bytes: int = number(16 * 1024**2, least=0, most=2**50)
    """Size of the files that one program may write."""
    program_output_bytes: int = number(64 * 1024, least=1, most=2**24)
    """Standard output of one program, and as much of standard error; one that writes more is
    ended."""
    program_processes: int = number(32, least=1, most=1024)
    """Processes of one program at once, and their threads."""

    @property
    def episode_rewards(self) -> list[str]:
        """The functions of task.py's list `episode_rewards` that `functions` names, in its
        order."""
        named = [each for each in self.functions if each.startswith(OF_EPISODE)]
        return [each.removeprefix(OF_EPISODE) for each in named]

    @property
    def is_of_episode(self) -> bool:
        """Whether a function reads episodes, which a recipe without environments has not."""
        return "environment" in self.functions or bool(self.episode_rewards)

    def check(self) -> None:
        is_once = len({*self.episode_rewards}) == len(self.episode_rewards)
        self.require(is_once, "functions", "name each function of episode_rewards once")
        self.require(bool(self.functions), "functions", "name at least one function")
        must = f"have one weight per function ({len(self.functions)})"
        self.require(len(self.weights) == len(self.functions), "weights", must)
