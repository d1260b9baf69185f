"""Whether the parts of a saved plan agree with each other, beyond the types of its fields.

`check_integrity` raises FormatError for a file whose numbers cannot be those of any plan, so that nobody who reads a
plan has to expect them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, fields
from typing import TYPE_CHECKING

from phaze.errors import FormatError

if TYPE_CHECKING:
    from phaze.plan.plan import Plan, Stage

__all__ = ["check_integrity"]


def check_integrity(plan: Plan, where: str) -> None:
    """Raise FormatError naming the first part that contradicts another."""
    wrong = next(_contradictions(plan), None)
    if wrong is not None:
        raise FormatError(f"{where}.{wrong}; the file is damaged.")


def _contradictions(plan: Plan) -> Iterator[str]:
    strategy, counts = plan.strategy, (plan.model.parameter_count, plan.model.layers, plan.model.tokens_per_sample)
    if min(counts) < 1:
        yield f"model has a count of {min(counts)}"
    if plan.micro_batches < 1:
        yield f"question has a batch that is smaller than microbatches of {strategy.micro_batch_size}"
    if min(plan.step_time_s, plan.bound_s, plan.samples_per_s, plan.tokens_per_s) <= 0:
        yield "step_time_s, its bound and its throughput are not all above 0"
    if len(plan.stages) != strategy.stages:
        yield f"stages are {len(plan.stages)} where the strategy has {strategy.stages}"
    for position, stage in enumerate(plan.stages):
        wrong = _stage_contradiction(plan, position, stage)
        if wrong:
            yield f"stages[{position}] {wrong}"
    columns = {len(getattr(plan.landscape, field.name)) for field in fields(plan.landscape) if field.name != "met"}
    if len(columns) > 1:
        yield "landscape has columns of different lengths"
    if min(plan.landscape.seconds, default=1.0) <= 0:
        yield "landscape has a time of no seconds"
    if any(min(op.seconds, kind.forward_s) < 0 for kind in plan.layer_kinds for op in kind.ops):
        yield "layer_kinds have negative seconds"
    others = [plan.provenance.unrestricted_step_time_s, *(other.step_time_s for other in plan.runners_up)]
    others += [change.step_time_s for change in plan.changes]
    if any(seconds is not None and seconds <= 0 for seconds in others):
        yield "provenance, runners_up or changes have a step of no seconds"


def _stage_contradiction(plan: Plan, position: int, stage: Stage) -> str | None:
    """What is wrong with one stage; None where nothing is."""
    memory, pp = stage.memory_bytes, plan.strategy.pp
    if (stage.place, stage.chunk) != (position % pp, position // pp):
        return f"is at place {stage.place}, chunk {stage.chunk}"
    if not stage.layers or not stage.devices or stage.tp < 1:
        return "has no layers or no devices"
    if any(not 0 <= layer.kind < len(plan.layer_kinds) for layer in stage.layers):
        return "has a layer of an unknown kind"
    if not {"total", "capacity"} < memory.keys() or min(memory.values()) < 0 or memory["capacity"] == 0:
        return "has no memory, or a negative one"
    if min(astuple(stage.passes)) < 0 or stage.passes.forward_s == 0:
        return "has passes of no or negative seconds"
    return None
