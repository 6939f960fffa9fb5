"""The error tree: what a caller may catch, send on as HTTP, or carry between processes."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchq
from batchq import errors
from batchq.errors import (
    BackendAuthError,
    BackendUnavailableError,
    BatchqError,
    ClientClosedError,
    ConfigError,
    DeadlineExceededError,
    EncodeError,
    ExecutionError,
    JobCancelledError,
    JobNotFoundError,
    ModelError,
    NoWorkerError,
    PayloadTooLargeError,
    ProtocolVersionError,
    QueueFullError,
    RequestError,
    UnavailableError,
    WorkerLostError,
    from_wire,
)

TREE = {
    # class: (parent, code, http_status, retryable)
    BatchqError: (Exception, "error", 500, False),
    RequestError: (BatchqError, "request", 400, False),
    EncodeError: (RequestError, "request.encode", 400, False),
    PayloadTooLargeError: (RequestError, "request.too_large", 413, False),
    ProtocolVersionError: (RequestError, "request.version", 400, False),
    UnavailableError: (BatchqError, "unavailable", 503, True),
    QueueFullError: (UnavailableError, "unavailable.full", 503, True),
    NoWorkerError: (UnavailableError, "unavailable.no_worker", 503, True),
    BackendUnavailableError: (UnavailableError, "unavailable.backend", 503, True),
    BackendAuthError: (BackendUnavailableError, "unavailable.backend_auth", 503, False),
    ExecutionError: (BatchqError, "execution", 500, False),
    ModelError: (ExecutionError, "execution.model", 500, False),
    WorkerLostError: (ExecutionError, "execution.worker_lost", 502, False),
    DeadlineExceededError: (BatchqError, "deadline", 504, True),
    JobCancelledError: (BatchqError, "job.cancelled", 409, False),
    JobNotFoundError: (BatchqError, "job.not_found", 404, False),
    ClientClosedError: (BatchqError, "client.closed", 500, False),
    ConfigError: (BatchqError, "config", 500, False),
}
CLASSES = sorted(TREE, key=lambda cls: cls.__name__)
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def public_errors() -> set[type[BatchqError]]:
    return {
        item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, BatchqError)
    }


def test_the_tree_is_the_one_that_is_documented():
    assert public_errors() == set(TREE)


@every_class
def test_each_class_keeps_its_place_code_status_and_retryability(cls):
    parent, code, status, retryable = TREE[cls]
    assert cls.__mro__[1] is parent
    assert (cls.code, cls.http_status, cls.retryable) == (code, status, retryable)


def test_wire_codes_are_unique():
    codes = [cls.code for cls in public_errors()]
    assert len(codes) == len(set(codes))


@every_class
def test_a_code_begins_with_its_family(cls):
    family = cls.code.partition(".")[0]
    base = next((other for other in TREE if other.code == family), BatchqError)
    assert issubclass(cls, base)


def test_the_docstring_draws_each_class_with_its_status_under_its_parent():
    drawn: dict[str, tuple[int, int]] = {}
    stack: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([ │├└─]*)(\w+Error)\b(?:\s+(\d{3}))?", line)
        if not match:
            continue
        depth, name = len(match[1]), match[2]
        while stack and stack[-1][0] >= depth:
            stack.pop()
        if stack:
            assert TREE[getattr(errors, name)][0].__name__ == stack[-1][1], name
        stack.append((depth, name))
        drawn[name] = (int(match[3] or 500), depth)
    assert set(drawn) == {cls.__name__ for cls in TREE}
    for cls in TREE:
        assert drawn[cls.__name__][0] == cls.http_status, cls.__name__


def test_errors_are_importable_from_the_package():
    missing = [cls.__name__ for cls in TREE if getattr(batchq, cls.__name__, None) is not cls]
    assert not missing


def test_builtins_are_not_shadowed():
    for cls in TREE:
        assert not hasattr(__builtins__, cls.__name__)
        assert cls.__name__ not in vars(__import__("builtins"))


def test_a_deadline_can_be_caught_as_a_timeout_and_a_setting_as_a_value_error():
    assert issubclass(DeadlineExceededError, TimeoutError)
    assert issubclass(ConfigError, ValueError)
    with pytest.raises(TimeoutError):
        raise DeadlineExceededError("late", request_id="ab")


@every_class
def test_each_class_round_trips_through_its_wire_code(cls):
    error = from_wire(cls.code, "text", "ab" * 16)
    assert type(error) is cls
    assert error.message == str(error) == "text"
    assert error.request_id == "ab" * 16


@pytest.mark.parametrize(
    ("code", "base"),
    [
        ("request.new", RequestError),
        ("unavailable.new.kind", UnavailableError),
        ("execution.new", ExecutionError),
        ("deadline.new", DeadlineExceededError),
        ("config.start", BatchqError),
        ("job.new", BatchqError),
        ("new", BatchqError),
        ("", BatchqError),
        (".", BatchqError),
    ],
)
def test_an_unknown_code_becomes_its_familys_base(code, base):
    error = from_wire(code, "text", None)
    assert isinstance(error, base)
    assert error.request_id is None


@given(
    st.text(max_size=40),
    st.text(max_size=20),
    st.one_of(st.none(), st.text(max_size=40)),
    st.text(max_size=20),
)
def test_any_code_and_text_make_an_error_of_the_tree(code, text, request_id, error_type):
    error = from_wire(code, text, request_id, error_type)
    assert isinstance(error, BatchqError)
    assert error.message == text


def test_a_model_error_keeps_the_type_of_the_exception():
    error = from_wire("execution.model", "bad", None, "KeyError")
    assert isinstance(error, ModelError)
    assert error.error_type == "KeyError"
    assert ModelError("x").error_type == ""


@pytest.mark.parametrize(
    ("asked", "given", "header"),
    [(0.0, 1.0, "1"), (-5, 1.0, "1"), (1.0, 1.0, "1"), (1.01, 1.01, "2"), (59.2, 59.2, "60"), (60, 60.0, "60"),
     (61, 60.0, "60"), (float("inf"), 60.0, "60"), (float("nan"), 1.0, "1")],
)  # fmt: skip
def test_retry_after_stays_between_1_and_60_seconds(asked, given, header):
    error = QueueFullError("full", retry_after=asked)
    assert error.retry_after == given
    assert error.headers == {"Retry-After": header}


def test_only_a_full_queue_asks_for_headers():
    assert [cls for cls in CLASSES if cls("x").headers] == [QueueFullError]


@every_class
@pytest.mark.parametrize(
    "through", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"]
)
def test_an_error_crosses_process_pools_with_all_that_it_says(cls, through):
    error = cls("some text", request_id="ab" * 16)
    if cls is QueueFullError:
        error.retry_after = 17.5
    if cls is ModelError:
        error.error_type = "KeyError"
    twin = through(error)
    if isinstance(twin, bytes):
        twin = pickle.loads(twin)
    assert type(twin) is cls
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)


@every_class
def test_an_error_says_its_message_and_nothing_else(cls):
    assert str(cls("some text", request_id="ab")) == "some text"
