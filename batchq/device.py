"""Where a model runs: the one seam for real hardware.

``open_device("cuda:0")`` gives what the model contract needs of a device: tensors there and back, and what an error says about it.
Everything else works the same with a fake one. torch is looked up where the model has imported it, never imported.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import re
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Protocol

_SCALARS = frozenset((type(None), bool, int, float, str, bytes))

_OUT_OF_MEMORY: Final = re.compile(
    r"DefaultCPUAllocator|(?:CUDA|HIP) error: out of memory|_STATUS_ALLOC_FAILED|MPS backend out of memory"
)
_LOST: Final = re.compile(
    r"\b(?:CUDA|HIP)\b[^\n]*(?:"
    r"device-side assert|illegal memory access|illegal instruction|illegal address|misaligned address|hardware stack error"
    r"|global/shared address space|invalid program counter|unspecified launch failure|launch timed out"
    r"|uncorrectable (?:ECC|NVLink) error|context is destroyed|unknown error)",
    re.IGNORECASE,
)
"""CUDA's and HIP's errors after which each further call of the process fails as well (the texts of ``cudaGetErrorString``)."""


class DeviceLostError(Exception):
    """The device fails each call of this process from now on (a sticky CUDA error): only a new process helps."""


class Device(Protocol):
    """What the model contract needs of a device. ``name``: as torch names it, such as ``cuda:0``.

    A tree is a tensor, or a nest of dicts, lists, tuples and dataclasses with tensors in it; what is no tensor stays as it is.
    """

    name: str

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new tensor in the host's memory, from which copies to the device are fast (pinned, for CUDA)."""

    def to_device(self, tree: Any) -> Callable[[], Any]:
        """Start to copy host tensors to the device; any thread.

        Return a function that, called on the model's thread, returns the tree of device tensors, safe to use from there on.
        """

    def to_host(self, tree: Any) -> Any:
        """Return a copy of the tree in the host's memory, on the model's thread: contiguous, without gradients, and shared with nobody.

        All that the model has started on the device is over by then: an error of it is raised here.
        """

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Tell whether the error says that memory did not suffice, the device's or the host's."""

    def is_lost(self, error: BaseException) -> bool:
        """Tell whether the device fails each further call of this process, too."""

    def free(self) -> None:
        """Give back what memory is held for reuse; never raises."""


def open_device(name: str) -> Device:
    """Return the device of this name: ``cpu``, ``cuda``, ``cuda:1``, or any other that torch knows, such as ``mps``.

    Nothing is touched until it is needed.
    """
    return CudaDevice(name) if name.partition(":")[0] == "cuda" else PlainDevice(name)


class PlainDevice:
    """The CPU; also a device to which tensors are moved by torch's own ``to`` and nothing else."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new tensor in the host's memory."""
        return _torch().empty(shape, dtype=dtype)

    def to_device(self, tree: Any) -> Callable[[], Any]:
        """Copy host tensors to the device; for the CPU, they are there."""
        if self.name != "cpu":
            tree = map_tensors(tree, lambda tensor: tensor.to(self.name), by_method=self.name)
        return lambda: tree

    def to_host(self, tree: Any) -> Any:
        """Return a copy of the tree in the host's memory."""
        return map_tensors(tree, _host_copy)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Tell whether the error says that memory did not suffice."""
        return is_out_of_memory(error)

    def is_lost(self, error: BaseException) -> bool:
        """Tell whether the device fails each further call of this process, too."""
        return is_lost(error)

    def free(self) -> None:
        """Give back what memory is held for reuse."""
        gc.collect()  # what an exception's frames held may be in a cycle
        cuda = _initialized_cuda()
        try:
            if cuda is not None:
                cuda.empty_cache()
        except Exception:  # noqa: BLE001, S110 - only an attempt to help: the halves are run either way
            pass


class CudaDevice(PlainDevice):
    """A GPU of NVIDIA's, or of AMD's under ROCm: copies to it go through pinned memory, on a stream of their own."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._copies: Any = None

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new pinned tensor."""
        return _torch().empty(shape, dtype=dtype, pin_memory=True)

    def to_device(self, tree: Any) -> Callable[[], Any]:
        """Start to copy host tensors to the device."""
        cuda = _torch().cuda
        if self._copies is None:
            self._copies = cuda.Stream(self.name)
        moved: list[Any] = []

        def move(tensor: Any) -> Any:
            if tensor.device.type == "cpu" and not tensor.is_pinned():
                tensor = tensor.pin_memory()  # else the copy would wait for the host
            moved.append(tensor.to(self.name, non_blocking=True))
            return moved[-1]

        with cuda.stream(self._copies):
            tree = map_tensors(tree, move, by_method=self.name)
            copied = cuda.Event()
            copied.record(self._copies)

        def arrived() -> Any:
            stream = cuda.current_stream(self.name)
            stream.wait_event(copied)
            for tensor in moved:
                # its memory belongs to the stream of the copies, which must not reuse it while the model reads it
                tensor.record_stream(stream)
            return tree

        return arrived

    def to_host(self, tree: Any) -> Any:
        """Return a copy of the tree in the host's memory."""
        cuda = _torch().cuda
        stream = cuda.current_stream(self.name)

        def move(tensor: Any) -> Any:
            if tensor.device.type != "cuda":
                return _host_copy(tensor)
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
            # on the model's own stream: a graph's outputs are overwritten by its next run (torch.compile's reduce-overhead)
            return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True)

        tree = map_tensors(tree, move)
        over = cuda.Event()
        over.record(stream)
        over.synchronize()  # one wait for all of the copies
        return tree


def _torch() -> Any:
    return sys.modules["torch"]


def _initialized_cuda() -> Any:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _host_copy(tensor: Any) -> Any:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        return tensor.cpu().contiguous()
    return tensor.clone(memory_format=_torch().contiguous_format)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the error says that memory did not suffice: torch's OutOfMemoryError, or Python's, or one of the same meaning."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    kinds = (
        getattr(torch, "OutOfMemoryError", None),
        getattr(getattr(torch, "cuda", None), "OutOfMemoryError", None),
    )
    if isinstance(error, tuple(kind for kind in kinds if isinstance(kind, type))):
        return True
    return torch is not None and isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def is_lost(error: BaseException) -> bool:
    """Tell whether the device fails each further call of this process, too: by the error's text, else by asking the device."""
    if "torch" not in sys.modules or is_out_of_memory(error):
        return False
    return (isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))) or _cuda_fails()


def _cuda_fails() -> bool:
    # many a library words its errors in its own way, and a sticky one shows in whatever is called next
    cuda = _initialized_cuda()
    if cuda is None:
        return False
    try:
        cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        return not is_out_of_memory(error)
    return False


def map_tensors(tree: Any, move: Callable[[Any], Any], *, by_method: str | None = None) -> Any:
    """Return the tree with ``move`` of each torch tensor in it; its containers are copied, and keep their types.

    ``by_method``: what is no such container and has a method ``to`` (a batch of another library) is moved by it, to this device.
    """
    torch = sys.modules.get("torch")

    def walk(tree: Any) -> Any:
        kind = type(tree)
        if kind in _SCALARS:
            return tree
        if torch is not None and isinstance(tree, torch.Tensor):
            return move(tree)
        if kind is dict:
            return {key: walk(item) for key, item in tree.items()}
        if kind is list:
            return tree if _SCALARS.issuperset(map(type, tree)) else [walk(item) for item in tree]
        if isinstance(tree, MutableMapping):  # also transformers' ModelOutput and BatchEncoding
            mapping = copy.copy(tree)
            for key, item in tree.items():
                mapping[key] = walk(item)
            return mapping
        if by_method is not None and callable(getattr(kind, "to", None)):
            return tree.to(by_method)
        if isinstance(tree, tuple):
            items = [walk(item) for item in tree]
            return kind._make(items) if hasattr(kind, "_make") else tuple(items)
        if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            changed = copy.copy(tree)
            for field in dataclasses.fields(tree):
                object.__setattr__(changed, field.name, walk(getattr(tree, field.name)))
            return changed
        return tree

    return walk(tree)
