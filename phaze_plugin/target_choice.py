"""Which target a plan is for: found by name or by the model's framework, it bounds what a search may choose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phaze.capabilities import Capabilities
from phaze.errors import QuestionError, UnknownNameError, shown
from phaze.ir import Graph

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.interfaces import StageBuilder

__all__ = ["ANALYSIS", "ONE_STAGE", "ChosenTarget", "find_target"]


ONE_STAGE = "one pipeline stage only"
"""How the note begins that says why the model at hand is not cut."""

_NUMBERED = re.compile(r"\w\.\d+$")
"""The path of an element of a list of blocks."""


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
    if capabilities.can_cut_stages or not capabilities.schedules:
        return target
    if not _is_cut(builders, model, graph):
        known = ", ".join(sorted(builder.name for builder in builders)) or "none"
        name = model.name if isinstance(model, Graph) else type(model).__name__
        reason = f"nothing cuts {name} into stages for target {target.name} (known: {known})"
    elif capabilities.hands_on_arguments and isinstance(graph, Graph) and (reader := _reader_past_blocks(graph)):
        reason = f"{reader}, which stages of target {target.name} do not hand on"
    else:
        return target
    note = f"{ONE_STAGE}: {reason}"
    return replace(target, capabilities=replace(capabilities, schedules=frozenset()), notes=(note,))


def _reader_past_blocks(graph: Graph) -> str:
    """Which layer reads something of a block past blocks that do not, such as scores of all routers; else nothing."""
    makers = {name: layer.index for layer in graph.layers for op in layer.forward for name in op.outputs}
    readers: dict[str, set[int]] = {}
    for layer in graph.layers:
        for name in layer.inputs:
            readers.setdefault(name, set()).add(layer.index)
    blocks = {layer.index for layer in graph.layers if _NUMBERED.search(layer.name)}
    for name, indices in readers.items():
        maker, last = makers.get(name, -1), max(indices)
        if maker in blocks and (blocks - indices) & set(range(maker + 1, last)):
            return f"{graph.layers[last].name!r} reads {name!r} of an earlier block"
    return ""


def _is_cut(builders: Sequence[StageBuilder], model: object, graph: object) -> bool:
    return any(builder.accepts(form) for builder in builders for form in (model, graph) if form is not None)


def _frontend_of(model: object, plugins: PluginManager) -> str | None:
    if isinstance(model, str):
        return None
    for offer in plugins.frontends():
        if offer.value.accepts(model):
            return offer.name
    return None
