"""From ``module:function`` to a loaded model: find ``load``, call it, and see what it returned."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import pkgutil
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from batchq.answers import describe, named
from batchq.errors import BatchqError, ConfigError, ModelError


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
            f"model {spec!r}: it is {named(found)}, and a function that returns the model is wanted"
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
                f"model {spec!r}: importing {name!r} failed: {describe(error)}{_where(error)}"
            ) from error
        missing = error.name
    except Exception as error:
        raise ConfigError(
            f"model {spec!r}: importing {name!r} failed: {describe(error)}{_where(error)}"
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
            f"load={load!r:.80}: a function that returns the model is wanted, not {named(load)}"
        )
    try:
        parameters = inspect.signature(load).parameters
    except (TypeError, ValueError):  # some functions written in C do not tell
        return given
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = [name for name, parameter in parameters.items() if parameter.kind in by_name]
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
            parameter.kind in (*by_name, inspect.Parameter.POSITIONAL_ONLY)
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
) -> Any:
    """Call ``load`` and return the model, for ``Model``: one of ``protocols.LoadedModel``, or a ``torch.nn.Module``.

    ``device`` is passed only if ``load`` takes it, by name or by ``**kwargs``; None passes none. Raises
    ConfigError for arguments that ``load`` does not take and where what it returns is no model,
    ModelError (its cause is the exception) where it raises.
    """
    arguments = bind_load(load, device=device, args=args)
    label = f"{_name_of(load)}()"
    loop = take_loop()
    try:
        loaded = load(**arguments)
        if inspect.isawaitable(loaded):
            loaded = loop.run(loaded)
        parts_of(loaded, f"{label} returned")
    except BaseException as error:
        loop.close()
        if isinstance(error, BatchqError) or not isinstance(error, Exception):
            raise
        kind = type(error).__name__
        raise ModelError(
            f"{label} could not load the model: {describe(error)}{_where(error)}", error_type=kind
        ) from error
    _here.loop = loop  # for the Model: its async parts may use what load has opened on this loop
    return loaded


def _name_of(load: object) -> str:
    return str(getattr(load, "__qualname__", None) or type(load).__qualname__)


class EventLoop:
    """The event loop of a model's async parts; it runs only while one of them does."""

    __slots__ = ("_loop",)

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Return what the awaitable comes to, on this thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_await(awaitable))

    def close(self) -> None:
        """Cancel what still runs on the loop, and close it."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            loop.run_until_complete(_wind_up(loop))
        finally:
            loop.close()


async def _await(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except asyncio.CancelledError as error:  # no Exception, and no reason to end the process
        raise RuntimeError("it was cancelled") from error


async def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for one in left:
        one.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


_here = threading.local()


def take_loop() -> EventLoop:
    """Return the event loop on which this thread has just run an async ``load``, else a new one."""
    loop = getattr(_here, "loop", None)
    _here.loop = None
    return loop or EventLoop()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a loaded model consists of. ``predict`` is None for a ``torch.nn.Module`` without one: it has ``forward``."""

    predict: Callable[..., Any] | None
    takes_context: bool
    collate: Callable[[list[Any]], Any] | None
    split: Callable[[Any, int], Any] | None
    cost: Callable[[Any], Any] | None
    batch_key: Callable[[Any], Any] | None
    warmup: Callable[[], Any] | None
    close: Callable[[], Any] | None


_OPTIONAL = ("collate", "split", "cost", "batch_key", "warmup", "close")


def parts_of(loaded: Any, label: str = "load() returned") -> Parts:
    """Return the parts of what ``load`` returned; raise ConfigError if that is no model."""
    if isinstance(loaded, type) and (hasattr(loaded, "predict") or is_module(loaded)):
        raise ConfigError(f"{label} the class {loaded.__name__}, and an object of it is wanted: call it")
    predict: Any = loaded
    found: dict[str, Any] = dict.fromkeys(_OPTIONAL)
    if not inspect.isroutine(loaded):
        predict = _part(loaded, "predict") or (loaded if callable(loaded) and not is_module(loaded) else None)
        found = {name: _part(loaded, name) for name in _OPTIONAL}
    if predict is None and not is_module(loaded):
        if loaded is None:
            hint = "did you forget 'return predict'?"
        elif any(found.values()):
            hint = "it has no method 'predict'"
        else:
            hint = "return a function that takes a list of inputs, or an object with 'predict'"
        raise ConfigError(f"{label} {named(loaded)}, which cannot be called; {hint}")
    for name in ("collate", "split", "cost", "batch_key"):
        if inspect.iscoroutinefunction(found[name]):
            raise ConfigError(f"{label} a model whose {name} is an async def; define it with def")
    takes_context = predict is not None and _takes_context(predict, label)
    return Parts(predict, takes_context, **found)


def is_module(loaded: object) -> bool:
    """Tell a ``torch.nn.Module``, or a class of them."""
    nn = getattr(sys.modules.get("torch"), "nn", None)
    kind = loaded if isinstance(loaded, type) else type(loaded)
    return nn is not None and issubclass(kind, nn.Module)


def _part(loaded: object, name: str) -> Any:
    if is_module(loaded):
        part = getattr(loaded, name, None)  # a compiled module passes on to the one inside
        return part if callable(part) and not is_module(part) else None
    # not what __getattr__ makes up: a Mock has a part of every name
    part = None if inspect.getattr_static(loaded, name, None) is None else getattr(loaded, name)
    return part if callable(part) else None


def _takes_context(predict: Callable[..., Any], label: str) -> bool:
    """Tell whether ``predict`` wants a second argument; raise ConfigError if it cannot be called with the inputs."""
    try:
        parameters = list(inspect.signature(predict).parameters.values())
    except (TypeError, ValueError):  # some functions written in C do not tell
        return False
    empty = inspect.Parameter.empty
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [parameter for parameter in parameters if parameter.kind in positional]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    name = getattr(predict, "__name__", type(predict).__name__)
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is empty and parameter.kind in (*positional, inspect.Parameter.KEYWORD_ONLY)
    ]
    if len(required) > 2 or (len(required) == 2 and len(places) < 2) or not (places or takes_any):
        takes = ", ".join(required) or "nothing"
        raise ConfigError(
            f"{label} a model whose {name} takes {takes}; it is given the list of inputs, and a BatchContext if it takes a second argument"
        )
    return len(places) > 1 and (places[1].default is empty or places[1].name == "context")
