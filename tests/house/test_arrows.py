"""Arrows point inward: the core knows no framework, no frontend and no backend."""

from pathlib import Path

import pytest
from repository import ROOMS, ROOT, imported_modules, parsed, source_files

FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "transformers", "tensorflow", "functorch", "torchvision")
FORBIDDEN = {
    "phaze_plugin": ("phaze.frontends", "phaze.backends", *FRAMEWORKS),
    "hooks": ("phaze.frontends", "phaze.backends", *FRAMEWORKS),
    "frontends": ("phaze.backends",),
    "backends": ("phaze.frontends",),
}


def forbidden_imports(path: Path, forbidden: tuple[str, ...]) -> list[str]:
    found = imported_modules(parsed(path))
    return [name for name in found if any(name == ban or name.startswith(f"{ban}.") for ban in forbidden)]


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_no_room_imports_what_lies_outside_it(folder: str) -> None:
    broken = {
        str(path.relative_to(ROOT)): names
        for path in source_files(folder)
        if (names := forbidden_imports(path, FORBIDDEN[folder]))
    }
    assert broken == {}


def test_the_installed_name_is_the_only_one_imported() -> None:
    broken = [
        (str(path.relative_to(ROOT)), name)
        for folder in (*ROOMS, "tests", "benchmarks", "examples")
        for path in source_files(folder)
        for name in imported_modules(parsed(path))
        if name.split(".")[0] in ROOMS
    ]
    assert broken == []


def test_an_import_inside_a_function_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from phaze import backends\n    import torch.nn\n")
    assert forbidden_imports(path, FORBIDDEN["phaze_plugin"]) == ["phaze.backends", "torch.nn"]
