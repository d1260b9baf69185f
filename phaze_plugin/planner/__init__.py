"""The rooms joined for one cluster: optimize, evaluate, compare, verify."""

from phaze.planner.profiles import ProfileOptions, placement_graph, profile_layer
from phaze.planner.watch import Progress

__all__ = ["ProfileOptions", "Progress", "placement_graph", "profile_layer"]
