"""The loss of one microbatch on the devices of one data-parallel copy: gathers, layouts between layers, recomputation.

Everything here runs where the data and pipeline axes are manual (each device sees its own part). The tensor axis is
left to the compiler, which follows the layouts of the parameters; between layers it is told the plan's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec

from phaze.backends.jax.parameter_storage import ParameterStorage, gather_shards
from phaze.backends.jax.recompute_in_backward import keep_only_what_mode_allows, with_recomputed_attention
from phaze.backends.jax.tensor_parallel_products import (
    vectors_to_gather,
    with_exchanged_tiles,
    with_tensor_parallel_products,
)
from phaze.backends.jax.tensor_parts import FusedView
from phaze.backends.jax.traced_loss import (
    Equation,
    LayerScan,
    LayerSegment,
    TracedLoss,
    cut_into_layers,
    evaluate,
    primitive_name,
)
from phaze.ir import RecomputeMode

__all__ = [
    "ArrangedLoss",
    "after_layers",
    "before_layers",
    "layer_function",
    "loss_of_micro_batch",
    "run_layers",
    "slices_beside_parameters",
]


LayerFunction: TypeAlias = Callable[
    [Sequence[jax.Array], Sequence[jax.Array], tuple[Sequence[jax.Array], Sequence[jax.Array]]],
    tuple[list[jax.Array], list[jax.Array]],
]
"""Of constants, carried values, and slices of parameters and others: what is carried on, and what is collected."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrangedLoss:
    """A traced loss, and what the plan says about how it runs.

    Attributes:
        trace: the loss at the plan's microbatch.
        storages: how each parameter is stored.
        parameter_layers: for each parameter the number of its layer, where it has one.
        recompute: what backward computes again.
        recomputed_layers: the numbers of the layers to which that applies.
        last_layer: the number of the layer with the loss.
        gathers_keys: whether keys are gathered over the devices of a sequence.
        gathers_parameters: whether parameters are gathered for each pass (ZeRO-3).
        tp: devices of the tensor axis.
        sequence_parallel: whether activations between layers are split along the sequence; one that the tensor axis
            does not divide stays whole.
        gathered_vectors: numbers of split vectors (biases, scales) and routers that the loss reads whole.
    """

    trace: TracedLoss
    storages: tuple[ParameterStorage, ...]
    parameter_layers: tuple[int | None, ...]
    recompute: RecomputeMode
    recomputed_layers: frozenset[int]
    last_layer: int
    gathers_keys: bool
    gathers_parameters: bool
    tp: int
    sequence_parallel: bool
    gathered_vectors: frozenset[int] = frozenset()

    @property
    def gathers(self) -> bool:
        """Whether each pass gathers something, which backward then gathers again."""
        return self.gathers_keys or self.gathers_parameters

    def with_gathered_vectors(self) -> ArrangedLoss:
        """The same, with those split vectors and routers found that meet nothing split, and are therefore gathered."""
        if self.tp == 1:
            return self
        scan, numbers = self.trace.scan, {variable: number for number, variable in enumerate(self.trace.parameters)}
        has_experts = self.has_expert_tiles
        outside = vectors_to_gather(self.trace.equations, self.split_variables(), self.tp, with_routers=has_experts)
        gathered = {numbers[variable] for variable in outside}
        if scan is not None:
            weights = scan.weights
            inside = vectors_to_gather(
                scan.body.jaxpr.eqns, self.split_variables_of_layer(scan), self.tp, with_routers=has_experts
            )
            # What the scan takes apart is read inside of it only, so that the outside knows nothing about it.
            gathered = (gathered - set(weights.values())) | {weights[variable] for variable in inside}
        return replace(self, gathered_vectors=frozenset(gathered))

    def recompute_of(self, layer: int) -> RecomputeMode:
        """What backward computes again of a layer."""
        return self.recompute if layer in self.recomputed_layers else RecomputeMode.NONE

    def read_parameter(self, number: int, value: jax.Array, *, is_layer: bool = False) -> jax.Array:
        """A stored parameter, or one layer of it, as the loss reads it: gathered where that is due, in its shape."""
        storage, whole = self.storages[number], value
        if self.gathers_parameters:
            whole = gather_shards(storage, value, storage.shard_axes, is_layer=is_layer)
        read = storage.from_stored(whole, is_layer=is_layer, is_on_device=True)
        return jax.lax.with_sharding_constraint(read, PartitionSpec()) if number in self.gathered_vectors else read

    def with_parallel_products(
        self,
        equations: Sequence[Equation],
        split_dims: Mapping[core.Var, int],
        fused_views: Mapping[core.Var, FusedView],
        boundary_shapes: Iterable[Sequence[int]],
    ) -> list[Equation]:
        """Equations with the products of split parameters run by hand.

        `boundary_shapes` are the shapes of the tensors between layers.
        """
        if self.tp == 1:
            return list(equations)
        has_sequence = (tuple(shape) for shape in boundary_shapes if len(shape) > 2 and self._splits_sequence(shape))
        if self.has_expert_tiles:
            equations = with_exchanged_tiles(equations)
        return with_tensor_parallel_products(equations, split_dims, self.tp, frozenset(has_sequence), fused_views)

    @property
    def has_expert_tiles(self) -> bool:
        """Whether the tensor axis divides experts that are divided over devices as well."""
        return any(s.expert_dim is not None and s.expert_dim == s.split_dim for s in self.storages)

    def _split_dims(self, *, is_layer: bool = False) -> dict[int, int]:
        """For each parameter that the tensor axis cuts evenly, and that is read so, the dimension in the loss."""
        shift = 1 if is_layer else 0
        return {
            number: storage.split_dim - shift
            for number, storage in enumerate(self.storages)
            if storage.split_dim is not None
            and number not in self.gathered_vectors
            and not storage.is_merged
            and storage.parts == 1
            and storage.chunk * storage.tp == storage.shape[storage.split_dim]
        }

    def split_variables(self) -> dict[core.Var, int]:
        """The variables of evenly split parameters, with the dimension that is split."""
        return {self.trace.parameters[number]: dim for number, dim in self._split_dims().items()}

    def split_variables_of_layer(self, scan: LayerScan) -> dict[core.Var, int]:
        """The same of the parameters of one layer, inside of the scan's body."""
        dims = self._split_dims(is_layer=True)
        return {variable: dims[number] for variable, number in scan.weights.items() if number in dims}

    def _fused_views(self, *, is_layer: bool = False) -> dict[int, FusedView]:
        """The fused parameters, each with its fused dimension as the loss sees it: that of the parts."""
        shift = 2 if is_layer else 1
        return {
            number: FusedView(storage.split_dim - shift, storage.parts)
            for number, storage in enumerate(self.storages)
            if storage.split_dim is not None and storage.parts > 1
        }

    def fused_variables(self) -> dict[core.Var, FusedView]:
        """The variables of fused parameters."""
        return {self.trace.parameters[number]: view for number, view in self._fused_views().items()}

    def fused_variables_of_layer(self, scan: LayerScan) -> dict[core.Var, FusedView]:
        """The same of the parameters of one layer, inside of the scan's body."""
        views = self._fused_views(is_layer=True)
        return {variable: views[number] for variable, number in scan.weights.items() if number in views}

    def lay_out_lookup(self, equation: Equation, result: jax.Array) -> jax.Array:
        """A result of an equation: what is looked up in a parameter is laid out as tensors between layers are."""
        return self.at_boundary(result) if primitive_name(equation) == "gather" else result

    def _splits_sequence(self, shape: Sequence[int]) -> bool:
        return self.sequence_parallel and shape[1] % self.tp == 0

    def at_boundary(self, value: jax.Array) -> jax.Array:
        """A tensor between layers, laid out as the plan says."""
        if self.tp == 1 or value.ndim < 3 or not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        spec = PartitionSpec(None, "tp") if self._splits_sequence(value.shape) else PartitionSpec()
        return jax.lax.with_sharding_constraint(value, spec)


def loss_of_micro_batch(
    arranged: ArrangedLoss, parameters: Sequence[jax.Array], batch: Sequence[jax.Array]
) -> jax.Array:
    """The loss of one microbatch, all layers on the same devices."""
    scan = arranged.trace.scan
    if scan is None:
        return _loss_without_scan(arranged, parameters, batch)
    constants, carried = before_layers(arranged, scan, parameters, batch)
    stacked = [parameters[scan.stacked[place]] for place in sorted(scan.stacked)]
    others = slices_beside_parameters(arranged, scan, parameters, batch)
    carried, collected = run_layers(arranged, scan, constants, carried, stacked, others)
    results = dict(zip([*scan.results, *scan.collected], [*carried, *collected], strict=True))
    return after_layers(arranged, scan, parameters, batch, results)


def _parameter_reader(arranged: ArrangedLoss, parameters: Sequence[jax.Array]) -> Callable[[core.Var], jax.Array]:
    numbers = {variable: number for number, variable in enumerate(arranged.trace.parameters)}
    return lambda variable: arranged.read_parameter(numbers[variable], parameters[numbers[variable]])


def _equations_outside_layers(arranged: ArrangedLoss, scan: LayerScan) -> list[Equation]:
    """The equations before and behind the layers."""
    shapes = [variable.aval.shape for variable in scan.carried]
    return arranged.with_parallel_products(
        arranged.trace.equations, arranged.split_variables(), arranged.fused_variables(), shapes
    )


def before_layers(
    arranged: ArrangedLoss, scan: LayerScan, parameters: Sequence[jax.Array], batch: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """What all layers read, and what enters the first."""

    def before(parameters: Sequence[jax.Array], batch: Sequence[jax.Array]) -> list[jax.Array]:
        wanted = [*scan.constants, *scan.carried]
        known, read = arranged.trace.known_values(batch), _parameter_reader(arranged, parameters)
        equations = _equations_outside_layers(arranged, scan)
        return evaluate(equations, wanted, known, read, arranged.lay_out_lookup)

    run = keep_only_what_mode_allows(before, RecomputeMode.NONE, gathers=arranged.gathers)
    values = run(list(parameters), list(batch))
    count = len(scan.constants)
    return values[:count], [arranged.at_boundary(value) for value in values[count:]]


def slices_beside_parameters(
    arranged: ArrangedLoss, scan: LayerScan, parameters: Sequence[jax.Array], batch: Sequence[jax.Array]
) -> list[jax.Array]:
    """What layers take slices of beside parameters, such as random keys, for all layers."""
    others = [variable for place, variable in enumerate(scan.scanned) if place not in scan.stacked]
    known, read = arranged.trace.known_values(batch), _parameter_reader(arranged, parameters)
    return evaluate(arranged.trace.equations, others, known, read)


def run_layers(
    arranged: ArrangedLoss,
    scan: LayerScan,
    constants: Sequence[jax.Array],
    carried: Sequence[jax.Array],
    stacked: Sequence[jax.Array],
    other_slices: Sequence[jax.Array] = (),
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The layers whose stacked parameters are given, one after the other; what leaves the last, what all collect."""
    run, listed_constants = layer_function(arranged, scan), list(constants)
    leaving, collected = jax.lax.scan(
        lambda carry, slices: run(listed_constants, carry, slices),
        list(carried),
        (list(stacked), list(other_slices)),
        reverse=scan.equation.params["reverse"],
    )
    return [arranged.at_boundary(value) for value in leaving], collected


def layer_function(arranged: ArrangedLoss, scan: LayerScan) -> LayerFunction:
    """One layer as a function of constants, of what enters it, and of its slices of parameters and of others."""
    body, places = scan.body.jaxpr, sorted(scan.stacked)
    first, count = len(scan.constants) + len(scan.carried), len(scan.carried)
    # The body's variables of scanned operands: parameters, and others such as random keys of the layers.
    weights = list(scan.weights)
    others = [body.invars[first + place] for place in range(len(scan.scanned)) if place not in scan.stacked]
    equations = _equations_of_layer(arranged, scan)

    def layer(
        constants: Sequence[jax.Array],
        carried: Sequence[jax.Array],
        slices: tuple[Sequence[jax.Array], Sequence[jax.Array]],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        stored_weights, values_of_others = slices
        pairs = zip(places, stored_weights, strict=True)
        read_weights = [arranged.read_parameter(scan.stacked[place], weight, is_layer=True) for place, weight in pairs]
        known = dict(zip(body.constvars, scan.body.consts, strict=True))
        entering = [arranged.at_boundary(value) for value in carried]
        known |= dict(zip(body.invars[:first], [*constants, *entering], strict=True))
        known |= dict(zip([*weights, *others], [*read_weights, *values_of_others], strict=True))
        results = evaluate(equations, body.outvars, known)
        return [arranged.at_boundary(value) for value in results[:count]], results[count:]

    return keep_only_what_mode_allows(layer, arranged.recompute, gathers=arranged.gathers)


def _equations_of_layer(arranged: ArrangedLoss, scan: LayerScan) -> list[Equation]:
    body = scan.body.jaxpr
    equations = list(body.eqns)
    if arranged.recompute is RecomputeMode.SELECTIVE:
        equations = with_recomputed_attention(equations, list(scan.weights), body.outvars)
    split_dims, fused_views = arranged.split_variables_of_layer(scan), arranged.fused_variables_of_layer(scan)
    shapes = [variable.aval.shape for variable in scan.carried]
    return arranged.with_parallel_products(equations, split_dims, fused_views, shapes)


def after_layers(
    arranged: ArrangedLoss,
    scan: LayerScan,
    parameters: Sequence[jax.Array],
    batch: Sequence[jax.Array],
    results: Mapping[core.Var, jax.Array],
) -> jax.Array:
    """The loss, from what leaves the last layer."""
    variables = list(results)

    def after(parameters: Sequence[jax.Array], batch: Sequence[jax.Array], values: Sequence[jax.Array]) -> jax.Array:
        entering = [arranged.at_boundary(value) for value in values]
        known = arranged.trace.known_values(batch) | dict(zip(variables, entering, strict=True))
        equations, read = _equations_outside_layers(arranged, scan), _parameter_reader(arranged, parameters)
        return evaluate(equations, [arranged.trace.loss], known, read, arranged.lay_out_lookup)[0]

    values = [results[variable] for variable in variables]
    mode = arranged.recompute_of(arranged.last_layer)
    run = keep_only_what_mode_allows(after, mode, gathers=arranged.gathers)
    return run(list(parameters), list(batch), values)


def _loss_without_scan(
    arranged: ArrangedLoss, parameters: Sequence[jax.Array], batch: Sequence[jax.Array]
) -> jax.Array:
    """A loss without a scan: layer by layer, as far as their parameters tell the layers apart."""
    trace = arranged.trace
    segments = cut_into_layers(trace, arranged.parameter_layers)
    leaving = [variable for segment in segments for variable in segment.leaving]
    equations: list[Equation] = list(trace.equations)
    if arranged.recompute is RecomputeMode.SELECTIVE:
        equations = with_recomputed_attention(equations, trace.parameters, leaving)
    shapes = [variable.aval.shape for variable in leaving]
    equations = arranged.with_parallel_products(
        equations, arranged.split_variables(), arranged.fused_variables(), shapes
    )
    values = trace.known_values(batch)
    for segment in segments:
        mode = arranged.recompute_of(segment.layer)
        function = _segment_function(arranged, equations, segment)
        run = keep_only_what_mode_allows(function, mode, gathers=arranged.gathers)
        results = run(list(parameters), [values[variable] for variable in segment.entering])
        values |= {
            variable: arranged.at_boundary(result) for variable, result in zip(segment.leaving, results, strict=True)
        }
    return values[trace.loss]


def _segment_function(
    arranged: ArrangedLoss, equations: Sequence[Equation], segment: LayerSegment
) -> Callable[[Sequence[jax.Array], Sequence[jax.Array]], list[jax.Array]]:
    """One layer as a function of all stored parameters and of what enters the layer."""

    def run(parameters: Sequence[jax.Array], entering: Sequence[jax.Array]) -> list[jax.Array]:
        known = {**arranged.trace.constants, **dict(zip(segment.entering, entering, strict=True))}
        read = _parameter_reader(arranged, parameters)
        return evaluate(equations, segment.leaving, known, read, arranged.lay_out_lookup)

    return run
