"""JAX models of many kinds, trained for five steps on eight host devices as plans say, against one device.

    python benchmarks/jax_zoo.py [NAME ...] [--strategy NAME ...] [--markdown]

A row a model: under each strategy the largest relative difference of losses and of all parameters after five steps of
SGD with momentum in fp32, or why the strategy is refused. `--markdown` prints the rows of a table. Every model has a
process of its own. The Equinox row needs equinox, which nothing else here does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax_zoo_models import BATCH, ZooModel, optimizer
from jax_zoo_modules import MODELS

import phaze
from phaze.errors import PhazeError

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
QUICK_COMPILER = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""Flags of XLA with which small programs are compiled in half the time; what they compute and send is the same."""
STEPS = 5
TOLERANCE = 1e-5
TENSOR_DEGREES = (8, 4, 2)
"""Degrees of tp that are tried, the largest first."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "dp8": {"dp": 8},
    "tp": {"tp": 8},
    "dp2 x tp4": {"dp": 2, "tp": 4, "zero": 1},
    "pp2": {"pp": 2},
    "pp2 eager": {"pp": 2, "schedule": "eager-1f1b", "micro_batch_size": BATCH // 8},
    "cp2": {"cp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "hybrid 2 x 4": {"dp": 8, "shard": 4, "zero": 3},
}


def main() -> int:
    """Print a row a model, and how many cases are equal, refused, or neither."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--strategy", action="append", choices=STRATEGIES)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--alone", help="run this model in this process and print what it gave as JSON")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]}; known are {', '.join(MODELS)}")
    strategies = arguments.strategy or list(STRATEGIES)
    if arguments.alone:
        print(json.dumps(answers_of(MODELS[arguments.alone](), strategies)))
        return 0
    counts = {"equal": 0, "refused": 0, "wrong": 0}
    if arguments.markdown:
        print("| model | " + " | ".join(strategies) + " |\n|---|" + "---|" * len(strategies))
    is_there = importlib.util.find_spec("equinox") is not None
    for name in arguments.names or [name for name in MODELS if is_there or "equinox" not in name]:
        answers = answers_in_process(name, strategies)
        for answer in answers.values():
            counts[kind(answer)] += 1
        show(name, answers, is_markdown=arguments.markdown)
    print(f"{counts['equal']} equal one device, {counts['refused']} refused with a reason, {counts['wrong']} neither")
    return 1 if counts["wrong"] else 0


def kind(answer: Mapping[str, Any]) -> str:
    """Whether a case is "equal" to one device, "refused", or "wrong"."""
    if "refused" in answer:
        return "refused"
    return "equal" if float(answer.get("error", "inf")) <= TOLERANCE else "wrong"


def show(name: str, answers: Mapping[str, Mapping[str, Any]], *, is_markdown: bool) -> None:
    """Print the answers for a model."""
    if is_markdown:
        cells = []
        for answer in answers.values():
            degree = f" (tp{answer['tp']})" if "tp" in answer else ""
            cells.append(f"{answer['error']:.0e}{degree}" if kind(answer) == "equal" else "-")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    for key, answer in answers.items():
        words = {
            "equal": f"equal ({answer.get('error', 0):.0e}{', tp ' + str(answer['tp']) if 'tp' in answer else ''})",
            "refused": f"refused: {answer.get('refused')}",
            "wrong": f"WRONG: {answer.get('failure', answer.get('error'))}",
        }[kind(answer)]
        if not is_markdown or kind(answer) != "equal":
            print(f"{name:22s} {key:13s} {words[:400]}", flush=True, file=sys.stderr if is_markdown else sys.stdout)


def answers_in_process(name: str, strategies: list[str]) -> dict[str, dict[str, Any]]:
    """What a process of its own gave for a model."""
    chosen = [word for key in strategies for word in ("--strategy", key)]
    settings = {"XLA_FLAGS": f"{EIGHT_DEVICES} {QUICK_COMPILER}", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--alone", name, *chosen]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    if done.returncode:
        failure: dict[str, Any] = {"failure": " ".join(done.stderr.split()[-60:])}
        return dict.fromkeys(strategies, failure)
    answers: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def answers_of(model: ZooModel, strategies: list[str]) -> dict[str, dict[str, Any]]:
    """What every strategy gave for a model, in this process."""
    warnings.simplefilter("ignore")
    jax.config.update("jax_disable_most_optimizations", True)
    expected = train_alone(model)
    return {key: answer_of(model, key, expected) for key in strategies}


def answer_of(model: ZooModel, key: str, expected: tuple[list[float], Any]) -> dict[str, Any]:
    """What one strategy gave: its error, why it is refused, or how it failed."""
    refused = ""
    for tp in TENSOR_DEGREES if key == "tp" else (None,):
        strategy = STRATEGIES[key] if tp is None else {"tp": tp}
        try:
            run = arranged(model, strategy)
        except PhazeError as error:
            refused = refused or " ".join(str(error).split())
            continue
        except Exception:
            return {"failure": " ".join(traceback.format_exc().split()[-60:])}
        try:
            answer = {"error": error_of(train(model, run), expected)}
            return answer if tp is None else {**answer, "tp": tp}
        except Exception:
            return {"failure": " ".join(traceback.format_exc().split()[-60:])}
    return {"refused": refused}


def arranged(model: ZooModel, strategy: Mapping[str, Any]) -> Any:
    """The model on the devices of a strategy."""
    settled: dict[str, Any] = {"dp": 1, "tp": 1, "pp": 1, "ep": 1, "zero": 0, "recompute": "none", "chunks": 1}
    settled |= {"schedule": "gpipe" if "pp" in strategy else "none", **strategy}
    copies, stages = settled["dp"], settled["pp"]
    settled.setdefault("micro_batch_size", BATCH // copies if model.is_step else max(1, BATCH // copies // 2))
    if settled["tp"] != 1 and "sequence_parallel" not in strategy:
        settled["sequence_parallel"] = False
    devices = copies * stages * settled["tp"] * strategy.get("cp", 1)
    asked = {"global_batch_size": BATCH, "precision": "fp32", "target": "jax", "compares": False}
    plan = phaze.evaluate(model.model, model.inputs, cluster=f"cpu:{devices}", strategy=settled, **asked).plan
    options: dict[str, Any] = {} if model.is_step else {"optimizer": optimizer()}
    if model.takes_mean:
        options["takes_mean"] = True
    return plan.apply(model.model, inputs=model.inputs, **options)


def train(model: ZooModel, run: Any) -> tuple[list[float], Any]:
    """Losses and parameters (of a step, its state) after some steps on the mesh."""
    losses = []
    state = model.start if model.is_step else run.start(model.start)
    step = run if model.is_step else run.step
    for _ in range(STEPS):
        state, loss = step(state, *model.batch)
        losses.append(float(loss))
    return losses, state if model.is_step else run.parameters(state)


def train_alone(model: ZooModel) -> tuple[list[float], Any]:
    """The same on one device."""
    step, state = (model.model, model.start) if model.is_step else step_alone(model)
    compiled, losses = jax.jit(step), []
    for _ in range(STEPS):
        state, loss = compiled(state, *model.batch)
        losses.append(float(loss))
    return losses, state if model.is_step else state[0]


def step_alone(model: ZooModel) -> tuple[Any, Any]:
    """A step of (trained arrays, optimizer's state) made of the loss, and what it starts from."""
    loss, transform = model.loss or model.model, optimizer()
    leaves, structure = jax.tree.flatten(model.start)
    trained = [place for place, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def whole(arrays: list[jax.Array]) -> Any:
        values = dict(zip(trained, arrays, strict=True))
        return jax.tree.unflatten(structure, [values.get(place, leaf) for place, leaf in enumerate(leaves)])

    def step(state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda arrays: loss(whole(arrays), *batch))(state[0])
        changes, optimizer_state = transform.update(gradients, state[1], state[0])
        return ([array + change for array, change in zip(state[0], changes, strict=True)], optimizer_state), value

    arrays = [leaves[place] for place in trained]
    return step, (arrays, transform.init(arrays))


def error_of(measured: tuple[list[float], Any], expected: tuple[list[float], Any]) -> float:
    """The largest relative difference of losses and of arrays, each array relative to its largest element."""
    errors = [abs(a - b) / abs(b) for a, b in zip(measured[0], expected[0], strict=True)]
    arrays = ([leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape")] for tree in (measured[1], expected[1]))
    for a, b in zip(*map(list, arrays), strict=True):
        difference, size = np.abs(np.asarray(a) - np.asarray(b)).max(), np.abs(np.asarray(b)).max()
        errors.append(float(difference) / max(float(size), 1e-3))
    return float(np.max(errors))


if __name__ == "__main__":
    raise SystemExit(main())
