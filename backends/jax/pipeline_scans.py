"""Pipelines of equal stages over a scan of layers: GPipe, and forwards and backwards in turn (eager 1F1B).

All devices run the same program, and what a stage sends arrives in the next tick. There are m microbatches and p
stages.

GPipe (`pipelined_loss`; Huang et al., arXiv:1811.06965). In tick t stage s has microbatch t - s: the first stage makes
what enters the layers, the others take what they were sent, the last computes the loss. There are m + p - 1 ticks; a
stage without a microbatch does nothing. Backward runs the same ticks in reverse.

Eager 1F1B (`eager_1f1b_gradients`; Zhuang et al., arXiv:2211.05322). In tick t stage s runs forward for microbatch
t - s and then backward for microbatch t - 2(p - 1) + s, where there are such: these are m + 2(p - 1) ticks. The last
stage runs both for the same microbatch; stage s has up to 2(p - 1 - s) + 1 microbatches in flight, one more for each
stage behind it than in 1F1B with a program for each device. What backward needs of a microbatch waits in a ring of as
many slots. A slot has what the layers of a stage keep of their activations, as the recompute mode says. What backward
needs of parameters, masks and keys alone is made again, and so is the part before the layers (a lookup). The part
behind the layers runs in one go, on the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from phaze.backends.jax.loss_function import MicroBatches
from phaze.backends.jax.micro_batch_loss import (
    ArrangedLoss,
    after_layers,
    before_layers,
    layer_function,
    run_layers,
    slices_beside_parameters,
)
from phaze.backends.jax.traced_loss import LayerScan, evaluate, read_variables

__all__ = ["eager_1f1b_gradients", "pipelined_loss"]


def pipelined_loss(
    arranged: ArrangedLoss,
    exact_parameters: Sequence[jax.Array],
    compute_dtype: DTypeLike,
    micro_batches: MicroBatches,
    pp: int,
) -> jax.Array:
    """The mean loss of all microbatches on the last of `pp` stages, zero on the others, in fp32.

    Every tick reads the exact parameters in the compute type, so that their gradients add up in the exact type.
    """
    scan = arranged.trace.scan
    assert scan is not None
    stage, count = jax.lax.axis_index("pp"), micro_batches.count
    no_loss = jnp.zeros((), jnp.float32)
    next_stages = [(sender, sender + 1) for sender in range(pp - 1)]

    def at_boundary(values: Sequence[jax.Array]) -> list[jax.Array]:
        return [arranged.at_boundary(value) for value in values]

    def tick(received: list[jax.Array], time: jax.Array | int) -> tuple[list[jax.Array], jax.Array]:
        is_busy = (time >= stage) & (time - stage < count)
        carried, loss = jax.lax.cond(is_busy, lambda: work(received, time - stage), lambda: (list(received), no_loss))
        return at_boundary(carried), loss

    def work(received: list[jax.Array], number: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        # An idle stage does not take this branch, but the compiler may evaluate it: its number is brought into range.
        batch = micro_batches.arguments_of(jnp.clip(number, 0, count - 1))
        parameters = [value.astype(compute_dtype) for value in exact_parameters]
        stacked = [parameters[scan.stacked[place]] for place in sorted(scan.stacked)]
        constants, _ = before_layers(arranged, scan, parameters, batch)
        entering = jax.lax.cond(
            stage == 0, lambda: before_layers(arranged, scan, parameters, batch)[1], lambda: list(received)
        )
        layers = scan.length // pp
        others = [
            jax.lax.dynamic_slice_in_dim(value, stage * layers, layers)
            for value in slices_beside_parameters(arranged, scan, parameters, batch)
        ]
        carried, _ = run_layers(arranged, scan, constants, at_boundary(entering), stacked, others)
        results = dict(zip(scan.results, carried, strict=True))
        loss = jax.lax.cond(
            stage == pp - 1,
            lambda: after_layers(arranged, scan, parameters, batch, results).astype(jnp.float32),
            lambda: no_loss,
        )
        return carried, loss

    def tick_and_send(received: list[jax.Array], time: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        carried, loss = tick(received, time)
        return at_boundary([jax.lax.ppermute(value, "pp", next_stages) for value in carried]), loss

    nothing = [jnp.zeros(variable.aval.shape, variable.aval.dtype) for variable in scan.carried]
    ticks = count + pp - 1
    received, losses = jax.lax.scan(tick_and_send, nothing, jnp.arange(ticks - 1))
    # The last tick stands behind the scan because nothing is sent after it.
    _, last_loss = tick(received, ticks - 1)
    return (losses.sum() + last_loss) / count


Arrays: TypeAlias = list[jax.Array]


def eager_1f1b_gradients(
    arranged: ArrangedLoss,
    parameters: Sequence[jax.Array],
    gradient_dtype: DTypeLike,
    micro_batches: MicroBatches,
    pp: int,
) -> tuple[jax.Array, Arrays]:
    """The mean loss of all microbatches on the last of `pp` stages, zero on the others, and this stage's gradients.

    Gradients of microbatches are added up in `gradient_dtype`.
    """
    scan = arranged.trace.scan
    assert scan is not None
    return _EagerPipeline(arranged, scan, micro_batches, pp).run(list(parameters), gradient_dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _Entering:
    """What one stage's layers read in one microbatch."""

    constants: Arrays
    carried: Arrays
    others: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class _EagerPipeline:
    arranged: ArrangedLoss
    scan: LayerScan
    micro_batches: MicroBatches
    pp: int

    @property
    def stage(self) -> jax.Array:
        """The number of this device's stage."""
        return jax.lax.axis_index("pp")

    @property
    def layer_count(self) -> int:
        """The layers of a stage."""
        return self.scan.length // self.pp

    def stacked(self, parameters: Arrays) -> Arrays:
        """The parameters of this stage's layers."""
        return [parameters[self.scan.stacked[place]] for place in sorted(self.scan.stacked)]

    @property
    def slots(self) -> int:
        """The microbatches that the first stage has in flight."""
        return min(2 * self.pp - 1, self.micro_batches.count)

    def run(self, parameters: Arrays, gradient_dtype: DTypeLike) -> tuple[jax.Array, Arrays]:
        """See `eager_1f1b_gradients`."""
        count, last = self.micro_batches.count, self.pp - 1
        nothing = [jnp.zeros(variable.aval.shape, variable.aval.dtype) for variable in self.scan.carried]
        layers = _StageLayers.traced(self, parameters, nothing)
        ring = [jnp.zeros((self.slots, *kept.shape), kept.dtype) for kept in layers.slot_shapes]
        sums = [jnp.zeros(value.shape, gradient_dtype) for value in parameters]
        down = [(sender, sender + 1) for sender in range(last)]
        up = [(sender + 1, sender) for sender in range(last)]

        def tick(state: tuple[Any, ...], time: jax.Array) -> tuple[tuple[Any, ...], None]:
            received, received_gradients, ring, loss_sum, sums = state
            forward, backward = time - self.stage, time - 2 * last + self.stage
            runs_forward, runs_backward = (forward >= 0) & (forward < count), (backward >= 0) & (backward < count)
            forward, backward = jnp.clip(forward, 0, count - 1), jnp.clip(backward, 0, count - 1)
            leaving, kept = jax.lax.cond(
                runs_forward,
                lambda: layers.forward(parameters, self.entering(parameters, received, forward)),
                lambda: (nothing, [jnp.zeros(shape.shape, shape.dtype) for shape in layers.slot_shapes]),
            )
            slot = forward % self.slots
            ring = [_with_slot(slots, slot, value, runs_forward) for slots, value in zip(ring, kept, strict=True)]
            stored = [jax.lax.dynamic_index_in_dim(slots, backward % self.slots, keepdims=False) for slots in ring]
            loss, gradients, sent_back = jax.lax.cond(
                runs_backward,
                lambda: self._backward(layers, parameters, backward, leaving, received_gradients, stored),
                lambda: (jnp.zeros((), jnp.float32), _zeros(parameters), _zeros(_floating(nothing))),
            )
            sums = [total + gradient.astype(total.dtype) for total, gradient in zip(sums, gradients, strict=True)]
            # Of the first and the last ticks nobody reads what all would send.
            received = self._sent(leaving, down, time < count + last - 1)
            received_gradients = self._sent(sent_back, up, (time >= last) & (time < count + 2 * last - 1))
            return (received, received_gradients, ring, loss_sum + loss, sums), None

        first = (nothing, _zeros(_floating(nothing)), ring, jnp.zeros((), jnp.float32), sums)
        (_, _, _, loss, sums), _ = jax.lax.scan(tick, first, jnp.arange(count + 2 * last))
        return loss / count, [total / count for total in sums]

    def _sent(self, values: Sequence[jax.Array], pairs: Sequence[tuple[int, int]], is_sent: jax.Array) -> Arrays:
        laid_out = [self.arranged.at_boundary(value) for value in values]
        sent = jax.lax.cond(
            is_sent, lambda: [jax.lax.ppermute(value, "pp", pairs) for value in laid_out], lambda: laid_out
        )
        return [self.arranged.at_boundary(value) for value in sent]

    def entering(self, parameters: Arrays, received: Sequence[jax.Array], number: jax.Array) -> _Entering:
        """What the layers of this stage read: the first stage makes what enters them, the others received it."""
        batch, layers = self.micro_batches.arguments_of(number), self.layer_count
        constants, _ = before_layers(self.arranged, self.scan, parameters, batch)
        carried = jax.lax.cond(
            self.stage == 0,
            lambda: before_layers(self.arranged, self.scan, parameters, batch)[1],
            lambda: list(received),
        )
        others = [
            jax.lax.dynamic_slice_in_dim(value, self.stage * layers, layers)
            for value in slices_beside_parameters(self.arranged, self.scan, parameters, batch)
        ]
        return _Entering(constants, [self.arranged.at_boundary(value) for value in carried], others)

    def _backward(
        self,
        layers: _StageLayers,
        parameters: Arrays,
        number: jax.Array,
        leaving: Sequence[jax.Array],
        received_gradients: Arrays,
        kept: Arrays,
    ) -> tuple[jax.Array, Arrays, Arrays]:
        """The loss, the gradients of all parameters, and those of what this stage received."""
        batch = self.micro_batches.arguments_of(number)

        def loss_of(parameters: Arrays, floating: Arrays) -> jax.Array:
            values = _replaced(leaving, floating)
            results = dict(zip(self.scan.results, values, strict=True))
            return after_layers(self.arranged, self.scan, parameters, batch, results).astype(jnp.float32)

        def behind() -> tuple[jax.Array, Arrays, Arrays]:
            loss, gradients = jax.value_and_grad(loss_of, argnums=(0, 1))(parameters, _floating(leaving))
            return loss, *gradients

        loss, gradients, of_leaving = jax.lax.cond(
            self.stage == self.pp - 1,
            behind,
            lambda: (jnp.zeros((), jnp.float32), _zeros(parameters), list(received_gradients)),
        )

        def entering_of(parameters: Arrays, received: Arrays) -> tuple[tuple[Arrays, ...], tuple[Arrays, Arrays]]:
            given = _replaced([jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.scan.carried], received)
            entering = self.entering(parameters, given, number)
            parts = (entering.constants, entering.carried, entering.others)
            return tuple(_floating(part) for part in parts), (entering.constants, entering.others)

        _, pull_back, (constants, others) = jax.vjp(entering_of, parameters, _zeros(received_gradients), has_aux=True)
        of_stacked, of_constants, of_entering, of_others = layers.backward(
            parameters, constants, others, kept, of_leaving
        )
        before, of_received = pull_back((of_constants, of_entering, of_others))
        gradients = _added(gradients, before)
        for place, gradient in zip(sorted(self.scan.stacked), of_stacked, strict=True):
            parameter = self.scan.stacked[place]
            gradients[parameter] = gradients[parameter] + gradient
        return loss, gradients, of_received


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StageLayers:
    """The layers of a stage with their gradients: forward says what it keeps, backward gets it back.

    One layer was traced once: `trace` takes its slices of stacked parameters, constants, its slices of others, and
    carried values, in this order, and gives what leaves it, then what its gradient reads. Of the latter a slot has
    `kept`, which activations make; the rest comes from `trace` again.
    """

    pipeline: _EagerPipeline
    trace: core.ClosedJaxpr
    carried_count: int
    gradient: PyTreeDef
    kept: tuple[core.Var, ...]

    @classmethod
    def traced(cls, pipeline: _EagerPipeline, parameters: Arrays, carried: Arrays) -> _StageLayers:
        """The layers of a stage, of which one is traced."""
        found: list[PyTreeDef] = []
        run = layer_function(pipeline.arranged, pipeline.scan)

        def layer(*parts: Arrays) -> tuple[Arrays, Arrays]:
            def of_floating(*floating: Arrays) -> tuple[Arrays, Arrays]:
                slices, constants, others, carried = map(_replaced, parts, floating)
                leaving, _ = run(constants, carried, (slices, others))
                return _floating(leaving), leaving

            _, pull_back, leaving = jax.vjp(of_floating, *map(_floating, parts), has_aux=True)
            residuals, structure = jax.tree.flatten(pull_back)
            found.append(structure)
            return leaving, residuals

        first = jnp.zeros((), jnp.int32)
        constants, others = jax.eval_shape(lambda: _around(pipeline.entering(parameters, carried, first)))
        slices = [jax.ShapeDtypeStruct(value.shape[1:], value.dtype) for value in pipeline.stacked(parameters)]
        other_slices = [jax.ShapeDtypeStruct(value.shape[1:], value.dtype) for value in others]
        trace = jax.make_jaxpr(layer)(slices, constants, other_slices, carried)
        count = len(carried)
        made = set(trace.jaxpr.invars[len(trace.jaxpr.invars) - count :])
        for equation in trace.jaxpr.eqns:
            if not made.isdisjoint(read_variables(equation)):
                made.update(equation.outvars)
        residuals = (v for v in trace.jaxpr.outvars[count:] if not isinstance(v, core.Literal))
        kept = tuple(dict.fromkeys(variable for variable in residuals if variable in made))
        return cls(pipeline=pipeline, trace=trace, carried_count=count, gradient=found[-1], kept=kept)

    @property
    def slot_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """What one slot has of all layers of a stage."""
        layers = self.pipeline.layer_count
        return [jax.ShapeDtypeStruct((layers, *v.aval.shape), v.aval.dtype) for v in self.kept]

    def _known(self, *parts: Sequence[jax.Array]) -> dict[core.Var, jax.Array]:
        """Values of the trace's arguments, as many as are given, and of its constants."""
        jaxpr = self.trace.jaxpr
        given = [value for part in parts for value in part]
        known = dict(zip(jaxpr.constvars, self.trace.consts, strict=True))
        return known | dict(zip(jaxpr.invars, given, strict=False))

    def forward(self, parameters: Arrays, entering: _Entering) -> tuple[Arrays, Arrays]:
        """What leaves the last layer, and a slot."""
        jaxpr = self.trace.jaxpr

        def layer(carried: Arrays, slices: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            known = self._known(slices[0], entering.constants, slices[1], carried)
            values = evaluate(jaxpr.eqns, [*jaxpr.outvars[: self.carried_count], *self.kept], known)
            return values[: self.carried_count], values[self.carried_count :]

        slices = (self.pipeline.stacked(parameters), entering.others)
        leaving, slot = jax.lax.scan(layer, entering.carried, slices)
        return leaving, slot

    def backward(
        self, parameters: Arrays, constants: Arrays, others: Arrays, slot: Arrays, of_leaving: Arrays
    ) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """The gradients of stacked parameters, constants, what entered the first layer, and others."""
        residuals = self.trace.jaxpr.outvars[self.carried_count :]

        def layer(
            gradients: tuple[Arrays, Arrays], slices: tuple[Arrays, Arrays, Arrays]
        ) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
            of_carried, of_constants = gradients
            stored, other_slices, kept = slices
            known = self._known(stored, constants, other_slices) | dict(zip(self.kept, kept, strict=True))
            pull_back = jax.tree.unflatten(self.gradient, evaluate(self.trace.jaxpr.eqns, residuals, known))
            of_slices, more, of_others, of_carried = pull_back(of_carried)
            return (of_carried, _added(of_constants, more)), (of_slices, of_others)

        (of_entering, of_constants), (of_stacked, of_others) = jax.lax.scan(
            layer,
            (of_leaving, _zeros(_floating(constants))),
            (self.pipeline.stacked(parameters), others, slot),
            reverse=True,
        )
        return of_stacked, of_constants, of_entering, of_others


def _around(entering: _Entering) -> tuple[Arrays, Arrays]:
    return entering.constants, entering.others


def _with_slot(ring: jax.Array, slot: jax.Array, value: jax.Array, is_written: jax.Array) -> jax.Array:
    """The ring with a value in a slot; one that is not written stays, because a microbatch may wait there."""
    before = jax.lax.dynamic_index_in_dim(ring, slot, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(ring, jnp.where(is_written, value, before), slot, 0)


def _is_floating(value: jax.Array) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


def _floating(values: Sequence[jax.Array]) -> Arrays:
    """The values that have gradients."""
    return [value for value in values if _is_floating(value)]


def _replaced(values: Sequence[jax.Array], floating: Sequence[jax.Array]) -> Arrays:
    """The values, those that have gradients replaced."""
    remaining = iter(floating)
    return [next(remaining) if _is_floating(value) else value for value in values]


def _zeros(values: Sequence[jax.Array]) -> Arrays:
    return [jnp.zeros(value.shape, value.dtype) for value in values]


def _added(first: Sequence[jax.Array], second: Sequence[jax.Array]) -> Arrays:
    return [a + b for a, b in zip(first, second, strict=True)]
