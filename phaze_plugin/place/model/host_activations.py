"""Activations on the host: what a layer's passes take and hold while its kept tensors leave and come back.

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
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phaze.hardware import HostLink
from phaze.profile.layer_profile import Bounded, LayerProfile, PlacementGraph, ProfileKey

__all__ = ["moved_profile", "moved_profiles"]

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
