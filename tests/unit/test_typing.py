"""The types of a model: mypy accepts what ``load`` may return, and rejects what it may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEAD = """
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from batchq.protocols import (
    BatchContext, BatchModel, HasBatchKey, HasClose, HasCollate, HasCost, HasSplit, HasWarmup, Load,
)

Floats = np.ndarray[Any, np.dtype[np.float32]]


def serve(load: Load) -> None: ...
"""

GOOD = """
def function(inputs: list[str]) -> list[float]:
    return [0.5 for _ in inputs]


def with_context(inputs: list[str], context: BatchContext) -> tuple[int, ...]:
    return tuple(len(id) for id in context.ids)


def of_arrays(inputs: list[Floats]) -> Floats:
    return np.stack(inputs)


def with_more(inputs: list[str], temperature: float = 0.5) -> list[str]:
    return inputs


async def coroutine(inputs: list[str]) -> list[str]:
    return inputs


async def coroutine_with_context(inputs: list[str], context: BatchContext) -> list[str]:
    return inputs


class Plain:
    def predict(self, inputs: list[int]) -> list[int]:
        return inputs


class Contextual:
    def predict(self, inputs: list[int], context: BatchContext) -> list[int]:
        return inputs


class Async:
    async def predict(self, inputs: list[int]) -> list[int]:
        return inputs


class Callable:
    def __call__(self, inputs: list[int]) -> list[int]:
        return inputs


class Split:
    def predict(self, inputs: list[int]) -> dict[str, list[int]]:
        return {"a": inputs}

    def split(self, output: dict[str, list[int]], n: int) -> list[int]:
        return output["a"]


class Full(BatchModel, HasCollate, HasCost, HasBatchKey, HasWarmup, HasClose):
    def collate(self, inputs: list[str]) -> list[int]:
        return [len(value) for value in inputs]

    def predict(self, batch: list[int]) -> list[int]:
        return batch

    def cost(self, value: str) -> int:
        return len(value)

    def batch_key(self, value: str) -> str:
        return value[:1]

    def warmup(self) -> None:
        pass

    async def close(self) -> None:
        pass


class FullSplit(HasSplit, HasCollate):
    def collate(self, inputs: list[str]) -> list[int]:
        return [len(value) for value in inputs]

    def predict(self, batch: list[int]) -> dict[str, list[int]]:
        return {"a": batch}

    def split(self, output: dict[str, list[int]], n: int) -> list[int]:
        return output["a"]


async def load_async() -> Full:
    return Full()


def load_with_arguments(device: str = "cpu", layers: int = 3) -> Full:
    return Full()


serve(lambda: function)
serve(lambda: with_context)
serve(lambda: of_arrays)
serve(lambda: with_more)
serve(lambda: coroutine)
serve(lambda: coroutine_with_context)
serve(lambda: Plain())
serve(Contextual)
serve(Async)
serve(Callable)
serve(Split)
serve(Full)
serve(FullSplit)
serve(load_async)
serve(load_with_arguments)
"""

# each with a mark where mypy has to say something
BAD = """
def answers_by_name(inputs: list[str]) -> dict[str, float]:
    return {}


def one_text(inputs: list[str]) -> str:
    return ""


def generator(inputs: list[str]) -> Iterator[str]:
    yield from inputs


def nothing(inputs: list[str]) -> None:
    return None


def no_inputs() -> list[float]:
    return []


def too_much(inputs: list[str], context: BatchContext, more: int) -> list[str]:
    return inputs


async def coroutine(inputs: list[str]) -> dict[str, float]:
    return {}


class ByName:
    def predict(self, inputs: list[int]) -> dict[str, int]:
        return {}


class NoPredict:
    def collate(self, inputs: list[int]) -> list[int]:
        return inputs


class TextCost(BatchModel, HasCost):
    def predict(self, inputs: list[int]) -> list[int]:
        return inputs

    def cost(self, value: int) -> str:  # BAD
        return ""


class ShapeKey(BatchModel, HasBatchKey):
    def predict(self, inputs: list[int]) -> list[int]:
        return inputs

    def batch_key(self, value: Floats) -> tuple[int, ...]:  # BAD
        return (1, 2)


class SplitByName(HasSplit):
    def predict(self, inputs: list[int]) -> list[int]:
        return inputs

    def split(self, output: list[int], n: int) -> dict[str, int]:  # BAD
        return {}


class NoCollate(BatchModel, HasCollate):
    def predict(self, inputs: list[int]) -> list[int]:
        return inputs


serve(lambda: answers_by_name)  # BAD
serve(lambda: one_text)  # BAD
serve(lambda: generator)  # BAD
serve(lambda: nothing)  # BAD
serve(lambda: no_inputs)  # BAD
serve(lambda: too_much)  # BAD
serve(lambda: coroutine)  # BAD
serve(ByName)  # BAD
serve(NoPredict)  # BAD
serve(lambda: NoCollate())  # BAD
serve(lambda: 3)  # BAD
serve(lambda: None)  # BAD
"""


def lines_that_mypy_rejects(folder: Path, text: str) -> dict[int, str]:
    path = folder / "models.py"
    path.write_text(text)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
        "--no-pretty",
    ]
    command += ["--config-file=", f"--cache-dir={folder}", "--follow-imports=silent", str(path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = (line.split(":", 2) for line in done.stdout.splitlines() if ": error:" in line)
    return {int(number): says for _, number, says in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("mypy")
    return tmp_path_factory.mktemp("typing")


def test_what_load_may_return_is_accepted(folder):
    assert lines_that_mypy_rejects(folder, HEAD + GOOD) == {}


def test_what_load_may_not_return_is_rejected_line_by_line(folder):
    text = HEAD + BAD
    marked = {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# BAD")}
    rejected = lines_that_mypy_rejects(folder, text)
    assert set(rejected) == marked, rejected


def test_what_is_accepted_is_what_runs(folder):
    serve = """
def serve(load):
    from batchq.model import Model, call_load
    model = Model(call_load(load))
    context = BatchContext(("a",), (None,), (1.0,))
    outcomes = model.run(model.prepare([np.ones(2, "f4")], context))
    if isinstance(outcomes[0], Exception):
        outcomes = model.run(model.prepare(["a"], context))
    assert len(outcomes) == 1 and not isinstance(outcomes[0], Exception), (model, outcomes)
    model.close()
"""
    path = folder / "good.py"
    path.write_text(HEAD.replace("def serve(load: Load) -> None: ...", serve) + GOOD)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
