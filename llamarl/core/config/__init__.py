"""Every field of a recipe, with its default, its documentation and its checks, except the options
of single algorithms (`trainer/losses/`). Standard library only, so that composing a recipe takes
milliseconds; a config does not change after its own `__post_init__`."""

from llamarl.core.config.cluster import ClusterConfig
from llamarl.core.config.evaluation import CheckpointConfig, EvaluationConfig
from llamarl.core.config.generator import (
    DispatchConfig,
    EmbeddedConfig,
    GeneratorConfig,
    SamplingConfig,
    VllmConfig,
)
from llamarl.core.config.inputs import (
    DataConfig,
    EnvironmentConfig,
    JudgeConfig,
    ModelConfig,
    RewardConfig,
)
from llamarl.core.config.run import (
    Config,
    ExperienceConfig,
    MetricsConfig,
    PlacementConfig,
    PlanConfig,
    StalenessConfig,
    WeightsConfig,
)
from llamarl.core.config.trainer import (
    AlgorithmConfig,
    LoraConfig,
    TrainerConfig,
    TransformersConfig,
)
