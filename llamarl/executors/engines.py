"""Which engine a generator runs. vLLM is imported only if it is chosen."""

from llamarl.config import EmbeddedConfig, GeneratorConfig, VllmConfig
from llamarl.generation.protocol import Engine


def make_engine(
    config: GeneratorConfig,
    checkpoint: str,
    *,
    rank: int,
    num_ranks: int,
    rendezvous: str,
    run_id: str,
) -> Engine:
    """The engine of one rank; several ranks meet at the file `rendezvous`.

    ValueError if it cannot run this checkpoint or config here.
    """
    if isinstance(config, VllmConfig):
        from llamarl.generation.vllm.engine import VllmEngine

        return VllmEngine(
            checkpoint,
            config,
            rank=rank,
            num_ranks=num_ranks,
            rendezvous=rendezvous,
            run_id=run_id,
        )
    from llamarl.generation import engine
    from llamarl.models.architecture import read_architecture

    assert isinstance(config, EmbeddedConfig)
    architecture = read_architecture(checkpoint)
    return engine.EmbeddedEngine(
        architecture, config, rank=rank, num_ranks=num_ranks, rendezvous=rendezvous
    )
