"""Where the time of layers goes: each distinct layer of a plan with its passes and the ops in them, as scheduled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phaze.ir import RecomputeMode
from phaze.plan.plan import LayerKind, OpTime
from phaze.planner.strategy_search import Answer
from phaze.profile.layer_passes import PassReport
from phaze.profile.model_profiles import ModelProfiles

__all__ = ["LayerKinds", "layer_kinds"]


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """The distinct layers of a plan, and the number of each by its key and recompute mode."""

    slices: ModelProfiles
    listed: tuple[LayerKind, ...]
    numbers: dict[tuple[str, RecomputeMode], int]

    def number(self, layer: int, mode: RecomputeMode) -> int:
        """The position in `listed` of a layer under a recompute mode."""
        return self.numbers[self.slices.placement.layers[layer].key, mode]


def layer_kinds(answer: Answer) -> LayerKinds:
    """Every distinct layer under every recompute mode that the plan uses, in the order of the stages."""
    slices, listed, numbers = answer.candidate.slices, list[LayerKind](), dict[tuple[str, RecomputeMode], int]()
    for stage in answer.placement.stages:
        for layer in stage.layers:
            key = (slices.placement.layers[layer].key, stage.recompute)
            if key not in numbers:
                numbers[key] = len(listed)
                listed.append(_kind(slices, layer, stage.recompute))
    return LayerKinds(slices, tuple(listed), numbers)


def _kind(slices: ModelProfiles, layer: int, mode: RecomputeMode) -> LayerKind:
    report, name = slices.report(layer, mode), slices.graph.layers[layer].name
    passes = {"forward": report.forward, "backward": report.backward, "recompute": report.recompute}
    return LayerKind(
        name=name,
        recompute=mode.value,
        forward_s=report.forward.time_s,
        backward_s=report.backward.time_s,
        recompute_s=report.recompute.time_s,
        kept=report.kept,
        ops=tuple(op for phase, layer_pass in passes.items() for op in _ops(phase, layer_pass)),
    )


def _ops(phase: str, layer_pass: PassReport) -> Iterator[OpTime]:
    """The ops of a pass that take time, by their start."""
    schedule = layer_pass.schedule
    if schedule is None:
        return
    for entry in sorted(schedule.jobs, key=lambda entry: (entry.start_s, entry.job)):
        job = schedule.problem.jobs[entry.job]
        if entry.end_s > entry.start_s:
            yield OpTime(
                name=job.name,
                phase=phase,
                start_s=entry.start_s,
                seconds=entry.end_s - entry.start_s,
                binding=job.binding,
            )
