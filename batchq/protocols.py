"""What ``load`` may return, as types: for annotations of one's own models, which mypy then checks.

    from batchq.protocols import BatchModel, HasCollate, HasCost

    class Embedder(BatchModel, HasCollate, HasCost):    # each part that is inherited has to be there, with these types
        def collate(self, inputs: list[str]) -> Batch: ...
        def cost(self, value: str) -> float: ...
        def predict(self, batch: Batch) -> list[list[float]]: ...

    def load(device: str = "cpu") -> Embedder: ...

Inheriting is for the type checker alone: a model of any class will do that has the methods.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What is known about the requests of a batch, in the order of the inputs.

    ``ids``: 32 hex digits each, as in the logs. ``meta``: what the caller gave as ``meta=``, None where nothing. ``deadlines``: Unix
    seconds by which each caller wants its answer, by this machine's clock.
    """

    ids: tuple[str, ...]
    meta: tuple[dict[str, Any] | None, ...]
    deadlines: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, end: int) -> BatchContext:
        """Return the context of the requests ``start`` to ``end``."""
        return BatchContext(self.ids[start:end], self.meta[start:end], self.deadlines[start:end])


class Array(Protocol):
    """A numpy array or a torch tensor, as far as answers go: its first dimension has one row for each input."""

    @property
    def shape(self) -> Any:
        """The length of each dimension."""

    @property
    def dtype(self) -> Any:
        """The type of the elements."""

    def __getitem__(self, key: Any, /) -> Any: ...


Answers: TypeAlias = "list[Any] | tuple[Any, ...] | Array"
"""One answer for each input, in their order; an element that is an Exception fails its own request."""


class Predict(Protocol):
    """A function of a list of n inputs that returns n answers."""

    def __call__(self, inputs: list[Any], /) -> Answers:
        """Return n answers, in the order of the inputs."""


class PredictWithContext(Protocol):
    """The same with a second parameter, which is required or named ``context``."""

    def __call__(self, inputs: list[Any], context: BatchContext, /) -> Answers:
        """Return n answers, in the order of the inputs."""


class AsyncPredict(Protocol):
    """An ``async def`` of a list; it runs on one event loop, one batch at a time."""

    def __call__(self, inputs: list[Any], /) -> Awaitable[Answers]:
        """Return n answers, in the order of the inputs."""


class AsyncPredictWithContext(Protocol):
    """An ``async def`` with the second parameter."""

    def __call__(self, inputs: list[Any], context: BatchContext, /) -> Awaitable[Answers]:
        """Return n answers, in the order of the inputs."""


class BatchModel(Protocol):
    """An object with ``predict``: of the list of inputs, or of what its own ``collate`` makes of them.

    It may take a ``BatchContext`` as a second parameter (one that is required, or named ``context``), and may be ``async``.
    """

    @abstractmethod
    def predict(self, *args: Any, **kwargs: Any) -> Answers | Awaitable[Answers]:
        """Return n answers, in the order of the inputs."""


class HasSplit(Protocol):
    """A model whose ``predict`` returns anything at all, of which ``split`` makes the answers.

    ``split`` may run on another thread while ``predict`` runs for the next batch: what ``predict`` returns must stay valid meanwhile.
    """

    @abstractmethod
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``split`` makes the answers of."""

    @abstractmethod
    def split(self, output: Any, n: int, /) -> Answers:
        """Return n answers, in the order of the inputs."""


class HasCollate(Protocol):
    """Makes one batch of the inputs; may run on another thread while ``predict`` runs for the batch before."""

    @abstractmethod
    def collate(self, inputs: list[Any], /) -> Any:
        """Return the batch, for ``predict``."""


class HasCost(Protocol):
    """Says what a request counts towards ``max_batch_cost``, where its caller did not."""

    @abstractmethod
    def cost(self, value: Any, /) -> float:
        """Return a number of 0 or more, such as the number of tokens."""


class HasBatchKey(Protocol):
    """Says which requests may share a batch, where their callers did not: those of equal keys."""

    @abstractmethod
    def batch_key(self, value: Any, /) -> str | int | None:
        """Return the key; None for the group of those that have none."""


class HasWarmup(Protocol):
    """Runs once, before the first batch is taken."""

    @abstractmethod
    def warmup(self) -> Awaitable[None] | None:
        """Compile, allocate, run a first batch."""


class HasClose(Protocol):
    """Runs once, after the last batch."""

    @abstractmethod
    def close(self) -> Awaitable[None] | None:
        """Let go of what the model holds."""


LoadedModel: TypeAlias = (
    "Predict | PredictWithContext | AsyncPredict | AsyncPredictWithContext | BatchModel | HasSplit"
)
"""What ``load`` may return; a ``torch.nn.Module`` is one of these as well."""

Load: TypeAlias = "Callable[..., LoadedModel | Awaitable[LoadedModel]]"
"""``load(device="cpu", **model_args)``: called once in each worker process; it may be ``async``."""
