"""What each ZeRO stage holds, moves and buffers: bytes per trained parameter on each of the devices that copy it.

The dp x cp devices that run the same layers form `groups` groups of `shard` devices, neighbours on the network. Within
a group states are divided, between groups they are copied (hybrid sharding; one group of all is plain ZeRO):

    ZeRO stage                             0            1                2                3
    optimizer state (and master copy)      whole        1/shard          1/shard          1/shard
    gradients                              whole        whole            1/shard          1/shard
    parameters                             whole        whole            whole            1/shard
    every forward and every backward       -            -                -                all-gather of parameters
    every backward                         -            -                reduce-scatter   reduce-scatter of gradients
    once, after the last backward          all-reduce   reduce-scatter   -                -
    and then between groups                -            all-reduce of the 1/shard of gradients that a device has
    update of the parameters               all          1/shard          1/shard          1/shard
    once, after the update                 -            all-gather       all-gather       -
    buffers while layers run (shard > 1)   -            -                one gradient     and two gathered layers

(Rajbhandari et al., arXiv:1910.02054; groups: Zhang et al., arXiv:2205.00119.) All but the all-reduces run within a
group. Every row is a property of `ZeroSharding`. The three ``*_shards`` and `held_bytes_per_parameter` answer the first
three rows and the update, ``*_per_pass`` and ``*_per_backward`` the next two, ``*_per_batch`` the collectives that run
once, and the two ``*_buffer_bytes`` the last row. Collectives are given by the whole tensor that they work on, as
`Network.collective` prices them.

Experts that are divided over ep of these devices (neighbours, too) have fewer copies: dp x cp / ep devices hold the
same experts. As in Megatron-LM, each group of `shard` devices still holds one copy of all states: those of an expert
are divided over the shard / ep devices of the group that have it, and if ep is larger, they are not divided
(`ZeroSharding.of_experts`). One of shard and ep divides the other.

Parameters that are frozen are held, and with ZeRO-3 sharded and gathered, like the others; they have no gradients, no
optimizer states and no update (`ZeroSharding.of_frozen`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from phaze.hardware import PrecisionRecipe
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray

__all__ = ["ZeroSharding"]

_GATHERED_LAYERS = 2
"""ZeRO-3 keeps two gathered layers: the one that runs, and the next one, which arrives meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class ZeroSharding:
    """One ZeRO stage over groups of devices. All may be arrays; all properties are then computed elementwise.

    Attributes:
        recipe: bytes per parameter of each item when nothing is sharded.
        zero: ZeRO stage, 0 to 3.
        shard: devices of a group, which the sharded items are divided over.
        groups: how many groups have copies of the same parameters.
        divided: over how many devices experts are divided, of whose parameters this is; 1 for others.
    """

    recipe: PrecisionRecipe
    zero: int | IntArray
    shard: int | IntArray
    groups: int | IntArray = 1
    divided: int = 1

    def of_experts(self, ep: int) -> ZeroSharding:
        """The same of the parameters of experts that are divided over ``ep`` of the devices."""
        shard = np.maximum(np.asarray(self.shard) // ep, 1)
        groups = np.asarray(self.shard) * np.asarray(self.groups) // (ep * shard)
        return ZeroSharding(self.recipe, self.zero, shard, groups, ep)

    def of_frozen(self) -> ZeroSharding:
        """The same of parameters that are frozen."""
        return replace(self, recipe=self.recipe.of_frozen)

    def by_kind(self, ep: int, has_frozen: bool = False) -> tuple[ZeroSharding, ...]:
        """This one, of dense parameters, and that of experts where these are divided over ``ep`` > 1 devices.

        Where parameters are frozen, the same of those follow.
        """
        trained = (self,) if ep == 1 else (self, self.of_experts(ep))
        return (*trained, *(kind.of_frozen() for kind in trained)) if has_frozen else trained

    @property
    def optimizer_shards(self) -> IntArray:
        """Devices that optimizer state, master copy and the update are divided over."""
        return self._shards_from(1)

    @property
    def gradient_shards(self) -> IntArray:
        """Devices that accumulated gradients are divided over."""
        return self._shards_from(2)

    @property
    def parameter_shards(self) -> IntArray:
        """Devices that the parameters themselves are divided over."""
        return self._shards_from(3)

    def _shards_from(self, least_zero: int) -> IntArray:
        return np.where(np.asarray(self.zero) >= least_zero, self.shard, 1)

    @property
    def held_copy_bytes_per_parameter(self) -> FloatArray:
        """Bytes that the copy of one parameter that passes read takes on a device, whether it is trained or frozen."""
        is_cast = (np.asarray(self.zero) == 3) & self.recipe.casts_gathered_weights
        return np.asarray(np.where(is_cast, 0.0, self.recipe.parameter_bytes) / self.parameter_shards)

    @property
    def held_bytes_per_parameter(self) -> FloatArray:
        """Bytes that one trained parameter takes on a device: optimizer state, gradient and parameter together."""
        recipe = self.recipe
        return np.asarray(
            recipe.optimizer_bytes / self.optimizer_shards
            + recipe.gradient_bytes / self.gradient_shards
            + self.held_copy_bytes_per_parameter
        )

    @property
    def gathered_bytes_per_pass(self) -> FloatArray:
        """Bytes of one parameter that are gathered in every forward and again in every backward."""
        return np.where(np.asarray(self.zero) == 3, self.recipe.parameter_bytes, 0.0)

    @property
    def scattered_bytes_per_backward(self) -> FloatArray:
        """Bytes of one parameter's gradient that are reduce-scattered in every backward."""
        return np.where(np.asarray(self.zero) >= 2, self.recipe.reduction_bytes, 0.0)

    @property
    def reduced_bytes_per_batch(self) -> FloatArray:
        """Bytes of one parameter's gradient that are reduced after the last backward, within groups or between them."""
        is_reduced = (np.asarray(self.zero) < 2) | (np.asarray(self.groups) > 1)
        return np.where(is_reduced, self.recipe.reduction_bytes, 0.0)

    @property
    def gathered_bytes_per_batch(self) -> FloatArray:
        """Bytes of one parameter that are gathered after the update."""
        zero = np.asarray(self.zero)
        return np.where((zero == 1) | (zero == 2), self.recipe.parameter_bytes * self.recipe.trains, 0.0)

    @property
    def scatter_buffer_bytes(self) -> FloatArray:
        """Buffer per parameter of a stage's largest layer for the gradient that is being reduce-scattered."""
        return np.where(self._is_sharded & (np.asarray(self.zero) >= 2), self.recipe.reduction_bytes, 0.0)

    @property
    def gather_buffer_bytes(self) -> FloatArray:
        """Buffer per parameter of a stage's largest layer for gathered parameters."""
        gathered = _GATHERED_LAYERS * self.recipe.parameter_bytes
        return np.where(self._is_sharded & (np.asarray(self.zero) == 3), gathered, 0.0)

    @property
    def buffer_bytes(self) -> FloatArray:
        """Both buffers per parameter of a stage's largest layer."""
        return np.asarray(self.scatter_buffer_bytes + self.gather_buffer_bytes)

    @property
    def _is_sharded(self) -> BoolArray:
        return np.asarray(self.shard) > 1

    def least_reduced_share(self, replicas: IntArray) -> FloatArray:
        """Which part of a gradient each device sends at least after the last backward.

        Of groups that are no larger than these, over so many devices or more: a reduce-scatter over s devices sends
        1 - 1/s of the tensor, an all-reduce over n twice 1 - 1/n; with groups of s among n devices that is
        1 + 1/s - 2/n for ZeRO-1, and 2/s - 2/n from ZeRO-2 on.
        """
        zero, one_group = np.asarray(self.zero), 1 - 1 / np.asarray(replicas)
        between = 2 / np.asarray(self.shard) - 2 / np.asarray(replicas)
        later = np.where(zero == 1, np.maximum(one_group, 1 + between / 2 - 1 / np.asarray(replicas)), between)
        return np.maximum(np.where(zero == 0, 2 * one_group, later), 0.0)
