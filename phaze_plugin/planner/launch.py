"""One plan for all processes of a launch: all check that they ask the same, rank 0 answers, all read the answer.

What goes wrong on one process is raised on all of them, so that none waits for a plan that never comes. The answer is
kept in the user's cache folder under the content of the question: the next start of the same training loads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import phaze
from phaze.errors import FormatError, PlanError
from phaze.json_records import to_document
from phaze.plan.plan import Plan, PlanStatus, RunFacts, plan_from_document, read_plan
from phaze.planner.explainer import FoundSearch, PlanExplainer
from phaze.planner.plan_building import question_facts
from phaze.planner.progress import Watch
from phaze.planner.strategy_search import choose
from phaze.question import Question, content_hash

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.interfaces import World

__all__ = ["active_world", "cache_path", "plan_together"]


def active_world(plugins: PluginManager) -> World | None:
    """The launch that this process is one of several in, or None."""
    for offer in plugins.worlds():
        if offer.value.size() > 1:
            return offer.value
    return None


def plan_together(world: World, ask: Callable[[], Question], answer: Callable[[Question], Plan]) -> Plan:
    """The plan of rank 0 on every rank; one that is asked to explain itself searches again, on that rank.

    Raises on every rank what was raised on one: there as it was, elsewhere as a PlanError that names the rank; and
    PlanError where ranks ask for different things.
    """
    question, error, report = None, None, {}
    try:
        question = ask()
        report = _asked(question)
    except Exception as failure:
        error, report = failure, {"error": f"{type(failure).__name__}: {failure}"}
    _raise_together(error, reports := _gather(world, report))
    _check_equal(reports)
    assert question is not None
    outcome: dict[str, Any] = {}
    if world.rank() == 0:
        try:
            outcome = {"plan": json.loads(_answered(question, answer).to_json())}
        except Exception as failure:
            error, outcome = failure, {"error": f"{type(failure).__name__}: {failure}"}
    _raise_together(error, answers := _gather(world, outcome))
    plan = plan_from_document(answers[0]["plan"], "the plan of rank 0")
    asked = question
    return replace(plan, explainer=PlanExplainer(lambda model, inputs: FoundSearch(asked, choose(asked, Watch()))))


def _gather(world: World, report: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in world.gather(json.dumps(report))]


def _raise_together(error: Exception | None, reports: Sequence[dict[str, Any]]) -> None:
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if "error" in report:
            raise PlanError(f"rank {rank} failed, so no rank has a plan. There: {report['error']}")


def _asked(question: Question) -> dict[str, Any]:
    """What all ranks must agree on."""
    return {
        "graph": question.graph_hash,
        "hardware": question.hardware_hash,
        "question": json.dumps(to_document(question_facts(question)), sort_keys=True),
        "model": f"{question.graph.name}, {question.graph.parameter_count:,} parameters",
    }


def _check_equal(reports: Sequence[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        for name in ("graph", "hardware", "question"):
            if report[name] != reports[0][name]:
                raise PlanError(
                    f"rank {rank} asks for another plan than rank 0: its {name} differs ({report['model']}; rank 0 has "
                    f"{reports[0]['model']}). Pass the same model and arguments on every rank."
                )


def _answered(question: Question, answer: Callable[[Question], Plan]) -> Plan:
    """From the cache, or anew and kept unless interrupted; a cache that cannot be read or written is passed over."""
    path = cache_path(question)
    try:
        return replace(read_plan(path), run=RunFacts(is_cached=True))
    except FormatError:
        plan = answer(question)
    if plan.status is PlanStatus.INTERRUPTED:
        return plan
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
    except (FormatError, OSError) as error:
        note = f"the plan was not kept for the next start: {error}"
        return replace(plan, provenance=replace(plan.provenance, notes=(*plan.provenance.notes, note)))
    return plan


def cache_path(question: Question) -> Path:
    """Where the plan of a question is kept."""
    from platformdirs import user_cache_path

    content = json.dumps({**_asked(question), "version": phaze.__version__}, sort_keys=True)
    return user_cache_path("phaze") / "plans" / f"{content_hash(content)}.json"
