"""The models that ``batchq bench`` runs, and the clock by which it sees how busy a model is."""

from __future__ import annotations

import functools
import inspect
import mmap
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from batchq.loading import call_load, is_module, load_model, parts_of

SLEEP_A_BATCH: Final = 0.005
SLEEP_A_REQUEST: Final = 0.00005
_LAYOUT: Final = struct.Struct("=4d")

Predict = Callable[[list[Any]], Any]


class Reading(NamedTuple):
    """What a model's clock shows: calls, their values, seconds spent in them, when the last one ended."""

    calls: float
    values: float
    busy: float
    last_end: float

    def since(self, before: Reading) -> tuple[float, float]:
        """Return the mean batch size, and the share of the time (0..1) that the model ran.

        Both from the end of one call to the end of another.
        """
        calls, wall = self.calls - before.calls, self.last_end - before.last_end
        return (
            (self.values - before.values) / calls if calls else 0.0,
            (self.busy - before.busy) / wall if wall > 0 else 0.0,
        )


class Clock:
    """Four numbers in a file: the model's process writes them, the bench reads them, no message is sent."""

    def __init__(self, path: str) -> None:
        file = Path(path)
        if not file.exists() or file.stat().st_size < _LAYOUT.size:
            file.write_bytes(bytes(_LAYOUT.size))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _LAYOUT.size)
        self._now = self.read()

    def read(self) -> Reading:
        """Return the numbers as one write left them."""
        seen = self._map[:]
        while seen != (again := self._map[:]):  # caught in the middle of a write
            seen = again
        return Reading(*_LAYOUT.unpack(seen))

    def ran(self, values: int, started: float, ended: float) -> None:
        """Count one call."""
        now = self._now
        self._now = Reading(now.calls + 1, now.values + values, now.busy + ended - started, ended)
        _LAYOUT.pack_into(self._map, 0, *self._now)

    def wrap(self, predict: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, with the same parameters, its calls counted."""

        @functools.wraps(predict)
        def timed_predict(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            answers = predict(*args, **kwargs)
            self.ran(_size((*args, *kwargs.values())), started, time.perf_counter())
            return answers

        @functools.wraps(predict)
        async def timed_async(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            answers = await predict(*args, **kwargs)
            self.ran(_size((*args, *kwargs.values())), started, time.perf_counter())
            return answers

        return timed_async if inspect.iscoroutinefunction(predict) else timed_predict

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()


def echo(clock: str) -> Predict:
    """Load a model that answers each value with itself."""
    return Clock(clock).wrap(lambda inputs: inputs)


def sleeper(clock: str) -> Predict:
    """Load a model that takes 5 ms a batch and 0.05 ms a request, and no CPU, as one on a GPU may."""

    def predict(inputs: list[Any]) -> list[Any]:
        time.sleep(SLEEP_A_BATCH + SLEEP_A_REQUEST * len(inputs))
        return inputs

    return Clock(clock).wrap(predict)


class _Timed:
    """An object with the parts of a user's model, whose predict is timed."""

    predict: Callable[..., Any]


def timed(clock: str, model: str, args: dict[str, Any], device: str = "cpu") -> Any:
    """Load the user's model ``module:function`` with ``args``, and time its calls: its ``predict``, or a module's ``forward``."""
    loaded = call_load(load_model(model), device=device, args=args)
    parts, watch = parts_of(loaded), Clock(clock)
    if parts.predict is None:
        loaded.forward = watch.wrap(loaded.forward)
        return loaded
    target = loaded if is_module(loaded) else _Timed()
    for name in ("collate", "split", "cost", "batch_key", "warmup", "close"):
        if target is not loaded and getattr(parts, name) is not None:
            setattr(target, name, getattr(parts, name))
    target.predict = watch.wrap(parts.predict)
    return target


def _size(inputs: Sequence[Any]) -> int:
    """Return how many requests are in what a model is given: a list, a batch tensor, a dict of such."""
    batch = next(iter(inputs), ())
    if isinstance(batch, Mapping):
        return _size(list(batch.values()))
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0])
    return _size(batch) if isinstance(batch, tuple) else len(batch)
