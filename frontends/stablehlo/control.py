"""Operations that run others: calls, loops, branches, groups of a compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from phaze.errors import ImportModelError
from phaze.frontends.stablehlo.call import Values
from phaze.frontends.stablehlo.dtypes import to_dtype
from phaze.frontends.stablehlo.module import Module, Operation, Region
from phaze.frontends.stablehlo.values import Constant, Value

if TYPE_CHECKING:
    from phaze.frontends.stablehlo.walk import Walker

__all__ = ["CONTROL", "Environment"]

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
