"""The model contract: load it, call it, check what it answers, split a batch that fails.

``load(device="cpu", **model_args)`` returns ``predict``; ``predict(inputs)`` takes a list of n values and
returns n answers in the same order: a list or tuple of n, or a numpy array or torch tensor with ``shape[0] ==
n``. An element that is an Exception fails its own item.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from batchq import codec
from batchq.errors import BatchqError, ConfigError, ModelError

MAX_MESSAGE: Final = 1000
"""Characters of an exception's text that a caller gets to see; the log has all of it."""

_ONE_EACH = "return a list with one answer for each input"


class _WrongAnswerError(Exception):
    """The model's answer is not n answers, whatever the inputs were; splitting the batch cannot help."""


class Model:
    """A loaded model, called by the contract.

    ``predict``: what ``load`` returned. ``on_error(error, indices)`` is told of each exception and for which
    of the values, so that it can log the traceback under the requests' ids; an answer that is not n answers
    is such an exception as well. ``on_out_of_memory(size)`` is told that a batch of ``size`` (2 or more) did
    not fit on the device and is split.
    """

    __slots__ = ("_on_error", "_on_out_of_memory", "_predict")

    def __init__(
        self,
        predict: Callable[[list[Any]], Any],
        *,
        on_error: Callable[[Exception, list[int]], None] | None = None,
        on_out_of_memory: Callable[[int], None] | None = None,
    ) -> None:
        self._predict = predict
        self._on_error = on_error
        self._on_out_of_memory = on_out_of_memory

    def run(self, values: Sequence[Any], again: Callable[[int, int], list[Any]] | None = None) -> list[Any]:
        """Return n outcomes for n values, in their order: the answer, or a ModelError for this item alone.

        ``again(start, end)`` makes some of the values anew, for the runs after the first; None: they are the same objects.

        A batch that raises is run again in halves until the guilty item stands alone: about ``2 * log2(n)``
        further runs for one guilty item. A model that raises whatever it is given costs ``2 * n - 1`` runs in
        all: that is so on purpose, for nothing tells such a model from n guilty items, and each of its
        callers gets the error of its own item. Raises only what is not an Exception (KeyboardInterrupt,
        SystemExit).
        """
        outcomes: list[Any] = [None] * len(values)
        parts = [(0, len(values))] if values else []
        while parts:
            start, end = parts.pop()
            # a model may have changed its inputs in place before it failed: the halves get them as they came
            part = end - start < len(values)
            inputs = again(start, end) if part and again is not None else list(values[start:end])
            halves = self._run_part(inputs, start, end, outcomes)
            parts.extend(halves)
        return outcomes

    def _run_part(
        self, inputs: list[Any], start: int, end: int, outcomes: list[Any]
    ) -> list[tuple[int, int]]:
        """Run the inputs ``start`` to ``end``; return the halves to be run instead if that failed."""
        indices = range(start, end)
        out_of_memory = False
        try:
            for index, answer in zip(indices, _answers(self._predict(inputs), len(indices)), strict=True):
                if isinstance(answer, Exception):
                    outcomes[index] = self._item_error(answer, index)
                else:
                    outcomes[index] = answer if len(indices) == len(outcomes) else _own(answer)
        except _WrongAnswerError as error:
            self._fail(error, indices, outcomes, str(error), "")
            return []
        except Exception as error:  # noqa: BLE001 - the user's model may raise anything
            if len(indices) == 1:
                self._fail(error, indices, outcomes, _describe(error), type(error).__name__)
                return []
            out_of_memory = is_out_of_memory(error)
        else:
            return []
        # the exception is gone by here, and with it the tensors that its frames held: the halves need that
        # memory
        if out_of_memory:
            _empty_cache()
            if self._on_out_of_memory is not None:
                self._on_out_of_memory(len(indices))
        middle = (start + end) // 2
        return [(middle, end), (start, middle)]

    def _item_error(self, error: Exception, index: int) -> ModelError:
        if self._on_error is not None:
            self._on_error(error, [index])
        return ModelError(_describe(error), error_type=type(error).__name__)

    def _fail(
        self, error: Exception, indices: range, outcomes: list[Any], message: str, error_type: str
    ) -> None:
        if self._on_error is not None:
            self._on_error(error, list(indices))
        for index in indices:  # an instance each: they are raised in different callers
            outcomes[index] = ModelError(message, error_type=error_type)


def _own(answer: Any) -> Any:
    """Return a copy of an answer to a part of a batch: the model may give out the same buffers with the next part's answers."""
    if hasattr(answer, "detach"):  # a torch tensor: one with a gradient cannot be deep-copied
        return answer.detach().clone()
    try:
        return copy.deepcopy(answer)
    except Exception:  # noqa: BLE001 - what cannot be copied cannot be sent either, and will say so
        return answer


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the error says that a device's memory did not suffice (torch's OutOfMemoryError)."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    kinds = (
        getattr(torch, "OutOfMemoryError", None),
        getattr(getattr(torch, "cuda", None), "OutOfMemoryError", None),
    )
    return isinstance(error, tuple(kind for kind in kinds if isinstance(kind, type)))


def _empty_cache() -> None:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        if cuda is not None and cuda.is_initialized():
            cuda.empty_cache()
    except Exception:  # noqa: BLE001, S110 - only an attempt to help: the halves are run either way
        pass


def _describe(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a __str__ of the user's
        text = "(its text cannot be read)"
    message = f"{kind}: {text}" if text else kind
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"


def _answers(answer: Any, count: int) -> Iterable[Any]:
    """Return the answer's ``count`` elements; raise _WrongAnswerError if it is not ``count`` answers."""
    kind = type(answer)
    if kind is list or (isinstance(answer, (list, tuple)) and not _is_struct(answer)):
        _check_length(len(answer), count, kind.__name__)
        return answer  # type: ignore[no-any-return]
    numpy = sys.modules.get("numpy")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(answer, torch.Tensor):
        _check_shape(answer.shape, count, kind.__name__)
        # one copy from the device for the whole batch, not one an item
        return list(codec.tensor_to_array(answer))
    if numpy is not None and isinstance(answer, numpy.ndarray):
        _check_shape(answer.shape, count, kind.__name__)
        return list(answer)
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns, much later, that it was never awaited
    elif inspect.isgenerator(answer):
        answer.close()
    raise _WrongAnswerError(f"the model returned {_named(answer)} for a batch of {count}; {_remedy(answer)}")


def _is_struct(answer: object) -> bool:
    """Tell a named tuple (torch.max returns one): its fields would pass for the answers to a batch of 2."""
    return hasattr(answer, "_fields") or hasattr(answer, "n_sequence_fields")


def _check_length(length: int, count: int, kind: str) -> None:
    if length != count:
        raise _WrongAnswerError(
            f"the model returned a {kind} of {length} for a batch of {count}; {_ONE_EACH}, in their order"
        )


def _check_shape(shape: Sequence[int], count: int, kind: str) -> None:
    if not shape or shape[0] != count:
        shown = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
        raise _WrongAnswerError(
            f"the model returned a {kind} of shape {shown} for a batch of {count}; "
            f"its first dimension must be {count}, one row for each input"
        )


def _named(answer: object) -> str:
    if answer is None:
        return "None"
    name = type(answer).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _remedy(answer: object) -> str:
    if answer is None:
        return f"is a return missing? R{_ONE_EACH[1:]}"
    if inspect.isawaitable(answer):
        return "an async predict is not supported: define it with def, and return the answers"
    if isinstance(answer, Mapping):
        return f"{_ONE_EACH} (a list of dicts, not a dict of lists)"
    if isinstance(answer, (str, bytes, bytearray)):
        return f"{_ONE_EACH}, also for a batch of 1"
    if isinstance(answer, (set, frozenset)):
        return f"a set has no order: {_ONE_EACH}"
    if hasattr(answer, "__next__"):
        return f"{_ONE_EACH}: wrap it in list()"
    if _is_struct(answer):
        return f"{_ONE_EACH}, such as list(zip(*answer)) or one of its fields"
    if hasattr(answer, "tolist"):
        return f"{_ONE_EACH}: call .tolist()"
    return _ONE_EACH


def load_model(spec: str) -> Callable[..., Any]:
    """Return the function that ``"module:function"`` names (dots in the second part reach into classes).

    Raises ConfigError that says which part is wrong and what stands near it; an exception from inside the
    module is its cause.
    """
    module_name, colon, path = spec.partition(":")
    if not colon or not module_name or not path:
        raise ConfigError(f"model {spec!r}: allowed is 'module:function', such as {_guess_spec(spec)!r}")
    if "/" in module_name or "\\" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("\\", "/").strip("./").replace("/", ".")
        raise ConfigError(
            f"model {spec!r}: a module's name is wanted, not a file's: did you mean '{dotted}:{path}'?"
        )
    found: Any = _import(module_name, spec)
    seen = module_name
    for name in path.split("."):
        if not hasattr(found, name):
            near = _near(name, [other for other in dir(found) if not other.startswith("_")])
            raise ConfigError(f"model {spec!r}: {seen!r} has no {name!r}{near}")
        found = getattr(found, name)
        seen = f"{seen}.{name}"
    if not callable(found):
        raise ConfigError(
            f"model {spec!r}: it is {_named(found)}, and a function that returns the model is wanted"
        )
    return found  # type: ignore[no-any-return]


def _guess_spec(spec: str) -> str:
    module, dot, name = spec.strip(":").rpartition(".")
    return f"{module}:{name}" if dot and module and name != "py" else f"{module or name or 'mymodel'}:load"


def _import(name: str, spec: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"model {spec!r}: importing {name!r} failed: {_describe(error)}{_where(error)}"
            ) from error
        missing = error.name
    except Exception as error:
        raise ConfigError(
            f"model {spec!r}: importing {name!r} failed: {_describe(error)}{_where(error)}"
        ) from error
    parent, _, last = missing.rpartition(".")
    places = getattr(sys.modules.get(parent), "__path__", None) if parent else sys.path
    shown = ", ".join(repr(place or ".") for place in list(places or ())[:4])
    near = _near(last, [module.name for module in pkgutil.iter_modules(places)] if places else [])
    looked = (
        f"looked in {shown}{' and more' if len(places) > 4 else ''}"
        if places
        else f"{parent!r} is no package"
    )
    raise ConfigError(f"model {spec!r}: no module {missing!r} on sys.path ({looked}){near}")


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(set(names)), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return ""  # its text names the file and the line
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename
    ]
    inner = [frame for frame in frames if frame.filename != __file__]
    return f" (in {inner[-1].filename}, line {inner[-1].lineno})" if inner else ""


def bind_load(
    load: Callable[..., Any], *, device: str | None = None, args: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the keyword arguments for a call of ``load``: ``args``, and ``device`` if ``load`` takes it.

    Raises ConfigError if ``load`` does not take one of ``args``, or needs one that is not there.
    """
    given = dict(args or {})
    if not callable(load):
        raise ConfigError(
            f"load={load!r:.80}: a function that returns the model is wanted, not {_named(load)}"
        )
    try:
        parameters = inspect.signature(load).parameters
    except (TypeError, ValueError):  # some functions written in C do not tell
        return given
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = [name for name, parameter in parameters.items() if parameter.kind in named]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if device is not None and (takes_any or "device" in takes):
        given.setdefault("device", device)
    label = f"{_name_of(load)}()"
    for name in given:
        if name not in takes and not takes_any:
            accepted = ", ".join(takes) or "no arguments"
            raise ConfigError(f"model argument {name!r}: {label} takes {accepted}{_near(name, takes)}")
    for name, parameter in parameters.items():
        wanted = (
            parameter.kind in (*named, inspect.Parameter.POSITIONAL_ONLY)
            and parameter.default is inspect.Parameter.empty
        )
        if wanted and (name not in given or parameter.kind is inspect.Parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"{label} needs {name!r}, which was not given: pass it as a model argument, "
                f"or give it a default. "
                f"(If {label} is the predict function itself, name a function that returns it.)"
            )
    return given


def call_load(
    load: Callable[..., Any], *, device: str | None = None, args: Mapping[str, Any] | None = None
) -> Callable[[list[Any]], Any]:
    """Call ``load`` and return its ``predict``.

    ``device`` is passed only if ``load`` takes it, by name or by ``**kwargs``; None passes none. Raises
    ConfigError for arguments that ``load`` does not take and where what it returns cannot be called,
    ModelError (its cause is the exception) where it raises.
    """
    arguments = bind_load(load, device=device, args=args)
    label = f"{_name_of(load)}()"
    try:
        predict = load(**arguments)
    except BatchqError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise ModelError(
            f"{label} could not load the model: {_describe(error)}{_where(error)}", error_type=kind
        ) from error
    if callable(predict):
        return predict  # type: ignore[no-any-return]
    if inspect.iscoroutine(predict):
        predict.close()
        raise ConfigError(f"{label} is an async def; define it with def, and return predict")
    hint = (
        "did you forget 'return predict'?"
        if predict is None
        else "return a function that takes a list of inputs"
    )
    raise ConfigError(f"{label} returned {_named(predict)}, which cannot be called; {hint}")


def _name_of(load: object) -> str:
    return str(getattr(load, "__qualname__", None) or type(load).__qualname__)
