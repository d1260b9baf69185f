"""Where the repository lies and what it holds, for the tests that keep the house."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"phaze_plugin": "phaze", "frontends": "phaze.frontends", "backends": "phaze.backends", "hooks": "phaze.hooks"}


def source_files(folder: str) -> list[Path]:
    """Every Python file of a top-level folder, sorted."""
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, which several tests look at."""
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    """The name under which a source file is imported once installed."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([ROOMS[folder], *(part for part in rest if part != "__init__")])


@cache
def imported_modules(tree: ast.AST) -> tuple[str, ...]:
    """Every module named by an import statement anywhere in a file; `from a import b` gives both `a` and `a.b`."""
    return tuple(_imported_modules(tree))


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "relative imports are banned"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tracked_files() -> list[Path]:
    """What a clone holds: the files git tracks or would track; in an unpacked source distribution, every file."""
    if not (ROOT / ".git").exists():
        return [path for path in ROOT.rglob("*") if path.is_file() and not is_generated(path)]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return [path for path in paths if path.is_file()]


def is_generated(path: Path) -> bool:
    """Whether a file was made by a build, an installation or a test run."""
    generated = {".venv", "build", "dist", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
    return any(part in generated or part.endswith(".egg-info") for part in path.relative_to(ROOT).parts)
