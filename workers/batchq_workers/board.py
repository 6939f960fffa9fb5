"""A few numbers in memory that a child shares with its parent, so that the parent knows what is alive without asking.

A child that holds the GIL for minutes can answer nothing; its parent still reads here which batches it holds, and since when one runs.
Each number is 8 aligned bytes, written by one side only.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import Final

_FIELDS: Final = (
    "ready",  # 1 once the model is loaded
    "issued",  # the number of the newest batch that this child has asked for
    "run_started",  # time.monotonic() when the model began the batch that runs; 0 while none does
    "beside_started",  # the same for what the second thread does with a batch: decode and collate, split and encode
    "batches",
    "requests",
    "failed",
    "run_seconds",  # sums over all batches
    "wait_seconds",
    "round",  # counts the rounds of the child's loop: whether it makes progress
)
_SIZE: Final = 8 * len(_FIELDS)
HELD: Final = 4
"""A child holds at most this many batches at a time: what it publishes, runs and fetches, and one to spare."""


class Board:
    """The numbers, as attributes of type float."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _SIZE)

    @classmethod
    def create(cls) -> tuple[Board, int]:
        """Return a new board and the file descriptor by which a child opens the same."""
        if hasattr(os, "memfd_create"):  # needs no folder that can be written to
            fd = os.memfd_create("batchq-board")
            os.ftruncate(fd, _SIZE)
            return cls(fd), fd
        with tempfile.TemporaryFile() as file:
            file.truncate(_SIZE)
            fd = os.dup(file.fileno())
        return cls(fd), fd

    def get(self, name: str) -> float:
        """Read a number."""
        return float(struct.unpack_from("=d", self._map, 8 * _FIELDS.index(name))[0])

    def set(self, name: str, value: float) -> None:
        """Write a number."""
        struct.pack_into("=d", self._map, 8 * _FIELDS.index(name), value)

    def add(self, name: str, value: float) -> None:
        """Add to a number that only this side writes."""
        self.set(name, self.get(name) + value)

    def close(self) -> None:
        """Let go of the memory."""
        self._map.close()


def batch_name(worker: str, child: int, number: int) -> str:
    """Return the name of a child's batch; parent and child both build it."""
    return f"{worker}.{child}.{number}"


def worker_of(batch: str) -> str:
    """Return the worker that a batch's name tells."""
    return batch.rsplit(".", 2)[0]


def held(board: Board, worker: str, child: int) -> list[str]:
    """Return the names of all batches that a child can hold now."""
    newest = int(board.get("issued"))
    return [batch_name(worker, child, number) for number in range(max(1, newest - HELD + 1), newest + 1)]
