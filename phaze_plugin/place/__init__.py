"""Placement: which strategy (dp, pp, tp, ZeRO, schedule) and which stages train a model fastest on a cluster."""

from phaze.place.memory.device_memory import DeviceMemory, Fit
from phaze.place.memory.remedies import Infeasibility, Remedy, RemedyKind
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.paper.paper_problem import PaperInstance, paper_instance
from phaze.place.paper.paper_program import PaperPlacement, PaperResult, place_as_paper, place_paper, reconstruct
from phaze.place.search.best_placement import (
    Alternative,
    BoundedStrategies,
    PlacementResult,
    PlacementStatus,
    bound_placement,
    find_placement,
    is_beaten,
)
from phaze.place.search.parallelism_search import SearchEffort
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.stage_search import FoundPlan, PlanKind
from phaze.place.simulation.placement import PlacedStage, Placement, TimeParts, evaluate_placement
from phaze.place.simulation.timeline import Event, EventKind, Timeline
from phaze.profile.layer_profile import (
    BoundaryTensor,
    Bounded,
    Flow,
    LayerProfile,
    PlacementGraph,
    PlacementLayer,
    RecomputeMode,
)

__all__ = [
    "Alternative",
    "BoundaryTensor",
    "Bounded",
    "BoundedStrategies",
    "DeviceMemory",
    "Event",
    "EventKind",
    "Fit",
    "Flow",
    "FoundPlan",
    "Infeasibility",
    "LayerProfile",
    "PaperInstance",
    "PaperPlacement",
    "PaperResult",
    "PlacedStage",
    "Placement",
    "PlacementGraph",
    "PlacementLayer",
    "PlacementProblem",
    "PlacementResult",
    "PlacementStatus",
    "PlanKind",
    "PreparedProblem",
    "RecomputeMode",
    "Remedy",
    "RemedyKind",
    "SearchEffort",
    "TimeParts",
    "Timeline",
    "bound_placement",
    "evaluate_placement",
    "find_placement",
    "is_beaten",
    "paper_instance",
    "place_as_paper",
    "place_paper",
    "reconstruct",
]
