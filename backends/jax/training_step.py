"""The gradients of one training step on every device: microbatches, and the reduction that the ZeRO stage asks for.

Microbatches run one after the other (`_accumulated_gradients`) or through a pipeline (`_pipelined_gradients`). Their
gradients are reduced over the data-parallel copies:

ZeRO-0   once, after all microbatches: every copy gets the sum (`_reduced`)
ZeRO-1   once, after all microbatches: each copy keeps its shard of the sum (`_reduced`)
ZeRO-2   after every microbatch: each copy keeps its shard of the sum (`_accumulable`)
ZeRO-3   parameters are stored as shards, and the gathers of the passes scatter gradients in backward by themselves

Experts that are divided over devices have fewer copies, and their gradients hold the tokens of all of these devices.
Where shards lie within groups of copies, the shards of the sum are summed once more, between the groups, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from phaze.backends.jax.context_trace import AXIS
from phaze.backends.jax.jax_mesh import MeshAxes
from phaze.backends.jax.loss_function import BatchShare, MicroBatches, divide_batch
from phaze.backends.jax.micro_batch_loss import ArrangedLoss, loss_of_micro_batch
from phaze.backends.jax.parameter_storage import STAGES, ParameterStorage, gather_shards, reduce_to_shards
from phaze.backends.jax.pipeline_scans import eager_1f1b_gradients, pipelined_loss
from phaze.backends.jax.stacked_layers import LayerStacks
from phaze.backends.jax.traced_loss import TracedLoss, evaluate
from phaze.backends.jax.train_state import StateLayout

__all__ = ["TrainingStep", "WholeBatch", "gradients_on_mesh"]

LossAndGradients: TypeAlias = tuple[jax.Array, list[jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeBatch:
    """Sums over the samples of all microbatches, and what the loss makes of them.

    Attributes:
        micro_batch: the loss of one microbatch, in which `sums` are made of its samples alone.
        whole: the loss of the whole batch, in which `totals` are made of `whole_sums`.
    """

    micro_batch: TracedLoss
    sums: tuple[core.Var, ...]
    whole: TracedLoss
    whole_sums: tuple[core.Var, ...]
    totals: tuple[core.Var, ...]

    def with_totals(
        self, micro_batches: MicroBatches, batch_axes: tuple[str, ...], has_sequence: Sequence[bool]
    ) -> MicroBatches:
        """The microbatches with the totals that they read, which are summed over the axes that divide a batch.

        What `has_sequence` comes as a part of every sequence, and is counted whole.
        """
        count = len(self.micro_batch.batch)

        def sums_of(number: jax.Array) -> list[jax.Array]:
            arguments = replace(micro_batches, totals=()).arguments_of(number)[:count]
            pairs = zip(arguments, has_sequence, strict=True)
            arguments = [jax.lax.all_gather(a, AXIS, axis=1, tiled=True) if is_split else a for a, is_split in pairs]
            return evaluate(self.micro_batch.equations, self.sums, self.micro_batch.known_values(arguments))

        of_all = jax.lax.map(sums_of, jnp.arange(micro_batches.count))
        sums = [jax.lax.psum(values.sum(0).astype(values.dtype), batch_axes) for values in of_all]
        known = {**self.whole.constants, **dict(zip(self.whole_sums, sums, strict=True))}
        return replace(micro_batches, totals=tuple(evaluate(self.whole.equations, self.totals, known)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingStep:
    """How the devices of a mesh divide a step.

    Attributes:
        arranged: the loss of one microbatch.
        stacks: which of the user's parameters are stored as one.
        experts: the dimension that counts experts, by parameter, where these are divided over devices.
        axes: the axes of the mesh.
        zero: the plan's ZeRO stage; 0 where there is nothing to divide over.
        micro_batch_size: samples of one microbatch of one copy.
        batch_shares: what of each argument of the batch a microbatch gets.
        has_sequence: for each argument, whether its second dimension is split over the devices of a sequence.
        batch_dtypes: the type in which the loss reads each argument; None for the type in which it comes.
        numbers_rows: whether the loss also reads the number of a microbatch's first row (see `trace_rewriting.py`).
        whole_batch: what microbatches take from the whole batch (see `mean_over_samples.py`); None for nothing.
        is_sum: whether the loss is the sum of the microbatches' losses, and not their mean.
        alternates: whether stages run forwards and backwards in turn, and not all forwards first.
        compute_dtype: the type in which the loss reads parameters.
        gradient_dtype: the type in which gradients are added up.
    """

    arranged: ArrangedLoss
    stacks: LayerStacks
    experts: Mapping[int, int]
    axes: MeshAxes
    zero: int
    micro_batch_size: int
    batch_shares: tuple[BatchShare, ...]
    has_sequence: tuple[bool, ...]
    batch_dtypes: tuple[DTypeLike | None, ...]
    numbers_rows: bool
    whole_batch: WholeBatch | None
    is_sum: bool
    alternates: bool
    compute_dtype: DTypeLike
    gradient_dtype: DTypeLike

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.axes.sizes["pp"]

    @property
    def storages(self) -> tuple[ParameterStorage, ...]:
        """How each parameter is stored."""
        return self.arranged.storages


def gradients_on_mesh(
    step: TrainingStep, layout: StateLayout
) -> Callable[[Sequence[jax.Array], Sequence[jax.Array]], LossAndGradients]:
    """The loss and the gradients as a function of flat parameters and a flat batch, run on every device of the mesh."""
    batch_specs = [
        step.axes.batch_spec(has_sequence=is_split) if share is BatchShare.ROWS else PartitionSpec()
        for share, is_split in zip(step.batch_shares, step.has_sequence, strict=True)
    ]
    manual = step.axes.manual
    mapped = jax.shard_map(
        lambda parameters, batch: _local_gradients(step, parameters, batch),
        mesh=layout.mesh,
        in_specs=(layout.parameter_specs(*manual), batch_specs),
        out_specs=(PartitionSpec(), layout.owned_specs(*manual)),
        axis_names=manual,
        check_vma=False,
    )
    return lambda parameters, batch: mapped(parameters, layout.constrain(batch_specs, batch))


def _local_gradients(
    step: TrainingStep, parameters: Sequence[jax.Array], batch: Sequence[jax.Array]
) -> LossAndGradients:
    """The mean loss of the whole batch in fp32, and this device's part of its gradients."""
    micro_batches = divide_batch(
        batch,
        step.batch_shares,
        step.micro_batch_size,
        step.batch_dtypes,
        row_axes=step.axes.batch if step.numbers_rows else None,
    )
    if step.whole_batch is not None:
        micro_batches = step.whole_batch.with_totals(micro_batches, step.axes.batch, step.has_sequence)
    compute = _pipelined_gradients if step.pp > 1 else _accumulated_gradients
    loss, gradients = compute(step, parameters, micro_batches)
    pairs = zip(step.storages, gradients, strict=True)
    reduced = [_reduced(step, storage, gradient) for storage, gradient in pairs]
    # All devices of a sequence have the same loss, which is counted once.
    scale = micro_batches.count / step.axes.size(step.axes.context) if step.is_sum else 1 / step.axes.copy_count
    return jax.lax.psum(loss, step.axes.copies) * scale, [
        gradient * jnp.asarray(scale, gradient.dtype) for gradient in reduced
    ]


def _pipelined_gradients(
    step: TrainingStep, parameters: Sequence[jax.Array], micro_batches: MicroBatches
) -> LossAndGradients:
    """Microbatches through all stages; their gradients are added up in the gradients' type.

    For that, parameters enter in that type, and every tick reads them in the compute type again.
    """
    pairs = zip(step.storages, parameters, strict=True)
    whole = [value if storage.is_stacked else gather_shards(storage, value, STAGES) for storage, value in pairs]
    if step.alternates:
        stage_loss, gradients = eager_1f1b_gradients(step.arranged, whole, step.gradient_dtype, micro_batches, step.pp)
        pairs = zip(step.storages, gradients, strict=True)
        return jax.lax.psum(stage_loss, "pp"), [_accumulable(step, storage, gradient) for storage, gradient in pairs]

    def loss(exact_parameters: Sequence[jax.Array]) -> jax.Array:
        return pipelined_loss(step.arranged, exact_parameters, step.compute_dtype, micro_batches, step.pp)

    stage_loss, gradients = jax.value_and_grad(loss)([value.astype(step.gradient_dtype) for value in whole])
    pairs = zip(step.storages, gradients, strict=True)
    return jax.lax.psum(stage_loss, "pp"), [_accumulable(step, storage, gradient) for storage, gradient in pairs]


def _accumulated_gradients(
    step: TrainingStep, parameters: Sequence[jax.Array], micro_batches: MicroBatches
) -> LossAndGradients:
    """The means of the losses and gradients of microbatches, which run one after the other."""

    def of_micro_batch(number: jax.Array | int) -> LossAndGradients:
        batch = micro_batches.arguments_of(number)
        differentiated = jax.value_and_grad(lambda given: loss_of_micro_batch(step.arranged, given, batch))
        loss, gradients = differentiated(list(parameters))
        pairs = zip(step.storages, gradients, strict=True)
        return loss.astype(jnp.float32), [_accumulable(step, storage, gradient) for storage, gradient in pairs]

    if micro_batches.count == 1:
        return of_micro_batch(0)

    def add(sums: LossAndGradients, number: jax.Array) -> tuple[LossAndGradients, None]:
        loss_sum, gradient_sums = sums
        loss, gradients = of_micro_batch(number)
        pairs = zip(gradient_sums, gradients, strict=True)
        return (loss_sum + loss, [gradient_sum + gradient for gradient_sum, gradient in pairs]), None

    shapes = jax.eval_shape(lambda: of_micro_batch(0))
    no_loss, zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    pairs = zip(step.storages, zeros, strict=True)
    no_gradients = [_split_like_parameter(step, storage, zero) for storage, zero in pairs]
    (loss, gradients), _ = jax.lax.scan(add, (no_loss, no_gradients), jnp.arange(micro_batches.count))
    return loss / micro_batches.count, [gradient / micro_batches.count for gradient in gradients]


def _accumulable(step: TrainingStep, storage: ParameterStorage, gradient: jax.Array) -> jax.Array:
    """A gradient as it is added up: in the gradients' type, and with ZeRO-2 this device's shard of the sum."""
    exact = _split_like_parameter(step, storage, gradient.astype(step.gradient_dtype))
    return reduce_to_shards(storage, exact, storage.shard_axes) if step.zero == 2 else exact


def _split_like_parameter(step: TrainingStep, storage: ParameterStorage, value: jax.Array) -> jax.Array:
    if step.arranged.tp == 1:
        return value
    return jax.lax.with_sharding_constraint(value, storage.partition_spec("tp"))


def _reduced(step: TrainingStep, storage: ParameterStorage, gradient: jax.Array) -> jax.Array:
    """The gradient with what is left to add up over stages and copies; nothing is left of an empty place."""
    if gradient.size == 0:
        return gradient
    if step.pp > 1 and not storage.is_stacked:
        gradient = reduce_to_shards(storage, gradient, STAGES)
    own = step.axes.experts if storage.expert_dim is not None else ()
    copies = tuple(axis for axis in step.axes.copies if step.axes.sizes[axis] > 1 and axis not in own)
    if step.zero == 0 or (step.zero == 3 and storage.shard_dim is None):
        return jax.lax.psum(gradient, copies) if copies else gradient
    if step.zero == 1:
        gradient = reduce_to_shards(storage, gradient, storage.shard_axes)
    between_groups = tuple(axis for axis in copies if axis not in storage.shard_axes)
    return jax.lax.psum(gradient, between_groups) if between_groups else gradient
