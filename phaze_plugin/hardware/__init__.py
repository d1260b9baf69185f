"""Accelerators, clusters and networks: their values, real ones by name, their files; area, energy and precision."""

from phaze.hardware.accelerator import (
    Accelerator,
    AcceleratorArray,
    EnergyModel,
    MatrixRates,
    area_mm2,
    areas_mm2,
    energy_model,
)
from phaze.hardware.chip_presets import Preset, preset, preset_names, presets
from phaze.hardware.cluster import (
    ChipLink,
    Cluster,
    HostLink,
    InterconnectLevel,
    Links,
    Network,
    NetworkLevel,
    Torus,
    network_names,
    networks,
)
from phaze.hardware.cluster_text import fabric_names, find_accelerator, network, network_of, parse_cluster
from phaze.hardware.hardware_files import load_accelerator, load_cluster, save_accelerator, save_cluster
from phaze.hardware.hardware_numbers import Fact
from phaze.hardware.precision import (
    OPTIMIZERS,
    PRECISIONS,
    PrecisionRecipe,
    cast_graph,
    precision_recipe,
    precision_recipe_names,
    recipe_of,
)

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "Accelerator",
    "AcceleratorArray",
    "ChipLink",
    "Cluster",
    "EnergyModel",
    "Fact",
    "HostLink",
    "InterconnectLevel",
    "Links",
    "MatrixRates",
    "Network",
    "NetworkLevel",
    "PrecisionRecipe",
    "Preset",
    "Torus",
    "area_mm2",
    "areas_mm2",
    "cast_graph",
    "energy_model",
    "fabric_names",
    "find_accelerator",
    "load_accelerator",
    "load_cluster",
    "network",
    "network_names",
    "network_of",
    "networks",
    "parse_cluster",
    "precision_recipe",
    "precision_recipe_names",
    "preset",
    "preset_names",
    "presets",
    "recipe_of",
    "save_accelerator",
    "save_cluster",
]
