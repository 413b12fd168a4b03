"""Checks before a run starts whether a recipe fits, and finds out which kind of GPU this machine
has.

Torch is imported only if a bound leaves it open whether all fits: the controller's process never
loads it for a small run on CPUs, and no CUDA context comes up there."""

import itertools
import logging
import math
from dataclasses import replace

from llamarl.core.config import Config, VllmConfig
from llamarl.core.config.generator import pools_of
from llamarl.core.config.rank_assignment import assign, needs_gpu
from llamarl.core.device.hardware import GPUS, gpu
from llamarl.core.device.names import AUTO, CPU, TOOL, cards_here, is_kind
from llamarl.core.fields import require
from llamarl.core.memory import available_bytes
from llamarl.model.architecture import (
    NO_MODELS,
    AnyArchitecture,
    Architecture,
    FrozenModels,
    OtherArchitecture,
)
from llamarl.model.inventory import parameter_shapes
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
    """Raise ValueError, in one line with numbers and what to change, if the recipe does not fit.

    On CUDA the forecast is compared with `cluster.gpu`, which is the card of this machine if it is
    auto (ValueError too if it is unknown, or lacks a dtype); on CPUs with the memory that this
    machine has left, where all executors of a host count together. For a model family that we do
    not know there is no forecast, and a warning says so.
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
    from llamarl.controller.memory import forecast_memory, fullest, refusal

    forecast = forecast_memory(config, architecture, frozen)
    if not forecast.fits:
        enough = (advice.text for advice in forecast.advice if advice.is_enough)
        change = next(enough, "no single change is enough")
        raise ValueError(f"{refusal(config, fullest(forecast.ranks))}; {change}")


def upper_bound_bytes(
    config: Config, architecture: Architecture, frozen: FrozenModels = NO_MODELS
) -> int:
    """Return the most bytes that all executors together need on CPUs: as if nothing were sharded,
    each model had its weights in two dozen forms, and every token of a pass had some dozen. The
    result is never below the sum of `forecast_memory`."""
    a, trainer = architecture, config.trainer
    models = [a, *[a] * config.has_reference_model, *frozen.values()]
    kept_bytes = 22 * sum(map(_model_bytes, models)) + TILE_BYTES
    kept_bytes += 2 * MESSAGE_BYTES + KEPT_BYTES
    token_bytes = sum(map(_token_bytes, models))
    kv_bytes = 2 * WIDE_BYTES * a.num_layers * a.num_kv_heads * a.head_dim
    total, num_ranks = trainer.num_ranks * kept_bytes, trainer.num_ranks
    most_tokens = trainer.tokens_per_micro_batch
    for pool in pools_of(config.generator):
        generator = pool.generator
        most_tokens = max(most_tokens, generator.max_model_len)
        if config.algorithm.is_sft:
            continue  # no generator is started
        num_cached = generator.max_num_seqs * (generator.max_model_len + 64)
        cache_bytes = num_cached * kv_bytes
        if isinstance(generator, VllmConfig):
            cache_bytes = generator.kv_cache_bytes
        num_prefilled = min(num_cached, 2**14) + generator.max_model_len + generator.max_num_seqs
        own = len(pool.replicas) * generator.num_ranks
        total += own * (kept_bytes + cache_bytes + num_prefilled * token_bytes)
        num_ranks += own
    total += trainer.num_ranks * 2 * most_tokens * token_bytes
    num_others = len(models) * trainer.num_ranks + 2 + config.experience.units_per_host
    return total + (num_ranks + num_others) * GPUS[CPU].reserve_bytes


def _model_bytes(a: Architecture) -> int:
    num_elements = sum(math.prod(shape) for shape in parameter_shapes(a).values())
    return WIDE_BYTES * num_elements + 64 * len(parameter_shapes(a))


def _token_bytes(a: Architecture) -> int:
    """Return the bytes that one token takes in a pass."""
    heads = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    channels = 2 * a.hidden_size + heads + a.active_channels
    return WIDE_BYTES * 16 * ((a.num_layers + 4) * channels + a.vocab_size)


def check_kinds(config: Config) -> None:
    """Raise ValueError if a GPU of the recipe is unknown, or has no arithmetic in a dtype asked
    for."""
    asked = [("trainer.compute_dtype", config.trainer.device, config.trainer.compute_dtype, "")]
    asked += [
        (f"{pool.key}.dtype", pool.generator.device, pool.generator.dtype, pool.gpu)
        for pool in pools_of(config.generator)
    ]
    for key, device, dtype, own in asked:
        kind = own or config.cluster.planned_gpu
        flops = gpu(kind, device).flops
        wanted = f"be float32 on {kind}, which has no arithmetic in {dtype}"
        require(not flops or dtype in flops, key, wanted, dtype)


def check_cards(config: Config) -> str:
    """Return the cards of this machine, in words. ValueError unless they are what the recipe needs:
    enough of them, of that kind, with their memory free, and a torch that can use them.

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
    """Return the recipe with the kind of this machine's GPU in place of `cluster.gpu=auto`. It is
    returned as it is if that names a kind, if the run has hosts elsewhere, or if no card answers.
    """
    if config.cluster.gpu != AUTO or config.cluster.hosts or config.cluster.size > 1:
        return config
    kind = kind_here()
    return replace(config, cluster=replace(config.cluster, gpu=kind)) if kind else config


def kind_here() -> str:
    """Return the kind of the card with the least memory among those that this process may use: one
    that the planner knows, or else its size, such as 25.3GB. "" if there is none, or the tool does
    not say."""
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
