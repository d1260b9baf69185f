"""The answer: what to do, how fast it is, how full each device gets, and how each number was obtained.

A plan is plain data: it is saved as JSON under the names of its fields, and loads without the model. Wall-clock figures
stand under `run` alone; everything else is equal whenever the question was equal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import phaze
from phaze.cost import AttentionMode, Calibration, ComparableRuns
from phaze.errors import FormatError, shown
from phaze.file_access import read_document, write_whole
from phaze.hardware import PrecisionRecipe
from phaze.installed import installed_plugins
from phaze.json_documents import from_document, to_document, with_digest, without_digest
from phaze.objective import Objective, ObjectiveValue
from phaze.parallelism import Parallelism
from phaze.place.simulation.timeline import StagePasses, simulate_stages
from phaze.plan.plan_integrity import PlanStatus, check_integrity
from phaze.shard import LayoutConstraint

if TYPE_CHECKING:
    from phaze.hardware import Cluster
    from phaze.place.simulation.timeline import Timeline

__all__ = [
    "FORMAT",
    "VERSION",
    "Change",
    "Explainer",
    "Hashes",
    "Landscape",
    "LayerKind",
    "Layouts",
    "ModelFacts",
    "OpTime",
    "Plan",
    "PlanStatus",
    "Provenance",
    "QuestionFacts",
    "Remedy",
    "RunFacts",
    "RunnerUp",
    "SplitDim",
    "Stage",
    "StageLayer",
    "TimeSplit",
    "plan_from_document",
    "read_plan",
]

FORMAT = "phaze-plan"
_RUN = "run"  # the field of a plan that differs between equal questions
VERSION = 10
"""Version 10 says which degrees were left open, version 9 what layers keep and which recompute modes were asked for."""


@dataclass(frozen=True, slots=True)
class StageLayer:
    """One layer of a stage: its number in the model, and its path (`first .. last` where it spans several modules).

    `kind` is the position in `Plan.layer_kinds` of what it takes.
    """

    index: int
    path: str
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: its layers, and the ranks that run it, all copies, tensor-parallel neighbours side by side.

    `place` is its position along pp, `chunk` its number among the stages there. The memory is that of one device, all
    its chunks together, by item, with `total` and `capacity`. `passes` are what `Plan.timeline` is made of.
    """

    layers: tuple[StageLayer, ...]
    place: int
    chunk: int
    tp: int
    devices: tuple[int, ...]
    recompute: str
    forward_s: float
    backward_s: float
    memory_bytes: Mapping[str, float]
    fit: str
    passes: StagePasses


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """One op of a layer, with what is fused into it, for one microbatch on one device.

    `phase` is forward, backward or recompute. `binding` says what decides its time: compute, memory, fill, overhead or
    the link of a collective. Views are left out.
    """

    name: str
    phase: str
    start_s: float
    seconds: float
    binding: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What equal layers under one recompute mode take for a microbatch, its ops as scheduled, and what they keep."""

    name: str
    recompute: str
    forward_s: float
    backward_s: float
    recompute_s: float
    kept: tuple[str, ...]
    ops: tuple[OpTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Landscape:
    """Strategies that the search met, as columns: simulated ones, then the others by the bound under their time.

    `memory_bytes` is that of the fullest device, or a bound under it. `state` is "simulated", "pruned" (its bound does
    not beat the plan) or "open" (not looked at). Of `met` strategies the fastest are listed. `shard` may be 1.
    """

    met: int
    dp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    shard: tuple[int, ...]
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    chunks: tuple[int, ...]
    zero: tuple[int, ...]
    micro_batch_size: tuple[int, ...]
    schedule: tuple[str, ...]
    state: tuple[str, ...]
    seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDim:
    """A dimension cut over the tensor axis: see `phaze.shard.Split`."""

    dim: int
    outer: int
    chunk: int
    ways: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Splits by name; a tensor without splits is whole on every device of its stage.

    `key_exchanges`: how the keys of an attention meet all queries of a context, by its module (see `KeyExchange`).
    """

    parameters: Mapping[str, tuple[SplitDim, ...]]
    boundaries: Mapping[str, tuple[SplitDim, ...]]
    key_exchanges: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Where a step goes on the device that ends last: compute (recompute included), links that nothing hides, .."""

    compute_s: float
    exposed_communication_s: float
    bubble_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model that was planned, with one token per sample where it has no sequence; the last two as `Graph` says."""

    name: str
    parameter_count: int
    layers: int
    tokens_per_sample: int
    matmul_flops_per_sample: float
    mixes_samples: str = ""
    averages_samples: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFacts:
    """What was asked, defaults settled; `strategy` is what the user fixed, as `phaze.evaluate` took it.

    `has_shard_groups`: ZeRO may shard over groups of devices. `most_devices` are those that might have been used.
    """

    global_batch_size: int
    micro_batch_size: tuple[int, ...]
    tp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    recompute: tuple[str, ...]
    has_shard_groups: bool
    left_open: tuple[str, ...]  # degrees that nobody gave: more than the usual ones are offered while that pays
    precision: PrecisionRecipe
    calibration: Calibration
    attention: AttentionMode
    expert_imbalance: float
    objective: Objective
    most_devices: int
    target: str | None
    gap: float
    solver: str | None
    constraints: tuple[LayoutConstraint, ...]
    strategy: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How the numbers were obtained.

    `prices` names the calibration or is "ideal"; `comparable` says how far runs like it lay from predictions;
    `schedules` counts scheduled passes of layers and those proven within one percent; `coverage_bytes` is the share of
    the model's bytes in ops that have a rule.
    """

    prices: str
    comparable: ComparableRuns | None
    target: str
    method: str
    schedules: int
    schedules_proven: int
    coverage_flops: float
    coverage_bytes: float
    unrestricted_step_time_s: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashes:
    """Content hashes: a plan holds for this graph and this hardware, answers this question, made by this version."""

    graph: str
    hardware: str
    question: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The best plan of another kind, and what it loses."""

    kind: str
    strategy: Parallelism | None
    step_time_s: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What another cluster would bring: the same question, one thing changed."""

    text: str
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change after which something fits: in words, and as the argument of `optimize` that makes it."""

    text: str
    argument: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Wall-clock facts of one run; the only part of a plan that differs between equal questions."""

    seconds: float = 0.0
    is_cached: bool = False


class Explainer(Protocol):
    """What looks for the runners-up and the changes of a plan when somebody asks, and remembers them."""

    def known(self, plan: Plan) -> Plan:
        """The plan with what was looked for so far."""

    def explained(self, plan: Plan, model: object, inputs: object) -> Plan:
        """The plan with everything that an explanation says; where that cannot be found, its notes say why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `phaze.optimize` returns. `print` it, `explain` it, `save` it, `apply` it or `export` it.

    `bound_s` is a time that no plan of any slicing that was offered (or of the strategy that was given) can beat on as
    many devices. `value` is what was made least, and `gap` is (reached - bound) / reached of it; if the fewest devices
    were asked for, it is at least the gap of the step. `is_explained` is False until somebody asked for the best plans
    of other kinds; `explain()` looks for them, by the `explainer`.
    """

    model: ModelFacts
    hardware: Mapping[str, object]
    question: QuestionFacts
    status: PlanStatus
    strategy: Parallelism
    stages: tuple[Stage, ...]
    layouts: Layouts
    step_time_s: float
    step_time_parts: TimeSplit
    samples_per_s: float
    tokens_per_s: float
    mfu: float
    energy: Mapping[str, float]
    bound_s: float
    value: ObjectiveValue
    gap: float
    provenance: Provenance
    hashes: Hashes
    layer_kinds: tuple[LayerKind, ...]
    landscape: Landscape
    binds: tuple[str, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    changes: tuple[Change, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    is_explained: bool = True
    run: RunFacts = field(default_factory=RunFacts)
    explainer: Explainer | None = field(default=None, compare=False, repr=False, metadata={"is_saved": False})

    @property
    def is_feasible(self) -> bool:
        """Whether every device holds its stage."""
        return self.status is not PlanStatus.DOES_NOT_FIT

    @property
    def cluster(self) -> Cluster:
        """The devices that it was made for."""
        from phaze.hardware.hardware_files import cluster_from_json

        return cluster_from_json(dict(self.hardware))

    @property
    def micro_batches(self) -> int:
        """Microbatches that the fullest pipeline runs in a step."""
        samples, strategy = self.question.global_batch_size, self.strategy
        return strategy.micro_batches_per_pipeline(samples // strategy.micro_batch_size)

    def timeline(self) -> Timeline:
        """What every device of one pipeline does when, simulated again from the stages' passes."""
        return simulate_stages(self.strategy, self.micro_batches, [stage.passes for stage in self.stages])

    def to_json(self) -> str:
        """The plan as one JSON document, with as much of its explanation as was looked for so far."""
        document = {"format": FORMAT, "version": VERSION, **to_document(_known(self))}
        # The run has a digest of its own, so that equal questions have equal digests.
        run = with_digest(to_document(document.pop(_RUN)))
        return json.dumps({**with_digest(document), _RUN: run}, indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan: whole or not at all."""
        write_whole(path, self.to_json() + "\n")

    def explained(self, model: object = None, inputs: object = None) -> Plan:
        """The plan with its runners-up and changes, which are looked for once, when somebody asks.

        A plan from a file is searched again for them: by the `model` given here, else by the model's name.
        """
        looks = None if self.is_explained else self.explainer
        return self if looks is None else looks.explained(self, model, inputs)

    def explain(self, model: object = None, inputs: object = None) -> str:
        """Why it is so, as text: what binds, other plans, other hardware. Its arguments are those of `explained`."""
        from phaze.report.plan_text import explanation

        return explanation(self.explained(model, inputs))

    def apply(
        self,
        model: object,
        mesh: object = None,
        *,
        inputs: object = None,
        optimizer: object = None,
        loss_fn: object = None,
        targets: object = None,
        takes_mean: bool | None = None,
        loss_weight: object = None,
        batch_norm: str | None = None,
        weights: object = None,
        **others: object,
    ) -> Any:
        """The model arranged as the plan says, by the target that the plan was made for; see `phaze.backends`.

        `inputs` are those that `optimize` took. `optimizer` is a class of torch, or an object such as those of optax.
        `loss_fn` is the loss of what a module returns. `mesh` is a device mesh of the plan's sizes; by default one is
        made. In JAX, `targets` is the second argument of `loss_fn`, and `takes_mean` asks for the mean of the losses of
        microbatches, whatever the loss is. In torch, `loss_weight` says how much the loss of a microbatch counts
        ("samples", "sum" or a function), `batch_norm` is "synchronized" or "local", and `weights` fills models that are
        on the meta device. `others` are for targets of plugins. Raises PlanError if plan, model and options disagree.
        """
        from phaze.plan.handover import apply_plan

        named = {"inputs": inputs, "optimizer": optimizer, "targets": targets, "takes_mean": takes_mean}
        named |= {"loss_weight": loss_weight, "batch_norm": batch_norm, "weights": weights}
        return apply_plan(self, installed_plugins(), model, mesh, loss_fn, named, others)

    def specs(self, *trees: object) -> Any:
        """PartitionSpecs on `mesh()` for trees of your own arrays: parameters first, then optimizer state and batch.

        Raises PlanError for a plan whose target is not one of JAX.
        """
        specs = tuple(self._spec_target().specs(self, trees))
        return specs if len(specs) != 1 else specs[0]

    def mesh(self, *, explicit: bool = False) -> Any:
        """The mesh of the first devices that JAX sees; `specs` name its axes, which are explicit if asked for."""
        return self._spec_target().mesh(self, explicit=explicit)

    def constraints(self) -> Mapping[str, Any]:
        """PartitionSpecs of what lies between layers ("activations") and of what enters ("batch")."""
        return dict(self._spec_target().constraints(self))

    def logical_axis_rules(self, variables: object, activations: Sequence[str | None] = ()) -> Any:
        """`specs` for linen modules with logical names: see `phaze.backends.jax.user_shardings`."""
        return self._spec_target().logical_axis_rules(self, variables, activations)

    def _spec_target(self) -> Any:
        from phaze.plan.handover import spec_target

        return spec_target(self, installed_plugins())

    def export(self, target: str, model: object = None) -> Mapping[str, str]:
        """The plan for another tool: texts by file name. `phaze doctor` lists the targets.

        Raises UnknownNameError for an unknown target, PlanError for a plan that the target cannot run.
        """
        from phaze.plan.handover import export_plan

        return export_plan(self, installed_plugins(), target, model)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the step's timeline as a trace that chrome://tracing and Perfetto show: whole or not at all."""
        about = {"model": self.model.name, "strategy": to_document(self.strategy), "step_time_s": self.step_time_s}
        write_whole(path, json.dumps({**self.timeline().chrome_trace(), "otherData": about}, allow_nan=False))

    def to_html(self) -> str:
        """The plan's page: one self-contained HTML document, with as much of its explanation as was looked for."""
        from phaze.report.plan_page import plan_page

        return plan_page(_known(self))

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the plan's page: whole or not at all."""
        write_whole(path, self.to_html())

    def __str__(self) -> str:
        from phaze.report.plan_text import summary

        return summary(self)

    def _repr_html_(self) -> str:
        from phaze.report.html_views import plan_view

        return plan_view(self)


def _known(plan: Plan) -> Plan:
    """The plan with as much of its explanation as was looked for so far."""
    return plan if plan.is_explained or plan.explainer is None else plan.explainer.known(plan)


def plan_from_document(document: object, where: str = "plan") -> Plan:
    """The plan of a JSON document; raises FormatError where it is damaged, foreign or of another schema version."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(f"{where} is not a saved plan: its format is not {FORMAT!r}.")
    if (version := document.get("version")) != VERSION:
        raise FormatError(
            f"{where} has version {shown(version)}, phaze {phaze.__version__} reads {VERSION}. Make the plan again."
        )
    run = document.get(_RUN)
    if not isinstance(run, dict):
        raise FormatError(f"{where} lacks {_RUN!r}, the facts of the run that made it; the file is damaged.")
    document = without_digest({name: value for name, value in document.items() if name != _RUN}, where)
    body = {name: value for name, value in document.items() if name not in ("format", "version")}
    plan = from_document(Plan, {**body, _RUN: without_digest(run, f"{where}.{_RUN}")}, where)
    check_integrity(plan, where)
    return plan


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read the plan that `Plan.save` wrote; raises FormatError for a damaged file."""
    return plan_from_document(read_document(path, "a saved plan"), os.fspath(path))
