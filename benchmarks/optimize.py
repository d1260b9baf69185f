"""From model names to plans: what it costs in processor time and memory, what comes out, and how much of it is proven.

    python benchmarks/optimize.py [QUESTION ...] [--before REV] [--verify]

A row a question, each in a process of its own: processor seconds after the import, peak memory, gap and plan. With
`--before` the same questions are put to another commit in the same run, and the ratio of both is shown; a commit that
explains every plan has the explanation in its seconds. QUESTION is one of the names that the table shows.

    python benchmarks/optimize.py --growth [--before REV]

asks the same of more devices (64 to 131,072), more layers (12 to 1,000) and more values of tp.

    python benchmarks/optimize.py --grid gpt2-xl --cluster a100-80gb:64 --global-batch 256

plans at gap 0 and prices every strategy of a grid over (dp, tp, pp, micro_batch_size, recompute, zero); none may be
faster. The last line counts strategies that fit, and those that are faster.
"""

from __future__ import annotations

import argparse
import inspect
import io
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import phaze
from phaze.report.plan_text import strategy_text

Asked = Mapping[str, Any]
"""A question as JSON: `model` (a name, or a config), and options of `phaze.optimize`."""

PAPER_MODELS = (
    "bert-large",
    "gpt2-xl",
    "opt-350m",
    "llama2-7b",
    "megatron-bert",
    "megatron-gpt2-xl",
    "megatron-gpt2-54",
    "megatron-gpt2-72",
    "gpt3-175b",
)

GPT3: Asked = {"model": "gpt3-175b", "global_batch_size": 1536}

INTERNLM_7B: Asked = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "attention_bias": True,
    "vocab_size": 103_168,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}
"""A Llama with biases in attention, as it was trained with hybrid sharding on 1,024 A100s."""

DEEP_LLAMA: Asked = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 1000,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
}
"""A thousand layers as llama3-70b has them: 0.86 trillion parameters."""

QUESTIONS: dict[str, Asked] = {
    "gpt2-xl a100:8": {"model": "gpt2-xl", "cluster": "a100-80gb:8", "global_batch_size": 512},
    "gpt3-175b a100:1024": {**GPT3, "cluster": "a100-80gb:1024"},
    "gpt3-175b a100:1024 explained": {**GPT3, "cluster": "a100-80gb:1024", "explain": True},
    "gpt3-175b a100:16384": {**GPT3, "cluster": "a100-80gb:16384", "global_batch_size": 16384},
    **{
        f"{name} a100:1024": {"model": name, "cluster": "a100-80gb:1024", "global_batch_size": 2048}
        for name in ("llama3-70b", "mixtral-8x7b", "t5-large")
    },
    "llama3.1-405b h100:512": {"model": "llama3.1-405b", "cluster": "h100:512", "global_batch_size": 2048},
    "llama3.1-405b h100:16384": {"model": "llama3.1-405b", "cluster": "h100:16384", "global_batch_size": 16384},
    "llama3.1-405b h100:16384 long": {
        "model": "llama3.1-405b",
        "cluster": "h100:16384",
        "global_batch_size": 2048,
        "sequence_length": 131_072,
    },
    "deepseek-v3 h100:2048": {"model": "deepseek-v3", "cluster": "h100:2048", "global_batch_size": 15360},
    "mixtral-8x7b a100:256": {"model": "mixtral-8x7b", "cluster": "a100-80gb:256", "global_batch_size": 1024},
    "internlm-7b a100:1024": {"model": INTERNLM_7B, "cluster": "a100-80gb:1024", "global_batch_size": 2048},
    "llama3-70b a100-40gb:8": {"model": "llama3-70b", "cluster": "a100-40gb:8", "global_batch_size": 64},
    "deepseek-v3 h800:2048": {"model": "deepseek-v3", "cluster": "h800:2048", "global_batch_size": 15360},
    "qwen3-235b-a22b gb200:576": {"model": "qwen3-235b-a22b", "cluster": "gb200:576", "global_batch_size": 2304},
    "gpt-oss-120b h100:512": {"model": "gpt-oss-120b", "cluster": "h100:512", "global_batch_size": 2048},
    "gemma3-27b tpuv6e:256": {"model": "gemma3-27b", "cluster": "tpuv6e:256", "global_batch_size": 256},
    "llama3.1-70b trn2:512": {"model": "llama3.1-70b", "cluster": "trn2:512", "global_batch_size": 1024},
    **{
        f"{name} tpuv4:1024": {"model": name, "cluster": "tpuv4:1024", "global_batch_size": 4096}
        for name in PAPER_MODELS
    },
}

GPT_CONFIG: Asked = {
    "model_type": "megatron-gpt",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "seq_length": 2048,
    "vocab_size": 51200,
}
"""A GPT whose number of layers grows; the other sizes are those of a model of some billion parameters."""

GROWTH: dict[str, Asked] = {
    **{
        f"devices {count}": {**GPT3, "cluster": f"a100-80gb:{count}", "global_batch_size": max(1536, count)}
        for count in (64, 256, 1024, 4096, 16384, 65536, 131072)
    },
    **{
        f"layers {count}": {
            "model": {**GPT_CONFIG, "num_layers": count},
            "cluster": "a100-80gb:256",
            "global_batch_size": 1024,
        }
        for count in (12, 24, 48, 96, 192, 384, 1000)
    },
    **{
        f"tp up to {most}": {
            **GPT3,
            "cluster": "a100-80gb:1024",
            "tp": [2**power for power in range(most.bit_length())],
        }
        for most in (1, 2, 4, 8, 16)
    },
    "llama, 1,000 layers, h100:131072": {
        "model": DEEP_LLAMA,
        "cluster": "h100:131072",
        "global_batch_size": 32_768,
    },
}


def main() -> None:
    """Ask and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help="names of the table; all by default")
    parser.add_argument("--before", metavar="REV", help="also ask this commit, and show the ratio")
    parser.add_argument("--growth", action="store_true", help="the questions that grow")
    parser.add_argument("--cluster", default="a100-80gb:64", help="of --grid")
    parser.add_argument("--global-batch", type=int, default=256, help="of --grid")
    parser.add_argument("--grid", metavar="MODEL", help="price a grid of strategies against the best plan")
    parser.add_argument("--verify", action="store_true", help="derive every number of every plan again")
    parser.add_argument("--answer", type=json.loads, help=argparse.SUPPRESS)  # what a process of the table is given
    arguments = parser.parse_args()
    if arguments.answer is not None:
        print(json.dumps(_answer(arguments.answer)))
    elif arguments.grid is not None:
        _grid(arguments.grid, arguments.cluster, arguments.global_batch)
    else:
        known = GROWTH if arguments.growth else QUESTIONS
        unknown = [name for name in arguments.questions if name not in known]
        if unknown:
            parser.error(f"unknown question {unknown[0]!r}; known are {', '.join(map(repr, known))}")
        _table({name: known[name] for name in arguments.questions or known}, arguments.before, arguments.verify)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What one process found: its processor seconds and memory, and the plan in short."""
    verifies, explain, model = asked.pop("verifies", False), asked.pop("explain", False), asked.pop("model")
    if isinstance(model, dict):
        from phaze.frontends.transformer_config import graph_from_config

        layers = model.get("num_layers", model.get("num_hidden_layers"))
        model = graph_from_config(model, name=f"{model['model_type']}-{layers}")
    if "explain" in inspect.signature(phaze.optimize).parameters:
        asked["explain"] = explain
    start = time.process_time()
    plan = phaze.optimize(model, **asked)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {
        "seconds": seconds,
        "peak_mib": peak,
        "step_time_s": plan.step_time_s,
        "gap": plan.gap,
        "is_feasible": plan.is_feasible,
        "proven": [plan.provenance.schedules_proven, plan.provenance.schedules],
        "strategy": strategy_text(plan.strategy),
    }
    if verifies:
        from phaze.verify.plan_checks import check_plan

        findings = check_plan(plan, model)
        found["strategy"] += f"; {sum(finding.holds for finding in findings)} of {len(findings)} checks hold"
    return found


def _table(questions: Mapping[str, Asked], before: str | None, verifies: bool) -> None:
    columns = f"{'before':>9}{'ratio':>7}{'step, s':>10}{'before':>10}" if before else f"{'step, s':>10}"
    print(f"{'question':<32}{'cpu s':>8}{'MiB':>6}{columns}{'gap':>8}  plan")
    seconds, worst_gap = 0.0, 0.0
    with _commit(before) as older:
        for name, asked in questions.items():
            now = _in_process({**asked, "verifies": verifies}, None)
            row = f"{name:<32}{now['seconds']:>8.2f}{now['peak_mib']:>6.0f}"
            if older is not None:
                then = _in_process(asked, older)
                row += f"{then['seconds']:>9.2f}{then['seconds'] / now['seconds']:>7.1f}"
                row += f"{now['step_time_s']:>10.4g}{then['step_time_s']:>10.4g}"
            else:
                row += f"{now['step_time_s']:>10.4g}"
            told = now["strategy"] if now["is_feasible"] else f"does not fit: {now['strategy']}"
            print(f"{row}{now['gap']:>8.2%}  {told}", flush=True)
            seconds, worst_gap = seconds + now["seconds"], max(worst_gap, now["gap"])
    print(f"{len(questions)} questions, {seconds:.1f} processor seconds in all, largest gap {worst_gap:.2%}")


def _in_process(asked: Asked, package: Path | None) -> dict[str, Any]:
    """The answer of a process of its own, with this package or that of another commit."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if package is not None:
        environment["PYTHONPATH"] = str(package)
    command = [sys.executable, __file__, "--answer", json.dumps(asked)]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@contextmanager
def _commit(revision: str | None) -> Iterator[Path | None]:
    """A folder from which the package of a commit is imported, with that commit's plugins; None without a revision."""
    if revision is None:
        yield None
        return
    root = Path(__file__).parent.parent
    archive = subprocess.run(["git", "archive", revision], cwd=root, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as name:
        source, package = Path(name) / "source", Path(name) / "package"
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(source, filter="data")
        package.mkdir()
        project = tomllib.loads((source / "pyproject.toml").read_text())
        for module, folder in sorted(project["tool"]["setuptools"]["package-dir"].items()):
            shutil.copytree(source / folder, package / module.replace(".", "/"), dirs_exist_ok=True)
        _write_metadata(package, project["project"])
        yield package


def _write_metadata(package: Path, project: Mapping[str, Any]) -> None:
    """The facts of an installation by which plugins are found: those of this folder come before installed ones."""
    facts = package / f"{project['name'].replace('-', '_')}-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())])
        for group, entries in project.get("entry-points", {}).items()
    ]
    (facts / "entry_points.txt").write_text("\n\n".join(groups) + "\n")


def _grid(name: str, cluster: str, batch: int) -> None:
    graph = phaze.import_graph(name)
    question = {"cluster": cluster, "global_batch_size": batch, "gap": 0.0}
    best = phaze.optimize(graph, **question)  # type: ignore[arg-type]
    print(f"best: {best.step_time_s:.6g} s, gap {best.gap:.2e}: {strategy_text(best.strategy)}", flush=True)
    devices = best.cluster.device_count
    degrees = [2**power for power in range(devices.bit_length())]
    tried = fitting = faster = 0
    closest = float("inf")
    for dp, tp, pp, size, mode, zero in itertools.product(
        degrees, (1, 2, 4, 8), degrees, (1, 2, 4, 8), ("none", "selective", "full"), (0, 1, 2, 3)
    ):
        is_possible = dp * tp * pp == devices and pp <= len(graph.layers) and dp * size <= batch
        if not is_possible or (zero and dp == 1):
            continue
        asked = {"dp": dp, "tp": tp, "pp": pp, "micro_batch_size": size, "recompute": mode, "zero": zero}
        try:
            found = phaze.evaluate(graph, strategy=asked, compares=False, **question)  # type: ignore[arg-type]
        except phaze.PhazeError:
            continue
        tried += 1
        fitting += found.is_feasible
        if found.is_feasible:
            closest = min(closest, found.step_time_s / best.step_time_s)
            if found.step_time_s < best.step_time_s * (1 - 1e-9):
                faster += 1
                print(f"faster: {found.step_time_s:.6g} s: {strategy_text(found.plan.strategy)}", flush=True)
    print(
        f"{tried} strategies, {fitting} fit, {faster} faster; the best of them takes {closest:.6f} of the plan's time"
    )


if __name__ == "__main__":
    main()
