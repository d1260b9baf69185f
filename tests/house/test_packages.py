"""What is in the repository is what gets installed, and nothing else."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from repository import ROOMS, ROOT, module_name, source_files, tracked_files

import phaze

TOP_LEVEL = {
    ".ci",
    ".github",
    ".gitignore",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "backends",
    "benchmarks",
    "docs",
    "examples",
    "frontends",
    "hooks",
    "mkdocs.yml",
    "phaze_plugin",
    "pyproject.toml",
    "tests",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES = sorted(module_name(path) for folder in ROOMS for path in source_files(folder))


def test_the_top_level_is_exactly_the_agreed_list() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked_files()} == TOP_LEVEL


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {path.parent for folder in ROOMS for path in source_files(folder)}
    assert [str(path.relative_to(ROOT)) for path in sorted(folders) if not (path / "__init__.py").exists()] == []


def test_every_package_is_listed_and_every_listed_package_exists() -> None:
    found = [module_name(path) for folder in ROOMS for path in source_files(folder) if path.name == "__init__.py"]
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_module_is_installed_from_this_repository() -> None:
    for name in MODULES:
        file = importlib.import_module(name).__file__
        assert file is not None
        assert Path(file).resolve().is_relative_to(ROOT), f"{name} comes from {file}: install again"


def test_importing_phaze_brings_in_no_framework_no_solver_and_no_numpy() -> None:
    program = "import sys, phaze; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert {"torch", "jax", "ortools", "gurobipy", "numpy", "networkx", "rich", "pluggy"}.isdisjoint(loaded)


LOADED_AT_THE_DOOR = ("phaze.backends.jax.", "phaze.backends.torch.", "phaze.frontends.jax.", "phaze.frontends.torch.")
"""Packages whose modules import a framework at their top: loaded for a model or a plan of it, and not before."""

WITH_JAXLIB = ("phaze.frontends.hlo.parser_process", "phaze.frontends.stablehlo.mlir_reader")
"""Modules that import jaxlib at their top: a program that runs in a process of its own, and what it and JAX's share."""


def loaded_by(program: str) -> set[str]:
    """The modules that a program has imported in the end."""
    whole = f"import sys\n{program}\nprint(*sorted(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", whole], check=True, capture_output=True, text=True).stdout.split())


def test_importing_all_modules_but_those_behind_a_door_brings_in_no_framework_and_no_solver() -> None:
    names = [name for name in MODULES if not name.startswith(LOADED_AT_THE_DOOR) and name not in WITH_JAXLIB]
    assert {package.removesuffix(".") for package in LOADED_AT_THE_DOOR} <= set(names)
    loaded = loaded_by(f"import importlib\nfor name in {names}: importlib.import_module(name)")
    assert {"torch", "jax", "jaxlib", "transformers", "ortools", "gurobipy"}.isdisjoint(loaded)


def test_asking_every_plugin_brings_in_no_framework() -> None:
    kinds = ["frontends", "targets", "stage_builders", "accelerators", "named_models", "worlds"]
    loaded = loaded_by(
        f"from phaze.hooks import PluginManager\nfound = PluginManager.load()\n"
        f"for kind in {kinds}: list(getattr(found, kind)())\n"
        "for offer in found.targets(): offer.value.capabilities"
    )
    assert {"torch", "jax", "jaxlib", "transformers"}.isdisjoint(loaded)


def test_what_the_two_commands_install_is_pinned() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [
        project["dependencies"],
        *(extras[name] for name in ("dev", "docs", "gurobi", "torch", "jax", "dask", "baselines")),
    ]
    pinned = {line.partition("==")[0] for line in (ROOT / "tests/constraints.txt").read_text().splitlines()}
    assert {re.split(r"[<>=[]", requirement)[0] for group in wanted for requirement in group} - pinned == set()


def test_the_tests_have_what_a_build_needs() -> None:
    assert set(PROJECT["build-system"]["requires"]) <= set(PROJECT["project"]["optional-dependencies"]["dev"])


def test_every_entry_point_leads_to_a_module_of_this_repository() -> None:
    assert set(PROJECT["project"]["entry-points"]["phaze"].values()) <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_every_exported_name_exists_and_is_exported_once(module: str) -> None:
    exported = getattr(importlib.import_module(module), "__all__", [])
    assert len(set(exported)) == len(exported)
    assert [name for name in exported if not hasattr(importlib.import_module(module), name)] == []


def test_the_changelog_begins_with_what_is_unreleased_and_then_this_version() -> None:
    unreleased, released = re.findall(r"^## \[(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:2]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert unreleased == "Unreleased]"
    assert released == f"{phaze.__version__}] - {citation['date-released']}"


def test_the_citation_names_this_version_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == phaze.__version__
    assert [reference["identifiers"][0]["value"] for reference in citation["references"]] == ["arXiv:2407.13143"]


def test_issue_templates_are_forms_with_something_to_fill_in() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.stem != "config":
            assert {"name", "description", "body"} <= set(form)
            identifiers = [field["id"] for field in form["body"]]
            assert len(identifiers) == len(set(identifiers)) >= 2
