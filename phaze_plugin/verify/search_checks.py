"""Verification of a search by its journal: everything is computed again and compared, line by line.

1. The journal belongs to these models and was written by this version (`_belonging_findings`).
2. The search is run again from its question (`_ComparingJournal`). Every bound, schedule and evaluation must be what
   its line says, no line may be missing (else the search was not finished) and none left over (`_line_findings`).
3. Every accelerator was evaluated or pruned, exactly once, and no pruned one may exceed the gap (`_coverage_findings`).
4. Some of the pruned accelerators, drawn at random, are evaluated: none exceeds the bound that pruned it
   (`_pruned_findings`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import phaze
from phaze.errors import PlanError
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.design_search import run_search
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal, JournalRecord, read_header
from phaze.explore.search_question import SearchQuestion, question_from_header
from phaze.explore.search_result import SearchResult
from phaze.installed import installed_plugins
from phaze.planner.progress import TimeLimitError
from phaze.tolerances import EQUAL_DESIGNS
from phaze.verify.plan_checks import Finding

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["check_search"]

_EVALUATED_AGAIN = 5
"""Pruned accelerators that are evaluated unless told otherwise: each takes seconds, and none ever may exceed its bound.
"""

_DRAWING_SEED = 0
"""The seed that draws them: always the same one, so that two checks of a journal say the same."""

_SHOWN_CHARACTERS = 80
"""How much of a journal's line a finding shows."""


@dataclass(slots=True, eq=False)
class _ComparingJournal(Journal):
    """A journal from which nothing is taken: what is computed anew is compared with what another journal says.

    Attributes:
        claimed: the other journal's records.
        wrong: a finding for every record that differs.
        missing: tasks that the other journal lacks.
    """

    claimed: Mapping[str, JournalRecord] = field(default_factory=dict)
    wrong: list[Finding] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def find(self, task: str, cutoff_s: float) -> Mapping[str, object] | None:
        """Nothing, so that every task is run."""
        return None

    def add(self, task: str, cutoff_s: float, result: Mapping[str, object]) -> None:
        """Remember and compare."""
        Journal.add(self, task, cutoff_s, result)
        claimed = self.claimed.get(task)
        if claimed is None:
            self.missing.append(task)
        elif json.loads(json.dumps(self.records[task])) != claimed:
            self.wrong.append(Finding(task, _short(claimed), _short(self.records[task]), False))


def check_search(
    path: str | os.PathLike[str],
    models: object,
    inputs: object = None,
    *,
    workers: Workers | None = None,
    points: int = _EVALUATED_AGAIN,
    report: Callable[[str], object] = lambda doing: None,
    plugins: PluginManager | None = None,
) -> list[Finding]:
    """Everything that was checked, in order; a search is good if every finding holds.

    It takes as long as the search did, and the evaluation of `points` of the pruned accelerators. Raises FormatError if
    the journal is damaged, what reading the models raises, and KeyboardInterrupt: half a check proves nothing.
    """
    header = read_header(path)
    question = question_from_header(header, models, inputs, plugins=plugins or installed_plugins())
    findings = list(_belonging_findings(header, question))
    if not all(finding.holds for finding in findings):
        return findings
    journal = _ComparingJournal(claimed=Journal.load(path).records)

    def report_or_end(doing: str) -> None:
        report(doing)
        if journal.missing:
            raise TimeLimitError

    best_first = BestFirstSearch(question=question, workers=workers or Workers(), journal=journal, report=report_or_end)
    result = _result_of(best_first, journal)
    if result is not None and not journal.missing and _was_interrupted(best_first, result):
        raise KeyboardInterrupt
    findings += _line_findings(journal)
    if result is not None and not journal.missing:
        findings += _coverage_findings(best_first, result)
        findings += _pruned_findings(best_first, result, points, report)
    return findings


def _result_of(best_first: BestFirstSearch, journal: _ComparingJournal) -> SearchResult | None:
    """The result of the search; None where the journal ends before anything was found."""
    try:
        return run_search(best_first, time.monotonic())
    except PlanError:
        if journal.missing:
            return None
        raise


def _was_interrupted(best_first: BestFirstSearch, result: SearchResult) -> bool:
    return not best_first.is_settled or len(result.memories) < len(best_first.question.hbm_bytes)


def _belonging_findings(header: Mapping[str, object], question: SearchQuestion) -> Iterator[Finding]:
    """Whether the journal was written for this question by this version."""
    expected = json.loads(json.dumps(question.journal_header()))
    version = str(header.get("phaze"))
    yield Finding("it was made by this version", version, phaze.__version__, version == phaze.__version__)
    for part in ("models", "space", "prices", "question"):
        claimed, now = header.get(part), expected[part]
        is_same = claimed == now
        if isinstance(claimed, Mapping):  # the order counts as well: tasks call models by their numbers
            is_same = is_same and list(claimed) == list(now)
        yield Finding(f"its {part}", _short(claimed), _short(now), is_same)


def _line_findings(journal: _ComparingJournal) -> Iterator[Finding]:
    """Whether every line was computed again, and nothing else was."""
    yield from journal.wrong
    count = len(journal.claimed)
    same = sum(task in journal.claimed for task in journal.records) - len(journal.wrong)
    end = f"it ends before {journal.missing[0]}" if journal.missing else "the search ends"
    yield Finding("the search is finished", "the journal ends", end, not journal.missing)
    extra = [task for task in journal.claimed if task not in journal.records]
    computed = f"{same} computed again" + (f"; never asked: {extra[0]}" if extra else "")
    yield Finding("every line of the journal", f"{count} lines", computed, same == count)


def _coverage_findings(best_first: BestFirstSearch, result: SearchResult) -> Iterator[Finding]:
    """Whether every accelerator was settled once, and no pruned one may exceed the gap."""
    state, question = best_first.state, best_first.question
    evaluated = np.array(list(state.evaluated), dtype=np.int64)
    settled = np.concatenate([evaluated, *(box.points for box, _ in state.closed)])
    is_once = np.array_equal(np.sort(settled), np.arange(len(question.points)))
    yield Finding("every accelerator is settled once", f"{len(question.points)}", f"{len(settled)}", is_once)
    if question.wants_front:
        return
    largest = max((upper_bound for _, upper_bound in state.closed), default=0.0)
    allowed = result.certificate.value * (1 + question.gap)
    is_within = largest <= allowed * (1 + EQUAL_DESIGNS)
    yield Finding("no pruned accelerator exceeds the gap", f"{allowed:.9g}", f"{largest:.9g}", is_within)


def _pruned_findings(
    best_first: BestFirstSearch, result: SearchResult, count: int, report: Callable[[str], object]
) -> Iterator[Finding]:
    """Some pruned accelerators, evaluated without regard to what is known of them."""
    best_first.journal, best_first.report = Journal(), report
    pruned = [(point, row) for point, row in enumerate(result.explored) if row.state == "pruned"]
    drawn = np.random.default_rng(_DRAWING_SEED).permutation(len(pruned))[:count]
    for point, row in (pruned[index] for index in sorted(drawn.tolist())):
        value = best_first.tasks.value_of(point)
        yield Finding(f"{row.name} is within its bound", f"{row.bound:.9g}", f"{value:.9g}", value <= row.bound)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
