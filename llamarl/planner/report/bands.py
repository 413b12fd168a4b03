"""How far a forecast may be off, in words.

Owns: bands made from the spread of public measurements about their forecasts. Does not own: the
spread (`efficiency.py`). Invariant: a band says which share of the measurements lies in it; on a
kind of card that no measurement confirms there is none, and a line says so.
"""

from llamarl.core.config import Config
from llamarl.core.config.generator import pools_of
from llamarl.core.device.names import is_gpu
from llamarl.planner.efficiency import CONFIRMED, SPREADS

NO_BAND = "no band for a publish: no measurement on GPUs has been compared with its forecast"

Band = tuple[float, float]
"""The shortest and the longest, in seconds."""


def unconfirmed(kind: str, config: Config) -> str:
    """Whose forecast no measurement confirms, such as "a generator on H20-96GB", of a "trainer", a
    "generator" or a "step", which has both; "" if there are some for all."""
    own = config.cluster.planned_gpu
    cards = {
        "trainer": [own if is_gpu(config.trainer.device) else "CPUs"],
        "generator": [
            (pool.gpu or own) if is_gpu(pool.generator.device) else "CPUs"
            for pool in pools_of(config.generator)
        ],
    }
    sides = cards if kind == "step" else {kind: cards[kind]}
    found = {
        f"a {side} on {card}"
        for side, those in sides.items()
        for card in those
        if card not in CONFIRMED[side]
    }
    return " and ".join(sorted(found))


def bands(kind: str, seconds: float, config: Config) -> dict[str, Band]:
    """What public measurements let expect of a forecast of so many `seconds`: "band_s", where nine
    of ten lie, and of one side "half_s", where the middle half does; nothing where none confirms
    the kind of card. A step is as uncertain as any of its sides, or as whole steps are."""
    if unconfirmed(kind, config):
        return {}
    wide = SPREADS.values() if kind == "step" else [SPREADS[kind]]
    low, high = min(each.most[0] for each in wide), max(each.most[1] for each in wide)
    found = {"band_s": (seconds * low, seconds * high)}
    if kind != "step":
        low, high = SPREADS[kind].half
        found["half_s"] = seconds * low, seconds * high
    return found


def band_words(kind: str, seconds: float, what: str, config: Config) -> str:
    """One line."""
    if unknown := unconfirmed(kind, config):
        return f"no band: no public measurement confirms forecasts of {unknown}"
    found = bands(kind, seconds, config)
    if kind == "step":
        return (
            f"band: {what} takes {_shown(found['band_s'])}: nine of ten public measurements of its "
            f"sides, and {SPREADS['step'].num_rows} of whole steps, are as far off their forecasts"
        )
    return (
        f"band: {what} takes {_shown(found['half_s'])} if it is like the middle half of "
        f"{SPREADS[kind].num_rows} public measurements, {_shown(found['band_s'])} if like nine of "
        "ten"
    )


def _shown(band: Band) -> str:
    return f"{band[0]:.3g} to {band[1]:.3g} s"
