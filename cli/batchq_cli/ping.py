"""``batchq ping``: whether a Redis is fit for batchq, as a list of checks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import click
from redis.exceptions import NoPermissionError

from batchq import commands
from batchq.config import check_timeout, mask_url, resolve_queue, resolve_url
from batchq.errors import BackendAuthError, BackendUnavailableError
from batchq.keys import Keys
from batchq.stats import from_answers
from batchq.store import AsyncLink, Endpoint, LinkLostError
from batchq_cli.common import (
    DURATION,
    EXIT_NO_ANSWER,
    EXIT_OK,
    EXIT_REDIS_AUTH,
    EXIT_REDIS_DOWN,
    EXIT_REDIS_SETTING,
    EXIT_USAGE,
    Described,
    json_option,
    queue_option,
    redis_option,
    show_duration,
    show_size,
)
from batchq_cli.redis_link import DEFAULT_WAIT

OLDEST: Final = (6, 2)
ROUND_TRIPS: Final = 20

State = Literal["ok", "wrong", "unknown", "info"]
