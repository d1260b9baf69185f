"""Phaze: the fastest way to train a model on many accelerators, found and proven."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phaze.compiled import last_compiled
    from phaze.errors import PhazeError
    from phaze.explore.front import search
    from phaze.explore.result import SearchResult
    from phaze.imports import import_graph, load_graph
    from phaze.ir import Graph
    from phaze.plan import Plan, load_plan
    from phaze.planner.differences import compare
    from phaze.planner.front import Evaluation, evaluate, optimize

__all__ = [
    "Evaluation",
    "Graph",
    "PhazeError",
    "Plan",
    "SearchResult",
    "__version__",
    "compare",
    "evaluate",
    "import_graph",
    "last_compiled",
    "load_graph",
    "load_plan",
    "optimize",
    "search",
]

__version__ = "0.1.0"

_HOMES = {
    "Evaluation": "phaze.planner.front",
    "Graph": "phaze.ir",
    "PhazeError": "phaze.errors",
    "Plan": "phaze.plan",
    "SearchResult": "phaze.explore.result",
    "compare": "phaze.planner.differences",
    "evaluate": "phaze.planner.front",
    "import_graph": "phaze.imports",
    "last_compiled": "phaze.compiled",
    "load_graph": "phaze.imports",
    "load_plan": "phaze.plan",
    "optimize": "phaze.planner.front",
    "search": "phaze.explore.front",
}
"""Where each public name lives; it is imported when somebody asks for it, so that `import phaze` stays quick."""

_PUBLIC_MODULES = ("space",)
"""Modules that users reach as attributes without importing them."""


def __getattr__(name: str) -> object:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"phaze.{name}")
    if name not in _HOMES:
        raise AttributeError(
            f"module 'phaze' has no attribute {name!r}; it has {', '.join((*__all__, *_PUBLIC_MODULES))}"
        )
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC_MODULES})
