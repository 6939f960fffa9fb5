"""A ``torch.nn.Module`` as a model: inputs are stacked into one batch, ``forward`` runs on the device, its output is split into rows.

**Inputs.** Numbers, lists of numbers, numpy arrays and tensors are stacked: n inputs of shape (3,) become one tensor (n, 3). A dict of them
becomes a dict of tensors, which ``forward`` gets as keyword arguments if it takes these names, else as one dict. A list of arrays or dicts
becomes a tuple, which ``forward`` gets as positional arguments if it takes so many, else as one tuple. Lists of numbers become what
``torch.tensor`` makes of them: ints int64, floats float32. Whatever is floating is then cast to the dtype of the module's parameters, where
these have one: else a module in float32 would fail for each float64 array, numpy's default, and one in bfloat16 for nearly everything.
Other dtypes stay as they are.

A batch has to be of one shape and dtype. Where it is not, the inputs of the most common kind run (the first one's, where two are equally
common), and each of the others fails with an error that names both: an odd input harms nobody else.

**Outputs.** A tensor gives each request its row, a dict (or a dataclass, or a ModelOutput of transformers) a dict of rows, a tuple of k
tensors a list of k rows, and so on inside of these. A list of n is n answers.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from batchq.answers import WrongAnswerError, describe, is_tensor, named, rows, shown
from batchq.device import Device
from batchq.errors import ModelError

_REMEDY = (
    "give requests that may share a batch a batch_key (the model a method batch_key(value), or the client batch_key=…), or the model a "
    "collate(inputs) that pads"
)


_SHOWN = 200
"""Characters of the description of an input."""


class _Leaf(NamedTuple):
    """An array or a tensor, and the dtype that it will have in the batch. ``numbers``: it was made of Python's."""

    data: Any
    dtype: Any
    numbers: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


class Stack(NamedTuple):
    """A stacked batch: of the inputs ``kept``, by their indices in the batch; ``refused`` are the others, by index, and why."""

    batch: Any
    kept: list[int]
    refused: dict[int, ModelError]


class Module:
    """A ``torch.nn.Module``, put into evaluation mode and moved to the device.

    One whose parameters are spread over several devices stays where it is.
    """

    def __init__(self, module: Any, device: Device) -> None:
        self._torch = sys.modules["torch"]
        self._device = device
        self._module = module.eval()
        parameters = list(module.parameters())
        if len({parameter.device for parameter in parameters}) <= 1:
            module.to(device.name)
        kinds = {parameter.dtype for parameter in parameters if parameter.dtype.is_floating_point}
        self._floating = kinds.pop() if len(kinds) == 1 else None
        self._signature: inspect.Signature | None = None
        try:
            self._signature = inspect.signature(getattr(module, "_orig_mod", module).forward)
        except (TypeError, ValueError):  # one written in C does not tell
            pass

    def inference_mode(self) -> AbstractContextManager[Any]:
        """Return the context in which the module runs: without gradients."""
        return self._torch.inference_mode()  # type: ignore[no-any-return]

    # -- inputs ----------------------------------------------------------------------------------------------

    def stack(self, values: Sequence[Any]) -> Stack:
        """Return the values as one batch in the host's memory; what does not fit to the others is refused, and so is what is no number."""
        refused: dict[int, ModelError] = {}
        trees: dict[int, Any] = {}
        for index, value in enumerate(values):
            try:
                trees[index] = self._tree(value)
            except (TypeError, ValueError, OverflowError, RuntimeError, RecursionError) as error:
                refused[index] = ModelError(
                    f"the input cannot be stacked into a tensor: {describe(error)}; give the model a collate(inputs)",
                    error_type=type(error).__name__,
                )
        keys = {index: _key(tree) for index, tree in trees.items()}
        if len(set(keys.values())) > 1:
            # a client of another language sends 1 where it means 1.0
            as_floats = {index: self._with_floats(tree) for index, tree in trees.items()}
            others = {index: _key(tree) for index, tree in as_floats.items()}
            if len(set(others.values())) < len(set(keys.values())):
                trees, keys = as_floats, others
        if not trees:
            return Stack(None, [], refused)
        common, _ = Counter(keys.values()).most_common(1)[0]  # of equally common ones the first
        kept = [index for index, key in keys.items() if key == common]
        usual = trees[kept[0]]
        for index, key in keys.items():
            if key != common:
                refused[index] = ModelError(_mixed(trees[index], usual, len(kept)))
        return Stack(self._stacked([trees[index] for index in kept]), kept, refused)

    def _tree(self, value: Any) -> Any:
        """Return the value with a _Leaf in place of each array; raise what torch raises, or TypeError, for what is none."""
        if isinstance(value, dict):
            return {key: self._tree(item) for key, item in value.items()}
        if is_tensor(value):
            return self._leaf(value.detach(), value.dtype)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            array = numpy.asarray(value)
            # looked up of an empty array: torch warns about read-only ones, and knows no foreign byte order
            return self._leaf(
                array, self._torch.from_numpy(numpy.empty(0, array.dtype.newbyteorder("="))).dtype
            )
        if isinstance(value, (list, tuple)):
            inner = value
            while isinstance(inner, (list, tuple)) and len(inner):
                inner = inner[0]
            if not isinstance(inner, (int, float, list, tuple)):
                return [self._tree(item) for item in value]
        elif not isinstance(value, (int, float)):
            raise TypeError(f"{named(value)} is no number")
        tensor = self._torch.tensor(value)
        return self._leaf(tensor, tensor.dtype, numbers=True)

    def _leaf(self, data: Any, dtype: Any, numbers: bool = False) -> _Leaf:
        cast = self._floating is not None and dtype.is_floating_point
        return _Leaf(data, self._floating if cast else dtype, numbers)

    def _with_floats(self, tree: Any) -> Any:
        if isinstance(tree, _Leaf):
            whole = tree.numbers and not tree.dtype.is_floating_point
            return tree._replace(dtype=self._floating or self._torch.get_default_dtype()) if whole else tree
        if isinstance(tree, dict):
            return {key: self._with_floats(item) for key, item in tree.items()}
        return [self._with_floats(item) for item in tree]

    def _stacked(self, trees: list[Any]) -> Any:
        first = trees[0]
        if isinstance(first, dict):
            return {key: self._stacked([tree[key] for tree in trees]) for key in first}
        if not isinstance(first, _Leaf):
            return tuple(self._stacked([tree[place] for tree in trees]) for place in range(len(first)))
        batch = self._device.empty((len(trees), *first.shape), first.dtype)
        array: Any = None
        for row, leaf in enumerate(trees):
            data = leaf.data
            if not is_tensor(data):
                if batch.dtype is not self._torch.bfloat16:
                    array = batch.numpy() if array is None else array
                    array[row] = data
                    continue
                data = self._torch.from_numpy(data.astype("f4"))  # numpy has no bfloat16
            batch[row].copy_(data)
        return batch

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self, batch: Any) -> Any:
        """Call the module with the batch: a dict as keyword arguments and a tuple as positional ones, if ``forward`` takes them."""
        if (
            isinstance(batch, Mapping)
            and all(isinstance(key, str) for key in batch)
            and self._binds((), batch)
        ):
            return self._module(**batch)
        if type(batch) is tuple and self._binds(batch, {}):
            return self._module(*batch)
        return self._module(batch)

    def _binds(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if self._signature is None:
            return True
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return True


def split(output: Any, n: int) -> list[Any]:
    """Return the n answers that an output of ``forward``, in the host's memory, holds; raise WrongAnswerError if there are not so many."""
    return _split(output, n, "")


def _split(output: Any, n: int, place: str) -> list[Any]:
    if is_tensor(output):
        if output.ndim == 0 or output.shape[0] != n:
            raise WrongAnswerError(
                f"forward() returned a tensor of shape {shown(output.shape)}{place} for a batch of {n}; its first dimension must be {n}, "
                "one row for each input: return another, or give the model a split(output, n)"
            )
        return rows(output)
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, Mapping)):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    inner = place or " as output"
    if isinstance(output, Mapping):
        columns = {key: _split(item, n, f"{inner}[{key!r}]") for key, item in output.items()}
        return [{key: column[row] for key, column in columns.items()} for row in range(n)]
    if isinstance(output, tuple):
        parts = [_split(item, n, f"{inner}[{index}]") for index, item in enumerate(output)]
        return [[part[row] for part in parts] for row in range(n)]
    if isinstance(output, list) and len(output) == n:
        return list(output)
    if output is None and place:
        return [None] * n
    size = f" of {len(output)}" if isinstance(output, list) else ""
    raise WrongAnswerError(
        f"forward() returned {named(output)}{size}{place} for a batch of {n}; return a tensor of {n} rows, a dict or a tuple of such "
        f"tensors, or a list of {n} answers, or give the model a split(output, n)"
    )


def _key(tree: Any) -> Any:
    """Return what is equal for trees that can be stacked."""
    if isinstance(tree, _Leaf):
        return tree.dtype, tree.shape
    if isinstance(tree, dict):
        return frozenset((key, _key(item)) for key, item in tree.items())
    return tuple(map(_key, tree))


def _mixed(odd: Any, usual: Any, count: int) -> str:
    what = "shape" if _show(odd, False) != _show(usual, False) else "dtype"
    odd_shown, usual_shown = (_show(tree, what == "dtype")[:_SHOWN] for tree in (odd, usual))
    others = f"{count} others of its batch are" if count > 1 else "another of its batch is"
    return f"the input is of {what} {odd_shown} and {others} of {usual_shown}: they cannot be stacked into one tensor; {_REMEDY}"


def _show(tree: Any, dtypes: bool) -> str:
    if isinstance(tree, _Leaf):
        return str(tree.dtype).removeprefix("torch.") if dtypes else shown(tree.shape)
    if isinstance(tree, dict):
        return (
            "{"
            + ", ".join(f"{key}: {_show(item, dtypes)}" for key, item in sorted(tree.items(), key=str))
            + "}"
        )
    return "[" + ", ".join(_show(item, dtypes) for item in tree) + "]"
