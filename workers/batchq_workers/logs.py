"""Logs of the worker: on stderr, text on a terminal, else one JSON object a line. Payloads never reach a log."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        extras = "".join(f" {name}={value}" for name, value in _extras(record).items())
        line = f"{moment} {record.levelname.lower():7} {record.getMessage()}{extras}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up(log_format: str, level: str) -> None:
    """Send all of the process' logs to stderr; ``log_format`` is ``auto``, ``text`` or ``json``."""
    closed = sys.stderr is None
    handler: logging.Handler = logging.NullHandler() if closed else logging.StreamHandler(sys.stderr)
    as_text = log_format == "text" or (log_format == "auto" and not closed and sys.stderr.isatty())
    handler.setFormatter(_Text() if as_text else _Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("batchq").setLevel(level.upper())
