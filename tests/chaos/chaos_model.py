"""The model that the chaos runs use: it answers ``2 * n``, writes down what it runs, and dies of poison."""

from __future__ import annotations

import os
import signal
import time


def load(ledger: str, run_ms: str = "3"):
    fd = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seconds = float(run_ms) / 1000

    def predict(inputs):
        numbers = [number for number in inputs if isinstance(number, int)]
        os.write(fd, b"".join(b"%d\n" % number for number in numbers))
        if "poison" in inputs:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
        return [2 * number if isinstance(number, int) else number for number in inputs]

    return predict
