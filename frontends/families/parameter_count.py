"""How many parameters a config's model has, and how many of them a token meets, without building its graph.

The family's own writer runs on a builder that keeps parameters and forgets ops, so that the count is the graph's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phaze.frontends.families import fields_of, write_model
from phaze.ir import Attribute, DType, GraphBuilder, OpKind, Phase, Role, Rule

__all__ = ["ParameterCount", "count_parameters"]

ROUTED = ".experts."
"""Stands in the names of the parameters of routed experts, in all families."""


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters, those that a token meets (of routed experts only the chosen ones), and the length of a sequence."""

    total: int
    active: int
    sequence_length: int


class _ParameterTally(GraphBuilder):
    """A builder that numbers the results of ops and forgets all else about them."""

    def add(
        self,
        op_id: str,
        kind: OpKind,
        function: str,
        rule: Rule,
        inputs: Iterable[str],
        *,
        dtypes: Sequence[DType] | None = None,
        results: Sequence[str] = (),
        module: str = "",
        phase: Phase = Phase.FORWARD,
        gradient_of: str = "",
        origin: str = "",
        attributes: Mapping[str, Attribute] | None = None,
    ) -> tuple[str, ...]:
        """Names for the op's results; nothing is kept."""
        return (op_id, *(f"{op_id}:{name}" for name in results))


def count_parameters(config: Mapping[str, object]) -> ParameterCount:
    """The counts of a model given by its config, a dict with a known model_type."""
    builder = _ParameterTally("count")
    fields = fields_of(config)
    write_model(fields, builder)
    sizes = {tensor.id: math.prod(tensor.shape) for tensor in builder.tensors.values() if tensor.role is Role.PARAMETER}
    total = sum(sizes.values())
    routed = [name for name in sizes if ROUTED in name]
    idle = 0
    if routed:
        chosen = fields.size("num_experts_per_tok")
        # The first dimension of a routed expert's parameter counts the experts.
        idle = sum(sizes[name] - sizes[name] // builder.tensors[name].shape[0] * chosen for name in routed)
    ids = builder.tensors.get("input_ids")
    return ParameterCount(total, total - idle, _length(builder) if ids is None else ids.shape[1])


def _length(builder: GraphBuilder) -> int:
    """The positions of a model without tokens: those of its learned positions."""
    return next(tensor.shape[-2] for tensor in builder.tensors.values() if tensor.id.endswith("position_embeddings"))
