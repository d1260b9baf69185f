"""Predicted against measured training runs.

    python benchmarks/validation.py --data DIR [--dataset NAME] [--ideal] [--rows]

Every row of the published tables (formats as `published_rows.py` reads them) is built from its numbers and priced with
`phaze.evaluate` under exactly its strategy. Printed per dataset: how many rows are scored and why others are not, mean
and largest error and bias of the step time; beside it the best single constant (TFLOP/s per chip), each row predicted
from the others. Then rankings (groups of rows that differ in strategy only), memory and out-of-memory rows.
`ablation.py` does the same with one term of the model off in turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from published_rows import DATASETS, Row, read_rows

import phaze
from phaze.cost import IDEAL, Calibration
from phaze.cost.calibration import calibration_of as preset_calibration
from phaze.cost.calibration import fitted_families
from phaze.errors import PhazeError
from phaze.hardware import find_accelerator
from phaze.plan.plan import Plan

FAMILY_OF = {"sc21": "a100-80gb", "korthikanti": "a100-80gb", "bigscience": "a100-80gb"}
FAMILY_OF |= {"torchtitan": "h100", "maxtext": "tpuv4", "maxtext-v5e": "tpuv4", "maxtext-v5p": "tpuv4"}
FAMILY_OF |= {"internevo": "a100-80gb"}


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A row and what was predicted for it."""

    row: Row
    plan: Plan

    @property
    def error(self) -> float:
        """Of the step time."""
        assert self.row.seconds is not None
        return self.plan.step_time_s / self.row.seconds - 1

    @property
    def flops(self) -> float:
        """Matrix flops of one step and chip, recompute not counted."""
        devices = self.row.strategy["dp"] * self.row.strategy["tp"] * self.row.strategy["pp"]
        return self.plan.model.matmul_flops_per_sample * self.row.global_batch_size / devices

    @property
    def memory_bytes(self) -> float:
        """Of the fullest device."""
        return max(stage.memory_bytes["total"] for stage in self.plan.stages)

    @property
    def fit(self) -> str:
        """The worst stage's."""
        return max((stage.fit for stage in self.plan.stages), key=("fits", "marginal", "over").index)


def calibration_for(row: Row, is_ideal: bool = False) -> Calibration:
    """The calibration of the row's family of chips, on the row's own stack."""
    if is_ideal:
        return IDEAL
    found = preset_calibration(find_accelerator(FAMILY_OF[row.dataset]))
    return replace(found, stack=replace(found.stack, **row.stack))


def price(row: Row, calibration: Calibration) -> Plan:
    """The row's strategy, priced."""
    strategy = {key: value for key, value in row.strategy.items() if value is not None}
    if "stages" not in strategy and strategy["pp"] == 1:
        graph = phaze.import_graph(row.model, sequence_length=row.sequence_length)
        strategy["stages"] = (len(graph.layers),)
    return phaze.evaluate(
        row.model,
        strategy=strategy,
        cluster=row.cluster,
        global_batch_size=row.global_batch_size,
        precision=row.recipe or "bf16",
        sequence_length=row.sequence_length,
        attention=row.attention,
        target=None,
        compares=False,
        calibration=calibration,
    ).plan


def score(rows: Sequence[Row], is_ideal: bool = False) -> tuple[list[Scored], list[Row]]:
    """All rows that can be, equal questions priced once; and all rows, with a reason where they could not be."""
    known: dict[tuple[object, ...], Plan | str] = {}
    found, told = [], []
    for row in rows:
        answer: Plan | str = row.reason or ""
        if row.reason is None:
            if (key := row.question) not in known:
                try:
                    known[key] = price(row, calibration_for(row, is_ideal))
                except PhazeError as error:
                    known[key] = f"refused: {error}"
            answer = known[key]
        told.append(replace(row, reason=answer) if isinstance(answer, str) else row)
        if not isinstance(answer, str):
            found.append(Scored(row=row, plan=answer))
    return found, told


def timed(scored: Iterable[Scored]) -> list[Scored]:
    """Rows with a measured time; a row that repeats another in everything, time included, counts once."""
    found: dict[tuple[object, ...], Scored] = {}
    for one in scored:
        if one.row.seconds is not None:
            found.setdefault((*one.row.question, one.row.seconds), one)
    return list(found.values())


def print_times(name: str, rows: Sequence[Row], scored: Sequence[Scored], shows_rows: bool) -> None:
    """Errors of the step time."""
    own = timed(one for one in scored if one.row.dataset == name)
    total = [row for row in rows if row.dataset == name]
    if not total:
        return
    print(f"\n{name}: scored {len(own)} of {len(total)} rows")
    repeated = sum(one.row.dataset == name and one.row.seconds is not None for one in scored) - len(own)
    if repeated:
        print(f"  {repeated} rows repeat another one, time included: counted once")
    untimed = [one.row.name for one in scored if one.row.dataset == name and one.row.seconds is None]
    if untimed:
        print(f"  {len(untimed)} rows ran out of memory and have no time: {', '.join(untimed)}")
    for reason in sorted({row.reason for row in total if row.reason}):
        names = [row.name for row in total if row.reason == reason]
        print(f"  {len(names)} rows, {reason}: {', '.join(names)}")
    if shows_rows:
        for one in own:
            print(
                f"  {one.row.name:58} measured {one.row.seconds:8.3f} s  predicted {one.plan.step_time_s:8.3f} s "
                f"{one.error:+7.1%}"
            )
    if own:
        errors = [one.error for one in own]
        print(f"  step time: {summary(errors)}")
        best = best_rate(rates(own)) / 1e12
        print(f"  best constant {best:.1f} TFLOP/s per chip, each row from the others: {summary(constant_errors(own))}")
    fitted = [family["errors"][name] for family in fitted_families().values() if name in family["errors"]]
    for known in fitted:
        print(f"  when fitted: {dict(known)}")


def summary(errors: Sequence[float]) -> str:
    """Mean, maximum, bias."""
    sizes = [abs(error) for error in errors]
    return f"MAPE {statistics.mean(sizes):.2%}, largest {max(sizes):.1%}, bias {statistics.mean(errors):+.2%}"


def rates(scored: Sequence[Scored]) -> list[float]:
    """Flops per second and chip of each row."""
    return [one.flops / float(one.row.seconds or 1) for one in scored]


def best_rate(measured: Sequence[float]) -> float:
    """The single rate with the least mean error over all rows that were measured at these."""
    return min(measured, key=lambda rate: sum(abs(one / rate - 1) for one in measured))


def constant_errors(scored: Sequence[Scored]) -> list[float]:
    """With a single rate per chip, the best of the other rows."""
    measured = rates(scored)
    return [
        one / best_rate(measured[:index] + measured[index + 1 :] or measured) - 1 for index, one in enumerate(measured)
    ]


def print_gains(scored: Sequence[Scored]) -> None:
    """What selective recompute with sequence parallelism brings over full recompute."""
    pairs: dict[str, dict[str, Scored]] = defaultdict(dict)
    for one in timed(scored):
        if one.row.dataset == "korthikanti":
            model, _, recompute = one.row.name.rpartition(" ")
            pairs[model][recompute] = one
    for model, kinds in pairs.items():
        if len(kinds) == 2:
            full, selective = kinds["full"], kinds["selective"]
            measured = float(full.row.seconds or 0) / float(selective.row.seconds or 1) - 1
            predicted = full.plan.step_time_s / selective.plan.step_time_s - 1
            print(
                f"  {model}: selective recompute + sequence parallelism gains {measured:.1%}, predicted {predicted:.1%}"
            )


def print_rankings(scored: Sequence[Scored]) -> None:
    """Groups of rows that differ in strategy only."""
    groups: dict[tuple[object, ...], dict[str, list[Scored]]] = defaultdict(lambda: defaultdict(list))
    for one in timed(scored):
        if one.row.group is not None:
            keys = ("dp", "tp", "pp", "micro_batch_size", "zero", "chunks")
            groups[one.row.group][str([one.row.strategy[key] for key in keys])].append(one)
    agreed = pairs = 0
    regrets, lines = [], []
    for group, strategies in groups.items():
        if len(strategies) < 3:
            continue
        points = [
            (
                statistics.mean(float(one.row.seconds or 0) for one in same),
                statistics.mean(one.plan.step_time_s for one in same),
            )
            for same in strategies.values()
        ]
        regret = min(points, key=lambda point: point[1])[0] / min(point[0] for point in points) - 1
        regrets.append(regret)
        for first, second in combinations(points, 2):
            pairs += first[0] != second[0]
            agreed += (first[0] - second[0]) * (first[1] - second[1]) > 0
        lines.append(f"  {group}: {len(points)} strategies, Spearman {spearman(points):+.2f}, regret {regret:.1%}")
    if pairs:
        print("\nrankings (hidden, layers, heads, GPUs, batch)")
        print("\n".join(lines))
        print(f"  pairs in the measured order: {agreed} of {pairs} ({agreed / pairs:.0%}); ", end="")
        print(f"mean regret {statistics.mean(regrets):.1%}")


def spearman(points: Sequence[tuple[float, float]]) -> float:
    """Correlation of ranks; equal values share theirs."""
    ranks = []
    for side in (0, 1):
        values = [point[side] for point in points]
        ranks.append([sum(other < one for other in values) + (values.count(one) - 1) / 2 for one in values])
    return statistics.correlation(*ranks) if all(len(set(rank)) > 1 for rank in ranks) else 0.0


def print_memory(scored: Sequence[Scored], shows_rows: bool) -> None:
    """Predicted against measured memory, and rows that ran out of it."""
    for name in DATASETS:
        own = [one for one in scored if one.row.dataset == name and one.row.memory_bytes]
        own = list({(one.row.question, one.row.memory_bytes): one for one in own}.values())
        if own:
            errors = [one.memory_bytes / float(one.row.memory_bytes or 1) - 1 for one in own]
            print(f"\nmemory, {name}: {len(own)} rows, {summary(errors)}")
            if shows_rows:
                for one, error in zip(own, errors, strict=True):
                    gib = (one.memory_bytes / 2**30, float(one.row.memory_bytes or 0) / 2**30)
                    sizes = f"measured {gib[1]:6.1f} predicted {gib[0]:6.1f} GiB {error:+7.1%} {one.fit}"
                    print(f"  {one.row.name:58} {sizes}")
        out = [one for one in scored if one.row.dataset == name and one.row.is_out_of_memory]
        if out:
            called = sum(one.fit != "fits" for one in out)
            print(f"  out of memory: {called} of {len(out)} called over or marginal")
        fitting = [one for one in scored if one.row.dataset == name and one.row.seconds is not None]
        wrong = [one.row.name for one in fitting if one.fit == "over"]
        if fitting:
            print(f"  {name}: rows that ran and are called over: {len(wrong)} of {len(fitting)} {wrong}")


def main() -> None:
    """Read, price, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the published tables")
    parser.add_argument("--dataset", action="append", choices=DATASETS)
    parser.add_argument("--ideal", action="store_true", help="without calibrations")
    parser.add_argument("--rows", action="store_true", help="print every row")
    arguments = parser.parse_args()
    rows = read_rows(arguments.data, arguments.dataset)
    scored, rows = score(rows, is_ideal=arguments.ideal)
    for name in DATASETS:
        print_times(name, rows, scored, arguments.rows)
        if name == "korthikanti":
            print_gains(scored)
    print_rankings(scored)
    print_memory(scored, arguments.rows)


if __name__ == "__main__":
    main()
