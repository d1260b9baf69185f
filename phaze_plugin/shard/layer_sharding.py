"""Tensor parallelism of one layer: how each of its ops is split, chosen exactly by an integer program.

Variables
    x[o,k]    binary, 1 where op o of the layer's forward or backward runs by its split k (`ShardingProgram.__init__`)
    m[r,p,q]  from 0 to 1, 1 where reader r gets its tensor from layout p into layout q (`_move_tensor`)
    M[T,p,q]  from 0 to 1, 1 where tensor T is moved from layout p to layout q at least once in a pass (`_move_tensor`)

Objective, in microseconds (`_split_costs` for x, `_move_variables` for M)
    minimise  sum x[o,k] seconds[o,k] + sum M[T,p,q] move_s(p, q, bytes of T)

Constraints
 1. each op has one split:          sum_k x[o,k] = 1                                       `one_split_per_op`
 2. backward follows forward:       sum over k of o that split w of x[o,k] = the same sum
                                    of its forward op, for every w                          `backward_follows_forward`
 3. a parameter has one layout:     all its readers, and the op that makes its gradient,
                                    choose splits that ask for the same layout              `parameters_have_one_layout`
 4. a tensor T made in layout p and wanted by reader r in layout q moves:
                                    sum_q m[r,p,q] = made[T,p],
                                    sum_p m[r,p,q] = wanted[r,q]                            `tensors_move`
 5. readers share a move:           M[T,p,q] >= m[r,p,q] for every reader of the same pass  `tensors_move`

made[T,p] and wanted[r,q] are sums of x. By constraint 2 a backward op splits what its forward op splits; sums of
gradients and views choose for themselves. Layouts of boundary tensors are given; gradients of boundary tensors have the
layouts of the tensors. Forward tensors that backward reads are kept as they were made and moved again when they are
read: what is kept stays small, and the second move is paid. Seconds are the local op's, spread over all cores, at its
largest shard, plus the reductions that settle its partial results (`sharding_problem.seconds_of_splits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phaze.errors import ShardError
from phaze.ir import Op, Phase, Role
from phaze.shard.layer_tables import MICROSECONDS, PARTIAL_PENALTY, layer_tables
from phaze.shard.layout import WHOLE, Layout, OpSplit, Ways
from phaze.shard.mesh_axes import IMPOSSIBLE, collective_of
from phaze.shard.sharding_problem import (
    ShardingProblem,
    check_heads,
    chooses_its_split,
    compute_seconds,
    leaving_tensors,
    seconds_of_splits,
    settle_s,
    splits_of_layer,
)
from phaze.solvers import AUTOMATIC_SOLVERS, ProblemBuilder, SolveStatus, WorkLimits, solve_linear

__all__ = ["Reshard", "ShardedLayer", "ShardingProgram", "add_up", "reshards_of_layer", "shard_layer", "unsharded"]

NO_SOLVER = "eliminated exactly, no solver"
"""How an answer was proven that needed no solver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedLayer:
    """The chosen split of every op, the layout of every parameter, and the seconds they take (compute, moves).

    `method` says how the splits were proven the cheapest: without a solver, or by which.
    """

    problem: ShardingProblem
    splits: Mapping[str, OpSplit]
    parameters: Mapping[str, Layout]
    compute_s: float
    move_s: float
    method: str = ""

    @property
    def seconds(self) -> float:
        """What was minimised."""
        return self.compute_s + self.move_s


@dataclass(frozen=True, slots=True)
class Reshard:
    """A tensor that some reader needs in another layout than it has, in one pass."""

    tensor: str
    before: Layout
    after: Layout
    phase: Phase


def shard_layer(problem: ShardingProblem) -> ShardedLayer:
    """The cheapest splits of a layer.

    Raises ShardError where the layer is not tensor-parallel at this tp, naming the op, factor and size, or where
    constraints leave an op without a split.
    """
    for op in problem.layer.forward:
        check_heads(problem, op)
    splits = splits_of_layer(problem, problem.ops)
    tables = layer_tables(problem, splits) if problem.solver is AUTOMATIC_SOLVERS else None
    if tables is None:
        return ShardingProgram(problem, splits, seconds_of_splits(problem, problem.ops, splits)).solve()
    compute_s = compute_seconds(problem, problem.ops, splits)
    minimum = tables.minimise(tables.prices(problem, compute_s))
    if not np.isfinite(minimum.costs):
        raise no_sharding(problem, "no splits of its ops agree")
    return eliminated(problem, tables.chosen(minimum), compute_s)


def eliminated(
    problem: ShardingProblem, chosen: Mapping[str, OpSplit], compute_s: Mapping[tuple[str, Ways], float]
) -> ShardedLayer:
    """The answer that consists of chosen splits, which were found without a solver."""
    return add_up(problem, chosen, sum(compute_s[op.id, chosen[op.id].ways] for op in problem.ops), NO_SOLVER)


def no_sharding(problem: ShardingProblem, reason: object) -> ShardError:
    """The error of a layer that has no sharding."""
    return ShardError(
        f"layer {problem.layer.name!r} has no sharding {problem.axis.tp} ways under these constraints ({reason})."
    )


def unsharded(problem: ShardingProblem) -> ShardedLayer:
    """The layer on one device, or on each of several that do the same: everything whole, no collectives."""
    splits = {}
    for op in problem.ops:
        results = (WHOLE,) * len(op.outputs)
        splits[op.id] = OpSplit(ways=(), operands=(WHOLE,) * len(op.inputs), made=results, results=results)
    return add_up(problem, splits, 0.0)


def add_up(problem: ShardingProblem, chosen: Mapping[str, OpSplit], compute_s: float, method: str = "") -> ShardedLayer:
    """Add up what chosen splits cost in moves, from the layouts alone."""
    move_s = sum(settle_s(problem, op, chosen[op.id]) for op in problem.ops)
    move_s += sum(
        problem.axis.move_s(move.before, move.after, problem.graph.tensors[move.tensor].size_bytes)
        for move in reshards_of_layer(problem, chosen)
    )
    parameters = {
        name: layout
        for op in problem.layer.forward
        for name, layout in zip(op.inputs, chosen[op.id].operands, strict=True)
        if problem.graph.tensors[name].role is Role.PARAMETER
    }
    return ShardedLayer(
        problem=problem, splits=chosen, parameters=parameters, compute_s=compute_s, move_s=move_s, method=method
    )


def reshards_of_layer(problem: ShardingProblem, chosen: Mapping[str, OpSplit]) -> list[Reshard]:
    """Every move that some reader needs and that takes a collective, each once, in order of first need."""
    made = {name: layout for op in problem.ops for name, layout in zip(op.outputs, chosen[op.id].results, strict=True)}
    needed = [
        Reshard(name, made.get(name, problem.boundary_layout(name)), wanted, op.phase)
        for op in problem.ops
        for name, wanted in zip(op.inputs, chosen[op.id].operands, strict=True)
        if problem.graph.tensors[name].role is None
    ]
    needed += [
        Reshard(name, made[name], problem.boundary_layout(name), phase)
        for name, phase in leaving_tensors(problem.graph, problem.layer)
    ]
    return list(dict.fromkeys(move for move in needed if collective_of(move.before, move.after) is not None))


Variables = list[int]
"""Columns of the program, to be summed."""

Move = tuple[Layout, Layout]
"""The layouts before and after."""


class ShardingProgram:
    """Variables and rows of the integer program, numbered as in the module's docstring."""

    def __init__(
        self,
        problem: ShardingProblem,
        splits: Mapping[str, list[OpSplit]],
        seconds: Mapping[str, list[float]],
    ) -> None:
        self.problem, self.splits, self.seconds = problem, splits, seconds
        self.builder = ProblemBuilder(f"tensor parallelism of {problem.layer.name}")
        self.chosen: dict[str, Variables] = {
            op.id: self.builder.binaries(len(splits[op.id]), cost=self._split_costs(op)).tolist() for op in problem.ops
        }
        self.maker_of = {name: (op, index) for op in problem.ops for index, name in enumerate(op.outputs)}
        self.one_split_per_op()
        self.backward_follows_forward()
        self.parameters_have_one_layout()
        self.tensors_move()

    def _split_costs(self, op: Op) -> list[float]:
        penalties = [PARTIAL_PENALTY * split.results[0].is_partial for split in self.splits[op.id]]
        return [
            MICROSECONDS * seconds + penalty for seconds, penalty in zip(self.seconds[op.id], penalties, strict=True)
        ]

    def one_split_per_op(self) -> None:
        """Add constraint 1."""
        for op in self.problem.ops:
            self._row(self.chosen[op.id], [], 1.0)

    def backward_follows_forward(self) -> None:
        """Add constraint 2."""
        for op in self.problem.ops:
            if op.phase is Phase.FORWARD or chooses_its_split(op):
                continue
            names = {factor.name for factor in op.rule.factors}
            backward, forward = self._by_ways(op.id, names), self._by_ways(op.gradient_of, names)
            for ways in dict.fromkeys((*backward, *forward)):
                self._row(backward.get(ways, []), forward.get(ways, []), 0.0)

    def _by_ways(self, op_id: str, names: set[str]) -> dict[Ways, Variables]:
        """The variables of an op grouped by how they split the named factors."""
        groups: dict[Ways, Variables] = {}
        for variable, split in zip(self.chosen[op_id], self.splits[op_id], strict=True):
            groups.setdefault(tuple(pair for pair in split.ways if pair[0] in names), []).append(variable)
        return groups

    def parameters_have_one_layout(self) -> None:
        """Add constraint 3."""
        users: dict[str, list[dict[Layout, Variables]]] = {}
        for op in self.problem.ops:
            for index, name in enumerate(op.inputs):
                if self.problem.graph.tensors[name].role is Role.PARAMETER:
                    users.setdefault(name, []).append(self._by_operand_layout(op, index))
        for parameter, gradient in self.problem.graph.gradients:
            if parameter in users and gradient in self.maker_of:
                users[parameter].append(self._by_result_layout(*self.maker_of[gradient]))
        for first, *further in users.values():
            for user in further:
                for layout in dict.fromkeys((*first, *user)):
                    self._row(first.get(layout, []), user.get(layout, []), 0.0)

    def tensors_move(self) -> None:
        """Add constraints 4 and 5."""
        readers: dict[tuple[str, Phase], list[dict[Layout, Variables]]] = {}
        for op in self.problem.ops:
            for index, name in enumerate(op.inputs):
                if self.problem.graph.tensors[name].role is None:
                    readers.setdefault((name, op.phase), []).append(self._by_operand_layout(op, index))
        for name, phase in leaving_tensors(self.problem.graph, self.problem.layer):
            always = self._constant_one()
            readers.setdefault((name, phase), []).append({self.problem.boundary_layout(name): always})
        for (name, _), wanted in readers.items():
            self._move_tensor(name, wanted)

    def _move_tensor(self, name: str, readers: list[dict[Layout, Variables]]) -> None:
        """Constraints 4 and 5 of one tensor in one pass; each reader gives its variables by the layout it wants."""
        made = self._made_in(name)
        wanted = dict.fromkeys(layout for reader in readers for layout in reader)
        costs = {(before, after): self._move_s(name, before, after) for before in made for after in wanted}
        dear = [move for move, seconds in costs.items() if 0 < seconds < IMPOSSIBLE]
        shared = self._move_variables(dear, [costs[move] for move in dear])
        for reader in readers:
            possible = [move for move in costs if move[1] in reader and costs[move] < IMPOSSIBLE]
            flow = self._move_variables(possible, [0.0] * len(possible))
            for before, variables in made.items():
                self._row([flow[move] for move in possible if move[0] == before], variables, 0.0)
            for after, variables in reader.items():
                self._row([flow[move] for move in possible if move[1] == after], variables, 0.0)
            pairs = [[shared[move], flow[move]] for move in possible if move in shared]
            if pairs:
                self.builder.rows(pairs, [1.0, -1.0], lower=0.0)

    def _made_in(self, name: str) -> dict[Layout, Variables]:
        """The variables that make a tensor, by its layout; one that enters the layer has the layout that is given."""
        if name in self.maker_of:
            return self._by_result_layout(*self.maker_of[name])
        return {self.problem.boundary_layout(name): self._constant_one()}

    def _constant_one(self) -> Variables:
        variables: Variables = self.builder.variables(1, lower=1.0, upper=1.0).tolist()
        return variables

    def _move_s(self, name: str, before: Layout, after: Layout) -> float:
        graph = self.problem.graph
        # A view of a parameter stays where the parameter is: parameters are never gathered.
        if graph.tensors[graph.storage(name)].role is Role.PARAMETER and before != after:
            return IMPOSSIBLE
        return self.problem.axis.move_s(before, after, graph.tensors[name].size_bytes)

    def _by_operand_layout(self, op: Op, index: int) -> dict[Layout, Variables]:
        return self._grouped(op, [split.operands[index] for split in self.splits[op.id]])

    def _by_result_layout(self, op: Op, index: int) -> dict[Layout, Variables]:
        return self._grouped(op, [split.results[index] for split in self.splits[op.id]])

    def _grouped(self, op: Op, layouts: Sequence[Layout]) -> dict[Layout, Variables]:
        """An op's variables by the layout that each of its splits gives a tensor."""
        groups: dict[Layout, Variables] = {}
        for variable, layout in zip(self.chosen[op.id], layouts, strict=True):
            groups.setdefault(layout, []).append(variable)
        return groups

    def _move_variables(self, moves: list[Move], seconds: list[float]) -> dict[Move, int]:
        """A variable from 0 to 1 for each move, at the cost of its seconds."""
        costs = [MICROSECONDS * cost for cost in seconds]
        return dict(zip(moves, self.builder.variables(len(moves), upper=1.0, cost=costs).tolist(), strict=True))

    def _row(self, plus: Variables, minus: Variables, value: float) -> None:
        """The sum of some variables less that of others equals a value."""
        coefficients = [1.0] * len(plus) + [-1.0] * len(minus)
        self.builder.rows([*plus, *minus], coefficients, lower=value, upper=value)

    def solve(self) -> ShardedLayer:
        """The cheapest splits; raises ShardError where there are none."""
        result = solve_linear(self.builder.build(), WorkLimits(), self.problem.solver)
        if result.status is not SolveStatus.OPTIMAL or result.solution is None:
            raise no_sharding(self.problem, f"{result.status}: {result.report}")
        chosen = {
            op.id: next(
                split
                for split, variable in zip(self.splits[op.id], self.chosen[op.id], strict=True)
                if result.solution[variable] > 0.5
            )
            for op in self.problem.ops
        }
        return add_up(self.problem, chosen, self._compute_s(chosen), f"integer program on {result.report.solver}")

    def _compute_s(self, chosen: Mapping[str, OpSplit]) -> float:
        """Seconds of the local ops alone: those of the splits, less the collectives that belong to the ops."""
        return sum(
            self.seconds[op.id][self.splits[op.id].index(chosen[op.id])] - settle_s(self.problem, op, chosen[op.id])
            for op in self.problem.ops
        )
