"""A plan reaches its target, or says why it cannot."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from plans import QUESTION, small_cluster, small_graph, small_plan

import phaze
from phaze.errors import PlanError, UnknownNameError
from phaze.hooks import Origin, PluginManager, hookimpl
from phaze.plan.handover import apply_plan, export_plan, obstacles
from phaze.plan.plan import Plan, SplitDim
from phaze.targets import Capabilities, find_target

EVERYTHING = Capabilities.everything()


@dataclass(frozen=True)
class Writer:
    """A target that writes."""

    answer: object = "text"
    name: str = "writer"
    libraries: tuple[str, ...] = ()
    capabilities: Capabilities = EVERYTHING

    def export(self, plan: Plan, model: object) -> object:
        return self.answer


@dataclass(frozen=True)
class Arranger(Writer):
    """A target that arranges live models."""

    name: str = "arranger"
    options: tuple[str, ...] = ("speed",)

    def export(self, plan: Plan, model: object) -> object:
        raise PlanError("target 'arranger' writes no file; use plan.apply(model).")

    def apply(
        self,
        plan: Plan,
        model: object,
        *,
        mesh: object,
        loss_fn: object,
        plugins: PluginManager,
        options: Mapping[str, object],
    ) -> object:
        return (plan, model, mesh, loss_fn, plugins, dict(options))


@dataclass(frozen=True)
class Cutter:
    """Cuts integers into stages."""

    name: str = "cutter"
    target: str = "writer"

    def accepts(self, model: object) -> bool:
        return isinstance(model, int)

    def build_stages(self, model: object, stages: object) -> tuple[object, ...]:
        return ()


def manager_with(*targets: Writer, cutters: tuple[Cutter, ...] = ()) -> PluginManager:
    manager = PluginManager()
    plugin = SimpleNamespace(phaze_targets=hookimpl(lambda: targets), phaze_stage_builders=hookimpl(lambda: cutters))
    manager.register(plugin, Origin(plugin="ours"))
    return manager


def planned_for(target: str | None) -> Plan:
    plan = small_plan()
    return replace(plan, question=replace(plan.question, target=target))


@pytest.mark.slow
def test_apply_hands_everything_to_the_plans_target() -> None:
    plan = planned_for("arranger")
    plugins = manager_with(Arranger())
    applied = apply_plan(plan, plugins, "model", "mesh", "loss", {}, {"speed": 1})
    assert applied == (plan, "model", "mesh", "loss", plugins, {"speed": 1})


def test_a_plan_for_analysis_is_not_applied() -> None:
    with pytest.raises(PlanError, match=r"analysis only and is not executable.*target='auto'"):
        small_plan().apply(object())


def test_a_target_that_writes_files_applies_nothing_and_says_what_to_call() -> None:
    with pytest.raises(PlanError, match=r"'writer' writes files .* plan.export\('writer'\)"):
        apply_plan(planned_for("writer"), manager_with(Writer()), None, None, None, {}, {})
    with pytest.raises(PlanError, match=r"'arranger' writes no file; use plan.apply\(model\)"):
        export_plan(small_plan(), manager_with(Arranger()), "arranger", None)


def test_export_gives_texts_by_file_name() -> None:
    assert export_plan(small_plan(), manager_with(Writer({"a.py": "b"})), "writer", None) == {"a.py": "b"}
    assert export_plan(small_plan(), manager_with(Writer("flags")), "writer", None) == {"writer.txt": "flags"}
    with pytest.raises(PlanError, match="'writer' gave int where texts by file name were expected"):
        export_plan(small_plan(), manager_with(Writer(3)), "writer", None)


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown target 'writter'. Did you mean writer"):
        export_plan(small_plan(), manager_with(Writer()), "writter", None)


def test_a_missing_library_names_the_extra() -> None:
    with pytest.raises(PlanError, match=r"needs no_such_library.*pip install 'phaze-plugin\[no_such_library\]'"):
        export_plan(small_plan(), manager_with(Writer(libraries=("no_such_library",))), "writer", None)


def test_a_plan_that_does_not_fit_is_not_exported_and_says_what_would() -> None:
    plan = phaze.optimize(small_graph(), cluster=small_cluster(20 * 2**20, 2), **QUESTION)
    assert plan.remedies
    with pytest.raises(PlanError, match=r"does not fit its devices and cannot run. What would fit: ") as caught:
        export_plan(plan, manager_with(Writer()), "writer", None)
    assert plan.remedies[0].text in str(caught.value)


def test_obstacles_name_everything_that_a_target_does_not_run() -> None:
    plan = small_plan(devices=6)
    stages = tuple(replace(plan.stages[0], tp=width, devices=(width,)) for width in (1, 2))
    split = SplitDim(dim=0, outer=3, chunk=1, ways=2, stride=1)
    strategy = replace(plan.strategy, pp=2, dp=2, zero=2, schedule="zero-bubble", micro_batch_size=3)
    strategy = replace(strategy, recompute=("none", "products"))
    layouts = replace(plan.layouts, parameters={"attention.weight": (split,)})
    odd = replace(plan, strategy=strategy, stages=stages, layouts=layouts)
    assert obstacles(odd, EVERYTHING) == []
    found = obstacles(odd, Capabilities())
    for words in (
        "ZeRO stage 2",
        "recompute mode products",
        "schedule zero-bubble",
        "different tp",
        "4 idle devices",
        "dp x micro_batch_size does not divide",
        "attention.weight",
    ):
        assert any(words in one for one in found), words
    pair = frozenset({(strategy.schedule, 2)})
    assert obstacles(odd, replace(EVERYTHING, excluded_pairs=pair)) == [  # type: ignore[arg-type]
        "schedule zero-bubble together with ZeRO stage 2"
    ]


def test_pipelines_are_left_out_for_models_that_nothing_cuts() -> None:
    cuts_none = replace(EVERYTHING, can_cut_stages=False)
    manager = manager_with(Writer(capabilities=cuts_none), cutters=(Cutter(), Cutter("other", "elsewhere")))
    assert find_target("writer", 3, manager).capabilities.schedules
    target = find_target("writer", 3.5, manager)
    assert not target.capabilities.schedules
    assert target.notes == (
        "one pipeline stage only: nothing cuts float into stages for target writer (known: cutter)",
    )


def test_an_option_that_the_target_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="apply has no option 'colour' for target 'arranger'; expected some of speed"):
        apply_plan(planned_for("arranger"), manager_with(Arranger()), "model", None, None, {}, {"colour": 1})
    with pytest.raises(PlanError, match=r"no option 'spede' .* Did you mean speed\?"):
        apply_plan(
            planned_for("arranger"), manager_with(Arranger()), "model", None, None, {"inputs": None}, {"spede": 1}
        )
