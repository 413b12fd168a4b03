"""The costs of a simulation: the seconds that simulated executors sleep for, each of one process on
a free processor. Waiting, sharing and order come from the simulation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from llamarl.planner.efficiency import OVERLAP
from llamarl.trainer.packing import Assignment


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs in seconds; those of the generator are of one replica, those of the trainer of its
    slowest rank. A decode step of `rows` rollouts with `context` tokens in their KV caches takes, r
    and f being `decode_read_s` and rows * `decode_flops_s`,

        max(decode_launch_s, decode_step_s + rows * decode_row_s + sqrt(r^2 + f^2)
                             + context * decode_context_s)

    that is overhead, each row, matrix products (reading weights and arithmetic) and attention; or
    the launch of its kernels. With experts r is decode_read_s + decode_experts_s * (1 - (1 -
    expert_share)^rows), as a token goes to this share of them, and rows are taken to choose
    independently. A micro-batch of n tokens whose rollouts have the lengths l takes,
    with w = n * token_s + sum(l^2) * square_s,

        micro_batch_s + max(w, hidden_s, launch_s) + OVERLAP * min(w, hidden_s)

    where `hidden_s` is the traffic that goes on beside arithmetic and slows it down;
    `forward_share` of the arithmetic is the forward pass. `write_s` brings a version from the
    trainer to one replica per host, `relay_s` on to each other one, `check_s` is spent on verifying
    it there. `moves_s` (by executor and kind, "trainer weights") are moves on or off a shared
    device. `turnaround_s` passes between an optimizer step and the next passes beside messages and
    storage; `row_s` is the time that each rollout costs in processes that are not simulated.
    `save_s` is a checkpoint, `start_s` the start of a replica, or a stage, while the run goes on.
    With pools that differ, `pools` has the costs of each one's replicas and of the trainer's writes
    to them.
    """

    decode_step_s: float = 0.0
    decode_row_s: float = 0.0
    decode_read_s: float = 0.0
    decode_experts_s: float = 0.0
    expert_share: float = 0.0
    decode_context_s: float = 0.0
    decode_flops_s: float = 0.0
    decode_launch_s: float = 0.0
    prefill_call_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_square_s: float = 0.0
    commit_s: float = 0.0
    part_s: float = 0.0
    micro_batch_s: float = 0.0
    token_s: float = 0.0
    square_s: float = 0.0
    hidden_s: float = 0.0
    launch_s: float = 0.0
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
    kv_tokens: int = 0
    """The tokens that a replica's KV cache holds; 0: all that its slots may write."""
    num_cores: int = 0
    """The processors that all processes share; 0: each has its own."""
    shared_speed: float = 1.0
    """The speed of a process beside which another one works, when processors are shared."""
    pools: tuple["Costs", ...] = ()

    def of_pool(self, number: int) -> "Costs":
        """Return the costs that hold for the replicas of this pool."""
        return self.pools[number] if self.pools else self

    def decode_s(self, rows: int, context: int, num_steps: int = 1) -> float:
        """Return the seconds of `num_steps` decode steps of `rows` rollouts, with `context` tokens
        before the first one."""
        if not rows or not num_steps:
            return 0.0
        read_s = self.decode_read_s
        read_s += self.decode_experts_s * (1 - (1 - self.expert_share) ** rows)
        product_s = math.hypot(read_s, rows * self.decode_flops_s)
        step_s = self.decode_step_s + rows * self.decode_row_s + product_s
        # The context grows by a token of each rollout and step.
        tokens = num_steps * context + rows * num_steps * (num_steps - 1) / 2
        seconds = num_steps * step_s + tokens * self.decode_context_s
        return max(num_steps * self.decode_launch_s, seconds)

    def steps_within(self, rows: int, context: int, seconds: float, most: int) -> int:
        """Return how many of at most `most` decode steps have begun within `seconds`, at least
        one."""
        low, high = 0, most  # `low` steps are over by then
        while low + 1 < high:
            middle = (low + high) // 2
            if self.decode_s(rows, context, middle) <= seconds:
                low = middle
            else:
                high = middle
        return low + 1

    def prefill_s(self, lengths: list[int]) -> float:
        """Return the seconds of one prefill of sequences with these lengths."""
        if not any(lengths):
            return 0.0
        tokens_s = _sum_s(lengths, self.prefill_token_s, self.prefill_square_s)
        return self.prefill_call_s + tokens_s

    def infer_s(self, lengths: list[int]) -> float:
        """Return the seconds of the reference's pass over rollouts with these lengths, prompt
        included."""
        return _sum_s(lengths, self.infer_token_s, self.infer_square_s)

    def arithmetic_s(self, lengths: list[int]) -> float:
        """Return the seconds of forward and backward of rollouts with these lengths, prompt
        included, on one rank."""
        return _sum_s(lengths, self.token_s, self.square_s)

    def passes_s(self, work_s: float) -> float:
        """Return the seconds of a micro-batch whose slowest rank has `work_s` of arithmetic."""
        beside_s = OVERLAP * min(work_s, self.hidden_s)
        return self.micro_batch_s + max(work_s, self.hidden_s, self.launch_s) + beside_s

    def batch_s(self, lengths: Sequence[int], assignment: Assignment) -> float:
        """Return the seconds of all micro-batches of a batch whose rollouts have these lengths (0:
        nothing to learn); the ranks meet at each one's gathers, and the slowest paces it."""
        total_s = 0.0
        for ranks in zip(*assignment, strict=True):
            active = [[lengths[i] for i in positions if lengths[i]] for positions in ranks]
            if any(active):
                total_s += self.passes_s(max(self.arithmetic_s(each) for each in active))
        return total_s


def _sum_s(lengths: list[int], token_s: float, square_s: float) -> float:
    """Return seconds that grow with tokens, and with squares of lengths."""
    return sum(lengths) * token_s + sum(length * length for length in lengths) * square_s
