"""Rules of gathers, scatters and slices that start where a tensor says: elements picked and placed by index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from phaze.frontends.stablehlo.module import Attribute
from phaze.frontends.stablehlo.symbols import Call, Constant, Shape, Stack, Unsupported, Value, Values
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule

__all__ = ["INDEXING"]


class _LookupDims:
    """The dimensions of a table, of the ids that look up windows of it, and of the windows that are looked up.

    A table's dimension is shared with the ids (`*_batching_dims`), looked up (a window of size 1), or read in windows:
    whole, or in part where the window is smaller than the table.
    """

    def __init__(self, table: Shape, ids: Shape, windows: Shape, picked_rank: int, numbers: _DimensionNumbers) -> None:
        self.factors: dict[str, Factor] = {}
        id_dims: list[Dim] = []
        for dim, size in enumerate(ids):
            id_dims.append(Dim() if dim == numbers.index_vector else self._add(f"p{dim}", size))
        shared = dict(zip(numbers.table_batch, numbers.ids_batch, strict=True))
        table_dims: list[Dim] = []
        window_dims: list[Dim] = []
        for dim, size in enumerate(table):
            window = windows[dim]
            if dim in shared:
                table_dims.append(id_dims[shared[dim]])
            elif window == size:
                table_dims.append(self._add(f"d{dim}", size))
            elif window == 1:
                table_dims.append(self._add(f"d{dim}", size, FactorKind.LOOKUP))
            else:
                table_dims.append(Dim(self._add(f"d{dim}", window, FactorKind.WHOLE).factors, size))
            if dim not in shared and dim not in numbers.collapsed:
                window_dims.append(Dim() if window == 1 else Dim(table_dims[-1].factors))
        batch = iter([dim for index, dim in enumerate(id_dims) if index != numbers.index_vector])
        within = iter(window_dims)
        try:
            self.picked: Dims = tuple(next(within if i in numbers.windows else batch) for i in range(picked_rank))
        except StopIteration:
            raise Unsupported from None
        if numbers.index_vector < len(ids) and ids[numbers.index_vector] > 1:
            id_dims[numbers.index_vector] = self._add("n", ids[numbers.index_vector], FactorKind.WHOLE)
        self.table, self.ids = tuple(table_dims), tuple(id_dims)

    def _add(self, name: str, size: int, kind: FactorKind = FactorKind.FREE) -> Dim:
        self.factors[name] = Factor(name, size, kind)
        return Dim((name,))

    def rule(self, operands: tuple[Dims, ...], result: Dims) -> Rule:
        """The rule with these operands and this result, over those factors that they use."""
        used = {name for dims in (*operands, result) for dim in dims for name in dim.factors}
        return Rule(operands, (result,), tuple(factor for name, factor in self.factors.items() if name in used))


class _DimensionNumbers:
    """The dimension numbers of a gather or a scatter, under one set of names."""

    def __init__(self, given: Attribute, names: Mapping[str, str]) -> None:
        if not isinstance(given, dict):
            raise Unsupported
        self.windows = _integers(given.get(names["windows"], []))
        self.collapsed = _integers(given.get(names["collapsed"], []))
        self.table_batch = _integers(given.get(names["table_batch"], []))
        self.ids_batch = _integers(given.get(names["ids_batch"], []))
        index_vector = given.get("index_vector_dim", 0)
        if not isinstance(index_vector, int):
            raise Unsupported
        self.index_vector = index_vector


def _integers(given: Attribute) -> list[int]:
    if not isinstance(given, list):
        raise Unsupported
    return [item for item in given if isinstance(item, int)]


_GATHER = {
    "windows": "offset_dims",
    "collapsed": "collapsed_slice_dims",
    "table_batch": "operand_batching_dims",
    "ids_batch": "start_indices_batching_dims",
}
_SCATTER = {
    "windows": "update_window_dims",
    "collapsed": "inserted_window_dims",
    "table_batch": "input_batching_dims",
    "ids_batch": "scatter_indices_batching_dims",
}


def _gather(call: Call) -> Values:
    """Windows looked up in a table: whole rows are an embedding, one element of each row is a pick."""
    numbers = _DimensionNumbers(call.attribute("dimension_numbers"), _GATHER)
    windows = call.integers("slice_sizes")
    lookup = _LookupDims(call.shape(0), call.shape(1), windows, len(call.out_shape()), numbers)
    rule = lookup.rule((lookup.table, lookup.ids), lookup.picked)
    is_rows = not numbers.table_batch and numbers.collapsed == [0] and windows[1:] == call.shape(0)[1:]
    is_pick = len(numbers.collapsed) == 1 and len(numbers.table_batch) == len(windows) - 1
    function = "embedding" if is_rows else "pick" if is_pick else "gather"
    kind = OpKind.LOOKUP if _has_lookup(rule) else OpKind.COPY
    return call.emit(kind, function, rule, call.id(0), call.id(1))


def _scatter(call: Call) -> Values:
    """Windows put into a table. What is put into zeros reads no table."""
    numbers = _DimensionNumbers(call.attribute("scatter_dimension_numbers"), _SCATTER)
    if len(call.values) != 3:
        raise Unsupported
    table, ids, updates = (call.shape(index) for index in range(3))
    left_out = {*numbers.collapsed, *numbers.table_batch}
    sizes = iter([updates[dim] for dim in numbers.windows])
    windows = tuple(1 if dim in left_out else next(sizes, 1) for dim in range(len(table)))
    lookup = _LookupDims(table, ids, windows, len(updates), numbers)
    ids_id, updates_id = call.id(1), call.id(2)
    if call.is_zero(0):
        operands: tuple[Dims, ...] = (lookup.picked, lookup.ids)
        inputs: tuple[str, ...] = (updates_id, ids_id)
    else:
        operands = (lookup.table, lookup.ids, lookup.picked)
        inputs = (call.id(0), ids_id, updates_id)
    body = [op.short_name for op in call.operation.regions[0].operations] if call.operation.regions else []
    function = "scatter_add" if "add" in body else "scatter"
    rule = lookup.rule(operands, lookup.table)
    return call.emit(OpKind.SCATTER if _has_lookup(rule) else OpKind.COPY, function, rule, *inputs)


def _has_lookup(rule: Rule) -> bool:
    return any(factor.kind is FactorKind.LOOKUP for factor in rule.factors)


def _starts(call: Call, first: int) -> list[int | None]:
    """The start indices, which are the operands from `first` on; None for those that are not known."""
    starts: list[int | None] = []
    for value in call.values[first:]:
        number = value.value if isinstance(value, Constant) else None
        starts.append(int(number) if isinstance(number, int) else None)
    return starts


def _window(shape: Shape, part: Shape) -> tuple[Dims, Dims, tuple[Factor, ...]]:
    """The dimensions of a tensor and of a slice of it, and their factors: whole where the slice is smaller."""
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    whole = tuple(dim if shape[i] == part[i] else Dim(dim.factors, shape[i]) for i, dim in enumerate(dims))
    factors = tuple(
        Factor(f"d{i}", n, FactorKind.FREE if n == shape[i] else FactorKind.WHOLE) for i, n in enumerate(part)
    )
    return whole, dims, factors


def _dynamic_slice(call: Call) -> Values:
    """A slice: a slot of a stack where the slot is known, a view where the start is known, else a copy."""
    value, shape = call.values[0], call.out_shape()
    starts = _starts(call, 1)
    if shape == value.shape:
        return (value,)
    if isinstance(value, Stack) and value.without(shape) == value.slot_shape and shape[value.dim] == 1:
        start = starts[value.dim]
        if start is not None:
            slot = value.slots[min(max(start, 0), len(value.slots) - 1)]
            return (call.recorder.reshape(slot, shape, call.scope),)
    x = call.id(0)
    whole, dims, factors = _window(value.shape, shape)
    if all(start is not None for start in starts):
        given = tuple(start for start in starts if start is not None)
        return call.emit(OpKind.VIEW, "slice", Rule((whole,), (dims,), factors), x, attributes={"start": given})
    indices = [call.id(index) for index in range(1, len(call.values)) if starts[index - 1] is None]
    rule = Rule((whole, *((),) * len(indices)), (dims,), factors)
    return call.emit(OpKind.COPY, "dynamic_slice", rule, x, *indices)


def _dynamic_update_slice(call: Call) -> Values:
    """A stack with another slot, where it is known which; else a copy of the whole with a part replaced."""
    value, update = call.values[0], call.values[1]
    starts = _starts(call, 2)
    if update.shape == value.shape:
        return (update,)
    stack = _as_stack(call, value)
    if stack is not None and stack.without(update.shape) == stack.slot_shape and update.shape[stack.dim] == 1:
        start = starts[stack.dim]
        if start is not None and 0 <= start < len(stack.slots):
            slot = call.recorder.reshape(update, stack.slot_shape, call.scope)
            return (replace(stack, slots=(*stack.slots[:start], slot, *stack.slots[start + 1 :])),)
    whole, dims, factors = _window(value.shape, update.shape)
    covered = tuple(Dim(dim.factors, None) for dim in dims)
    indices = [call.id(index) for index in range(2, len(call.values)) if starts[index - 2] is None]
    operands = (covered, *((),) * len(indices))
    inputs = (call.id(1), *indices)
    if not call.is_zero(0):
        operands, inputs = (whole, *operands), (call.id(0), *inputs)
    return call.emit(OpKind.COPY, "slice_scatter", Rule(operands, (whole,), factors), *inputs)


def _as_stack(call: Call, value: Value) -> Stack | None:
    """A stack, or a known number as one; None for anything else."""
    if isinstance(value, Constant) and value.value is not None:
        slot = call.recorder.constant("", value.shape[1:], value.dtype, value.value)
        return Stack((slot,) * value.shape[0], value.shape, value.dtype)
    return value if isinstance(value, Stack) else None


INDEXING: dict[str, Callable[[Call], Values]] = {
    "gather": _gather,
    "dynamic_gather": _gather,
    "scatter": _scatter,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}
