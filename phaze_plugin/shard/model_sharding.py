"""Tensor parallelism of a whole model: the choice of splits and layouts over all layers, and a bound under its time.

Every distinct layer is solved once, and then the layouts between layers are chosen (`shard_model`). Between layers an
activation [batch, sequence, ...] is whole or split along the sequence; other tensors are whole. Each distinct layer is
solved for every combination of what enters, what leaves and the layouts of its tied parameters
(`layer_combinations.py`): for all of them at once by elimination (`layer_tables.py`), or one after the other by a
solver (`layer_sharding.py`) where one is named or elimination would take too long. Then one combination is picked for
each layer (`choose_combinations`).

What depends on rules alone is worked out once in `ShardingTables` and serves all microbatch sizes of a model.

`least_model_seconds` is a lower bound on the time of a model that holds for every slicing and needs none. However an op
is split over tp devices, the largest part has at least 1/tp of its multiply-accumulates and of the bytes that its
operands have. Matrix products read their operands whether or not something is fused behind them, so that for the
forward ops of a layer, and likewise for its backward ops,

    seconds >= max( sum of macs / (tp x peak of all tensor cores),  sum of operand bytes / (tp x bandwidth) )

over the matrix ops alone. Vector work and collectives count as nothing, and neither does the padding of shapes. Where a
GPU's product kernels were measured, its peak and bandwidth are the largest shares of them that any product reaches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phaze.cost import Calibration, PriceTables, op_work
from phaze.cost.operator_work import read_bytes
from phaze.errors import GraphError, ShardError
from phaze.ir import Graph, Layer, Op, OpKind
from phaze.shard.elimination import Minimum
from phaze.shard.layer_combinations import (
    Combination,
    SequenceParallel,
    choose_combinations,
    combination_layouts,
    entering_names,
    leaving_names,
    parameters_read,
    sequence_layouts,
    tied_names,
)
from phaze.shard.layer_sharding import ShardedLayer, eliminated, shard_layer
from phaze.shard.layer_tables import MICROSECONDS, BoundaryChoice, LayerTables, layer_tables
from phaze.shard.layout import WHOLE, Layout, LayoutConstraint, OpSplit, Ways, check_constraints
from phaze.shard.mesh_axes import Axis
from phaze.shard.sharding_problem import (
    ShardingProblem,
    check_heads,
    compute_seconds,
    divides_experts,
    has_equal_splits,
    sequence_splits,
    splits_of_layer,
)
from phaze.solvers import AUTOMATIC_SOLVERS, SolverChain

__all__ = ["ShardOptions", "ShardedModel", "ShardingTables", "least_model_seconds", "shard_model", "shard_variants"]

_MOST_COMBINATIONS = 4096
"""For how many layouts of its tied parameters a layer is solved: some ten parameters with two each, which takes
seconds; models tie one or two, but a penalty on all weights ties them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """What the search may do: sequence parallelism, layout constraints, what the target can run, and who solves it.

    `expert_dims` and `expert_tp` are those of `ShardingProblem`.
    """

    sequence_parallel: SequenceParallel = SequenceParallel.FREE
    constraints: tuple[LayoutConstraint, ...] = ()
    may_stride_parameters: bool = True
    may_cut_parameters_twice: bool = True
    may_split_norms: bool = False
    expert_dims: Mapping[str, int] = field(default_factory=dict)
    expert_tp: int | None = None
    solver: SolverChain = AUTOMATIC_SOLVERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """The sharding of every layer (equal layers share one answer) and of every parameter.

    `sequence_parallel` is what was asked for; `is_sequence_split` says of each layer whether what leaves it is split.
    `expert_tp` says over how many of the devices each expert is cut; None where there are none, or where layers differ.
    """

    graph: Graph
    axis: Axis
    layers: tuple[ShardedLayer, ...]
    parameters: Mapping[str, Layout]
    is_sequence_split: tuple[bool, ...]
    sequence_parallel: SequenceParallel = SequenceParallel.OFF
    expert_tp: int | None = None

    @property
    def seconds(self) -> float:
        """Forward and backward of all layers, one after the other."""
        return sum(layer.seconds for layer in self.layers)


def shard_model(
    graph: Graph, axis: Axis, options: ShardOptions | None = None, tables: ShardingTables | None = None
) -> ShardedModel:
    """Shard every layer of a graph.

    `tables` are those of the same model at other microbatch sizes, where there are any. Raises ShardError where a layer
    is not tensor-parallel at this tp, or where constraints contradict each other or match nothing.
    """
    options = options or ShardOptions()
    (model,) = shard_variants(graph, axis, options, (options.sequence_parallel,), tables).values()
    return model


def shard_variants(
    graph: Graph,
    axis: Axis,
    options: ShardOptions | None = None,
    modes: Sequence[SequenceParallel] = (SequenceParallel.ON, SequenceParallel.OFF),
    tables: ShardingTables | None = None,
) -> dict[SequenceParallel, ShardedModel]:
    """The best sharding under each of several modes of sequence parallelism; modes that have none are left out.

    Ops are priced once for all modes. The mode of `options` is not read; `tables` are as in `shard_model`. Raises the
    first mode's ShardError where no mode has a sharding.
    """
    options, tables = options or ShardOptions(), tables or ShardingTables()
    check_constraints(options.constraints, graph.tensors)
    variants: dict[SequenceParallel, ShardedModel] = {}
    errors: list[ShardError] = []
    for mode in modes:
        try:
            variants[mode] = _shard(graph, axis, replace(options, sequence_parallel=mode), tables)
        except ShardError as error:
            errors.append(error)
    if errors and not variants:
        raise errors[0]
    return variants


def _shard(
    graph: Graph,
    axis: Axis,
    options: ShardOptions,
    tables: ShardingTables,
) -> ShardedModel:
    """The best sharding under one mode; `tables` keep what serves other modes, too."""
    answers: dict[str, _LayerAnswers] = {}
    for layer in graph.distinct_layers:
        try:
            answers[layer.key] = _answers(graph, layer, axis, options, tables)
        except (GraphError, ShardError) as error:  # a GraphError says which factor of a rule cannot be split
            raise ShardError(f"layer {layer.name!r}, {error}") from error
        if not answers[layer.key].seconds:
            raise ShardError(f"layer {layer.name!r} has no sharding {axis.tp} ways under these constraints.")
    chosen = choose_combinations(graph, {key: answer.seconds for key, answer in answers.items()}, options.solver)
    keys = [layer.key for layer in graph.layers]
    sharded = {
        (key, combination): answers[key].sharded(combination)
        for key, combination in dict.fromkeys(zip(keys, chosen, strict=True))
    }
    layers = tuple(sharded[key, combination] for key, combination in zip(keys, chosen, strict=True))
    parameters: dict[str, Layout] = {}
    for layer, answer in zip(graph.layers, layers, strict=True):
        # Equal layers share one answer under the first one's names, which are in the same order as this layer's.
        parameters |= dict(zip(parameters_read(graph, layer), answer.parameters.values(), strict=True))
    return ShardedModel(
        graph=graph,
        axis=axis,
        layers=layers,
        parameters=parameters,
        is_sequence_split=tuple(combination.leaves_split for combination in chosen),
        sequence_parallel=options.sequence_parallel,
        expert_tp=_expert_tp(graph, parameters, options.expert_dims, axis.tp),
    )


def _expert_tp(graph: Graph, parameters: Mapping[str, Layout], expert_dims: Mapping[str, int], tp: int) -> int | None:
    """Over how many devices each expert is cut, where that is the same in all layers and no device has more of them."""
    divided = {
        divides_experts(layout, dim, tp) if not graph.tensors[name].shape[dim] % tp else None
        for name, dim in expert_dims.items()
        if not (layout := parameters[name]).is_whole  # a bias behind the sum over an expert's parts
    }
    kind = divided.pop() if len(divided) == 1 else None
    return None if kind is None else 1 if kind else tp


@dataclass(frozen=True, slots=True)
class _LayerAnswers:
    """The least seconds of a layer under each combination that it can be sharded for, and the answers behind them."""

    seconds: Mapping[Combination, float]
    sharded: Callable[[Combination], ShardedLayer]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _KnownLayer:
    """What of a layer's problem does not depend on prices: its splits, what it is solved for, and its tables.

    It serves all modes of sequence parallelism: sequences may be split, and what a mode forbids is left out later. The
    tables are None where elimination would take too long or a solver is named.
    """

    problem: ShardingProblem
    splits: Mapping[str, list[OpSplit]]
    kept: _KeptValues
    tables: LayerTables | None


class ShardingTables:
    """What was worked out for the layers of one model: splits and tables whatever the microbatch size, prices of ops.

    Whoever shards a model at several microbatch sizes, cp or ep makes one of these and passes it on. Layers are known
    by their place in the model; what was worked out for one of another structure is not used.
    """

    def __init__(self) -> None:
        self.prices = PriceTables()
        self._known: dict[object, _KnownLayer] = {}
        self._priced: dict[object, _PricedLayer] = {}

    def layer(self, problem: ShardingProblem, options: ShardOptions) -> _KnownLayer:
        """What is known of a layer, worked out where it is not known yet; raises ShardError where it has no splits."""
        is_automatic = options.solver is AUTOMATIC_SOLVERS
        key = self._key(problem, options)
        known = self._known.get(key)
        if known is None or not has_equal_splits(known.problem, problem):
            problem = replace(problem, may_split_sequence=True)
            splits = splits_of_layer(problem, problem.ops)
            kept = _kept_values(problem, splits)
            kept.check_count(problem)
            tables = layer_tables(problem, splits, kept.variables(problem)) if is_automatic else None
            known = self._known[key] = _KnownLayer(problem=problem, splits=splits, kept=kept, tables=tables)
        return known

    def priced(self, problem: ShardingProblem, options: ShardOptions, known: _KnownLayer) -> _PricedLayer:
        """A layer that has tables with the prices of its ops, which serve every mode, and every ep where it may."""
        assert known.tables is not None
        key = (self._key(problem, options), problem.layer.key)
        priced = self._priced.get(key)
        if priced is None or priced.known is not known:
            priced = self._priced[key] = _PricedLayer.of(problem, known, known.tables, self.prices)
        return priced

    @staticmethod
    def _key(problem: ShardingProblem, options: ShardOptions) -> tuple[object, ...]:
        """What splits depend on; a layer without collectives is the same whatever ep divides experts of others."""
        axis, rules = (
            problem.axis,
            (
                options.constraints,
                options.may_stride_parameters,
                options.may_cut_parameters_twice,
                options.may_split_norms,
                options.expert_tp,
            ),
        )
        ep = axis.ep if any(op.kind is OpKind.COLLECTIVE for op in problem.ops) else 1
        return (problem.layer.index, (axis.tp, axis.cp, ep), rules, options.solver is AUTOMATIC_SOLVERS)


@dataclass(frozen=True, slots=True)
class _KeptValues:
    """What a layer is solved for: the values of what enters, of what leaves, and the layouts of each tied parameter."""

    enters: tuple[bool, ...]
    leaves: tuple[bool, ...]
    tied: tuple[tuple[Layout, ...], ...]

    def combinations(self) -> Iterator[Combination]:
        """Every combination of the values."""
        for enters_split, leaves_split in itertools.product(self.enters, self.leaves):
            for layouts in itertools.product(*self.tied):
                yield Combination(enters_split, leaves_split, layouts)

    def within(self, mode: SequenceParallel) -> _KeptValues:
        """What a mode of sequence parallelism leaves of the values; what has no sequence enters and leaves whole."""
        enters, leaves = (
            tuple(value for value in values if value in mode.may_be_split) or (False,)
            for values in (self.enters, self.leaves)
        )
        return _KeptValues(enters, leaves, self.tied)

    def check_count(self, problem: ShardingProblem) -> None:
        """Raise ShardError where there are too many combinations to try all."""
        count = math.prod(len(layouts) for layouts in self.tied)
        if count > _MOST_COMBINATIONS:
            names = tied_names(problem.graph, problem.layer)
            raise ShardError(
                f"layer {problem.layer.name!r} shares {len(names)} parameters with other layers ({names[0]!r}, ...), "
                f"which could be split in {count:,} ways together; use tp=1, or leave what reads them all, such as a "
                "penalty on weights, to the optimizer."
            )

    def places(self, combination: Combination) -> tuple[int, ...]:
        """The place of a combination's values among those of each variable."""
        ends = (self.enters.index(combination.enters_split), self.leaves.index(combination.leaves_split))
        return (*ends, *map(tuple.index, self.tied, combination.tied))

    def variables(self, problem: ShardingProblem) -> list[BoundaryChoice]:
        """The values as kept variables of the layer's tables."""
        graph, layer = problem.graph, problem.layer
        ends = ((self.enters, entering_names(graph, layer)), (self.leaves, leaving_names(graph, layer)))
        choices = []
        for values, names in ends:
            layouts = {
                name: [split if is_split else WHOLE for is_split in values]
                for name, split in sequence_layouts(graph, names, problem.axis).items()
            }
            choices.append(BoundaryChoice(len(values), layouts))
        tied = zip(tied_names(graph, layer), self.tied, strict=True)
        return choices + [BoundaryChoice(len(layouts), {name: layouts}) for name, layouts in tied]


def _kept_values(problem: ShardingProblem, splits: Mapping[str, Sequence[OpSplit]]) -> _KeptValues:
    """What a layer is solved for, whatever becomes of sequences."""
    graph, layer = problem.graph, problem.layer
    allowed = SequenceParallel.FREE.may_be_split
    return _KeptValues(
        enters=allowed if sequence_layouts(graph, layer.inputs, problem.axis) else (False,),
        leaves=allowed if sequence_layouts(graph, layer.outputs, problem.axis) else (False,),
        tied=tuple(_layouts_of_parameter(layer, splits, name) for name in tied_names(graph, layer)),
    )


def _layouts_of_parameter(layer: Layer, splits: Mapping[str, Sequence[OpSplit]], name: str) -> tuple[Layout, ...]:
    """The layouts that some split of the layer's ops gives a parameter."""
    layouts = (
        layout
        for op in layer.forward
        for split in splits[op.id]
        for operand, layout in zip(op.inputs, split.operands, strict=True)
        if operand == name
    )
    return tuple(dict.fromkeys(layouts))


def _answers(
    graph: Graph,
    layer: Layer,
    axis: Axis,
    options: ShardOptions,
    tables: ShardingTables,
) -> _LayerAnswers:
    """The answers of a layer under all combinations, without a solver where none is named and tables stay small."""
    problem = ShardingProblem(
        graph=graph,
        layer=layer,
        axis=axis,
        constraints=options.constraints,
        may_split_sequence=options.sequence_parallel is not SequenceParallel.OFF,
        may_stride_parameters=options.may_stride_parameters,
        may_cut_parameters_twice=options.may_cut_parameters_twice,
        may_split_norms=options.may_split_norms,
        expert_dims=options.expert_dims,
        expert_tp=options.expert_tp,
        solver=options.solver,
    )
    # Heads that do not divide are an error under every combination, so that they are named and not passed over below.
    for op in layer.forward:
        check_heads(problem, op)
    try:
        known = tables.layer(problem, options)
    except ShardError:
        if not options.constraints:
            raise
        return _solved_answers(problem, ())
    kept = known.kept.within(options.sequence_parallel)
    if known.tables is None:
        return _solved_answers(problem, tuple(kept.combinations()))
    answers = tables.priced(problem, options, known).answers(problem, kept)
    if not answers.seconds and not options.constraints:
        splits_of_layer(problem, problem.ops)  # which says what op has no split, where that is the reason
    return answers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PricedLayer:
    """A layer at one microbatch size: the seconds of its splits, and the least cost of all its combinations.

    `minima` are those found so far, by whether sequences may be split inside of the layer.
    """

    known: _KnownLayer
    tables: LayerTables
    compute_s: Mapping[tuple[str, Ways], float]
    minima: dict[bool, Minimum]

    @classmethod
    def of(cls, problem: ShardingProblem, known: _KnownLayer, tables: LayerTables, prices: PriceTables) -> _PricedLayer:
        """The layer with prices of its ops."""
        table = prices.on(problem.axis.cluster.accelerator, problem.axis.calibration)
        compute_s = compute_seconds(problem, problem.ops, known.splits, table=table)
        return cls(known=known, tables=tables, compute_s=compute_s, minima={})

    def minimum(self, problem: ShardingProblem) -> Minimum:
        """The least cost where sequences may be split inside of the layer, or where no op may split one."""
        if problem.may_split_sequence not in self.minima:
            forbidden = set() if problem.may_split_sequence else sequence_splits(problem, self.known.splits)
            seconds = {**self.compute_s, **dict.fromkeys(forbidden, math.inf)}
            minimum = self.tables.minimise(self.tables.prices(problem, seconds))
            self.minima[problem.may_split_sequence] = minimum
        return self.minima[problem.may_split_sequence]

    def answers(self, problem: ShardingProblem, kept: _KeptValues) -> _LayerAnswers:
        """The answers under all combinations of some values at once."""
        minimum, places = self.minimum(problem), self.known.kept.places

        def sharded(combination: Combination) -> ShardedLayer:
            chosen = self.tables.chosen(minimum, places(combination))
            return eliminated(_at(problem, combination), chosen, self.compute_s)

        costs = {
            combination: float(minimum.costs[places(combination)]) / MICROSECONDS for combination in kept.combinations()
        }
        return _LayerAnswers({combination: cost for combination, cost in costs.items() if math.isfinite(cost)}, sharded)


def _solved_answers(problem: ShardingProblem, combinations: Sequence[Combination]) -> _LayerAnswers:
    """The answers under each combination by a solver; those that constraints and tied layouts forbid are left out."""
    answers: dict[Combination, ShardedLayer] = {}
    for combination in combinations:
        try:
            answers[combination] = shard_layer(_at(problem, combination))
        except ShardError:
            if not combination.tied and not problem.constraints:
                raise
    return _LayerAnswers({combination: answer.seconds for combination, answer in answers.items()}, answers.__getitem__)


def _at(problem: ShardingProblem, combination: Combination) -> ShardingProblem:
    """The problem with the layouts of a combination."""
    layouts = combination_layouts(problem.graph, problem.layer, problem.axis, combination)
    return replace(problem, layouts=layouts)


_SLOWED_TO = "float32"
"""The type at whose rate a stack may run products that are not aligned; on some chip that rate may be the higher."""


def least_model_seconds(graph: Graph, axis: Axis, *, priced_elsewhere: Collection[str] = ()) -> float:
    """Seconds that one microbatch takes at least, forward and backward through all layers one after the other.

    It holds for every slicing and schedule on the axis. Plugins may price ops below any roofline: the kinds and
    functions that they price are named in `priced_elsewhere` and count as nothing.
    """
    once = {
        layer.key: sum(
            _least_pass_s(graph, axis, (op for op in ops if not _is_named(op, priced_elsewhere)))
            for ops in (layer.forward, layer.backward)
        )
        for layer in graph.distinct_layers
    }
    return sum(once[layer.key] for layer in graph.layers)


def _is_named(op: Op, names: Collection[str]) -> bool:
    return not {f"{op.kind}.{op.function}", op.function, str(op.kind)}.isdisjoint(names)


def _least_pass_s(graph: Graph, axis: Axis, ops: Iterable[Op]) -> float:
    """The bound of the module's docstring for the ops of one pass of one layer."""
    chip, calibration = axis.cluster.accelerator, axis.calibration
    kernels = calibration.products
    share = _largest_product_share(calibration) * (max(kernels.arithmetic, kernels.attention) if kernels else 1.0)
    product_s = moved_bytes = 0.0
    for op in ops:
        if not op.kind.is_matrix:
            continue
        moved_bytes += sum(read_bytes(op, graph.tensors))
        for product in op_work(op, graph.tensors).products:
            peak = max(chip.peak_flops_per_s(product.dtype), chip.peak_flops_per_s(_SLOWED_TO))
            product_s += 2 * product.macs / (peak * share)
    memory_s = moved_bytes / (chip.hbm_bandwidth_bytes_per_s * _largest_memory_share(calibration))
    return max(product_s, memory_s) / axis.tp


def _largest_memory_share(calibration: Calibration) -> float:
    """The share of HBM's bandwidth at which no product moves its operands any quicker."""
    if calibration.products is None:
        return calibration.memory
    return max(calibration.memory, calibration.products.memory * _largest_product_share(calibration))


def _largest_product_share(calibration: Calibration) -> float:
    """The share of the measured or the ideal rate that products of no type exceed."""
    return calibration.matrix * max(1.0, calibration.narrow_matrix)
