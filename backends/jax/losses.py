"""The loss of one microbatch on the devices of one data-parallel copy: gathers, boundary layouts, recomputation.

Everything here runs where the data and pipeline axes are manual (each device sees its own part) and the tensor axis is
left to the compiler, which follows the parameters' layouts; at layer boundaries it is told the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phaze.backends.jax.collectives import gathered
from phaze.backends.jax.products import vectors_of_whole, with_open_products
from phaze.backends.jax.recompute import again_in_backward, with_attention_again
from phaze.backends.jax.segments import Segment, segments
from phaze.backends.jax.stored import Stored
from phaze.backends.jax.traced import LayerScan, Traced, evaluate
from phaze.backends.jax.views import View
from phaze.ir import RecomputeMode

__all__ = ["Arrangement", "after_layers", "before_layers", "micro_batch_loss", "run_layers"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrangement:
    """A traced loss and how it is to run.

    Attributes:
        traced: at the plan's microbatch.
        stored: how each parameter is stored.
        layers: for each parameter the number of its layer, where it has one.
        mode: what backward computes again.
        again: the layers to which that applies.
        last_layer: the number of the one with the loss.
        is_gathered: whether parameters are gathered over the data axis for each pass (ZeRO-3).
        tensor: devices of the tensor axis.
        whole_vectors: numbers of split vectors that the loss reads whole.
        splits_sequence: whether activations between layers are split along the sequence; one that the tensor axis does
            not divide stays whole.
    """

    traced: Traced
    stored: tuple[Stored, ...]
    layers: tuple[int | None, ...]
    mode: RecomputeMode
    again: frozenset[int]
    last_layer: int
    is_gathered: bool
    tensor: int
    splits_sequence: bool
    whole_vectors: frozenset[int] = frozenset()

    def with_whole_vectors(self) -> Arrangement:
        """The same, with the vectors that meet nothing split."""
        if self.tensor == 1:
            return self
        scan, numbers = self.traced.scan, {v: number for number, v in enumerate(self.traced.parameters)}
        found = {numbers[v] for v in vectors_of_whole(self.traced.equations, self.split_parameters(), self.tensor)}
        if scan is not None:
            own, dims = scan.weights, self.split_dims(is_layer=True)
            split = {v: dims[number] for v, number in own.items() if number in dims}
            inside = vectors_of_whole(scan.body.jaxpr.eqns, split, self.tensor)
            found = (found - set(own.values())) | {own[v] for v in inside}
        return replace(self, whole_vectors=frozenset(found))

    def mode_of(self, layer: int) -> RecomputeMode:
        """What backward computes again of a layer."""
        return self.mode if layer in self.again else RecomputeMode.NONE

    def seen(self, number: int, value: Any, *, is_layer: bool = False) -> Any:
        """A stored parameter, or one layer of it, as the loss reads it."""
        import jax
        from jax.sharding import PartitionSpec

        how = self.stored[number]
        own = gathered(how, value, is_layer=is_layer) if self.is_gathered else value
        seen = how.seen(own, is_layer=is_layer)
        return jax.lax.with_sharding_constraint(seen, PartitionSpec()) if number in self.whole_vectors else seen

    def opened(
        self, equations: Sequence[Any], split: Mapping[Any, int], views: Mapping[Any, View], shapes: Iterable[Any]
    ) -> list[Any]:
        """Equations with the products of split parameters laid open; `shapes` are those of tensors between layers."""
        if self.tensor == 1:
            return list(equations)
        sequences = frozenset(tuple(shape) for shape in shapes if len(shape) > 2 and self._is_split(shape))
        return with_open_products(equations, split, self.tensor, sequences, views)

    def split_dims(self, *, is_layer: bool = False) -> dict[int, int]:
        """For each parameter that the tensor axis cuts evenly, the dimension as the loss sees it."""
        shift = 1 if is_layer else 0
        return {
            number: how.split_dim - shift
            for number, how in enumerate(self.stored)
            if how.split_dim is not None
            and not how.merged
            and how.parts == 1
            and how.chunk * how.ways == how.shape[how.split_dim]
        }

    def split_parameters(self) -> dict[Any, int]:
        """The same by the variables of the trace."""
        return {self.traced.parameters[number]: dim for number, dim in self.split_dims().items()}

    def views(self, *, is_layer: bool = False) -> dict[int, View]:
        """The parameters that are stored, and seen by products, as views."""
        shift = 2 if is_layer else 1
        return {
            number: View(how.split_dim - shift, how.parts)
            for number, how in enumerate(self.stored)
            if how.split_dim is not None and how.parts > 1
        }

    def viewed_parameters(self) -> dict[Any, View]:
        """The same by the variables of the trace."""
        return {self.traced.parameters[number]: view for number, view in self.views().items()}

    def settled(self, equation: Any, result: Any) -> Any:
        """A result where the plan settles it: what is looked up in a parameter leaves as tensors between layers do."""
        is_lookup = str(getattr(equation, "primitive", "")) == "gather"
        return self.at_boundary(result) if is_lookup else result

    def _is_split(self, shape: Sequence[int]) -> bool:
        return self.splits_sequence and shape[1] % self.tensor == 0

    def at_boundary(self, value: Any) -> Any:
        """A tensor between layers, laid out as the plan says."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec

        if self.tensor == 1 or value.ndim < 3 or not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        spec = PartitionSpec(None, "tp") if self._is_split(value.shape) else PartitionSpec()
        return jax.lax.with_sharding_constraint(value, spec)


def micro_batch_loss(how: Arrangement, parameters: Sequence[Any], batch: Sequence[Any]) -> Any:
    """The loss of one microbatch, all layers on the same devices."""
    scan = how.traced.scan
    if scan is None:
        return _unstacked(how, parameters, batch)
    constants, carried = before_layers(how, scan, parameters, batch)
    stacked = [parameters[scan.stacked[place]] for place in sorted(scan.stacked)]
    others = [v for place, v in enumerate(scan.scanned) if place not in scan.stacked]
    known = evaluate(how.traced.equations, others, how.traced.start(batch), _reader(how, parameters))
    carried, collected = run_layers(how, scan, constants, carried, stacked, known)
    results = dict(zip([*scan.results, *scan.collected], [*carried, *collected], strict=True))
    return after_layers(how, scan, parameters, batch, results)


def _reader(how: Arrangement, parameters: Sequence[Any]) -> Any:
    numbers = {variable: index for index, variable in enumerate(how.traced.parameters)}
    return lambda variable: how.seen(numbers[variable], parameters[numbers[variable]])


def _outside(how: Arrangement, scan: LayerScan) -> list[Any]:
    """The equations before and behind the layers."""
    shapes = [v.aval.shape for v in scan.carried]
    return how.opened(how.traced.equations, how.split_parameters(), how.viewed_parameters(), shapes)


def before_layers(
    how: Arrangement, scan: LayerScan, parameters: Sequence[Any], batch: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """What all layers read, and what enters the first."""

    def before(parameters: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        wanted = [*scan.constants, *scan.carried]
        known = how.traced.start(batch)
        return evaluate(_outside(how, scan), wanted, known, _reader(how, parameters), how.settled)

    values = again_in_backward(before, RecomputeMode.NONE, gathers=how.is_gathered)(list(parameters), list(batch))
    count = len(scan.constants)
    return values[:count], [how.at_boundary(value) for value in values[count:]]


def run_layers(
    how: Arrangement,
    scan: LayerScan,
    constants: Sequence[Any],
    carried: Sequence[Any],
    stacked: Sequence[Any],
    others: Sequence[Any] = (),
) -> tuple[list[Any], list[Any]]:
    """The layers whose stacked parameters are given, one after the other; what leaves the last, what all collect."""
    import jax

    body, places = scan.body.jaxpr, sorted(scan.stacked)
    first, count = len(scan.constants) + len(scan.carried), len(scan.carried)
    weights = list(scan.weights)
    free = [body.invars[first + place] for place in range(len(scan.scanned)) if place not in scan.stacked]
    equations = _inside(how, scan)

    def layer(constants: Sequence[Any], carried: Sequence[Any], slices: Any) -> tuple[list[Any], list[Any]]:
        own, rest = slices
        seen = [how.seen(scan.stacked[p], value, is_layer=True) for p, value in zip(places, own, strict=True)]
        known = dict(zip(body.constvars, scan.body.consts, strict=True))
        entering = [how.at_boundary(value) for value in carried]
        known |= dict(zip(body.invars[:first], [*constants, *entering], strict=True))
        known |= dict(zip([*weights, *free], [*seen, *rest], strict=True))
        results = evaluate(equations, body.outvars, known, _none)
        return [how.at_boundary(value) for value in results[:count]], results[count:]

    run = again_in_backward(layer, how.mode, gathers=how.is_gathered)
    fixed = list(constants)
    leaving, collected = jax.lax.scan(
        lambda carry, slices: run(fixed, carry, slices),
        list(carried),
        (list(stacked), list(others)),
        reverse=scan.equation.params["reverse"],
    )
    return [how.at_boundary(value) for value in leaving], collected


def _inside(how: Arrangement, scan: LayerScan) -> list[Any]:
    """The equations of one layer."""
    body, dims = scan.body.jaxpr, how.split_dims(is_layer=True)
    split = {v: dims[number] for v, number in scan.weights.items() if number in dims}
    equations = list(body.eqns)
    if how.mode is RecomputeMode.SELECTIVE:
        equations = with_attention_again(equations, list(scan.weights), body.outvars)
    seen = how.views(is_layer=True)
    views = {v: seen[number] for v, number in scan.weights.items() if number in seen}
    return how.opened(equations, split, views, [v.aval.shape for v in scan.carried])


def _none(variable: Any) -> Any:
    raise AssertionError(f"a layer reads {variable}, which is none of its operands")


def after_layers(
    how: Arrangement, scan: LayerScan, parameters: Sequence[Any], batch: Sequence[Any], results: Mapping[Any, Any]
) -> Any:
    """The loss, from what leaves the last layer."""
    variables = list(results)

    def behind(parameters: Sequence[Any], batch: Sequence[Any], values: Sequence[Any]) -> Any:
        entering = [how.at_boundary(value) for value in values]
        known = how.traced.start(batch) | dict(zip(variables, entering, strict=True))
        return evaluate(_outside(how, scan), [how.traced.loss], known, _reader(how, parameters), how.settled)[0]

    values = [results[variable] for variable in variables]
    mode = how.mode_of(how.last_layer)
    return again_in_backward(behind, mode, gathers=how.is_gathered)(list(parameters), list(batch), values)


def _unstacked(how: Arrangement, parameters: Sequence[Any], batch: Sequence[Any]) -> Any:
    """A loss without a scan: layer by layer, as far as their parameters tell them apart."""
    known, found = how.traced.start(batch), segments(how.traced, how.layers)
    equations = list(how.traced.equations)
    if how.mode is RecomputeMode.SELECTIVE:
        leaving = [variable for segment in found for variable in segment.leaves]
        equations = with_attention_again(equations, how.traced.parameters, leaving)
    shapes = [variable.aval.shape for segment in found for variable in segment.leaves]
    equations = how.opened(equations, how.split_parameters(), how.viewed_parameters(), shapes)
    for segment in found:
        mode = how.mode_of(segment.number)
        piece = again_in_backward(_piece(how, equations, segment), mode, gathers=how.is_gathered)
        made = piece(list(parameters), [known[variable] for variable in segment.enters])
        known |= {name: how.at_boundary(value) for name, value in zip(segment.leaves, made, strict=True)}
    return known[how.traced.loss]


def _piece(how: Arrangement, equations: Sequence[Any], segment: Segment) -> Callable[..., list[Any]]:
    def run(parameters: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        known = {**how.traced.constants, **dict(zip(segment.enters, values, strict=True))}
        return evaluate(equations, segment.leaves, known, _reader(how, parameters), how.settled)

    return run
