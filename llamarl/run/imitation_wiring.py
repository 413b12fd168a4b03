"""The objects of a session of supervised fine-tuning.

Owns: which object gets which. Does not own: those that every run has (`wiring.py`). Invariant:
nothing here asks for a generator.
"""

import math

from llamarl.loop.engines import Engines
from llamarl.loop.imitation import HeldOutLoss, Imitation
from llamarl.loop.saver import Saver
from llamarl.metrics.run_logger import RunLogger
from llamarl.recipe.sampling_rules import train_sampling
from llamarl.run.fleet import Fleet
from llamarl.run.wiring import Wiring


def build_imitation(
    wiring: Wiring, fleet: Fleet, run_logger: RunLogger, *, deadline_s: float = math.inf
) -> Imitation:
    """Assemble the loop around the trainer of the fleet; the run ends with the step of the
    `deadline_s`."""
    config = wiring.config
    engines = Engines(**wiring.engine_fields(run_logger))
    engines.publisher = publisher = wiring.make_publisher(engines.dispatch)
    evaluator = HeldOutLoss(
        prompts=wiring.inputs.held_out,
        sampling=train_sampling(config, wiring.inputs),
        seed=config.seed,
        engines=engines,
        every_steps=config.evaluation.every_steps,
        version=wiring.state.get("evaluated", -1),
        storage=wiring.executors.storage,
        log=run_logger.log_held_out,
    )
    saver = Saver(
        config=config.checkpoint,
        run_dir=wiring.run_dir,
        engines=engines,
        colocation=wiring.make_colocation(),
        evaluator=evaluator,
        spans=wiring.spans,
        last=config.most_steps,
        deadline_s=deadline_s,
        limit=f"max_hours={config.max_hours:g}",
    )
    fleet.connect(engines.dispatch, publisher, None, lambda: saver.has_last)
    return Imitation(engines=engines, gate=engines.gate, evaluator=evaluator, saver=saver)
