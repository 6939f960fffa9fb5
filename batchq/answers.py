"""What a model may answer: a list or tuple of n, or an array or tensor of n rows. Anything else is an error that names the remedy."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from batchq import codec
from batchq.errors import EncodeError, ModelError

MAX_MESSAGE: Final = 1000
"""Characters of an exception's text that a caller gets to see; the log has all of it."""

_ONE_EACH = "return a list with one answer for each input"


class WrongAnswerError(Exception):
    """The model's answer is not n answers, whatever the inputs were; splitting the batch cannot help."""


def one_each(answer: Any, count: int, who: str = "the model") -> list[Any]:
    """Return the ``count`` answers that ``answer`` holds, as a new list; raise WrongAnswerError, about ``who``, if there are not so many.

    A tensor gives numpy rows, but where numpy lacks the dtype.
    """
    kind = type(answer)
    if kind is list or (isinstance(answer, (list, tuple)) and not _is_struct(answer)):
        if len(answer) != count:
            raise WrongAnswerError(
                f"{who} returned a {kind.__name__} of {len(answer)} for a batch of {count}; {_ONE_EACH}, in their order"
            )
        return list(answer)
    if is_tensor(answer):
        _check_shape(answer.shape, count, kind.__name__, who)
        return rows(answer)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(answer, numpy.ndarray):
        _check_shape(answer.shape, count, kind.__name__, who)
        return list(answer)
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns, much later, that it was never awaited
    elif inspect.isgenerator(answer):
        answer.close()
    raise WrongAnswerError(f"{who} returned {named(answer)} for a batch of {count}; {_remedy(answer)}")


def is_tensor(value: object) -> bool:
    """Tell a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def rows(tensor: Any) -> list[Any]:
    """Return a tensor's rows as numpy arrays (the elements of a vector as numpy scalars), but those of bfloat16 as tensors."""
    if tensor.ndim > 1 and codec.is_bfloat16(tensor):
        return list(tensor.detach().cpu())
    return list(codec.tensor_to_array(tensor))


def describe(error: BaseException) -> str:
    """Return an exception's type and text, in at most ``MAX_MESSAGE`` characters."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a __str__ of the user's
        text = "(its text cannot be read)"
    message = f"{kind}: {text}" if text else kind
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"


def named(value: object) -> str:
    """Return a value's type with its article."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def shown(shape: Sequence[int]) -> str:
    """Return a shape as a tuple is written."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def _is_struct(answer: object) -> bool:
    """Tell a named tuple (torch.max returns one): its fields would pass for the answers to a batch of 2."""
    return hasattr(answer, "_fields") or hasattr(answer, "n_sequence_fields")


def _check_shape(shape: Sequence[int], count: int, kind: str, who: str) -> None:
    if not shape or shape[0] != count:
        raise WrongAnswerError(
            f"{who} returned a {kind} of shape {shown(shape)} for a batch of {count}; "
            f"its first dimension must be {count}, one row for each input"
        )


def _remedy(answer: object) -> str:
    if answer is None:
        return f"is a return missing? R{_ONE_EACH[1:]}"
    if inspect.isawaitable(answer):
        return "it is not awaited here: define it with def"
    if inspect.isasyncgen(answer):
        return f"{_ONE_EACH}: return, where it yields"
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


def unsendable(error: EncodeError) -> ModelError:
    """Return the error for the caller of a request whose answer holds something that cannot cross the wire: it is the model's."""
    text = error.message.replace("value", "answer", 1)
    return ModelError(f"the model's answer cannot be sent: {text}", error_type="EncodeError")
