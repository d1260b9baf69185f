"""`phaze search`: the accelerator to build for one model or several."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, positive_integer, show
from phaze.commands.plan_commands import strategy
from phaze.commands.question_arguments import add_trust_option, find_model, numbers

if TYPE_CHECKING:
    from phaze.explore.sampled_search import SampledSearch
    from phaze.explore.search_result import SearchProgress, SearchResult

__all__ = ["search_designs"]

_SPACE_HELP = """\
A space of your own is a JSON file. It has every combination of these values (numbers, lists or ranges) within the
limits. vector_lanes, clock_hz, hbm_bandwidth_bytes_per_s, min_area_mm2, prices and max_price may be added:
  {"format": "phaze-space", "version": 1, "tensor_cores": [1, 2, 4], "tensor_rows": 128, "tensor_cols": [64, 128],
   "vector_cores": {"from": 1, "to": 16, "times": 2}, "buffer_mib": [16, 32], "max_area_mm2": 300, "max_power_w": 400}
"""


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="as for `phaze optimize`; of several, the ratios to tpuv4-paper count",
    )
    parser.add_argument(
        "--devices", required=True, type=positive_integer, metavar="N", help="how many accelerators to train on"
    )
    parser.add_argument("--space", default="paper", metavar="NAME", help="paper (default) or a JSON file, see below")
    parser.add_argument(
        "--hbm", type=numbers, default=(32, 64, 80), metavar="N,N", help="memories to try, in GiB (default 32,64,80)"
    )
    parser.add_argument(
        "--micro-batch-size", type=numbers, default=(1, 2, 4, 8), metavar="N,N", help="sizes to try (default 1,2,4,8)"
    )
    parser.add_argument("--tp", type=numbers, metavar="N,N", help="tensor-parallel degrees to try (default 1,2,4,8)")
    parser.add_argument(
        "--global-batch", type=positive_integer, default=4096, metavar="N", help="sequences per step (default 4096)"
    )
    parser.add_argument(
        "--network",
        type=words,
        default=("paper",),
        metavar="NAME,NAME",
        help="paper (default), a known network, or nvlink8-gen4+ib400, 25GB/s; several are searched for one model",
    )
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="adamw (default), sgd, muon, adam8bit, ..")
    parser.add_argument("--precision", default="bf16", metavar="NAME", help="bf16 (default), fp16, fp32, fp8, ..")
    parser.add_argument(
        "--sequence-length",
        type=positive_integer,
        metavar="N",
        help="positions of a sequence (default: the models' own)",
    )
    parser.add_argument(
        "--schedule", type=words, metavar="NAME,NAME", help="pipeline schedules to try (default 1f1b,zero-bubble)"
    )
    parser.add_argument(
        "--strategy",
        type=strategy,
        metavar="KEY=VALUE,...",
        help="a strategy that is fixed, such as dp=64,pp=8,tp=2: only the chip is searched",
    )
    _add_objective_arguments(parser)
    _add_method_arguments(parser)
    _add_output_arguments(parser)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = _SPACE_HELP


def _add_objective_arguments(parser: ArgumentParser) -> None:
    """What is best."""
    parser.add_argument("--compatibility", choices=("paper",), help="count as the paper does")
    parser.add_argument(
        "--objective",
        default="throughput",
        metavar="NAME",
        help="throughput[-per-area|-per-energy] (default throughput)",
    )
    parser.add_argument(
        "--combine",
        default="average",
        metavar="NAME",
        help="what counts of several models: their average (default) or the worst",
    )
    parser.add_argument("--weights", type=shares, metavar="X,X", help="of the models in the average (default all 1)")
    parser.add_argument(
        "--front", action="store_true", help="find all designs that no other beats in throughput, area and energy"
    )


def _add_method_arguments(parser: ArgumentParser) -> None:
    """How it is searched."""
    parser.add_argument(
        "--method",
        default="exact",
        choices=("exact", "spotlight", "spotlight-delay", "tpe", "random"),
        help="exact (default, with proof), or a baseline that draws designs",
    )
    parser.add_argument("--seeds", type=positive_integer, metavar="N", help="runs of a baseline (default 1)")
    parser.add_argument("--evaluations", type=positive_integer, metavar="N", help="designs of a run (default 100)")
    parser.add_argument("--executor", metavar="NAME", help="processes[:N] (default), serial or dask://HOST:PORT")
    add_trust_option(parser)
    parser.add_argument("--top", type=positive_integer, default=1, metavar="K", help="show the K best designs")
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="show what changes if a size of the best design is a step larger or smaller",
    )
    parser.add_argument("--journal", metavar="FILE", help="write down there what was done, and go on from it")
    parser.add_argument(
        "--gap",
        type=float,
        default=0.01,
        metavar="PART",
        help="end when the answer is proven to be this near to the best (default 0.01)",
    )
    parser.add_argument("--time-limit", type=float, metavar="S", help="end with the best so far after so many seconds")


def _add_output_arguments(parser: ArgumentParser) -> None:
    """What is saved and printed."""
    parser.add_argument("--out", metavar="FILE", help="save the answer as JSON")
    parser.add_argument(
        "--csv", metavar="FILE", help="save a line for each accelerator: evaluated or ruled out, and its bound"
    )
    parser.add_argument("--plan", metavar="FILE", help="save the plan of a single model as JSON")
    add_json_option(parser)


def shares(text: str) -> tuple[float, ...]:
    """An argument's type: numbers with commas between."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers such as 2,1,0.5") from error


def words(text: str) -> tuple[str, ...]:
    """An argument's type: names with commas between."""
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise ArgumentTypeError(f"{text!r} is not a list of names such as 1f1b,zero-bubble")
    return names


def run(arguments: Namespace, console: Console) -> int:
    """Search, print and save."""
    import phaze

    _check_files(arguments)
    models_and_inputs = [find_model(text) for text in arguments.models]
    inputs = [example for _, example in models_and_inputs]
    models = [model for model, _ in models_and_inputs]
    options = {**_question_options(arguments), **_method_options(arguments)}
    with goes_on(arguments.journal), _shown_progress() as progress:
        result: SearchResult | SampledSearch = phaze.search(
            models, inputs[0] if len(inputs) == 1 else inputs, progress=progress, **options
        )
    texts = [str(result)]
    is_unfinished = not isinstance(result, phaze.SearchResult) or not result.certificate.is_finished
    if arguments.journal is not None and is_unfinished:
        texts.append(f"the same command goes on from {arguments.journal}")
    try:
        texts += _saved(arguments, result)
    finally:  # an answer that cannot be saved is shown all the same
        show(console, arguments, json.loads(result.to_json()), *texts)
    return ExitCode.FINE


def _question_options(arguments: Namespace) -> dict[str, Any]:
    """What is asked, as `phaze.search` takes it."""
    optional = {} if arguments.schedule is None else {"schedule": arguments.schedule}
    return {
        "devices": arguments.devices,
        "space": arguments.space,
        "hbm_gib": arguments.hbm,
        "micro_batch_size": arguments.micro_batch_size,
        "tp": arguments.tp,
        "global_batch_size": arguments.global_batch,
        "network": arguments.network[0] if len(arguments.network) == 1 else arguments.network,
        "top": arguments.top,
        "optimizer": arguments.optimizer,
        "precision": arguments.precision,
        "sequence_length": arguments.sequence_length,
        "strategy": arguments.strategy,
        "compatibility": arguments.compatibility,
        "objective": arguments.objective,
        "combine": arguments.combine,
        "weights": arguments.weights,
        "front": arguments.front,
        "gap": arguments.gap,
        **optional,
    }


def _method_options(arguments: Namespace) -> dict[str, Any]:
    """How it is searched, as `phaze.search` takes it; raises QuestionError for counts that the exact search lacks."""
    from phaze.errors import QuestionError

    counts = {name: getattr(arguments, name) for name in ("seeds", "evaluations")}
    given = {name: count for name, count in counts.items() if count is not None}
    if arguments.method == "exact" and given:
        raise QuestionError(f"--{next(iter(given))} is for methods that draw designs; add --method tpe, say.")
    if arguments.method == "exact":
        given["sensitivity"] = arguments.sensitivity
    return {
        "method": arguments.method,
        **given,
        "executor": arguments.executor,
        "trust_scheduler": arguments.trust_scheduler,
        "journal": arguments.journal,
        "time_limit_s": arguments.time_limit,
    }


def _saved(arguments: Namespace, result: SearchResult | SampledSearch) -> Iterator[str]:
    """Save what was asked for, and say where."""
    from phaze.explore.sampled_search import SampledSearch
    from phaze.file_access import write_whole

    if arguments.out is not None:
        result.save(arguments.out)
        yield f"saved to {arguments.out}"
    if isinstance(result, SampledSearch):
        if arguments.csv is not None:
            write_whole(arguments.csv, result.convergence_csv())
            yield f"the best after each evaluation listed in {arguments.csv}"
        return
    if arguments.csv is not None:
        write_whole(arguments.csv, result.explored_csv())
        yield f"accelerators listed in {arguments.csv}"
    if arguments.plan is not None:
        next(iter(result.plans.values())).save(arguments.plan)
        yield f"plan saved to {arguments.plan}"


def _check_files(arguments: Namespace) -> None:
    """Raise now what would keep the answer from being saved after hours."""
    from phaze.errors import QuestionError
    from phaze.file_access import check_writable

    if arguments.plan is not None and len(arguments.models) > 1:
        raise QuestionError("--plan saves the plan of a single model; use --out, which has the plans of all.")
    if arguments.plan is not None and arguments.compatibility is not None:
        raise QuestionError("the paper's counting makes no plans to save; leave --plan or --compatibility out.")
    if arguments.plan is not None and arguments.method != "exact":
        raise QuestionError("--plan saves the plan of the exact search; use --out, which has every run's strategies.")
    named: dict[Path, str] = {}
    for option in ("journal", "out", "csv", "plan"):
        path = getattr(arguments, option)
        if path is None:
            continue
        earlier = named.setdefault(Path(path).resolve(), option)
        if earlier != option:
            raise QuestionError(f"--{earlier} and --{option} both name {path}; give each a file of its own.")
        if option != "journal":
            check_writable(path)


@contextmanager
def goes_on(journal: str | None) -> Iterator[None]:
    """Say what is left of a search that is interrupted before it has an answer."""
    try:
        yield
    except KeyboardInterrupt as error:
        kept = "nothing is kept" if journal is None else f"the same command goes on from {journal}"
        raise KeyboardInterrupt(f"there is no answer yet; {kept}") from error


@contextmanager
def _shown_progress() -> Iterator[Callable[[SearchProgress], None] | None]:
    """A listener that draws what is pruned and left, the best and its gap on a terminal; None where nobody sees it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("", total=None)

        def listen(progress: SearchProgress) -> None:
            bar.update(
                task,
                completed=progress.points - progress.left,
                total=progress.points,
                description=progress_text(progress),
            )

        yield listen


def progress_text(progress: SearchProgress) -> str:
    """One line: left to look at, the best so far, its gap, a guess of the time left, and what was just done."""
    settled = f"{progress.points - progress.left:,} of {progress.points:,} settled, {progress.left:,} left"
    parts = [f"{settled}, {progress.evaluated} evaluated"]
    if progress.best is not None:
        gap = "" if progress.gap is None else f" (gap {progress.gap:.2%})"
        parts.append(f"best {progress.best:,.5g}{gap}")
    if progress.remaining_s is not None:
        parts.append(f"about {progress.remaining_s:.0f} s left")
    return "; ".join([*parts, progress.doing])


search_designs = Command(
    name="search",
    group=CommandGroup.PLANS,
    summary="find the accelerator to build for models, with proof",
    configure=configure,
    run=run,
)
