"""The model contract: what a model may answer, and what its callers get when it fails."""

from __future__ import annotations

import math
import sys
import warnings
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchq.errors import ConfigError, ModelError
from batchq.model import MAX_MESSAGE, Model, call_load, is_out_of_memory, load_model

Pair = namedtuple("Pair", "values indices")


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


def test_an_async_predict_is_a_clear_error_and_no_warning():
    async def predict(inputs):
        return inputs

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (text,) = texts(Model(predict).run([1]))
    assert "coroutine" in text
    assert "async" in text


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


class FakeTorch:
    class OutOfMemoryError(RuntimeError):
        pass

    class Tensor:
        pass

    class cuda:
        emptied = 0

        @staticmethod
        def is_initialized():
            return True

        @classmethod
        def empty_cache(cls):
            cls.emptied += 1


class FakeTensor(FakeTorch.Tensor):
    """A tensor on a device, as far as the contract touches it."""

    def __init__(self, array, dtype="torch.float32"):
        self.array, self.shape, self.dtype, self.copies = array, array.shape, dtype, 0

    def cpu(self):
        self.copies += 1
        return self

    def float(self):
        return FakeTensor(self.array.astype("f4"))

    def detach(self):
        return self

    resolve_conj = resolve_neg = detach

    def numpy(self):
        assert self.dtype != "torch.bfloat16"
        return self.array


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_a_tensor_leaves_the_device_in_one_copy_and_gives_each_caller_a_row(monkeypatch, dtype):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch)
    tensor = FakeTensor(np.arange(6.0).reshape(2, 3), dtype)
    outcomes = Model(lambda inputs: tensor).run([0, 0])
    assert [outcome.tolist() for outcome in outcomes] == [[0, 1, 2], [3, 4, 5]]
    assert tensor.copies == 1
    assert "shape (2, 3) for a batch of 3" in texts(Model(lambda inputs: tensor).run([0, 0, 0]))[0]


def test_out_of_memory_is_told_with_the_size_and_the_batch_is_split(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch)
    sizes = []

    def predict(inputs):
        if len(inputs) > 2:
            raise FakeTorch.OutOfMemoryError
        return list(inputs)

    assert Model(predict, on_out_of_memory=sizes.append).run(list(range(8))) == list(range(8))
    assert sizes == [8, 4, 4]
    assert FakeTorch.cuda.emptied == 3


def test_one_item_too_large_for_the_device_fails_and_says_nothing_about_batches(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch)
    sizes = []

    def predict(inputs):
        raise FakeTorch.OutOfMemoryError("no room")

    assert texts(Model(predict, on_out_of_memory=sizes.append).run([1])) == ["OutOfMemoryError: no room"]
    assert sizes == []


def test_without_torch_nothing_is_out_of_memory(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not is_out_of_memory(RuntimeError("CUDA out of memory"))


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


async def load_async():
    return list


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (lambda: None, "did you forget 'return predict'"),
        (lambda: 3, "returned an int"),
        (load_async, "async def"),
    ],
)
def test_a_load_that_returns_no_function_says_what_it_returned(load, says):
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
