"""A torch.nn.Module as a model: what its inputs become, how forward gets them, and what its callers get of its output."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections import OrderedDict, UserDict, namedtuple

import numpy as np
import pytest

from batchq import codec
from batchq.device import PlainDevice, open_device
from batchq.errors import ModelError
from batchq.loading import call_load
from batchq.model import Model
from batchq.protocols import BatchContext

torch = pytest.importorskip("torch")
nn = torch.nn

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]

Pair = namedtuple("Pair", "first second")


class Spy(nn.Module):
    """Keeps what forward got, and returns what it is told to."""

    def __init__(self, returns=lambda batch: batch):
        super().__init__()
        self.got = []
        self.returns = returns

    def forward(self, batch):
        self.got.append(batch)
        return self.returns(batch)


def spied(*values, returns=lambda batch: torch.zeros(2)):
    """Return what forward gets for two or more values."""
    module = Spy(returns=lambda batch: torch.zeros(len(values)))
    outcomes = Model(module).run(list(values))
    assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    (batch,) = module.got
    return batch


def errors_of(module, values):
    told = []
    outcomes = Model(module, on_error=lambda error, indices: told.append(indices)).run(values)
    return outcomes, told


# --- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype", "shape"),
    [
        ([1.5, 2.5], torch.float32, (2,)),
        ([1, 2], torch.int64, (2,)),
        ([True, False], torch.bool, (2,)),
        ([[1.0, 2.0, 3.0]] * 2, torch.float32, (2, 3)),
        ([[[1], [2]], [[3], [4]]], torch.int64, (2, 2, 1)),
        ([(1, 2.5), (3, 4)], torch.float32, (2, 2)),
        ([[], []], torch.float32, (2, 0)),
        ([np.zeros((3, 2), "f4")] * 2, torch.float32, (2, 3, 2)),
        ([np.zeros(3, "u1")] * 2, torch.uint8, (2, 3)),
        ([np.zeros((), "i2")] * 2, torch.int16, (2,)),
        ([np.float64(1), np.float64(2)], torch.float64, (2,)),
        ([np.zeros(2, ">i4"), np.zeros(2, "<i4")], torch.int32, (2, 2)),
        ([np.zeros(2, "c8")] * 2, torch.complex64, (2, 2)),
        ([torch.zeros(2, dtype=torch.bfloat16)] * 2, torch.bfloat16, (2, 2)),
        ([torch.zeros(3, requires_grad=True), np.zeros(3, "f4")], torch.float32, (2, 3)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_numbers_lists_arrays_and_tensors_are_stacked(values, dtype, shape):
    batch = spied(*values)
    assert batch.dtype == dtype
    assert tuple(batch.shape) == shape


def test_each_row_of_the_batch_is_its_input():
    values = [np.arange(6.0).reshape(2, 3) + index for index in range(4)]
    values[1] = np.asfortranarray(values[1])
    values[2] = values[2].astype(">f8")
    values[3] = torch.from_numpy(values[3]).T.contiguous().T
    assert spied(*values).tolist() == [(np.arange(6.0).reshape(2, 3) + index).tolist() for index in range(4)]


def test_read_only_views_are_stacked_without_a_warning():
    packed = codec.pack(np.arange(3, dtype="f4"))
    views = [codec.unpack(packed, copy=False) for _ in range(2)]
    assert Model(nn.Identity()).views
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (nn.Linear(3, 1), nn.Linear(3, 1).bfloat16()):
            rows = Model(module).run(views)
            assert len(rows) == 2


def test_a_dict_becomes_keyword_arguments_if_forward_takes_these_names():
    class Named(nn.Module):
        def forward(self, ids, mask=None):
            return (ids * mask).sum(1)

    values = [{"ids": [1, 2], "mask": [1, 0]}, {"mask": [1, 1], "ids": [3, 4]}]
    assert Model(Named()).run(values) == [1, 7]


def test_a_dict_becomes_keyword_arguments_if_forward_takes_any():
    class Open(nn.Module):
        def forward(self, **features):
            return features["a"] + features["b"]

    assert Model(Open()).run([{"a": 1, "b": 2}, {"a": 3, "b": 4}]) == [3, 7]


@pytest.mark.parametrize("value", [{"ids": [1, 2]}, {1: [1, 2]}])
def test_a_dict_is_one_argument_if_forward_does_not_take_these_names(value):
    batch = spied(value, value)
    assert {key: tensor.tolist() for key, tensor in batch.items()} == {next(iter(value)): [[1, 2], [1, 2]]}


def test_a_list_of_arrays_becomes_positional_arguments_if_forward_takes_so_many_else_one_tuple():
    class Two(nn.Module):
        def forward(self, left, right):
            return left.sum(1) + right.sum(1)

    values = [[np.ones(2), np.ones(3)], [np.ones(2), np.zeros(3)]]
    assert Model(Two()).run(values) == [5, 2]
    left, right = spied(*values)
    assert (left.shape, right.shape) == ((2, 2), (2, 3))


def test_inputs_are_stacked_at_any_depth():
    value = {"a": [{"b": np.zeros(2)}, 3], "c": {"d": [1, 2]}}
    batch = spied(value, value, value)
    assert batch["a"][0]["b"].shape == (3, 2)
    assert batch["a"][1].tolist() == [3, 3, 3]
    assert batch["c"]["d"].shape == (3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_floating_inputs_get_the_dtype_of_the_parameters(dtype):
    class Typed(Spy):
        def __init__(self):
            super().__init__(lambda batch: batch.float())
            self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))

    module = Typed()
    values = [np.full(2, 0.5), np.full(2, 0.5, "f2"), [0.5, 0.5], torch.full((2,), 0.5, dtype=torch.bfloat16)]
    rows = Model(module).run(values)
    assert module.got[0].dtype == dtype
    assert [row.tolist() for row in rows] == [[0.5, 0.5]] * 4


def test_other_dtypes_stay_as_they_are_whatever_the_parameters():
    class Typed(Spy):
        def __init__(self):
            super().__init__(lambda batch: torch.zeros(2))
            self.weight = nn.Parameter(torch.zeros(1))

    for value, dtype in [
        ([1, 2], torch.int64),
        (np.zeros(2, "u1"), torch.uint8),
        (np.zeros(2, "c16"), torch.complex128),
    ]:
        module = Typed()
        Model(module).run([value, value])
        assert module.got[0].dtype == dtype


def test_parameters_of_several_dtypes_change_nothing():
    class Mixed(Spy):
        def __init__(self):
            super().__init__(lambda batch: torch.zeros(2))
            self.one, self.two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1).double())

    module = Mixed()
    Model(module).run([np.zeros(2, "f2")] * 2)
    assert module.got[0].dtype == torch.float16


def test_a_client_that_sends_1_where_it_means_1_0_fits_to_the_others():
    assert spied([1, 2], [1.5, 2.5], np.zeros(2, "f4")).tolist() == [[1, 2], [1.5, 2.5], [0, 0]]
    assert spied({"x": 1, "n": 5}, {"x": 1.5, "n": 7})["n"].dtype == torch.float32


def test_an_odd_shape_fails_alone_and_is_told_both_shapes_and_the_remedy():
    module = Spy(lambda batch: batch.sum(1))
    (first, odd, last), told = errors_of(module, [np.ones(3), np.ones(4), np.ones(3)])
    assert (first, last) == (3, 3)
    assert isinstance(odd, ModelError)
    assert "of shape (4,) and 2 others of its batch are of (3,)" in str(odd)
    assert "batch_key" in str(odd)
    assert "collate" in str(odd)
    assert len(module.got) == 1
    assert told == [[1]]


def test_an_odd_dtype_is_told_both_dtypes():
    (first, odd), _ = errors_of(Spy(lambda batch: batch[:, 0].float()), [np.ones(3, "i8"), np.ones(3, "u1")])
    assert first == 1
    assert "of dtype uint8 and another of its batch is of int64" in str(odd)


def test_odd_inputs_of_a_dict_are_shown_by_name():
    (_, odd), _ = errors_of(Spy(lambda batch: batch["a"]), [{"a": 1, "b": [1]}, {"a": 1, "b": [1, 2]}])
    assert "{a: (), b: (2,)}" in str(odd)
    (_, odd), _ = errors_of(Spy(lambda batch: batch["a"]), [{"a": 1}, {"a": 1, "c": 2}])
    assert "{a: (), c: ()} and another of its batch is of {a: ()}" in str(odd)


def test_of_equally_common_shapes_that_of_the_first_runs():
    outcomes, _ = errors_of(Spy(lambda batch: batch.sum(1)), [np.ones(n) for n in (2, 3, 3, 2)])
    assert [isinstance(outcome, ModelError) for outcome in outcomes] == [False, True, True, False]


def test_an_odd_input_in_a_batch_of_its_own_runs():
    model = Model(Spy(lambda batch: batch.sum(1)))
    assert [model.run([np.ones(n)]) for n in (3, 4)] == [[3], [4]]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("text", "a str is no number"),
        (None, "None is no number"),
        ([1.0, "x"], "TypeError"),
        ([[1, 2], [3]], "ValueError"),
        ({"a": b"x"}, "a bytes is no number"),
        ([2**70], "Overflow"),
    ],
)
def test_what_cannot_be_stacked_fails_alone_and_is_told_the_remedy(value, says):
    (fine, odd), told = errors_of(nn.Identity(), [1.0, value])
    assert fine == 1.0
    assert says in str(odd)
    assert "give the model a collate" in str(odd)
    assert told == [[1]]
    assert str(Model(nn.Identity()).run([value])[0]) == str(odd)


def test_of_a_batch_with_an_odd_input_that_fails_the_others_are_rescued_and_stay_in_order():
    def returns(batch):
        if (batch == 13).any():
            raise ValueError("unlucky")
        return batch[:, 0]

    asked = []

    def again(start, end):
        asked.append((start, end))
        return [values[index] for index in range(start, end)]

    values = [np.full(2 + (n == 3), float(n)) for n in (10, 11, 12, 3, 13, 14)]
    outcomes = Model(Spy(returns)).run(values, again)
    assert [outcome for outcome in outcomes if not isinstance(outcome, ModelError)] == [10, 11, 12, 14]
    assert "shape (3,)" in str(outcomes[3])
    assert str(outcomes[4]) == "ValueError: unlucky"
    assert not any(start <= 3 < end for start, end in asked)


# --- how it is run ----------------------------------------------------------------------------------------------------


def test_a_module_runs_in_evaluation_mode_and_without_gradients():
    modes = []

    class Mode(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.dropout = nn.Dropout(0.5)

        def forward(self, batch):
            modes.append((self.training, self.dropout.training, torch.is_inference_mode_enabled()))
            return self.layer(batch)

    module = Mode().train()
    (row,) = Model(call_load(lambda: module)).run([[1.0]])
    assert modes == [(False, False, True)]
    assert isinstance(row, np.ndarray)


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_a_real_model_answers_as_it_does_when_it_is_called_directly(device):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs = torch.randn(5, 8)
    with torch.inference_mode():
        direct = module(inputs)
    rows = Model(module, device=open_device(device)).run([row.numpy() for row in inputs])
    assert np.allclose(np.stack(rows), direct.numpy(), atol=1e-5)


def test_a_module_that_collates_gets_its_batch_and_what_it_splits_are_answers():
    class Padded(nn.Module):
        def collate(self, inputs):
            rows = [torch.tensor(value) for value in inputs]
            return {"ids": nn.utils.rnn.pad_sequence(rows, batch_first=True), "texts": ["a"] * len(rows)}

        def forward(self, ids, texts):
            return ids.sum(1), texts

        def split(self, output, n):
            return [f"{text}{total}" for total, text in zip(*output, strict=True)][:n]

    model = Model(Padded())
    assert model.run([[1], [2, 3], [4, 5, 6]]) == ["a1", "a5", "a15"]


def test_a_module_with_predict_is_called_as_any_object_and_moved_as_any_module():
    class Own(nn.Module):
        def forward(self, batch):
            raise AssertionError

        def predict(self, inputs, context):
            assert torch.is_inference_mode_enabled()
            return [f"{value}{meta}" for value, meta in zip(inputs, context.meta, strict=True)]

        def cost(self, value):
            return len(value)

    model = Model(Own().train())
    context = BatchContext(("", ""), ({}, None), (1.0, 1.0))
    assert model.run(model.prepare(["a", "bc"], context)) == ["a{}", "bcNone"]
    assert model.classify("bc", None, None) == (None, 2.0)
    assert not model.views


def test_a_layer_of_a_module_is_no_part_of_the_model():
    class Names(nn.Module):
        def __init__(self):
            super().__init__()
            self.split = nn.Linear(1, 1)
            self.predict = nn.Identity()

        def forward(self, batch):
            return self.predict(batch)

    assert Model(call_load(Names)).run([1.0, 2.0]) == [1.0, 2.0]


def test_a_compiled_module_keeps_the_parts_of_the_one_inside():
    class Inner(nn.Module):
        def collate(self, inputs):
            return {"x": torch.tensor(inputs)}

        def forward(self, x):
            return 2 * x

    class Wrapped(nn.Module):  # as torch.compile's: attributes pass through, and forward's signature is lost
        def __init__(self, inner):
            super().__init__()
            self._orig_mod = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("_orig_mod"), name)

        def forward(self, *args, **kwargs):
            return self._orig_mod(*args, **kwargs)

    assert Model(Wrapped(Inner())).run([1.0, 2.0]) == [2.0, 4.0]


def test_a_class_of_modules_is_no_model():
    with pytest.raises(Exception, match="the class Identity, and an object of it is wanted"):
        call_load(lambda: nn.Identity)


class FakeDevice(PlainDevice):
    """Counts what goes there and back; its memory is the host's."""

    def __init__(self):
        super().__init__("cpu")
        self.sent, self.fetched, self.allocated = [], 0, []
        self.arrived = threading.Event()
        self.arrived.set()

    def empty(self, shape, dtype):
        self.allocated.append(shape)
        return super().empty(shape, dtype)

    def to_device(self, tree):
        self.sent.append(tree)

        def arrive():
            assert self.arrived.wait(30)
            return tree

        return arrive

    def to_host(self, tree):
        self.fetched += 1
        return super().to_host(tree)

    def is_out_of_memory(self, error):
        return isinstance(error, MemoryError)


def test_a_batch_goes_to_the_device_once_and_its_output_comes_back_once():
    device = FakeDevice()
    rows = Model(nn.Linear(3, 2), device=device).run([[1.0, 2.0, 3.0]] * 4)
    assert len(rows) == 4
    assert device.allocated == [(4, 3)]
    assert [tuple(tree.shape) for tree in device.sent] == [(4, 3)]
    assert device.fetched == 1


def test_a_batch_is_prepared_while_the_copy_of_another_one_is_on_its_way_and_predict_waits_for_its_own():
    device = FakeDevice()
    module = Spy(lambda batch: batch)
    model = Model(module, device=device)
    device.arrived.clear()
    first = model.prepare([1.0])
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(model.predict(first)))
    thread.start()
    second = model.prepare([2.0])  # is not held up by the copy that is slow
    assert module.got == []
    device.arrived.set()
    thread.join(30)
    outputs.append(model.predict(second))
    assert all(output.detached for output in outputs)
    assert [model.answers(output) for output in outputs] == [[1.0], [2.0]]


def test_out_of_memory_is_told_and_the_halves_are_run():
    def returns(batch):
        if len(batch) > 2:
            raise MemoryError
        return batch

    sizes = []
    model = Model(Spy(returns), device=FakeDevice(), on_out_of_memory=sizes.append)
    assert model.run([1.0, 2.0, 3.0, 4.0]) == [1.0, 2.0, 3.0, 4.0]
    assert sizes == [4]


def test_a_module_that_cannot_be_moved_says_so():
    class Stuck(nn.Linear):
        def to(self, *args, **kwargs):
            raise RuntimeError("no room")

    with pytest.raises(ModelError, match="the module cannot be moved to cpu: RuntimeError: no room"):
        Model(Stuck(1, 1))


def test_a_module_on_several_devices_stays_where_it_is():
    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(1, 1), nn.Linear(1, 1, device="meta")

        def to(self, *args, **kwargs):
            raise AssertionError

    Model(Spread())


# --- outputs ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Detection:
    boxes: object
    scores: object = None


class Output(OrderedDict):
    """As transformers' ModelOutput: a dict, and a dataclass."""


def plain(value):
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("output", "answers"),
    [
        (torch.tensor([1, 2]), [1, 2]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([[1, 2], [3, 4]]).T, [[1, 3], [2, 4]]),
        (torch.tensor([1.5, 2.5], dtype=torch.bfloat16), [1.5, 2.5]),
        (torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16), [[1.5], [2.5]]),
        (torch.tensor([[1 + 2j], [3j]]).conj(), [[1 - 2j], [-3j]]),
        ((torch.tensor([1, 2]), torch.tensor([[3], [4]])), [[1, [3]], [2, [4]]]),
        (Pair(torch.tensor([1, 2]), torch.tensor([3, 4])), [[1, 3], [2, 4]]),
        (torch.tensor([[1, 5], [7, 3]]).max(1), [[5, 1], [7, 0]]),
        ({"a": torch.tensor([1, 2]), "b": None}, [{"a": 1, "b": None}, {"a": 2, "b": None}]),
        (Output(a=torch.tensor([1, 2])), [{"a": 1}, {"a": 2}]),
        (UserDict(a=torch.tensor([1, 2])), [{"a": 1}, {"a": 2}]),
        (
            Detection(torch.tensor([[1], [2]])),
            [{"boxes": [1], "scores": None}, {"boxes": [2], "scores": None}],
        ),
        (
            {"a": (torch.tensor([1, 2]), {"b": torch.tensor([3, 4])}), "c": ["x", "y"]},
            [{"a": [1, {"b": 3}], "c": "x"}, {"a": [2, {"b": 4}], "c": "y"}],
        ),
        (["x", "y"], ["x", "y"]),
        (
            [{"boxes": torch.zeros(0, 4)}, {"boxes": torch.ones(1, 4)}],
            [{"boxes": []}, {"boxes": [[1, 1, 1, 1]]}],
        ),
    ],
    ids=lambda value: str(value)[:50].replace("\n", ""),
)
def test_an_output_is_split_into_one_answer_for_each_request(output, answers):
    outcomes = Model(Spy(lambda batch: output)).run([1.0, 2.0])
    assert [plain(outcome) for outcome in outcomes] == answers
    for outcome in outcomes:
        codec.pack(outcome)


def test_rows_of_bfloat16_cross_as_they_are_and_single_numbers_as_numbers():
    (row,) = Model(Spy(lambda batch: torch.ones(1, 3, dtype=torch.bfloat16))).run([1.0])
    assert row.dtype == torch.bfloat16
    (number,) = Model(Spy(lambda batch: torch.ones(1, dtype=torch.bfloat16))).run([1.0])
    assert codec.unpack(codec.pack(number), tensors=True) == 1.0
    assert type(codec.unpack(codec.pack(number), tensors=True)) is float


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (torch.zeros(3), "a tensor of shape (3,) for a batch of 2; its first dimension must be 2"),
        (torch.zeros(()), "a tensor of shape () for a batch of 2"),
        (
            {"logits": torch.zeros(2), "loss": torch.zeros(())},
            "a tensor of shape () as output['loss'] for a batch of 2",
        ),
        (
            (torch.zeros(2), {"x": (torch.zeros(4),)}),
            "a tensor of shape (4,) as output[1]['x'][0] for a batch of 2",
        ),
        ([torch.zeros(2)] * 3, "a list of 3 for a batch of 2"),
        (None, "None for a batch of 2"),
        (3.5, "a float for a batch of 2"),
        ({"cache": object()}, "an object as output['cache'] for a batch of 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_output_that_cannot_be_split_says_what_it_is_and_what_to_do(output, says):
    for outcome in Model(Spy(lambda batch: output)).run([1.0, 2.0]):
        assert isinstance(outcome, ModelError)
        assert f"forward() returned {says}" in str(outcome)
        assert "split(output, n)" in str(outcome)


def test_an_output_that_the_module_overwrites_is_not_changed_under_its_callers():
    buffer = torch.zeros(1, 2)

    def returns(batch):
        buffer[0] = batch
        return {"out": buffer}

    model = Model(Spy(returns))
    first = model.predict(model.prepare([[1.0, 2.0]]))
    model.predict(model.prepare([[3.0, 4.0]]))
    assert plain(model.answers(first)) == [{"out": [1.0, 2.0]}]


# --- on a real GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@gpu
def test_on_a_gpu_answers_are_right_while_the_next_batches_are_on_their_way():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    inputs = torch.randn(64, 16, 256)
    with torch.inference_mode():
        direct = module(inputs).numpy()
    model = Model(module, device=open_device("cuda"))
    prepared = [model.prepare([row.numpy() for row in batch]) for batch in inputs]
    outputs = [model.predict(batch) for batch in prepared]
    for output, expected in zip(outputs, direct, strict=True):
        assert np.allclose(np.stack(model.answers(output)), expected, atol=1e-4)


@pytest.mark.gpu
@gpu
def test_on_a_gpu_a_batch_that_does_not_fit_is_run_in_halves_and_a_single_input_that_does_not_fit_fails_alone():
    free, _ = torch.cuda.mem_get_info()

    class Hungry(nn.Module):
        def forward(self, batch):
            torch.empty(int(free * 0.4) * len(batch), dtype=torch.uint8, device="cuda")
            return batch

    sizes = []
    model = Model(Hungry(), device=open_device("cuda"), on_out_of_memory=sizes.append)
    assert model.run([1.0, 2.0, 3.0, 4.0]) == [1.0, 2.0, 3.0, 4.0]
    assert sizes == [4]

    class Starved(nn.Module):
        def forward(self, batch):
            return torch.empty(2 * free, dtype=torch.uint8, device="cuda")

    (outcome,) = Model(Starved(), device=open_device("cuda")).run([1.0])
    assert "a single input does not fit into memory, device cuda" in str(outcome)
