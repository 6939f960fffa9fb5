"""The model contract: what ``load`` may return, how it is called, what it may answer, and how a batch that fails is split.

``load(device="cpu", **model_args)`` returns one of

- a function of a list of n inputs that returns n answers in the same order: a list or tuple of n, or a numpy array or torch tensor with
  ``shape[0] == n``. An element that is an Exception fails its own item. With a second parameter that is required, or named ``context``,
  it gets a ``BatchContext`` as well;
- an object with such a ``predict``, and, where it wants them, ``collate(inputs)``, which makes the batch that ``predict`` gets;
  ``split(output, n)``, which makes the answers of what ``predict`` returns; ``cost(value)`` and ``batch_key(value)``, for requests whose
  callers gave none; ``warmup()`` and ``close()``;
- a ``torch.nn.Module`` (see ``modules``), which may have these methods as well. It runs under ``torch.inference_mode``, and what its own
  ``collate`` returns is moved to the device.

``load``, the function, ``predict``, ``warmup`` and ``close`` may be ``async``: they run on one event loop, one at a time.

**Threads.** ``collate``, ``cost`` and ``batch_key`` may run while ``predict`` runs for another batch, never two of these three at once.
``split`` may run while ``predict`` runs for the next batch, so what ``predict`` returns must stay valid; the answers of a model without
``split`` are done with before it runs again.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import numbers
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from batchq.answers import WrongAnswerError, describe, is_tensor, named, one_each
from batchq.config import MAX_COST
from batchq.device import Device, DeviceLostError, open_device
from batchq.errors import BatchqError, ModelError
from batchq.loading import bind_load, call_load, is_module, load_model, parts_of, take_loop
from batchq.modules import Module, split
from batchq.protocols import BatchContext

__all__ = ["DeviceLostError", "Model", "Output", "Prepared", "bind_load", "call_load", "load_model"]

_SHAPES_IN_LOG: Final = 4

log = logging.getLogger("batchq.model")


class Prepared:
    """A batch that is ready for the model. ``size``: of the inputs, whether they will run or not."""

    __slots__ = ("arrive", "batch", "context", "error", "indices", "refused", "size", "values")

    def __init__(self, values: list[Any], context: BatchContext | None, indices: Sequence[int]) -> None:
        self.values = values
        self.context = context
        self.indices = indices  # of those that will run, in the batch that was taken
        self.size = len(values)
        self.refused: dict[int, ModelError] = {}
        self.batch: Any = None
        self.arrive: Callable[[], Any] | None = None  # for what is on its way to the device
        self.error: Exception | None = None


class Output:
    """What the model returned for a batch.

    ``detached``: ``Model.answers`` may be called, and the answers encoded, on any thread and after the model has run again.
    """

    __slots__ = ("answer", "detached", "error", "indices", "refused")

    def __init__(self, prepared: Prepared) -> None:
        self.indices = prepared.indices
        self.refused = prepared.refused
        self.answer: Any = None
        self.detached = False
        self.error: Exception | None = None


class Model:
    """A loaded model, called by the contract.

    ``loaded``: what ``load`` returned. ``device``: where it runs, the CPU if None. ``on_error(error, indices)`` is told of each exception
    and for which of the values, so that it can log the traceback under the requests' ids; an answer that is not n answers is such an
    exception as well. ``on_out_of_memory(size)`` is told that a batch of ``size`` (2 or more) did not fit into memory and was split, unless
    one of its items does not even fit alone. Both are called on the thread that called the Model, and may be set later.

    ``wants_context``: it takes a BatchContext; else ``prepare`` needs none. ``classifies``: it has a ``batch_key`` or a ``cost``, see
    ``classify``; ``costs``: it has a ``cost``; ``groups``: it has a ``batch_key``. ``views``: its inputs
    may be read-only views, else it gets copies that it may write to.

    Raises ConfigError for what is no model, and ModelError where it cannot be moved to the device. An outcome, below, is an answer or the
    BatchqError of its item.
    """

    def __init__(
        self,
        loaded: Any,
        *,
        device: Device | None = None,
        on_error: Callable[[Exception, list[int]], None] | None = None,
        on_out_of_memory: Callable[[int], None] | None = None,
    ) -> None:
        self.on_error = on_error
        self.on_out_of_memory = on_out_of_memory
        self._device = open_device("cpu") if device is None else device
        self._parts = parts = parts_of(loaded)
        self._loop = take_loop()
        self._alone = threading.Lock()  # collate, cost and batch_key may share a tokenizer
        self._module = self._open_module(loaded) if is_module(loaded) else None
        self._forward = self._module if parts.predict is None else None
        self._predict: Callable[..., Any] = parts.predict or self._module.forward  # type: ignore[union-attr]
        self._told_of_batches = False
        self.wants_context = parts.takes_context
        self.costs = parts.cost is not None
        self.groups = parts.batch_key is not None
        self.classifies = self.costs or self.groups
        self.views = parts.collate is not None or self._forward is not None

    def _open_module(self, loaded: Any) -> Module:
        try:
            return Module(loaded, self._device)
        except Exception as error:
            raise ModelError(
                f"the module cannot be moved to {self._device.name}: {describe(error)}",
                error_type=type(error).__name__,
            ) from error

    # -- before and after all batches ------------------------------------------------------------------------

    def warm_up(self) -> bool:
        """Call the model's ``warmup``, and tell whether it has one; raise ModelError where that raises."""
        if self._parts.warmup is None:
            return False
        try:
            self._call(self._parts.warmup)
        except Exception as error:
            raise ModelError(
                f"warmup() failed: {describe(error)}", error_type=type(error).__name__
            ) from error
        return True

    def close(self) -> None:
        """Call the model's ``close``, and end its event loop; what it raises is logged."""
        try:
            if self._parts.close is not None:
                self._call(self._parts.close)
        except Exception:
            log.exception("close() of the model failed")
        finally:
            self._loop.close()

    # -- one request -----------------------------------------------------------------------------------------

    def classify(
        self, value: Any, batch_key: str | int | None, cost: float | None
    ) -> tuple[str | int | None, float | None]:
        """Return the request's batch_key and cost, those that are None by the model's own ``batch_key`` and ``cost``.

        Raises ModelError where these raise, where the key is no str or int, or the cost no number from 0 to 1,000,000,000.
        """
        if batch_key is None and self._parts.batch_key is not None:
            batch_key = _checked_key(self._ask("batch_key", self._parts.batch_key, value))
        if cost is None and self._parts.cost is not None:
            cost = _checked_cost(self._ask("cost", self._parts.cost, value))
        return batch_key, cost

    def _ask(self, name: str, part: Callable[[Any], Any], value: Any) -> Any:
        try:
            with self._alone:
                return part(value)
        except Exception as error:
            raise ModelError(
                f"{name}() of the model failed: {describe(error)}", error_type=type(error).__name__
            ) from error

    # -- one batch -------------------------------------------------------------------------------------------

    def run(
        self, batch: Prepared | Sequence[Any], again: Callable[[int, int], list[Any]] | None = None
    ) -> list[Any]:
        """Return n outcomes for n values (or for a batch that ``prepare`` made of them), in their order; see ``rescue``."""
        prepared = batch if isinstance(batch, Prepared) else self.prepare(list(batch))
        if not prepared.size:
            return []
        output = self.predict(prepared)
        answers = self.answers(output)
        return self.rescue(prepared, output, again) if answers is None else answers

    def prepare(self, values: list[Any], context: BatchContext | None = None) -> Prepared:
        """Collate the values, and start to copy them to the device; any thread. An error is kept, for ``predict`` to meet."""
        return self._prepare(values, context, range(len(values)))

    def _prepare(self, values: list[Any], context: BatchContext | None, indices: Sequence[int]) -> Prepared:
        prepared = Prepared(values, context, indices)
        try:
            if self._parts.collate is not None:
                with self._alone:
                    batch = self._parts.collate(list(values))
            elif self._forward is not None:
                batch, kept, refused = self._forward.stack(values)
                prepared.refused = {indices[place]: error for place, error in refused.items()}
                prepared.indices = [indices[place] for place in kept]
                if not kept:
                    return prepared
            else:
                prepared.batch = list(values)  # the model may change its list, and rescue needs the values
                return prepared
            if self._module is None:
                prepared.batch = batch
            else:
                prepared.arrive = self._device.to_device(batch)
        except Exception as error:  # noqa: BLE001 - the user's model may raise anything
            prepared.error = error
        return prepared

    def predict(self, prepared: Prepared) -> Output:
        """Run the model, on its thread; an error is kept, for ``rescue``. Raises only what is not an Exception."""
        output = Output(prepared)
        prepared.error, output.error = None, prepared.error
        if prepared.refused:
            self._tell(next(iter(prepared.refused.values())), list(prepared.refused))
        if output.error is None and prepared.indices:
            try:
                batch = prepared.batch if prepared.arrive is None else prepared.arrive()
                prepared.batch = prepared.arrive = None
                answer = (
                    self._call(self._predict, batch, _context(prepared))
                    if self.wants_context
                    else self._call(self._predict, batch)
                )
                del batch
                self._receive(output, answer)
            except Exception as error:  # noqa: BLE001
                output.error = error
        return output

    def answers(self, output: Output) -> list[Any] | None:
        """Return one outcome an item; None if something failed, and ``rescue`` has to run. Any thread, if ``output.detached``."""
        if output.error is not None:
            return None
        indices, count = output.indices, len(output.indices)
        try:
            if not count:
                found = []
            elif self._parts.split is not None:
                found = one_each(self._parts.split(output.answer, count), count, "split()")
            elif self._forward is not None:
                found = split(output.answer, count)
            else:
                found = one_each(output.answer, count)
        except WrongAnswerError as error:
            self._tell(error, list(indices))
            # an instance each: they are raised in different callers
            found = [ModelError(str(error)) for _ in indices]
        except Exception as error:  # noqa: BLE001
            output.error = error
            return None
        else:
            for place, answer in enumerate(found):
                if isinstance(answer, Exception):
                    self._tell(answer, [indices[place]])
                    found[place] = ModelError(describe(answer), error_type=type(answer).__name__)
        output.answer = None
        if output.refused:
            outcomes = {**output.refused, **dict(zip(indices, found, strict=True))}
            return [outcomes[index] for index in sorted(outcomes)]
        return found

    def rescue(
        self, prepared: Prepared, output: Output, again: Callable[[int, int], list[Any]] | None = None
    ) -> list[Any]:
        """Run a batch that failed in parts, on the model's thread, and return its outcomes.

        ``again(start, end)`` makes some of the values anew; None: they are the same objects, which the model may have changed.

        It is run in halves until the guilty item stands alone: about ``2 * log2(n)`` further runs for one guilty item. A model that raises
        whatever it is given costs ``2 * n - 1`` runs in all: that is so on purpose, for nothing tells such a model from n guilty items, and
        each of its callers gets the error of its own item. Raises DeviceLostError, and what is not an Exception.
        """
        outcomes: dict[int, Any] = {}
        cause = ""
        if output.error is not None and not self._device.is_out_of_memory(output.error):
            cause = describe(output.error)
        tight: list[Sequence[int]] = []  # what did not fit into memory
        parts = self._halves(output, outcomes, tight)
        while parts:
            part = parts.pop()
            # the values as they came: the model may have changed its inputs in place before it failed
            values = _anew(prepared.values, part, again)
            context = prepared.context and prepared.context.part(part[0], part[-1] + 1)
            output = self.predict(self._prepare(values, context, part))
            answers = self.answers(output)
            if answers is None:
                parts += self._halves(output, outcomes, tight)
            else:  # the model may give out the same buffers with the next part's answers
                outcomes.update(zip(part, answers if output.detached else map(_own, answers), strict=True))
        # one item that does not even fit alone says nothing about how many others do
        alone = {part[0] for part in tight if len(part) == 1}
        for part in tight:
            if len(part) > 1 and alone.isdisjoint(part) and self.on_out_of_memory is not None:
                self.on_out_of_memory(len(part))
        found = [outcomes[index] for index in range(prepared.size)]
        if cause and not self._told_of_batches and not any(isinstance(one, BatchqError) for one in found):
            self._told_of_batches = True
            _log_batch(prepared.values, cause)
        return found

    def _halves(
        self, output: Output, outcomes: dict[int, Any], tight: list[Sequence[int]]
    ) -> list[Sequence[int]]:
        """Return the halves to be run instead of a batch that failed; a single item gets its outcome."""
        outcomes.update(output.refused)
        error, indices, output.error, output.answer = output.error, output.indices, None, None
        if error is None:
            return []
        if self._device.is_lost(error):
            self._tell(error, list(indices))
            raise DeviceLostError(
                f"{self._device.name} is lost to this process: {describe(error)}"
            ) from error
        out_of_memory = self._device.is_out_of_memory(error)
        if len(indices) == 1:
            self._tell(error, list(indices))
            text = describe(error)
            if out_of_memory:
                text = f"a single input does not fit into memory, device {self._device.name}: {text}"
            outcomes[indices[0]] = ModelError(text, error_type=type(error).__name__)
        # it goes, and with it the tensors that its frames held: the halves need that memory
        del error
        if out_of_memory:
            self._device.free()
            tight.append(indices)
        if len(indices) == 1:
            return []
        middle = len(indices) // 2
        return [indices[middle:], indices[:middle]]

    def _tell(self, error: Exception, indices: list[int]) -> None:
        if self.on_error is not None:
            self.on_error(error, indices)

    # -- calls of the user's code ----------------------------------------------------------------------------

    def _call(self, part: Callable[..., Any], *args: Any) -> Any:
        if self._module is not None:
            with self._module.inference_mode():
                return self._awaited(part(*args))
        return self._awaited(part(*args))

    def _awaited(self, answer: Any) -> Any:
        return answer if type(answer) is list or not inspect.isawaitable(answer) else self._loop.run(answer)

    def _receive(self, output: Output, answer: Any) -> None:
        """Note what the model returned, and make it ours as far as that is cheap."""
        if self._forward is not None or is_tensor(answer):
            answer, output.detached = self._device.to_host(answer), True
        elif self._module is not None or _holds_tensors(answer):
            answer = self._device.to_host(answer)
        elif (numpy := sys.modules.get("numpy")) is not None and isinstance(answer, numpy.ndarray):
            answer, output.detached = answer.copy(), True
        output.answer = answer
        output.detached = output.detached or self._parts.split is not None


def _context(prepared: Prepared) -> BatchContext:
    if prepared.context is not None:
        return prepared.context
    size = prepared.size
    return BatchContext(("",) * size, (None,) * size, (math.inf,) * size)


def _anew(
    values: list[Any], indices: Sequence[int], again: Callable[[int, int], list[Any]] | None
) -> list[Any]:
    if again is None:
        return [values[index] for index in indices]
    if indices[-1] - indices[0] == len(indices) - 1:
        return again(indices[0], indices[-1] + 1)
    return [again(index, index + 1)[0] for index in indices]


def _holds_tensors(answer: Any) -> bool:
    """Tell whether a list of answers is one of tensors, or of dicts or lists of them, by its first."""
    if "torch" not in sys.modules or not isinstance(answer, (list, tuple)) or not answer:
        return False
    first = answer[0]
    if type(first) is dict:
        return any(map(is_tensor, first.values()))
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    return is_tensor(first)


def _own(answer: Any) -> Any:
    """Return a copy of an answer."""
    if is_tensor(answer):  # one with a gradient cannot be deep-copied
        return answer.detach().clone()
    if isinstance(answer, BatchqError):
        return answer
    try:
        return copy.deepcopy(answer)
    except Exception:  # noqa: BLE001 - what cannot be copied cannot be sent either, and will say so
        return answer


def _checked_key(key: Any) -> str | int | None:
    if key is None or type(key) in (str, int):
        return key  # type: ignore[no-any-return]
    if isinstance(key, numbers.Integral) and not isinstance(key, bool):  # numpy's
        return int(key)
    raise ModelError(
        f"batch_key() of the model returned {named(key)}, {key!r:.80}; return a str, an int or None, such as str(value.shape)"
    )


def _checked_cost(cost: Any) -> float:
    # False for NaN
    if isinstance(cost, numbers.Real) and not isinstance(cost, bool) and cost <= MAX_COST and not cost < 0:
        return float(cost)
    raise ModelError(
        f"cost() of the model returned {cost!r:.80}; return a number from 0 to {MAX_COST:,}, such as the number of tokens"
    )


def _log_batch(values: list[Any], cause: str) -> None:
    shapes = {str(tuple(shape)) for value in values if (shape := getattr(value, "shape", None)) is not None}
    remedy = (
        f"; their shapes are {', '.join(sorted(shapes)[:_SHAPES_IN_LOG])}: give the model a batch_key(value), such as str(value.shape), or "
        "have it pad them"
        if len(shapes) > 1
        else ""
    )
    log.warning(
        "a batch of %d failed, and each of its parts did not: all were answered, in more runs (%s)%s",
        len(values),
        cause,
        remedy,
    )
