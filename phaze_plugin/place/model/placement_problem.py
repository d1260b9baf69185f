"""The placement problem: layers with their profiles, a cluster, a batch, and what may be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from phaze.capabilities import ZERO_STAGES, Capabilities, PipelineSchedule
from phaze.cost import IDEAL, Calibration
from phaze.errors import PlacementError
from phaze.hardware import Cluster, PrecisionRecipe
from phaze.ir import SEARCHED_MODES
from phaze.profile.layer_profile import LayerProfile, PlacementGraph, RecomputeMode

__all__ = ["PlacementProblem", "ProfileKey"]

ProfileKey = tuple[str, int, RecomputeMode]
"""A distinct layer's key, a tensor width, a recompute mode."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementProblem:
    """What to place, on what, and within which choices. Batches and microbatches count sequences (samples).

    Attributes:
        graph: the layers.
        profiles: a profile for every distinct layer, width and recompute mode that may be chosen. Where a layer cannot
            be sliced at a width its profile says so and describes the whole layer.
        cluster: devices and links; its accelerator gives memory and its bandwidth.
        micro_batches: microbatches in one batch, over all pipelines.
        recipe: bytes per parameter.
        capabilities: what the target runs; everything for analysis.
        schedules: pipeline schedules to try, of those that the target runs.
        zero_stages: ZeRO stages to try, of those that the target runs.
        recompute_modes: what a stage may choose from.
        chunk_counts: stages per device that interleaved schedules may have.
        tensor_widths: widths to try, of those that were profiled; None for all.
        pipelines: data-parallel degrees to try; None for all.
        stage_counts: pipeline depths (in devices) to try; None for all, (1,) for a model that cannot be cut.
        pipelines_divide_batch: whether the number of pipelines must divide that of microbatches; a target that runs no
            uneven microbatches asks for it anyway.
        memory_margin: part of the memory that stays free before a stage is called marginal.
        allows_marginal: whether a stage may use the margin.
        overlaps_reduction: whether gradients are reduced while backward still runs.
        calibration: how far links and memory stay behind their ideal.
        accelerator: which entry of the profiles' accelerator axis to place.

    Raises:
        PlacementError: a count, a margin or a choice cannot be, a profile is missing, or no layer supports any width.
    """

    graph: PlacementGraph
    profiles: Mapping[ProfileKey, LayerProfile]
    cluster: Cluster
    micro_batches: int
    recipe: PrecisionRecipe
    capabilities: Capabilities = field(default_factory=Capabilities.everything)
    schedules: tuple[PipelineSchedule, ...] = tuple(PipelineSchedule)
    zero_stages: tuple[int, ...] = ZERO_STAGES
    recompute_modes: tuple[RecomputeMode, ...] = SEARCHED_MODES
    chunk_counts: tuple[int, ...] = (2, 3, 4)
    tensor_widths: tuple[int, ...] | None = None
    pipelines: tuple[int, ...] | None = None
    stage_counts: tuple[int, ...] | None = None
    pipelines_divide_batch: bool = False
    memory_margin: float = 0.05
    allows_marginal: bool = False
    overlaps_reduction: bool = True
    calibration: Calibration = IDEAL
    accelerator: int = 0

    def __post_init__(self) -> None:
        """Check counts, choices and profiles."""
        if self.micro_batches < 1:
            raise PlacementError(f"micro_batches is {self.micro_batches}; expected at least 1.")
        if not 0 <= self.memory_margin < 1:
            raise PlacementError(f"memory_margin is {self.memory_margin}; expected a part from 0 to below 1.")
        for name in ("zero_stages", "recompute_modes"):
            if not getattr(self, name):
                raise PlacementError(f"{name} is empty; expected at least one choice.")
        if any(count < 2 for count in self.chunk_counts):
            raise PlacementError(f"chunk_counts is {self.chunk_counts}; expected whole numbers of at least 2.")
        self._check_degrees()
        self._check_profiles()

    @property
    def widths(self) -> tuple[int, ...]:
        """Tensor widths at which some layer is sliced, and 1 if it was profiled, ascending."""
        widths = {width for _, width, _ in self.profiles}
        sliced = {width for (_, width, _), profile in self.profiles.items() if profile.is_tensor_parallel}
        usable = {width for width in widths if width == 1 or width in sliced}
        return tuple(sorted(usable if self.tensor_widths is None else usable & set(self.tensor_widths)))

    @property
    def usable_bytes(self) -> float:
        """Memory of one device that a stage's own items may fill."""
        capacity = float(self.cluster.accelerator.hbm_bytes)
        if self.allows_marginal:
            return capacity
        return capacity * (1 - self.memory_margin) / (1 + self.calibration.reserve)

    @property
    def needs_even_micro_batches(self) -> bool:
        """Whether every pipeline must get equally many microbatches."""
        return self.pipelines_divide_batch or not self.capabilities.allows_uneven_micro_batches

    @property
    def spread_layers(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether several stages would spread the parameters of each layer over all of them."""
        return ~np.array(self.graph.body) & self.capabilities.spreads_ends

    def profile(self, layer: int, width: int, mode: RecomputeMode) -> LayerProfile:
        """The profile of one layer of the graph."""
        return self.profiles[self.graph.layers[layer].key, width, mode]

    def _check_profiles(self) -> None:
        keys = {layer.key for layer in self.graph.layers}
        for width in {width for _, width, _ in self.profiles}:
            if width < 1:
                raise PlacementError(f"a profile has tensor width {width}; expected at least 1.")
            missing = [
                (key, mode) for key in keys for mode in self.recompute_modes if (key, width, mode) not in self.profiles
            ]
            if missing:
                raise PlacementError(
                    f"layer {missing[0][0]!r} has no profile at tensor width {width} with recompute {missing[0][1]}; "
                    "profile it, or leave the width or the recompute mode out."
                )
        if not self.widths:
            asked = sorted(
                {width for _, width, _ in self.profiles} if self.tensor_widths is None else self.tensor_widths
            )
            raise PlacementError(f"no layer is sliced at any of the tensor widths {asked}; allow or profile width 1.")
        for flow in self.graph.flows:
            for width in self.widths:
                if flow.output >= len(self.profile(flow.producer, width, self.recompute_modes[0]).outputs):
                    raise PlacementError(f"{flow}: the producer's profile at width {width} has no such output.")
        for layer, placed in enumerate(self.graph.layers):
            named = self.profile(layer, self.widths[0], self.recompute_modes[0]).tied_parameters
            if wrong := [name for name in named if layer not in self.graph.ties.get(name, ())]:
                raise PlacementError(f"the profile of {placed.name!r} ties {wrong[0]!r}, but the graph does not.")
        entries = {len(profile.forward_s.value) for profile in self.profiles.values()}
        if not 0 <= self.accelerator < min(entries):
            raise PlacementError(f"accelerator {self.accelerator} is not among the {min(entries)} that were profiled.")

    def _check_degrees(self) -> None:
        for name in ("tensor_widths", "pipelines", "stage_counts"):
            degrees = getattr(self, name)
            if degrees is not None and (not degrees or min(degrees) < 1):
                raise PlacementError(f"{name} is {degrees}; expected whole numbers of at least 1, or None for all.")
        if self.pipelines is not None and min(self.pipelines) > self.micro_batches:
            raise PlacementError(
                f"{min(self.pipelines)} pipelines share {self.micro_batches} microbatches; expected at least one each. "
                "Use fewer pipelines, a larger batch or smaller microbatches."
            )
        unknown = sorted(set(self.zero_stages) - set(ZERO_STAGES))
        if unknown:
            raise PlacementError(f"ZeRO stage {unknown[0]!r}; expected some of {ZERO_STAGES}.")

    def seconds(
        self, field: str, width: int, mode: RecomputeMode, use_bounds: bool
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """One of the profiles' seconds for every layer in order, as values or as their lower bounds."""
        kind = "bound" if use_bounds else "value"
        return np.array(
            [
                getattr(getattr(self.profile(layer, width, mode), field), kind)[self.accelerator]
                for layer in range(len(self.graph.layers))
            ]
        )
