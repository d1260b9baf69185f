"""Run a module's `main` on symbols instead of arrays, which records the ops of the graph.

Calls are inlined. Loops are run by `loops.py`, trip by trip or all trips as one; each trip reads and writes slots of
stacked tensors, so that a scan over layers gives the ops of every layer on slices of its own. Arguments named in
`stacked` start as stacks. Of the branches of a case that depends on data, the longest one is taken, which is noted.

Operations that run others (calls, loops, branches, groups of a compiler) stand in `CONTROL_FLOW`, all others in
`op_rules/`. An operation that stands in neither, or in a form that its rule does not know, becomes an opaque op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phaze.errors import GraphError, ImportModelError
from phaze.frontends.stablehlo.constant_folding import fold
from phaze.frontends.stablehlo.loops import JoinedTrips, run_loop
from phaze.frontends.stablehlo.module import Function, Module, Operation, Region, TensorType
from phaze.frontends.stablehlo.name_scopes import Scope, Trip
from phaze.frontends.stablehlo.op_rules import OP_RULES
from phaze.frontends.stablehlo.symbols import (
    Call,
    Constant,
    Recorder,
    Stack,
    Tensor,
    Unsupported,
    Value,
    Values,
    is_constant,
    is_empty,
)
from phaze.ir import DType, OpKind, Role
from phaze.ir.graph_builder import opaque_rule
from phaze.ir.rule import LARGEST_FACTOR

__all__ = ["Interpreter", "Loop", "SymbolicRun", "run_main", "slot_name"]

MOST_OPERATIONS = 1_000_000
"""The most operations that are run, those inside loops once a trip: it bounds how long an import takes."""

MOST_NESTED = 200
"""The most calls and regions inside each other: few enough for Python's own stack, more than programs nest."""

MOST_NESTED_BRANCHES = 8
"""How deep calls are followed to compare the sizes of branches: a guess of the longest needs no more."""

PRODUCT_SIZE = 1000
"""How many other operations a matrix product counts for, to say which of two branches is the longer."""

Environment = dict[int, Value]
"""The symbols of the numbered values of a region."""


@dataclass(slots=True)
class Loop:
    """A loop that was run.

    `slots_used` has the slots of stacks that each trip read or wrote, `reads_arguments` says whether some of these
    stacks were arguments, and `follows` is the earlier loop whose stacks this one reads: backward's scan reads what
    forward's has stacked. `takes_slots` says whether it takes stacked tensors apart or builds them at all.
    """

    slots_used: dict[int, set[int]] = field(default_factory=dict)
    reads_arguments: bool = False
    follows: int | None = None
    takes_slots: bool = False


@dataclass(frozen=True, slots=True)
class SymbolicRun:
    """What a run of `main` gives: its ops in the recorder, the symbols of its arguments and results, and its loops.

    `sliced` has the arguments that the trips of a loop read slot by slot, with the dimension that they take apart,
    `aliases` the pairs of arguments and results that are written over them.
    """

    recorder: Recorder
    function: Function
    arguments: Values
    results: Values
    loops: tuple[Loop, ...]
    sliced: Mapping[int, int]
    aliases: tuple[tuple[int, int], ...] = ()

    @property
    def stacking(self) -> dict[str, int]:
        """The innermost loop of every op, where a later loop reads its stacks."""
        followed = {loop.follows for loop in self.loops}
        innermost: dict[str, int] = {}
        for op_id, scope in self.recorder.scopes.items():
            trip = next((part for part in reversed(scope.outer) if isinstance(part, Trip)), None)
            if trip is not None and trip.loop in followed:
                innermost[op_id] = trip.loop
        return innermost


def slot_name(name: str, index: int) -> str:
    """The name of a slice of a stacked argument."""
    return f"{name}[{index}]"


def run_main(module: Module, names: Sequence[str], stacked: Mapping[int, int] | None = None) -> SymbolicRun:
    """Run `main`. `names` are those of its arguments, `stacked` the arguments to take apart, and along what dimension.

    Both are counted from 0.
    """
    function = module.main
    interpreter = Interpreter(module, names)
    arguments = tuple(interpreter.argument(index, function, stacked or {}) for index in range(len(function.arguments)))
    results = interpreter.run(function.body, arguments, Scope())
    return SymbolicRun(
        recorder=interpreter.recorder,
        function=function,
        arguments=arguments,
        results=results,
        loops=tuple(interpreter.loops),
        sliced=interpreter.sliced,
        aliases=module.aliases,
    )


class Interpreter:
    """Runs regions, operations and trips of loops, and remembers what they gave."""

    def __init__(self, module: Module, names: Sequence[str]) -> None:
        self.module = module
        self.names = names
        self.recorder = Recorder(module.name)
        self.loops: list[Loop] = []
        self.sliced: dict[int, int] = {}
        self._operation_count = 0
        self._depth = 0
        self._trips: list[Trip] = []
        self._argument_of: dict[str, int] = {}
        self.joined_loops: list[JoinedTrips] = []

    def argument(self, index: int, function: Function, stacked: Mapping[int, int]) -> Value:
        """The symbol of an argument of `main`: a tensor, or a stack of them."""
        kind = function.arguments[index].type
        name = self.names[index]
        _check_type(kind, f"argument {index} ({name!r})")
        if 0 in kind.shape:
            return self.recorder.constant(("empty", index), kind.shape, kind.dtype)
        if index not in stacked:
            return self._tensor_argument(name, kind.shape, kind.dtype, index)
        dim = stacked[index]
        shape = (*kind.shape[:dim], *kind.shape[dim + 1 :])
        slots = tuple(
            self._tensor_argument(slot_name(name, slot), shape, kind.dtype, index) for slot in range(kind.shape[dim])
        )
        return Stack(slots, kind.shape, kind.dtype, dim=dim)

    def _tensor_argument(self, name: str, shape: tuple[int, ...], dtype: DType, index: int) -> Tensor:
        tensor_id = self.recorder.builder.argument(name, shape, Role.OTHER, dtype)
        self._argument_of[tensor_id] = index
        return Tensor(tensor_id, shape, dtype)

    def run(self, region: Region, arguments: Sequence[Value], scope: Scope, outer: Environment | None = None) -> Values:
        """Run a region and give what it returns. The values of the surrounding region are seen from inside."""
        if self._depth >= MOST_NESTED:
            raise ImportModelError(f"the module nests calls and regions more than {MOST_NESTED} deep.")
        if len(arguments) != len(region.arguments):
            raise ImportModelError("the module calls a function with another number of arguments than it takes.")
        environment = dict(outer or {})
        environment.update(zip(region.arguments, arguments, strict=True))
        self._depth += 1
        try:
            for operation in region.operations:
                if operation.short_name in ("return", "yield"):
                    return tuple(_value(environment, number) for number in operation.operands)
                self._run_operation(operation, environment, scope)
        finally:
            self._depth -= 1
        return ()

    def _run_operation(self, operation: Operation, environment: Environment, scope: Scope) -> None:
        """Run one operation, and remember the symbols of its results."""
        self._operation_count += 1
        if self._operation_count > MOST_OPERATIONS:
            raise ImportModelError(
                f"the module runs more than {MOST_OPERATIONS:,} operations, loops included; import one with shorter "
                "loops."
            )
        for kind in operation.types:
            _check_type(kind, f"a result of {operation.name}")
        values = tuple(_value(environment, number) for number in operation.operands)
        operation_scope = scope.inside(operation.scope)
        control_flow = CONTROL_FLOW.get(operation.short_name)
        results = (
            self._apply(operation, values, operation_scope)
            if control_flow is None
            else control_flow(self, operation, values, operation_scope, environment)
        )
        if len(results) != len(operation.results):
            raise ImportModelError(f"{operation.name} gives {len(operation.results)} results, not {len(results)}.")
        environment.update(zip(operation.results, results, strict=True))

    def _apply(self, operation: Operation, values: Values, scope: Scope) -> Values:
        """Fold an operation on constants, record one by its rule, or record an opaque op."""
        if all(is_constant(value) for value in values) or all(0 in kind.shape for kind in operation.types):
            return self._as_data(fold(self.recorder, operation, values))
        empty = [index for index, kind in enumerate(operation.types) if 0 in kind.shape]
        if empty:
            return self._apply_without(empty, operation, values, scope)
        call = Call(operation, values, self.recorder, scope)
        if self.joined_loops:
            slot = self.joined_loops[-1].slot(call)
            if slot is not None:
                return (slot,)
        self._note_slot_access(operation, values)
        op_rule = OP_RULES.get(operation.short_name)
        if op_rule is not None:
            with contextlib.suppress(Unsupported, IndexError, ValueError, GraphError):
                return op_rule(call)
        return _opaque(call)

    def _as_data(self, values: Values) -> Values:
        """Constants of a program without arguments as tensors: they are its data, and not known before it runs."""
        if self.module.main.arguments:
            return values
        return tuple(
            self.recorder.tensor(value, Scope())
            if isinstance(value, Constant) and value.value is None and value.shape and not is_empty(value)
            else value
            for value in values
        )

    def _apply_without(self, empty: Sequence[int], operation: Operation, values: Values, scope: Scope) -> Values:
        """An operation some of whose results have no elements, such as the workspace of a kernel: constants."""
        results: dict[int, Value] = {
            index: self.recorder.constant("empty", kind.shape, kind.dtype)
            for index, kind in enumerate(operation.types)
            if index in empty
        }
        kept = [index for index in range(len(operation.types)) if index not in empty]
        if kept:
            types = tuple(operation.types[index] for index in kept)
            numbers = tuple(operation.results[index] for index in kept)
            smaller = replace(operation, types=types, results=numbers)
            results |= dict(zip(kept, self._apply(smaller, values, scope), strict=True))
        return tuple(results[index] for index in range(len(operation.types)))

    def _note_slot_access(self, operation: Operation, values: Values) -> None:
        """Note which arguments are read slot by slot, and which slot of its stacks the trip at hand reads or writes."""
        name = operation.short_name
        if not self._trips or name not in ("dynamic_slice", "dynamic_update_slice"):
            return
        start_operand = 1 if name == "dynamic_slice" else 2
        source, start = values[0], values[start_operand] if len(values) > start_operand else None
        if not isinstance(start, Constant) or not isinstance(start.value, int) or isinstance(start.value, bool):
            return
        part = operation.types[0].shape if name == "dynamic_slice" else values[1].shape
        if not part or part != (1, *source.shape[1:]) or source.shape[0] == 1:
            return
        self.loops[self._trips[-1].loop].takes_slots = True
        if isinstance(source, Tensor):
            origin = self.recorder.origin(source.id, 0, self._argument_of)
            if origin is not None:
                self.sliced[self._argument_of[origin[0]]] = origin[1]
        if isinstance(source, Stack):
            self._note_stack_access(source, start.value, is_read=name == "dynamic_slice")

    def _note_stack_access(self, source: Stack, slot: int, *, is_read: bool) -> None:
        trip = self._trips[-1]
        loop = self.loops[trip.loop]
        loop.slots_used.setdefault(trip.number, set()).add(slot)
        if not is_read:
            return
        first = source.slots[0]
        if isinstance(first, Tensor) and self.recorder.is_made_of(first.id, self._argument_of):
            loop.reads_arguments = True
        if source.loop is not None and source.loop != trip.loop and loop.follows is None:
            loop.follows = source.loop

    @property
    def operation_count(self) -> int:
        """How many operations were run so far."""
        return self._operation_count

    def new_loop(self) -> int:
        """The number of a loop that is about to run."""
        self.loops.append(Loop())
        return len(self.loops) - 1

    def run_trip(self, trip: Trip, body: Region, values: Values, scope: Scope, outer: Environment) -> Values:
        """One trip of a loop. Stacks that it writes are marked as the loop's own."""
        self._trips.append(trip)
        slots_before = [value.slots if isinstance(value, Stack) else None for value in values]
        try:
            results = self.run(body, values, scope.at_trip(trip), outer)
        finally:
            self._trips.pop()
        return tuple(
            replace(value, loop=trip.loop)
            if isinstance(value, Stack) and value.slots != (slots_before[i] if i < len(slots_before) else None)
            else value
            for i, value in enumerate(results)
        )


def _value(environment: Environment, number: int) -> Value:
    """The symbol of a numbered value."""
    if number not in environment:
        raise ImportModelError("the module uses a value before it is made.")
    return environment[number]


def _opaque(call: Call) -> Values:
    """An op whose inside is not known: it reads its operands and makes its results."""
    name = str(call.attribute("call_target_name") or call.name)
    inputs = [call.id(i) for i, value in enumerate(call.values) if not call.is_splat(i) and not is_empty(value)]
    shapes = [call.recorder.builder.tensors[tensor_id].shape for tensor_id in inputs]
    results = [kind.shape for kind in call.operation.types]
    if not results:
        return ()
    try:
        return call.emit(OpKind.OPAQUE, name, opaque_rule(shapes, results), *inputs, is_pure=False)
    except (Unsupported, GraphError):
        raise ImportModelError(
            f"{name} reads {[list(shape) for shape in shapes]} and makes {[list(shape) for shape in results]}, which "
            "no operation does; the module is damaged."
        ) from None


def _check_type(kind: TensorType, what: str) -> None:
    if kind.is_dynamic:
        raise ImportModelError(
            f"{what} has the dynamic shape [{', '.join('?' if n < 0 else str(n) for n in kind.shape)}]; "
            "export the model with fixed shapes."
        )
    if any(size > LARGEST_FACTOR for size in kind.shape):
        raise ImportModelError(f"{what} has the shape {list(kind.shape)}, which is too large.")


def _call(interpreter: Interpreter, op: Operation, values: Values, scope: Scope, environment: Environment) -> Values:
    """A call: the function is run as if it stood here."""
    callee = (
        op.attributes.get("callee") or op.attributes.get("decomposition") or op.attributes.get("called_computations")
    )
    name = callee[0] if isinstance(callee, list) and callee else callee
    function = interpreter.module.functions.get(str(name))
    if function is None:
        raise ImportModelError(f"the module calls the function {str(name)!r}, which it does not have.")
    return interpreter.run(function.body, values, scope)


def _fusion(interpreter: Interpreter, op: Operation, values: Values, scope: Scope, environment: Environment) -> Values:
    """A group of operations that a compiler made: run like a call."""
    if not op.regions:
        return _call(interpreter, op, values, scope, environment)
    return interpreter.run(op.regions[0], values, scope, environment)


def _case(interpreter: Interpreter, op: Operation, values: Values, scope: Scope, environment: Environment) -> Values:
    """A branch: the side that is taken, where that is known, else the one with the most operations."""
    index = values[0]
    if isinstance(index, Constant) and index.value is not None:
        taken = int(index.value)
        if op.short_name == "if":
            taken = 0 if index.value else 1
        if not 0 <= taken < len(op.regions):
            taken = len(op.regions) - 1  # as StableHLO says of an index out of range
    else:
        sizes = [_region_size(interpreter.module, region, 0) for region in op.regions]
        taken = sizes.index(max(sizes))
        interpreter.recorder.note("a branch that depends on data is counted as its longest side")
    return interpreter.run(op.regions[taken], (), scope, environment)


def _region_size(module: Module, region: Region, depth: int) -> int:
    """The operations of a region with those of its calls; a matrix product counts for many."""
    total = 0
    for operation in region.operations:
        total += PRODUCT_SIZE if operation.short_name in ("dot_general", "dot", "convolution") else 1
        total += sum(_region_size(module, inner, depth + 1) for inner in operation.regions)
        callee = module.functions.get(str(operation.attributes.get("callee")))
        if callee is not None and depth < MOST_NESTED_BRANCHES:
            total += _region_size(module, callee.body, depth + 1)
    return total


def _tuple(interpreter: Interpreter, op: Operation, values: Values, scope: Scope, environment: Environment) -> Values:
    raise ImportModelError("the module packs values into tuples; convert it to StableHLO without tuples.")


def _token(interpreter: Interpreter, op: Operation, values: Values, scope: Scope, environment: Environment) -> Values:
    """Tokens order side effects and hold no elements."""
    return tuple(interpreter.recorder.constant("token", (), DType.BOOL) for _ in op.results)


def _manual(interpreter: Interpreter, op: Operation, values: Values, scope: Scope, environment: Environment) -> Values:
    """A part that runs per device (shard_map): its inside has the shapes of one device."""
    recorder = interpreter.recorder
    recorder.note("a part that runs per device (shard_map) is counted at the shapes of one device")
    region = op.regions[0]
    shards = [_resized(recorder, value, kind, scope) for value, kind in zip(values, region.types, strict=True)]
    results = interpreter.run(region, shards, scope, environment)
    return tuple(_resized(recorder, value, kind, scope) for value, kind in zip(results, op.types, strict=True))


def _resized(recorder: Recorder, value: Value, kind: TensorType, scope: Scope) -> Value:
    """The part of a tensor that one device has, or the whole that it is a part of."""
    if value.shape == kind.shape:
        return value
    if isinstance(value, Constant):
        return recorder.constant(("shard", value.number), kind.shape, value.dtype, value.value)
    rule = opaque_rule([value.shape], [kind.shape])
    inputs = (recorder.id(value, scope),)
    (result,) = recorder.emit(OpKind.OPAQUE, "shard", rule, inputs, (value.dtype,), scope, "manual_computation")
    return Tensor(result, kind.shape, value.dtype)


CONTROL_FLOW: Mapping[str, Callable[[Interpreter, Operation, Values, Scope, Environment], Values]] = {
    "call": _call,
    "composite": _call,
    "fusion": _fusion,
    "async_start": _fusion,
    "while": run_loop,
    "case": _case,
    "if": _case,
    "tuple": _tuple,
    "get_tuple_element": _tuple,
    "after_all": _token,
    "create_token": _token,
    "manual_computation": _manual,
    "named_computation": _fusion,
}
"""The operations that run others, or that order them, by name without their dialect."""
