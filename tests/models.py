"""Models for the tests, in a user's form."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def echo():
    return lambda inputs: inputs


def sizes():
    """Each answer is the size of its batch."""
    return lambda inputs: [len(inputs)] * len(inputs)


def slow(seconds="0.05"):
    def predict(inputs):
        time.sleep(float(seconds))
        return inputs

    return predict


def gate(path):
    """Writes ``<path>/started``, then waits until ``<path>/open`` exists."""
    folder = Path(path)

    def predict(inputs):
        with open(folder / "started", "a") as file:
            file.writelines(f"{value}\n" for value in inputs)
        time.sleep(0.005)  # slow enough that fetching ahead pays
        while not (folder / "open").exists():
            time.sleep(0.005)
        return inputs

    return predict


def fails_for_bad():
    def predict(inputs):
        if "bad" in inputs:
            raise ValueError("this input is bad")
        return [value.upper() if isinstance(value, str) else value for value in inputs]

    return predict


def dies_of_poison():
    def predict(inputs):
        if "poison" in inputs:
            os.kill(os.getpid(), signal.SIGKILL)
        return inputs

    return predict


def dict_of_lists():
    return lambda inputs: {"a": inputs, "b": inputs}


def too_few():
    return lambda inputs: inputs[:-1]


def holds_the_gil(seconds="6"):
    """Keeps every other thread of its process from running, as a C extension can."""
    import ctypes

    libc = ctypes.PyDLL(None)

    def predict(inputs):
        if "hold" in inputs:
            libc.usleep(int(float(seconds) * 1e6))
        return inputs

    return predict


def cannot_load():
    raise RuntimeError("no such weights")


def hangs():
    def predict(inputs):
        if "hang" in inputs:
            time.sleep(3600)
        return inputs

    return predict


def exception_for_odd():
    return lambda inputs: [KeyError(value) if value % 2 else value for value in inputs]


def set_for_odd():
    return lambda inputs: [{value} if value % 2 else value for value in inputs]


def reuses_its_output():
    """Answers with rows of one buffer that it overwrites at the next call, as a captured CUDA graph does."""
    import numpy as np

    buffer = np.zeros((64, 4))

    def predict(inputs):
        if "bad" in inputs:
            raise ValueError("bad")
        time.sleep(0.003)
        buffer[: len(inputs)] = np.asarray(inputs, dtype=float)[:, None]
        return buffer[: len(inputs)]

    return predict


def changes_its_inputs():
    """Doubles its inputs in place, then fails if one of them is bad."""

    def predict(inputs):
        for value in inputs:
            value["n"] *= 2
        if any(value["n"] < 0 for value in inputs):
            raise ValueError("bad")
        return [value["n"] for value in inputs]

    return predict
