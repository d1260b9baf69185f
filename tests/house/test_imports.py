"""The first frontend that accepts a model imports it; one that fails is named, and the next gets its chance."""

from pathlib import Path
from typing import Any

import pytest
from plugins import SampleFrontend, graph_called, manager_of, plugin_with, raising

import phaze
from phaze.errors import ImportModelError, PluginError, PluginWarning, UnknownNameError
from phaze.hooks import PluginManager
from phaze.ir import Graph
from phaze.model_import import import_with_plugins


def frontends(*offered: SampleFrontend) -> Any:
    return plugin_with(phaze_frontends=lambda: offered)


def imported(manager: PluginManager, model: object, frontend: str | None = None, **options: object) -> Graph:
    return import_with_plugins(manager, model, None, frontend=frontend, options=options)


def test_the_first_frontend_that_accepts_a_model_imports_it() -> None:
    manager = manager_of(
        a=frontends(SampleFrontend("texts", str, graph_called("A"))),
        b=frontends(SampleFrontend("numbers", int, graph_called("B")), SampleFrontend("more", int, graph_called("C"))),
    )
    assert imported(manager, 3).name == "B"
    assert imported(manager, 3, "more").name == "C"


def test_a_frontend_that_raises_is_named_and_the_next_one_answers() -> None:
    manager = manager_of(
        a=frontends(SampleFrontend("breaks", int, ZeroDivisionError("by nought"))),
        b=frontends(SampleFrontend("asks", ZeroDivisionError("in accepts"), graph_called("B"))),  # type: ignore[arg-type]
        c=frontends(SampleFrontend("sound", int, graph_called("C"))),
    )
    with pytest.warns(PluginWarning) as warned:
        assert imported(manager, 3).name == "C"
    assert [str(warning.message) for warning in warned] == [
        "plugin 'a' of a-dist 1.0 failed in frontend 'breaks' and was passed over: ZeroDivisionError: by nought",
        "plugin 'b' of b-dist 1.0 failed in frontend 'asks' and was passed over: ZeroDivisionError: in accepts",
    ]


def test_a_frontend_that_accepts_and_refuses_has_answered() -> None:
    refusal = ImportModelError("layer 3 branches on data")
    manager = manager_of(
        a=frontends(SampleFrontend("first", int, refusal), SampleFrontend("second", int, graph_called("B")))
    )
    with pytest.raises(ImportModelError, match="layer 3 branches on data"):
        imported(manager, 3)


def test_the_frontend_asked_for_by_name_is_not_replaced_by_another() -> None:
    manager = manager_of(
        a=frontends(
            SampleFrontend("breaks", int, ZeroDivisionError("by nought")),
            SampleFrontend("sound", int, graph_called("B")),
        )
    )
    with pytest.raises(PluginError, match=r"frontend 'breaks' \(plugin 'a' of a-dist 1.0\) failed: .*by nought"):
        imported(manager, 3, "breaks")


def test_an_answer_that_is_no_graph_is_the_plugins_failure() -> None:
    manager = manager_of(
        a=frontends(SampleFrontend("wrong", int, "text"), SampleFrontend("sound", int, graph_called("B")))
    )
    with pytest.warns(PluginWarning, match="frontend 'wrong' .* answered with a str; expected a Graph"):
        assert imported(manager, 3).name == "B"


def test_an_unknown_frontend_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown frontend 'text'. Did you mean texts\? Known: texts"):
        imported(manager_of(a=frontends(SampleFrontend("texts", str, graph_called("A")))), "model", "text")


def test_an_option_that_the_frontend_does_not_take_is_refused() -> None:
    manager = manager_of(a=frontends(SampleFrontend("numbers", int, graph_called("A"))))
    assert imported(manager, 3, depth=2).name == "A"
    for frontend in (None, "numbers"):
        with pytest.raises(ImportModelError, match="'numbers' takes no option 'width'; it takes depth"):
            imported(manager, 3, frontend, width=2)


def test_a_frontend_whose_library_is_missing_says_so_before_it_is_asked() -> None:
    frontend = SampleFrontend("numbers", int, ZeroDivisionError(), libraries=("json", "no_such_framework.nn"))
    for name in (None, "numbers"):
        with pytest.raises(
            ImportModelError, match=r"frontend 'numbers' needs no_such_framework.nn, not installed here"
        ):
            imported(manager_of(a=frontends(frontend)), 3, name)


def test_a_known_model_is_built_at_the_sequence_length_asked_for() -> None:
    def build(*, sequence_length: int | None) -> Graph:
        return graph_called(str(sequence_length or 1024))

    manager = manager_of(a=plugin_with(phaze_named_models=lambda: {"toy": build}))
    assert imported(manager, "toy").name == "1024"
    assert imported(manager, "toy", sequence_length=7).name == "7"
    with pytest.raises(ValueError, match="sequence_length is 0; expected a positive integer"):
        imported(manager, "toy", sequence_length=0)
    with pytest.raises(ImportModelError, match="'toy' takes no option 'depth'; it takes sequence_length"):
        imported(manager, "toy", depth=2)


def test_a_known_model_that_fails_names_its_plugin() -> None:
    manager = manager_of(a=plugin_with(phaze_named_models=lambda: {"toy": raising(KeyError("layers"))}))
    with pytest.raises(PluginError, match=r"model 'toy' \(plugin 'a' of a-dist 1.0\) failed: KeyError: 'layers'"):
        imported(manager, "toy")


@pytest.mark.parametrize(
    "text", ["Toy-7B", "maker/Toy-7B", "maker/toy_7b-Instruct", "maker/Toy-7B-Base-2507", "plaything"]
)
def test_a_known_model_is_known_by_other_spellings_and_names(text: str) -> None:
    def build(*, sequence_length: int | None) -> Graph:
        return graph_called("toy")

    build.also_called = ("plaything",)  # type: ignore[attr-defined]
    manager = manager_of(a=plugin_with(phaze_named_models=lambda: {"toy-7b": build}))
    assert imported(manager, text).name == "toy"


def test_a_path_is_no_other_spelling_of_a_model(tmp_path: Path) -> None:
    def build(*, sequence_length: int | None) -> Graph:
        return graph_called("toy")

    manager = manager_of(a=plugin_with(phaze_named_models=lambda: {"toy": build}))
    (tmp_path / "Toy").mkdir()
    with pytest.raises(ImportModelError, match=r"holds no config\.json"):
        imported(manager, str(tmp_path / "Toy"))
    with pytest.raises(UnknownNameError):
        imported(manager, "folder/Toy.json")


def test_an_unknown_model_lists_the_known_ones() -> None:
    manager = manager_of(a=plugin_with(phaze_named_models=lambda: {"toy-large": raising(KeyError())}))
    with pytest.raises(UnknownNameError, match=r"unknown model or missing file 'toy'. Did you mean toy-large\?"):
        imported(manager, "toy")


def test_a_model_that_nobody_imports_lists_the_frontends_and_the_failures() -> None:
    asking = SampleFrontend("asks", ZeroDivisionError("by nought"), graph_called("A"))  # type: ignore[arg-type]
    manager = manager_of(a=frontends(asking))
    with (
        pytest.warns(PluginWarning),
        pytest.raises(ImportModelError, match=r"no frontend imports an object of type int. Frontends: asks") as raised,
    ):
        imported(manager, 3)
    assert "plugin 'a' of a-dist 1.0 failed in frontend 'asks'" in raised.value.__notes__[-1]


def test_a_model_whose_only_frontend_fails_says_how_that_failed() -> None:
    manager = manager_of(a=frontends(SampleFrontend("breaks", int, ZeroDivisionError("by nought"))))
    failure = r"frontend 'breaks' \(plugin 'a' of a-dist 1.0\) failed: ZeroDivisionError: by nought"
    with pytest.warns(PluginWarning), pytest.raises(PluginError, match=failure):
        imported(manager, 3)


def test_a_graph_and_a_saved_graph_import_as_themselves(tmp_path: Path) -> None:
    graph = graph_called("A")
    graph.save(tmp_path / "graph.json")
    assert phaze.import_graph(graph) is graph
    assert phaze.import_graph(tmp_path / "graph.json") == phaze.load_graph(tmp_path / "graph.json") == graph
    assert phaze.import_graph(str(tmp_path / "graph.json"), frontend="saved-graph") == graph


def test_a_file_that_holds_no_graph_is_no_saved_graph(tmp_path: Path) -> None:
    (tmp_path / "other.bin").write_bytes(bytes(1000))
    with pytest.raises(ImportModelError, match=r"no frontend imports '.*other.bin'"):
        phaze.import_graph(str(tmp_path / "other.bin"))
    with pytest.raises(ImportModelError, match="int is neither a Graph nor the path of a saved one"):
        phaze.import_graph(3, frontend="saved-graph")


def test_the_public_function_asks_the_installed_plugins() -> None:
    with pytest.raises(ImportModelError, match="no frontend imports an object of type object"):
        phaze.import_graph(object())
