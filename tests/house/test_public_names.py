"""What `import phaze` offers, and that it stays so when everything else is imported too."""

import importlib
import inspect
from collections.abc import Callable

import pytest
from repository import ROOMS, module_name, source_files

import phaze
from phaze.errors import FormatError, ImportModelError

PUBLIC = [
    "Evaluation",
    "Graph",
    "MemoryFit",
    "Parallelism",
    "PhazeError",
    "Plan",
    "Question",
    "SearchResult",
    "__version__",
    "compare",
    "evaluate",
    "fit",
    "import_graph",
    "last_compiled",
    "load_graph",
    "load_plan",
    "optimize",
    "search",
]
MODULES = sorted(module_name(path) for folder in ROOMS for path in source_files(folder))
PACKAGES = sorted(module_name(path) for folder in ROOMS for path in source_files(folder) if path.stem == "__init__")
SUB_ROOMS = {"phaze.place.search"}
"""Rooms inside rooms, whose full name says what is searched; nobody imports them as `search`."""
CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "compare": (lambda: phaze.compare(1, 2), TypeError, "expected two plans"),  # type: ignore[arg-type]
    "evaluate": (
        lambda: phaze.evaluate("gpt2-xl", cluster="a100-80gb:8", strategy={"ddp": 1}),
        ValueError,
        "Did you mean dp",
    ),
    "fit": (lambda: phaze.fit("gpt2-xl", cluster="a100-80gb:8", strategy={"zero": 4}), ValueError, "zero 4"),
    "import_graph": (lambda: phaze.import_graph(object()), ImportModelError, "no frontend imports"),
    "last_compiled": (lambda: phaze.last_compiled(1), TypeError, "takes 0 positional arguments"),
    "load_graph": (lambda: phaze.load_graph("no-such-file.json"), FormatError, "no-such-file"),
    "load_plan": (lambda: phaze.load_plan("no-such-file.json"), FormatError, "no-such-file"),
    "optimize": (lambda: phaze.optimize("gpt2-xl", gap=2), ValueError, "gap is 2"),
    "search": (lambda: phaze.search("gpt2-xl", devices=8, objective="beauty"), ValueError, "objective is 'beauty'"),
}


@pytest.fixture(scope="module", autouse=True)
def everything_imported() -> None:
    for name in MODULES:
        importlib.import_module(name)


def test_the_public_names_are_these() -> None:
    assert sorted(phaze.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(phaze))


def test_every_public_function_is_called_here() -> None:
    assert {name for name in PUBLIC if inspect.isfunction(getattr(phaze, name))} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_public_function_is_still_one_after_everything_was_imported(name: str) -> None:
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call()


def test_no_module_has_the_name_of_a_public_name() -> None:
    assert {name.removeprefix("phaze.") for name in MODULES}.isdisjoint(PUBLIC)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_of_a_package_has_the_name_of_a_module_in_it(package: str) -> None:
    """Importing the module would put it in the function's place."""
    exported = importlib.import_module(package)
    functions = [name for name in getattr(exported, "__all__", ()) if inspect.isfunction(getattr(exported, name))]
    assert [name for name in functions if f"{package}.{name}" in MODULES] == []


def test_no_module_anywhere_has_the_name_of_a_public_function() -> None:
    named = {name for name in MODULES if name.rpartition(".")[2] in CALLS}
    assert named <= SUB_ROOMS


def test_a_name_that_does_not_exist_is_an_attribute_error_that_lists_those_that_do() -> None:
    with pytest.raises(AttributeError, match=r"module 'phaze' has no attribute 'optimise'; it has .*import_graph"):
        _ = phaze.optimise  # type: ignore[attr-defined]
