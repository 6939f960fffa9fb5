"""Every error that batchq raises, in one tree.

    BatchqError
    ├── RequestError               400  the request itself is wrong: sending it again cannot help
    │   ├── EncodeError            400  a value that msgpack cannot carry
    │   ├── PayloadTooLargeError   413  a value over ``max_payload``
    │   └── ProtocolVersionError   400  the worker is older than the client: upgrade workers first
    ├── UnavailableError           503  not now: try again, later or elsewhere
    │   ├── QueueFullError         503  over the queue's capacity; see ``retry_after``
    │   ├── NoWorkerError          503  ``fail_fast=True`` and no worker has reported for 10 s
    │   └── BackendUnavailableError 503  Redis cannot be reached, or refuses
    │       └── BackendAuthError   503  Redis refuses the password or the user's rights
    ├── ExecutionError             500  the worker took the request and could not answer it
    │   ├── ModelError             500  the model raised, or answered with something unusable
    │   └── WorkerLostError        502  two workers died while running this request alone
    ├── DeadlineExceededError      504  no answer within ``timeout``; also a TimeoutError
    ├── JobCancelledError          409  somebody called ``Job.cancel()``
    ├── JobNotFoundError           404  no such job, or its result has expired
    ├── ClientClosedError          500  a call on a client after ``close()``
    └── ConfigError                500  a setting out of its range; also a ValueError

Each class has a wire ``code`` (``family.kind``), ``retryable`` and ``http_status``. A code that this version does not know becomes its
family's base class, so that an older client can still tell "try again" from "never".
"""

from __future__ import annotations

import math
from typing import ClassVar


class BatchqError(Exception):
    """Root of all errors of batchq.

    ``request_id`` is the id (32 hex digits) that the worker's log shows for the same request; None where the error belongs to none.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers to send along with ``http_status``; empty for most errors."""
        return {}


class RequestError(BatchqError):
    """The request itself is wrong: sending it again cannot help."""

    code = "request"
    http_status = 400


class EncodeError(RequestError):
    """A value holds something that cannot cross the wire; the message names the path to it and the remedy."""

    code = "request.encode"


class PayloadTooLargeError(RequestError):
    """A value or an answer is larger than ``max_payload``."""

    code = "request.too_large"
    http_status = 413


class ProtocolVersionError(RequestError):
    """The request speaks a protocol version that the worker does not know: upgrade workers before clients."""

    code = "request.version"


class UnavailableError(BatchqError):
    """The service cannot take or answer the request just now; trying again may help."""

    code = "unavailable"
    retryable = True
    http_status = 503


class QueueFullError(UnavailableError):
    """The queue holds as many requests, or bytes, as its capacity allows.

    ``retry_after`` is the time in seconds, 1 to 60, in which the workers drain what is pending at the rate that they show; 60 where
    nothing drains at all.
    """

    code = "unavailable.full"

    def __init__(self, message: str, *, request_id: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after = min(60.0, max(1.0, retry_after))

    @property
    def headers(self) -> dict[str, str]:
        """``Retry-After`` in whole seconds, 1 to 60."""
        return {"Retry-After": str(math.ceil(self.retry_after))}


class NoWorkerError(UnavailableError):
    """No worker of this queue has reported for 10 s (raised at once, and only with ``fail_fast=True``)."""

    code = "unavailable.no_worker"


class BackendUnavailableError(UnavailableError):
    """Redis cannot be reached, is loading, read-only, or refuses writes."""

    code = "unavailable.backend"


class BackendAuthError(BackendUnavailableError):
    """Redis refuses the password, or the user may not run a command that batchq needs."""

    code = "unavailable.backend_auth"
    retryable = False


class ExecutionError(BatchqError):
    """A worker took the request and could not answer it."""

    code = "execution"


class ModelError(ExecutionError):
    """The model raised an exception, or answered with something that is not one answer an input.

    ``error_type`` is the name of the exception's type, '' where there was none. The traceback is in the worker's log, under the same
    ``request_id``.
    """

    code = "execution.model"

    def __init__(self, message: str, *, request_id: str | None = None, error_type: str = "") -> None:
        super().__init__(message, request_id=request_id)
        self.error_type = error_type


class WorkerLostError(ExecutionError):
    """Two workers died while they ran this request alone; it is in the dead letters now."""

    code = "execution.worker_lost"
    http_status = 502


class DeadlineExceededError(BatchqError, TimeoutError):
    """No answer came within ``timeout``. The request is not run after its deadline."""

    code = "deadline"
    retryable = True
    http_status = 504


class JobCancelledError(BatchqError):
    """The job was cancelled before it had a result."""

    code = "job.cancelled"
    http_status = 409


class JobNotFoundError(BatchqError):
    """There is no such job: it was never submitted here, or its result has expired."""

    code = "job.not_found"
    http_status = 404


class ClientClosedError(BatchqError):
    """The client was closed."""

    code = "client.closed"


class ConfigError(BatchqError, ValueError):
    """A setting or an argument is out of its range; the message names the value, the range and the default."""

    code = "config"


def _tree(cls: type[BatchqError]) -> dict[str, type[BatchqError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found.update(_tree(child))
    return found


_BY_CODE = _tree(BatchqError)


def from_wire(code: str, message: str, request_id: str | None, error_type: str = "") -> BatchqError:
    """Build the error for a wire code; an unknown code becomes its family's base class."""
    cls = _BY_CODE.get(code) or _BY_CODE.get(code.partition(".")[0], BatchqError)
    if issubclass(cls, ModelError):
        return cls(message, request_id=request_id, error_type=error_type)
    return cls(message, request_id=request_id)
