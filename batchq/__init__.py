"""batchq: a distributed dynamic-batching queue for model inference, on Redis.

    from batchq import AsyncClient

    queue = AsyncClient("redis://localhost:6379/0", queue="sentiment")
    answer = await queue.predict("what a day", timeout=2.0)

and on the GPU machines ``batchq worker --queue sentiment --model mymodel:load``.
"""

from batchq.aio import AsyncClient, AsyncJob
from batchq.decorator import Batched, batched
from batchq.errors import (
    BackendAuthError,
    BackendUnavailableError,
    BatchqError,
    ClientClosedError,
    ConfigError,
    DeadlineExceededError,
    EncodeError,
    ExecutionError,
    JobCancelledError,
    JobNotFoundError,
    ModelError,
    NoWorkerError,
    PayloadTooLargeError,
    ProtocolVersionError,
    QueueFullError,
    RequestError,
    UnavailableError,
    WorkerLostError,
)
from batchq.local import AsyncLocalClient, AsyncLocalJob, LocalClient, LocalJob
from batchq.protocols import BatchContext
from batchq.stats import ChildStats, QueueStats, WorkerStats
from batchq.sync import Client, Job

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncLocalClient",
    "AsyncLocalJob",
    "BackendAuthError",
    "BackendUnavailableError",
    "BatchContext",
    "Batched",
    "BatchqError",
    "ChildStats",
    "Client",
    "ClientClosedError",
    "ConfigError",
    "DeadlineExceededError",
    "EncodeError",
    "ExecutionError",
    "Job",
    "JobCancelledError",
    "JobNotFoundError",
    "LocalClient",
    "LocalJob",
    "ModelError",
    "NoWorkerError",
    "PayloadTooLargeError",
    "ProtocolVersionError",
    "QueueFullError",
    "QueueStats",
    "RequestError",
    "UnavailableError",
    "WorkerLostError",
    "WorkerStats",
    "batched",
]
