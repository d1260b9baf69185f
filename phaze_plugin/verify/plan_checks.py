"""Verification of a plan by code that trusts none of its numbers: `check_plan` derives them again and compares.

1. The plan belongs to the model, and was made by this version (`_belonging_findings`).
2. Its strategy is added up and simulated a second time by the plain code of `plain_placement`, from slices whose
   schedules pass the schedule verifier: seconds and memory of every stage, whether they fit, the step and its parts
   (`_step_findings`, `_memory_findings`).
3. No strategy that the question offers takes less than the bound, or where nothing fits, none fits: shown by the plain
   code of `bound_checks` and `plain_bound`, without the planner (`_bound_finding`). Where models are too large for
   plain code to decide every strategy, the finding says for how many the next check stands alone.
4. The question is asked again (`_asked_again_findings`). Every value of the answer, the bound included, must be what
   the plan says. A plan that was interrupted claims only what follows from its question and its strategy, and all of
   that is derived again.

No field of the plan leaves a check out: whatever a plan says of itself, all of it is compared with what is derived.

Prices of single ops and collectives, the choice of slices and the bounds of single layers are shared with planning.

Whether layers that recompute within a budget keep what they say is shown by an integer program (`budget_checks`).
For one distinct layer and its budget, with k_t whether tensor t is kept and r_o whether forward op o runs again:

    minimise    the sum over ops of their seconds times r_o
    subject to  k_t + r_p >= 1      for every t that backward reads, made by op p of the layer             (1)
                k_t + r_p >= r_o    for every input t of op o that op p of the layer makes                 (2)
                k_t >= r_o          for every input t of op o that enters the layer                        (3)
                k_t = 1             for every t that backward reads and that enters the layer              (4)
                the bytes of all k_t within the budget                                                     (5)

Planning walks through states instead (`phaze.ir.recompute_budget`); both share the seconds of single ops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import phaze
from phaze.errors import PhazeError
from phaze.installed import installed_plugins
from phaze.ir import Graph, Layer, OpKind, Phase, RecomputeMode, Role, kept_tensors
from phaze.ir.layers import single_layer
from phaze.json_documents import to_document
from phaze.objective import ObjectiveKind
from phaze.parallelism import PipelineSchedule
from phaze.plan.plan import LayerKind, Plan, PlanStatus
from phaze.plan.plan_integrity import MEMORY_ITEMS, check_integrity
from phaze.planner import explanation
from phaze.planner.candidate_slicings import as_first_asked
from phaze.planner.device_counts import on_devices
from phaze.planner.fixed_stages import price_fixed_stages, strategy_with_stages
from phaze.planner.plan_building import build_plan
from phaze.planner.planning import plan_for
from phaze.planner.progress import Watch
from phaze.planner.strategy_search import Answer
from phaze.profile.layer_passes import op_seconds
from phaze.profile.model_profiles import profile_options
from phaze.question import Question, default_notes
from phaze.shard import slice_layer
from phaze.solvers import AUTOMATIC_SOLVERS, ProblemBuilder, WorkLimits, solve_linear
from phaze.tolerances import EQUAL_CLAIMS, EQUAL_CLAIMS_ABSOLUTE, EQUAL_COPIES, EQUAL_COPIES_ABSOLUTE
from phaze.verify.bound_checks import BoundProof, derive_bound, derive_value_bound
from phaze.verify.plain_pipeline import PlainStage, plain_in_flight, plain_simulation, plain_stages_of, without_turn
from phaze.verify.plain_placement import PlainCosts
from phaze.verify.saved_plan import differences, question_for

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = [
    "BudgetCheck",
    "Derivation",
    "Finding",
    "budget_checks",
    "check_plan",
    "compare_plan",
    "derive_plan",
    "least_again_s",
]

_WHOLE_UNITS = 1e6
"""Seconds are counted in microseconds, so that the solver's absolute tolerances lie far below an op."""


class BudgetCheck(NamedTuple):
    """What a layer with a budget claims, and the most that it may be."""

    what: str
    claimed: float
    most: float


def budget_checks(plan: Plan, answer: Answer) -> Iterator[BudgetCheck]:
    """That each distinct layer with a budget stays within it, and computes no more again than it must."""
    slices = answer.candidate.slices
    layers = {entry.kind: entry.index for stage in plan.stages for entry in stage.layers}
    for number, kind in enumerate(plan.layer_kinds):
        mode = RecomputeMode(kind.recompute)
        if mode.budget is None or number not in layers or not slices.report(layers[number], mode).recompute.ops:
            continue  # layers that are not recomputed at all keep everything in every mode
        sharded = slices.sharded.layers[layers[number]]
        local = slice_layer(sharded)
        layer = single_layer(local)
        seconds = op_seconds(sharded, local, layer.forward, profile_options(answer.question))
        yield from _layer_checks(kind, local, layer, mode.budget, seconds)


def _layer_checks(
    kind: LayerKind, local: Graph, layer: Layer, share: float, seconds: Mapping[str, float]
) -> Iterator[BudgetCheck]:
    def size(names: tuple[str, ...]) -> int:
        return sum(local.tensors[name].size_bytes for name in names)

    least, most = (size(kept_tensors(local, layer, mode)) for mode in (RecomputeMode.FULL, RecomputeMode.NONE))
    budget = least + share * max(most - least, 0)
    is_known = all(name in local.tensors for name in kind.kept)
    yield BudgetCheck(f"bytes that {kind.name} keeps", size(kind.kept) if is_known else math.inf, budget)
    claimed_s = _again_s(local, layer, frozenset(kind.kept), seconds)
    yield BudgetCheck(
        f"seconds that {kind.name} computes again", claimed_s, least_again_s(local, layer, budget, seconds)
    )


def _again_s(local: Graph, layer: Layer, kept: frozenset[str], seconds: Mapping[str, float]) -> float:
    """Seconds of all ops that must run again where some tensors are kept; infinite where one cannot be made again."""
    makers = {name: op for op in layer.forward for name in op.outputs}
    waiting, again = [name for name in _read_by_backward(local, layer) if name not in kept], set()
    while waiting:
        op = makers.get(waiting.pop())
        if op is None:
            return math.inf
        if op.id not in again:
            again.add(op.id)
            reads = (local.storage(name) for name in op.inputs)
            waiting += [name for name in reads if name not in kept and _is_activation(local, name)]
    return math.fsum(seconds[name] for name in again)


def least_again_s(local: Graph, layer: Layer, budget_bytes: float, seconds: Mapping[str, float]) -> float:
    """The least seconds of ops that run again where no more bytes are kept, by the integer program above."""
    ops = [op for op in layer.forward if op.kind is not OpKind.VIEW]
    makers = {name: index for index, op in enumerate(ops) for name in op.outputs}
    reads = [{storage for name in op.inputs if _is_activation(local, storage := local.storage(name))} for op in ops]
    wanted = _read_by_backward(local, layer)
    tensors = sorted({*wanted, *makers, *(name for names in reads for name in names)})
    builder = ProblemBuilder("recompute budget")
    again = builder.binaries(len(ops), cost=[seconds[op.id] * _WHOLE_UNITS for op in ops]).tolist()
    kept = dict(zip(tensors, builder.binaries(len(tensors)).tolist(), strict=True))
    for name in wanted:
        maker = [again[makers[name]]] if name in makers else []
        builder.rows([kept[name], *maker], lower=1.0)  # (1), (4)
    for index, names in enumerate(reads):
        for name in names:
            maker = [again[makers[name]]] if name in makers else []
            builder.rows([again[index], kept[name], *maker], [-1.0, 1.0, *([1.0] * len(maker))], lower=0.0)  # (2), (3)
    scale = max(1.0, budget_bytes)
    sizes = [local.tensors[name].size_bytes / scale for name in tensors]
    builder.rows([kept[name] for name in tensors], sizes, upper=budget_bytes / scale)  # (5)
    result = solve_linear(builder.build(), WorkLimits(), AUTOMATIC_SOLVERS)
    return result.objective / _WHOLE_UNITS


def _is_activation(local: Graph, name: str) -> bool:
    """Whether a tensor must be kept or made again: parameters and constants are there anyway."""
    return local.tensors[name].role in (None, Role.BATCH)


def _read_by_backward(local: Graph, layer: Layer) -> list[str]:
    """The forward tensors that backward ops read."""
    forward = {name for op in layer.forward for name in op.outputs}
    names = {local.storage(name) for op in layer.backward for name in op.inputs}

    def is_kept(name: str) -> bool:
        producer = local.producer(name)
        is_made = producer is not None and producer.phase is Phase.FORWARD
        return name in forward or is_made or local.tensors[name].role is Role.BATCH

    return sorted(filter(is_kept, names))


_RUN = ("run",)
"""Fields of a plan that say how it was made, and differ from run to run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked: what the plan says, what was derived, and whether they agree.

    With `says_how`, what was found says how far something was shown, which is worth reading where it holds, too.
    """

    what: str
    claimed: str
    found: str
    holds: bool
    says_how: bool = False


def check_plan(
    plan: Plan,
    model: object,
    inputs: object = None,
    *,
    plugins: PluginManager | None = None,
    watch: Watch | None = None,
) -> list[Finding]:
    """Everything that was checked, in order; a plan is good if every finding holds."""
    watch, plugins = watch or Watch(), plugins or installed_plugins()
    findings = [*_belonging_findings(plan, model, inputs, plugins), *_integrity_findings(plan)]
    if not all(finding.holds for finding in findings):
        return findings
    return [*findings, *compare_plan(plan, derive_plan(plan, question_for(plan, model, inputs, plugins), watch))]


@dataclass(frozen=True, slots=True, eq=False)
class Derivation:
    """What follows from a plan's question, strategy, stages and bound.

    Attributes:
        answer: the strategy's price.
        again: the plan asked for again.
        bound: what plain code shows of the bound on the step that the plan claims, on as many devices.
        value_bound: what it shows of the bound on what was made small, where the objective chooses the devices.
    """

    answer: Answer
    again: Plan
    bound: BoundProof
    value_bound: BoundProof | None = None


def derive_plan(plan: Plan, question: Question, watch: Watch) -> Derivation:
    """Price a plan's strategy, and ask its question again; raises PhazeError where the plan asks for nothing possible.

    A plan that was interrupted is built from its strategy alone, which is all that it claims.
    """
    watch.report("pricing the strategy a second time")
    asked = question.with_strategy(plan.question.strategy)
    first_asked = as_first_asked(asked, plan.question.left_open)
    used, value_bound = question, None
    if question.objective.chooses_devices:
        used = on_devices(question, plan.cluster.device_count)
        if plan.is_feasible:
            value_bound = derive_value_bound(asked, _claimed_value(plan), watch)
    answer = price_fixed_stages(used.with_strategy(strategy_with_stages(plan)), watch)
    used = replace(used.with_strategy(plan.question.strategy), grows=first_asked.grows)
    bound = derive_bound(used, plan.bound_s if plan.is_feasible else math.inf, watch)
    if plan.status is not PlanStatus.INTERRUPTED:
        return Derivation(answer, plan_for(first_asked, watch, explain=plan.is_explained), bound, value_bound)
    again = build_plan(used, replace(answer, question=used, is_interrupted=True))
    again = replace(again, binds=explanation.binding(again), is_explained=bool(asked.strategy))
    return Derivation(answer, again, bound, value_bound)


def _claimed_value(plan: Plan) -> float:
    """The bound that a plan claims of what was made small: device-seconds or joules of a step, or devices."""
    objective, tokens = plan.question.objective, plan.question.global_batch_size * plan.model.tokens_per_sample
    match objective.kind:
        case ObjectiveKind.COST:
            return plan.value.bound / (objective.money(1.0, tokens) or 1.0)
        case ObjectiveKind.ENERGY:
            return plan.value.bound * tokens
        case _:
            return plan.value.bound


def compare_plan(plan: Plan, derivation: Derivation) -> list[Finding]:
    """Every value of a plan against what was derived, by the plain code and by asking again."""
    return [
        *_plain_findings(plan, derivation.answer),
        _bound_finding(plan, derivation.bound),
        *_value_findings(plan, derivation.value_bound),
        *_asked_again_findings(plan, derivation.again),
    ]


def _bound_finding(plan: Plan, bound: BoundProof) -> Finding:
    """What plain code shows of the bound, over everything that was offered."""
    if not plan.is_feasible:
        return Finding(
            "nothing fits, shown plainly", plan.status.value, str(bound), bound.faster is None, says_how=True
        )
    is_within = plan.bound_s <= bound.time_s * (1 + EQUAL_CLAIMS)
    holds = bound.faster is None and is_within
    return Finding("no strategy beats the bound, shown plainly", f"{plan.bound_s}", str(bound), holds, says_how=True)


def _value_findings(plan: Plan, bound: BoundProof | None) -> Iterator[Finding]:
    """What plain code shows of the bound on what was made small, over all numbers of devices."""
    if bound is not None:
        what = f"no strategy on up to {plan.question.most_devices} devices beats its bound, shown plainly"
        yield Finding(what, f"{plan.value.bound}", str(bound), bound.faster is None, says_how=True)


def _integrity_findings(plan: Plan) -> Iterator[Finding]:
    try:
        check_integrity(plan, "plan")
        yield Finding("it does not contradict itself", "a plan", "a plan", True)
    except PhazeError as error:
        yield Finding("it does not contradict itself", "a plan", str(error), False)


def _shared_experts(plan: Plan, graph: Graph) -> set[str]:
    """What a plan's layouts do to the weights of experts that its graph sends tokens to: "divided", "cut", or both."""
    rows: dict[str, int] = {}  # tensors of experts' rows, which count experts along their first dimension
    shared: set[str] = set()
    for op in graph.ops_of(Phase.FORWARD):
        counts = {rows[name] for name in op.inputs if name in rows}
        counts |= {graph.tensors[op.outputs[0]].shape[0]} if op.function == "dispatch" else set()
        kept = {name: count for name in op.outputs for count in counts if graph.tensors[name].shape[:1] == (count,)}
        rows |= kept
        for name in op.inputs if kept else ():
            splits = plan.layouts.parameters.get(name, ())
            shared |= {"divided" if split.dim == 0 else "cut" for split in splits}
    return shared


def _belonging_findings(plan: Plan, model: object, inputs: object, plugins: PluginManager) -> Iterator[Finding]:
    differing = differences(plan, model, inputs, None, plugins)
    is_same = not differing
    yield Finding("the plan is for this model", plan.model.name, "; ".join(differing) or "the same graph", is_same)
    now = phaze.__version__
    yield Finding("it was made by this version", plan.hashes.version, now, plan.hashes.version == now)


def _plain_findings(plan: Plan, answer: Answer) -> Iterator[Finding]:
    """Time and memory by the plain code."""
    problem, parallelism = answer.candidate.problem, plan.strategy
    allows_mixed_tp = problem.capabilities.allows_mixed_tp and parallelism.chunks == 1
    costs = PlainCosts(problem, parallelism, allows_mixed_tp)
    stages = _plain_stages(costs, plan)
    # A single stage has no schedule; its passes run in the order of any of them.
    is_single = parallelism.schedule is PipelineSchedule.NONE
    schedule = PipelineSchedule.ONE_F_ONE_B.value if is_single else parallelism.schedule.value
    micro_batches = parallelism.micro_batches_per_pipeline(problem.micro_batches)
    yield from _step_findings(plan, stages, plain_simulation(schedule, parallelism.pp, micro_batches, stages))
    if plan.is_feasible:
        # The bound holds for every plan that was offered, this one with the quickest schedules of its layers included.
        quickest = _plain_stages(replace(costs, uses_bounds=True, known_s={}), plan)
        least_s = plain_simulation(schedule, parallelism.pp, micro_batches, quickest)
        is_below = plan.bound_s <= least_s * (1 + EQUAL_CLAIMS)
        yield Finding(
            "the bound is not above the plan with its layers' bounds", f"{plan.bound_s}", f"{least_s}", is_below
        )
    shared = _shared_experts(plan, answer.question.graph)
    if parallelism.expert_tp is not None and shared:
        said = "divided" if parallelism.expert_tp == 1 else "cut"
        yield Finding("how tp devices share experts", said, " and ".join(sorted(shared)), shared == {said})
    for what, claimed, most in budget_checks(plan, answer):
        yield Finding(f"{what} within a budget", f"{claimed}", f"{most}", claimed <= most * (1 + EQUAL_CLAIMS))
    yield from _memory_findings(plan, stages, schedule, micro_batches, problem.usable_bytes)


def _step_findings(plan: Plan, stages: Sequence[PlainStage], step_s: float) -> Iterator[Finding]:
    """The step, its parts, its bound, and the passes of every stage."""
    yield _number_finding("step time, simulated plainly", plan.step_time_s, step_s)
    parts = plan.step_time_parts
    total_s = parts.compute_s + parts.exposed_communication_s + parts.bubble_s + parts.update_s
    yield _number_finding("its parts add up", plan.step_time_s, total_s)
    is_below = plan.bound_s <= step_s * (1 + EQUAL_CLAIMS)
    yield Finding("the bound is not above it", f"{plan.bound_s}", f"{step_s}", is_below)
    for index, (claimed, stage) in enumerate(zip(plan.stages, stages, strict=True)):
        yield _number_finding(f"stage {index}: forward", claimed.forward_s, stage.forward_s)
        yield _number_finding(f"stage {index}: backward", claimed.backward_s, stage.backward_s + stage.weight_s)


def _memory_findings(
    plan: Plan, stages: Sequence[PlainStage], schedule: str, micro_batches: int, usable_bytes: float
) -> Iterator[Finding]:
    """The memory of every place in the pipeline, and whether it fits."""
    pp, chunk_count, is_fitting = plan.strategy.pp, plan.strategy.chunks, True
    for place in range(pp):
        items = _plain_memory(
            [stages[held] for held in plain_stages_of(schedule, pp, len(stages), place)],
            [plain_in_flight(schedule, pp, micro_batches, chunk_count, place, chunk) for chunk in range(chunk_count)],
        )
        host_bytes = items.pop("host", 0.0)
        is_fitting &= sum(items.values()) <= usable_bytes
        no_claim: Mapping[str, float] = {}  # no stage of the plan says that it has this place
        claimed = next((stage.memory_bytes for stage in plan.stages if stage.place == place), no_claim)
        for item in MEMORY_ITEMS:
            yield _number_finding(f"place {place}: {item} bytes", claimed.get(item, math.nan), items[item])
        yield _number_finding(f"place {place}: bytes on the host", claimed.get("host", 0.0), host_bytes)
    yield Finding("feasibility", str(plan.is_feasible), str(is_fitting), plan.is_feasible == is_fitting)


def _plain_stages(costs: PlainCosts, plan: Plan) -> list[PlainStage]:
    stages, first = [], 0
    for stage, mode in zip(plan.stages, plan.strategy.recompute, strict=True):
        count = len(stage.layers)
        stages.append(costs.stage(set(range(first)), set(range(first, first + count)), mode))
        first += count
    return without_turn(plan.strategy.schedule.value, plan.strategy.pp, stages)


def _plain_memory(chunks: Sequence[PlainStage], in_flight: Sequence[int]) -> dict[str, float]:
    """Memory of one device by item, from its chunks and the microbatches that each of them holds."""
    held = {name: sum(stage.held_bytes[name] for stage in chunks) for name in ("parameters", "gradients", "optimizer")}
    largest = max(chunks, key=lambda stage: stage.scratch_bytes)
    host_bytes = sum(
        stage.host_bytes + count * stage.host_stash_bytes for stage, count in zip(chunks, in_flight, strict=True)
    )
    return {
        **held,
        **({"host": host_bytes} if host_bytes else {}),
        "activations": sum(count * stage.stash_bytes for stage, count in zip(chunks, in_flight, strict=True)),
        "working": largest.working_bytes,
        "buffers": largest.buffer_bytes,
    }


def _without_notes(plan: Plan, left_out: frozenset[str]) -> Plan:
    notes = tuple(note for note in plan.provenance.notes if note not in left_out)
    return replace(plan, provenance=replace(plan.provenance, notes=notes))


def _asked_again_findings(plan: Plan, again: Plan) -> Iterator[Finding]:
    """Every value of the plan against that of the question asked again."""
    # Asked again, everything is given: notes that say what was not given the first time are no difference.
    assumed = default_notes(plan.cluster)
    claimed, derived = (_leaves(_without_notes(either, assumed), _RUN) for either in (plan, again))
    wrong = [
        path for path in dict.fromkeys((*claimed, *derived)) if not _is_equal(claimed.get(path), derived.get(path))
    ]
    yield Finding("every number, asked again", f"{len(claimed)} values", f"{len(wrong)} differ", not wrong)
    for path in wrong:
        yield Finding(path, str(claimed.get(path)), str(derived.get(path)), False)


def _leaves(plan: Plan, left_out: Sequence[str]) -> dict[str, object]:
    """Every value of a plan's document by its path."""
    leaves: dict[str, object] = {}

    def walk(path: str, value: object) -> None:
        if isinstance(value, Mapping):
            for name, item in value.items():
                walk(f"{path}.{name}" if path else str(name), item)
        elif isinstance(value, list):
            leaves[f"{path}.count"] = len(value)
            for index, item in enumerate(value):
                walk(f"{path}[{index}]", item)
        else:
            leaves[path] = value

    walk("", {name: value for name, value in to_document(plan).items() if name not in left_out})
    return leaves


def _is_equal(claimed: object, derived: object) -> bool:
    if isinstance(claimed, float) or isinstance(derived, float):
        if not isinstance(claimed, int | float) or not isinstance(derived, int | float):
            return False
        return math.isclose(claimed, derived, rel_tol=EQUAL_COPIES, abs_tol=EQUAL_COPIES_ABSOLUTE)
    return claimed == derived


def _number_finding(what: str, claimed: float, derived: float) -> Finding:
    holds = math.isclose(claimed, derived, rel_tol=EQUAL_CLAIMS, abs_tol=EQUAL_CLAIMS_ABSOLUTE)
    return Finding(what, f"{claimed:.9g}", f"{derived:.9g}", holds)
