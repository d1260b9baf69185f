"""A placed model: from chosen stages to step time, memory per device, time parts and timeline, all from one simulation.

`evaluate_placement` takes stages that somebody else chose, and `assemble` the stages of a search. Both return the same
`Placement` for the same stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phaze.errors import PlacementError
from phaze.parallelism import Parallelism
from phaze.place.memory.device_memory import DeviceMemory, Fit
from phaze.place.model.stage_costs import StageCosts
from phaze.place.model.stage_space import FloatArray
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.simulation.event_simulation import Simulation, StageTimes, simulate
from phaze.place.simulation.pass_orders import in_flight, stages_of_devices
from phaze.place.simulation.timeline import StagePasses, Timeline, build_timeline
from phaze.profile.layer_profile import RecomputeMode

__all__ = [
    "PlacedStage",
    "Placement",
    "TimeParts",
    "assemble",
    "evaluate_placement",
    "memory_of_devices",
    "stage_times",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """One stage of the pipeline.

    Attributes:
        layers: indices into the graph, in order.
        recompute: its recompute mode.
        device: its place in the pipeline.
        chunk: which of the device's stages it is.
        tp: devices that share each of its layers.
        forward_s: one forward, receiving included.
        backward_s: one backward with its weights' part, receiving and recompute included.
        passes: the parts of both, and of what follows the last pass.
    """

    layers: tuple[int, ...]
    recompute: RecomputeMode
    device: int
    chunk: int
    tp: int
    forward_s: float
    backward_s: float
    passes: StagePasses


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParts:
    """Where the batch goes on the device that ends last; the parts add up to the batch.

    Attributes:
        compute_s: forward and backward of its layers.
        recompute_s: running forward again.
        transfer_s: receiving from neighbours, as far as recompute does not hide it.
        collective_s: gathering parameters and scattering gradients that layers do not hide.
        bubble_s: waiting.
        reduction_s: gradients that are reduced after the last backward.
        update_s: the optimizer, and gathering what it updated.
    """

    compute_s: float
    recompute_s: float
    transfer_s: float
    collective_s: float
    bubble_s: float
    reduction_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """A plan and what it costs.

    Attributes:
        parallelism: how devices are divided.
        micro_batches: of the fullest pipeline.
        stages: in the order of the pipeline.
        memory: of one device of each place in the pipeline.
        time_s: simulated seconds per batch.
        parts: where they go.
        timeline: every pass of one pipeline.
    """

    parallelism: Parallelism
    micro_batches: int
    stages: tuple[PlacedStage, ...]
    memory: tuple[DeviceMemory, ...]
    time_s: float
    parts: TimeParts
    timeline: Timeline

    @property
    def device_count(self) -> int:
        """Devices in use."""
        by_place = [
            max(stage.tp for stage in self.stages if stage.device == place) for place in range(len(self.memory))
        ]
        return self.parallelism.replicas * sum(by_place)

    @property
    def fit(self) -> Fit:
        """The worst of its devices."""
        fits = {memory.fit for memory in self.memory}
        return next(fit for fit in (Fit.OVER, Fit.MARGINAL, Fit.FITS) if fit in fits)


def evaluate_placement(
    prepared: PreparedProblem, parallelism: Parallelism, stages: Sequence[tuple[Sequence[int], RecomputeMode]]
) -> Placement:
    """The placement of given stages, whether it fits or not.

    Raises:
        PlacementError: the stages do not cut the graph in order, or are not as many as the strategy says.
    """
    space, modes = prepared.space, prepared.problem.choices.recompute
    if len(stages) != parallelism.stages:
        raise PlacementError(f"{len(stages)} stages for {parallelism.pp} devices of {parallelism.chunks} chunks.")
    if parallelism.tp not in prepared.stage_sums:
        raise PlacementError(f"tp {parallelism.tp} was not profiled; known are {list(prepared.stage_sums)}.")
    states = {row.tobytes(): index for index, row in enumerate(space.inside)}
    pairs = {pair: index for index, pair in enumerate(zip(space.source.tolist(), space.target.tolist(), strict=True))}
    placed, before, stages_and_modes = np.zeros(space.layers, dtype=bool), 0, []
    for layers, mode in stages:
        if mode not in modes:
            raise PlacementError(f"recompute mode {mode} is not among {[str(known) for known in modes]}.")
        placed[list(layers)] = True
        after = states.get(placed.tobytes())
        if after is None or (before, after) not in pairs:
            raise PlacementError(f"stage {list(layers)} is empty, or reads from a later stage.")
        if space.members(pairs[before, after]) != tuple(sorted(layers)):
            raise PlacementError(f"stage {list(layers)} repeats layers of an earlier stage.")
        stages_and_modes.append((pairs[before, after], modes.index(mode)))
        before = after
    if before != space.states - 1:
        raise PlacementError(f"layers {np.flatnonzero(~placed).tolist()} are in no stage.")
    return assemble(prepared, parallelism, stages_and_modes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StageRows:
    """What the tables say of the chosen stages, per stage in the order of the pipeline.

    Attributes:
        costs: times and memory of all stages.
        index: (modes, stages) of the chosen ones, which indexes arrays per (mode, stage).
        received_s: receiving the activation.
        returned_s: receiving the gradient.
        recompute_s: recompute.
        work_s: forward and backward of the layers alone.
    """

    costs: StageCosts
    index: tuple[list[int], list[int]]
    received_s: FloatArray
    returned_s: FloatArray
    recompute_s: FloatArray
    work_s: FloatArray


def assemble(
    prepared: PreparedProblem, parallelism: Parallelism, stages_and_modes: Sequence[tuple[int, int]]
) -> Placement:
    """The placement of stages given by their index in the stage space and their mode."""
    problem, micro_batches = prepared.problem, prepared.micro_batches(parallelism)
    costs, sums = prepared.stage_costs(parallelism), prepared.stage_sums[parallelism.tp]
    listed, modes = [stage for stage, _ in stages_and_modes], [mode for _, mode in stages_and_modes]
    index = (modes, listed)
    turn = parallelism.pp if parallelism.schedule.is_v_shaped else -1  # nothing is sent where a V turns
    is_behind_turn, is_before_turn = (np.arange(len(listed)) == stage for stage in (turn, turn - 1))
    rows = _StageRows(
        costs=costs,
        index=index,
        received_s=np.where(is_behind_turn, 0.0, costs.received_s[listed]),
        returned_s=np.where(is_before_turn, 0.0, costs.returned_s[listed]),
        recompute_s=sums.recompute_s[index],
        work_s=sums.forward_s[index] + sums.backward_input_s[index] + sums.backward_weight_s[index],
    )
    times = stage_times(costs, stages_and_modes, parallelism)
    passes = _passes(rows, times, parallelism)
    simulation = simulate(prepared.program(parallelism), times)
    return Placement(
        parallelism=parallelism,
        micro_batches=micro_batches,
        stages=tuple(
            PlacedStage(
                layers=prepared.space.members(stage),
                recompute=problem.choices.recompute[mode],
                device=place[0],
                chunk=place[1],
                tp=int(costs.devices[stage]),
                forward_s=stage_passes.forward_s,
                backward_s=stage_passes.backward_s + stage_passes.weight_s,
                passes=stage_passes,
            )
            for place, stage_passes, (stage, mode) in zip(_places(parallelism), passes, stages_and_modes, strict=True)
        ),
        memory=memory_of_devices(prepared, parallelism, stages_and_modes, costs),
        time_s=float(simulation.time_s[0]),
        parts=_parts(parallelism, micro_batches, rows, times, simulation),
        timeline=build_timeline(prepared.program(parallelism).order, passes, simulation),
    )


def memory_of_devices(
    prepared: PreparedProblem,
    parallelism: Parallelism,
    stages_and_modes: Sequence[tuple[int, int]],
    costs: StageCosts | None = None,
) -> tuple[DeviceMemory, ...]:
    """What the device of each place of the pipeline holds, which no simulation is needed for."""
    costs, pp = costs or prepared.stage_costs(parallelism), parallelism.pp
    flight = in_flight(parallelism.schedule, pp, prepared.micro_batches(parallelism), parallelism.chunks)
    on_devices = stages_of_devices(parallelism.schedule, pp, parallelism.chunks).T.tolist()
    modes_and_stages = [(mode, stage) for stage, mode in stages_and_modes]
    return tuple(
        costs.memory.of_device(prepared.problem, [modes_and_stages[stage] for stage in held], counts)
        for held, counts in zip(on_devices, flight.tolist(), strict=True)
    )


def _places(parallelism: Parallelism) -> list[tuple[int, int]]:
    """The device and chunk of every stage."""
    return [parallelism.schedule.place_of(parallelism.pp, stage) for stage in range(parallelism.stages)]


def stage_times(costs: StageCosts, stages_and_modes: Sequence[tuple[int, int]], parallelism: Parallelism) -> StageTimes:
    """What simulation needs of stages given by their index and their mode."""
    listed, modes = [stage for stage, _ in stages_and_modes], [mode for _, mode in stages_and_modes]
    seconds = {
        name: getattr(costs, name)[modes, listed] for name in ("forward_s", "backward_s", "weight_s", "exposed_s")
    }
    if parallelism.schedule.is_v_shaped:
        turn, (received_s, returned_s) = parallelism.pp, costs.saved_s
        seconds["forward_s"][turn] -= received_s[listed[turn]]
        seconds["backward_s"][turn - 1] -= returned_s[modes[turn - 1], listed[turn - 1]]
    return StageTimes(
        **{name: _by_device(values, parallelism) for name, values in seconds.items()},
        **{
            name: _by_device(getattr(costs, name)[listed], parallelism) for name in ("reduction_s", "tie_s", "finish_s")
        },
    )


def _passes(rows: _StageRows, times: StageTimes, parallelism: Parallelism) -> list[StagePasses]:
    """What the tables say of each chosen stage, in the order of the pipeline."""
    costs, listed = rows.costs, rows.index[1]
    device, chunk = np.array(_places(parallelism)).T
    columns = {
        "forward_s": times.forward_s[0, device, chunk],
        "backward_s": times.backward_s[0, device, chunk],
        "weight_s": costs.weight_s[rows.index],
        "receive_s": rows.received_s,
        "receive_gradient_s": rows.returned_s,
        "recompute_s": rows.recompute_s,
        "exposed_reduction_s": costs.exposed_s[rows.index],
        "reduction_s": costs.reduction_s[listed],
        "shared_reduction_s": costs.tie_s[listed],
        "update_s": costs.finish_s[listed],
    }
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [StagePasses(**dict(zip(columns, row, strict=True))) for row in values]


def _by_device(values: FloatArray, parallelism: Parallelism) -> FloatArray:
    """Turn values per stage, in the order of the pipeline, into an array per (1, device, chunk)."""
    return np.asarray(values[stages_of_devices(parallelism.schedule, parallelism.pp, parallelism.chunks).T][None])


def _parts(
    parallelism: Parallelism, micro_batches: int, rows: _StageRows, times: StageTimes, simulation: Simulation
) -> TimeParts:
    """Where the time of the device that ends last goes."""
    device = int(simulation.device_end_s[0].argmax())
    on_device = stages_of_devices(parallelism.schedule, parallelism.pp, parallelism.chunks)[:, device]
    busy = float((times.forward_s + times.backward_s + times.weight_s)[0, device].sum())
    compute, recompute = float(rows.work_s[on_device].sum()), float(rows.recompute_s[on_device].sum())
    transfer = float((rows.received_s + np.maximum(rows.returned_s - rows.recompute_s, 0.0))[on_device].sum())
    ended, settled = float(simulation.compute_end_s[0, device]), float(simulation.reduced_s[0, device])
    return TimeParts(
        compute_s=micro_batches * compute,
        recompute_s=micro_batches * recompute,
        transfer_s=micro_batches * transfer,
        collective_s=max(micro_batches * (busy - compute - recompute - transfer), 0.0),
        bubble_s=ended - micro_batches * busy,
        reduction_s=settled - ended,
        update_s=float(simulation.device_end_s[0, device]) - settled,
    )
