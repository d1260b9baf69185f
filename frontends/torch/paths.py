"""Module paths of a trace's nodes; calls of a module that is called several times are numbered."""

from __future__ import annotations

from typing import Any

from phaze.frontends.torch.capture import PREFIX, Capture

__all__ = ["find_repeated_calls", "module_path"]


def find_repeated_calls(capture: Capture, module: Any) -> frozenset[str]:
    """Paths of modules that are called more than once and are made of several modules with parameters.

    A norm or an activation that a block uses twice is none: only what could be a block by itself counts.
    """
    called = set()
    for node in capture.nodes:
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            if "@" in str(key):
                called.add(_plain(path))
    composite = {
        name
        for name, part in module.named_modules()
        if name in called and sum(1 for inner in part.modules() if inner._parameters) > 1
    }
    return frozenset(composite)


def module_path(stack: Any, repeated: frozenset[str]) -> str:
    """The innermost module's path without the objective's own; `block@2.norm` inside the third call of `block`."""
    if not stack:
        return ""
    path = _plain(list(stack.values())[-1][0])
    for key, (outer, _) in stack.items():
        name = _plain(outer)
        if name in repeated:
            call = str(key).rpartition("@")[2] if "@" in str(key) else "0"
            return f"{name}@{call}{path[len(name) :]}"
    return path


def _plain(path: object) -> str:
    text = str(path).removeprefix("L['self']").lstrip(".")
    return "" if text == PREFIX.rstrip(".") else text.removeprefix(PREFIX)
