"""Placement: stages, memory, pipeline schedules; the program over data x pipeline x tensor parallelism."""

from phaze.place.assemble import evaluate_placement
from phaze.place.degrees import Degrees
from phaze.place.front import (
    Alternative,
    PlacementResult,
    PlacementStatus,
    bound_placement,
    find_placement,
    is_beaten,
    paper_instance,
    place_as_paper,
)
from phaze.place.ground import Ground
from phaze.place.levers import Infeasibility, Lever, LeverKind
from phaze.place.memory import DeviceMemory, Fit
from phaze.place.paper import PaperPlacement, PaperResult, place_paper, reconstruct
from phaze.place.paper_instance import PaperInstance, read_paper_instance
from phaze.place.placement import PlacedStage, Placement, TimeParts
from phaze.place.problem import PlacementProblem
from phaze.place.profile import (
    BoundaryTensor,
    Bounded,
    Flow,
    LayerProfile,
    PlacementGraph,
    PlacementLayer,
    RecomputeMode,
)
from phaze.place.search_degrees import Effort
from phaze.place.timeline import Event, EventKind, Timeline

__all__ = [
    "Alternative",
    "BoundaryTensor",
    "Bounded",
    "Degrees",
    "DeviceMemory",
    "Effort",
    "Event",
    "EventKind",
    "Fit",
    "Flow",
    "Ground",
    "Infeasibility",
    "LayerProfile",
    "Lever",
    "LeverKind",
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
    "RecomputeMode",
    "TimeParts",
    "Timeline",
    "bound_placement",
    "evaluate_placement",
    "find_placement",
    "is_beaten",
    "paper_instance",
    "place_as_paper",
    "place_paper",
    "read_paper_instance",
    "reconstruct",
]
