"""Which target a plan is for: found by name or by the model's framework, it bounds what a search may choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phaze.capabilities import Capabilities
from phaze.errors import QuestionError, UnknownNameError, shown

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.interfaces import StageBuilder

__all__ = ["ANALYSIS", "ChosenTarget", "find_target"]


@dataclass(frozen=True, slots=True)
class ChosenTarget:
    """A target's name and what it can run; without a name the plan is analysis, and not executable.

    `notes` say what the model at hand takes away from what the target can run otherwise.
    """

    name: str | None
    capabilities: Capabilities
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name or "none, not executable"


ANALYSIS = ChosenTarget(None, Capabilities.everything())


def find_target(
    name: str | None, model: object, plugins: PluginManager, graph: object = None, *, is_step: bool = False
) -> ChosenTarget:
    """The target called `name`; "auto" is the target of the framework that the model comes from, if there is one.

    `is_step` says that the model is a whole train step, with its update.

    Raises UnknownNameError for a name that no target has.
    """
    if name is None:
        return ANALYSIS
    if not isinstance(name, str):
        raise QuestionError(f"target is {shown(name)}; expected a target's name, 'auto', or None for analysis.")
    targets = {offer.name: offer.value for offer in plugins.targets()}
    if name != "auto":
        if name not in targets:
            raise UnknownNameError("target", name, (*targets, "auto"))
        target = ChosenTarget(name, targets[name].capabilities)
    else:
        frontend = _frontend_of(model, plugins)
        if frontend not in targets:
            return ANALYSIS
        target = ChosenTarget(frontend, targets[str(frontend)].capabilities)
    if is_step and target.capabilities.runs_steps_as_written:
        note = (
            "a whole train step runs as it is written: in one stage, all samples of a copy at once, and computing "
            "again what it says itself; a plan of its loss may choose more"
        )
        return replace(target, capabilities=target.capabilities.for_whole_step(), notes=(note,))
    return _for_model(target, model, plugins, graph)


def _for_model(target: ChosenTarget, model: object, plugins: PluginManager, graph: object) -> ChosenTarget:
    """A target that cuts no model by itself has pipelines only for the models that some stage builder of its cuts.

    Builders are asked about the model and about its graph: some kinds of model show what they are in the graph only.
    """
    capabilities = target.capabilities
    builders = [offer.value for offer in plugins.stage_builders() if offer.value.target == target.name]
    if capabilities.can_cut_stages or not capabilities.schedules or _is_cut(builders, model, graph):
        return target
    note = (
        f"one pipeline stage only: nothing cuts {type(model).__name__} into stages for target {target.name} (known: "
        f"{', '.join(sorted(builder.name for builder in builders)) or 'none'})"
    )
    return replace(target, capabilities=replace(capabilities, schedules=frozenset()), notes=(note,))


def _is_cut(builders: Sequence[StageBuilder], model: object, graph: object) -> bool:
    return any(builder.accepts(form) for builder in builders for form in (model, graph) if form is not None)


def _frontend_of(model: object, plugins: PluginManager) -> str | None:
    if isinstance(model, str):
        return None
    for offer in plugins.frontends():
        if offer.value.accepts(model):
            return offer.name
    return None
