"""What everything takes: the seconds that simulated executors sleep for.

Owns: the record, and what of it follows from hardware. Does not own: measured costs
(`calibration.py`) or hardware constants (`hardware.py`). Invariant: every entry is of one process
on a free processor; waiting, sharing and order come from the simulation.
"""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds; those of the generator are of one replica, those of the trainer of its slowest rank.

    A decode step of `rows` rollouts with `context` tokens in their KV caches takes

        decode_step_s + rows * decode_row_s
            + max(decode_read_s + context * decode_context_s, rows * decode_flops_s)

    that is overhead, plus memory traffic or arithmetic, whichever takes longer. A micro-batch of n
    tokens whose rollouts have the lengths l takes

        micro_batch_s + max(n * token_s + sum(l^2) * square_s, hidden_s)

    where `hidden_s` is the traffic that can go on behind arithmetic; `forward_share` of the
    arithmetic is the forward pass. A prefill, and a pass of the reference, grow with tokens and
    squares of lengths alike. `write_s` brings a version from the trainer to one replica per
    host, `relay_s` on to each other one, `check_s` is spent on it there. `moves_s` (by executor and
    kind, "trainer weights") are changes of place on a shared device. `turnaround_s`
    passes between an optimizer step and the next passes beside messages and storage; `row_s` is
    what each rollout costs in processes that are not simulated. `save_s` is a checkpoint,
    `start_s` the start of a replica, or a stage, while the run goes on.

    With pools that differ, `pools` has the costs of each one's replicas and of the trainer's writes
    to them; all other entries there mean nothing. (): all replicas are alike.
    """

    decode_step_s: float = 0.0
    decode_row_s: float = 0.0
    decode_read_s: float = 0.0
    decode_context_s: float = 0.0
    decode_flops_s: float = 0.0
    prefill_call_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_square_s: float = 0.0
    commit_s: float = 0.0
    part_s: float = 0.0
    micro_batch_s: float = 0.0
    token_s: float = 0.0
    square_s: float = 0.0
    hidden_s: float = 0.0
    forward_share: float = 1 / 3
    optimizer_s: float = 0.0
    snapshot_s: float = 0.0
    save_s: float = 0.0
    start_s: float = 0.0
    write_s: float = 0.0
    relay_s: float = 0.0
    check_s: float = 0.0
    score_call_s: float = 0.0
    score_row_s: float = 0.0
    infer_token_s: float = 0.0
    infer_square_s: float = 0.0
    store_row_s: float = 0.0
    message_s: float = 0.0
    turnaround_s: float = 0.0
    row_s: float = 0.0
    moves_s: dict[str, float] = field(default_factory=dict)
    num_cores: int = 0
    """Processors that all processes share; 0: each has its own."""
    shared_speed: float = 1.0
    """Speed of a process beside which another one works, when processors are shared."""
    pools: tuple["Costs", ...] = ()

    def of_pool(self, number: int) -> "Costs":
        """Those that hold for the replicas of this pool."""
        return self.pools[number] if self.pools else self

    def decode_s(self, rows: int, context: int, num_steps: int = 1) -> float:
        """`num_steps` decode steps of `rows` rollouts, `context` tokens before the first one."""
        if not rows or not num_steps:
            return 0.0
        flops_s = rows * self.decode_flops_s
        read_s = self.decode_read_s + context * self.decode_context_s
        growth_s = rows * self.decode_context_s
        num_flops = num_steps  # steps in which arithmetic takes longer
        if growth_s > 0:
            num_flops = math.ceil(min(num_steps, max(0.0, (flops_s - read_s) / growth_s)))
        elif read_s >= flops_s:
            num_flops = 0
        num_read = num_steps - num_flops
        growths = num_read * (num_flops + num_steps - 1) / 2  # sum of the step numbers from then on
        overhead_s = self.decode_step_s + rows * self.decode_row_s
        return num_steps * overhead_s + num_flops * flops_s + num_read * read_s + growths * growth_s

    def steps_within(self, rows: int, context: int, seconds: float, most: int) -> int:
        """How many of at most `most` decode steps have begun within `seconds`, at least one."""
        low, high = 0, most  # `low` steps are over by then
        while low + 1 < high:
            middle = (low + high) // 2
            if self.decode_s(rows, context, middle) <= seconds:
                low = middle
            else:
                high = middle
        return low + 1

    def prefill_s(self, lengths: list[int]) -> float:
        """One prefill of sequences with these lengths."""
        if not any(lengths):
            return 0.0
        tokens_s = _sum_s(lengths, self.prefill_token_s, self.prefill_square_s)
        return self.prefill_call_s + tokens_s

    def infer_s(self, lengths: list[int]) -> float:
        """The reference's pass over rollouts with these lengths, prompt included."""
        return _sum_s(lengths, self.infer_token_s, self.infer_square_s)

    def arithmetic_s(self, lengths: list[int]) -> float:
        """Forward and backward of rollouts with these lengths, prompt included, on one rank."""
        return _sum_s(lengths, self.token_s, self.square_s)


def _sum_s(lengths: list[int], token_s: float, square_s: float) -> float:
    """Seconds that grow with tokens, and with squares of lengths."""
    return sum(lengths) * token_s + sum(length * length for length in lengths) * square_s
