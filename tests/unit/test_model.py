"""The model contract: what a model may answer, and what its callers get when it fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import sys
import threading
import time
import weakref
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchq.answers import MAX_MESSAGE
from batchq.device import PlainDevice
from batchq.errors import ConfigError, ModelError
from batchq.model import DeviceLostError, Model, call_load, load_model
from batchq.protocols import BatchContext

Pair = namedtuple("Pair", "values indices")
CONTEXT = BatchContext(
    ("a" * 32, "b" * 32, "c" * 32, "d" * 32), ({"user": 1}, None, None, None), (1.0, 2.0, 3.0, 4.0)
)


class TooLargeError(Exception):
    """What a FakeDevice takes for too little memory."""


class StickyError(Exception):
    """What a FakeDevice takes for the end of the device."""


class FakeDevice(PlainDevice):
    """A device whose errors and copies tests can make."""

    def __init__(self):
        super().__init__("fake:0")
        self.freed = 0
        self.at_free = lambda: None

    def is_out_of_memory(self, error):
        return isinstance(error, TooLargeError)

    def is_lost(self, error):
        return isinstance(error, StickyError)

    def free(self):
        self.freed += 1
        self.at_free()


def texts(outcomes: list[object]) -> list[str]:
    assert all(isinstance(outcome, ModelError) for outcome in outcomes)
    return [str(outcome) for outcome in outcomes]


# what a model may answer


@pytest.mark.parametrize("answer", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], dtype=object)])
def test_a_list_a_tuple_and_an_array_are_one_answer_for_each_input(answer):
    assert Model(lambda inputs: answer).run(["a", "b"]) == [1, 2]


def test_an_array_of_rows_gives_each_caller_a_row():
    outcomes = Model(lambda inputs: np.arange(6).reshape(2, 3)).run([0, 0])
    assert [outcome.tolist() for outcome in outcomes] == [[0, 1, 2], [3, 4, 5]]


def test_the_model_gets_a_list_of_all_values_and_is_not_called_for_none():
    seen = []
    model = Model(lambda inputs: seen.append(inputs) or inputs)
    assert model.run([]) == []
    assert model.run((1, 2)) == [1, 2]
    assert seen == [[1, 2]]


def test_an_exception_among_the_answers_fails_its_own_item():
    told = []
    model = Model(
        lambda inputs: [1, ValueError("bad"), 3],
        on_error=lambda error, indices: told.append((error, indices)),
    )
    first, second, third = model.run([0, 0, 0])
    assert (first, third) == (1, 3)
    assert isinstance(second, ModelError)
    assert (str(second), second.error_type) == ("ValueError: bad", "ValueError")
    assert [(str(error), indices) for error, indices in told] == [("bad", [1])]


@pytest.mark.parametrize(
    ("answer", "named", "remedy"),
    [
        (None, "None", "missing"),
        ({"label": [1, 2], "score": [3, 4]}, "a dict", "a list of dicts"),
        (OrderedDict(a=1, b=2), "an OrderedDict", "a list of dicts"),
        ("ab", "a str", "a list"),
        (b"ab", "a bytes", "a list"),
        ({1, 2}, "a set", "no order"),
        (iter([1, 2]), "a list_iterator", "list()"),
        (Pair([1, 2], [3, 4]), "a Pair", "zip"),
        (7, "an int", "a list"),
    ],
)
def test_anything_else_is_an_error_that_names_the_type_and_the_remedy_whatever_its_length(
    answer, named, remedy
):
    for text in texts(Model(lambda inputs: answer).run(["a", "b"])):
        assert f"returned {named} for a batch of 2" in text
        assert remedy in text


def test_a_generator_is_an_error_that_says_to_wrap_it_in_list():
    outcomes = Model(lambda inputs: (x for x in inputs)).run([1])
    assert "a generator" in texts(outcomes)[0]
    assert "list()" in texts(outcomes)[0]


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_wrong_number_of_answers_names_both_and_is_not_run_again(length):
    runs = []

    def predict(inputs):
        runs.append(len(inputs))
        return [0] * length

    for text in texts(Model(predict).run([1, 2])):
        assert f"a list of {length} for a batch of 2" in text
    assert runs == [2]


@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
def test_an_array_of_the_wrong_shape_names_its_shape(shape):
    for text in texts(Model(lambda inputs: np.zeros(shape)).run([1, 2])):
        assert str(shape) in text
        assert "first dimension must be 2" in text


def test_each_caller_gets_an_error_of_its_own():
    outcomes = Model(lambda inputs: None).run([1, 2])
    assert outcomes[0] is not outcomes[1]


# what fails, and for whom


def test_one_guilty_item_fails_alone_and_costs_few_further_runs():
    runs = []

    def predict(inputs):
        runs.append(len(inputs))
        if 13 in inputs:
            raise ValueError("unlucky")
        return inputs

    told = []
    outcomes = Model(predict, on_error=lambda error, indices: told.append((str(error), indices))).run(
        list(range(32))
    )
    assert texts([outcomes.pop(13)]) == ["ValueError: unlucky"]
    assert outcomes == [n for n in range(32) if n != 13]
    assert len(runs) == 1 + 2 * math.log2(32)
    assert told == [("unlucky", [13])]


@given(st.lists(st.booleans(), max_size=40))
def test_whichever_items_are_guilty_exactly_those_fail(guilty):
    def predict(inputs):
        if any(bad for _, bad in inputs):
            raise RuntimeError("guilty")
        return [n for n, _ in inputs]

    outcomes = Model(predict).run(list(enumerate(guilty)))
    assert [isinstance(outcome, ModelError) for outcome in outcomes] == guilty
    assert all(isinstance(outcome, ModelError) or outcome == n for n, outcome in enumerate(outcomes))


def test_half_a_batch_with_a_wrong_answer_fails_without_touching_the_other_half():
    def predict(inputs):
        if len(inputs) == 4:
            raise RuntimeError
        return None if 0 in inputs else inputs

    outcomes = Model(predict).run([0, 1, 2, 3])
    assert len(texts(outcomes[:2])) == 2
    assert outcomes[2:] == [2, 3]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_an_answer(error):
    def predict(inputs):
        raise error

    with pytest.raises(error):
        Model(predict).run([1, 2])


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError(), "ValueError"), (UnreadableError(), "UnreadableError: (its text cannot be read)")],
)
def test_an_exception_without_a_readable_text_still_has_a_name(error, text):
    def predict(inputs):
        raise error

    assert texts(Model(predict).run([1])) == [text]


def test_a_huge_text_is_cut():
    def predict(inputs):
        raise ValueError("x" * 100_000)

    assert len(texts(Model(predict).run([1]))[0]) == MAX_MESSAGE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_gives_each_caller_a_row(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0).reshape(2, 3).to(getattr(torch, dtype)).requires_grad_()
    outcomes = Model(lambda inputs: tensor).run([0, 0])
    assert [outcome.tolist() for outcome in outcomes] == [[0, 1, 2], [3, 4, 5]]
    assert "shape (2, 3) for a batch of 3" in texts(Model(lambda inputs: tensor).run([0, 0, 0]))[0]


# memory and lost devices


def test_out_of_memory_is_told_with_the_size_and_the_batch_is_split():
    device, sizes, told = FakeDevice(), [], []

    def predict(inputs):
        if len(inputs) > 2:
            raise TooLargeError
        return list(inputs)

    model = Model(
        predict, device=device, on_out_of_memory=sizes.append, on_error=lambda *args: told.append(args)
    )
    assert model.run(list(range(8))) == list(range(8))
    assert sizes == [8, 4, 4]
    assert device.freed == 3
    assert told == []


@pytest.mark.parametrize("part", ["collate", "predict", "split"])
def test_any_part_of_a_model_may_run_out_of_memory(part):
    class Tight:
        def collate(self, inputs):
            return self.check("collate", inputs)

        def predict(self, batch):
            return self.check("predict", batch)

        def split(self, output, n):
            return self.check("split", output)

        def check(self, name, batch):
            if name == part and len(batch) > 2:
                raise TooLargeError
            return batch

    sizes = []
    assert Model(Tight(), device=FakeDevice(), on_out_of_memory=sizes.append).run([1, 2, 3, 4]) == [
        1,
        2,
        3,
        4,
    ]
    assert sizes == [4]


def test_a_copy_to_the_device_may_run_out_of_memory():
    torch = pytest.importorskip("torch")

    class SmallDevice(FakeDevice):
        def __init__(self):
            super().__init__()
            self.name = "cpu"

        def to_device(self, tree):
            if len(tree) > 2:
                raise TooLargeError
            return super().to_device(tree)

    sizes = []
    model = Model(torch.nn.Identity(), device=SmallDevice(), on_out_of_memory=sizes.append)
    assert [row.tolist() for row in model.run([[1.0], [2.0], [3.0]])] == [[1.0], [2.0], [3.0]]
    assert sizes == [3]


def test_a_single_input_that_does_not_fit_fails_alone_and_says_so():
    sizes = []

    def predict(inputs):
        if 3 in inputs:
            raise TooLargeError("no room")
        return inputs

    model = Model(predict, device=FakeDevice(), on_out_of_memory=sizes.append)
    *fine, large = model.run([1, 2, 3])
    assert fine == [1, 2]
    assert str(large) == "a single input does not fit into memory, device fake:0: TooLargeError: no room"
    assert large.error_type == "TooLargeError"
    assert sizes == []  # it says nothing about how many of the others fit: no smaller batches because of it


@pytest.mark.parametrize("part", ["collate", "predict", "split"])
def test_when_memory_is_freed_nothing_holds_on_to_what_the_batch_had(part):
    class Large(list):
        pass

    device, alive, left = FakeDevice(), [], []

    class Hungry:
        def collate(self, inputs):
            return self.step("collate", inputs)

        def predict(self, batch):
            return self.step("predict", batch)

        def split(self, output, n):
            return list(self.step("split", output))

        def step(self, name, batch):
            made = Large(batch)
            alive.append(weakref.ref(made))
            if name == part and len(batch) > 1:
                raise TooLargeError
            return made

    device.at_free = lambda: left.append([ref for ref in alive if ref() is not None])
    gc.disable()
    try:
        assert Model(Hungry(), device=device).run([1, 2]) == [1, 2]
    finally:
        gc.enable()
    assert left == [[]]


def test_a_lost_device_is_an_error_of_no_item_and_nothing_is_run_on_it_again():
    runs, told = [], []

    def predict(inputs):
        runs.append(inputs)
        raise StickyError("device-side assert")

    model = Model(
        predict, device=FakeDevice(), on_error=lambda error, indices: told.append((str(error), indices))
    )
    with pytest.raises(DeviceLostError, match=r"fake:0.*device-side assert") as caught:
        model.run([1, 2, 3])
    assert isinstance(caught.value.__cause__, StickyError)
    assert runs == [[1, 2, 3]]
    assert told == [("device-side assert", [0, 1, 2])]


@pytest.mark.parametrize("part", ["collate", "split"])
def test_the_device_may_be_lost_in_any_part_of_a_model(part):
    class Unlucky:
        def collate(self, inputs):
            return self.check("collate", inputs)

        def predict(self, batch):
            return batch

        def split(self, output, n):
            return self.check("split", output)

        def check(self, name, batch):
            if name == part:
                raise StickyError
            return batch

    with pytest.raises(DeviceLostError):
        Model(Unlucky(), device=FakeDevice()).run([1, 2])


def test_a_device_that_is_lost_while_a_batch_is_run_in_parts_ends_that():
    told = []

    def predict(inputs):
        raise ValueError if len(inputs) > 1 else StickyError

    model = Model(predict, device=FakeDevice(), on_error=lambda error, indices: told.append(indices))
    with pytest.raises(DeviceLostError):
        model.run([1, 2, 3, 4])
    assert told == [[0]]


# the parts of an object


class Recorder:
    """A model with every part; it notes their calls."""

    def __init__(self):
        self.calls = []

    def collate(self, inputs):
        self.calls.append(("collate", inputs))
        return tuple(inputs)

    def predict(self, batch):
        self.calls.append(("predict", batch))
        return {"doubled": [2 * value for value in batch]}

    def split(self, output, n):
        self.calls.append(("split", output, n))
        return output["doubled"]

    def cost(self, value):
        return value / 2

    def batch_key(self, value):
        return f"g{value % 2}"

    def warmup(self):
        self.calls.append("warmup")

    def close(self):
        self.calls.append("close")


def test_an_object_is_collated_run_and_split():
    loaded = Recorder()
    model = Model(call_load(lambda: loaded))
    model.warm_up()
    assert model.run([1, 2]) == [2, 4]
    model.close()
    assert loaded.calls == [
        "warmup",
        ("collate", [1, 2]),
        ("predict", (1, 2)),
        ("split", {"doubled": [2, 4]}, 2),
        "close",
    ]


def test_an_object_needs_no_part_but_predict_and_that_goes_before_being_callable():
    class Plain:
        def predict(self, inputs):
            return [-value for value in inputs]

        def __call__(self, inputs):
            raise AssertionError

    model = Model(call_load(Plain))
    model.warm_up()
    assert model.run([1, 2]) == [-1, -2]
    assert model.classify(1, None, None) == (None, None)
    assert (model.classifies, model.costs, model.views, model.wants_context) == (False, False, False, False)
    model.close()


def test_an_object_without_predict_that_can_be_called_may_have_the_other_parts():
    class Callable:
        def __call__(self, inputs):
            return inputs

        def cost(self, value):
            return len(value)

    assert Model(Callable()).classify("abc", None, None) == (None, 3.0)


def test_a_stand_in_that_makes_up_attributes_is_a_function():
    assert Model(Mock(return_value=[1, 2])).run([0, 0]) == [1, 2]


def test_what_split_returns_is_checked_as_what_a_function_returns():
    class Short(Recorder):
        def split(self, output, n):
            return output["doubled"][:1]

    for text in texts(Model(Short()).run([1, 2])):
        assert "split() returned a list of 1 for a batch of 2" in text


@pytest.mark.parametrize("part", ["collate", "predict", "split"])
def test_whichever_part_fails_for_an_item_that_item_fails_alone(part):
    class Picky(Recorder):
        def collate(self, inputs):
            return self.check("collate", inputs)

        def predict(self, batch):
            return self.check("predict", batch)

        def split(self, output, n):
            return self.check("split", output)

        def check(self, name, batch):
            if name == part and 13 in batch:
                raise ValueError(name)
            return list(batch)

    outcomes = Model(Picky()).run(list(range(20)))
    assert texts([outcomes.pop(13)]) == [f"ValueError: {part}"]
    assert outcomes == [n for n in range(20) if n != 13]


def test_the_inputs_of_a_model_that_collates_may_be_views():
    assert Model(Recorder()).views
    assert not Model(lambda inputs: inputs).views


def test_the_next_batch_is_collated_and_the_last_one_split_while_the_model_runs():
    running, over = threading.Event(), threading.Event()

    class Slow(Recorder):
        def predict(self, batch):
            if batch == (2,):
                running.set()
                assert over.wait(30)
            return super().predict(batch)

    model = Model(Slow())
    first, second = (model.prepare([value]) for value in (1, 2))
    output = model.predict(first)
    assert output.detached
    thread = threading.Thread(target=lambda: outputs.append(model.predict(second)))
    outputs = []
    thread.start()
    assert running.wait(30)
    third = model.prepare([3])
    assert model.answers(output) == [2]
    over.set()
    thread.join(30)
    outputs.append(model.predict(third))
    assert [model.answers(output) for output in outputs] == [[4], [6]]


@pytest.mark.parametrize("kind", ["array", "tensor", "list"])
def test_an_output_that_is_detached_stays_as_it_is_while_the_model_runs_again(kind):
    if kind == "tensor":
        torch = pytest.importorskip("torch")
    buffer = torch.zeros(2, 1) if kind == "tensor" else np.zeros((2, 1))

    def predict(inputs):
        buffer[:] = inputs[0]
        return list(buffer) if kind == "list" else buffer

    model = Model(predict)
    first = model.predict(model.prepare([1, 1]))
    assert first.detached == (kind != "list")
    if first.detached:
        model.predict(model.prepare([2, 2]))
        assert [answer.tolist() for answer in model.answers(first)] == [[1], [1]]


# the context


def test_a_function_with_a_second_parameter_that_is_required_gets_the_context():
    def predict(inputs, requests):
        return [
            (value, requests.ids[place][0], requests.deadlines[place]) for place, value in enumerate(inputs)
        ]

    model = Model(predict)
    assert model.wants_context
    assert model.run(model.prepare([7, 8], CONTEXT.part(0, 2))) == [(7, "a", 1.0), (8, "b", 2.0)]


def test_a_second_parameter_named_context_gets_it_even_if_it_has_a_default_and_any_other_does_not():
    def first(inputs, context=None):
        return [context.meta[0]]

    def second(inputs, temperature=0.5):
        return [temperature]

    assert Model(first).run(Model(first).prepare([1], CONTEXT.part(0, 1))) == [{"user": 1}]
    assert Model(second).run(Model(second).prepare([1], CONTEXT.part(0, 1))) == [0.5]


def test_when_a_batch_is_run_in_parts_each_part_has_the_context_of_its_own_requests():
    class Checked:
        def predict(self, inputs, context):
            assert [ord(id[0]) - ord("a") for id in context.ids] == inputs
            if 2 in inputs:
                raise ValueError
            return inputs

    model = Model(Checked())
    outcomes = model.run(model.prepare([0, 1, 2, 3], CONTEXT))
    assert texts([outcomes.pop(2)]) == ["ValueError"]
    assert outcomes == [0, 1, 3]


@pytest.mark.parametrize(
    "predict",
    [lambda: 1, lambda inputs, context, more: 1, lambda inputs, *, size: 1, lambda *, inputs: 1],
)
def test_a_function_that_cannot_be_called_with_the_inputs_is_told_when_it_is_loaded(predict):
    with pytest.raises(ConfigError, match=r"it is given the list of inputs, and a BatchContext if"):
        call_load(lambda: predict)


def test_a_function_may_take_more_that_it_does_not_need():
    assert Model(call_load(lambda: lambda inputs, size=3, **more: inputs)).run([1]) == [1]
    assert Model(call_load(lambda: lambda *inputs: inputs[0])).run([1]) == [1]


# async models


def test_an_async_function_and_an_async_object_are_run_to_their_end():
    async def predict(inputs):
        await asyncio.sleep(0)
        return [2 * value for value in inputs]

    class Object:
        async def predict(self, inputs, context):
            return [(value, context.deadlines[0]) for value in inputs]

    model = Model(call_load(lambda: predict))
    assert model.run([1, 2]) == [2, 4]
    model.close()
    model = Model(call_load(Object))
    assert model.run(model.prepare([1], CONTEXT.part(0, 1))) == [(1, 1.0)]
    model.close()


def test_load_warmup_predict_and_close_share_one_event_loop():
    loops = []

    class Object:
        async def warmup(self):
            loops.append(asyncio.get_running_loop())

        predict = None

        async def close(self):
            loops.append(asyncio.get_running_loop())

    async def load():
        loops.append(asyncio.get_running_loop())
        loaded = Object()

        async def predict(inputs):
            loops.append(asyncio.get_running_loop())
            return inputs

        loaded.predict = predict
        return loaded

    model = Model(call_load(load))
    model.warm_up()
    assert model.run([1]) == [1]
    assert model.run([2]) == [2]
    model.close()
    assert len(loops) == 5
    assert len(set(loops)) == 1
    assert loops[0].is_closed()


def test_closing_a_model_cancels_what_it_left_running():
    cancelled = []

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    left = []

    async def predict(inputs):
        left.append(asyncio.create_task(forever()))
        await asyncio.sleep(0)
        return inputs

    model = Model(predict)
    assert model.run([1]) == [1]
    model.close()
    assert cancelled == [True]


def test_an_async_model_that_raises_is_split_as_any_other():
    async def predict(inputs):
        if 2 in inputs:
            raise ValueError("bad")
        return inputs

    model = Model(predict)
    outcomes = model.run([1, 2, 3])
    assert texts([outcomes[1]]) == ["ValueError: bad"]
    assert (outcomes[0], outcomes[2]) == (1, 3)
    model.close()


def test_an_async_load_that_raises_says_what_and_leaves_no_loop_open():
    async def load():
        raise OSError("weights")

    with pytest.raises(ModelError, match=r"load\(\) could not load the model: OSError: weights"):
        call_load(load)


@pytest.mark.parametrize("name", ["collate", "split", "cost", "batch_key"])
def test_a_part_that_may_not_be_async_is_told_when_the_model_is_loaded(name):
    async def part(self, *args):
        return None

    kind = type("Object", (Recorder,), {name: part})
    with pytest.raises(ConfigError, match=f"{name} is an async def; define it with def"):
        call_load(kind)


# cost and batch_key


def test_what_a_caller_did_not_give_is_asked_of_the_model():
    model = Model(Recorder())
    assert (model.classifies, model.costs) == (True, True)
    assert model.classify(3, None, None) == ("g1", 1.5)
    assert model.classify(3, "mine", None) == ("mine", 1.5)
    assert model.classify(3, 7, 9.0) == (7, 9.0)
    assert model.classify(3, None, 0.0) == ("g1", 0.0)


@pytest.mark.parametrize(
    ("key", "found"), [("a", "a"), (3, 3), (None, None), (np.int64(3), 3), (-(2**40), -(2**40))]
)
def test_a_batch_key_is_a_str_an_int_or_none(key, found):
    loaded = Recorder()
    loaded.batch_key = lambda value: key
    got, _ = Model(loaded).classify(1, None, 1.0)
    assert got == found
    assert type(got) is type(found)


@pytest.mark.parametrize(
    ("key", "named"), [((3, 4), "a tuple, (3, 4)"), (True, "a bool, True"), (1.5, "a float, 1.5")]
)
def test_any_other_batch_key_is_an_error_that_names_it_and_the_remedy(key, named):
    loaded = Recorder()
    loaded.batch_key = lambda value: key
    with pytest.raises(ModelError, match="return a str, an int or None") as caught:
        Model(loaded).classify(1, None, 1.0)
    assert named in str(caught.value)


@pytest.mark.parametrize("cost", [0, 1, 2.5, np.int32(4), np.float32(0.5), 10**9])
def test_a_cost_is_a_number_of_zero_or_more(cost):
    loaded = Recorder()
    loaded.cost = lambda value: cost
    _, got = Model(loaded).classify(1, "k", None)
    assert got == cost
    assert type(got) is float


@pytest.mark.parametrize("cost", [-1, math.nan, math.inf, 10**9 + 1, 10**400, "4", None, True, 1j])
def test_any_other_cost_is_an_error_that_names_it(cost):
    loaded = Recorder()
    loaded.cost = lambda value: cost
    with pytest.raises(ModelError, match="return a number from 0 to 1,000,000,000") as caught:
        Model(loaded).classify(1, "k", None)
    assert repr(cost)[:80] in str(caught.value)


@pytest.mark.parametrize("name", ["cost", "batch_key"])
def test_a_cost_or_a_batch_key_that_raises_is_an_error_of_its_request(name):
    loaded = Recorder()
    setattr(loaded, name, lambda value: 1 / 0)
    with pytest.raises(ModelError, match=rf"{name}\(\) of the model failed: ZeroDivisionError") as caught:
        Model(loaded).classify(1, None, None)
    assert caught.value.error_type == "ZeroDivisionError"


# before and after


def test_a_warmup_that_fails_says_so():
    loaded = Recorder()
    loaded.warmup = lambda: 1 / 0
    with pytest.raises(ModelError, match=r"warmup\(\) failed: ZeroDivisionError"):
        Model(loaded).warm_up()


def test_a_close_that_fails_is_logged_and_harms_nobody(caplog):
    loaded = Recorder()
    loaded.close = lambda: 1 / 0
    Model(loaded).close()
    assert "close() of the model failed" in caplog.text


def test_a_batch_that_fails_where_its_parts_do_not_is_told_once_with_the_shapes_and_the_remedy(caplog):
    model = Model(lambda inputs: list(np.stack(inputs)))
    values = [np.zeros(3), np.zeros(4)]
    for _ in range(3):
        assert [len(outcome) for outcome in model.run(values)] == [3, 4]
    (record,) = [record for record in caplog.records if record.name == "batchq.model"]
    assert record.levelno == logging.WARNING
    assert "a batch of 2 failed, and each of its parts did not" in record.getMessage()
    assert "their shapes are (3,), (4,): give the model a batch_key" in record.getMessage()


def test_inputs_that_the_model_changes_before_it_fails_are_made_anew_for_the_parts():
    def predict(inputs):
        for value in inputs:
            value.append("seen")
        if len(inputs) > 1:
            raise ValueError
        return [list(value) for value in inputs]

    values = [[1], [2], [3]]
    asked = []

    def again(start, end):
        asked.append((start, end))
        return [[value] for value in range(start + 1, end + 1)]

    assert Model(predict).run(values, again) == [[1, "seen"], [2, "seen"], [3, "seen"]]
    assert asked[0] == (0, 1)


def test_answers_to_parts_of_a_batch_are_copies_that_the_next_part_does_not_change():
    buffer = [0]

    def predict(inputs):
        if len(inputs) > 1:
            raise ValueError
        buffer[0] = inputs[0]
        return [buffer]

    assert Model(predict).run([1, 2, 3]) == [[1], [2], [3]]


# loading


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_spec_names_a_module_and_a_function_or_one_inside_a_class(modules):
    modules("bq_good", "def load(): pass\nclass Model:\n    @staticmethod\n    def load(): return 1\n")
    assert load_model("bq_good:load").__name__ == "load"
    assert load_model("bq_good:Model.load")() == 1


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mymodel.load", "'mymodel:load'"),
        ("mymodel", "'mymodel:load'"),
        ("mymodel:", "'mymodel:load'"),
        (":load", "'load:load'"),
        ("mymodel.py:load", "did you mean 'mymodel:load'"),
        ("./models/mymodel.py:load", "did you mean 'models.mymodel:load'"),
    ],
)
def test_a_spec_of_the_wrong_form_shows_the_right_one(spec, says):
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        load_model(spec)


def test_a_misspelt_module_suggests_a_near_name_and_says_where_it_looked(modules, tmp_path):
    modules("bq_sentiment", "")
    with pytest.raises(ConfigError) as caught:
        load_model("bq_sentimnet:load")
    assert "did you mean 'bq_sentiment'?" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_misspelt_module_in_a_package_suggests_one_of_the_package(modules, tmp_path):
    (tmp_path / "bq_package").mkdir()
    (tmp_path / "bq_package" / "__init__.py").write_text("")
    (tmp_path / "bq_package" / "vision.py").write_text("")
    with pytest.raises(ConfigError, match=r"no module 'bq_package\.visoin'.*did you mean 'vision'"):
        load_model("bq_package.visoin:load")


def test_a_module_that_needs_something_missing_shows_that_and_not_that_it_was_not_found(modules):
    modules("bq_needy", "\nimport bq_not_installed\n")
    with pytest.raises(ConfigError, match=r"importing 'bq_needy' failed.*bq_not_installed.*line 2") as caught:
        load_model("bq_needy:load")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(("text", "says"), [("def load(:", "SyntaxError"), ("1 / 0", "ZeroDivisionError")])
def test_a_module_that_raises_shows_what(modules, text, says):
    modules("bq_raises", text)
    with pytest.raises(ConfigError, match=f"importing 'bq_raises' failed: {says}"):
        load_model("bq_raises:load")


def test_a_misspelt_function_suggests_a_near_name(modules):
    modules("bq_names", "def load_model(): pass\n")
    with pytest.raises(ConfigError, match="'bq_names' has no 'load_modl'; did you mean 'load_model'"):
        load_model("bq_names:load_modl")


def test_what_cannot_be_called_is_no_model(modules):
    modules("bq_value", "load = 3\n")
    with pytest.raises(ConfigError, match="it is an int"):
        load_model("bq_value:load")


def given_to(load, **kwargs):
    return call_load(load, **kwargs)([])


def test_device_is_passed_only_if_load_takes_it():
    assert given_to(lambda: lambda inputs: "nothing", device="cuda:0") == "nothing"
    assert given_to(lambda device="cpu": lambda inputs: device, device="cuda:0") == "cuda:0"
    assert given_to(lambda **others: lambda inputs: others, device="cuda:0") == {"device": "cuda:0"}
    assert given_to(lambda device="cpu": lambda inputs: device) == "cpu"


def test_model_arguments_are_passed_by_name():
    assert given_to(lambda size, *, name="x": lambda inputs: (size, name), args={"size": "3"}) == ("3", "x")


def test_an_unknown_model_argument_names_those_that_load_takes():
    def load(device="cpu", weights=""):
        return list

    with pytest.raises(ConfigError, match=r"'weight'.*takes device, weights; did you mean 'weights'"):
        call_load(load, args={"weight": "a.pt"})


def test_a_missing_model_argument_is_named_and_so_is_the_likely_slip():
    def predict(inputs):
        return inputs

    with pytest.raises(ConfigError, match=r"needs 'inputs'.*predict function itself"):
        call_load(predict)


class NoPredict:
    def collate(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (lambda: None, "did you forget 'return predict'"),
        (lambda: 3, "returned an int"),
        (NoPredict, "it has no method 'predict'"),
        (lambda: Recorder, "the class Recorder, and an object of it is wanted: call it"),
    ],
)
def test_a_load_that_returns_no_model_says_what_it_returned(load, says):
    with pytest.raises(ConfigError, match=says):
        call_load(load)


def test_a_load_that_raises_says_what_and_where():
    def load():
        raise FileNotFoundError("weights.pt")

    with pytest.raises(
        ModelError, match=r"load\(\).*FileNotFoundError: weights\.pt \(in .*test_model\.py"
    ) as caught:
        call_load(load)
    assert caught.value.error_type == "FileNotFoundError"
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_class_whose_objects_can_be_called_is_a_load_function():
    class Doubler:
        def __init__(self, factor="2"):
            self.factor = int(factor)

        def __call__(self, inputs):
            return [self.factor * x for x in inputs]

    assert call_load(Doubler, device="cpu", args={"factor": "3"})([2]) == [6]


def test_collate_cost_and_batch_key_never_run_at_once() -> None:
    """They may share a tokenizer that cannot be used by two threads."""
    running, most = [0], [0]

    class Counting:
        def _look(self) -> None:
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.001)
            running[0] -= 1

        def collate(self, inputs: list[Any]) -> list[Any]:
            self._look()
            return inputs

        def cost(self, value: Any) -> int:
            self._look()
            return 1

        def batch_key(self, value: Any) -> int:
            self._look()
            return 1

        def predict(self, batch: list[Any]) -> list[Any]:
            return batch

    model = Model(Counting())
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            pool.submit(model.prepare, [1, 2])
            pool.submit(model.classify, 1, None, None)
    assert most == [1]
