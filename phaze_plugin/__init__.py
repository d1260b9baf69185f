"""Phaze: the fastest way to train a model on many accelerators, found and proven."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phaze.errors import PhazeError
    from phaze.explore.design_search import search
    from phaze.explore.search_result import SearchResult
    from phaze.ir import Graph
    from phaze.model_import import import_graph, last_compiled, load_graph
    from phaze.parallelism import Parallelism
    from phaze.plan.plan import Plan
    from phaze.planner.memory_fit import MemoryFit, fit
    from phaze.planner.plan_comparison import compare
    from phaze.planner.planning import Evaluation, evaluate, optimize
    from phaze.question import Question
    from phaze.verify.saved_plan import load_plan

__all__ = [
    "Evaluation",
    "Graph",
    "MemoryFit",
    "Parallelism",
    "PhazeError",
    "Plan",
    "Question",
    "SearchResult",
    "__version__",
    "compare",
    "evaluate",
    "fit",
    "import_graph",
    "last_compiled",
    "load_graph",
    "load_plan",
    "optimize",
    "search",
]

__version__ = "0.2.0"

_HOMES = {
    "Evaluation": "phaze.planner.planning",
    "Graph": "phaze.ir",
    "MemoryFit": "phaze.planner.memory_fit",
    "PhazeError": "phaze.errors",
    "Parallelism": "phaze.parallelism",
    "Plan": "phaze.plan.plan",
    "Question": "phaze.question",
    "SearchResult": "phaze.explore.search_result",
    "compare": "phaze.planner.plan_comparison",
    "evaluate": "phaze.planner.planning",
    "fit": "phaze.planner.memory_fit",
    "import_graph": "phaze.model_import",
    "last_compiled": "phaze.model_import",
    "load_graph": "phaze.model_import",
    "load_plan": "phaze.verify.saved_plan",
    "optimize": "phaze.planner.planning",
    "search": "phaze.explore.design_search",
}
"""Where each public name lives; it is imported when somebody asks for it, so that `import phaze` stays quick."""

_PUBLIC_MODULES = ("space",)
"""Modules that users reach as attributes without importing them."""


def __getattr__(name: str) -> object:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"phaze.{name}")
    if name not in _HOMES:
        from phaze.errors import meant

        known = (*__all__, *_PUBLIC_MODULES)
        raise AttributeError(
            f"module 'phaze' has no attribute {name!r}; it has {', '.join(known)}.{meant(name, known)}"
        )
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC_MODULES})
