"""The first frontend that accepts a model imports it; one that fails is named, and the next gets its chance."""

from typing import Any

import pytest
from plugins import SampleFrontend, manager_of, plugin_with, raising

import phaze
from phaze.errors import ImportModelError, PluginError, PluginWarning, UnknownNameError
from phaze.hooks import PluginManager
from phaze.imports import import_with_plugins


def frontends(*offered: SampleFrontend) -> Any:
    return plugin_with(phaze_frontends=lambda: offered)


def imported(manager: PluginManager, model: object, frontend: str | None = None, **options: object) -> Any:
    return import_with_plugins(manager, model, None, frontend=frontend, options=options)


def test_the_first_frontend_that_accepts_a_model_imports_it() -> None:
    manager = manager_of(
        a=frontends(SampleFrontend("texts", str, "A")),
        b=frontends(SampleFrontend("numbers", int, "B"), SampleFrontend("more", int, "C")),
    )
    assert imported(manager, 3) == "B"
    assert imported(manager, 3, "more") == "C"


def test_a_frontend_that_raises_is_named_and_the_next_one_answers() -> None:
    manager = manager_of(
        a=frontends(SampleFrontend("breaks", int, ZeroDivisionError("by nought"))),
        b=frontends(SampleFrontend("asks", ZeroDivisionError("in accepts"), "B")),  # type: ignore[arg-type]
        c=frontends(SampleFrontend("sound", int, "C")),
    )
    with pytest.warns(PluginWarning) as warned:
        assert imported(manager, 3) == "C"
    assert [str(warning.message) for warning in warned] == [
        "plugin 'a' of a-dist 1.0 failed in frontend 'breaks' and was passed over: ZeroDivisionError: by nought",
        "plugin 'b' of b-dist 1.0 failed in frontend 'asks' and was passed over: ZeroDivisionError: in accepts",
    ]


def test_a_frontend_that_accepts_and_refuses_has_answered() -> None:
    refusal = ImportModelError("layer 3 branches on data")
    manager = manager_of(a=frontends(SampleFrontend("first", int, refusal), SampleFrontend("second", int, "B")))
    with pytest.raises(ImportModelError, match="layer 3 branches on data"):
        imported(manager, 3)


def test_the_frontend_asked_for_by_name_is_not_replaced_by_another() -> None:
    manager = manager_of(
        a=frontends(SampleFrontend("breaks", int, ZeroDivisionError("by nought")), SampleFrontend("sound", int, "B"))
    )
    with pytest.raises(PluginError, match=r"frontend 'breaks' \(plugin 'a' of a-dist 1.0\) failed: .*by nought"):
        imported(manager, 3, "breaks")


def test_an_unknown_frontend_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown frontend 'text'. Did you mean texts\? Known: texts"):
        imported(manager_of(a=frontends(SampleFrontend("texts", str, "A"))), "model", "text")


def test_an_option_that_the_frontend_does_not_take_is_refused() -> None:
    manager = manager_of(a=frontends(SampleFrontend("numbers", int, "A")))
    assert imported(manager, 3, depth=2) == "A"
    for frontend in (None, "numbers"):
        with pytest.raises(TypeError, match="numbers takes no option 'width'; it takes depth"):
            imported(manager, 3, frontend, width=2)


def test_a_known_model_is_built_at_the_sequence_length_asked_for() -> None:
    def build(*, sequence_length: int | None) -> Any:
        return sequence_length or 1024

    manager = manager_of(a=plugin_with(phaze_named_models=lambda: {"toy": build}))
    assert imported(manager, "toy") == 1024
    assert imported(manager, "toy", sequence_length=7) == 7
    with pytest.raises(ValueError, match="sequence_length is 0; expected a positive integer"):
        imported(manager, "toy", sequence_length=0)
    with pytest.raises(TypeError, match="toy takes no option 'depth'; it takes sequence_length"):
        imported(manager, "toy", depth=2)


def test_a_known_model_that_fails_names_its_plugin() -> None:
    manager = manager_of(a=plugin_with(phaze_named_models=lambda: {"toy": raising(KeyError("layers"))}))
    with pytest.raises(PluginError, match=r"model 'toy' \(plugin 'a' of a-dist 1.0\) failed: KeyError: 'layers'"):
        imported(manager, "toy")


def test_an_unknown_model_lists_the_known_ones() -> None:
    manager = manager_of(a=plugin_with(phaze_named_models=lambda: {"toy-large": raising(KeyError())}))
    with pytest.raises(UnknownNameError, match=r"unknown model or missing file 'toy'. Did you mean toy-large\?"):
        imported(manager, "toy")


def test_a_model_that_nobody_imports_lists_the_frontends_and_the_failures() -> None:
    manager = manager_of(a=frontends(SampleFrontend("breaks", int, ZeroDivisionError("by nought"))))
    with (
        pytest.warns(PluginWarning),
        pytest.raises(
            ImportModelError, match=r"no frontend imports an object of type int. Frontends: breaks"
        ) as raised,
    ):
        imported(manager, 3)
    assert "plugin 'a' of a-dist 1.0 failed in frontend 'breaks'" in raised.value.__notes__[0]


def test_the_public_function_asks_the_installed_plugins() -> None:
    with pytest.raises(ImportModelError, match="no frontend imports an object of type object"):
        phaze.import_graph(object())
