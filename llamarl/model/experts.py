"""Mixtures of experts: the router, the experts' products on one rank or many, and the record of the
experts that tokens were sent to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.core.device.devices import platform_of
from llamarl.model.architecture import Architecture, ExpertSizes


def router_probs(x: Tensor, weight: Tensor) -> Tensor:
    """Return the router's probabilities [n, experts] of tokens `x` [n, hidden]: float32, whatever
    the dtype of `x` and `weight` [experts, hidden]."""
    return F.linear(x.float(), weight.float()).softmax(-1)


def choose(probs: Tensor, num_chosen: int) -> Tensor:
    """Return the likeliest experts of each token, int64 [n, num_chosen], the likeliest first."""
    return probs.detach().topk(num_chosen, dim=-1).indices


def gates(probs: Tensor, chosen: Tensor, sizes: ExpertSizes) -> Tensor:
    """Return the weights of the chosen experts, float32 [n, num_chosen]."""
    found = probs.gather(1, chosen)
    return found / found.sum(-1, keepdim=True) if sizes.normalized else found


class Arrangement(NamedTuple):
    """The places of n tokens, k times each, when they are sorted by expert: `order` int64 [n * k]
    has the place t * k + i of the i-th expert of token t, `inverse` undoes it, and `counts` int64
    [experts] says how many there are of each expert."""

    order: Tensor
    inverse: Tensor
    counts: Tensor


def arrange(chosen: Tensor, num_experts: int) -> Arrangement:
    """Return the arrangement of tokens whose experts are `chosen` [n, k]."""
    experts = chosen.flatten()
    order = experts.argsort(stable=True)
    places = torch.arange(len(order), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, places)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=order.device)
    return Arrangement(order, inverse, counts.scatter_add_(0, experts, torch.ones_like(experts)))


class _Rows(torch.autograd.Function):
    """x[index], whose gradient is read at `back` and summed over the rows that came from one.

    Autograd would add with atomic operations, in an order that no GPU repeats."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.num_rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        found = grad.index_select(0, back)
        if len(found) > ctx.num_rows:
            found = found.unflatten(0, (ctx.num_rows, -1)).sum(1)
        return found, None, None


def spread(x: Tensor, arrangement: Arrangement, num_chosen: int) -> Tensor:
    """Return the tokens [n, hidden], each once per chosen expert and sorted by it."""
    order, inverse, _ = arrangement
    return _Rows.apply(x, order // num_chosen, inverse)


def combine(y: Tensor, arrangement: Arrangement, weights: Tensor) -> Tensor:
    """Return the weighted sums [n, hidden] of the experts' outputs `y`, which are arranged; summed
    in float32, in the dtype of `y`."""
    order, inverse, _ = arrangement
    rows: Tensor = _Rows.apply(y, inverse, order)
    return (rows.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1).to(y.dtype)


class _Segments(torch.autograd.Function):
    """Products of consecutive rows with their experts' matrices, one expert after the other; those
    without rows are passed over.

    Measured on one core, forward and backward take as long as torch's grouped product on a CPU (0.8
    to 1.3 times it, 8 to 128 experts), which wants sizes that are multiples of 16 bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrices, counts)
        out = x.new_empty(len(x), matrices.shape[1])
        for expert, rows in segments(counts):
            torch.mm(x[rows], matrices[expert].t(), out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, matrices, counts = ctx.saved_tensors
        of_x, of_matrices = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if of_x else None
        grad_matrices = torch.zeros_like(matrices) if of_matrices else None
        for expert, rows in segments(counts):
            if grad_x is not None:
                torch.mm(grad[rows], matrices[expert], out=grad_x[rows])
            if grad_matrices is not None:
                torch.mm(grad[rows].t(), x[rows], out=grad_matrices[expert])
        return grad_x, grad_matrices, None


def segments(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have rows, with these, which are sorted by expert; none on the meta
    device, which computes nothing."""
    start = 0
    for expert, count in enumerate(counts.tolist() if counts.device.type != "meta" else ()):
        if count:
            yield expert, slice(start, start + count)
        start += count


def grouped_mm(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Return the products [rows, out] of `x` [rows, in], sorted by expert, with the `matrices`
    [experts, out, in]; each expert has `counts` rows."""
    is_aligned = all(size * x.element_size() % 16 == 0 for size in matrices.shape[1:])
    if is_aligned and platform_of(x.device).has_grouped_mm:
        return F.grouped_mm(x, matrices.transpose(1, 2), offs=counts.cumsum(0).int())
    out: Tensor = _Segments.apply(x, matrices, counts)
    return out


def grouped_feed_forward(x: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
    """Return down(silu(gate(x)) * up(x)) by each row's own expert: `x` [rows, hidden] is sorted by
    expert, of which there are `counts` rows each, `gate_up` [experts, 2 * inner, hidden] and `down`
    [experts, hidden, inner]."""
    gate, up = grouped_mm(x, gate_up, counts).chunk(2, dim=-1)
    return grouped_mm(F.silu(gate) * up, down, counts)


class TokenExchange:
    """The all-to-all of tokens between the ranks of `group`, which have equal shares of the
    experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.num_ranks = group, dist.get_world_size(group)

    def announce(self, counts: Tensor) -> Tensor:
        """Tell each rank how many rows it will get for each of its experts. Returns how many come
        here: int64 [experts], by rank, and then by expert of this rank."""
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        return arriving

    def splits(self, counts: Tensor, arriving: Tensor) -> tuple[list[int], list[int]]:
        """Return how many rows go to each rank, and come from it."""
        sent, received = (
            torch.stack((counts, arriving)).view(2, self.num_ranks, -1).sum(-1).tolist()
        )
        return sent, received

    def send(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Send the first `sent[0]` rows to the group's first rank, and so on. Returns the rows that
        come, those of the first rank first."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        return all_to_all_single_autograd(x.contiguous(), [*received], [*sent], self.group)


class Experts(nn.Module):
    """The stacked experts of a layer. With an `exchange` this rank has an equal share of them, and
    tokens travel to the ranks that have theirs and back."""

    exchange: TokenExchange | None = None

    def __init__(self, sizes: ExpertSizes, hidden_size: int) -> None:
        super().__init__()
        number, inner = sizes.num_experts, sizes.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(number, 2 * inner, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(number, hidden_size, inner))
        for matrices in self.parameters():  # as linear layers begin
            bound = matrices.shape[2] ** -0.5
            nn.init.uniform_(matrices, -bound, bound)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs for rows `x` [rows, hidden], which are sorted by expert;
        `counts` int64 [experts]."""
        matrices = _local(self.gate_up_proj), _local(self.down_proj)
        if (exchange := self.exchange) is None:
            return grouped_feed_forward(x, *matrices, counts)
        arriving = exchange.announce(counts)
        num_sent, num_received = exchange.splits(counts, arriving)
        received = exchange.send(x, num_received, num_sent)
        own = torch.arange(len(matrices[0]), device=x.device).repeat(exchange.num_ranks)
        by_expert = arrange(
            own.repeat_interleave(arriving, output_size=len(received))[:, None], len(matrices[0])
        )
        y = grouped_feed_forward(spread(received, by_expert, 1), *matrices, by_expert.counts)
        back: Tensor = _Rows.apply(y, by_expert.inverse, by_expert.order)
        return exchange.send(back, num_sent, num_received)


def _local(parameter: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor  # takes half a second, which a generator saves

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class LayerRouting:
    """The experts of a layer's tokens in one forward pass.

    `chosen` [n, k] are those of a record, or None until the layer's router has chosen; a backward
    pass that computes the layer again finds them here, and so routes as the forward did. Of the
    first `num_real` tokens, as others are padding: `counts` int64 [experts], how many tokens each
    expert has; `entropy`, the sum of the router's entropies in nats; `num_moved`, how many of the
    chosen experts the router would not have chosen itself."""

    def __init__(self, chosen: Tensor | None, num_real: int, aux_weight: float) -> None:
        self.chosen, self.num_real, self.aux_weight = chosen, num_real, aux_weight
        self.counts: Tensor | None = None
        self.entropy: Tensor | None = None
        self.num_moved: Tensor | None = None

    @torch.no_grad()
    def resolve(self, probs: Tensor, sizes: ExpertSizes) -> Tensor:
        """Return the experts of tokens with these `probs`, int64 [n, k], and note the layer's
        numbers, in the first of its passes."""
        if self.counts is not None:
            assert self.chosen is not None
            return self.chosen.long()
        own = chosen = choose(probs, sizes.num_chosen)
        real = slice(self.num_real)
        self.entropy = -torch.special.xlogy(probs[real], probs[real]).sum()
        if self.chosen is None:
            self.chosen = own.to(getattr(torch, sizes.index_dtype))
            self.num_moved = torch.zeros((), dtype=torch.int64, device=probs.device)
        else:
            chosen = self.chosen.long()
            is_own = (chosen[real, :, None] == own[real, None]).any(-1)
            self.num_moved = (~is_own).sum()
        experts = chosen[real].flatten()
        counts = torch.zeros(sizes.num_experts, dtype=torch.int64, device=probs.device)
        self.counts = counts.scatter_add_(0, experts, torch.ones_like(experts))
        return chosen


class _Balanced(torch.autograd.Function):
    """The router's probabilities, to whose gradient that of the load-balancing loss is added."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, pull: Tensor) -> Tensor:
        ctx.save_for_backward(pull)
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (pull,) = ctx.saved_tensors
        return grad + pull, None


class SparseFeedForward(nn.Module):
    """A mixture of experts in place of a layer's feed-forward: `gate` is the router. With tensor
    parallelism over `mesh` each rank routes its own share of the tokens."""

    mesh: Any = None

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        sizes = architecture.experts
        assert sizes is not None
        self.sizes = sizes
        self.gate = nn.Linear(architecture.hidden_size, sizes.num_experts, bias=False)
        self.experts = Experts(sizes, architecture.hidden_size)

    def forward(self, x: Tensor, routing: LayerRouting) -> Tensor:
        """Map [n, hidden_size] to [n, hidden_size]."""
        weight: Tensor = self.gate.weight
        if self.mesh is not None:
            from torch.distributed.tensor import DTensor, Partial

            assert isinstance(x, DTensor)
            assert isinstance(weight, DTensor)
            x, weight = x.to_local(), weight.to_local(grad_placements=[Partial()])
        probs = router_probs(x, weight)
        chosen = routing.resolve(probs, self.sizes)
        if routing.aux_weight:
            probs = _Balanced.apply(probs, self._pull(routing, len(probs)))
        arrangement = arrange(chosen, self.sizes.num_experts)
        y = self.experts(spread(x, arrangement, self.sizes.num_chosen), arrangement.counts)
        return combine(y, arrangement, gates(probs, chosen, self.sizes))

    @torch.no_grad()
    def _pull(self, routing: LayerRouting, num_rows: int) -> Tensor:
        """Return the gradient, float32 [rows, experts], of weight * E * sum_e f_e P_e (Switch
        Transformer, equations 4 to 6), where f_e is the number of choices of expert e per token,
        and P_e its mean probability; over the tokens of all tensor-parallel ranks."""
        assert routing.counts is not None
        counts = torch.cat((routing.counts, routing.counts.new_tensor([routing.num_real])))
        if self.mesh is not None:
            dist.all_reduce(counts, group=self.mesh.get_group())
        num_tokens = counts[-1].clamp(min=1)
        scale = routing.aux_weight * self.sizes.num_experts / num_tokens.square()
        pull = (counts[:-1] * scale).float().expand(num_rows, -1).clone()
        pull[routing.num_real :] = 0
        return pull


def as_cell(experts: np.ndarray) -> np.ndarray:
    """Return a rollout's record of experts [tokens, layers, k] as the column ROUTED_EXPERTS stores
    it: its bytes, uint8."""
    return np.ascontiguousarray(experts).reshape(-1).view(np.uint8)


def read_cell(cell: np.ndarray, num_tokens: int | None, architecture: Architecture) -> np.ndarray:
    """Return the record [tokens, layers, k] in a cell of ROUTED_EXPERTS. Raises ValueError unless
    it is one of `num_tokens` (None: of any number) by this model."""
    sizes, num_layers = architecture.experts, len(architecture.sparse_layers)
    if sizes is None:
        raise ValueError(f"routed_experts must be empty, as {architecture.model_type} has none")
    dtype = np.dtype(sizes.index_dtype)
    num_bytes = num_layers * sizes.num_chosen * dtype.itemsize
    expected = len(cell) // num_bytes if num_tokens is None else num_tokens
    if len(cell) != expected * num_bytes:
        raise ValueError(
            f"routed_experts must have {num_bytes} bytes for each of {expected} tokens "
            f"({num_layers} layers, {sizes.num_chosen} experts), got {len(cell)} bytes: of another "
            "model?"
        )
    found = cell.view(dtype).reshape(expected, num_layers, sizes.num_chosen)
    largest = int(found.max(initial=0))
    if largest >= sizes.num_experts or int(found.min(initial=0)) < 0:
        must = f"name experts below {sizes.num_experts}"
        raise ValueError(f"routed_experts must {must}, got {largest}: of another model?")
    return found


class RoutingStats(NamedTuple):
    """The numbers of the routers in one forward pass, on one rank: for each layer with experts,
    `counts` int64 [layers, experts], `entropy` float32 [layers] and `num_moved` int64 [layers], as
    in LayerRouting; `num_tokens` of this rank."""

    counts: Tensor
    entropy: Tensor
    num_moved: Tensor
    num_tokens: int


def routing_of(
    num_layers: int, record: Tensor | None, num_real: int, aux_weight: float
) -> list[LayerRouting]:
    """Return the routing of each layer with experts, by a `record` [n, layers, k] if there is one;
    `aux_weight` is spread over the layers."""
    share = aux_weight / num_layers
    chosen = [None] * num_layers if record is None else record.unbind(1)
    return [LayerRouting(each, num_real, share) for each in chosen]


def stats_of(routing: Sequence[LayerRouting]) -> RoutingStats:
    """Return the numbers of a pass whose layers have all been computed."""
    columns = zip(*((each.counts, each.entropy, each.num_moved) for each in routing), strict=True)
    counts, entropy, num_moved = (torch.stack([*column]) for column in columns)
    return RoutingStats(counts, entropy, num_moved, routing[0].num_real)
