"""What is known about a plan in one word, and whether a saved plan says only what follows from itself.

`PlanStatus` is the word; `proven_status` says how it follows from the gap.

`check_integrity` derives again, beyond the types of the fields, what needs no model: the step from the stages' passes,
its parts, throughput and utilisation from it, the gap from the bound, the status from the gap and from memory, memory's
totals and whether they fit, energy's total, ranks, and the hashes of question and hardware. A file that contradicts
itself is a FormatError, so that nobody who reads a plan has to expect one, and no proof is shown that its own numbers
refute. What needs the model is checked by `phaze verify`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, fields
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING

from phaze.errors import FormatError, shown
from phaze.hardware.hardware_files import cluster_to_json
from phaze.json_documents import to_document
from phaze.limits import check_limit
from phaze.objective import Objective, ObjectiveKind, ObjectiveValue
from phaze.parallelism import Offload, Parallelism
from phaze.place.memory.device_memory import DeviceMemory, Fit
from phaze.question import content_hash
from phaze.tolerances import EQUAL_RESULTS, MEMORY_MARGIN

if TYPE_CHECKING:
    from phaze.plan.plan import Landscape, Plan, Stage

__all__ = ["BESIDE_ITEMS", "MEMORY_ITEMS", "PlanStatus", "check_integrity", "objective_gap", "proven_status"]


class PlanStatus(StrEnum):
    """What is known about a plan; one above the gap is less well proven than was asked."""

    OPTIMAL = "optimal"
    WITHIN_GAP = "within the gap"
    ABOVE_GAP = "above the gap"
    INTERRUPTED = "interrupted"
    DOES_NOT_FIT = "does not fit"


def proven_status(gap: float, asked_gap: float) -> PlanStatus:
    """The status of a plan that fits and whose search ran to its end."""
    if gap <= EQUAL_RESULTS:
        return PlanStatus.OPTIMAL
    return PlanStatus.WITHIN_GAP if gap <= asked_gap + EQUAL_RESULTS else PlanStatus.ABOVE_GAP


def objective_gap(objective: Objective, value: ObjectiveValue, step_gap: float) -> float:
    """How much better another plan could be, as a part of what the plan reaches.

    Of the fewest devices the plan is to be the fastest one, too: the larger of both gaps counts.
    """
    gap = (value.reached - value.bound) / value.reached
    return max(gap, step_gap) if objective.kind is ObjectiveKind.DEVICES else gap


MEMORY_ITEMS = ("parameters", "gradients", "optimizer", "activations", "working", "buffers")
"""What a stage's memory is made of."""

BESIDE_ITEMS = ("total", "capacity", "host")
"""What a stage's memory says beside what its device holds; "host" is what it keeps in the memory of its host."""

_LONGER = 1 + 1e-6
"""How much longer than asked a step may be, so that rounding decides nothing."""

_LARGEST_COUNT = 2**62
"""No count of a model is larger; floats hold products of such counts."""


def check_integrity(plan: Plan, where: str) -> None:
    """Raise FormatError naming the first part that contradicts another."""
    for contradictions in (_count_contradictions, _stage_contradictions, _claim_contradictions, _list_contradictions):
        wrong = next(contradictions(plan), None)
        if wrong is not None:
            raise FormatError(f"{where}.{wrong}; the file contradicts itself: it is damaged or forged.")


def _count_contradictions(plan: Plan) -> Iterator[str]:
    """What is wrong with counts, before anything is computed with them."""
    strategy, counts = plan.strategy, (plan.model.parameter_count, plan.model.layers, plan.model.tokens_per_sample)
    if not isinstance(plan.hardware.get("accelerator"), Mapping):
        yield "hardware has no accelerator of its own"
    check_limit("devices", plan.cluster.device_count, "the plan's device_count")
    check_limit("batch", plan.question.global_batch_size, "the plan's global_batch_size")
    if not 1 <= min(counts) <= max(counts) <= _LARGEST_COUNT:
        yield f"model has a count of {shown(min(counts) if min(counts) < 1 else max(counts))}"
    if plan.micro_batches < 1:
        yield f"question has a batch that is smaller than microbatches of {strategy.micro_batch_size}"
    if min(plan.step_time_s, plan.bound_s, plan.samples_per_s, plan.tokens_per_s) <= 0:
        yield "step_time_s, its bound and its throughput are not all above 0"
    if len(plan.stages) != strategy.stages or len(strategy.recompute) != strategy.stages:
        yield f"stages are {len(plan.stages)} where the strategy has {strategy.stages}"
    # Where a model branches, as into an encoder and a decoder, a stage may begin with a layer of lower number.
    indices = [[layer.index for layer in stage.layers] for stage in plan.stages]
    held = sorted(chain(*indices))
    is_whole = len(held) == plan.model.layers and held == list(range(len(held)))
    if not is_whole or any(each != sorted(each) for each in indices):
        yield f"stages do not hold the model's {plan.model.layers} layers in order, each once"
    if not 0 <= plan.provenance.schedules_proven <= plan.provenance.schedules:
        yield "provenance has more proven schedules than schedules"


def _stage_contradictions(plan: Plan) -> Iterator[str]:
    """What is wrong with single stages and their ranks."""
    ranks = 0
    for position, stage in enumerate(plan.stages):
        wrong = _stage_contradiction(plan, position, stage) or _memory_contradiction(plan, stage)
        if wrong:
            yield f"stages[{position}] {wrong}"
        if stage.chunk == 0:
            if stage.devices != tuple(range(ranks, ranks + len(stage.devices))):
                yield f"stages[{position}] has other devices than the next ones"
            ranks += len(stage.devices)
        elif stage.devices != plan.stages[stage.place].devices:
            yield f"stages[{position}] has other devices than the first chunk of its place"
    if ranks > plan.cluster.device_count:
        yield f"stages take {ranks} devices of {plan.cluster.device_count}"


def _stage_contradiction(plan: Plan, position: int, stage: Stage) -> str | None:
    """What is wrong with the layers, devices and seconds of one stage; None where nothing is."""
    strategy, passes = plan.strategy, stage.passes
    if (stage.place, stage.chunk) != strategy.schedule.place_of(strategy.pp, position):
        return f"is at place {stage.place}, chunk {stage.chunk}"
    if not stage.layers or not stage.devices or not 1 <= stage.tp <= strategy.tp:
        return "has no layers or no devices"
    if stage.recompute != strategy.recompute[position]:
        return f"recomputes {shown(stage.recompute)} where the strategy has {strategy.recompute[position]}"
    if any(not 0 <= layer.kind < len(plan.layer_kinds) for layer in stage.layers):
        return "has a layer of an unknown kind"
    if any(plan.layer_kinds[layer.kind].recompute != stage.recompute for layer in stage.layers):
        return "has a layer of another recompute mode"
    if min(astuple(passes)) < 0 or passes.forward_s == 0:
        return "has passes of no or negative seconds"
    if stage.forward_s != passes.forward_s or not _is_same(stage.backward_s, passes.backward_s + passes.weight_s):
        return "has other seconds than its passes"
    return None


def _memory_contradiction(plan: Plan, stage: Stage) -> str | None:
    """What is wrong with the memory of one stage; None where nothing is."""
    memory, calibration = stage.memory_bytes, plan.question.calibration
    needed = {*MEMORY_ITEMS, "total", "capacity", *(("reserved",) if calibration.reserve else ())}
    if not needed <= memory.keys() or min(memory.values()) < 0 or memory["capacity"] == 0:
        return "has no memory, or a negative one"
    device = DeviceMemory(
        **{f"{item}_bytes": memory[item] for item in MEMORY_ITEMS},
        capacity_bytes=float(plan.cluster.accelerator.hbm_bytes),
        margin=calibration.margin,
        reserve=calibration.reserve,
    )
    totals = {"total": device.total_bytes + device.reserved_bytes, "capacity": device.capacity_bytes}
    if "reserved" in memory:
        totals["reserved"] = device.reserved_bytes
    for name, derived in totals.items():
        if not _is_same(memory[name], derived):
            return f"has {name} memory of {memory[name]:.0f} bytes where its items make {derived:.0f}"
    host = plan.cluster.host
    most_host_bytes = 0 if host is None or plan.strategy.offload is Offload.NONE else host.memory_bytes
    if memory.get("host", 0.0) > most_host_bytes * (1 + EQUAL_RESULTS):
        return f"keeps {memory['host']:.0f} bytes on the host where it has {most_host_bytes}"
    if memory.keys() - needed - {"reserved", "host"}:
        return "has memory of an unknown kind"
    is_close = math.isclose(totals["total"], device.capacity_bytes * (1 - device.margin), rel_tol=MEMORY_MARGIN)
    if stage.fit != device.fit and not is_close:
        return f"is called {shown(stage.fit)} where its memory {device.fit}"
    return None


def _claim_contradictions(plan: Plan) -> Iterator[str]:
    """Times, throughput, proof, energy and hashes that do not follow from each other."""
    batch, facts, parts = plan.question.global_batch_size, plan.model, plan.step_time_parts
    chip, dtype = plan.cluster.accelerator, plan.question.precision.compute_dtype
    peak = chip.peak_flops_per_s(dtype) * plan.cluster.device_count
    energy = {name: joules for name, joules in plan.energy.items() if name not in ("total_j", "per_token_j")}
    derived = {
        "step_time_s": plan.timeline().time_s,
        "samples_per_s": batch / plan.step_time_s,
        "tokens_per_s": batch * facts.tokens_per_sample / plan.step_time_s,
        "mfu": facts.matmul_flops_per_sample * batch / plan.step_time_s / peak,
    }
    for name, value in derived.items():
        if not _is_same(getattr(plan, name), value):
            yield f"{name} is {getattr(plan, name):.9g} where its other numbers make {value:.9g}"
    total_s = parts.compute_s + parts.exposed_communication_s + parts.bubble_s + parts.update_s
    if not _is_same(total_s, plan.step_time_s) or min(astuple(parts)[1:]) < 0:
        yield f"step_time_parts add up to {total_s:.9g} s, not to the step"
    if plan.energy.keys() != {*energy, "total_j", "per_token_j"} or min(plan.energy.values()) < 0:
        yield "energy lacks its total, or has a negative item"
    if not _is_same(plan.energy["total_j"], sum(energy.values())):
        yield "energy.total_j is not the sum of its items"
    if not _is_same(plan.energy["per_token_j"], plan.energy["total_j"] / (batch * facts.tokens_per_sample)):
        yield "energy.per_token_j is not its total over the tokens"
    yield from _value_contradictions(plan)
    yield from _proof_contradictions(plan)
    if plan.provenance.prices != plan.question.calibration.name:
        yield "provenance.prices is not the name of the question's calibration"
    if plan.hashes.hardware != content_hash(json.dumps(cluster_to_json(plan.cluster), sort_keys=True)):
        yield "hashes.hardware is not that of the hardware"
    if plan.hashes.question != content_hash(json.dumps(to_document(plan.question), sort_keys=True)):
        yield "hashes.question is not that of the question"


def _value_contradictions(plan: Plan) -> Iterator[str]:
    """A value that is not what the plan's other numbers make of what was made small, or devices that are too many."""
    objective, devices, most = plan.question.objective, plan.cluster.device_count, plan.question.most_devices
    tokens = float(plan.question.global_batch_size * plan.model.tokens_per_sample)
    check_limit("devices", most, "the plan's most_devices")
    if devices > most or (devices < most and not objective.chooses_devices):
        yield f"question.most_devices is {most} where the plan takes {devices}"
    derived = {
        ObjectiveKind.THROUGHPUT: plan.step_time_s,
        ObjectiveKind.COST: objective.money(devices * plan.step_time_s, tokens),
        ObjectiveKind.ENERGY: plan.energy["per_token_j"],
        ObjectiveKind.DEVICES: float(devices),
    }[objective.kind]
    if derived is None or not _is_same(plan.value.reached, derived):
        yield f"value.reached is {plan.value.reached:.9g} where its other numbers make {derived}"
    if not 0 <= plan.value.bound <= plan.value.reached * (1 + EQUAL_RESULTS) or plan.value.reached <= 0:
        yield "value.bound is not between 0 and what is reached"
    if objective.kind is ObjectiveKind.THROUGHPUT and not _is_same(plan.value.bound, plan.bound_s):
        yield "value.bound is not bound_s"
    limit_s = objective.step_time_s
    if limit_s is not None and plan.is_feasible and not plan.question.strategy and plan.step_time_s > limit_s * _LONGER:
        yield f"step_time_s is {plan.step_time_s:.9g} where at most {limit_s:.9g} was asked"


def _proof_contradictions(plan: Plan) -> Iterator[str]:
    """A gap that is not between bound and step, and a status that is not what gap and memory make it."""
    step_gap = (plan.step_time_s - plan.bound_s) / plan.step_time_s
    gap = objective_gap(plan.question.objective, plan.value, step_gap)
    is_gap = -EQUAL_RESULTS <= step_gap < 1 and -EQUAL_RESULTS <= gap <= 1
    if not is_gap or not math.isclose(plan.gap, gap, abs_tol=EQUAL_RESULTS):
        yield f"gap is {plan.gap:.9g} where step and bound make {gap:.9g}"
    is_fitting = all(stage.fit == Fit.FITS for stage in plan.stages)
    if plan.is_feasible != is_fitting:
        yield f"status is {plan.status.value!r} where its stages {'fit' if is_fitting else 'do not all fit'}"
    derived = proven_status(gap, plan.question.gap)
    if plan.is_feasible and plan.status not in (PlanStatus.INTERRUPTED, derived):
        yield f"status is {plan.status.value!r} where its gap makes it {derived.value!r}"


def _list_contradictions(plan: Plan) -> Iterator[str]:
    """Tables and lists that cannot be."""
    columns = {len(getattr(plan.landscape, field.name)) for field in fields(plan.landscape) if field.name != "met"}
    if len(columns) > 1 or plan.landscape.met < max(columns):
        yield "landscape has columns of different lengths, or more rows than it met"
    if min(plan.landscape.seconds, default=1.0) <= 0:
        yield "landscape has a time of no seconds"
    impossible = _impossible_strategy(plan.landscape)
    if impossible is not None:
        yield f"landscape has a strategy that cannot be: {impossible}"
    if any(min(op.seconds, kind.forward_s) < 0 for kind in plan.layer_kinds for op in kind.ops):
        yield "layer_kinds have negative seconds"
    others = [plan.provenance.unrestricted_step_time_s, *(other.step_time_s for other in plan.runners_up)]
    others += [change.step_time_s for change in plan.changes]
    if any(seconds is not None and seconds <= 0 for seconds in others):
        yield "provenance, runners_up or changes have a step of no seconds"


def _impossible_strategy(met: Landscape) -> str | None:
    """Why one of the strategies that a search met cannot be; None where all can."""
    columns = (met.dp, met.cp, met.ep, met.shard, met.tp, met.pp, met.chunks, met.zero, met.micro_batch_size)
    for dp, cp, ep, shard, tp, pp, chunks, zero, size in zip(*columns, strict=True):
        try:
            Parallelism(dp=dp, cp=cp, ep=ep, shard=shard, tp=tp, pp=pp, chunks=chunks, zero=zero, micro_batch_size=size)
        except ValueError as error:
            return str(error)
    return None


def _is_same(claimed: float, derived: float) -> bool:
    """Whether two results are the same up to rounding."""
    return math.isclose(claimed, derived, rel_tol=EQUAL_RESULTS, abs_tol=EQUAL_RESULTS * EQUAL_RESULTS)
