"""Accelerators, clusters and presets of real chips."""

from phaze.hardware.accelerator import Accelerator, MatrixRates
from phaze.hardware.area import area_mm2, areas_mm2
from phaze.hardware.array import AcceleratorArray
from phaze.hardware.cluster import Cluster, InterconnectLevel
from phaze.hardware.energy import EnergyModel, energy_model
from phaze.hardware.fact import Fact
from phaze.hardware.files import load_accelerator, load_cluster, save_accelerator, save_cluster
from phaze.hardware.networks import Network, NetworkLevel, network, network_levels, network_names
from phaze.hardware.precision import PrecisionRecipe, precision_recipe, precision_recipe_names
from phaze.hardware.presets import Preset, preset, preset_names, presets
from phaze.hardware.text import find_accelerator, parse_cluster

__all__ = [
    "Accelerator",
    "AcceleratorArray",
    "Cluster",
    "EnergyModel",
    "Fact",
    "InterconnectLevel",
    "MatrixRates",
    "Network",
    "NetworkLevel",
    "PrecisionRecipe",
    "Preset",
    "area_mm2",
    "areas_mm2",
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
