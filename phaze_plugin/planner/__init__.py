"""The rooms joined for one cluster: optimize, evaluate, compare, verify."""

from phaze.planner.progress import Progress
from phaze.profile.layer_passes import ProfileOptions, placement_graph, profile_layer

__all__ = ["ProfileOptions", "Progress", "placement_graph", "profile_layer"]
