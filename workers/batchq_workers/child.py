"""A child process, started by ``parent``. Its settings come on standard input, which stays open while the parent lives."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any, Final

from batchq.errors import BatchqError
from batchq.model import call_load, load_model
from batchq_workers import logs
from batchq_workers.board import Board
from batchq_workers.config import WorkerConfig
from batchq_workers.loop import Loop, Stop

EXIT_MODEL: Final = 3
"""The model cannot be loaded."""
EXIT_ORPHAN: Final = 12
"""The parent is gone."""
_PR_SET_PDEATHSIG: Final = 1

log = logging.getLogger("batchq.worker")


def _die_with_parent(stdin: int) -> None:
    """End this process with its parent, also while the model holds the GIL (on Linux the kernel sees to it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.read(stdin, 4096):
            pass
        os._exit(EXIT_ORPHAN)

    threading.Thread(target=watch, name="batchq-parent-watch", daemon=True).start()


def _read_line(fd: int) -> str:
    data = b""
    while not data.endswith(b"\n"):
        part = os.read(fd, 65536)
        if not part:
            sys.exit(EXIT_ORPHAN)
        data += part
    return data.decode()


def load(config: WorkerConfig) -> Any:
    """Load the model as the settings say; raise a BatchqError that tells what is wrong."""
    path = os.path.abspath(config.app_dir)
    if path not in sys.path:
        sys.path.insert(0, path)  # only now: our own imports are done, the user's folder cannot shadow them
    return call_load(load_model(config.model), device=config.device, args=config.model_args)


def main() -> int:
    """Run the child; return its exit code."""
    stop = Stop()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the whole terminal; the parent says what to do
    signal.signal(signal.SIGTERM, lambda *_: stop.request())
    stdin = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    start = json.loads(_read_line(stdin))
    config = WorkerConfig.load(start["config"])
    _die_with_parent(stdin)
    logs.set_up(config.log_format, config.log_level)
    board = Board(start["board"])
    started = time.perf_counter()
    try:
        predict = load(config)
    except BatchqError as error:
        log.error("%s", error.message, exc_info=error.__cause__)
        return EXIT_MODEL
    except SystemExit as error:
        log.error("model %s: importing or loading it called sys.exit(%s)", config.model, error.code)
        return EXIT_MODEL
    if stop.requested:
        return 0
    log.info("model %s is loaded", config.model, extra={"seconds": round(time.perf_counter() - started, 2)})
    board.set("ready", 1)
    code = 0
    try:
        Loop(config, start["child"], board, predict, stop).run()
    except BaseException:
        log.exception("the model ended its process")
        code = 1
    # Not by a return: a thread that the model has left running would keep the process alive until it is killed.
    logging.shutdown()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(code)
