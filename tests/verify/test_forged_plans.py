"""Every single value of a plan that is changed is noticed: damage by the digest, forgery by load or verify.

Six kinds of plans are tried: a pipeline, split contexts, divided experts, a search's own plan, one that does not fit,
and one that was interrupted. What a forger changes is the value and the digest. Wall-clock facts of the run are no
claim about the plan: their damage is noticed, their forgery is not.
"""

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from designs import SMALL, some_points, tiny_model
from forgeries import forged
from graphs import TINY_CONFIGS
from plans import QUESTION, small_cluster, small_graph

import phaze
from phaze.errors import FormatError, PhazeError
from phaze.frontends.transformer_config import graph_from_config
from phaze.hooks import PluginManager
from phaze.ir import Graph
from phaze.plan.plan import Plan, PlanStatus, plan_from_document
from phaze.planner.progress import Progress, Watch
from phaze.verify.plan_checks import Derivation, check_plan, compare_plan, derive_plan
from phaze.verify.saved_plan import question_for

SMALL_QUESTION: dict[str, Any] = {**QUESTION, "micro_batch_size": (1,)}


@cache
def tiny(family: str) -> Graph:
    return graph_from_config(TINY_CONFIGS[family], name=family, sequence_length=8)


class Interrupting:
    """Ends a search as soon as something was found."""

    def __call__(self, progress: Progress) -> None:
        if progress.best_step_time_s is not None:
            raise KeyboardInterrupt


@cache
def made(kind: str) -> tuple[Plan, Graph]:
    """A plan of some kind, and its model."""
    asked: dict[str, Any]
    match kind:
        case "pipeline":
            strategy = {"dp": 4, "pp": 2, "schedule": "1f1b"}
            options = {**SMALL_QUESTION, "cluster": small_cluster()}
            return phaze.evaluate(small_graph(), strategy=strategy, compares=False, **options).plan, small_graph()
        case "context":
            asked = {"global_batch_size": 2, "micro_batch_size": 1, "tp": 1, "cp": 2}
            return phaze.optimize(tiny("llama"), cluster=small_cluster(devices=2), **asked), tiny("llama")
        case "experts":
            asked = {"global_batch_size": 2, "micro_batch_size": 1, "tp": 1, "ep": 2}
            return phaze.optimize(tiny("mixtral"), cluster=small_cluster(devices=2), **asked), tiny("mixtral")
        case "search":
            result = phaze.search(tiny_model(), space=some_points(2), executor="serial", **SMALL)
            return next(iter(result.plans.values())), tiny_model()
        case "does not fit":
            cluster = small_cluster(2**24, devices=2)
            return phaze.optimize(small_graph(), cluster=cluster, **SMALL_QUESTION), small_graph()
        case "interrupted":
            options = {**QUESTION, "cluster": small_cluster(), "progress": Interrupting()}
            return phaze.optimize(small_graph(), **options), small_graph()
    raise AssertionError(kind)


KINDS = ("pipeline", "context", "experts", "search", "does not fit", "interrupted")
STATUS = {"does not fit": PlanStatus.DOES_NOT_FIT, "interrupted": PlanStatus.INTERRUPTED}

DERIVED_FROM = ("question", "strategy", "hardware", "stages", "status", "is_explained", "model", "hashes")
"""Fields by which a check is steered: with one of them changed everything is derived again, with others it is not."""


@cache
def derivation(kind: str) -> Derivation:
    plan, model = made(kind)
    return derive_plan(plan, question_for(plan, model, None, PluginManager.load()), Watch())


def scalars(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a document that are no lists and no objects."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from scalars(item, (*path, key))
    else:
        yield path


def changed(document: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """The document with one value changed a little."""
    document = json.loads(json.dumps(document))
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    old = place[path[-1]]
    match old:
        case bool():
            new: Any = not old
        case int():
            new = old + 1
        case float():
            new = old * 1.001 + 1e-12
        case str():
            new = {"optimal": "within the gap", "interrupted": "optimal"}.get(old, f"{old}x")
        case _:
            new = 1.0
    place[path[-1]] = new
    return document


def is_noticed(kind: str, document: dict[str, Any], path: tuple[Any, ...]) -> bool:
    """Whether load or verify notices a value that was changed together with the digest."""
    try:
        plan = plan_from_document(forged(document))
        if path[0] in DERIVED_FROM:
            return not all(finding.holds for finding in check_plan(plan, made(kind)[1]))
        return not all(finding.holds for finding in compare_plan(plan, derivation(kind)))
    except PhazeError:
        return True


def claims(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The values that a forger could change: all but format, version, digest and the facts of the run."""
    return [path for path in scalars(document) if path[0] not in ("format", "version", "digest", "run")]


def unnoticed(kind: str, paths: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    document = json.loads(made(kind)[0].to_json())
    return [path for path in paths if not is_noticed(kind, changed(document, path), path)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_plan_of_every_kind_holds(kind: str) -> None:
    plan, model = made(kind)
    assert STATUS.get(kind, plan.status) is plan.status
    assert (plan.strategy.cp, plan.strategy.ep) == {"context": (2, 1), "experts": (1, 2)}.get(kind, (1, 1))
    assert [finding for finding in check_plan(plan, model) if not finding.holds] == []
    assert plan_from_document(json.loads(plan.to_json())) == plan


@pytest.mark.parametrize("kind", KINDS)
def test_every_changed_value_of_a_file_is_noticed_as_damage(kind: str) -> None:
    document = json.loads(made(kind)[0].to_json())
    paths = list(scalars(document))
    chosen = random.Random(0).sample(paths, 60) + [path for path in paths if path[0] in ("run", "digest", "version")]
    for path in chosen:
        with pytest.raises(FormatError):
            plan_from_document(changed(document, path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_forged_values_is_noticed(kind: str) -> None:
    """One value of each kind that needs no search to be derived again, and some of the others."""
    document, chance = json.loads(made(kind)[0].to_json()), random.Random(1)
    by_kind = {tuple(key for key in path if isinstance(key, str)): path for path in claims(document)}
    cheap = [path for path in by_kind.values() if path[0] not in DERIVED_FROM]
    steering = [path for path in by_kind.values() if path[0] in DERIVED_FROM]
    assert unnoticed(kind, cheap + chance.sample(steering, 3)) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_forged_value_is_noticed(kind: str) -> None:
    assert unnoticed(kind, claims(json.loads(made(kind)[0].to_json()))) == []


@pytest.mark.parametrize("status", ["interrupted", "optimal", "within the gap", "above the gap", "does not fit"])
@pytest.mark.parametrize("gap", [-7.0, 0.0, 0.004, 0.3])
def test_no_proof_can_be_forged_whatever_status_goes_with_it(status: str, gap: float) -> None:
    plan, model = made("pipeline")
    if plan.gap == pytest.approx(gap) and plan.status == status:
        return
    bound_s = plan.step_time_s * (1 - gap)
    document = forged(json.loads(plan.to_json()), status=status, gap=gap, bound_s=bound_s)
    try:
        findings = check_plan(plan_from_document(document), model)
    except FormatError:
        return
    assert not all(finding.holds for finding in findings)
