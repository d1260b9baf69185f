"""Recompute policies by the names that tools give them, and the mode that keeps the same.

    MaxText       remat_policy of configs/base.yml (layers/decoders.py, `get_remat_policy`)
    JAX           jax.checkpoint_policies
    torchtitan    activation_checkpoint.mode and selective_ac_option
    Megatron-LM   --recompute-granularity

Policies that move what is kept to the host's memory are a mode and `offload=activations` at once: a strategy may name
them. What `RecomputeMode` says of a mode (`kept_activations.py`) is what is priced; targets write the name that stands
here.
"""

from __future__ import annotations

from phaze.errors import QuestionError, near_names, shown
from phaze.ir.kept_activations import BUDGET_MODES, RecomputeMode

__all__ = ["BUDGET", "MAXTEXT_POLICIES", "OFFLOADING_POLICIES", "recompute_mode"]

BUDGET = "budget"
"""What stands for all modes with a budget where a search is told which modes to try."""

MAXTEXT_POLICIES: dict[str, RecomputeMode] = {
    "none": RecomputeMode.NONE,
    "minimal_with_context": RecomputeMode.DOTS_AND_CONTEXT,
    "minimal": RecomputeMode.DOTS,
    "save_dot_except_mlp": RecomputeMode.PROJECTIONS,
    "save_qkv_proj": RecomputeMode.QKV,
    "save_out_proj": RecomputeMode.OUT,
    "full": RecomputeMode.FULL,
}
"""What MaxText calls each mode that it has."""

_OTHER_NAMES: dict[str, RecomputeMode] = {
    "minimal_flash": RecomputeMode.DOTS_AND_CONTEXT,  # MaxText's older name
    "everything_saveable": RecomputeMode.NONE,
    "dots_with_no_batch_dims_saveable": RecomputeMode.DOTS,
    "checkpoint_dots_with_no_batch_dims": RecomputeMode.DOTS,
    "nothing_saveable": RecomputeMode.FULL,
    "selective-op": RecomputeMode.PRODUCTS,  # torchtitan
    "core_attn": RecomputeMode.SELECTIVE,  # Megatron-LM's --recompute-modules
}

OFFLOADING_POLICIES: dict[str, RecomputeMode] = {
    "minimal_offloaded": RecomputeMode.DOTS,  # MaxText
    "qkv_proj_offloaded": RecomputeMode.QKV,  # MaxText
    "offload_dot_with_no_batch_dims": RecomputeMode.DOTS,  # JAX
}
"""What policies keep that move it to the host. What enters a layer, which they leave on the device, is moved, too."""


def recompute_mode(name: object) -> RecomputeMode:
    """The mode that keeps what a policy keeps, by the mode's own name or a tool's; raises QuestionError for others."""
    if isinstance(name, RecomputeMode):
        return name
    if name in OFFLOADING_POLICIES:
        raise QuestionError(
            f"recompute {name!r} keeps activations in the host's memory. As a mode it is "
            f"{OFFLOADING_POLICIES[str(name)].value!r}; write that, and offload=activations in the strategy."
        )
    if name == BUDGET:
        raise QuestionError(
            f"strategy has recompute {name!r}; say which part of the bytes may be kept: {', '.join(BUDGET_MODES)}."
        )
    known = {mode.value: mode for mode in RecomputeMode} | MAXTEXT_POLICIES | _OTHER_NAMES
    if not isinstance(name, str) or name not in known:
        near = near_names(str(name), known)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        modes = ", ".join(RecomputeMode)
        raise QuestionError(
            f"strategy has recompute {shown(name)}; expected one of {modes}, or a policy of MaxText, JAX, torchtitan "
            f"or Megatron-LM by its name.{hint}"
        )
    return known[name]
