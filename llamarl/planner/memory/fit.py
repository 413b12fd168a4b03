"""Whether a recipe fits, asked before a run starts.

Owns: the refusal, a bound for small runs, and which kind of GPU this machine has. Does not own: the
forecast (`ranks.py`) or what a kind of GPU can do. Invariant: torch is imported only if
the bound leaves it open whether all fits, so the controller's process never loads it for a small
run on CPUs, and no CUDA context comes up there.
"""

import itertools
import logging
import math
from dataclasses import replace

from llamarl.core.config import Config, GeneratorConfig, VllmConfig
from llamarl.core.config.generator import pools_of
from llamarl.core.config.rank_assignment import assign, needs_gpu
from llamarl.core.device.names import AUTO, TOOL, cards_here, is_kind
from llamarl.core.fields import require
from llamarl.core.memory import available_bytes
from llamarl.model.architecture import AnyArchitecture, Architecture, OtherArchitecture
from llamarl.model.inventory import parameter_shapes
from llamarl.planner.forecast import NO_MODELS, FrozenModels, RankMemory
from llamarl.planner.hardware import CPU, GPUS, check_kinds
from llamarl.publish.layout import KEPT_BYTES, MESSAGE_BYTES

log = logging.getLogger(__name__)

WIDE_BYTES = 4  # of a float32
TILE_BYTES = 1 << 22  # of a matrix that a CPU quantises
GIB = 2**30
MOST_TAKEN = 0.1  # of a card: a desktop takes less
FIRST_WITH_BFLOAT16 = 8.0  # compute capability


def check_fit(
    config: Config, architecture: AnyArchitecture, frozen: FrozenModels = NO_MODELS
) -> None:
    """ValueError, in one line with numbers and what to change, if the recipe does not fit.

    On CUDA against `cluster.gpu`, which is the card of this machine if it is auto (ValueError too
    if it is unknown, or lacks a dtype), on CPUs against what this
    machine has left, where all executors of a host count together. Of a family that we do not know
    there is no forecast: one line says so.
    """
    if isinstance(architecture, OtherArchitecture):
        log.warning("no forecast of the memory that a %s needs", architecture.model_type)
        return
    if needs_gpu(config):
        check_cards(config)
        config = on_this_card(config)
        check_kinds(config)
    elif upper_bound_bytes(config, architecture, frozen) <= available_bytes():
        return
    from llamarl.planner.memory.ranks import forecast_memory, fullest

    forecast = forecast_memory(config, architecture, frozen)
    if not forecast.fits:
        enough = (advice.text for advice in forecast.advice if advice.is_enough)
        change = next(enough, "no single change is enough")
        raise ValueError(f"{refusal(config, fullest(forecast.ranks))}; {change}")


def upper_bound_bytes(
    config: Config, architecture: Architecture, frozen: FrozenModels = NO_MODELS
) -> int:
    """What all executors together need on CPUs, at most: as if nothing were sharded, and every
    token were kept in each of some dozen forms. Never below what `forecast_memory` sums up."""
    a, trainer = architecture, config.trainer
    model_bytes = _model_bytes(a)
    longest = max(pool.generator.max_model_len for pool in pools_of(config.generator))
    num_tokens = 2 * max(trainer.tokens_per_micro_batch, longest)
    models = [*[a] * config.has_reference_model, *frozen.values()]
    trainer_bytes = 16 * model_bytes + 6 * sum(map(_model_bytes, models))
    trainer_bytes += num_tokens * sum(map(_token_bytes, [a, *models]))
    kept_bytes = len(pools_of(config.generator)) * model_bytes
    trainer_bytes += 2 * MESSAGE_BYTES + min(KEPT_BYTES, kept_bytes)
    trainer_bytes += TILE_BYTES
    num_processes = (1 + len(models)) * trainer.num_ranks + 2 + config.experience.units_per_host
    total = trainer.num_ranks * trainer_bytes
    for pool in pools_of(config.generator) if not config.algorithm.imitates else ():
        num_ranks = len(pool.replicas) * pool.generator.num_ranks
        rank_bytes = _generator_bytes(pool.generator, a) + 2 * MESSAGE_BYTES
        total += num_ranks * rank_bytes
        num_processes += num_ranks
    return total + num_processes * GPUS[CPU].reserve_bytes


def _generator_bytes(generator: GeneratorConfig, a: Architecture) -> int:
    """Of one rank, without messages."""
    kv_bytes = generator.max_num_seqs * (generator.max_model_len + 64) * 2 * a.num_layers
    kv_bytes *= a.num_kv_heads * a.head_dim * WIDE_BYTES
    if isinstance(generator, VllmConfig):
        kv_bytes = generator.kv_cache_bytes
    num_prefilled = min(generator.max_num_seqs * generator.max_model_len, 2**14)
    num_prefilled = max(num_prefilled, generator.max_model_len)
    layer_bytes = 16 * WIDE_BYTES * (a.hidden_size + _head_channels(a) + a.intermediate_size)
    logits_bytes = generator.max_num_seqs * a.vocab_size * 4 * WIDE_BYTES
    return 6 * _model_bytes(a) + kv_bytes + num_prefilled * layer_bytes + logits_bytes


def _model_bytes(a: Architecture) -> int:
    num_elements = sum(math.prod(shape) for shape in parameter_shapes(a).values())
    return WIDE_BYTES * num_elements + 64 * len(parameter_shapes(a))


def _head_channels(a: Architecture) -> int:
    return (a.num_heads + 2 * a.num_kv_heads) * a.head_dim


def _token_bytes(a: Architecture) -> int:
    """Of one token in a pass."""
    channels = 2 * a.hidden_size + _head_channels(a) + a.intermediate_size
    return WIDE_BYTES * 16 * ((a.num_layers + 4) * channels + a.vocab_size)


def refusal(config: Config, rank: RankMemory) -> str:
    """The line that says by how much a rank does not fit, and what takes most of its memory."""
    largest = sorted(rank.bytes_by_kind.items(), key=lambda item: -item[1])[:3]
    shown = ", ".join(f"{kind} {num_bytes / GIB:.1f}" for kind, num_bytes in largest)
    who = "all processes of a host" if rank.executor == "host" else f"the fullest {rank.executor}"
    where = "this machine has left"
    if needs_gpu(config):
        pools = {pool.key: pool for pool in pools_of(config.generator)}
        pool = pools.get(rank.executor)
        kind = (pool.gpu if pool else "") or config.cluster.planned_gpu
        who += f" at {pool.site}" if pool and pool.site else ""
        where = "a host has" if rank.executor == "host" else f"one {kind} has"
    return (
        f"{who} must fit into the {rank.device_bytes / GIB:.1f} GiB that {where}, got "
        f"{rank.total_bytes / GIB:.1f} GiB ({shown})"
    )


def check_cards(config: Config) -> str:
    """The cards of this machine, in words; ValueError unless they are what the recipe needs: so
    many, of that kind, with their memory free, and a torch that can use them.

    Hosts elsewhere check their own when their processes start.
    """
    if not needs_gpu(config):
        return f"none needed; {available_bytes() / GIB:.1f} GiB of host memory are free"
    if config.cluster.hosts or config.cluster.size > 1:
        return f"{config.cluster.num_gpus_per_host} on each of {config.cluster.size} hosts"
    cards = cards_here()
    if not cards:
        return f"{TOOL} does not say"
    places = itertools.chain.from_iterable(assign(config).values())
    num_needed = max(device.gpu or 0 for device in places) + 1
    name = "cluster.num_gpus_per_host"
    require(
        len(cards) >= num_needed, name, f"be at most {len(cards)}, as this machine has", num_needed
    )
    for number, card in enumerate(cards[:num_needed]):
        wanted = config.cluster.gpu
        must = f"be auto, or the kind of every card; number {number} is a {card.name}"
        require(is_kind(wanted, card.name, card.memory_bytes), "cluster.gpu", must, wanted)
        taken = card.memory_bytes - card.free_bytes
        if taken > MOST_TAKEN * card.memory_bytes:
            raise ValueError(
                f"the memory of card {number} must be free, got {taken / GIB:.1f} of "
                f"{card.memory_bytes / GIB:.1f} GiB taken by other programs ({TOOL} names them)"
            )
    return f"{num_needed} x {cards[0].name}, {min(c.free_bytes for c in cards) / GIB:.1f} GiB free"


def on_this_card(config: Config) -> Config:
    """The recipe with the kind of this machine's GPU for `cluster.gpu=auto`; as it is if that names
    a kind, if the run has hosts elsewhere, or if no card answers."""
    if config.cluster.gpu != AUTO or config.cluster.hosts or config.cluster.size > 1:
        return config
    kind = kind_here()
    return replace(config, cluster=replace(config.cluster, gpu=kind)) if kind else config


def kind_here() -> str:
    """The kind of the card with the least memory of those that this process may use: one that the
    planner knows, else its size, such as 25.3GB. "" if there is none, or the tool does not say."""
    cards = cards_here()
    if not cards:
        return ""
    card = min(cards)
    known = [kind for kind in GPUS if kind != CPU and is_kind(kind, card.name, card.memory_bytes)]
    if known:
        return max(known, key=len)
    kind = f"{card.memory_bytes / 1e9:.1f}GB"
    log.info("cluster.gpu: a %s of %s, of which no time is forecast", kind, card.name)
    if card.capability < FIRST_WITH_BFLOAT16:
        log.warning("a %s has no arithmetic in bfloat16: set float32 as dtypes", card.name)
    return kind
