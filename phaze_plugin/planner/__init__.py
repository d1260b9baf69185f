"""The planner: one question about one model and cluster answered with a plan, and explained."""

from phaze.planner.progress import Progress
from phaze.profile.layer_passes import ProfileOptions, placement_graph, profile_layer

__all__ = ["ProfileOptions", "Progress", "placement_graph", "profile_layer"]
