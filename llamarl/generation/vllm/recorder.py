"""Where vLLM's parameters lie in the flat memory, recorded from vLLM's own loader.

Owns: the recording and the layout. Does not own: the memory itself
(`weights/sync/weight_buffer.py`) or changing a parameter (`staging.py`, `vllm_engine.py`).
Invariant: a loader that does more than copy rectangles is refused, so the layout is never wrong.

The model's `load_weights` runs on tensors without storage, and every `aten.copy_` is recorded
instead of executed. So q, k and v get their rows of the fused parameter, and a tensor-parallel rank
its slices, without a table of names: a publish writes exactly what vLLM would load.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from llamarl.generation.parameters import ALIGN_BYTES, Place
from llamarl.generation.vllm.staging import loading_form
from llamarl.weights.layout.boxes import BUFFER, Box, ParameterLayout
from llamarl.weights.layout.buckets import Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The memory of this rank, and the `places` of vLLM's parameters in it, by name."""

    memory: Memory
    places: dict[str, Place]


@dataclass(frozen=True, slots=True)
class _Load:
    """One copy of the loader: a view of a source tensor into a view of a parameter."""

    name: str
    source: Tensor
    parameter: str
    target: Tensor


class _Recorder(TorchDispatchMode):
    """Records copies from `sources` into `parameters` (storage id -> name), executing none."""

    def __init__(self, sources: dict[int, str], parameters: dict[int, str]) -> None:
        super().__init__()
        self.sources, self.parameters = sources, parameters
        self.loads: list[_Load] = []
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            name = self.sources.get(_storage(source))
            parameter = self.parameters.get(_storage(target))
            if name and parameter and source.shape == target.shape:
                self.loads.append(_Load(name, source, parameter, target))
            else:
                self.refused.append(name or parameter or "an unnamed tensor")
            return target
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            return args[0]  # padding, which no publish writes
        return func(*args, **(kwargs or {}))


def record(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Recording:
    """Lay out this rank's part of the parameters `shapes` (Hugging Face name -> global shape).

    ValueError if vLLM's loader does more than copy, or skips a weight or a parameter.
    """
    live = dict(model.named_parameters(remove_duplicate=False))
    with loading_form(model), torch.no_grad():
        forms = dict(model.named_parameters(remove_duplicate=False))
        weights = [(name, torch.empty(s, dtype=dtype, device="meta")) for name, s in shapes.items()]
        recorder = _Recorder(
            {_storage(tensor): name for name, tensor in weights},
            {_storage(tensor): name for name, tensor in forms.items()},
        )
        with recorder:
            model.load_weights(iter(weights))  # type: ignore[operator]
        _check(recorder, forms, live, shapes, dtype)
        places, num_elements = _arrange(recorder.loads, forms, dtype)
        parameters = {
            name: ParameterLayout(
                shape=tuple(shape),
                dtype=str(dtype).removeprefix("torch."),
                boxes=tuple(_boxes(name, shape, recorder.loads, places)),
            )
            for name, shape in shapes.items()
        }
        is_staged = any(_differ(forms[name], live.get(name)) for name in places) or (
            live.keys() != forms.keys()
        )
    return Recording(
        memory=Memory(
            parameters=parameters, num_elements=num_elements, dtype=dtype, is_staged=is_staged
        ),
        places=places,
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _differ(form: Tensor, live: Tensor | None) -> bool:
    """True if the layer does not compute with the parameter in its loaded form."""
    return (
        live is None
        or live.shape != form.shape
        or live.dtype != form.dtype
        or not live.is_contiguous()
    )


def _arrange(
    loads: list[_Load], forms: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[dict[str, Place], int]:
    """One place per loaded parameter, in the model's order; the total number of elements."""
    loaded = {load.parameter for load in loads}
    align = ALIGN_BYTES // dtype.itemsize
    places, end = {}, 0
    for name, form in forms.items():
        if name in loaded:
            places[name] = Place(end, tuple(form.shape))
            end += -(-form.numel() // align) * align
    return places, end


def _boxes(
    name: str, shape: tuple[int, ...], loads: list[_Load], places: dict[str, Place]
) -> Iterator[Box]:
    strides = torch.empty(shape, device="meta").stride()
    for load in loads:
        if load.name != name:
            continue
        source, target = load.source, load.target
        start, rest = [], int(source.storage_offset())
        for stride in strides:
            start.append(rest // stride)
            rest %= stride
        yield Box(
            start=tuple(start),
            stop=tuple(a + n for a, n in zip(start, source.shape, strict=True)),
            buffer=BUFFER,
            offset=places[load.parameter].offset + int(target.storage_offset()),
            strides=tuple(target.stride()),
        )


def _check(
    recorder: _Recorder,
    forms: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> None:
    """ValueError unless plain copies of one dtype read every weight and fill every parameter."""
    loads = recorder.loads
    refused = list(recorder.refused)
    for load in loads:
        whole = torch.empty(shapes[load.name], device="meta").stride()
        if load.source.stride() != whole or load.target.dtype != dtype:
            refused.append(load.name)
    if refused:
        raise ValueError(f"vLLM's loader must only copy weights, got more for {refused[0]}")
    missing = shapes.keys() - {load.name for load in loads}
    if missing:
        raise ValueError(f"vLLM's loader must take every weight, got none of {min(missing)}")
    loaded = {load.parameter for load in loads}
    shared = {id(live[name]) for name in loaded if name in live}
    for name in forms.keys() - loaded:
        if name not in live or id(live[name]) not in shared:  # a tied parameter is another's
            raise ValueError(
                f"the checkpoint must fill every parameter of vLLM, got none for {name}"
            )
