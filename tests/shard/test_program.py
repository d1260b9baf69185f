"""The integer program finds the least cost over all strategies."""

import itertools
import math

import pytest
from sharding import whole_task

from phaze.ir import DType, Graph, GraphBuilder, Op, OpKind, Phase, Role
from phaze.shard import LayerTask, Layout, Strategy, shard_layer
from phaze.shard.candidates import is_free, layer_strategies, strategy_seconds
from phaze.shard.moves import is_possible
from phaze.shard.task import add_up, settle_s


def two_linear_maps(first: int, second: int, *, has_residual: bool) -> Graph:
    """x -> linear -> (gelu) -> linear (-> + x) -> mean."""
    builder = GraphBuilder("two", dtype=DType.BFLOAT16)
    sizes = {"b": 1, "s": 64, "i": first, "o": second}
    x = builder.argument("x", (1, 64, first), Role.BATCH)
    up, down = builder.parameter("up", second, first), builder.parameter("down", first, second)
    (y,) = builder.add("first", OpKind.CONTRACTION, "einsum", builder.rule("b s i, o i -> b s o", sizes), (x, up))
    (y,) = builder.add("second", OpKind.CONTRACTION, "einsum", builder.rule("b s o, i o -> b s i", sizes), (y, down))
    if has_residual:
        (y,) = builder.add("sum", OpKind.ELEMENTWISE, "add", builder.rule("b s i, b s i -> b s i", sizes), (x, y))
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", builder.rule("b s i -> .", sizes), (y,))
    return builder.build((loss,)).with_backward()


def brute_force(task: LayerTask) -> float:
    """The least seconds over every combination of strategies that obeys the rules, each added up plainly."""
    ops = (*task.layer.forward, *task.layer.backward)
    strategies = layer_strategies(task, ops)
    seconds = strategy_seconds(task, ops, strategies)
    best = math.inf
    for choice in itertools.product(*(range(len(strategies[op.id])) for op in ops)):
        chosen = {op.id: strategies[op.id][index] for op, index in zip(ops, choice, strict=True)}
        if not obeys(task, ops, chosen):
            continue
        work = sum(
            seconds[op.id][index] - settle_s(task, op, chosen[op.id]) for op, index in zip(ops, choice, strict=True)
        )
        best = min(best, add_up(task, chosen, work).seconds)
    return best


def obeys(task: LayerTask, ops: tuple[Op, ...], chosen: dict[str, Strategy]) -> bool:
    made = {name: layout for op in ops for name, layout in zip(op.outputs, chosen[op.id].results, strict=True)}
    parameters: dict[str, Layout] = {}
    for op in ops:
        if op.phase is Phase.BACKWARD and not is_free(op):
            names = {factor.name for factor in op.rule.factors}
            asked = tuple(pair for pair in chosen[op.gradient_of].ways if pair[0] in names)
            if chosen[op.id].ways != asked:
                return False
        for name, layout in zip(op.inputs, chosen[op.id].operands, strict=True):
            if task.graph.tensors[name].role is Role.PARAMETER and parameters.setdefault(name, layout) != layout:
                return False
            if name in made and not is_possible(made[name], layout):
                return False
    leaves_whole = all(is_possible(made[name], Layout()) for name in task.layer.outputs)
    return leaves_whole and all(made[gradient] == parameters[name] for name, gradient in task.graph.gradients)


CASES = [(2, 64, 256, False), (4, 1024, 64, False), (4, 48, 48, False), (2, 48, 48, True)]
MORE = [(w, f, s, r) for w in (2, 4) for f, s in ((64, 256), (1024, 64), (48, 48)) for r in (False, True)]


@pytest.mark.parametrize(
    ("width", "first", "second", "has_residual"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE if case not in CASES)],
)
def test_no_combination_of_strategies_is_cheaper(width: int, first: int, second: int, has_residual: bool) -> None:
    task = whole_task(two_linear_maps(first, second, has_residual=has_residual), width)
    assert shard_layer(task).seconds == pytest.approx(brute_force(task), rel=1e-6)
