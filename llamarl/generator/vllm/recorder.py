"""The layout of vLLM's parameters in the flat memory, recorded from vLLM's own loader.

The model's `load_weights` runs on tensors without storage, and every `aten.copy_` is recorded
instead of executed. So q, k and v get their rows of the fused parameter, and a tensor-parallel rank
its slices, without a table of names: a publish writes exactly what vLLM would load.

A loader that does more than copy rectangles is refused, so the layout is never wrong."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from llamarl.core.fields import require
from llamarl.generator.vllm.settings import REFUSALS, one_line
from llamarl.generator.vllm.staging import VLLM_SCALE, loading_form
from llamarl.model.inventory import FilePiece, whole_piece
from llamarl.publish.layout import (
    BUFFER,
    Box,
    Format,
    ParameterLayout,
    QuantizedParameter,
    quantized_parameters,
)
from llamarl.publish.target import Memory, MemoryPlan, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The memory of this rank, and the `places` of vLLM's parameters in it, by name. vLLM computes
    with transposed views of the parameters that are `turned`, and with others of the same form that
    it makes of those of `experts`, whose kernels want them packed or shuffled."""

    memory: Memory
    places: dict[str, Place]
    turned: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Load:
    """One copy of the loader: a view of a source tensor into a view of a parameter."""

    whole: FilePiece
    source: Tensor
    parameter: str
    target: Tensor

    @property
    def name(self) -> str:
        """The parameter, by its name in a checkpoint, that is loaded."""
        return self.whole.parameter


class _Recorder(TorchDispatchMode):
    """Records copies from `sources` into `parameters` (by storage id), executing none."""

    def __init__(self, sources: dict[int, FilePiece], parameters: dict[int, str]) -> None:
        super().__init__()
        self.sources, self.parameters = sources, parameters
        self.loads: list[_Load] = []
        self.num_filled: Counter[str] = Counter()  # elements by parameter, padding too
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            whole = self.sources.get(_storage(source))
            parameter = self.parameters.get(_storage(target))
            if whole and parameter and source.shape == target.shape:
                self.num_filled[parameter] += target.numel()
                self.loads.append(_Load(whole, source, parameter, target))
            else:
                name = whole.parameter if whole else parameter
                self.refused.append(name or "an unnamed tensor")
            return target
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            if parameter := self.parameters.get(_storage(args[0])):
                self.num_filled[parameter] += args[0].numel()
            return args[0]  # padding, which no publish writes
        return func(*args, **(kwargs or {}))


def record(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    format_: Format | None = None,
    pieces: Iterable[FilePiece] | None = None,
) -> Recording:
    """Lay out this rank's part of the parameters `shapes` (name -> global shape), which lie in
    files as these `pieces` (None: each is a tensor of its name).

    If vLLM computes with the matrices of `format_` in that form, their values and scales are laid
    out in place of them. Raises ValueError if vLLM's loader does more than copy, or skips a weight
    or a parameter."""
    live = dict(model.named_parameters(remove_duplicate=False))
    with loading_form(model), torch.no_grad():
        forms = dict(model.named_parameters(remove_duplicate=False))
        if pieces is None:
            pieces = (whole_piece(name, tuple(shape)) for name, shape in shapes.items())
        sources = {piece.tensor: piece for piece in pieces}
        weights = {
            tensor: torch.empty(source.file_shape, dtype=dtype, device="meta")
            for tensor, source in sources.items()
        }
        recorder = _Recorder(
            {_storage(weight): sources[tensor] for tensor, weight in weights.items()},
            # A parameter that two modules share has the name of the first.
            {_storage(tensor): name for name, tensor in reversed(forms.items())},
        )
        last = "weights"

        def each() -> Iterator[tuple[str, Tensor]]:
            nonlocal last
            for item in weights.items():
                last = item[0]
                yield item

        try:
            with recorder:
                model.load_weights(each())  # type: ignore[operator]
        except (*REFUSALS, RuntimeError) as error:
            raise ValueError(
                f"vLLM's loader must take the checkpoint's {last}, got {one_line(error)}"
            ) from error
        loads = recorder.loads
        _check(recorder, forms, live, shapes, {dtype, torch.float32})
        made = {} if format_ is None else {e.base: e for e in quantized_parameters(shapes, format_)}
        quantized = _quantized(loads, forms, live, made)
        made = made if quantized else {}
        plan = _arrange(loads, forms, quantized)
        places, parameters = plan.places, plan.parameters
        for name, shape in shapes.items():
            boxes = tuple(_joined([*_boxes(name, loads, places)]))
            if name in made:
                parameters |= _layouts(made[name], shape, boxes, loads, places)
            else:
                (own,) = {load.target.dtype for load in loads if load.name == name}
                parameters[name] = ParameterLayout(
                    shape=tuple(shape), dtype=_name(own), boxes=boxes
                )
        plain = [name for name in forms if name in places and name not in quantized]
        experts = frozenset(load.parameter for load in loads if _is_of_experts(model, load))
        is_staged = any(_differ(forms[name], live.get(name)) for name in plain) or (
            live.keys() != forms.keys() | places.keys() or bool(experts)
        )
    return Recording(
        memory=plan.memory(is_staged=is_staged),
        places=places,
        turned=frozenset(quantized),
        experts=experts,
    )


def _quantized(
    loads: list[_Load],
    forms: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
    made: Mapping[str, QuantizedParameter],
) -> dict[str, Format]:
    """Return vLLM's parameters that hold the matrices `made`, if it computes with all of these, and
    no other, as [in, out] views of rows in that format; else none."""
    found: dict[str, Format] = {}
    for load in loads:
        if load.name not in made:
            continue
        form, format_ = forms[load.parameter], made[load.name].format
        values, scales = (live.get(load.parameter + end) for end in ("", VLLM_SCALE))
        if values is None or scales is None:
            return {}
        num_scales = 1 if format_.is_per_tensor else len(form)
        has_form = values.t().is_contiguous() and values.t().shape == form.shape
        has_dtypes = values.dtype == getattr(torch, format_.dtype) and (
            scales.dtype == getattr(torch, format_.scale_dtype)
        )
        if not (has_form and has_dtypes and scales.numel() == num_scales):
            return {}
        found[load.parameter] = format_
    others = {load.parameter for load in loads if load.name not in made}
    return {} if others & found.keys() else found


def _layouts(
    made: QuantizedParameter,
    shape: tuple[int, ...],
    boxes: tuple[Box, ...],
    loads: list[_Load],
    places: Mapping[str, Place],
) -> dict[str, ParameterLayout]:
    """Return the layouts of the values and scales of a matrix whose values lie in `boxes`."""
    format_ = made.format
    parameter = next(load.parameter for load in loads if load.name == made.base)
    values, scales = places[parameter], places[parameter + VLLM_SCALE]
    whole: tuple[int, ...] = (1,)
    own = [(0, 1, 0)]
    if not format_.is_per_tensor:
        whole = shape[:1]
        width = values.shape[1]
        own = [(b.start[0], b.stop[0], (b.offset - values.offset) // width) for b in boxes]
    scale_boxes = tuple(
        Box(start=(a,), stop=(b,), buffer=BUFFER, offset=scales.offset + row, strides=(1,))
        for a, b, row in own
    )
    dtype = format_.scale_dtype
    return {
        made.values: ParameterLayout(shape=tuple(shape), dtype=format_.dtype, boxes=boxes),
        made.scales: ParameterLayout(shape=whole, dtype=dtype, boxes=scale_boxes),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_of_experts(model: nn.Module, load: _Load) -> bool:
    """Return whether a kernel for mixtures of experts reads the parameter."""
    layer = model.get_submodule(load.parameter.rpartition(".")[0])
    return hasattr(getattr(layer, "quant_method", None), "moe_kernel")


def _differ(form: Tensor, live: Tensor | None) -> bool:
    """Return True if the layer does not compute with the parameter in its loaded form."""
    return (
        live is None
        or live.shape != form.shape
        or live.dtype != form.dtype
        or not live.is_contiguous()
    )


def _arrange(
    loads: list[_Load],
    forms: Mapping[str, Tensor],
    quantized: Mapping[str, Format],
) -> MemoryPlan:
    """Return one place per loaded parameter, and one for the scales of each that is `quantized`, in
    the model's order."""
    loaded, plan = {load.parameter for load in loads}, MemoryPlan()
    for name, form in forms.items():
        if name not in loaded:
            continue
        format_ = quantized.get(name)
        if format_ is None:
            plan.reserve(name, tuple(form.shape), _name(form.dtype))
            continue
        plan.reserve(name, tuple(form.shape), format_.dtype)
        rows = (1,) if format_.is_per_tensor else (len(form), 1)
        plan.reserve(name + VLLM_SCALE, rows, format_.scale_dtype)
    return plan


def _boxes(name: str, loads: list[_Load], places: dict[str, Place]) -> Iterator[Box]:
    for load in loads:
        if load.name != name:
            continue
        source, target, whole = load.source, load.target, load.whole
        index, rest = [], int(source.storage_offset())
        for stride in torch.empty(whole.file_shape, device="meta").stride():
            index.append(rest // stride)
            rest %= stride
        sizes, strides = [*source.shape], [*target.stride()]
        if len(sizes) < len(whole.shape):  # of one expert
            sizes, strides = [1, *sizes], [sizes[0] * strides[0], *strides]
            index = [0, *index][-len(sizes) :]
        start = tuple(a + b for a, b in zip(whole.start, index, strict=True))
        yield Box(
            start=start,
            stop=tuple(a + n for a, n in zip(start, sizes, strict=True)),
            buffer=BUFFER,
            offset=places[load.parameter].offset + int(target.storage_offset()),
            strides=tuple(strides),
        )


def _joined(boxes: list[Box]) -> Iterator[Box]:
    """Yield the boxes, with those of successive experts that lie equally far apart as one."""
    if any(len(box.start) < 3 or box.start[0] + 1 != box.stop[0] for box in boxes):
        yield from boxes
        return
    alike: dict[object, list[Box]] = {}
    for box in boxes:
        look = box.start[1:], box.stop[1:], box.strides[1:]
        alike.setdefault(look, []).append(box)
    for members in alike.values():
        members.sort(key=lambda box: box.start[0])
        begin = 0
        while begin < len(members):
            first, end = members[begin], begin + 1
            step = first.strides[0]
            while end < len(members) and members[end].start[0] == members[end - 1].stop[0]:
                further = members[end].offset - members[end - 1].offset
                if end > begin + 1 and further != step:
                    break
                step, end = further, end + 1
            stop = (members[end - 1].stop[0], *first.stop[1:])
            yield replace(first, stop=stop, strides=(step, *first.strides[1:]))
            begin = end


def _check(
    recorder: _Recorder,
    forms: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Collection[torch.dtype],
) -> None:
    """Raise ValueError unless plain copies read every weight and fill every parameter, which has
    one of `dtypes`."""
    loads = recorder.loads
    refused = list(recorder.refused)
    first: dict[str, torch.dtype] = {}
    for load in loads:
        whole = torch.empty(load.whole.file_shape, device="meta").stride()
        own = load.source.stride()  # of an expert among stacked ones it lacks a dimension
        if own != whole[-len(own) :] or load.target.dtype not in dtypes:
            refused.append(load.name)
        if first.setdefault(load.name, load.target.dtype) != load.target.dtype:
            refused.append(load.name)
    if refused:
        raise ValueError(f"vLLM's loader must only copy weights, got more for {refused[0]}")
    missing = shapes.keys() - {load.name for load in loads}
    if missing:
        raise ValueError(f"vLLM's loader must take every weight, got none of {min(missing)}")
    loaded = {load.parameter for load in loads}
    for name in loaded:
        num_filled, wanted = recorder.num_filled[name], forms[name].numel()
        must = "be filled by the checkpoint's tensors, all of its"
        require(num_filled >= wanted, f"vLLM's {name}", f"{must} {wanted} elements", num_filled)
    shared = {id(live[name]) for name in loaded if name in live}
    for name in forms.keys() - loaded:
        if name not in live or id(live[name]) not in shared:  # a tied parameter is another's
            raise ValueError(
                f"the checkpoint must fill every parameter of vLLM, got none for {name}"
            )
