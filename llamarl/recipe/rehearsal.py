"""A recipe without parts that a rehearsal of it leaves out.

Owns: all keys that stand for such a part, so that what is left is a recipe. Does not own: what is
simulated (`planner/`) or tried (`checks/`). Invariant: of every recipe that trains these make one
that passes its checks.
"""

from dataclasses import replace

from llamarl.config import Config, EnvironmentConfig, EvaluationConfig, RewardConfig
from llamarl.types import REWARD


def without_evaluation(config: Config) -> Config:
    """Nothing is held out, and no version is the best."""
    return replace(
        config,
        data=replace(config.data, held_out=None),
        evaluation=EvaluationConfig(),
        checkpoint=replace(config.checkpoint, best=""),
    )


def without_own_stages(config: Config) -> Config:
    """Rollouts pass no stage of the recipe's task.py."""
    algorithm = replace(
        config.algorithm, reward_columns=[REWARD], reward_column_weights=[1.0], loss_columns=[]
    )
    return replace(config, algorithm=algorithm, experience=replace(config.experience, stages=[]))


def without_rewards(config: Config) -> Config:
    """Every rollout is one answer, and gets its reward from a caller."""
    return replace(
        config, environment=EnvironmentConfig(), reward=RewardConfig(functions=["format"])
    )


def with_processes(config: Config) -> Config:
    """Executors are processes, as many as there may be, also if the run has them all in one."""
    return replace(config, cluster=replace(config.cluster, backend="monarch"))
