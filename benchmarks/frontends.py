"""How long a model takes from its name to a verified graph with backward, layers and repeats.

    python benchmarks/frontends.py [NAME ...]

A row a model: seconds to the verified graph with its backward, seconds more to its layers, ops, layers, distinct
layers; the last line gives the slowest row and ops per second over all rows.
"""

from __future__ import annotations

import argparse
import time

import phaze
from phaze.frontends.named_models import NAMED_CONFIGS


def main() -> None:
    """Import every named model once and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMED_CONFIGS), metavar="NAME", help="built-in names (all)")
    names = parser.parse_args().names
    phaze.import_graph("gpt2")
    print(f"{'model':<18}{'graph s':>9}{'layers s':>9}{'ops':>7}{'layers':>8}{'distinct':>9}")
    totals: dict[str, tuple[float, int]] = {}
    for name in names:
        start = time.perf_counter()
        graph = phaze.import_graph(name)
        imported = time.perf_counter()
        layers, distinct = len(graph.layers), len(graph.distinct_layers)
        done = time.perf_counter()
        totals[name] = (done - start, len(graph.ops))
        print(f"{name:<18}{imported - start:>9.3f}{done - imported:>9.3f}{len(graph.ops):>7}{layers:>8}{distinct:>9}")
    slowest = max(totals, key=lambda name: totals[name][0])
    seconds, ops = (sum(column) for column in zip(*totals.values(), strict=True))
    print(f"slowest {slowest} {totals[slowest][0]:.2f} s; {ops / seconds:,.0f} ops per second over {len(names)} models")


if __name__ == "__main__":
    main()
