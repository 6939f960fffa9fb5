"""Models for the tests of devices, in a user's form: they tell where they run, and fail where a test wants it."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path

LOST = "CUDA error: an illegal memory access was encountered"


def place():
    """What a child sees of the devices."""
    return {
        "pid": os.getpid(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def tells(device="cpu"):
    """Answers with where it runs, slowly enough that others get to answer as well."""
    about = {**place(), "device": device}

    def predict(inputs):
        time.sleep(0.02)
        return [about] * len(inputs)

    return predict


def scripted(path, device="cpu", torch=False):
    """Answers with the GPU that it sees; does what the files in ``path`` say.

    Notes each load in ``loads``. While ``hold-<gpu>`` is there, it loads; where ``broken-<gpu>`` is there, that fails. The first batch with
    "lose" loses the device, where ``torch`` is there to say so; "wait" is not answered before ``open`` is there.
    """
    if torch:
        importlib.import_module("torch")
    folder = Path(path)
    gpu = place()["visible"] or device
    with open(folder / "loads", "a") as file:
        file.write(f"{gpu} {os.getpid()}\n")
    while (folder / f"hold-{gpu}").exists():
        time.sleep(0.005)
    if (folder / f"broken-{gpu}").exists():
        raise RuntimeError(f"no weights for {gpu}")

    def predict(inputs):
        if "lose" in inputs and not (folder / "lost").exists():
            (folder / "lost").touch()
            raise RuntimeError(LOST)
        if "wait" in inputs:
            (folder / "waits").touch()
            while not (folder / "open").exists():
                time.sleep(0.005)
        return [gpu] * len(inputs)

    return predict


def warms_up(path, fails=False):
    """Its warm-up waits for ``warm`` in ``path``, or fails."""

    class Model:
        warm = False

        def warmup(self):
            (Path(path) / "warming").touch()
            while not (Path(path) / "warm").exists() and not fails:
                time.sleep(0.005)
            if fails:
                raise RuntimeError("too cold")
            self.warm = True

        def predict(self, inputs):
            return [self.warm] * len(inputs)

    return Model()


def closes(path, hangs=False):
    """Notes in ``path`` that it was closed; and may not come back from that."""

    class Model:
        def predict(self, inputs):
            return inputs

        def close(self):
            (Path(path) / "closed").touch()
            while hangs:
                time.sleep(1)

    return Model()


def torch_threads():
    """Answers with torch's threads, and which children they are."""
    import torch

    return lambda inputs: [[torch.get_num_threads(), os.getpid()]] * len(inputs)
