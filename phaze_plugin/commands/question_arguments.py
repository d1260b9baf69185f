"""Arguments that several commands share: a model, how its file is read, the question about it; progress on a terminal.

`add_file_arguments` adds what says how a model file is to be read: the roles of its arguments, its loss, its entry, the
trips of its loops. `add_question_arguments` adds what `optimize`, `evaluate` and `verify` share.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from phaze.commands.command import add_attention_option, positive_integer
from phaze.errors import ImportModelError

if TYPE_CHECKING:
    from argparse import _ActionsContainer

    from phaze.planner import Progress
    from phaze.question import QuestionOptions

__all__ = [
    "add_file_arguments",
    "add_model_argument",
    "add_question_arguments",
    "add_question_options",
    "add_trust_option",
    "file_options",
    "find_model",
    "progress_text",
    "question_options",
    "shown_progress",
]


def add_file_arguments(parser: ArgumentParser) -> None:
    """Add the options of HLO and StableHLO files."""
    group = parser.add_argument_group("HLO and StableHLO files")
    for role in ("parameters", "batch"):
        group.add_argument(
            f"--{role}", action="append", metavar="ARGUMENT", help=f"{role} of the file, by index or path; repeatable"
        )
    group.add_argument("--loss", metavar="OUTPUT", help="the result to train, by index or name")
    group.add_argument("--module", metavar="NAME", help="which of several modules (default: that with the most flops)")
    group.add_argument("--entry", metavar="NAME", help="the function to import (default main)")
    group.add_argument(
        "--trips",
        type=positive_integer,
        metavar="N",
        help="how often to count a loop whose end depends on data (default 1)",
    )


def file_options(arguments: Namespace) -> dict[str, Any]:
    """What was asked for; an argument's index is a number, its path a text."""
    options: dict[str, Any] = {}
    for name in ("parameters", "batch"):
        given = getattr(arguments, name)
        if given is not None:
            options[name] = [_selector(text) for text in given]
    if arguments.loss is not None:
        options["loss"] = _selector(arguments.loss)
    for name in ("module", "entry", "trips"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    return options


def _selector(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


PYTHON = "python:"


def add_model_argument(parser: ArgumentParser, flag: str = "model", more: str = "", **options: Any) -> None:
    """Add MODEL, in all its forms; `more` is added to its help."""
    text = "a known name, a config.json, a saved graph, another model file, or python:MODULE_OR_FILE:ATTRIBUTE"
    text += " (which runs that code)"
    parser.add_argument(flag, metavar="MODEL", help=f"{text}{more}", **options)


def add_trust_option(parser: ArgumentParser) -> None:
    """Let a user say that a scheduler on another machine may run programs here."""
    parser.add_argument("--trust-scheduler", action="store_true", help="let a dask:// of another machine run code here")


def add_question_arguments(parser: ArgumentParser) -> None:
    """Add what is asked of a search for plans, how long it may take, and what is done with its answer."""
    add_question_options(parser)
    group = parser.add_argument_group("results")
    group.add_argument("--time-limit", type=float, metavar="S", help="end with the best so far after so many seconds")
    group.add_argument("--out", metavar="FILE", help="save the plan as JSON")
    group.add_argument("--trace", metavar="FILE", help="write the step's timeline as a Chrome trace, for Perfetto")
    group.add_argument("--quiet", action="store_true", help="print nothing: only write files and set the exit code")


def add_question_options(parser: ArgumentParser) -> None:
    """Add the options that become arguments of `phaze.optimize`."""
    _add_asked_options(parser.add_argument_group("what is asked"))
    _add_choice_options(parser.add_argument_group("what may be chosen"))
    _add_price_options(parser.add_argument_group("prices and proof"))
    add_file_arguments(parser)


def _add_asked_options(group: _ActionsContainer) -> None:
    """Add the cluster, the batch, the numbers and what is made small."""
    group.add_argument(
        "--cluster",
        required=True,
        metavar="CHIP:COUNT[@NETWORK]",
        help="such as a100-80gb:64 or h100:512@nvlink8+ib400",
    )
    group.add_argument(
        "--global-batch", type=positive_integer, metavar="N", help="sequences per step (default 8 a device)"
    )
    group.add_argument(
        "--sequence-length",
        type=positive_integer,
        metavar="N",
        help="positions of a sequence (default: the model's own)",
    )
    group.add_argument("--precision", default="bf16", metavar="NAME", help="bf16 (default), fp16, fp32, fp8, ..")
    group.add_argument("--optimizer", default="adamw", metavar="NAME", help="adamw (default), sgd, muon, adam8bit, ..")
    group.add_argument("--inference", action="store_true", help="plan the forward alone (as --optimizer none)")
    group.add_argument("--target", default="auto", metavar="NAME", help="what runs the plan, auto (default) or none")
    group.add_argument(
        "--objective",
        default="throughput",
        metavar="NAME",
        help="throughput (default), cost, energy or devices; the last three also choose how many devices to use",
    )
    group.add_argument("--price", type=float, metavar="X", help="money for one device-hour, for --objective cost")
    group.add_argument(
        "--step-time", type=float, metavar="S", help="the most seconds that a step may take, for --objective devices"
    )


def _add_choice_options(group: _ActionsContainer) -> None:
    """Add the values that a search may choose from."""
    group.add_argument(
        "--micro-batch-size", type=numbers, metavar="N,N", help="microbatch sizes to try (default 1,2,4,8)"
    )
    group.add_argument("--tp", type=numbers, metavar="N,N", help="tensor-parallel degrees to try (default 1,2,4,8)")
    group.add_argument(
        "--cp",
        type=numbers,
        metavar="N,N",
        help="devices to split each sequence over (default: more than 1 for long ones only)",
    )
    group.add_argument(
        "--ep", type=numbers, metavar="N,N", help="devices to divide experts over (default: all that mixtures allow)"
    )
    group.add_argument(
        "--recompute",
        type=_names,
        metavar="NAME,NAME",
        help="recompute modes to try (default none,selective,full); budget stands for budget-75, -50 and -25",
    )


def _add_price_options(group: _ActionsContainer) -> None:
    """Add what prices assume, the proof that is asked, and the solver."""
    group.add_argument(
        "--calibration", metavar="FILE", help="that `phaze calibrate` wrote (default: the chip's own, if it has one)"
    )
    add_attention_option(group)
    group.add_argument(
        "--expert-imbalance",
        type=float,
        default=1.0,
        metavar="X",
        help="assume that experts take X times their equal share of tokens (default 1)",
    )
    group.add_argument(
        "--gap",
        type=float,
        default=0.01,
        metavar="PART",
        help="end when the answer is proven to be this near to the best (default 0.01)",
    )
    group.add_argument(
        "--solver",
        metavar="NAME",
        help="solver of sharding and schedules: highs, scip, cp-sat or gurobi",
    )


def numbers(text: str) -> tuple[int, ...]:
    """An argument's type: whole numbers with commas between."""
    values = tuple(int(part) if part.isascii() and part.isdigit() else 0 for part in text.split(","))
    if not all(values):
        raise ArgumentTypeError(f"{text!r} is not a list of positive integers such as 1,2,4")
    return values


def _names(text: str) -> tuple[str, ...]:
    """An argument's type: names with commas between."""
    return tuple(part.strip() for part in text.split(","))


def question_options(arguments: Namespace) -> QuestionOptions:
    """The options of a question, as `phaze.optimize` takes them."""
    return {
        "cluster": arguments.cluster,
        "global_batch_size": arguments.global_batch,
        "optimizer": "none" if arguments.inference else arguments.optimizer,
        "precision": arguments.precision,
        "micro_batch_size": arguments.micro_batch_size,
        "tp": arguments.tp,
        "cp": arguments.cp,
        "ep": arguments.ep,
        "recompute": arguments.recompute,
        "sequence_length": arguments.sequence_length,
        "calibration": arguments.calibration,
        "attention": arguments.attention,
        "expert_imbalance": arguments.expert_imbalance,
        "target": None if arguments.target == "none" else arguments.target,
        "objective": arguments.objective,
        "price": arguments.price,
        "step_time": arguments.step_time,
        "gap": arguments.gap,
        "solver": arguments.solver,
        "frontend_options": file_options(arguments) or None,
    }


def find_model(text: str) -> tuple[object, object]:
    """A model and its inputs: what an attribute holds (a pair is both), or the text itself, and None."""
    if not text.startswith(PYTHON):
        return text, None
    where, _, name = text.removeprefix(PYTHON).rpartition(":")
    if not where or not name:
        raise ImportModelError(
            f"{text!r} is not of the form python:MODULE_OR_FILE:ATTRIBUTE; the attribute is a model (a torch module, "
            "a JAX loss of parameters and batch, a lowered function), or a pair of a model and its inputs."
        )
    module = _load(where)
    if not hasattr(module, name):
        raise ImportModelError(
            f"{where} has no attribute {name!r}; it has {', '.join(_public(module)) or 'none'}. The attribute holds a "
            "model, or a pair of a model and its inputs."
        )
    attribute = getattr(module, name)
    return attribute if isinstance(attribute, tuple) and len(attribute) == 2 else (attribute, None)


def _load(where: str) -> object:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        advice = "Models are taken from programs that run from top to bottom when they are imported."
        if isinstance(error, ModuleNotFoundError):
            advice = f"Install {error.name} in the environment of phaze (torch and JAX: the extras 'torch' and 'jax')."
        raise ImportModelError(f"{where} cannot be imported: {type(error).__name__}: {error}. {advice}") from error
    return module


def _public(module: object) -> list[str]:
    return sorted(name for name in vars(module) if not name.startswith("_"))


@contextmanager
def shown_progress(*, is_quiet: bool = False) -> Iterator[Callable[[Progress], None] | None]:
    """A listener that draws progress on a terminal: the best, the bound, the gap; None where nobody sees it."""
    if is_quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def listen(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, description=progress_text(progress))

        yield listen


def progress_text(progress: Progress) -> str:
    """One line: the best step so far, the bound under all of them and the gap between, and what comes next."""
    parts = []
    if progress.best_step_time_s is not None:
        parts.append(f"best {progress.best_step_time_s:.4g} s")
        if progress.gap is not None and progress.bound_s is not None:
            parts.append(f"bound {progress.bound_s:.4g} s (gap {progress.gap:.1%})")
    return "; ".join([*parts, progress.doing])
