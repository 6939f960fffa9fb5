"""A worker's settings, and how they travel to its children."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from batchq.config import (
    DEFAULT_BATCH_TIMEOUT,
    DEFAULT_DRAIN_TIMEOUT,
    DEFAULT_LEASE,
    DEFAULT_MAX_PAYLOAD,
    DEFAULT_QUEUE,
    DEFAULT_URL,
    KIB,
    MIB,
    BatchPolicy,
    check_int,
    check_number,
    mask_url,
)
from batchq.errors import ConfigError
from batchq.keys import check_queue_name
from batchq_workers.devices import DEFAULT_DEVICE, parse_devices

MAX_PROCESSES: Final = 64
"""Processes that may share a device."""


def new_worker_name() -> str:
    """Return a worker's name: host, process, and 4 random hex digits (a container's host and process ids come again)."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:24] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(2)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """What ``batchq worker`` is told.

    ``model``: ``module:function``. ``model_args``: keyword arguments for it. ``device``: where it runs, as ``devices.parse_devices`` reads
    it. ``processes_per_device``: children on each device, 1 to 64, each with a model of its own. ``policy``: what this worker wants the
    queue's settings to be. ``lease``: seconds after which others take over the batches of a machine that has vanished, 1 to 600.
    ``batch_timeout``: seconds that a batch may run before its child is killed, 1 to 86,400. ``drain_timeout``: seconds that a batch may
    still run after SIGTERM, 0 to 3,600. ``max_payload``: bytes of one request or answer.
    """

    url: str = field(default=DEFAULT_URL, repr=False)
    queue: str = DEFAULT_QUEUE
    model: str = ""
    model_args: dict[str, Any] = field(default_factory=dict)
    app_dir: str = "."
    device: str = DEFAULT_DEVICE
    processes_per_device: int = 1
    policy: BatchPolicy = field(default_factory=BatchPolicy)
    lease: float = DEFAULT_LEASE
    batch_timeout: float = DEFAULT_BATCH_TIMEOUT
    drain_timeout: float = DEFAULT_DRAIN_TIMEOUT
    max_payload: int = DEFAULT_MAX_PAYLOAD
    allow_mixed: bool = False
    log_format: str = "auto"
    log_level: str = "info"
    name: str = field(default_factory=new_worker_name)

    def __post_init__(self) -> None:
        check_queue_name(self.queue)
        parse_devices(self.device)
        check_int("processes_per_device", self.processes_per_device, 1, MAX_PROCESSES, 1)
        check_number("lease", self.lease, 1, 600, DEFAULT_LEASE, " s")
        check_number("batch_timeout", self.batch_timeout, 1, 86_400, DEFAULT_BATCH_TIMEOUT, " s")
        check_number("drain_timeout", self.drain_timeout, 0, 3600, DEFAULT_DRAIN_TIMEOUT, " s")
        check_int("max_payload", self.max_payload, KIB, 512 * MIB, DEFAULT_MAX_PAYLOAD, " bytes")
        if self.log_format not in ("auto", "text", "json"):
            raise ConfigError(
                f"log_format={self.log_format!r}: allowed are 'auto', 'text' and 'json' (default 'auto')"
            )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(
                f"log_level={self.log_level!r}: allowed are 'debug', 'info', 'warning' and 'error' (default 'info')"
            )

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return mask_url(self.url)

    def dump(self) -> str:
        """Return the settings as one line of JSON, for a child's standard input: its arguments would show a password in ``ps``."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> WorkerConfig:
        """Return the settings that ``dump`` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "policy": BatchPolicy(**fields["policy"])})
