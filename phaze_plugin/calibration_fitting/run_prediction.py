"""The step time of a measured run under any calibration, without slicing or scheduling the model again.

The strategy is sliced once. A calibration then prices every pass from its parts, and the pipeline is simulated with the
tables of `phaze.place`; so a prepared run agrees with `phaze.evaluate` wherever ops run one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phaze.calibration_fitting.measured_runs import Run
from phaze.calibration_fitting.pass_decomposition import PassParts, pass_parts
from phaze.cost import Calibration, Stack
from phaze.cost.measured_kernels import LinkProtocols, link_protocols_of, product_kernels_of
from phaze.errors import QuestionError
from phaze.ir import Graph, RecomputeMode, recomputation
from phaze.ir.layers import single_layer
from phaze.parallelism import ALL_DEVICES, Choices, Parallelism, PipelineSchedule, read_strategy
from phaze.place import Flow, LayerProfile, PlacementGraph, PlacementLayer, PlacementProblem
from phaze.place.model.network_prices import Network
from phaze.place.model.stage_costs import StageCosts, build_stage_costs, update_s_per_parameter
from phaze.place.model.stage_space import StageSpace
from phaze.place.model.stage_sums import build_stage_sums
from phaze.place.simulation.event_simulation import Program, StageTimes, compile_order, simulated_s
from phaze.place.simulation.pass_orders import in_flight, pipeline_order
from phaze.place.simulation.placement import stage_times
from phaze.profile.layer_passes import placement_graph
from phaze.profile.layer_profile import (
    Bounded,
    expert_parameters,
    frozen_parameters,
    kept_bytes,
    layer_outputs,
    layer_parameter_bytes,
    moved_at_once,
    peak_working_bytes,
    shared_parameters,
    trained_tensors,
)
from phaze.profile.local_graphs import LocalGraphs
from phaze.profile.model_profiles import layer_keys, layer_variants, repeated_layers, slicings
from phaze.question import Question, QuestionOptions, ask, settled_cluster
from phaze.shard import ShardedLayer, ShardedModel, slice_layer

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = [
    "SHOWN_BLOCKS",
    "PreparedLayers",
    "PreparedRun",
    "complete_strategy",
    "deepened",
    "prepare_run",
]

SHOWN_BLOCKS = 4
"""Blocks in the model of a run that says how many it has: a first and a last one and two between them, which are equal
to all others between them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layer:
    """One distinct layer: its passes in parts, and its profile without seconds."""

    forward: PassParts
    backward: PassParts
    recompute: PassParts
    accumulated_bytes: float
    profile: LayerProfile

    def priced(self, calibration: Calibration, bandwidth: float) -> LayerProfile:
        """The profile with the seconds of a calibration; gradients are added to their sum at this HBM bandwidth."""
        summed_s = self.accumulated_bytes / (bandwidth * calibration.memory)
        return replace(
            self.profile,
            forward_s=Bounded.exact(self.forward.seconds(calibration)),
            backward_input_s=Bounded.exact(self.backward.seconds(calibration) + summed_s),
            recompute_s=Bounded.exact(self.recompute.seconds(calibration)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _SlicedModel:
    """A model sliced for one device: its layers as placement sees them, and the distinct ones by key."""

    placement: PlacementGraph
    layers: Mapping[str, _Layer]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedLayers:
    """Models sliced so far, so that runs which share a model, a slicing and a chip take the work of one.

    Runs share where their model is the same object; whoever prepares many runs imports each model once.
    """

    sliced: dict[object, _SlicedModel] = field(default_factory=dict)
    models: dict[int, object] = field(default_factory=dict)

    def of(
        self, run: Run, question: Question, parallelism: Parallelism, mode: RecomputeMode, stack: Stack
    ) -> _SlicedModel:
        """The run's model, sliced."""
        cluster, devices = question.cluster, parallelism.tp * parallelism.cp * parallelism.ep
        self.models[id(run.model)] = run.model  # An object that is kept alive shares its number with no other one.
        key = (
            *(id(run.model), run.sequence_length, question.attention, question.recipe, stack, mode),
            *(parallelism.micro_batch_size, parallelism.tp, parallelism.cp, parallelism.ep),
            *(question.choices.sequence_parallel, question.choices.expert_tp),
            *(cluster.accelerator, cluster.levels if devices > 1 else ()),
        )
        if key not in self.sliced:
            self.sliced[key] = _sliced(question, parallelism, mode, stack)
        return self.sliced[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRun:
    """A run whose step time is a function of the calibration alone."""

    run: Run
    stack: Stack
    links: LinkProtocols | None
    problem: PlacementProblem
    space: StageSpace
    parallelism: Parallelism
    layers: Mapping[str, _Layer]
    mode: RecomputeMode
    program: Program

    def seconds(self, calibrations: Sequence[Calibration]) -> NDArray[np.float64]:
        """The step time under each calibration; their stacks and measured kernels are replaced by the run's own."""
        own = [replace(calibration, stack=self.stack, links=self.links) for calibration in calibrations]
        times_by_calibration = [self._times(calibration) for calibration in own]
        stacked = StageTimes(
            **{
                name: np.concatenate([getattr(times, name) for times in times_by_calibration])
                for name in StageTimes.__slots__
            }
        )
        return simulated_s(self.program, stacked)

    def passes(self) -> list[PassParts]:
        """Every pass of every layer and microbatch of a step on one device."""
        passes: list[PassParts] = []
        for layer in self.problem.graph.layers:
            parts = self.layers[layer.key]
            passes += [parts.forward, parts.backward, parts.recompute] * self.program.order.micro_batches
        return passes

    @property
    def update_bytes_s(self) -> float:
        """What the traffic of updating all parameters takes at full bandwidth, on one device."""
        parameters = sum(self.layers[layer.key].profile.parameters for layer in self.problem.graph.layers)
        moved = self.problem.recipe.update_bytes * parameters
        return moved / self.problem.cluster.accelerator.hbm_bandwidth_bytes_per_s

    @property
    def needed_bytes(self) -> float:
        """What the fullest device needs, without what allocator and libraries hold besides."""
        memory, parallelism = self._table(Calibration(stack=self.stack)).memory, self.parallelism
        schedule = parallelism.schedule
        rounds = parallelism.micro_batches_per_pipeline(self.problem.micro_batches)
        flights = in_flight(schedule, parallelism.pp, rounds, parallelism.chunks).tolist()
        places = [
            [(0, chunk * parallelism.pp + place) for chunk in range(parallelism.chunks)]
            for place in range(parallelism.pp)
        ]
        return max(
            memory.of_device(self.problem, chunks, flight).total_bytes
            for chunks, flight in zip(places, flights, strict=True)
        )

    def _times(self, calibration: Calibration) -> StageTimes:
        """Seconds of every stage's passes."""
        table = self._table(calibration)
        return stage_times(table, [(stage, 0) for stage in range(len(self.space.source))], self.parallelism)

    def _table(self, calibration: Calibration) -> StageCosts:
        """What every stage costs and holds."""
        bandwidth, tp = self.problem.cluster.accelerator.hbm_bandwidth_bytes_per_s, self.parallelism.tp
        profiles = {(key, tp, self.mode): layer.priced(calibration, bandwidth) for key, layer in self.layers.items()}
        problem = replace(self.problem, profiles=profiles, calibration=calibration)
        return build_stage_costs(
            problem,
            self.space,
            build_stage_sums(problem, self.space, tp, use_bounds=False),
            Network(problem.cluster, calibration),
            self.parallelism,
            update_s=update_s_per_parameter(problem),
            mixes_tp=False,
        )


def prepare_run(run: Run, stack: Stack, plugins: PluginManager, known: PreparedLayers | None = None) -> PreparedRun:
    """Slice a run's strategy; raises what `phaze.evaluate` raises for a model, cluster or strategy that cannot be.

    `known` keeps what serves other runs again.
    """
    stack = run.stack or stack
    fixed = read_strategy(run.strategy)
    options: QuestionOptions = {
        "cluster": run.cluster,
        "global_batch_size": run.global_batch_size,
        "precision": run.precision,
        "sequence_length": run.sequence_length,
        "target": None,
        "calibration": replace(_measured(run, plugins), stack=stack),
        "attention": run.attention,
    }
    question = ask(run.model, None, options, plugins, {"tp": 1, **run.strategy})
    layers = len(question.graph.layers) + (0 if run.blocks is None else run.blocks - SHOWN_BLOCKS)
    parallelism = complete_strategy(fixed, question, layers)
    stages = fixed.get("stages") or _even_stages(layers, parallelism.stages)
    assert isinstance(stages, tuple)
    return _prepared(run, question, parallelism, stages, stack, known or PreparedLayers())


def _measured(run: Run, plugins: PluginManager) -> Calibration:
    """The measured kernels of the chip that a run was on, all else ideal."""
    chip = settled_cluster(run.cluster, plugins).accelerator
    return Calibration(name="preparing", products=product_kernels_of(chip), links=link_protocols_of(chip))


def complete_strategy(fixed: Mapping[str, object], question: Question, layers: int | None = None) -> Parallelism:
    """A strategy with nothing left open: what it lacks is the plainest choice.

    The model has so many layers, or those of the question's graph.
    """
    tp, pp, chunks, cp, ep = (int(str(fixed.get(name, 1))) for name in ("tp", "pp", "chunks", "cp", "ep"))
    dp = int(str(fixed.get("dp") or max(1, question.cluster.device_count // (tp * cp * pp))))
    shard = fixed.get("shard", ALL_DEVICES)
    assert isinstance(shard, int | str)
    plainest = PipelineSchedule.ONE_F_ONE_B if chunks == 1 else PipelineSchedule.INTERLEAVED
    modes = fixed.get("recompute", (RecomputeMode.NONE,))
    assert isinstance(modes, tuple)
    if len(set(modes)) > 1:
        raise QuestionError("recompute differs between stages; measured runs need one mode for all of them.")
    layers = len(question.graph.layers) if layers is None else layers
    if pp * chunks > layers:
        raise QuestionError(f"{pp * chunks} stages for {layers} layers; expected at most one stage a layer.")
    return Parallelism(
        dp=dp,
        shard=shard,
        cp=cp,
        ep=ep,
        tp=tp,
        pp=pp,
        chunks=chunks,
        schedule=PipelineSchedule(str(fixed.get("schedule", PipelineSchedule.NONE if pp == 1 else plainest))),
        zero=0 if dp * cp == 1 else int(str(fixed.get("zero", 0))),
        micro_batch_size=question.micro_batch_sizes[0],
        recompute=modes[:1],
    )


def _even_stages(layers: int, count: int) -> tuple[int, ...]:
    """Layers per stage, as equal as they can be, the first stages taking what is left over."""
    return tuple(layers // count + (stage < layers % count) for stage in range(count))


def _prepared(
    run: Run,
    question: Question,
    parallelism: Parallelism,
    stages: tuple[int, ...],
    stack: Stack,
    known: PreparedLayers,
) -> PreparedRun:
    mode, tp = parallelism.recompute[0], parallelism.tp
    sliced = known.of(run, question, parallelism, mode, stack)
    placement = sliced.placement if run.blocks is None else deepened(sliced.placement, run.blocks)
    problem = PlacementProblem(
        graph=placement,
        profiles={(key, tp, mode): layer.profile for key, layer in sliced.layers.items()},
        cluster=question.cluster,
        micro_batches=question.global_batch_size // parallelism.micro_batch_size,
        cp=parallelism.cp,
        ep=parallelism.ep,
        recipe=question.recipe,
        choices=Choices(recompute=(mode,)),
    )
    if sum(stages) != len(placement.layers):
        raise QuestionError(f"strategy has stages of {sum(stages)} layers; the model has {len(placement.layers)}.")
    schedule = parallelism.schedule
    rounds = parallelism.micro_batches_per_pipeline(problem.micro_batches)
    return PreparedRun(
        run=run,
        stack=stack,
        links=question.calibration.links,
        problem=problem,
        space=_space_of(stages),
        parallelism=parallelism,
        layers=sliced.layers,
        mode=mode,
        program=compile_order(pipeline_order(schedule, parallelism.pp, rounds, parallelism.chunks)),
    )


def deepened(graph: PlacementGraph, blocks: int) -> PlacementGraph:
    """The layers of a model with so many equal blocks in a row, from one that shows `SHOWN_BLOCKS` of them.

    The third block is repeated: the first and the last one may be sliced otherwise than those between them. Tensors
    that it makes go to the next one only, and what it reads of earlier layers its copies read, too.
    """
    is_block = [index for index, is_body in enumerate(graph.body) if is_body]
    more = blocks - SHOWN_BLOCKS
    if len(is_block) != SHOWN_BLOCKS or is_block != list(range(is_block[0], is_block[0] + SHOWN_BLOCKS)) or more < 0:
        raise QuestionError(
            f"the model shows {len(is_block)} equal blocks and is said to have {blocks}; "
            f"expected {SHOWN_BLOCKS} in a row."
        )
    repeated = is_block[-2]
    copies = range(repeated + 1, repeated + more + 1)

    def moved(index: int) -> int:
        return index + more if index > repeated else index

    flows = []
    for flow in graph.flows:
        consumers = [moved(index) for index in flow.consumers]
        if flow.producer == repeated:
            flows += [Flow(index - 1, (index,), flow.output) for index in copies]
            flows.append(Flow(repeated + more, tuple(consumers), flow.output))
        else:
            among = [*copies] if repeated in flow.consumers and repeated + 1 in flow.consumers else []
            flows.append(Flow(moved(flow.producer), tuple(sorted([*consumers, *among])), flow.output))
    kept = graph.layers
    layers = (*kept[: repeated + 1], *[kept[repeated]] * more, *kept[repeated + 1 :])
    return PlacementGraph(
        layers=tuple(
            PlacementLayer(f"{index}:{layer.name.partition(':')[2]}", layer.key) for index, layer in enumerate(layers)
        ),
        flows=tuple(flows),
        ties={name: tuple(moved(index) for index in members) for name, members in graph.ties.items()},
    )


def _sliced(question: Question, parallelism: Parallelism, mode: RecomputeMode, stack: Stack) -> _SlicedModel:
    """The model on one device of tp, cp and ep, in the slicing whose layers take least time one after the other."""
    tp, cp, ep = parallelism.tp, parallelism.cp, parallelism.ep
    graph = LocalGraphs(question).at(parallelism.micro_batch_size, tp=tp, cp=cp, ep=ep)
    model = min(slicings(question, graph, tp, cp=cp, ep=ep), key=lambda sharded: sharded.seconds)
    return _SlicedModel(
        placement=placement_graph(graph, layer_keys(model)),
        layers=_layers(model, mode, stack, question.recipe.gradient_bytes),
    )


def _layers(model: ShardedModel, mode: RecomputeMode, stack: Stack, gradient_bytes: float) -> dict[str, _Layer]:
    """The distinct layers by key; only layers that repeat are computed again."""
    repeated = repeated_layers(model)
    layers = {}
    for key, sharded in layer_variants(model).items():
        layer_mode = mode if sharded.problem.layer.key in repeated else RecomputeMode.NONE
        layers[key] = _layer(sharded, slice_layer(sharded), layer_mode, stack, gradient_bytes)
    return layers


def _layer(sharded: ShardedLayer, local: Graph, mode: RecomputeMode, stack: Stack, gradient_bytes: float) -> _Layer:
    layer, axis = single_layer(local), sharded.problem.axis
    chosen = recomputation(local, layer, mode)
    summed = 0.0 if stack.accumulates_in_products else gradient_bytes
    tied = sharded.problem.graph.layer_graph.tied_parameters
    return _Layer(
        forward=pass_parts(local, layer.forward, axis, stack),
        backward=pass_parts(local, layer.backward, axis, stack),
        recompute=pass_parts(local, chosen.again, axis, stack),
        accumulated_bytes=sum(
            tensor.size_bytes + 2 * summed * tensor.elements
            for tensor in local.parameters
            if summed and tensor.is_trained
        ),
        profile=LayerProfile(
            forward_s=Bounded.exact(0.0),
            backward_input_s=Bounded.exact(0.0),
            backward_weight_s=Bounded.exact(0.0),
            recompute_s=Bounded.exact(0.0),
            parameter_bytes=layer_parameter_bytes(local),
            stashed_bytes=kept_bytes(local, layer, chosen, stack),
            peak_working_bytes=peak_working_bytes(local, layer, chosen),
            outputs=layer_outputs(sharded),
            is_tensor_parallel=axis.tp > 1,
            tied_parameters=shared_parameters(local, tied),
            expert_parameters=expert_parameters(local),
            frozen_parameters=frozen_parameters(local),
            frozen_expert_parameters=expert_parameters(local, frozen=True),
            frozen_ties=shared_parameters(local, tied, frozen=True),
            moved_at_once=moved_at_once(local, axis.cluster.accelerator),
            trained_tensors=trained_tensors(local),
        ),
    )


def _space_of(stages: Sequence[int]) -> StageSpace:
    """The stage space that holds just these stages of a chain."""
    ends = np.concatenate([[0], np.cumsum(stages)])
    inside = np.arange(int(ends[-1])) < ends[:, None]
    count = len(stages)
    return StageSpace(inside=inside, source=np.arange(count), target=np.arange(1, count + 1))
