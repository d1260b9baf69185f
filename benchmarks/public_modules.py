"""How many public HLO and StableHLO files become graphs, and whether their flops are XLA's.

    python benchmarks/public_modules.py [--data DIR] [--out FILE]

Modules that nobody here wrote: those that JAX's wheel ships for its own compatibility tests
(`jax._src.internal_test_util.export_back_compat_test_data`), and the files of `public_modules.csv` beside this script,
whose rows are repository, path, revision and what is expected: `program`, or why the file is none. They are not part of
this repository; `--data` is a folder that has them as OWNER/REPOSITORY/PATH. Of a file of JavaScript the text between
its first two backquotes is the module. Every file goes the way of `phaze import`, without options. It gives a graph
(ops, flops, strategy, coverage), or the sentence that its refusal says; both are printed for a reader to judge, and
counted.

Beside it stand the flops of all products and convolutions as XLA's own HloCostAnalysis counts them, instruction by
instruction, where it can be read for that. Convolutions are shown to it with padding as data: it leaves out products
with padding, kernels and the graph do not.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import json
import pkgutil
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
from jaxlib import _hlo, _jax

import phaze
from phaze.cli import main as phaze_command
from phaze.errors import PhazeError
from phaze.frontends.hlo.hlo_text import Computation, HloModule, HloTextError, Instruction, read_hlo_text
from phaze.ir import Phase

LIST = Path(__file__).with_name("public_modules.csv")
TIME_LIMIT_S = 60.0
"""How long one file may be parsed: public files are small, and one that takes longer hangs."""

TOLERANCE = 0.005
"""By how much flops may differ from XLA's."""


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


def outcome_of_bytes(data: bytes) -> dict[str, object]:
    """What importing a module gives."""
    try:
        return _described(phaze.import_graph(data, frontend="hlo", time_limit_s=TIME_LIMIT_S))
    except PhazeError as error:
        return {"ends_in": type(error).__name__, "message": str(error)}


def outcome_of_file(path: Path) -> dict[str, object]:
    """What `phaze import FILE` gives, and in how many seconds."""
    started_s = time.perf_counter()
    complaints = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "graph.json")
        if path.suffix == ".js":
            text, path = path.read_text(), Path(folder, "module.hlo")
            path.write_text(text.split("`")[1])
        with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(io.StringIO()):
            status = phaze_command(["import", str(path), "--out", str(saved)])
        found = (
            _described(phaze.load_graph(saved))
            if status == 0
            else {"ends_in": f"status {status}", "message": complaints.getvalue().strip()}
        )
    return found | {"seconds": round(time.perf_counter() - started_s, 2)}


def _described(graph: phaze.Graph) -> dict[str, object]:
    is_derived = "backward derived by rule" in graph.notes  # which the file does not have
    return {
        "ends_in": "graph",
        "ops": len(graph.ops),
        "matmul_flops": sum(graph.matmul_flops(phase) for phase in Phase),
        "written_flops": sum(graph.matmul_flops(phase) for phase in Phase if not is_derived or phase is Phase.FORWARD),
        "parameters": graph.parameter_count,
        "strategy": dict(graph.runs_as),
        "coverage": round(graph.coverage().flops_share, 4),
    }


def xla_flops(path: Path) -> float | None:
    """The flops of all products and convolutions by HloCostAnalysis; None where the file cannot be read for it."""
    text = path.read_text(errors="replace")
    try:
        if path.suffix == ".mlir":
            names = re.findall(r"func\.func (?:public )?@(\w+)", text)
            if len(names) == 1:
                text = re.sub(rf"@{names[0]}\b", "@main", text)
            computation = _jax.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=False)
            text = computation.get_hlo_module().to_string()
        module = read_hlo_text(text.split("`")[1] if path.suffix == ".js" else text)
        return _computation_flops(module, module.entry)
    except (HloTextError, RuntimeError, ValueError, KeyError, LookupError):  # jaxlib says what it likes
        return None


def _computation_flops(module: HloModule, computation: Computation) -> float:
    """Those of a computation and of all that it calls; raises LookupError at a loop whose trips nobody counted."""
    total = 0.0
    shapes = {instruction.name: instruction for instruction in computation.instructions}
    for instruction in computation.instructions:
        if instruction.opcode in ("dot", "convolution"):
            total += instruction_flops(instruction, [shapes[name] for name in instruction.operands])
        if instruction.opcode in ("while", "conditional"):
            raise LookupError(instruction.opcode)
        called = instruction.attributes.get("calls") or instruction.attributes.get("to_apply", "")
        if called and instruction.opcode in ("call", "fusion"):
            total += _computation_flops(module, module.computations[called.removeprefix("%")])
    return total


def instruction_flops(instruction: Instruction, operands: list[Instruction]) -> float:
    """HloCostAnalysis of a module of one instruction."""
    sizes = [list(operand.shape.dims) for operand in operands]
    given = dict(instruction.attributes)
    window = given.get("window", "")
    pads = re.search(r" ?pad=([\d_x-]+)", window)
    if pads and "lhs_dilate" not in window and "-" not in pads[1]:
        labels = given["dim_labels"].partition("_")[0]
        for index, pair in enumerate(pads[1].split("x")):
            sizes[0][labels.index(str(index))] += sum(map(int, pair.split("_")))
        given["window"] = window.replace(pads[0], "")
    kept = ("window", "dim_labels", "feature_group_count", "batch_group_count")
    kept += tuple(f"{side}_{kind}_dims" for side in ("lhs", "rhs") for kind in ("contracting", "batch"))
    attributes = "".join(f", {name}={given[name]}" for name in kept if name in given)
    lines = [
        f"p{index} = {operand.shape.element}[{','.join(map(str, dims))}] parameter({index})"
        for index, (operand, dims) in enumerate(zip(operands, sizes, strict=True))
    ]
    result = f"{instruction.shape.element}[{','.join(map(str, instruction.shape.dims))}]"
    lines.append(f"ROOT r = {result} {instruction.opcode}(p0, p1){attributes}")
    module = _hlo.hlo_module_from_text("HloModule one\nENTRY main {\n" + "\n".join(lines) + "\n}\n")
    flops: float = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)["flops"]
    return flops


def report_jax() -> dict[str, dict[str, object]]:
    """Import what JAX ships, and print how it ended."""
    outcomes = {f"jax:{name}": outcome_of_bytes(data) for name, data in shipped_with_jax()}
    for name, found in outcomes.items():
        if found["ends_in"] != "graph":
            print(f"{name}: {found['ends_in']}: {str(found['message'])[:300]}")
    print(f"jax: {len(outcomes)} modules, {dict(Counter(found['ends_in'] for found in outcomes.values()))}\n")
    return outcomes


def report_files(folder: Path) -> dict[str, dict[str, object]]:
    """Import the files of the list, print how each ended, and count."""
    outcomes: dict[str, dict[str, object]] = {}
    with LIST.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    compared, as_expected = [], 0
    for row in rows:
        path = folder / row["repository"] / row["path"]
        name = f"{row['repository']}/{row['path']}"
        if not path.is_file():
            print(f"{name}: not in the folder")
            continue
        outcomes[name] = found = outcome_of_file(path)
        as_expected += (row["expected"] == "program") is (found["ends_in"] == "graph")
        if found["ends_in"] == "graph":
            theirs = xla_flops(path)
            if theirs is not None:
                ours = float(str(found["written_flops"]))
                compared.append(abs(ours - theirs) <= TOLERANCE * theirs)
                found["xla_flops"] = theirs
        shown = {key: value for key, value in found.items() if key != "message"}
        print(f"{name} ({row['expected']}): {shown} {found.get('message', '')}")
    graphs = sum(found["ends_in"] == "graph" for found in outcomes.values())
    print(f"\n{len(outcomes)} files: {graphs} graphs, {len(outcomes) - graphs} refused; {as_expected} as expected")
    with_products = sum(bool(found.get("xla_flops")) for found in outcomes.values())
    print(f"flops within {TOLERANCE:.1%} of XLA's: {sum(compared)} of {len(compared)}, {with_products} with products")
    return outcomes


def main() -> None:
    """Import everything, count how it ended, and print the refusals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder with the files of the list")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the outcome of every file as JSON")
    arguments = parser.parse_args()
    outcomes = report_jax()
    if arguments.data is not None:
        outcomes |= report_files(arguments.data)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(outcomes, indent=1))


if __name__ == "__main__":
    main()
