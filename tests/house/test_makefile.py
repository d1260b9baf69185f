"""`make` says first what a machine lacks and how to get it, and takes any Python that is new enough."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

TOOLS = ("sh", "make", "cat", "cksum", "find", "pwd", "sort", "tr", "rm", "touch")
ROOMS = ("phaze_plugin", "frontends", "backends", "hooks")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As much of the repository as make looks at before it installs anything."""
    folder = tmp_path / "clone"
    for room in ROOMS:
        (folder / room).mkdir(parents=True)
    (folder / "tests").mkdir()
    for name in ("Makefile", "pyproject.toml", "phaze_plugin/__init__.py", "tests/constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH of one folder that holds neither a compiler nor a Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found is not None:
            (folder / tool).symlink_to(found)
    return folder


def make(target: str, clone: Path, tools: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(tools), **variables}
    return subprocess.run(
        [tools / "make", target], cwd=clone, env=environment, capture_output=True, text=True, check=False
    )


def add_program(tools: Path, name: str, source: str) -> None:
    (tools / name).write_text(f"#!{tools / 'sh'}\n{source}\n")
    (tools / name).chmod(0o755)


def test_a_missing_compiler_is_said_first_and_ends_the_tests(clone: Path, tools: Path) -> None:
    done = make("test", clone, tools)
    assert done.returncode != 0
    assert done.stderr.startswith("no C++ compiler found, and the tests need one (Debian, Ubuntu: apt install g++;")
    assert "Python" not in done.stderr


def test_a_missing_browser_is_said_with_how_to_get_one_and_ends_the_tests(clone: Path, tools: Path) -> None:
    add_program(tools, "c++", "exit 0")
    done = make("test", clone, tools)
    assert done.returncode != 0
    assert "no Chromium found, and the tests need one to look at pages (Debian, Ubuntu: apt install" in done.stderr
    assert "Python" not in done.stderr


@pytest.mark.parametrize("variables", [{"CHROMIUM": "my-browser"}, {}])
def test_a_browser_is_found_by_its_usual_names_and_by_its_variable(
    clone: Path, tools: Path, variables: dict[str, str]
) -> None:
    add_program(tools, "c++", "exit 0")
    add_program(tools, variables.get("CHROMIUM", "google-chrome"), "exit 0")
    assert "Chromium" not in make("test", clone, tools, **variables).stderr


def test_a_missing_compiler_is_a_note_to_make_run(clone: Path, tools: Path) -> None:
    done = make("run", clone, tools)
    assert done.stderr.startswith("note: no C++ compiler found; the tests need one")


@pytest.mark.parametrize("variables", [{"CXX": "my-compiler"}, {}])
def test_a_compiler_is_found_by_its_usual_names_and_by_cxx(clone: Path, tools: Path, variables: dict[str, str]) -> None:
    add_program(tools, variables.get("CXX", "clang++"), "exit 0")
    assert "compiler" not in make("run", clone, tools, **variables).stderr


def test_no_python_at_all_is_said_with_how_to_get_one(clone: Path, tools: Path) -> None:
    done = make("run", clone, tools)
    assert done.returncode != 0
    assert "phaze needs Python 3.11 or newer with the venv module, and none was found" in done.stderr
    assert "apt install python3.11 python3.11-venv" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_python_that_is_too_old_is_refused_by_its_version(clone: Path, tools: Path) -> None:
    add_program(tools, "python3", 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac')
    done = make("run", clone, tools)
    assert done.returncode != 0
    assert "phaze needs Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_python_that_is_only_called_python3_is_taken(clone: Path, tools: Path) -> None:
    base = Path(os.path.realpath(sys.executable))
    add_program(tools, "python3.11", "echo this version is not active; exit 127")
    # An environment without pip is enough here, and made ten times sooner.
    add_program(tools, "python3", f'[ "$2" = venv ] && set -- -m venv --without-pip "$4"; exec "{base}" "$@"')
    done = make(".venv/bin/python", clone, tools)
    assert done.returncode == 0, done.stderr
    assert (clone / ".venv" / "bin" / "python").exists()
