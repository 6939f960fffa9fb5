"""The model of a client in one process, as the thread that runs it sees it: requests in, outcomes out. It knows no queue and no lock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from batchq import codec
from batchq.answers import unsendable
from batchq.boxes import Request, fresh
from batchq.device import DeviceLostError
from batchq.errors import BatchqError, EncodeError, ModelError, PayloadTooLargeError
from batchq.model import Model
from batchq.protocols import BatchContext

_IDS_IN_LOG: Final = 8

log = logging.getLogger("batchq.local")


class Runner:
    """Calls a model by the contract. ``pack(answer, "answer")`` packs, ``clock()`` is that of the requests' deadlines.

    ``lost``: why there can be no further batch, if it is so.
    """

    def __init__(
        self,
        model: Model,
        pack: Callable[[Any, str], bytes],
        clock: Callable[[], float],
        on_out_of_memory: Callable[[int], None],
    ) -> None:
        self._model = model
        self._pack = pack
        self._clock = clock
        self._requests: list[Request] = []
        self.lost: BatchqError | None = None
        self.classifies = model.classifies
        model.on_error = self._log_error
        model.on_out_of_memory = on_out_of_memory

    def classify(self, request: Request) -> tuple[str | int | None, float | None]:
        """Return a request's batch_key and cost, by the model where its caller gave none; raise BatchqError."""
        try:
            return self._model.classify(self._decoded(request.payload), request.group, request.cost)
        except codec.DecodeError as error:
            raise EncodeError(f"the value cannot be carried: {error}") from None
        except BaseException as error:
            log.error("the model could not classify request %s", request.id, exc_info=error)
            if isinstance(error, BatchqError):
                raise
            raise _ended(error) from error

    def run(self, batch: list[Request]) -> tuple[list[tuple[Request, bytes | BatchqError]], int, float]:
        """Run the model once, and on parts of the batch where that fails.

        Return the outcomes, how many requests the model has seen, and for how many seconds it ran. Look at ``lost`` then.
        """
        outcomes: list[tuple[Request, bytes | BatchqError]] = []
        requests, payloads, values = [], [], []
        copy = not self._model.views
        for request in batch:
            payload = request.payload
            try:
                values.append(codec.unpack(payload, copy=copy, tensors=True))
            except codec.DecodeError as error:
                # or it was given up since it was taken, and has no payload: then it has an outcome, which stays
                outcomes.append((request, EncodeError(f"the value cannot be carried: {error}")))
            else:
                requests.append(request)
                payloads.append(payload)
        if not requests:
            return outcomes, 0, 0.0
        self._requests = requests
        started = self._clock()
        try:
            context = self._context(requests) if self._model.wants_context else None
            prepared = self._model.prepare(values, context)
            del values  # what the model has made a batch of need not be there twice
            answers = self._model.run(prepared, partial(self._again, payloads))
        except DeviceLostError as error:
            kind = type(error.__cause__ or error).__name__
            text = f"{error}; no further call can succeed: restart this process"
            self.lost = ModelError(text, error_type=kind)
            answers = [fresh(self.lost) for _ in requests]
        except BaseException as error:
            log.error("the model ended with %s", type(error).__name__, exc_info=error)
            answers = [_ended(error) for _ in requests]
        seconds = self._clock() - started
        outcomes += zip(requests, map(self._packed, answers), strict=True)
        self._requests = []
        return outcomes, len(requests), seconds

    def close(self) -> None:
        """Let the model let go of what it holds."""
        self._model.close()

    def _again(self, payloads: list[bytes], start: int, end: int) -> list[Any]:
        return [self._decoded(payload) for payload in payloads[start:end]]

    def _decoded(self, payload: bytes) -> Any:
        return codec.unpack(payload, copy=not self._model.views, tensors=True)

    def _context(self, requests: list[Request]) -> BatchContext:
        ahead = time.time() - self._clock()
        return BatchContext(
            ids=tuple(request.id for request in requests),
            meta=tuple(codec.unpack(request.meta) if request.meta else None for request in requests),
            deadlines=tuple(request.deadline + ahead for request in requests),
        )

    def _packed(self, answer: Any) -> bytes | BatchqError:
        if isinstance(answer, BatchqError):
            return answer
        try:
            return self._pack(answer, "answer")
        except EncodeError as error:
            return unsendable(error)
        except PayloadTooLargeError as error:
            return error

    def _log_error(self, error: Exception, indices: list[int]) -> None:
        ids = [self._requests[index].id for index in indices[:_IDS_IN_LOG]]
        more = f" and {len(indices) - len(ids)} more" if len(indices) > len(ids) else ""
        log.error("the model failed for request %s%s", ", ".join(ids), more, exc_info=error)


def _ended(error: BaseException) -> ModelError:
    return ModelError(f"the model ended with {error!r}", error_type=type(error).__name__)
