"""`make` says first what a machine lacks, takes any Python that is new enough, and has tests for between two edits."""

import ast
import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, imported_modules

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


FRAMEWORKS = {"flax", "jax", "jaxlib", "torch", "transformers"}
SLOW_ROOMS = {"backends", "commands", "docs", "frontends", "fuzz", "house", "report"}
"""Rooms that `make test-quick` leaves out: they are about frameworks, or start programs."""
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def quick_files() -> list[Path]:
    """The files that `make test-quick` runs."""
    command = ["make", "--dry-run", "test-quick"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in told.splitlines() if " -m pytest " in line)
    words = shlex.split(line)
    chosen = [ROOT / word for word in words if word.startswith("tests/")]
    ignored = [word.partition("=")[2] for word in words if word.startswith("--ignore-glob=")]
    files = [path for path in TEST_FILES if any(path == place or place in path.parents for place in chosen)]
    return [path for path in files if not any(fnmatch.fnmatch(str(path), pattern) for pattern in ignored)]


def needed_frameworks(path: Path, seen: set[Path]) -> set[str]:
    """What a test imports of frameworks, itself or in files of tests/support that it imports or starts."""
    text = path.read_text()
    modules = {name.partition(".")[0] for name in imported_modules(ast.parse(text))}
    needed = modules & FRAMEWORKS
    for support in (ROOT / "tests" / "support").glob("*.py"):
        if support not in seen and (support.stem in modules or support.name in text):
            seen.add(support)
            needed |= needed_frameworks(support, seen)
    return needed


def test_quick_tests_need_no_framework() -> None:
    assert {str(path): needed for path in quick_files() if (needed := needed_frameworks(path, set()))} == {}


def test_quick_tests_are_all_of_their_rooms_but_those_that_need_a_framework() -> None:
    folder = ROOT / "tests"
    fitting = [path for path in TEST_FILES if path.relative_to(folder).parts[0] not in SLOW_ROOMS]
    assert quick_files() == [path for path in fitting if not path.stem.endswith("_with_frameworks")]
    named = [path for path in TEST_FILES if path.stem.endswith("_with_frameworks")]
    assert [path for path in named if not needed_frameworks(path, set())] == []
