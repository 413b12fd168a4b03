"""Groups of a caller's own: made of questions, and checked before they are trained on.

Owns: what may be asked, and what must hold of a group that a trainer gets. Does not own: how it is
written or scored. Invariant: no group passes that a run could not have trained on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from llamarl.config import Config
from llamarl.config.check import require
from llamarl.data.kept_rollouts import is_kept
from llamarl.data.tokenizer import Tokenizer
from llamarl.environments.prompts import make_prompt
from llamarl.groups import Group
from llamarl.loop.engines import Engines
from llamarl.types import Prompt, Sampling

Question = Prompt | Group | str | Mapping[str, Any] | Sequence[Any]
"""What rollouts are asked for: a prompt of the recipe's, a group of the gate's, or a text, the
messages of a chat, a data row or token ids of the caller's own."""


def make_group(
    engines: Engines,
    question: Question,
    num_rollouts: int | None,
    config: Config,
    tokenizer: Tokenizer,
) -> Group:
    """The group of a question, with ids of the gate's; one of the gate's as it is."""
    if isinstance(question, Group):
        return question
    gate, sampling = engines.gate, config.sampling
    group_id, gate.next_group_id = gate.next_group_id, gate.next_group_id + 1
    if not isinstance(question, Prompt):
        number = -1 - group_id  # no line of the recipe's file, and another one each time
        question = make_prompt(question, number, config.data, tokenizer)
        share = config.experience.keep_rollouts
        question = replace(question, is_kept=is_kept(question, share, config.seed))
    if num_rollouts is not None:
        sampling = replace(sampling, rollouts_per_prompt=num_rollouts)
    return Group(
        group_id=group_id,
        prompt=question,
        row_ids=gate.allocate_rows(sampling.rollouts_per_prompt),
        min_version=max(0, engines.published),
    )


def check_trainable(engines: Engines, group: Group, own: Sampling) -> None:
    """ValueError or RuntimeError unless the group has advantages and was sampled as `own` says, by
    versions up to the trainer's."""
    name, found = f"group {group.group_id}", group.advantages
    is_set = len(found) == len(group.row_ids) and all(map(isfinite, found))
    must = f"be {len(group.row_ids)} finite numbers, one per rollout (see settle)"
    require(is_set, f"advantages of {name}", must, found)
    newest = max((span.version for r in group.rollouts.values() for span in r.spans), default=0)
    if newest > engines.version:
        must = f"be written by versions up to {engines.version}, the trainer's"
        raise RuntimeError(f"{name} must {must}, got tokens of version {newest}")
    drawn = engines.rollouts.open[group.row_ids[0]].sampling
    is_own = (drawn.temperature, drawn.top_k, drawn.top_p) == (own.temperature, 0, 1.0)
    must = f"be sampled as the recipe says (temperature {own.temperature:g}) to be trained on"
    require(is_own, name, must, f"temperature {drawn.temperature:g}")
