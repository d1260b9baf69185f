"""Accelerators, clusters and networks: their values, real ones by name, their files; area, energy and precision."""

from phaze.hardware.accelerator import Accelerator, AcceleratorArray, MatrixRates
from phaze.hardware.area_energy import EnergyModel, area_mm2, areas_mm2, energy_model
from phaze.hardware.chips_and_networks import (
    Network,
    NetworkLevel,
    Preset,
    network,
    network_levels,
    network_names,
    preset,
    preset_names,
    presets,
)
from phaze.hardware.cluster import Cluster, InterconnectLevel, Links
from phaze.hardware.cluster_text import find_accelerator, parse_cluster
from phaze.hardware.hardware_files import load_accelerator, load_cluster, save_accelerator, save_cluster
from phaze.hardware.packaged_data import Fact
from phaze.hardware.precision import PrecisionRecipe, cast_graph, precision_recipe, precision_recipe_names

__all__ = [
    "Accelerator",
    "AcceleratorArray",
    "Cluster",
    "EnergyModel",
    "Fact",
    "InterconnectLevel",
    "Links",
    "MatrixRates",
    "Network",
    "NetworkLevel",
    "PrecisionRecipe",
    "Preset",
    "area_mm2",
    "areas_mm2",
    "cast_graph",
    "energy_model",
    "find_accelerator",
    "load_accelerator",
    "load_cluster",
    "network",
    "network_levels",
    "network_names",
    "parse_cluster",
    "precision_recipe",
    "precision_recipe_names",
    "preset",
    "preset_names",
    "presets",
    "save_accelerator",
    "save_cluster",
]
