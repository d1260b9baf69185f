"""What each term of the model is worth: the error on published runs with one term off in turn.

    python benchmarks/ablation.py --data DIR [--dataset NAME] [--facts]

Off means that the term's seconds are none: arrays that fill in no time, free memory traffic, free collectives,
pipelines without bubbles, free updates, nothing that hides collectives behind passes, launches that cost nothing. With
`--facts` also what is known about the stack, one by one as on a perfect one. Everything else stays as it is shipped;
nothing is refitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from published import DATASETS, Row, read_rows
from scoring import Scorer, distinct, mean_size, shipped_calibration

from phaze.calibration_fitting import PreparedRun
from phaze.calibration_fitting.pass_decomposition import LinkParts, PassParts
from phaze.cost import PERFECT_STACK, Calibration
from phaze.cost.systolic_cycles import Cycles, product_cycles
from phaze.place.simulation.event_simulation import StageTimes

NO_LINKS = LinkParts(latency_s=0.0, inner_s=0.0, outer_s=0.0)
STACK_FACTS = (
    "fusion",
    "hides_memory",
    "accumulates_in_products",
    "recomputes_ends",
    "alignment_bytes",
    "launches_ahead",
    "fuses_update",
    "hides_reductions",
)


@dataclass(frozen=True)
class Case:
    """A row, prepared, and the calibration that is shipped for it."""

    row: Row
    run: PreparedRun
    calibration: Calibration


def cases_of(rows: Sequence[Row], scorer: Scorer, fact: str | None = None) -> list[Case]:
    """Every row that has a time; with a ``fact`` its stack is as perfect in that as can be."""
    cases = []
    for row in distinct(rows):
        shipped = shipped_calibration(row)
        if fact is not None:
            row = replace(row, stack={**row.stack, fact: getattr(PERFECT_STACK, fact)})
        run = scorer.prepare(row, shipped.stack)
        if isinstance(run, PreparedRun):
            cases.append(Case(row, run, shipped))
    return cases


def without_parts(case: Case, change: Callable[[PassParts], PassParts], summed: float = 1.0) -> PreparedRun:
    """The run with its passes changed, and gradients summed at ``summed`` times their traffic."""
    layers = {
        key: replace(
            layer,
            forward=change(layer.forward),
            backward=change(layer.backward),
            recompute=change(layer.recompute),
            accumulated_bytes=layer.accumulated_bytes * summed,
        )
        for key, layer in case.run.layers.items()
    }
    return replace(case.run, layers=layers)


def without_memory(case: Case) -> float:
    """No memory traffic."""
    run = without_parts(case, lambda part: replace(part, memory_s=np.zeros_like(part.memory_s)), summed=0.0)
    return float(run.seconds([case.calibration])[0])


def without_collectives(case: Case) -> float:
    """Links that take no time."""
    run = without_parts(case, lambda part: replace(part, moved=NO_LINKS, rings=()))
    cluster = run.problem.cluster
    quick = tuple(
        replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * 1e6, latency_s=0.0)
        for level in cluster.levels
    )
    run = replace(run, problem=replace(run.problem, cluster=replace(cluster, levels=quick)))
    return float(run.seconds([case.calibration])[0])


def without_bubble(case: Case) -> float:
    """The busiest device, as if it never waited."""
    times: StageTimes = case.run._times(replace(case.calibration, stack=case.run.stack))
    rounds = case.run.program.order.micro_batches
    busy = rounds * (times.forward_s + times.backward_s + times.weight_s) + times.exposed_s + times.tie_s
    return float((busy + times.finish_s).sum(axis=2).max())


def without_update(case: Case) -> float:
    """Parameters that are updated in no time."""
    with patch("phaze.calibration_fitting.run_prediction.update_s_per_parameter", lambda problem: 0.0):
        return float(case.run.seconds([case.calibration])[0])


def with_terms(**terms: float) -> Callable[[Case], float]:
    """Another calibration."""
    return lambda case: float(case.run.seconds([replace(case.calibration, **terms)])[0])  # type: ignore[arg-type]


TERMS: dict[str, Callable[[Case], float]] = {
    "everything on": with_terms(),
    "memory": without_memory,
    "collectives": without_collectives,
    "bubble": without_bubble,
    "update": without_update,
    "overlap": with_terms(overlap=0.0),
    "overhead": with_terms(overhead_s=0.0),
}


def line(label: str, names: Sequence[str], cases: Sequence[Case], seconds: Callable[[Case], float]) -> str:
    """A row of the table."""
    errors: dict[str, list[float]] = {name: [] for name in names}
    for case in cases:
        assert case.row.seconds is not None
        errors[case.row.dataset].append(seconds(case) / case.row.seconds - 1)
    cells = [f"{mean_size(errors[name]):>8.2%} {np.mean(errors[name]):+8.2%}" for name in names]
    return f"{label:26}" + "".join(f"{cell:>20}" for cell in cells)


def without_fill(grid: object, *sizes: int) -> Cycles:
    """Cycles of arrays that fill and drain in no time."""
    cycles = product_cycles(grid, *sizes)  # type: ignore[arg-type]
    return Cycles(cycles.without_fill, cycles.without_fill)


def main() -> None:
    """Prepare, switch terms off, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dataset", action="append", choices=DATASETS)
    parser.add_argument("--facts", action="store_true", help="also facts about the stack")
    arguments = parser.parse_args()
    rows = read_rows(arguments.data, arguments.dataset)
    cases = cases_of(rows, Scorer())
    names = [name for name in DATASETS if any(case.row.dataset == name for case in cases)]
    print(f"{'off: MAPE and bias':26}" + "".join(f"{name:>20}" for name in names))
    for label, seconds in TERMS.items():
        print(line(label, names, cases, seconds), flush=True)
    with patch("phaze.cost.work_prices.product_cycles", without_fill):
        print(line("fill", names, cases_of(rows, Scorer()), with_terms()), flush=True)
    for fact in STACK_FACTS if arguments.facts else ():
        print(line(f"perfect in {fact}", names, cases_of(rows, Scorer(), fact), with_terms()), flush=True)


if __name__ == "__main__":
    main()
