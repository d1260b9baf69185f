"""The placement problem: layers with their profiles, a cluster, a batch, and what may be chosen.

Where activations are offloaded to the host, a problem's profiles are those of layers whose kept tensors leave and come
back while others run (`moved_profiles`).

Let K be the bytes that a layer keeps, H the host link's bandwidth in each direction, T = K / H, f the seconds of its
forward and b, w those of the two parts of its backward. Of a layer whose kept tensors are moved (`moved_profile`)

    forward     max(f, T): the tensors of one layer leave while the next one runs
    backward    max(b + w, T): the tensors of one layer come back while the layer behind it runs; what exceeds b + w
                is waited for before the gradients of inputs are made
    device      2 K beside its working set: a layer's own tensors, and those of its neighbour on their way

A calibration's overlap says which part of what could be hidden is, as for collectives (`stage_costs.py`). Copies are
taken to need nothing of the device's cores, memory and network. The tensors of a layer that occurs once (embedding,
logits) stay on the device, as they do when layers are recomputed.

The lower bounds of a moved layer are lower bounds again: forward grows with f, and a backward with a smaller b + w
waits no less than the value's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from phaze.cost import IDEAL, Calibration
from phaze.errors import PlacementError
from phaze.hardware import Cluster, HostLink, PrecisionRecipe
from phaze.parallelism import ALL_DEVICES, ZERO_STAGES, Choices, Offload
from phaze.profile.layer_profile import Bounded, LayerProfile, PlacementGraph, ProfileKey, RecomputeMode
from phaze.targets import Capabilities

__all__ = ["PlacementProblem", "moved_profile", "moved_profiles"]

FloatArray = NDArray[np.float64]


def moved_profiles(
    graph: PlacementGraph, profiles: Mapping[ProfileKey, LayerProfile], host: HostLink, overlap: float
) -> dict[ProfileKey, LayerProfile]:
    """All profiles, those of layers that repeat (all where none does) with their kept tensors on the host."""
    counts = Counter(layer.kind for layer in graph.layers)
    repeated = {layer.key for layer in graph.layers if counts[layer.kind] > 1}
    moved = repeated or {layer.key for layer in graph.layers}
    return {
        key: moved_profile(profile, host.bandwidth_bytes_per_s, overlap) if key[0] in moved else profile
        for key, profile in profiles.items()
    }


def moved_profile(profile: LayerProfile, bandwidth_bytes_per_s: float, overlap: float) -> LayerProfile:
    """The profile of a layer whose kept tensors go to the host and back."""
    moved_s = profile.stashed_bytes / bandwidth_bytes_per_s
    forward, to_inputs, to_weights = profile.forward_s, profile.backward_input_s, profile.backward_weight_s
    waits_s = _waited(to_inputs.value + to_weights.value, moved_s, overlap)
    return replace(
        profile,
        forward_s=Bounded(
            forward.value + _waited(forward.value, moved_s, overlap),
            forward.bound + _waited(forward.bound, moved_s, overlap),
        ),
        backward_input_s=Bounded(to_inputs.value + waits_s, to_inputs.bound + waits_s),
        stashed_bytes=0.0,
        peak_working_bytes=profile.peak_working_bytes + 2 * profile.stashed_bytes,
        host_bytes=profile.stashed_bytes,
    )


def _waited(pass_s: FloatArray, moved_s: float, overlap: float) -> FloatArray:
    """What a pass takes longer because of what moves beside it."""
    return np.asarray(moved_s - overlap * np.minimum(pass_s, moved_s))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementProblem:
    """What to place, on what, and within which choices. Batches and microbatches count sequences (samples).

    Attributes:
        graph: the layers.
        profiles: a profile for every distinct layer, tp and recompute mode that may be chosen, as if nothing went to
            the host. Where a layer cannot
            be sliced at a tp its profile says so and describes the whole layer.
        cluster: devices and links; its accelerator gives memory and its bandwidth.
        micro_batches: microbatches in one batch, over all pipelines.
        recipe: bytes per parameter.
        capabilities: what the target runs; everything for analysis.
        choices: what may be chosen of what the target runs; values of tp, of those that were profiled.
        dp_divides_batch: whether dp must divide the number of microbatches; a target that runs no uneven microbatches
            asks for it anyway.
        memory_margin: part of the memory that stays free before a stage is called marginal.
        allows_marginal: whether a stage may use the margin.
        overlaps_reduction: whether gradients are reduced while backward still runs.
        calibration: how far links and memory stay behind their ideal.
        accelerator: which entry of the profiles' accelerator axis to place.
        cp: devices that each sequence is split over, in every profile: seconds include the collectives inside of
            layers, and sizes are those of one device.
        ep: devices that experts are divided over, likewise; a divisor of dp x cp in every strategy.
        offload: what every plan keeps in the memory of its hosts.
        has_frozen: whether some parameters are read and not trained.

    Raises:
        PlacementError: a count, a margin or a choice cannot be, a profile is missing, or no layer is sliced at any tp.
    """

    graph: PlacementGraph
    profiles: Mapping[ProfileKey, LayerProfile]
    cluster: Cluster
    micro_batches: int
    recipe: PrecisionRecipe
    capabilities: Capabilities = field(default_factory=Capabilities.everything)
    choices: Choices = field(default_factory=Choices)
    dp_divides_batch: bool = False
    memory_margin: float = 0.05
    allows_marginal: bool = False
    overlaps_reduction: bool = True
    calibration: Calibration = IDEAL
    accelerator: int = 0
    cp: int = 1
    ep: int = 1
    offload: Offload = Offload.NONE
    has_frozen: bool = field(init=False, default=False)
    _placed: Mapping[ProfileKey, LayerProfile] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check counts, choices and profiles."""
        for name in ("cp", "ep"):
            if getattr(self, name) < 1:
                raise PlacementError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.offload is not Offload.NONE and self.cluster.host is None:
            raise PlacementError(f"offload is {self.offload}, but the cluster names no host.")
        if self.micro_batches < 1:
            raise PlacementError(f"micro_batches is {self.micro_batches}; expected at least 1.")
        if not 0 <= self.memory_margin < 1:
            raise PlacementError(f"memory_margin is {self.memory_margin}; expected a part from 0 to below 1.")
        for name in ("zero", "recompute"):
            if not getattr(self.choices, name):
                raise PlacementError(f"choices.{name} is empty; expected at least one choice.")
        if any(count < 2 for count in self.choices.chunks):
            raise PlacementError(f"choices.chunks is {self.choices.chunks}; expected whole numbers of at least 2.")
        placed = self.profiles
        if self.offload.moves_activations and self.cluster.host is not None:
            placed = moved_profiles(self.graph, self.profiles, self.cluster.host, self.calibration.hidden_share)
        object.__setattr__(self, "_placed", placed)
        self._check_degrees()
        self._check_profiles()
        object.__setattr__(self, "has_frozen", any(profile.frozen_parameters for profile in self.profiles.values()))

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """Values of tp at which some layer is sliced, and 1 if it was profiled, ascending."""
        profiled = {tp for _, tp, _ in self.profiles}
        sliced = {tp for (_, tp, _), profile in self.profiles.items() if profile.is_tensor_parallel}
        usable = {tp for tp in profiled if tp == 1 or tp in sliced}
        return tuple(sorted(usable if self.choices.tp is None else usable & set(self.choices.tp)))

    @property
    def usable_bytes(self) -> float:
        """Memory of one device that a stage's own items may fill."""
        capacity = float(self.cluster.accelerator.hbm_bytes)
        if self.allows_marginal:
            return capacity
        return capacity * (1 - self.memory_margin) / (1 + self.calibration.reserve)

    @property
    def device_recipe(self) -> PrecisionRecipe:
        """Bytes per parameter that devices hold at least: without optimizer states where these are on the host."""
        if not self.offload.moves_states:
            return self.recipe
        return replace(self.recipe, master_bytes=0, state_bytes=0)

    @property
    def host_bytes(self) -> float:
        """Memory of the host that one device has for what is offloaded."""
        is_used = self.offload is not Offload.NONE and self.cluster.host is not None
        return float(self.cluster.host.memory_bytes) if is_used and self.cluster.host else 0.0

    @property
    def needs_even_micro_batches(self) -> bool:
        """Whether every pipeline must get equally many microbatches."""
        return self.dp_divides_batch or not self.capabilities.allows_uneven_micro_batches

    @property
    def stage_sharded_layers(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether the parameters of each layer are sharded over all stages, as some targets do outside the body."""
        return ~np.array(self.graph.body) & self.capabilities.spreads_ends

    def profile(self, layer: int, tp: int, mode: RecomputeMode) -> LayerProfile:
        """The profile of one layer of the graph, with what goes to the host."""
        return self._placed[self.graph.layers[layer].key, tp, mode]

    def choosing(self, **allowed: object) -> PlacementProblem:
        """The same problem with other choices for some fields of `Choices`."""
        return replace(self, choices=replace(self.choices, **allowed))  # type: ignore[arg-type]

    def _check_profiles(self) -> None:
        """Check that every layer, flow, tie and accelerator has the profiles that the choices need."""
        keys = {layer.key for layer in self.graph.layers}
        for tp in {tp for _, tp, _ in self.profiles}:
            if tp < 1:
                raise PlacementError(f"a profile has tp {tp}; expected at least 1.")
            missing = [
                (key, mode) for key in keys for mode in self.choices.recompute if (key, tp, mode) not in self.profiles
            ]
            if missing:
                raise PlacementError(
                    f"layer {missing[0][0]!r} has no profile at tp {tp} with recompute {missing[0][1]}; "
                    "profile it, or leave this tp or the recompute mode out."
                )
        if not self.tp_degrees:
            asked = sorted({tp for _, tp, _ in self.profiles} if self.choices.tp is None else self.choices.tp)
            raise PlacementError(f"no layer is sliced at any tp of {asked}; allow or profile tp 1.")
        for flow in self.graph.flows:
            for tp in self.tp_degrees:
                if flow.output >= len(self.profile(flow.producer, tp, self.choices.recompute[0]).outputs):
                    raise PlacementError(f"{flow}: the producer's profile at tp {tp} has no such output.")
        for layer, placed in enumerate(self.graph.layers):
            named = self.profile(layer, self.tp_degrees[0], self.choices.recompute[0]).tied_parameters
            if wrong := [name for name in named if layer not in self.graph.ties.get(name, ())]:
                raise PlacementError(f"the profile of {placed.name!r} ties {wrong[0]!r}, but the graph does not.")
        entries = {len(profile.forward_s.value) for profile in self.profiles.values()}
        if not 0 <= self.accelerator < min(entries):
            raise PlacementError(f"accelerator {self.accelerator} is not among the {min(entries)} that were profiled.")

    def _check_degrees(self) -> None:
        """Check tp, dp, pp, shard, ep and the ZeRO stages by themselves."""
        spread = {
            layer.key
            for layer, is_spread in zip(self.graph.layers, self.stage_sharded_layers, strict=True)
            if is_spread
        }
        if self.ep > 1 and any(p.expert_parameters for (key, _, _), p in self.profiles.items() if key in spread):
            raise PlacementError(
                f"ep is {self.ep}; a target that spreads layers over stages divides the experts of equal layers only."
            )
        for value in self.choices.shard if self.choices.shard is not None else ():
            if value != ALL_DEVICES and (isinstance(value, str) or value < 2):
                raise PlacementError(f"choices.shard has {value!r}; expected numbers from 2 on or {ALL_DEVICES!r}.")
        for name in ("tp", "dp", "pp"):
            degrees = getattr(self.choices, name)
            if degrees is not None and (not degrees or min(degrees) < 1):
                raise PlacementError(
                    f"choices.{name} is {degrees}; expected whole numbers of at least 1, or None for all."
                )
        if self.choices.dp is not None and min(self.choices.dp) > self.micro_batches:
            raise PlacementError(
                f"{min(self.choices.dp)} pipelines share {self.micro_batches} microbatches; expected at least one "
                "each. Use a smaller dp, a larger batch or smaller microbatches."
            )
        unknown = sorted(set(self.choices.zero) - set(ZERO_STAGES))
        if unknown:
            raise PlacementError(f"ZeRO stage {unknown[0]!r}; expected some of {ZERO_STAGES}.")

    def seconds(
        self, field: str, tp: int, mode: RecomputeMode, use_bounds: bool
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """One of the profiles' seconds for every layer in order, as values or as their lower bounds."""
        kind = "bound" if use_bounds else "value"
        return np.array(
            [
                getattr(getattr(self.profile(layer, tp, mode), field), kind)[self.accelerator]
                for layer in range(len(self.graph.layers))
            ]
        )
