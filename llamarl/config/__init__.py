"""Every field of a recipe, with its default, its documentation and its checks, except the options
of single algorithms (`algorithms/losses/`). Standard library only, so that composing a recipe takes
milliseconds; a config does not change after its own `__post_init__`."""

from llamarl.config.algorithm import AlgorithmConfig
from llamarl.config.cluster import ClusterConfig
from llamarl.config.environment_keys import EnvironmentConfig
from llamarl.config.evaluation_keys import CheckpointConfig, EvaluationConfig
from llamarl.config.generator_keys import (
    DispatchConfig,
    EmbeddedConfig,
    GeneratorConfig,
    SamplingConfig,
    VllmConfig,
)
from llamarl.config.input_keys import DataConfig, ModelConfig
from llamarl.config.plan_keys import PlanConfig
from llamarl.config.reward import RewardConfig
from llamarl.config.run import (
    Config,
    ExperienceConfig,
    MetricsConfig,
    PlacementConfig,
    StalenessConfig,
    WeightsConfig,
)
from llamarl.config.trainer_keys import LoraConfig, TrainerConfig, TransformersConfig
