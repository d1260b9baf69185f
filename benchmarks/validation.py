"""The leaderboard: predicted against measured training runs, one line for each part of each published dataset.

    python benchmarks/validation.py --data DIR [--dataset NAME] [--rows] [--reasons] [--ideal]

Every row of the published tables (`published/` says what each table leaves out) is built from its numbers and
predicted under exactly its strategy with the calibration that is shipped for its chip. Printed per part of a dataset:
rows scored of rows, mean size of errors (MAPE), bias and 95th percentile; the MAPE when the calibration was fitted
without the group of rows that differ from a row only in strategy (`fit_published.py` stored it); the best single
constant (TFLOP/s per chip), each row from the others; pairs of strategies in the measured order within groups of at
least three, and the mean regret of taking the predicted best; memory; and what the dataset's own authors reach with
their tool.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from published import DATASETS, Row, read_rows
from scoring import Scored, Scorer, constant_errors, distinct, family_of, mean_size, rankings, shipped_calibration

from phaze.cost import IDEAL
from phaze.cost.calibration import fitted_families

AUTHORS = {"vtrain single": 0.0837, "vtrain multi": 0.1473}
"""Mean errors that the authors of a dataset published for their own tool on all of their rows (vTrain, README)."""

_HEADER = (
    f"{'dataset':34}{'chip':>10}{'scored':>11}{'MAPE':>8}{'bias':>8}{'95th':>8}{'left out':>9}{'constant':>9}"
    f"{'pairs':>12}{'regret':>8}{'memory':>12}{'authors':>9}"
)


def part_of(row: Row) -> str:
    """What a row is listed under."""
    return f"{row.dataset} {row.split}".strip()


def score_all(rows: Sequence[Row], scorer: Scorer, is_ideal: bool) -> tuple[list[Scored], list[tuple[Row, str]]]:
    """Every row predicted, or with the reason why it is not; rows of equal questions are predicted once."""
    scored: list[Scored] = []
    reasons: list[tuple[Row, str]] = []
    for row in rows:
        answer = scorer.score(row, IDEAL if is_ideal else shipped_calibration(row))
        if isinstance(answer, str):
            reasons.append((row, answer))
        else:
            scored.append(answer)
    return scored, reasons


def percent(value: float | None, width: int, sign: str = "") -> str:
    """A share in percent, or a dash."""
    return f"{'-' if value is None else format(value, sign + '.1%'):>{width}}"


def left_out_error(part: str, chip: str) -> float | None:
    """The stored error of a part with groups left out."""
    family = family_of(chip)
    if family is None:
        return None
    stored = fitted_families()[family]["errors"].get(part)
    return None if stored is None else stored.get("group_left_out")


def memory_text(scored: Sequence[Scored]) -> str:
    """Rows with measured memory and their mean error."""
    known = {(one.row.question, one.row.memory_bytes): one for one in scored if one.row.memory_bytes}
    errors = [one.memory_bytes / float(one.row.memory_bytes or 1) - 1 for one in known.values()]
    return f"{len(errors)}: {mean_size(errors):.1%}" if errors else "-"


def line_of(part: str, rows: Sequence[Row], scored: Sequence[Scored]) -> str:
    """One line of the leaderboard."""
    kept = {id(row) for row in distinct([one.row for one in scored])}
    timed = [one for one in scored if id(one.row) in kept]
    chips = sorted({row.chip for row in rows if row.chip})
    chip = chips[0] if len(chips) == 1 else f"{len(chips)} chips" if chips else "-"
    head = f"{part:34}{chip:>10}{f'{len(timed)} of {len(rows)}':>11}"
    if not timed:
        return head + f"{'':>65}{memory_text(scored):>12}"
    errors = [one.error for one in timed]
    sizes = sorted(abs(error) for error in errors)
    groups = rankings(timed)
    pairs, agreed = sum(group.pairs for group in groups), sum(group.agreed for group in groups)
    regret = statistics.mean(group.regret for group in groups) if groups else None
    return (
        head
        + percent(mean_size(errors), 8)
        + percent(statistics.mean(errors), 8, "+")
        + percent(sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))], 8)
        + percent(left_out_error(part, chips[0]), 9)
        + percent(mean_size(constant_errors(timed)), 9)
        + f"{f'{agreed} of {pairs}' if pairs else '-':>12}"
        + percent(regret, 8)
        + f"{memory_text(scored):>12}"
        + percent(AUTHORS.get(part), 9)
    )


def print_rows(part: str, scored: Sequence[Scored]) -> None:
    """Every row of a part."""
    print(f"\n{part}")
    for one in scored:
        text = f"  {one.row.name:78}"
        if one.row.seconds:
            text += f" measured {one.row.seconds:9.3f} s predicted {one.predicted_s:9.3f} s {one.error:+7.1%}"
        if one.row.memory_bytes or one.row.is_out_of_memory:
            measured = "out" if one.row.is_out_of_memory else f"{float(one.row.memory_bytes or 0) / 2**30:.1f}"
            text += f" memory {measured} GiB predicted {one.memory_bytes / 2**30:.1f} GiB {one.fit}"
        print(text)


def print_summary(scored: Sequence[Scored]) -> None:
    """Rankings and memory over all datasets."""
    groups = rankings([one for one in scored if one.row.seconds])
    if groups:
        pairs, agreed = sum(group.pairs for group in groups), sum(group.agreed for group in groups)
        regret = statistics.mean(group.regret for group in groups)
        print(f"\nrankings: {len(groups)} groups, {agreed} of {pairs} pairs in order ({agreed / pairs:.1%}), ", end="")
        print(f"mean regret {regret:.1%}")
    out = [one for one in scored if one.row.is_out_of_memory]
    called = sum(one.fit != "fits" for one in out)
    print(f"out of memory: {called} of {len(out)} rows called over or marginal")
    ran = [one for one in scored if one.row.seconds]
    judged = [one for one in ran if one.row.memory_unknown is None]
    over = [f"{part_of(one.row)} {one.row.name}" for one in judged if one.fit == "over"]
    marginal = sum(one.fit == "marginal" for one in judged)
    print(f"called over although they ran: {len(over)} of {len(judged)}; marginal: {marginal}")
    for reason, count in Counter(one.row.memory_unknown for one in ran if one.row.memory_unknown).items():
        print(f"  memory of {count} others is not judged: {reason}")
    for name in over:
        print(f"  {name}")


def main() -> None:
    """Read, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the published tables")
    parser.add_argument("--dataset", action="append", choices=DATASETS)
    parser.add_argument("--ideal", action="store_true", help="without calibrations")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--reasons", action="store_true", help="name every row that is not scored")
    arguments = parser.parse_args()
    rows = read_rows(arguments.data, arguments.dataset)
    scored, reasons = score_all(rows, Scorer(), arguments.ideal)
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(part_of(row), []).append(row)
    print(_HEADER)
    for part, own in parts.items():
        print(line_of(part, own, [one for one in scored if part_of(one.row) == part]), flush=True)
    print_summary(scored)
    if arguments.rows:
        for part in parts:
            print_rows(part, [one for one in scored if part_of(one.row) == part])
    print("\nnot scored, and why")
    for (dataset, reason), count in Counter((row.dataset, reason) for row, reason in reasons).items():
        names = [row.name for row, why in reasons if (row.dataset, why) == (dataset, reason)]
        print(f"  {dataset}: {count} rows, {reason}" + (f": {'; '.join(names)}" if arguments.reasons else ""))
    print(f"\n{len(scored)} of {len(rows)} rows in {time.process_time():.0f} s of processor time")


if __name__ == "__main__":
    main()
