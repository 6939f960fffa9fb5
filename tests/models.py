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


def batch_sizes_by_key():
    """Answers with all the values of its batch: who shared it."""
    return lambda inputs: [list(inputs)] * len(inputs)


class Lengths:
    """Groups strings by their first letter, costs their length, and answers with the batch they were in."""

    def batch_key(self, value):
        if value == "no key":
            raise LookupError("this has no key")
        return None if value[0] == "-" else value[0]

    def cost(self, value):
        return {"negative": -1, "nan": float("nan"), "text": "many"}.get(value, len(value))

    def predict(self, batch):
        time.sleep(0.003)
        return [list(batch)] * len(batch)


def lengths():
    return Lengths()


def shows_context():
    """Answers with what it was told of each request; the deadline as seconds from now."""

    def predict(inputs, context):
        now = time.time()
        return [
            {"id": id, "meta": meta, "left": deadline - now}
            for id, meta, deadline in zip(context.ids, context.meta, context.deadlines, strict=True)
        ]

    return predict


def splits_badly():
    """Its split fails while another batch runs, and does not on a single item."""

    class Model:
        def predict(self, batch):
            time.sleep(0.003)
            return list(batch)

        def split(self, output, n):
            if "bad" in output and n > 1:
                raise ValueError("cannot split this")
            return output

    return Model()


def loses_its_device(path, url=""):
    """Meets a sticky error for `lose`, as often as ``path`` allows: each time a file of it is used up.

    With the ``url`` of its Redis it first has all connections to that cut.
    """
    import redis
    import torch  # noqa: F401 - only who has torch can have lost a device of it

    def predict(inputs):
        time.sleep(0.003)
        left = sorted(Path(path).iterdir())
        if "lose" in inputs and left:
            left[0].unlink()
            if url:
                with redis.Redis.from_url(url, protocol=2) as client:
                    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            raise RuntimeError("CUDA error: device-side assert triggered")
        return inputs

    return predict


def a_module():
    import torch

    return torch.nn.Linear(1, 2)


class Gated:
    """Its collate of "later" waits until ``<path>/open`` exists; "hang" never comes back from the part that ``hangs`` names."""

    def __init__(self, path, hangs):
        self.path = Path(path)
        if hangs in ("batch_key", "cost"):
            setattr(self, hangs, lambda value: self.pause(value) or 1)
        else:
            setattr(self, hangs, lambda values, n=0: [self.pause(value) for value in values] and values)

    def pause(self, value):
        while value == "hang" or (value == "later" and not (self.path / "open").exists()):
            time.sleep(0.01)

    def predict(self, batch):
        time.sleep(0.02)
        return batch


def gated(path, hangs="collate"):
    return Gated(path, hangs)


def knows_keys_at_the_second_look():
    class Model:
        def __init__(self):
            self.seen = set()

        def batch_key(self, value):
            if value not in self.seen:
                self.seen.add(value)
                raise ConnectionError("not now")
            return value[0]

        def predict(self, batch):
            return [list(batch)] * len(batch)

    return Model()


def tells_what_it_keeps(path):
    """Writes to ``path``, again and again, how many of the values that it was given are still in memory; with a split."""
    import threading
    import weakref

    seen = []

    def watch():
        while True:
            Path(path + ".new").write_text(str(sum(ref() is not None for ref in seen)))
            os.replace(path + ".new", path)
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()

    class Model:
        def predict(self, batch):
            seen.extend(map(weakref.ref, batch))
            time.sleep(0.01)
            return len(batch)

        def split(self, output, n):
            return [output] * n

    return Model()
