"""An accelerator that is not there: tensors of torch's spare device type around CPU tensors.

Its results are the CPU's. It refuses what a GPU refuses (operations on tensors of host and device
together), and delays what a GPU delays: a copy to pinned host memory arrives when it is waited for,
and a copy from there must find its source unchanged until then. Every wait and every copy is
counted under the line of the package that asked for it.

Registering the device type cannot be undone: use it in a process of its own.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.emulated import streams

KIND = "emu"
DEVICE_MEMORY_BYTES = 80 << 30
PACKAGE = str(Path(__file__).resolve().parents[2] / "llamarl")
COPIES = {
    (True, True): "pinned copy in",
    (True, False): "blocking copy in",
    (False, True): "pinned copy out",
    (False, False): "blocking copy out",
}
INDEXES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
SIZES_FROM_VALUES = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
}
aten = torch.ops.aten


class Counts:
    """What the host asked of the device: kind -> how often, and by which lines."""

    def __init__(self) -> None:
        self.total: collections.Counter[str] = collections.Counter()
        self.lines: collections.Counter[tuple[str, str]] = collections.Counter()

    def add(self, kind: str) -> None:
        self.total[kind] += 1
        self.lines[kind, _line()] += 1

    def clear(self) -> None:
        self.total.clear()
        self.lines.clear()


def _line() -> str:
    """The innermost line of the package that is running."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and "/device/" not in name:
            return f"{name.removeprefix(PACKAGE)[1:]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


class Queue:
    """What the device has been given. Operations are done at once; a copy that the host does not
    wait for is kept until a wait that comes after it."""

    def __init__(self) -> None:
        self.num_launched = 0
        self._copies: collections.deque[tuple[int, Tensor, Tensor, bool]] = collections.deque()

    def launch(self) -> None:
        self.num_launched += 1

    def copy_later(self, host: Tensor, values: Tensor, is_in: bool) -> None:
        """`values` are what was to be copied when the copy was launched."""
        self.num_launched += 1
        self._copies.append((self.num_launched, host, values, is_in))

    def finish(self, num_launched: int) -> None:
        while self._copies and self._copies[0][0] <= num_launched:
            _, host, values, is_in = self._copies.popleft()
            if is_in and host.view(torch.uint8).tolist() != values.view(torch.uint8).tolist():
                raise RuntimeError("pinned memory was changed before it was copied to the device")
            if not is_in:
                host.copy_(values)


counts, queue = Counts(), Queue()
random_numbers = torch.Generator()
"""The device's own; the host's are not touched by what is drawn there."""
damage: dict[str, Callable[[Tensor], Tensor]] = {}
"""Operation, or "copy out" -> what a device that is broken makes of its result."""
_pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


class EmulatedTensor(Tensor):
    """A tensor of the device; `backing` holds its values."""

    backing: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> EmulatedTensor:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(KIND, 0),
        )
        made.backing = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    # A wrapper has no memory of its own.
    def data_ptr(self) -> int:
        return self.backing.data_ptr()

    def untyped_storage(self) -> Any:
        return EmulatedStorage(self.backing.untyped_storage())

    def set_(self, source: Any, *args: Any) -> EmulatedTensor:
        return EmulatedTensor(self.backing.set_(source.backing, *args))

    def record_stream(self, stream: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def unwrapped(value: Any) -> Any:
    return value.backing if isinstance(value, EmulatedTensor) else value


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation with a tensor of the device, or that makes one."""
    target = kwargs.get("device")
    target = None if target is None else torch.device(target).type
    name = func._schema.name
    if name == "aten::copy_":
        return _copy(*args, **kwargs)
    if name == "aten::_to_copy":
        return _to_copy(args[0], target, kwargs)
    leaves = tree_leaves((args, kwargs))
    held = [each for each in leaves if isinstance(each, EmulatedTensor)]
    _refuse_mixture(name, args, leaves, held)
    if held and (name in SIZES_FROM_VALUES or _has_mask(name, args)):
        counts.add("size or truth from values")
    queue.launch()
    given = {key: unwrapped(each) for key, each in tree_map(unwrapped, kwargs).items()}
    given.pop("pin_memory", None)
    if target is not None:
        given["device"] = "cpu"
    _order(func, args, kwargs)
    if name == "aten::_local_scalar_dense":
        counts.add("number read")
        _host_waits()
        return func(*tree_map(unwrapped, args), **given)
    out = _compute(func, tree_map(unwrapped, args), given)
    if name in damage:
        out = damage[name](out)
    if not (held if target is None else target == KIND):
        return out
    same = {id(each.backing): each for each in held}
    if not _is_view(func):
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and id(x) not in same]
        streams.use([], [each.untyped_storage() for each in made])

    def wrapped(value: Any) -> Any:
        """In place, the very argument is given back."""
        if not isinstance(value, Tensor):
            return value
        return same[id(value)] if id(value) in same else EmulatedTensor(value)

    return tree_map(wrapped, out)


def _is_view(func: Any) -> bool:
    """Whether it neither reads nor writes memory."""
    returns = [each.alias_info for each in func._schema.returns]
    is_view = any(each is not None and not each.is_write for each in returns)
    return is_view or func._schema.name.startswith(("aten::empty", "aten::new_empty"))


def _order(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """What the operation reads and writes, for the order of streams; views do neither."""
    if _is_view(func):
        return
    read: list[torch.UntypedStorage] = []
    written: list[torch.UntypedStorage] = []
    for number, argument in enumerate(func._schema.arguments):
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        held = [each for each in tree_leaves(given) if isinstance(each, EmulatedTensor)]
        (written if is_written else read).extend(e.backing.untyped_storage() for e in held)
    streams.use(read, written)


def _host_waits() -> None:
    here = streams.current()
    streams.host_waited(here.number, here.num_launched)


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func._schema.name == "aten::mm" and "out_dtype" in (
        *kwargs,
        *(a.name for a in func._schema.arguments),
    ):
        left, right, dtype = (*args, *kwargs.values())[:3]  # CPUs have no such product
        return torch.mm(left.to(dtype), right.to(dtype))
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        return func(*args, **kwargs)
    of_host = torch.get_rng_state()
    torch.set_rng_state(random_numbers.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        random_numbers.set_state(torch.get_rng_state())
        torch.set_rng_state(of_host)


def _refuse_mixture(name: str, args: Any, leaves: list[Any], held: list[Any]) -> None:
    """As CUDA does: only numbers may come from the host, and the indexes of a tensor."""
    host = [each for each in leaves if isinstance(each, Tensor) and each.device.type == "cpu"]
    if not held or not any(each.dim() for each in host):
        return
    if name in INDEXES and isinstance(args[0], EmulatedTensor):
        counts.add("blocking copy in")  # of the indexes
        return
    shapes = [tuple(each.shape) for each in host]
    raise RuntimeError(f"{name}: all tensors must be on one device, got {shapes} on the host")


def _has_mask(name: str, args: Any) -> bool:
    """Whether a tensor is indexed by truth values, whose number only the device knows."""
    if name not in INDEXES:
        return False
    kinds = {each.dtype for each in args[1] if each is not None}
    return bool(kinds & {torch.bool, torch.uint8}) and name == "aten::index"


def _copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    is_in, is_out = (isinstance(each, EmulatedTensor) for each in (into, source))
    streams.use(_held(source), _held(into))
    if is_in == is_out:
        queue.launch()
        unwrapped(into).copy_(unwrapped(source))
        return into
    if is_out and "copy out" in damage:
        source = EmulatedTensor(damage["copy out"](source.backing.clone()))  # type: ignore[attr-defined]
    host = source if is_in else into
    is_pinned = non_blocking and host.untyped_storage() in _pinned
    counts.add(COPIES[is_in, is_pinned])
    if is_pinned and is_in:
        queue.copy_later(host, host.detach().clone().contiguous(), is_in=True)
        unwrapped(into).copy_(host)
    elif is_pinned:
        queue.copy_later(into, source.backing.clone(), is_in=False)  # type: ignore[attr-defined]
    else:
        queue.finish(queue.num_launched)
        unwrapped(into).copy_(unwrapped(source))
        _host_waits()
    return into


def _held(tensor: Tensor) -> list[torch.UntypedStorage]:
    return [tensor.backing.untyped_storage()] if isinstance(tensor, EmulatedTensor) else []


def _to_copy(source: Tensor, target: str | None, kwargs: dict[str, Any]) -> Tensor:
    options = {
        key: each
        for key, each in kwargs.items()
        if key not in ("device", "non_blocking", "pin_memory")
    }
    is_held = isinstance(source, EmulatedTensor)
    is_wanted = is_held if target is None else target == KIND
    if is_held == is_wanted:
        queue.launch()
        streams.use(_held(source), [])
        out = aten._to_copy.default(unwrapped(source), **options)
        if is_wanted:
            streams.use([], [out.untyped_storage()])
        return EmulatedTensor(out) if is_wanted else out
    made = torch.empty_like(unwrapped(source), **{"dtype": options.get("dtype", source.dtype)})
    if is_wanted:
        made = EmulatedTensor(made)
    return _copy(made, source, bool(kwargs.get("non_blocking")))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations on local tensors come here again
        kwargs = kwargs or {}
        target = kwargs.get("device")
        is_target = target is not None and torch.device(target).type == KIND
        if is_target or any(isinstance(x, EmulatedTensor) for x in tree_leaves((args, kwargs))):
            return run(func, args, kwargs)
        is_pinned = kwargs.pop("pin_memory", False)
        out = func(*args, **kwargs)
        if is_pinned:
            _pinned.add(out.untyped_storage())
        return out


class EmulatedStorage:
    """What stands for the storage of a tensor of the device."""

    def __init__(self, backing: torch.UntypedStorage) -> None:
        self.backing, self.device = backing, torch.device(KIND, 0)

    def data_ptr(self) -> int:
        return self.backing.data_ptr()

    def nbytes(self) -> int:
        return self.backing.nbytes()

    size = nbytes

    def resize_(self, num_bytes: int) -> None:
        self.backing.resize_(num_bytes)


class _Functions(TorchFunctionMode):
    """What does not come to the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            target = kwargs.get("device")
            if target is not None and torch.device(target).type == KIND:
                counts.add("blocking copy in")
                return EmulatedTensor(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


def register(module: Any) -> None:
    """Let torch know the device type, and its module; once a process."""
    _setup_privateuseone_for_python_backend(KIND, backend_module=module)
    # A wrapper cannot be made under inference mode.
    torch.inference_mode.__enter__ = _enter_no_grad  # type: ignore[method-assign]
    torch.inference_mode.__exit__ = _leave_no_grad  # type: ignore[method-assign]


def _enter_no_grad(self: Any) -> None:
    self.instead = torch.no_grad()
    self.instead.__enter__()


def _leave_no_grad(self: Any, *args: Any) -> None:
    self.instead.__exit__(*args)


def in_every_thread() -> None:
    """Let threads that are started from now on make tensors of the device."""
    run_thread = threading.Thread.run

    def run_emulated(thread: threading.Thread) -> None:
        with emulated_here():
            run_thread(thread)

    threading.Thread.run = run_emulated  # type: ignore[method-assign]


@contextlib.contextmanager
def emulated_here() -> Iterator[None]:
    """Tensors of the device may be made in the block, on this thread."""
    # A backward pass must not leave the thread.
    with torch.autograd.set_multithreading_enabled(False), _Functions(), _Dispatch():
        yield


@contextlib.contextmanager
def emulated() -> Iterator[Counts]:
    """Tensors of the device may be made in the block; what is asked of them is counted."""
    counts.clear()
    with emulated_here():
        yield counts
