"""A config as dotted keys, for tables of hyper-parameters. Invariant: loses no field."""

from __future__ import annotations

import dataclasses


def flatten(section: object, prefix: str = "") -> dict[str, object]:
    """`Config(trainer=TrainerConfig(lr=0.1))` -> {"trainer.lr": 0.1, ...}."""
    assert dataclasses.is_dataclass(section)
    flat: dict[str, object] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat
