"""Data walks through the rooms in one order and never back: a room imports only rooms that stand before it.

A room is a package or module directly below `phaze`. Imports inside functions count like all others. Those under
`if TYPE_CHECKING` do not: they name the types of what a caller hands over, and load nothing.
"""

import ast
from pathlib import Path

import pytest
from repository import ROOT, imported_modules, module_name, parsed, source_files

ORDER = (
    # words that everything else is said in
    "errors",
    "name_spelling",
    "tolerances",
    "trace_events",
    "printable_text",
    "limits",
    "file_access",
    "json_documents",
    # what is planned, how it may be divided, on what, at what price
    "ir",
    "parallelism",
    "targets",
    "hardware",
    "space",
    "cost",
    "objective",
    "solvers",
    # what comes in from outside, and the question asked
    "interfaces",
    "hooks",
    "installed",
    "model_import",
    "strategy_files",
    "asked_model",
    "shard",
    "offered_choices",
    "question",
    # the answer
    "schedule",
    "profile",
    "place",
    "plan",
    "report",
    "planner",
    "explore",
    "verify",
    "calibration_fitting",
    # what a person types
    "doctor_facts",
    "commands",
    "cli",
    "__main__",
)

BACKWARD = {
    ("ir", "report"): "a graph shows itself in a notebook when asked to",
    ("plan", "report"): "a plan prints and explains itself when asked to",
    ("hardware", "installed"): "a chip by name may be a plugin's; plugins are loaded where the user passes none",
}
"""Imports against the order that are meant, all of them inside functions that a user calls."""


def room_of(module: str) -> str:
    """The part of a module's name behind `phaze.`, up to the next dot."""
    return module.split(".")[1]


def loaded_modules(tree: ast.Module) -> set[str]:
    """Modules of phaze that a file imports when it is loaded or run; those named only for types are left out."""
    only_types = {
        statement
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in branch.body
    }
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = (name for node in imports if node not in only_types for name in imported_modules(node))
    return {name for name in names if name.startswith("phaze.")}


def is_forward(importer: str, imported: str) -> bool:
    """Whether a room may import another by the order alone."""
    return ORDER.index(imported) <= ORDER.index(importer)


def core_files() -> list[Path]:
    """Every module of the core and of the hooks; `phaze/__init__.py` is the door, which opens onto all rooms."""
    return [
        path for folder in ("phaze_plugin", "hooks") for path in source_files(folder) if module_name(path) != "phaze"
    ]


def test_every_room_stands_in_the_order() -> None:
    assert {room_of(module_name(path)) for path in core_files()} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_rooms_before_it(path: Path) -> None:
    importer = room_of(module_name(path))
    imported = {room_of(name) for name in loaded_modules(parsed(path))} & set(ORDER)
    allowed = BACKWARD.keys()
    assert [room for room in imported if not is_forward(importer, room) and (importer, room) not in allowed] == []


def test_a_room_that_imports_a_later_one_is_seen() -> None:
    program = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from phaze.planner import Progress\n"
    assert loaded_modules(ast.parse(program)) == set()
    program += "def f():\n    from phaze.place.search import find_placement\n"
    assert {room_of(name) for name in loaded_modules(ast.parse(program))} == {"place"}
    assert not is_forward("cost", "place")
    assert is_forward("planner", "place")


def test_every_exception_is_needed() -> None:
    imports = {
        (room_of(module_name(path)), room_of(name)) for path in core_files() for name in loaded_modules(parsed(path))
    }
    assert [pair for pair in BACKWARD if is_forward(*pair) or pair not in imports] == []
