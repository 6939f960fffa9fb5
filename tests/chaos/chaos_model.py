"""The model that the chaos runs use: it answers ``2 * n``, writes down what it runs, and dies of poison.

In the runs with groups a number's group is ``n % 3`` and its cost ``1 + n % 5``; a batch that mixes groups or costs more than the budget
gets wrong answers.
"""

from __future__ import annotations

import os
import signal
import time

BUDGET = 40


def group_of(number):
    return number % 3 if isinstance(number, int) else "other"


def cost_of(number):
    return 1 + number % 5 if isinstance(number, int) else 1


class Grouping:
    """The same model, which tells groups and costs itself."""

    def __init__(self, predict):
        self.predict = predict
        self.batch_key = group_of
        self.cost = cost_of


def load_grouping(ledger: str, run_ms: str = "3"):
    return Grouping(load(ledger, run_ms, groups="model"))


def load(ledger: str, run_ms: str = "3", groups: str = ""):
    fd = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seconds = float(run_ms) / 1000

    def predict(inputs):
        numbers = [number for number in inputs if isinstance(number, int)]
        os.write(fd, b"".join(b"%d\n" % number for number in numbers))
        if "poison" in inputs:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
        if groups and (len(set(map(group_of, inputs))) > 1 or sum(map(cost_of, inputs)) > BUDGET):
            return [-1 for _ in inputs]
        return [2 * number if isinstance(number, int) else number for number in inputs]

    return predict
