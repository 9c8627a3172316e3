"""What a tape must know of torch's operators: which write, which are views, what comes out, what cannot be recorded."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from .graph_backend import CaptureError


class Shape(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_inferred: dict[Any, tuple[list[Any], TreeSpec]] = {}
"""Shapes of results by operator and shapes of arguments: a pure function, and layers repeat."""


def infer_shapes(func: Any, leaves: list[Any], structure: TreeSpec) -> tuple[list[Any], TreeSpec]:
    """The shapes that an operator's results will have, in the structure of its result."""
    described = tuple(
        Shape(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in leaves
    )
    key = (func, described, str(structure))
    if key not in _inferred:
        args, kwargs = structure.unflatten([_to_meta(leaf) for leaf in leaves])
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs = {**kwargs, "device": torch.device("meta")}
        results, out_structure = tree_flatten(func(*args, **kwargs))
        shapes = [Shape(tuple(r.shape), r.stride(), r.dtype) if isinstance(r, Tensor) else r for r in results]
        _inferred[key] = shapes, out_structure
    return _inferred[key]


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


class OperatorFacts:
    """What the recorder must know of an operator."""

    def __init__(self, func: Any) -> None:
        schema, tags, name = func._schema, func.tags, func.__name__
        self._func = func
        self._reads_values = torch.Tag.data_dependent_output in tags
        self._is_index = name.startswith(("index.", "index_put", "_index_put"))
        self._is_dynamic = torch.Tag.dynamic_output_shape in tags and not self._is_index
        self._is_random = torch.Tag.nondeterministic_seeded in tags
        self._is_lift = func is torch.ops.aten.lift_fresh.default
        self.is_composite = func._can_decompose() and not self._reads_values
        self.is_mutable = schema.is_mutable
        self.is_view = self._is_lift or any(returned.alias_info is not None for returned in schema.returns)
        self.is_empty = name.startswith(("empty", "new_empty"))

    def refuse(self, args: Any, kwargs: Any, leaves: list[Any]) -> None:
        """Raise CaptureError for what a CUDA capture could not hold either."""
        func = self._func
        if self._reads_values:
            raise CaptureError(f"{func} reads a tensor's value, which a capture has not computed")
        if self._is_dynamic:
            raise CaptureError(f"{func} has a shape that depends on data")
        if self._is_index and any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in leaves[1:]):
            raise CaptureError(f"{func} with a mask has a shape that depends on data")
        if self._is_random and _argument(func, "dropout_p", args, kwargs) != 0.0:
            raise CaptureError(f"{func} draws random numbers: a replay would repeat them")
        if self._is_lift and args[0].dim():
            raise CaptureError("a list of host values became a tensor: a replay would repeat them")


operator_facts = functools.cache(OperatorFacts)


def _argument(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return None


def written_arguments(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator that writes its arguments returns: those arguments."""
    schema = func._schema
    by_alias = {
        name: _argument(func, argument.name, args, kwargs)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for name in argument.alias_info.before_set
    }
    returned = []
    for one in schema.returns:
        if one.alias_info is None:
            raise CaptureError(f"{func} both writes its arguments and makes new tensors")
        [name] = one.alias_info.before_set
        returned.append(by_alias[name])
    return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)
