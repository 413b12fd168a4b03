"""`task`: the reward that a recipe's own task.py defines, as `reward(prompt, completion)`.

`prompt` is a `llamarl.types.Prompt` (`fields` is its data row), `completion` the text after the
prompt without special tokens; the result is any finite number, 1 meaning full marks. It runs in
every process of the reward pool.
"""

from llamarl.config import RewardConfig
from llamarl.environments.rewards.functions import Reward
from llamarl.task_file import execute
from llamarl.types import Prompt


def load_reward(source: str) -> Reward:
    """The function `reward` of this text. ValueError unless it exists and takes two
    arguments; what the text raises is passed on."""
    function = execute(source, ["reward"])["reward"]

    def reward(prompt: Prompt, completion: str, finished: bool, config: RewardConfig) -> float:
        return function(prompt, completion)

    return reward
