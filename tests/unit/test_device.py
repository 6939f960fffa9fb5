"""The seam for real hardware: what goes to a device and comes back, and what its errors mean."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections import OrderedDict, UserDict, namedtuple

import pytest

from batchq.device import CudaDevice, PlainDevice, is_lost, is_out_of_memory, map_tensors, open_device

torch = pytest.importorskip("torch")

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Output:
    logits: object
    label: str


def test_a_device_is_opened_by_torchs_name_for_it_and_nothing_is_imported_or_touched():
    code = (
        "import sys; from batchq.device import open_device, is_lost, is_out_of_memory; "
        "names = [open_device(name).name for name in ('cpu', 'cuda', 'cuda:1', 'mps')]; open_device('cuda').free(); "
        "is_lost(RuntimeError()), is_out_of_memory(RuntimeError()); "
        "sys.exit(names != ['cpu', 'cuda', 'cuda:1', 'mps'] or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    assert isinstance(open_device("cuda:1"), CudaDevice)
    assert not isinstance(open_device("cpu"), CudaDevice)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: 12"
        ),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17 GB)"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_errors_for_want_of_memory_are_told_from_others_and_are_not_the_end_of_the_device(error):
    assert is_out_of_memory(error)
    assert not is_lost(error)


def test_the_cpu_running_out_of_memory_is_one_of_these():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: an illegal instruction was encountered",
        "CUDA error: misaligned address",
        "CUDA error: hardware stack error",
        "CUDA error: unspecified launch failure",
        "CUDA error: invalid program counter",
        "CUDA error: operation not supported on global/shared address space",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: the launch timed out and was terminated",
        "CUDA error: unknown error",
        "HIP error: an illegal memory access was encountered",
        "Triton Error [CUDA]: an illegal memory access was encountered",
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)])
def test_errors_after_which_every_call_fails_are_the_end_of_the_device(kind, text):
    assert is_lost(kind(text))
    assert not is_out_of_memory(kind(text))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error: device-side assert triggered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("CUDA error: invalid device ordinal"),
        RuntimeError("CUDA error: invalid configuration argument"),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu"),
        RuntimeError("an unknown error"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_other_errors_are_the_models_own(error):
    assert not is_lost(error)
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("says", "lost"),
    [
        (None, False),
        (RuntimeError("CUDA error: some error that nobody has heard of"), True),
        (torch.OutOfMemoryError("no room"), False),
    ],
)
def test_whatever_an_error_says_a_device_that_fails_the_next_call_too_is_lost(monkeypatch, says, lost):
    def synchronize():
        if says is not None:
            raise says

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert is_lost(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")) == lost
    assert is_lost(KeyError("from the model's own code, caused by the device")) == lost


def test_freeing_empties_torchs_cache_where_there_is_one_and_never_raises(monkeypatch):
    open_device("cpu").free()
    emptied = []

    def empty_cache():
        emptied.append(True)
        raise RuntimeError

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    open_device("cuda").free()
    assert emptied == [True]


# --- trees ------------------------------------------------------------------------------------------------------------


def test_tensors_are_moved_wherever_they_stand_and_nothing_else_is_touched():
    one, other = torch.zeros(1), object()
    tree = {
        "list": [one, 1, "a", None],
        "tuple": (one, [one]),
        "named": Pair(one, 2),
        "data": Output(one, "x"),
        "ordered": OrderedDict(a=one),
        "user": UserDict(a={"b": one}),
        "max": torch.ones(2, 2).max(1),
        "other": other,
        "scalars": [1, 2.5],
    }
    moved = map_tensors(tree, lambda tensor: tensor + 1)
    assert moved["list"][0].item() == 1
    assert moved["list"][1:] == [1, "a", None]
    assert (moved["tuple"][0].item(), moved["tuple"][1][0].item()) == (1, 1)
    assert isinstance(moved["named"], Pair)
    assert (moved["named"].first.item(), moved["named"].second) == (1, 2)
    assert isinstance(moved["data"], Output)
    assert (moved["data"].logits.item(), moved["data"].label) == (1, "x")
    assert isinstance(moved["ordered"], OrderedDict)
    assert moved["ordered"]["a"].item() == 1
    assert isinstance(moved["user"], UserDict)
    assert moved["user"]["a"]["b"].item() == 1
    assert [tensor.tolist() for tensor in moved["max"]] == [[2, 2], [1, 1]]
    assert moved["other"] is other
    assert one.item() == 0
    assert tree["data"].logits is one
    assert tree["ordered"]["a"] is one
    assert tree["user"]["a"]["b"] is one


def test_a_batch_of_another_library_moves_itself_to_the_device():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = PlainDevice("meta").to_device([packed, torch.ones(1)])()
    assert moved[0].data.device.type == "meta"
    assert moved[0].batch_sizes.device.type == "cpu"  # torch wants them there
    assert moved[1].device.type == "meta"


def test_what_comes_back_to_the_host_is_contiguous_without_gradients_and_shared_with_nobody():
    weights = torch.arange(6.0).reshape(2, 3).requires_grad_()
    tree = open_device("cpu").to_host({"a": weights.T, "b": [weights], "c": torch.tensor([1j]).conj()})
    with torch.no_grad():
        weights.zero_()
    assert tree["a"].is_contiguous()
    assert tree["a"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert tree["b"][0].sum().item() == 15
    assert tree["c"].numpy().tolist() == [-1j]
    assert not any(tensor.requires_grad for tensor in (tree["a"], tree["b"][0]))


def test_on_the_cpu_a_batch_is_where_it_has_to_be():
    tree = {"a": torch.ones(2)}
    assert open_device("cpu").to_device(tree)() is tree


# --- CUDA, with a torch that notes what is asked of it ----------------------------------------------------------------


class FakeTorch:
    """As much of torch as a CudaDevice touches; ``notes`` has what happened, and on which stream."""

    def __init__(self):
        self.notes = notes = []
        self.cuda = self
        streams = ["models"]

        class Tensor:
            shape, dtype = (2,), "float32"

            def __init__(self, place):
                self.device = type("device", (), {"type": place})

            def is_pinned(self):
                return self.device.type == "pinned"

            def pin_memory(self):
                notes.append("pin")
                pinned = Tensor("cpu")
                pinned.is_pinned = lambda: True
                return pinned

            def to(self, name, non_blocking):
                assert non_blocking
                assert self.is_pinned()
                notes.append(f"to {name} on {streams[-1]}")
                return Tensor("cuda")

            def record_stream(self, stream):
                notes.append(f"record_stream {stream.name}")

            def copy_(self, other, non_blocking):
                assert non_blocking
                assert other.device.type == "cuda"
                notes.append(f"fetch on {streams[-1]}")
                return self

            def detach(self):
                return self

            resolve_conj = resolve_neg = contiguous = detach

        class Stream:
            def __init__(self, name):
                self.name = f"copies of {name}"

            def wait_event(self, event):
                notes.append(f"{self.name} waits for {event.on}")

        class Event:
            on = None

            def record(self, stream):
                self.on = stream.name

            def synchronize(self):
                notes.append(f"host waits for {self.on}")

        @contextlib.contextmanager
        def stream(which):
            streams.append(which.name)
            yield
            streams.pop()

        def current_stream(name):
            current = Stream(name)
            current.name = streams[-1]
            return current

        self.Tensor, self.Stream, self.Event = Tensor, Stream, Event
        self.stream, self.current_stream = stream, current_stream

    def empty(self, shape, dtype, pin_memory):
        assert pin_memory
        tensor = self.Tensor("cpu")
        tensor.is_pinned = lambda: True
        return tensor


@pytest.fixture
def fake(monkeypatch):
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_copies_to_a_gpu_are_pinned_and_on_a_stream_of_their_own_for_which_the_models_waits(fake):
    device = open_device("cuda:0")
    batch = device.empty((2,), "float32")
    arrive = device.to_device({"a": batch, "b": [fake.Tensor("cpu")]})
    assert fake.notes == ["to cuda:0 on copies of cuda:0", "pin", "to cuda:0 on copies of cuda:0"]
    fake.notes.clear()
    tree = arrive()
    assert tree["a"].device.type == tree["b"][0].device.type == "cuda"
    assert fake.notes == ["models waits for copies of cuda:0", *["record_stream models"] * 2]


def test_copies_from_a_gpu_are_on_the_models_own_stream_and_waited_for_once(fake):
    open_device("cuda:0").to_host([fake.Tensor("cuda"), {"a": fake.Tensor("cuda")}])
    assert fake.notes == ["fetch on models", "fetch on models", "host waits for models"]


# --- CUDA -------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
def test_on_a_gpu_tensors_go_there_through_pinned_memory_and_come_back_as_they_were():
    device = open_device("cuda")
    batch = device.empty((4, 3), torch.float32)
    assert batch.is_pinned()
    batch.copy_(torch.arange(12.0).reshape(4, 3))
    there = device.to_device({"a": batch, "b": [torch.ones(2)]})()
    assert there["a"].is_cuda
    assert there["b"][0].is_cuda
    back = device.to_host({"a": 2 * there["a"].T, "b": there["b"]})
    assert back["a"].device.type == "cpu"
    assert back["a"].tolist() == (2 * torch.arange(12.0).reshape(4, 3).T).tolist()


@pytest.mark.gpu
@gpu
def test_on_a_gpu_memory_that_does_not_suffice_is_told_and_can_be_freed():
    device = open_device("cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert device.is_out_of_memory(caught.value)
    assert not device.is_lost(caught.value)
    torch.empty(2**26, dtype=torch.uint8, device="cuda")
    device.free()
    assert torch.cuda.memory_reserved() < 2**26


@pytest.mark.gpu
@gpu
def test_on_a_gpu_an_assert_on_the_device_loses_it_to_the_process():
    code = """
import torch
from batchq.model import DeviceLostError, Model
from batchq.device import open_device
model = Model(torch.nn.Embedding(4, 2), device=open_device("cuda"))
assert len(model.run([1, 2])) == 2
try:
    model.run([1, 99])
except DeviceLostError as error:
    print("lost", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.startswith("lost"), done.stderr
