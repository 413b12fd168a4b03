"""The options of a command that composes a recipe, apart from the values that it gives.

Owns: which options there are, and their form. Does not own: what they do (`composition.py`,
`main.py`). Invariant: an unknown option is refused in one line.
"""

from itertools import pairwise

from llamarl.config.check import require

MULTIRUN_FLAGS = {"--multirun", "-m"}
CFG_FLAGS = {"--cfg", "-c"}
VALUE_FLAGS = {"--config-dir", "-cd", "--config-name", "-cn", *CFG_FLAGS}
SHOWN = "job"  # what --cfg prints: the composed recipe


def divide(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Flags with their values, and overrides, which Hydra's parser wants in this order.

    ValueError for an unknown flag.
    """
    flags: list[str] = []
    overrides: list[str] = []
    previous = ""
    for argument in arguments:
        is_value = previous in VALUE_FLAGS
        is_flag = argument.startswith("-") and not is_value
        if is_flag and argument.partition("=")[0] not in VALUE_FLAGS | MULTIRUN_FLAGS:
            known = sorted(flag for flag in VALUE_FLAGS | MULTIRUN_FLAGS if flag.startswith("--"))
            raise ValueError(f"an option must be one of {', '.join(known)}, got {argument!r}")
        (flags if is_flag or is_value else overrides).append(argument)
        previous = "" if is_value else argument
    if previous in VALUE_FLAGS:
        raise ValueError(f"{previous} must come with a value, got none")
    return flags, overrides


def flag_values(flags: list[str]) -> list[tuple[str, str]]:
    """`--config-dir=x` and `--config-dir x` alike."""
    joined = [flag.partition("=") for flag in flags if "=" in flag]
    return [(flag, value) for flag, _, value in joined] + list(pairwise(flags))


def is_shown(flags: list[str]) -> bool:
    """Whether --cfg is there; ValueError for another value of it than job, or with --multirun."""
    shown = [value for flag, value in flag_values(flags) if flag in CFG_FLAGS]
    for value in shown:
        require(value == SHOWN, "--cfg", f"be {SHOWN}", value)
        must = "come without --multirun"
        require(not MULTIRUN_FLAGS & {*flags}, "--cfg", must, "both")
    return bool(shown)


def without_cfg(flags: list[str]) -> list[str]:
    """The others."""
    pairs = pairwise(["", *flags])
    return [flag for before, flag in pairs if not {before, flag.partition("=")[0]} & CFG_FLAGS]
