"""``Client`` in a process that gevent has patched, as under ``gunicorn -k gevent``."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import StartWorker

SCRIPT = """
from gevent import monkey
monkey.patch_all()
import sys
import gevent
from batchq import Client, DeadlineExceededError

with Client(sys.argv[1]) as client, Client(sys.argv[1], queue="nobody") as nobody:
    greenlets = [gevent.spawn(client.predict, n, timeout=60) for n in range(200)]
    gevent.joinall(greenlets, raise_error=True)
    assert [greenlet.value for greenlet in greenlets] == list(range(200))
    late = gevent.spawn(nobody.predict, 1, timeout=0.2)
    beside = gevent.spawn(client.predict, "beside")
    gevent.joinall([late, beside])
    assert isinstance(late.exception, DeadlineExceededError), late.exception
    assert beside.value == "beside"
print("fine")
"""


def test_greenlets_get_their_own_answers_and_wait_side_by_side(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, redis_url], capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "fine\n", result.stderr
