"""From a module to ops: `main` is run with what its values stand for, instead of their contents.

Calls are inlined. A loop is run trip by trip as long as its condition can be computed from numbers alone, which is what
a scan lowers to; each trip reads and writes slots of stacked tensors, so that a scan over layers gives the ops of every
layer on slices of its own. Arguments named in `stacked` start as stacks. A condition that depends on data runs the body
once; of the branches of a case that depends on data, the longest one is taken. Both are noted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from phaze.errors import GraphError, ImportModelError
from phaze.frontends.stablehlo.constant_folding import computed, frozen, region_key
from phaze.frontends.stablehlo.module import Function, Module, Operation, Region, TensorType, to_dtype
from phaze.frontends.stablehlo.name_scopes import join_scopes
from phaze.frontends.stablehlo.op_rules import OPERATIONS
from phaze.frontends.stablehlo.symbols import (
    Call,
    Constant,
    Recorder,
    Spread,
    Stack,
    Tensor,
    Unsupported,
    Value,
    Values,
    is_constant,
    is_empty,
)
from phaze.ir import OpKind, Role
from phaze.ir.rule import LARGEST_FACTOR
from phaze.ir.shape_rules import opaque_rule

__all__ = ["CONTROL", "Environment", "Loop", "Walked", "Walker", "slot_name", "walk"]

MOST_OPERATIONS = 1_000_000
"""Operations visited, those inside loops once a trip; more are refused."""

MOST_NESTED = 200


@dataclass(slots=True)
class Loop:
    """A loop that was run: which index of its stacks each trip used, and whether these were arguments."""

    indices: dict[int, set[int]] = field(default_factory=dict)
    reads_arguments: bool = False
    follows: int | None = None


@dataclass(frozen=True, slots=True)
class Walked:
    """What a walk found: ops in the recorder, what the results of `main` stand for, and loops."""

    recorder: Recorder
    function: Function
    arguments: tuple[Value, ...]
    results: Values
    loops: tuple[Loop, ...]
    sliced: frozenset[int]


def slot_name(name: str, index: int) -> str:
    """The name of a slice of a stacked argument."""
    return f"{name}[{index}]"


def walk(module: Module, names: Sequence[str], stacked: Collection[int] = ()) -> Walked:
    """Run `main`; `names` are those of its arguments, `stacked` the indices of arguments to take apart."""
    function = _main(module)
    walker = Walker(module, names)
    arguments = [walker.argument(index, function, stacked) for index in range(len(function.arguments))]
    results = walker.run(function.body, arguments, "")
    return Walked(
        recorder=walker.recorder,
        function=function,
        arguments=tuple(arguments),
        results=results,
        loops=tuple(walker.loops),
        sliced=frozenset(walker.sliced),
    )


def _main(module: Module) -> Function:
    if "main" in module.functions:
        return module.functions["main"]
    known = ", ".join(module.functions) or "none at all"
    raise ImportModelError(
        f"the module {module.name!r} has no function 'main' (functions: {known}); nothing to import."
    )


class Walker:
    """What was found so far, and the ways to run a region, an operation or a trip."""

    def __init__(self, module: Module, names: Sequence[str]) -> None:
        self.module = module
        self.names = names
        self.recorder = Recorder(module.name)
        self.loops: list[Loop] = []
        self.sliced: set[int] = set()
        self.visited = 0
        self.depth = 0
        self.trips: list[tuple[int, int]] = []
        self.argument_of: dict[str, int] = {}

    def new_loop(self) -> int:
        """The number of a loop that is about to run."""
        self.loops.append(Loop())
        return len(self.loops) - 1

    def argument(self, index: int, function: Function, stacked: Collection[int]) -> Value:
        """What an argument of `main` stands for: a tensor, or a stack of them."""
        kind = function.arguments[index].type
        name = self.names[index]
        _check_type(kind, f"argument {index} ({name!r})")
        dtype = to_dtype(kind.element)
        if 0 in kind.shape:
            return self.recorder.constant(("empty", index), kind.shape, dtype)
        if index in stacked:
            shape = kind.shape[1:]
            slots = []
            for place in range(kind.shape[0]):
                made = self.recorder.builder.argument(slot_name(name, place), shape, Role.OTHER, dtype)
                self.argument_of[made] = index
                slots.append(Tensor(made, shape, dtype))
            return Stack(tuple(slots), kind.shape, dtype)
        made = self.recorder.builder.argument(name, kind.shape, Role.OTHER, dtype)
        self.argument_of[made] = index
        return Tensor(made, kind.shape, dtype)

    def run(self, region: Region, arguments: Sequence[Value], scope: str, outer: Environment | None = None) -> Values:
        """Run a region; what it returns. Values of the surrounding region are seen from inside."""
        if self.depth >= MOST_NESTED:
            raise ImportModelError(f"the module nests calls and regions more than {MOST_NESTED} deep.")
        if len(arguments) != len(region.arguments):
            raise ImportModelError("the module calls a function with another number of arguments than it takes.")
        environment = dict(outer or {})
        environment.update(zip(region.arguments, arguments, strict=True))
        self.depth += 1
        try:
            for operation in region.operations:
                if operation.short_name in ("return", "yield"):
                    return tuple(self.value(environment, number) for number in operation.operands)
                self.visit(operation, environment, scope)
        finally:
            self.depth -= 1
        return ()

    def value(self, environment: Environment, number: int) -> Value:
        """What a numbered value stands for."""
        if number not in environment:
            raise ImportModelError("the module uses a value before it is made.")
        return environment[number]

    def visit(self, operation: Operation, environment: Environment, scope: str) -> None:
        """Run one operation, and remember what its results stand for."""
        self.visited += 1
        if self.visited > MOST_OPERATIONS:
            raise ImportModelError(
                f"the module runs more than {MOST_OPERATIONS:,} operations, loops included; import one with shorter "
                "loops."
            )
        for kind in operation.types:
            _check_type(kind, f"a result of {operation.name}")
        values = tuple(self.value(environment, number) for number in operation.operands)
        here = join_scopes(scope, operation.scope)
        control = CONTROL.get(operation.short_name)
        results = (
            self._apply(operation, values, here)
            if control is None
            else control(self, operation, values, here, environment)
        )
        if len(results) != len(operation.results):
            raise ImportModelError(f"{operation.name} gives {len(operation.results)} results, not {len(results)}.")
        environment.update(zip(operation.results, results, strict=True))

    def _apply(self, operation: Operation, values: Values, scope: str) -> Values:
        if all(is_constant(value) for value in values) or any(0 in kind.shape for kind in operation.types):
            return self.fold(operation, values)
        call = Call(operation, values, self.recorder, scope)
        self._remember_slices(operation, values)
        table = OPERATIONS.get(operation.short_name)
        if table is not None:
            with contextlib.suppress(Unsupported, IndexError, ValueError, GraphError):
                return table(call)
        return self.opaque(call)

    def opaque(self, call: Call) -> Values:
        """An op of unknown inside: it reads its operands and makes its results."""
        name = str(call.attribute("call_target_name") or call.name)
        inputs = [call.id(i) for i, value in enumerate(call.values) if not call.is_splat(i) and not is_empty(value)]
        shapes = [self.recorder.builder.tensors[tensor_id].shape for tensor_id in inputs]
        results = [kind.shape for kind in call.operation.types]
        if not results:
            return ()
        return call.emit(OpKind.OPAQUE, name, opaque_rule(shapes, results), *inputs, is_pure=False)

    def resized(self, value: Value, kind: TensorType, scope: str) -> Value:
        """The part of a tensor that one device has, or the whole that it is a part of."""
        if value.shape == kind.shape:
            return value
        if isinstance(value, Constant):
            return self.recorder.constant(("shard", value.number), kind.shape, value.dtype, value.value)
        rule = opaque_rule([value.shape], [kind.shape])
        inputs = (self.recorder.id(value, scope),)
        (made,) = self.recorder.emit(OpKind.OPAQUE, "shard", rule, inputs, (value.dtype,), scope, "manual_computation")
        return Tensor(made, kind.shape, value.dtype)

    def fold(self, operation: Operation, values: Values) -> Values:
        """Results that depend on no argument: numbers where they can be computed, else known by how they are made."""
        if operation.short_name == "broadcast_in_dim" and not is_empty(values[0]) and 0 not in operation.types[0].shape:
            return self._spread(operation, values[0])
        keys = tuple(_constant_key(value) for value in values)
        made = []
        for index, kind in enumerate(operation.types):
            dtype = to_dtype(kind.element)
            number = computed(operation, values) if len(operation.types) == 1 and 0 not in kind.shape else None
            key: tuple[object, ...] = (operation.name, index, keys, frozen(operation.attributes), region_key(operation))
            if operation.short_name == "rng":
                key = (*key, self.recorder.unique())
            made.append(self.recorder.constant(key, kind.shape, dtype, number))
        return tuple(made)

    def _spread(self, operation: Operation, value: Value) -> Values:
        """A repeated constant: one number is one number of another shape, anything else is read where it is."""
        shape, into = operation.types[0].shape, tuple(operation.attributes["broadcast_dimensions"])
        if isinstance(value, Spread):
            into = tuple(into[place] for place in value.into)
            value = value.source
        assert isinstance(value, Constant)
        if value.value is not None:
            return (self.recorder.constant("", shape, value.dtype, value.value),)
        return (Spread(value, into, shape, value.dtype),)

    def _remember_slices(self, operation: Operation, values: Values) -> None:
        """Which arguments are read by trips, and which index of its stacks the trip at hand uses."""
        name = operation.short_name
        if not self.trips or name not in ("dynamic_slice", "dynamic_update_slice"):
            return
        first = 1 if name == "dynamic_slice" else 2
        source, start = values[0], values[first] if len(values) > first else None
        if not isinstance(start, Constant) or not isinstance(start.value, int) or isinstance(start.value, bool):
            return
        part = operation.types[0].shape if name == "dynamic_slice" else values[1].shape
        if not part or part != (1, *source.shape[1:]) or source.shape[0] == 1:
            return
        if isinstance(source, Tensor) and source.id in self.argument_of:
            self.sliced.add(self.argument_of[source.id])
        loop, trip = self.trips[-1]
        if isinstance(source, Stack):
            self._remember_stack(source, loop, trip, start.value, name)

    def _remember_stack(self, source: Stack, number: int, trip: int, index: int, name: str) -> None:
        loop = self.loops[number]
        loop.indices.setdefault(trip, set()).add(index)
        if name == "dynamic_slice":
            first = source.slots[0]
            if isinstance(first, Tensor) and first.id in self.argument_of:
                loop.reads_arguments = True
            if source.loop is not None and source.loop != number and loop.follows is None:
                loop.follows = source.loop

    def enter(self, number: int, trip: int, body: Region, values: Values, scope: str, outer: Environment) -> Values:
        """One trip of a loop; stacks that it writes are marked as its own."""
        self.trips.append((number, trip))
        before = [value.slots if isinstance(value, Stack) else None for value in values]
        try:
            after = self.run(body, values, join_scopes(scope, f"trip[{number}:{trip}]/"), outer)
        finally:
            self.trips.pop()
        return tuple(
            Stack(value.slots, value.shape, value.dtype, number)
            if isinstance(value, Stack) and value.slots != (before[i] if i < len(before) else None)
            else value
            for i, value in enumerate(after)
        )


def _constant_key(value: Value) -> object:
    if isinstance(value, Constant):
        return value.number
    assert isinstance(value, Spread)
    assert isinstance(value.source, Constant)
    return value.source.number, value.into, value.shape


def _check_type(kind: TensorType, what: str) -> None:
    if kind.is_dynamic:
        raise ImportModelError(
            f"{what} has the dynamic shape [{', '.join('?' if n < 0 else str(n) for n in kind.shape)}]; "
            "export the model with fixed shapes."
        )
    if any(size > LARGEST_FACTOR for size in kind.shape):
        raise ImportModelError(f"{what} has the shape {list(kind.shape)}, which is too large.")


MOST_TRIPS = 20_000

Environment = dict[int, Value]
"""What the values of a region stand for."""


def _call(walker: Walker, op: Operation, values: Values, scope: str, environment: Environment) -> Values:
    callee = (
        op.attributes.get("callee") or op.attributes.get("decomposition") or op.attributes.get("called_computations")
    )
    name = callee[0] if isinstance(callee, list) and callee else callee
    function = walker.module.functions.get(str(name))
    if function is None:
        raise ImportModelError(f"the module calls the function {str(name)!r}, which it does not have.")
    return walker.run(function.body, values, scope)


def _fusion(walker: Walker, op: Operation, values: Values, scope: str, environment: Environment) -> Values:
    """A group of operations that a compiler made: walked like a call."""
    if not op.regions:
        return _call(walker, op, values, scope, environment)
    return walker.run(op.regions[0], values, scope, environment)


def _while(walker: Walker, op: Operation, values: Values, scope: str, environment: Environment) -> Values:
    condition, body = op.regions
    number = walker.new_loop()
    trip = 0
    while True:
        (again,) = walker.run(condition, values, scope, environment)
        if not isinstance(again, Constant) or again.value is None:
            if trip == 0:
                walker.recorder.note("a loop whose number of trips depends on data is counted once")
                return walker.run(body, values, scope, environment)
            return values
        if not again.value:
            return values
        if trip == MOST_TRIPS:
            raise ImportModelError(f"a loop of the module runs more than {MOST_TRIPS:,} trips; import a shorter one.")
        values = walker.enter(number, trip, body, values, scope, environment)
        trip += 1


def _case(walker: Walker, op: Operation, values: Values, scope: str, environment: Environment) -> Values:
    """The branch that is taken, where that is known; else the one with the most operations."""
    index = values[0]
    if isinstance(index, Constant) and index.value is not None:
        picked = int(index.value)
        if op.short_name == "if":
            picked = 0 if index.value else 1
        if not 0 <= picked < len(op.regions):
            picked = len(op.regions) - 1
    else:
        sizes = [_size(walker.module, region, 0) for region in op.regions]
        picked = sizes.index(max(sizes))
        walker.recorder.note("a branch that depends on data is counted as its longest side")
    return walker.run(op.regions[picked], (), scope, environment)


def _size(module: Module, region: Region, depth: int) -> int:
    """Operations of a region, products counted thousandfold, calls included."""
    total = 0
    for operation in region.operations:
        total += 1000 if operation.short_name in ("dot_general", "dot", "convolution") else 1
        total += sum(_size(module, inner, depth + 1) for inner in operation.regions)
        callee = module.functions.get(str(operation.attributes.get("callee")))
        if callee is not None and depth < 8:
            total += _size(module, callee.body, depth + 1)
    return total


def _tuple(walker: Walker, op: Operation, values: Values, scope: str, environment: Environment) -> Values:
    raise ImportModelError("the module packs values into tuples; convert it to StableHLO without tuples.")


def _nothing(walker: Walker, op: Operation, values: Values, scope: str, environment: Environment) -> Values:
    """Tokens and the like: no elements."""
    return tuple(walker.recorder.constant("token", (), to_dtype("i1")) for _ in op.results)


def _manual(walker: Walker, op: Operation, values: Values, scope: str, environment: Environment) -> Values:
    """A part that runs per device: its inside has the shapes of one device."""
    walker.recorder.note("a part that runs per device (shard_map) is counted at the shapes of one device")
    region = op.regions[0]
    inside = [walker.resized(value, kind, scope) for value, kind in zip(values, region.types, strict=True)]
    results = walker.run(region, inside, scope, environment)
    return tuple(walker.resized(value, kind, scope) for value, kind in zip(results, op.types, strict=True))


Control = Callable[["Walker", Operation, Values, str, Environment], Values]

CONTROL: Mapping[str, Control] = {
    "call": _call,
    "composite": _call,
    "fusion": _fusion,
    "async_start": _fusion,
    "while": _while,
    "case": _case,
    "if": _case,
    "tuple": _tuple,
    "get_tuple_element": _tuple,
    "after_all": _nothing,
    "create_token": _nothing,
    "manual_computation": _manual,
    "named_computation": _fusion,
}
