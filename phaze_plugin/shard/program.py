"""Tensor parallelism of one layer, exactly, as an integer program.

For every op o of the layer's forward and backward, x[o,k] = 1 where it runs by its strategy k. A backward op splits
what its forward op splits; sums of gradients and views choose for themselves.

    minimise    sum x[o,k] seconds[o,k] + sum M[T,p,q] move_s(p, q, bytes of T)

 1. one strategy per op:           sum_k x[o,k] = 1
 2. backward follows forward:      sum over k of o with split w of x[o,k] = the same of its forward op
 3. a parameter has one layout:    x[o,k] is 0 for strategies that ask for another than z[parameter]
 4. a tensor T made in layout p and wanted by reader r in layout q moves:
                                   sum_q m[r,p,q] = made[T,p],  sum_p m[r,p,q] = wanted[r,q]
 5. readers share a move:          M[T,p,q] >= m[r,p,q] for every reader of the same pass

made[T,p] and wanted[r,q] are sums of x. Layouts of boundary tensors are given; gradients of boundary tensors have the
layouts of the tensors. Forward tensors that backward reads are kept as they were made and moved again when they are
read: what is kept stays small, and the second move is paid. Seconds are the local op's, spread over all cores, at its
largest shard, plus the reductions that settle its partial results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phaze.errors import ShardError
from phaze.ir import Op, Phase, Role
from phaze.shard.candidates import check_heads, is_free, layer_strategies, strategy_seconds
from phaze.shard.layout import WHOLE, Layout
from phaze.shard.moves import IMPOSSIBLE
from phaze.shard.strategies import Strategy, Ways
from phaze.shard.task import LayerTask, ShardedLayer, add_up, leaving, settle_s
from phaze.solvers import ProblemBuilder, SolveStatus, WorkLimits, solve_linear

__all__ = ["ShardingProgram", "shard_layer"]

MICROSECONDS = 1e6
PARTIAL_PENALTY = 1e-3
"""Microseconds charged for leaving a sum partial: between equal answers, the one that settles it at once wins."""


def shard_layer(task: LayerTask) -> ShardedLayer:
    """The cheapest strategies of a layer.

    Raises ShardError where the layer is not tensor-parallel at this width, naming the op, factor and size, or where
    constraints leave an op without a strategy.
    """
    ops = (*task.layer.forward, *task.layer.backward)
    for op in task.layer.forward:
        check_heads(task, op)
    strategies = layer_strategies(task, ops)
    seconds = strategy_seconds(task, ops, strategies)
    program = ShardingProgram(task, ops, strategies, seconds)
    return program.solve()


Terms = list[int]
Move = tuple[Layout, Layout]


class ShardingProgram:
    """Variables and rows of the integer program, numbered as in the module's docstring."""

    def __init__(
        self,
        task: LayerTask,
        ops: Sequence[Op],
        strategies: Mapping[str, list[Strategy]],
        seconds: Mapping[str, list[float]],
    ) -> None:
        self.task, self.ops, self.strategies, self.seconds = task, ops, strategies, seconds
        self.builder = ProblemBuilder(f"tensor parallelism of {task.layer.name}")
        self.chosen = {
            op.id: self.builder.binaries(len(strategies[op.id]), cost=self._costs(op)).tolist() for op in ops
        }
        self.made = {name: (op, index) for op in ops for index, name in enumerate(op.outputs)}
        self.one_strategy_per_op()
        self.backward_follows_forward()
        self.parameters_have_one_layout()
        self.tensors_move()

    def _costs(self, op: Op) -> list[float]:
        penalties = [PARTIAL_PENALTY * strategy.results[0].is_partial for strategy in self.strategies[op.id]]
        return [MICROSECONDS * s + penalty for s, penalty in zip(self.seconds[op.id], penalties, strict=True)]

    def one_strategy_per_op(self) -> None:
        """Constraint 1."""
        for op in self.ops:
            self._row(self.chosen[op.id], [], 1.0)

    def backward_follows_forward(self) -> None:
        """Constraint 2."""
        for op in self.ops:
            if op.phase is Phase.FORWARD or is_free(op):
                continue
            names = {factor.name for factor in op.rule.factors}
            mine, theirs = self._by_ways(op.id, names), self._by_ways(op.gradient_of, names)
            for ways in dict.fromkeys((*mine, *theirs)):
                self._row(mine.get(ways, []), theirs.get(ways, []), 0.0)

    def _by_ways(self, op_id: str, names: set[str]) -> dict[Ways, Terms]:
        groups: dict[Ways, Terms] = {}
        for variable, strategy in zip(self.chosen[op_id], self.strategies[op_id], strict=True):
            groups.setdefault(tuple(pair for pair in strategy.ways if pair[0] in names), []).append(variable)
        return groups

    def parameters_have_one_layout(self) -> None:
        """Constraint 3; a parameter's gradient has the parameter's layout, too."""
        asked: dict[str, list[dict[Layout, Terms]]] = {}
        for op in self.ops:
            for index, name in enumerate(op.inputs):
                if self.task.graph.tensors[name].role is Role.PARAMETER:
                    asked.setdefault(name, []).append(self._by_layout(op, index, is_result=False))
        for parameter, gradient in self.task.graph.gradients:
            if parameter in asked and gradient in self.made:
                op, index = self.made[gradient]
                asked[parameter].append(self._by_layout(op, index, is_result=True))
        for first, *others in asked.values():
            for other in others:
                for layout in dict.fromkeys((*first, *other)):
                    self._row(first.get(layout, []), other.get(layout, []), 0.0)

    def tensors_move(self) -> None:
        """Constraints 4 and 5."""
        readers: dict[tuple[str, Phase], list[dict[Layout, Terms]]] = {}
        for op in self.ops:
            for index, name in enumerate(op.inputs):
                if self.task.graph.tensors[name].role is None:
                    readers.setdefault((name, op.phase), []).append(self._by_layout(op, index, is_result=False))
        for name, phase in leaving(self.task.graph, self.task.layer):
            always = self.builder.variables(1, lower=1.0, upper=1.0).tolist()
            readers.setdefault((name, phase), []).append({self._given(name): always})
        for (name, _), wanted in readers.items():
            self._move(name, wanted)

    def _given(self, name: str) -> Layout:
        return self.task.layouts.get(name, WHOLE)

    def _move(self, name: str, wanted: list[dict[Layout, Terms]]) -> None:
        made = self._made_in(name)
        size = self.task.graph.tensors[name].size_bytes
        asked = dict.fromkeys(q for reader in wanted for q in reader)
        costs = {(p, q): self._move_s(name, p, q, size) for p in made for q in asked}
        dear = [pair for pair, seconds in costs.items() if 0 < seconds < IMPOSSIBLE]
        shared = self._variables(dear, [costs[pair] for pair in dear])
        for reader in wanted:
            possible = [pair for pair in costs if pair[1] in reader and costs[pair] < IMPOSSIBLE]
            flow = self._variables(possible, [0.0] * len(possible))
            for p, terms in made.items():
                self._row([flow[pair] for pair in possible if pair[0] == p], terms, 0.0)
            for q, terms in reader.items():
                self._row([flow[pair] for pair in possible if pair[1] == q], terms, 0.0)
            both = [[shared[pair], flow[pair]] for pair in possible if pair in shared]
            if both:
                self.builder.rows(both, [1.0, -1.0], lower=0.0)

    def _made_in(self, name: str) -> dict[Layout, Terms]:
        if name in self.made:
            op, index = self.made[name]
            return self._by_layout(op, index, is_result=True)
        return {self._given(name): self.builder.variables(1, lower=1.0, upper=1.0).tolist()}

    def _move_s(self, name: str, before: Layout, after: Layout, size: int) -> float:
        storage = self.task.graph.tensors[self.task.graph.storage(name)]
        if storage.role is Role.PARAMETER and before != after:
            return IMPOSSIBLE
        return self.task.axis.move_s(before, after, size)

    def _by_layout(self, op: Op, index: int, *, is_result: bool) -> dict[Layout, Terms]:
        groups: dict[Layout, Terms] = {}
        for variable, strategy in zip(self.chosen[op.id], self.strategies[op.id], strict=True):
            layout = (strategy.results if is_result else strategy.operands)[index]
            groups.setdefault(layout, []).append(variable)
        return groups

    def _variables(self, moves: list[Move], seconds: list[float]) -> dict[Move, int]:
        """A variable from 0 to 1 for each move."""
        costs = [MICROSECONDS * cost for cost in seconds]
        return dict(zip(moves, self.builder.variables(len(moves), upper=1.0, cost=costs).tolist(), strict=True))

    def _row(self, plus: Terms, minus: Terms, value: float) -> None:
        values = [1.0] * len(plus) + [-1.0] * len(minus)
        self.builder.rows([*plus, *minus], values, lower=value, upper=value)

    def solve(self) -> ShardedLayer:
        """The cheapest strategies; raises ShardError where there are none."""
        result = solve_linear(self.builder.build(), WorkLimits())
        if result.status is not SolveStatus.OPTIMAL or result.solution is None:
            raise ShardError(
                f"layer {self.task.layer.name!r} has no sharding {self.task.axis.width} ways under these constraints "
                f"({result.status}: {result.report})."
            )
        chosen = {
            op.id: next(
                strategy
                for strategy, variable in zip(self.strategies[op.id], self.chosen[op.id], strict=True)
                if result.solution[variable] > 0.5
            )
            for op in self.ops
        }
        return add_up(self.task, chosen, self._compute_s(chosen))

    def _compute_s(self, chosen: Mapping[str, Strategy]) -> float:
        return sum(
            self.seconds[op.id][self.strategies[op.id].index(chosen[op.id])] - settle_s(self.task, op, chosen[op.id])
            for op in self.ops
        )
