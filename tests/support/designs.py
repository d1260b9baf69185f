"""Small spaces and questions that are searched quickly, for tests of the search over accelerators."""

from typing import Any

import numpy as np

import phaze
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal
from phaze.explore.search_question import SearchQuestion, ask_search
from phaze.hardware import AcceleratorArray
from phaze.hooks import PluginManager
from phaze.ir import Graph, OpKind, Role
from phaze.ir.graph_builder import GraphBuilder

SMALL: dict[str, Any] = {
    "devices": 4,
    "hbm_gib": (0.5, 1),
    "micro_batch_size": (1, 2),
    "tp": (1,),
    "global_batch_size": 8,
}


def tiny_model(layers: int = 3, size: int = 512, name: str = "tiny") -> Graph:
    """Blocks of one product and one elementwise op each: scheduled in no time."""
    builder = GraphBuilder(name)
    sizes = {"b": 1, "s": 64, "i": size, "o": size}
    x = builder.argument("x", (1, 64, size), Role.BATCH)
    for index in range(layers):
        module = f"blocks.{index}"
        weight = builder.parameter(f"{module}.weight", size, size)
        rule = builder.rule("b s i, o i -> b s o", sizes, batch="b")
        (y,) = builder.add(f"{module}.linear", OpKind.CONTRACTION, "einsum", rule, (x, weight), module=module)
        same = builder.rule("b s o -> b s o", sizes, batch="b")
        (x,) = builder.add(f"{module}.exp", OpKind.ELEMENTWISE, "exp", same, (y,), module=module)
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", builder.rule("b s o -> .", sizes, batch="b"), (x,))
    return builder.build((loss,))


def some_points(count: int, seed: int = 0) -> AcceleratorArray:
    """Random accelerators of the paper's space, in its order."""
    space = phaze.space.paper()
    chosen = np.random.default_rng(seed).choice(len(space), count, replace=False)
    return space.take(np.sort(chosen))


def small_question(models: object, points: AcceleratorArray, **changes: Any) -> SearchQuestion:
    """The question of a small search, to be asked by hand."""
    return ask_search(models, None, {**SMALL, "space": points, "gap": 0.0, **changes}, PluginManager.load())


def searched(question: SearchQuestion) -> BestFirstSearch:
    """A finished search in this process."""
    best_first = BestFirstSearch(question=question, workers=Workers(), journal=Journal())
    best_first.run()
    return best_first
