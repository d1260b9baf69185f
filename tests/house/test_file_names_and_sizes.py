"""A reader finds a file by its name, which stands for one thing, and can hold what is in it."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOMS, ROOT, parsed, source_files

FILES = [path for folder in ROOMS for path in source_files(folder)]
MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60
"""From `def` to its last line, signature and docstring included; functions inside it count as part of it."""

SAME_THING_FOR_ANOTHER_FRAMEWORK = {
    "__init__": "the door of a package",
    "data_movement": "which ops of aten, and of StableHLO, move elements without computing with them",
    "elementwise": "which ops of aten, and of StableHLO, work element by element",
    "importing": "the way of a model of torch, of JAX, or of an HLO dump, to its graph",
    "indexing": "which ops of aten, and of StableHLO, pick and place by index",
    "jax": "what reads models of JAX, and what applies plans to them",
    "plan": "the room of plans, and the file that says what a Plan is",
    "torch": "what reads models of torch, and what applies plans to them",
}
"""Names that several files or packages may have, because they do the same there."""


def names_with_paths() -> dict[str, list[str]]:
    """Where each name of a file or package stands."""
    places = defaultdict(list)
    for path in FILES:
        named = path.parent if path.name == "__init__.py" and path.parent.parent != ROOT else path
        places[named.stem].append(str(named.relative_to(ROOT)))
    return places


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines a function takes."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_no_two_files_of_one_name_do_different_things() -> None:
    allowed = SAME_THING_FOR_ANOTHER_FRAMEWORK
    shared = {name: paths for name, paths in names_with_paths().items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in allowed} == {}


def test_no_file_is_called_utils() -> None:
    assert names_with_paths().keys().isdisjoint({"util", "utils", "helper", "helpers", "misc", "common"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_and_its_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES_OF_A_FILE
    long = {function.name for function in functions(parsed(path)) if lines_of(function) > MOST_LINES_OF_A_FUNCTION}
    assert long == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_in_its_first_line_what_it_holds(path: Path) -> None:
    docstring = ast.get_docstring(parsed(path))
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":"))
