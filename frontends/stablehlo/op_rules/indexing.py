"""Picking and placing by index: gathers, scatters, slices that start where a tensor says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phaze.frontends.stablehlo.symbols import Call, Constant, Shape, Stack, Unsupported, Value, Values
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule

__all__ = ["INDEXING"]


class _Picking:
    """The dimensions of a table, of the ids that pick windows of it, and of the windows.

    A table's dimension is shared with the ids (`*_batching_dims`), looked up (a window of 1), or read in windows:
    whole, or in part where a window is smaller.
    """

    def __init__(self, table: Shape, ids: Shape, picked: Shape, windows: Shape, numbers: _Numbers) -> None:
        self.factors: dict[str, Factor] = {}
        id_dims: list[Dim] = []
        for place, size in enumerate(ids):
            id_dims.append(Dim() if place == numbers.vector else self._add(f"p{place}", size))
        shared = dict(zip(numbers.table_batch, numbers.ids_batch, strict=True))
        whole: list[Dim] = []
        offsets: list[Dim] = []
        for place, size in enumerate(table):
            window = windows[place]
            if place in shared:
                whole.append(id_dims[shared[place]])
            elif window == size:
                whole.append(self._add(f"d{place}", size))
            elif window == 1:
                whole.append(self._add(f"d{place}", size, FactorKind.LOOKUP))
            else:
                whole.append(Dim(self._add(f"d{place}", window, FactorKind.WHOLE).factors, size))
            if place not in shared and place not in numbers.collapsed:
                offsets.append(Dim() if window == 1 else Dim(whole[-1].factors))
        batch = iter([dim for place, dim in enumerate(id_dims) if place != numbers.vector])
        rest = iter(offsets)
        try:
            self.picked: Dims = tuple(next(rest if i in numbers.offsets else batch) for i in range(len(picked)))
        except StopIteration:
            raise Unsupported from None
        if numbers.vector < len(ids) and ids[numbers.vector] > 1:
            id_dims[numbers.vector] = self._add("n", ids[numbers.vector], FactorKind.WHOLE)
        self.whole, self.ids = tuple(whole), tuple(id_dims)

    def _add(self, name: str, size: int, kind: FactorKind = FactorKind.FREE) -> Dim:
        self.factors[name] = Factor(name, size, kind)
        return Dim((name,))

    def rule(self, operands: tuple[Dims, ...], result: Dims) -> Rule:
        """A rule over those factors that it uses; one that only the result has is looked up."""
        read = {name for dims in operands for dim in dims for name in dim.factors}
        used = read | {name for dim in result for name in dim.factors}
        return Rule(operands, (result,), tuple(factor for name, factor in self.factors.items() if name in used))


class _Numbers:
    """Dimension numbers of a gather or a scatter, under one set of names."""

    def __init__(self, given: Any, names: Mapping[str, str]) -> None:
        if not isinstance(given, dict):
            raise Unsupported
        fields = {own: given.get(theirs, []) for own, theirs in names.items()}
        if any(not isinstance(value, list) for value in fields.values()):
            raise Unsupported
        self.offsets: list[int] = fields["offsets"]
        self.collapsed: list[int] = fields["collapsed"]
        self.table_batch: list[int] = fields["table_batch"]
        self.ids_batch: list[int] = fields["ids_batch"]
        self.vector: int = given.get("index_vector_dim", 0)


_GATHER = {
    "offsets": "offset_dims",
    "collapsed": "collapsed_slice_dims",
    "table_batch": "operand_batching_dims",
    "ids_batch": "start_indices_batching_dims",
}
_SCATTER = {
    "offsets": "update_window_dims",
    "collapsed": "inserted_window_dims",
    "table_batch": "input_batching_dims",
    "ids_batch": "scatter_indices_batching_dims",
}


def _gather(call: Call) -> Values:
    numbers = _Numbers(call.attribute("dimension_numbers"), _GATHER)
    windows = call.integers("slice_sizes")
    picking = _Picking(call.shape(0), call.shape(1), call.out_shape(), windows, numbers)
    rule = picking.rule((picking.whole, picking.ids), picking.picked)
    is_rows = not numbers.table_batch and numbers.collapsed == [0] and windows[1:] == call.shape(0)[1:]
    is_pick = len(numbers.collapsed) == 1 and len(numbers.table_batch) == len(windows) - 1
    function = "embedding" if is_rows else "pick" if is_pick else "gather"
    if not any(factor.kind is FactorKind.LOOKUP for factor in rule.factors):
        return call.emit(OpKind.COPY, function, rule, call.id(0), call.id(1))
    return call.emit(OpKind.LOOKUP, function, rule, call.id(0), call.id(1))


def _scatter(call: Call) -> Values:
    """Windows put into a table; what is put into zeros reads no table."""
    numbers = _Numbers(call.attribute("scatter_dimension_numbers"), _SCATTER)
    if len(call.values) != 3:
        raise Unsupported
    table, ids, updates = (call.shape(index) for index in range(3))
    left_out = {*numbers.collapsed, *numbers.table_batch}
    sizes = iter([updates[place] for place in numbers.offsets])
    windows = tuple(1 if place in left_out else next(sizes, 1) for place in range(len(table)))
    picking = _Picking(table, ids, updates, windows, numbers)
    operands: tuple[Dims, ...] = (picking.ids, picking.picked)
    inputs: tuple[str, ...] = (call.id(1), call.id(2))
    if not call.is_zero(0):
        operands, inputs = (picking.whole, *operands), (call.id(0), *inputs)
    else:
        operands, inputs = operands[::-1], inputs[::-1]
    body = [op.short_name for op in call.operation.regions[0].operations] if call.operation.regions else []
    function = "scatter_add" if "add" in body else "scatter"
    rule = picking.rule(operands, picking.whole)
    has_lookup = any(factor.kind is FactorKind.LOOKUP for factor in rule.factors)
    return call.emit(OpKind.SCATTER if has_lookup else OpKind.COPY, function, rule, *inputs)


def _starts(call: Call, first: int) -> list[int | None]:
    """The start indices from an operand on, None for those that are not known."""
    found: list[int | None] = []
    for value in call.values[first:]:
        is_known = isinstance(value, Constant) and isinstance(value.value, int)
        found.append(int(value.value) if is_known else None)  # type: ignore[union-attr, arg-type]
    return found


def _window(call: Call, size: Shape, part: Shape) -> tuple[Dims, Dims, tuple[Factor, ...]]:
    """The dimensions of a tensor and of a part of it, which stays whole where it is smaller."""
    dims = tuple(Dim((f"d{index}",)) for index in range(len(size)))
    whole = tuple(dim if size[i] == part[i] else Dim(dim.factors, size[i]) for i, dim in enumerate(dims))
    factors = tuple(
        Factor(f"d{i}", n, FactorKind.FREE if n == size[i] else FactorKind.WHOLE) for i, n in enumerate(part)
    )
    return whole, dims, factors


def _dynamic_slice(call: Call) -> Values:
    """A slice of a stack at a known trip is its slot; at a known start a view; else a copy."""
    value, shape = call.values[0], call.out_shape()
    starts = _starts(call, 1)
    if shape == value.shape:
        return (value,)
    if isinstance(value, Stack) and shape == (1, *value.shape[1:]) and starts[0] is not None:
        slot = value.slots[min(max(starts[0], 0), len(value.slots) - 1)]
        return (call.recorder.reshape(slot, shape, call.scope),)
    x = call.id(0)
    whole, dims, factors = _window(call, value.shape, shape)
    if all(start is not None for start in starts):
        given = tuple(start for start in starts if start is not None)
        return call.emit(OpKind.VIEW, "slice", Rule((whole,), (dims,), factors), x, attributes={"start": given})
    indices = [call.id(index) for index in range(1, len(call.values)) if starts[index - 1] is None]
    rule = Rule((whole, *((),) * len(indices)), (dims,), factors)
    return call.emit(OpKind.COPY, "dynamic_slice", rule, x, *indices)


def _dynamic_update_slice(call: Call) -> Values:
    """A slot of a stack replaced, where it is known which; else a copy of the whole with a part replaced."""
    value, update = call.values[0], call.values[1]
    starts = _starts(call, 2)
    if update.shape == value.shape:
        return (update,)
    if update.shape == (1, *value.shape[1:]) and starts[0] is not None:
        slots = _slots(call, value)
        if slots is not None and 0 <= starts[0] < len(slots):
            slots[starts[0]] = call.recorder.reshape(update, value.shape[1:], call.scope)
            loop = value.loop if isinstance(value, Stack) else None
            return (Stack(tuple(slots), value.shape, value.dtype, loop),)
    whole, dims, factors = _window(call, value.shape, update.shape)
    covered = tuple(Dim(dim.factors, None) for dim in dims)
    indices = [call.id(index) for index in range(2, len(call.values)) if starts[index - 2] is None]
    operands = (covered, *((),) * len(indices))
    inputs = (call.id(1), *indices)
    if not call.is_zero(0):
        operands, inputs = (whole, *operands), (call.id(0), *inputs)
    return call.emit(OpKind.COPY, "slice_scatter", Rule(operands, (whole,), factors), *inputs)


def _slots(call: Call, value: Value) -> list[Value] | None:
    if isinstance(value, Stack):
        return list(value.slots)
    if isinstance(value, Constant) and value.value is not None:
        return [call.recorder.constant("", value.shape[1:], value.dtype, value.value)] * value.shape[0]
    return None


INDEXING: dict[str, Callable[[Call], Values]] = {
    "gather": _gather,
    "dynamic_gather": _gather,
    "scatter": _scatter,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}
