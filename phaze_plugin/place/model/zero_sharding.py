"""What each ZeRO stage holds, moves and buffers: bytes per trained parameter on each of dp data-parallel copies.

    ZeRO stage                             0            1                2                3
    optimizer state (and master copy)      whole        1/dp             1/dp             1/dp
    gradients                              whole        whole            1/dp             1/dp
    parameters                             whole        whole            whole            1/dp
    every forward and every backward       -            -                -                all-gather of parameters
    every backward                         -            -                reduce-scatter   reduce-scatter of gradients
    once, after the last backward          all-reduce   reduce-scatter   -                -
    update of the parameters               all          1/dp             1/dp             1/dp
    once, after the update                 -            all-gather       all-gather       -
    buffers while layers run (dp > 1)      -            -                one gradient     and two gathered layers

(Rajbhandari et al., arXiv:1910.02054.) Every row is a property of `ZeroSharding`. The three ``*_shards`` and
`held_bytes_per_parameter` answer the first three rows and the update, ``*_per_pass`` and ``*_per_backward`` the next
two, ``*_per_batch`` the collectives that run once, and the two ``*_buffer_bytes`` the last row. Collectives are given
by the whole tensor that they work on, as `Network.collective` prices them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phaze.hardware import PrecisionRecipe
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray

__all__ = ["ZeroSharding"]

_GATHERED_LAYERS = 2
"""ZeRO-3 keeps two gathered layers: the one that runs, and the next one, which arrives meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class ZeroSharding:
    """One ZeRO stage over dp copies. Both may be arrays; all properties are then computed elementwise.

    Attributes:
        recipe: bytes per parameter of each item when nothing is sharded.
        zero: ZeRO stage, 0 to 3.
        dp: data-parallel copies, which the sharded items are divided over.
    """

    recipe: PrecisionRecipe
    zero: int | IntArray
    dp: int | IntArray

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
        return np.where(np.asarray(self.zero) >= least_zero, self.dp, 1)

    @property
    def held_bytes_per_parameter(self) -> FloatArray:
        """Bytes that one trained parameter takes on a device: optimizer state, gradient and parameter together."""
        recipe = self.recipe
        return np.asarray(
            recipe.optimizer_bytes / self.optimizer_shards
            + recipe.gradient_bytes / self.gradient_shards
            + recipe.parameter_bytes / self.parameter_shards
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
    def all_reduced_bytes_per_batch(self) -> FloatArray:
        """Bytes of one parameter's gradient that are all-reduced after the last backward."""
        return np.where(np.asarray(self.zero) == 0, self.recipe.reduction_bytes, 0.0)

    @property
    def scattered_bytes_per_batch(self) -> FloatArray:
        """Bytes of one parameter's gradient that are reduce-scattered after the last backward."""
        return np.where(np.asarray(self.zero) == 1, self.recipe.reduction_bytes, 0.0)

    @property
    def gathered_bytes_per_batch(self) -> FloatArray:
        """Bytes of one parameter that are gathered after the update."""
        zero = np.asarray(self.zero)
        return np.where((zero == 1) | (zero == 2), self.recipe.parameter_bytes, 0.0)

    @property
    def scatter_buffer_bytes(self) -> FloatArray:
        """Buffer per parameter of a stage's largest layer for the gradient that is being reduce-scattered."""
        return np.where(self._is_copied & (np.asarray(self.zero) >= 2), self.recipe.reduction_bytes, 0.0)

    @property
    def gather_buffer_bytes(self) -> FloatArray:
        """Buffer per parameter of a stage's largest layer for gathered parameters."""
        gathered = _GATHERED_LAYERS * self.recipe.parameter_bytes
        return np.where(self._is_copied & (np.asarray(self.zero) == 3), gathered, 0.0)

    @property
    def buffer_bytes(self) -> FloatArray:
        """Both buffers per parameter of a stage's largest layer."""
        return np.asarray(self.scatter_buffer_bytes + self.gather_buffer_bytes)

    @property
    def _is_copied(self) -> BoolArray:
        return np.asarray(self.dp) > 1
