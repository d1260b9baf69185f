"""The manager asks every plugin, and none can take the others down."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from plugins import installed_distribution, manager_of, plugin_with, raising

from phaze.errors import PluginError, PluginWarning, UnknownNameError
from phaze.hardware import Accelerator, preset
from phaze.hooks import Origin, PluginManager, hookimpl, spec
from phaze.targets import Capabilities

CHIP = preset("a100-80gb").accelerator
HOOKS = sorted(name for name in vars(spec) if name.startswith("phaze_"))


def chips(**named: Accelerator) -> SimpleNamespace:
    return plugin_with(phaze_accelerators=lambda: named)


def test_every_hook_is_documented_typed_and_has_a_registry() -> None:
    manager = PluginManager()
    for name in HOOKS:
        specification = getattr(spec, name)
        assert specification.__doc__
        assert "return" in specification.__annotations__
        assert getattr(manager, name.removeprefix("phaze_"))().offers == ()


def test_the_core_comes_in_through_the_same_door() -> None:
    manager = PluginManager.load()
    assert manager.failures == ()
    offer = manager.accelerators().offer("a100-80gb")
    assert offer.origin.distribution == "phaze-plugin"
    assert offer.origin.file is not None
    assert offer.origin.file.endswith("builtin.py")
    assert {"highs", "scip", "cp-sat", "gurobi"} <= set(manager.solvers().names)


def test_what_a_plugin_adds_is_found_by_its_name() -> None:
    manager = manager_of(one=chips(small=CHIP), two=chips(large=CHIP))
    assert manager.accelerators().names == ("large", "small")
    assert manager.accelerators().get("small") == replace(CHIP, name="small")
    expected = {name: replace(CHIP, name=name) for name in ("small", "large")}
    assert manager.accelerators().to_mapping() == expected


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown accelerator 'smal'. Did you mean small\? Known: large, small"):
        manager_of(one=chips(small=CHIP, large=CHIP)).accelerators().get("smal")


def test_a_name_clash_names_both_parties_and_leaves_other_names_alone() -> None:
    registry = manager_of(one=chips(chip=CHIP, mine=CHIP), two=chips(chip=CHIP)).accelerators()
    message = "'chip' is claimed by plugin 'one' of one-dist 1.0 and plugin 'two' of two-dist 1.0; rename it"
    with pytest.raises(PluginError, match=message):
        registry.get("chip")
    with pytest.raises(PluginError, match=message):
        registry.to_mapping()
    assert registry.get("mine") == replace(CHIP, name="mine")
    assert [str(clash) for clash in registry.clashes] == [str(registry.clashes[0])]


def test_a_plugin_clashes_with_the_core_too() -> None:
    manager = PluginManager.load()
    manager.register(chips(h100=CHIP), Origin(plugin="mine"))
    with pytest.raises(PluginError, match="claimed by plugin 'mine' and plugin 'core' of phaze-plugin"):
        manager.accelerators().get("h100")


def test_a_plugin_that_raises_is_reported_by_name_and_the_others_go_on() -> None:
    broken = plugin_with(phaze_accelerators=raising(ZeroDivisionError("by nought")))
    manager = manager_of(broken=broken, sound=chips(chip=CHIP))
    reported = "plugin 'broken' of broken-dist 1.0 failed in phaze_accelerators and was passed over: .*by nought"
    with pytest.warns(PluginWarning, match=reported):
        assert manager.accelerators().names == ("chip",)
    assert manager.accelerators().names == ("chip",)
    assert [failure.origin.plugin for failure in manager.failures] == ["broken"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "it answered None; expected a mapping from names, or an iterable of named things"),
        ("a100", "it answered 'a100'; expected a mapping"),
        ({"chip": 3}, "its accelerator 'chip' is of type int, not what accelerators must be"),
        ({"": CHIP}, "its accelerator has the name ''; expected a non-empty text"),
        ([3], "its accelerator has the name None"),
    ],
)
def test_an_answer_of_the_wrong_type_is_reported(answer: object, reason: str) -> None:
    manager = manager_of(wrong=plugin_with(phaze_accelerators=lambda: answer))
    with pytest.warns(PluginWarning, match="plugin 'wrong' of wrong-dist 1.0 failed"):
        assert manager.accelerators().offers == ()
    assert reason in manager.failures[0].reason


@dataclass(frozen=True)
class EveryShape:
    """One object that has all that any hook asks for."""

    name: str = "sample"
    libraries: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    target: str = "sample"
    capabilities = Capabilities()
    accepts = import_model = export = build_stages = is_importable = refusal = solve = raising(AssertionError())


LISTED = {
    "frontends": ("name", "libraries", "options", "accepts", "import_model"),
    "solvers": ("name", "is_importable", "refusal", "solve"),
    "targets": ("name", "libraries", "capabilities", "export"),
    "stage_builders": ("name", "target", "accepts", "build_stages"),
}


@pytest.mark.parametrize("kind", LISTED)
def test_an_object_of_the_right_shape_is_taken_under_its_own_name(kind: str) -> None:
    manager = manager_of(one=plugin_with(**{f"phaze_{kind}": lambda: [EveryShape()]}))
    assert getattr(manager, kind)().get("sample") == EveryShape()


@pytest.mark.parametrize(("kind", "lacking"), [(kind, name) for kind, names in LISTED.items() for name in names[1:]])
def test_an_object_that_lacks_a_part_of_its_shape_is_reported(kind: str, lacking: str) -> None:
    parts = {name: getattr(EveryShape(), name) for name in LISTED[kind] if name != lacking}
    manager = manager_of(one=plugin_with(**{f"phaze_{kind}": lambda: [SimpleNamespace(**parts)]}))
    with pytest.warns(PluginWarning, match="'sample' is of type SimpleNamespace, not what"):
        assert getattr(manager, kind)().offers == ()


@pytest.mark.parametrize("kind", ["named_models", "op_prices"])
def test_a_function_is_taken_under_the_name_that_maps_to_it(kind: str) -> None:
    offered = {"sample": raising(AssertionError())}
    manager = manager_of(one=plugin_with(**{f"phaze_{kind}": lambda: offered}))
    assert getattr(manager, kind)().to_mapping() == offered
    manager = manager_of(one=plugin_with(**{f"phaze_{kind}": lambda: {"sample": 3}}))
    with pytest.warns(PluginWarning, match="'sample' is of type int"):
        assert getattr(manager, kind)().offers == ()


def test_a_misspelt_hook_is_reported_when_the_plugin_is_registered() -> None:
    with pytest.warns(PluginWarning, match=r"unknown hook 'phaze_acelerators'. Did you mean phaze_accelerators\?"):
        manager = manager_of(typo=plugin_with(phaze_acelerators=lambda: {"chip": CHIP}))
    assert manager.origins == ()


def test_a_hook_with_an_argument_that_it_is_never_given_is_reported() -> None:
    greedy = hookimpl(lambda extra: [])
    plugin = SimpleNamespace(phaze_accelerators=hookimpl(lambda: {"chip": CHIP}), phaze_solvers=greedy)
    with pytest.warns(PluginWarning, match=r"'greedy'.*(?s:.*)extra"):
        manager = manager_of(greedy=plugin)
    assert manager.origins == ()
    assert manager.accelerators().offers == ()


def test_the_same_plugin_twice_is_reported_and_stays_registered_once() -> None:
    plugin = chips(chip=CHIP)
    with pytest.warns(PluginWarning, match="already registered"):
        manager = manager_of(again=plugin, once=plugin)
    assert [origin.plugin for origin in manager.origins] == ["once"]
    assert manager.accelerators().get("chip") == replace(CHIP, name="chip")


def test_plugins_are_asked_in_order_and_may_ask_to_come_first_or_last() -> None:
    late = SimpleNamespace(phaze_accelerators=hookimpl(lambda: {"late": CHIP}, trylast=True))
    early = SimpleNamespace(phaze_accelerators=hookimpl(lambda: {"early": CHIP}, tryfirst=True))
    manager = manager_of(a=late, b=chips(b=CHIP), c=chips(c=CHIP), d=early)
    assert [offer.name for offer in manager.accelerators()] == ["early", "b", "c", "late"]


def test_installed_plugins_are_found_before_the_core_and_a_broken_one_does_no_harm(tmp_path: Path) -> None:
    source = (
        "from phaze.hooks import hookimpl\nfrom phaze.hardware import preset\n"
        "@hookimpl\ndef phaze_accelerators():\n    return {'toy': preset('h100').accelerator}\n"
    )
    entry_points = {
        "broken": "phaze_broken",
        "exiting": "phaze_exiting",
        "missing": "phaze_toy:nothing",
        "toy": "phaze_toy",
    }
    modules = {"phaze_toy": source, "phaze_broken": "1 / 0", "phaze_exiting": "raise SystemExit(3)"}
    with (
        installed_distribution(tmp_path, "phaze-toy", version="2.5", entry_points=entry_points, modules=modules),
        pytest.warns(PluginWarning) as warned,
    ):
        manager = PluginManager.load()
    origin = manager.accelerators().offer("toy").origin
    assert str(origin) == "plugin 'toy' of phaze-toy 2.5"
    assert origin.file == str(tmp_path / "phaze_toy.py")
    assert manager.origins[0] is origin
    assert manager.hooks_of(origin) == ("phaze_accelerators",)
    assert manager.accelerators().get("a100-80gb") == CHIP
    assert {failure.origin.plugin: failure.reason.split(":")[0] for failure in manager.failures} == {
        "broken": "ZeroDivisionError",
        "exiting": "SystemExit",
        "missing": "AttributeError",
    }
    assert len(warned) == 3
