"""One plan for all processes of a launch: all check that they ask the same, rank 0 answers, all read the answer.

What goes wrong on one process is raised on all of them, so that none waits for a plan that never comes. The answer is
kept in the user's cache folder under the content of the question, plugins included: the next start of the same training
loads it. A kept plan is not taken on trust: it must be for this very question, and its strategy is priced again.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import phaze
from phaze.errors import FormatError, PhazeError, PlanError
from phaze.json_documents import to_document
from phaze.plan.plan import VERSION, Plan, PlanStatus, RunFacts, plan_from_document, read_plan
from phaze.planner.device_counts import on_devices
from phaze.planner.explainer import PlanExplainer, found_search
from phaze.planner.fixed_stages import price_fixed_stages, strategy_with_stages
from phaze.planner.plan_building import build_plan, question_facts
from phaze.planner.progress import Watch
from phaze.question import Question, content_hash
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.interfaces import World

__all__ = ["active_world", "cache_path", "plan_together"]


_CAPABILITIES = fields(Capabilities)


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
    return replace(plan, explainer=PlanExplainer(lambda model, inputs: found_search(asked, Watch())))


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
    """From the cache, or anew and kept unless interrupted; what cannot be read, written or trusted is passed over."""
    path = cache_path(question)
    try:
        kept = read_plan(path)
        if _still_holds(kept, question):
            return replace(kept, run=RunFacts(is_cached=True))
    except PhazeError:
        pass
    plan = answer(question)
    if plan.status is PlanStatus.INTERRUPTED:
        return plan
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        plan.save(path)
    except (FormatError, OSError) as error:
        note = f"the plan was not kept for the next start: {error}"
        return replace(plan, provenance=replace(plan.provenance, notes=(*plan.provenance.notes, note)))
    return plan


_REPRICED = ("model", "hardware", "strategy", "stages", "layouts", "step_time_s", "step_time_parts", "energy", "mfu")
"""Fields of a plan that follow from its strategy and stages alone."""


def _still_holds(kept: Plan, question: Question) -> bool:
    """Whether a kept plan answers this question, and its strategy has the price and the layouts that it says.

    Raises PhazeError where its strategy cannot be priced.
    """
    asked = replace(question_facts(question), micro_batch_size=(), tp=())  # what was offered may have grown
    said = replace(kept.question, micro_batch_size=(), tp=())
    if question.objective.chooses_devices:
        question = on_devices(question, kept.cluster.device_count)
    hashes = (kept.hashes.graph, kept.hashes.hardware, kept.hashes.version)
    if hashes != (question.graph_hash, question.hardware_hash, phaze.__version__):
        return False
    if to_document(asked) != to_document(said):
        return False
    fixed = question.with_strategy(strategy_with_stages(kept))
    again = build_plan(question, replace(price_fixed_stages(fixed, Watch()), question=question))
    return all(to_document(getattr(kept, name)) == to_document(getattr(again, name)) for name in _REPRICED)


def _price_versions(question: Question) -> dict[str, str]:
    """The prices of ops that plugins bring, by their names, each with the content of the file that it stands in."""
    versions = {}
    for name, price in question.prices.items():
        owner = price if inspect.isroutine(price) else type(price)
        try:
            content = content_hash(inspect.getsource(inspect.getmodule(owner) or owner))
        except (OSError, TypeError):
            content = ""
        versions[name] = f"{owner.__module__}.{owner.__qualname__} {content}"
    return versions


def cache_path(question: Question) -> Path:
    """Where the plan of a question is kept."""
    from platformdirs import user_cache_path

    capabilities = {
        name: sorted(map(str, value)) if isinstance(value, frozenset) else str(value)
        for name, value in ((field.name, getattr(question.capabilities, field.name)) for field in _CAPABILITIES)
    }
    asked = {**_asked(question), "prices": _price_versions(question), "capabilities": capabilities}
    content = json.dumps({**asked, "version": phaze.__version__, "format": VERSION}, sort_keys=True)
    return user_cache_path("phaze") / "plans" / f"{content_hash(content)}.json"
