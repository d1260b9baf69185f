"""The rooms joined for one cluster."""

from phaze.planner.profiles import ProfileOptions, placement_graph, profile_layer

__all__ = ["ProfileOptions", "placement_graph", "profile_layer"]
