"""Checks of a search by its journal: everything is computed again, and compared line by line.

1. The journal belongs to these models and was written by this version.
2. The search is run again from its question. Every bound, schedule and evaluation must be what its line says, no line
   may be missing (else the search was not finished) and none may be left over.
3. Every accelerator was evaluated or pruned, exactly once, and no pruned one may exceed the gap.
4. Some of the pruned accelerators, drawn by the seed, are evaluated: none exceeds the bound that pruned it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import phaze
from phaze.errors import PlanError
from phaze.explore.best_first_search import Engine
from phaze.explore.design_search import answer
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal, read_header
from phaze.explore.objectives import TIE
from phaze.explore.search_question import SearchQuestion, question_of
from phaze.explore.search_result import SearchResult
from phaze.planner.progress import TimeLimitError
from phaze.verify.plan_checks import Finding

__all__ = ["check_search"]


@dataclass(slots=True, eq=False)
class _Replay(Journal):
    """Compares what is computed with what a journal says."""

    claimed: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    wrong: list[Finding] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def find(self, task: str, cutoff_s: float) -> dict[str, Any] | None:
        """Nothing is taken from the journal."""
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
    points: int = 5,
    report: Callable[[str], object] = lambda doing: None,
) -> list[Finding]:
    """Everything that was checked, in order; a search is good if every finding holds.

    It takes as long as the search did, and the evaluation of `points` more accelerators. Raises FormatError if the
    journal is damaged, what reading the models raises, and KeyboardInterrupt: half a check proves nothing.
    """
    from phaze.installed import installed_plugins

    header = read_header(path)
    question = question_of(header, models, inputs, plugins=installed_plugins())
    findings = list(_belonging(header, question))
    if not all(finding.holds for finding in findings):
        return findings
    replay = _Replay(claimed=Journal.load(path).records)

    def heard(doing: str) -> None:
        report(doing)
        if replay.missing:
            raise TimeLimitError

    engine = Engine(question=question, workers=workers or Workers(), journal=replay, report=heard)
    result = _answer(engine)
    if result is not None and not replay.missing and _was_interrupted(engine, result):
        raise KeyboardInterrupt
    findings += _lines(replay)
    if result is not None and not replay.missing:
        findings += _coverage(engine, result)
        findings += _evaluated_again(engine, result, points, report)
    return findings


def _answer(engine: Engine) -> SearchResult | None:
    """None where the journal ends before anything was found."""
    try:
        return answer(engine, time.monotonic())
    except PlanError:
        if isinstance(engine.journal, _Replay) and engine.journal.missing:
            return None
        raise


def _was_interrupted(engine: Engine, result: SearchResult) -> bool:
    return engine.is_interrupted or len(result.memories) < len(engine.question.hbm_bytes)


def _belonging(header: Mapping[str, Any], question: SearchQuestion) -> Iterator[Finding]:
    now = question.header()
    version = str(header.get("phaze"))
    yield Finding("it was made by this version", version, phaze.__version__, version == phaze.__version__)
    for part in ("models", "space", "prices", "question"):
        claimed, found = header.get(part), json.loads(json.dumps(now[part]))
        is_same = claimed == found and list(claimed) == list(found)  # models in the same order, too
        yield Finding(f"its {part}", _short(claimed), _short(found), is_same)


def _lines(replay: _Replay) -> Iterator[Finding]:
    yield from replay.wrong
    count = len(replay.claimed)
    same = sum(task in replay.claimed for task in replay.records) - len(replay.wrong)
    ends = f"it ends before {replay.missing[0]}" if replay.missing else "the search ends"
    yield Finding("the search is finished", "the journal ends", ends, not replay.missing)
    extra = [task for task in replay.claimed if task not in replay.records]
    told = f"{same} computed again" + (f"; never asked: {extra[0]}" if extra else "")
    yield Finding("every line of the journal", f"{count} lines", told, same == count)


def _coverage(engine: Engine, result: SearchResult) -> Iterator[Finding]:
    know, proof = engine.know, result.certificate
    settled = np.concatenate([np.array(list(know.evaluated), dtype=np.int64), *(box.points for box, _ in know.closed)])
    is_once = np.array_equal(np.sort(settled), np.arange(len(engine.question.points)))
    yield Finding("every accelerator is settled once", f"{len(engine.question.points)}", f"{len(settled)}", is_once)
    if engine.question.wants_front:
        return
    most = max((bound for _, bound in know.closed), default=0.0)
    allowed = proof.value * (1 + engine.question.gap)
    yield Finding("no pruned accelerator exceeds the gap", f"{allowed:.9g}", f"{most:.9g}", most <= allowed * (1 + TIE))


def _evaluated_again(
    engine: Engine, result: SearchResult, count: int, report: Callable[[str], object]
) -> Iterator[Finding]:
    """Pruned accelerators, evaluated without regard to what is known of them."""
    engine.journal, engine.report = Journal(), report
    rows = [(point, row) for point, row in enumerate(result.explored) if row.state == "pruned"]
    drawn = np.random.default_rng(engine.question.seed).permutation(len(rows))[:count]
    for point, row in (rows[at] for at in sorted(drawn.tolist())):
        found = engine.value_at(point)
        yield Finding(f"{row.name} is within its bound", f"{row.bound:.9g}", f"{found:.9g}", found <= row.bound)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
