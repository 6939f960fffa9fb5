"""A child process, started by ``slots``. Its settings come on standard input, which stays open while the parent lives."""

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
from typing import Any, Final, NoReturn

from batchq.device import DeviceLostError, open_device
from batchq.errors import BatchqError
from batchq.model import Model, call_load, load_model
from batchq_workers import logs
from batchq_workers.board import Board
from batchq_workers.config import WorkerConfig
from batchq_workers.devices import name_inside
from batchq_workers.loop import Loop, Stop

EXIT_MODEL: Final = 3
"""The model cannot be loaded, or fails to warm up."""
EXIT_ORPHAN: Final = 12
"""The parent is gone."""
EXIT_DEVICE: Final = 13
"""The device is lost to this process; a new one may find it well."""
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


def _sign_logs(child: int, device: str) -> None:
    """Have each line of the log say which child it is from, and on which device, as the user calls it."""

    def sign(record: logging.LogRecord) -> bool:
        record.child, record.device = child, device
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(sign)


def load(config: WorkerConfig, device: str) -> Any:
    """Load the model as the settings say, on ``device``.

    Returns what the user's function has returned; raises a BatchqError that tells what is wrong.
    """
    path = os.path.abspath(config.app_dir)
    if path not in sys.path:
        sys.path.insert(0, path)  # only now: our own imports are done, the user's folder cannot shadow them
    return call_load(load_model(config.model), device=device, args=config.model_args)


def _start(config: WorkerConfig, device: str) -> Model | None:
    """Load the model and warm it up; None where that fails, and the log says why."""
    started = time.perf_counter()
    try:
        model = Model(load(config, device), device=open_device(device))
        log.info(
            "model %s is loaded", config.model, extra={"seconds": round(time.perf_counter() - started, 2)}
        )
        started = time.perf_counter()
        model.warm_up()
        seconds = time.perf_counter() - started
        if seconds >= 0.01:
            log.info("model %s is warm", config.model, extra={"seconds": round(seconds, 2)})
    except BatchqError as error:
        log.error("%s", error.message, exc_info=error.__cause__)
    except SystemExit as error:
        log.error(
            "model %s: importing, loading or warming it up called sys.exit(%s)", config.model, error.code
        )
    else:
        return model
    return None


def _close(model: Model) -> None:
    """Let the model put its things away. One that takes too long is killed by the parent, like a batch."""
    try:
        model.close()
    except BaseException:
        log.exception("the model's close failed")


def _run(config: WorkerConfig, child: int, device: str, board: Board, stop: Stop) -> int:
    model = _start(config, name_inside(device))
    if model is None:
        return EXIT_MODEL
    try:
        if not stop.requested:
            board.set("ready", 1)
            Loop(config, child, board, model, stop).run()
    except DeviceLostError as error:  # nothing more can be done on it, not even close
        log.error("%s", error, exc_info=error.__cause__)
        return EXIT_DEVICE
    except BaseException:
        log.exception("the model ended its process")
        return 1
    _close(model)
    return 0


def main() -> NoReturn:
    """Run the child to its end."""
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
    _sign_logs(start["child"], start["device"])
    code = _run(config, start["child"], start["device"], Board(start["board"]), stop)
    # Not by a return: a thread that the model has left running would keep the process alive until it is killed.
    logging.shutdown()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(code)
