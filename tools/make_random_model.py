"""Make a checkpoint of random weights with Llama 3.2 1B's shape, and lengths for its rollouts.

    python tools/make_random_model.py FOLDER [--device cuda|cpu] [--tiny]

FOLDER gets `checkpoint`, with the quickstart's tokenizer, and `lengths.json`, for
`sampling.replay_lengths`: so a run of the model takes the time of a trained one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness import ROOT

sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="draws them")
    parser.add_argument("--tiny", action="store_true", help="two small layers")
    arguments = parser.parse_args()
    from gpu_bench.setting import full, make_checkpoint, make_lengths, tiny

    arguments.folder.mkdir(parents=True, exist_ok=True)
    setting = (tiny if arguments.tiny else full)(arguments.device, str(arguments.folder))
    made = Path(make_checkpoint(setting, setting.model, has_weights=True))
    print(f"{made.rename(arguments.folder / 'checkpoint')}, {make_lengths(setting)}")


if __name__ == "__main__":
    main()
