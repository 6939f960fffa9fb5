"""``batchq worker --check`` of every kind of model; that of a plain function is in test_cli_options."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest
from click.testing import CliRunner

from batchq_cli.main import main

_names = itertools.count()


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Write a module with the source and check its ``load``."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run_check(source, *args):
        name = f"kind_of_model_{next(_names)}"
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        try:
            return CliRunner().invoke(
                main, ["worker", "--model", f"{name}:load", "--app-dir", str(tmp_path), "--check", *args]
            )
        finally:
            sys.modules.pop(name, None)

    return run_check


OBJECT = """
class load:
    def collate(self, inputs):
        return {"texts": inputs}
    def predict(self, batch, context):
        assert len(context.ids) == len(batch["texts"]) == len(set(context.ids))
        return batch
    def split(self, output, n):
        return [len(text) for text in output["texts"]]
    def cost(self, value):
        return len(value)
    def batch_key(self, value):
        return value[:2]
    def warmup(self):
        print("warming up")
    def close(self):
        print("closed")
sample = "hello"
"""


def test_an_object_is_warmed_up_asked_for_cost_and_batch_key_run_and_closed(check):
    result = check(OBJECT)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == [
        "warming up",
        "warmup",
        "sample",
        "cost",
        "batch_key",
        "batch of 1",
        "batch of 2",
        "closed",
        "ok",
    ]
    assert lines[4:6] == ["cost: 5", "batch_key: 'he'"]
    assert "dict of int" in lines[6]


def test_an_async_model_that_is_loaded_async_is_run(check):
    source = """
import asyncio
async def load():
    loop = asyncio.get_running_loop()
    async def predict(inputs):
        assert asyncio.get_running_loop() is loop
        return inputs
    return predict
"""
    result = check(source, "--sample", "[1, 2]")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "batch of 2" in result.stdout


def test_a_module_is_run(check):
    pytest.importorskip("torch")
    source = "import torch\ndef load():\n    return torch.nn.Linear(3, 2)\nsample = [1.0, 2.0, 3.0]\n"
    result = check(source)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Tensor of ndarray float32 (2)" in result.stdout


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("return len(value)", "return -len(value)"), "cost() of the model returned -5"),
        (("return value[:2]", "return (1, 2)"), "batch_key() of the model returned a tuple, (1, 2)"),
        (('print("warming up")', "1 / 0"), "warmup() failed: ZeroDivisionError"),
        (('return {"texts": inputs}', "1 / 0"), "a batch of 1 fails: ZeroDivisionError"),
        (("return [len(text)", "return [1] + [len(text)"), "split() returned a list of 2 for a batch of 1"),
        (
            ("        return batch", "        assert len(batch['texts']) < 2\n        return batch"),
            "a batch of 2 fails, each value alone does not: AssertionError",
        ),
        (("    def cost(", "    async def cost("), "cost is an async def; define it with def"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_wrong_with_a_part_is_said_in_the_last_line(check, change, says):
    result = check(OBJECT.replace(*change))
    assert result.exit_code == 3
    assert says in result.stderr.splitlines()[-1]


def test_a_cost_that_no_batch_can_hold_is_said(check):
    assert check(OBJECT, "--max-batch-cost", "5").exit_code == 0
    result = check(OBJECT, "--max-batch-cost", "4")
    assert result.exit_code == 3
    assert "a cost of 5 is over --max-batch-cost 4" in result.stderr.splitlines()[-1]


def test_the_traceback_of_a_part_that_raises_is_shown(check):
    result = check(OBJECT.replace('return {"texts": inputs}', "1 / 0"))
    assert "in collate" in result.stderr


def test_a_module_for_which_the_sample_has_the_wrong_shape_says_so(check):
    pytest.importorskip("torch")
    source = "import torch\ndef load():\n    return torch.nn.Linear(3, 2)\nsample = [1.0, 2.0]\n"
    result = check(source)
    assert result.exit_code == 3
    assert "shapes cannot be multiplied" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "source",
    [
        "import sys\ndef load(): sys.exit(0)",
        "import sys\ndef load(): return lambda inputs: sys.exit(0)",
        "import sys\nsys.exit(0)",
    ],
)
def test_a_model_that_calls_sys_exit_has_not_passed(check, source):
    result = check(source, "--sample", "1")
    assert result.exit_code == 3
    assert "the model called sys.exit(0)" in result.stderr


def test_a_device_that_does_not_exist_is_told_as_a_worker_tells_it(check):
    result = check("def load(): return lambda inputs: inputs", "--sample", "1", "--device", "cuda:999")
    assert result.exit_code == 2
    assert "device cuda:999 does not exist" in result.stderr
