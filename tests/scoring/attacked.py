"""The kinds of containers that this machine has, and programs run in one, as another user too."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from llamarl.scoring.sandbox.containers import CONTAINERS, Kind, ProgramLimits, run_in


def can_be_had(kind: Kind) -> bool:
    try:
        return run_in(kind, "print(42)", "", ProgramLimits(seconds=20.0)).is_good
    except (OSError, RuntimeError, ImportError):
        return False


HAD = [kind for kind in CONTAINERS if can_be_had(kind)]


def main() -> None:
    """Read the kind, the limits and the programs as JSON; write how each program ended."""
    told = json.load(sys.stdin)
    kind = next(each for each in CONTAINERS if each.__name__ == told["kind"])
    limits = ProgramLimits(**told["limits"])
    ran = [asdict(run_in(kind, source, "", limits)) for source in told["programs"]]
    json.dump(ran, sys.stdout)


if __name__ == "__main__":
    main()
