"""Run the loops of a module: trip by trip, or all trips as one where that would take too long.

A loop whose condition can be computed from numbers alone is what a scan lowers to. Run trip by trip, every trip gives
ops of its own, so that a scan over layers gives the layers. A loop that runs longer iterates over time: its trips are
alike, and are recorded as one trip whose ops all have one more factor, the trips (`JoinedTrips`):

1. what a trip hands on to the next is the initial value, repeated for every trip; constants that count are not known;
2. reading the slot of a stacked tensor at the trip's number gives all slots, writing it makes the stacked tensor;
3. the body is run once, and every op that depends on 1 or 2 gets the factor, its results one more dimension. An op that
   does not is the same in all trips, and done once;
4. behind the loop, a value that was handed on is that of the last trip.

Flops are those of all trips, and so are prices: the factor is marked as serial, and an op with it costs what one trip
costs, as often as there are trips. A backward by rule has the gradient that one trip hands to the one before it, too.

A loop whose condition depends on data runs as often as the compiler or the caller says, else once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from phaze.errors import GraphError, ImportModelError
from phaze.frontends.stablehlo.module import Operation, Region
from phaze.frontends.stablehlo.name_scopes import Scope, Trip
from phaze.frontends.stablehlo.symbols import Call, Constant, Recorder, Tensor, Value, Values, is_constant
from phaze.ir import Dim, Dims, Factor, FactorKind, Op, OpKind, Rule
from phaze.ir.backward import LOOP_STATE
from phaze.ir.graph_checks import check_rule

if TYPE_CHECKING:
    from phaze.frontends.stablehlo.interpreter import Environment, Interpreter

__all__ = ["JoinedTrips", "run_loop"]

LONGEST_LOOP = 2**31
"""Loops of more trips are refused: counters of 32 bits do not reach further, so their condition never ends them."""

MOST_LAYERS = 512
"""Loops of more trips go over time, whatever they take apart: the largest known models have 126 layers."""

MOST_OPERATIONS_OVER_SLOTS = 400_000
"""How many operations the trips of a loop may run one by one that takes stacked tensors apart: a scan over the layers
of the largest known models (126 of them, with some two thousand operations backward) needs 250,000."""

MOST_OPERATIONS_OF_LOOP = 2_000
"""How many operations the trips of any other loop may run one by one: they go over time, and all trips are alike."""


def run_loop(interpreter: Interpreter, op: Operation, values: Values, scope: Scope, environment: Environment) -> Values:
    """The values that a loop ends with."""
    condition, body = op.regions

    def goes_on(state: Values) -> bool | None:
        (result,) = interpreter.run(condition, state, scope, environment)
        return bool(result.value) if isinstance(result, Constant) and result.value is not None else None

    known = op.attributes.get("trips")
    is_told = goes_on(values)
    if is_told is False:
        return values
    if is_told is None:
        known = _assumed_trips(interpreter, known)
        if known == 1:
            return interpreter.run(body, values, scope, environment)
    number, start, sliced = interpreter.new_loop(), len(interpreter.recorder.builder.ops), dict(interpreter.sliced)
    operations = interpreter.operation_count
    after = interpreter.run_trip(Trip(number, 0), body, values, scope, environment)
    operations = max(1, interpreter.operation_count - operations)
    trips = known if isinstance(known, int) else _count_trips(goes_on, values, after)
    if trips > LONGEST_LOOP:
        raise ImportModelError(f"a loop of the module runs more than {LONGEST_LOOP:,} trips, or never ends.")
    if _is_too_long(trips, operations, takes_slots=interpreter.loops[number].takes_slots):
        interpreter.recorder.take_back(start)
        interpreter.sliced = sliced
        return JoinedTrips(interpreter, number, trips).run(body, values, after, scope, environment)
    for trip in range(1, trips):
        if is_told is not None and not goes_on(after):
            break
        after = interpreter.run_trip(Trip(number, trip), body, after, scope, environment)
    return after


def _is_too_long(trips: int, operations: int, *, takes_slots: bool) -> bool:
    if takes_slots:
        return trips > MOST_LAYERS or trips * operations > MOST_OPERATIONS_OVER_SLOTS
    return trips > 1 and trips * operations > MOST_OPERATIONS_OF_LOOP


def _assumed_trips(interpreter: Interpreter, known: object) -> int:
    """How often a loop runs whose condition depends on data: as the compiler or the caller says, else once."""
    trips = known if isinstance(known, int) else interpreter.module.assumed_trips
    how_often = "once" if trips == 1 else f"{trips:,} times"
    source = "the compiler counted" if isinstance(known, int) else "is assumed (trips=)"
    interpreter.recorder.note(
        f"a loop whose number of trips depends on data is counted {how_often}"
        + (f", as {source}" if trips != 1 else "; pass trips= (--trips) for another number")
    )
    return trips


def _count_trips(goes_on: Callable[[Values], bool | None], before: Values, after: Values) -> int:
    """How often a loop runs whose counters change by the same step in every trip: by bisection of its condition.

    One more than `LONGEST_LOOP` where it runs longer, or where its counters do not say.
    """

    def state(trip: int) -> Values:
        return tuple(_counted(value, later, trip) for value, later in zip(before, after, strict=True))

    fewest, most = 1, LONGEST_LOOP + 1
    if goes_on(state(most)) is not False:
        return most
    while fewest < most:
        middle = (fewest + most) // 2
        if goes_on(state(middle)):
            fewest = middle + 1
        else:
            most = middle
    return most


def _counted(value: Value, later: Value, trip: int) -> Value:
    """A counter at a trip; any other value as it was."""
    if not isinstance(value, Constant) or not isinstance(later, Constant):
        return value
    if isinstance(value.value, bool) or not isinstance(value.value, int) or not isinstance(later.value, int):
        return value
    # The number of this constant is never compared: only conditions read it.
    return replace(value, value=value.value + trip * (later.value - value.value))


class JoinedTrips:
    """All trips of a loop as one; the numbers in the comments are those of the module's docstring."""

    def __init__(self, interpreter: Interpreter, number: int, trips: int) -> None:
        self.interpreter = interpreter
        self.factor = Factor(f"trips{number}", trips, FactorKind.SERIAL)
        self.per_trip: set[str] = set()
        self.stacked: set[str] = set()

    @property
    def recorder(self) -> Recorder:
        """The recorder of the interpreter."""
        return self.interpreter.recorder

    def run(self, body: Region, before: Values, after: Values, scope: Scope, environment: Environment) -> Values:
        """The values behind the loop, which is entered with `before`; `after` are those behind one trip."""
        self.recorder.note(
            f"a loop of {self.factor.size:,} trips counts as one trip with all of them in every op, which is priced "
            "as so many, one after the other"
        )
        pairs = list(zip(before, after, strict=True))
        start = len(self.recorder.builder.ops)
        entered = tuple(self._entered(index, value, later, scope) for index, (value, later) in enumerate(pairs))
        self.interpreter.joined_loops.append(self)
        try:
            results = self.interpreter.run(body, entered, scope, environment)
        finally:
            self.interpreter.joined_loops.pop()
        whole = tuple(v if is_constant(v) else self.recorder.tensor(v, scope) for v in results)
        self._add_factor(start)
        for state, value in zip(entered, whole, strict=True):
            if isinstance(state, Tensor) and isinstance(value, Tensor) and state.id in self.per_trip:
                self.recorder.handed_on[state.id] = value.id
        finished = (self._left(value, pair, scope) for value, pair in zip(whole, pairs, strict=True))
        return tuple(finished)

    def _entered(self, index: int, value: Value, later: Value, scope: Scope) -> Value:
        """1. A value at the start of a trip: one that no trip changes is itself."""
        if value == later:
            return value
        if is_constant(value) and is_constant(later):
            return self.recorder.constant(("counter", self.factor.name, index), value.shape, value.dtype)
        dims = _dims(value.shape)
        return self._mark(self._view(LOOP_STATE, value, (dims,), (dims,), value.shape, scope))

    def slot(self, call: Call) -> Value | None:
        """2. What a slice at the trip's number gives; None for any other operation."""
        is_read = call.name == "dynamic_slice"
        if not is_read and call.name != "dynamic_update_slice":
            return None
        stacked, part = call.values[0], call.out_shape() if is_read else call.shape(1)
        starts = call.values[1 if is_read else 2 :]
        is_slot = bool(part) and part == (1, *stacked.shape[1:]) and stacked.shape[0] == self.factor.size
        if not is_slot or not starts or not is_constant(starts[0]) or call.is_splat(1 if is_read else 2):
            return None
        rest = _dims(stacked.shape)[1:]
        of_all, of_one = ((Dim((self.factor.name,)), *rest),), ((Dim(()), *rest),)
        if is_read:
            return self._mark(self._view("slot", stacked, of_all, of_one, part, call.scope))
        made = self._view("stack_slots", call.values[1], of_one, of_all, stacked.shape, call.scope)
        self.stacked.add(made.id)
        return made

    def _view(
        self,
        function: str,
        value: Value,
        operands: tuple[Dims, ...],
        results: tuple[Dims, ...],
        shape: tuple[int, ...],
        scope: Scope,
    ) -> Tensor:
        sizes: dict[str, int] = {}
        for dims, lengths in ((operands[0], value.shape), (results[0], shape)):
            sizes |= {dim.factors[0]: length for dim, length in zip(dims, lengths, strict=True) if dim.factors}
        factors = tuple(self.factor if name == self.factor.name else Factor(name, n) for name, n in sizes.items())
        (result,) = self.recorder.emit(
            OpKind.VIEW,
            function,
            Rule(operands, results, factors),
            (self.recorder.id(value, scope),),
            (value.dtype,),
            scope,
            function,
            is_pure=False,
        )
        return Tensor(result, shape, value.dtype)

    def _mark(self, value: Tensor) -> Tensor:
        self.per_trip.add(value.id)
        return value

    def _add_factor(self, start: int) -> None:
        """3. Give the factor to all ops that differ between trips."""
        builder = self.recorder.builder
        self.recorder.disown(builder.ops[start:])
        for index in range(start, len(builder.ops)):
            op = builder.ops[index]
            if not self.per_trip.intersection((*op.inputs, *op.outputs)):
                continue
            made = [tensor_id for tensor_id in op.outputs if tensor_id not in self.stacked]
            self.per_trip.update(made)
            starts = op.attribute("start")  # of a slice, for each dimension
            if isinstance(starts, tuple):
                op = replace(op, attributes=tuple(sorted({**dict(op.attributes), "start": (0, *starts)}.items())))
            builder.ops[index] = replace(op, rule=builder.shared(self._with_factor(op)))
            self._check(builder.ops[index])
            for tensor_id in made:
                tensor = builder.tensors[tensor_id]
                builder.tensors[tensor_id] = replace(tensor, shape=(self.factor.size, *tensor.shape))

    def _check(self, op: Op) -> None:
        try:
            check_rule(op)
        except GraphError as error:
            raise ImportModelError(
                f"a loop of {self.factor.size:,} trips cannot be counted as one: {error} Import a module with a "
                "shorter loop."
            ) from error

    def _with_factor(self, op: Op) -> Rule:
        first = Dim((self.factor.name,))
        sides = [
            tuple(
                (first, *dims) if tensor_id in self.per_trip else dims
                for tensor_id, dims in zip(ids, side, strict=True)
            )
            for ids, side in ((op.inputs, op.rule.operands), (op.outputs, op.rule.results))
        ]
        factors = op.rule.factors if self.factor in op.rule.factors else (self.factor, *op.rule.factors)
        return Rule(sides[0], sides[1], factors)

    def _left(self, value: Value, pair: tuple[Value, Value], scope: Scope) -> Value:
        """4. A value behind the loop."""
        if isinstance(value, Tensor) and value.id in self.per_trip:
            rest = _dims(value.shape)
            whole = Tensor(value.id, (self.factor.size, *value.shape), value.dtype)
            return self._view("last_trip", whole, ((Dim((self.factor.name,)), *rest),), (rest,), value.shape, scope)
        counted = _counted(*pair, self.factor.size)
        if isinstance(counted, Constant) and counted.value is not None and is_constant(value):
            return self.recorder.constant("", counted.shape, counted.dtype, counted.value)
        return value


def _dims(shape: tuple[int, ...]) -> Dims:
    return tuple(Dim((f"d{index}",)) for index in range(len(shape)))
