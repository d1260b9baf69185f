"""The planner: one question about one model and cluster answered with a plan, and explained."""

from phaze.planner.progress import Progress

__all__ = ["Progress"]
