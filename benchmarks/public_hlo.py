"""How many public HLO and StableHLO files become graphs: those of a folder, and those that JAX ships for its own tests.

    python benchmarks/public_hlo.py [--files DIR] [--out FILE]

JAX's wheel has the modules that it exported in the past years and still promises to run
(`jax._src.internal_test_util.export_back_compat_test_data`); they are read without any option. `--files` adds every
file of a folder and its subfolders that ends in hlo, txt, mlir, mlirbc or pb. Each file gives a graph, or the sentence
that its refusal says; both are counted, and every refusal is printed for a reader to judge.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import phaze
from phaze.errors import PhazeError

SUFFIXES = (".hlo", ".txt", ".mlir", ".mlirbc", ".pb")
TIME_LIMIT_S = 60.0
"""How long one file may be parsed: public files are small, and one that takes longer hangs."""


def shipped_with_jax() -> Iterator[tuple[str, bytes]]:
    """The name and the bytes of every module in JAX's test data: its text, and its serialized form."""
    package = importlib.import_module("jax._src.internal_test_util.export_back_compat_test_data")
    for module_info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module_info.ispkg:
            continue
        module = importlib.import_module(module_info.name)
        for name, value in vars(module).items():
            yield from _entries(f"{module_info.name.rpartition('.')[2]}:{name}", value)


def _entries(name: str, value: object) -> Iterator[tuple[str, bytes]]:
    """The modules in a value of test data: a mapping with a module's text and bytes, or a mapping of such."""
    if not isinstance(value, dict) or name.rpartition(":")[2].startswith("__"):
        return
    text, serialized = value.get("mlir_module_text"), value.get("mlir_module_serialized")
    if isinstance(text, str) and text.strip():
        yield f"{name} text", re.sub(r"^\s*\n", "", text).encode()
    if isinstance(serialized, bytes):
        yield f"{name} bytes", serialized
    for key, inner in value.items():
        yield from _entries(f"{name}/{key}", inner)


def of_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The name and the bytes of every file of a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name.endswith(SUFFIXES):
            yield str(path.relative_to(folder)), path.read_bytes()


def outcome(data: bytes) -> dict[str, object]:
    """What importing a file gives."""
    started_s = time.perf_counter()
    try:
        graph = phaze.import_graph(data, frontend="hlo", time_limit_s=TIME_LIMIT_S)
        found: dict[str, object] = {
            "ends_in": "graph",
            "ops": len(graph.ops),
            "matmul_flops": graph.matmul_flops("forward"),
            "parameters": graph.parameter_count,
            "coverage": graph.coverage().flops_share,
        }
    except PhazeError as error:
        found = {"ends_in": type(error).__name__, "message": str(error)}
    return found | {"seconds": round(time.perf_counter() - started_s, 2)}


def main() -> None:
    """Import everything, count how it ended, and print the refusals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, metavar="DIR", help="a folder of public files")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the outcome of every file as JSON")
    arguments = parser.parse_args()
    sources = [("jax", shipped_with_jax())]
    if arguments.files is not None:
        sources.append((str(arguments.files), of_folder(arguments.files)))
    outcomes: dict[str, dict[str, object]] = {}
    for source, entries in sources:
        counts: Counter[object] = Counter()
        for name, data in entries:
            outcomes[f"{source}:{name}"] = found = outcome(data)
            counts[found["ends_in"]] += 1
            if found["ends_in"] != "graph":
                print(f"{name}: {found['ends_in']}: {str(found['message'])[:300]}")
        print(f"{source}: {counts.total()} files, {dict(counts)}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(outcomes, indent=1))


if __name__ == "__main__":
    main()
