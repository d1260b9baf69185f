"""`phaze calibrate`: from a few measured steps, or one profiled step, to a calibration that planning takes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, positive_integer, show
from phaze.errors import QuestionError, UnknownNameError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from phaze.calibration_fitting import Fit, PreparedRun, Run
    from phaze.calibration_fitting.least_squares import Predict
    from phaze.cost import Calibration
    from phaze.hooks import PluginManager

__all__ = ["calibrate_chip"]

_STACKS = ("eager", "library", "perfect")
_CANDIDATES = ("matrix", "narrow_matrix", "attention", "memory", "link", "network", "overhead_s", "overlap")


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = (
        "Measured steps are one run a line under a line of column names. model, cluster, global_batch and seconds must "
        "be there; name, precision, sequence_length, memory_gib, dp, cp, ep, tp, expert_tp, pp, micro_batch_size, "
        "schedule, chunks, zero, shard, sequence_parallel and recompute may be. Runs that differ in size and strategy "
        "tell more terms apart."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--measured", metavar="FILE", help="CSV of steps: model, cluster, global_batch, seconds, ..")
    source.add_argument("--trace", metavar="FILE", help="Chrome trace of torch.profiler of a training step")
    parser.add_argument(
        "--terms", metavar="NAME,NAME", help="terms to fit to measured steps (default: those that they can tell apart)"
    )
    parser.add_argument("--stack", choices=_STACKS, help="what the framework fuses and hides (default: the chip's own)")
    parser.add_argument("--model", metavar="MODEL", help="of the trace: a known name, a config.json or a saved graph")
    parser.add_argument("--cluster", metavar="CHIP:1", help="of the trace (one device)")
    parser.add_argument("--global-batch", type=positive_integer, metavar="N", help="sequences in the traced step")
    parser.add_argument("--precision", default="bf16", metavar="NAME", help="of the trace (default bf16)")
    parser.add_argument("--sequence-length", type=positive_integer, metavar="N", help="of the trace")
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="forget the chip's own calibration; by default the fit stays as near to it as the runs allow",
    )
    parser.add_argument("--out", metavar="FILE", help="write the calibration")
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Fit, print, write."""
    return _from_steps(arguments, console) if arguments.measured else _from_trace(arguments, console)


def _from_steps(arguments: Namespace, console: Console) -> int:
    import numpy as np

    from phaze.calibration_fitting import fit_terms, prepare_run, prior_error_of, read_steps
    from phaze.cost import calibration_of
    from phaze.installed import installed_plugins

    plugins = installed_plugins()
    runs = read_steps(arguments.measured)
    start = _start(runs, arguments.stack, f"fitted to {arguments.measured}", plugins)
    prepared = [prepare_run(run, start.stack, plugins) for run in runs]

    def predict(calibrations: Sequence[Calibration]) -> NDArray[np.float64]:
        return np.stack([run.seconds(calibrations) for run in prepared], axis=1)

    is_prior = _is_fitted(runs, plugins) and not arguments.from_scratch
    most = len(_CANDIDATES) if is_prior else max(1, 2 * len(runs) // 3)
    terms, left = _terms(arguments.terms, predict, start, most, is_prior)
    shipped = calibration_of(prepared[0].problem.cluster.accelerator)
    asked = [(run.problem.cluster, run.problem.recipe) for run in prepared]
    prior_error = prior_error_of(shipped, asked) if is_prior else None
    fit = fit_terms(predict, [run.seconds for run in runs], start, terms, prior_error=prior_error)
    _show_fit(arguments, console, start, _with_reserve(fit, prepared), prepared, left)
    return ExitCode.FINE


def _start(runs: Sequence[Run], stack: str | None, name: str, plugins: PluginManager) -> Calibration:
    """The chip's own calibration, or round numbers where it has none."""
    from dataclasses import replace

    from phaze.cost import EAGER_STACK, IDEAL, LIBRARY_STACK, PERFECT_STACK, Calibration, calibration_of
    from phaze.cost.calibration import TERMS
    from phaze.cost.measured_kernels import link_protocols_of, product_kernels_of
    from phaze.question import settled_cluster

    chips = [settled_cluster(run.cluster, plugins).accelerator for run in runs]
    other = next((run for run, chip in zip(runs, chips, strict=True) if chip != chips[0]), None)
    if other is not None:
        raise QuestionError(
            f"{other.name} ran on another chip than {runs[0].name}; a calibration belongs to one chip: write the runs "
            "of each into a file of its own."
        )
    products, links = product_kernels_of(chips[0]), link_protocols_of(chips[0])
    calibration = replace(calibration_of(chips[0]), products=products, links=links)
    if all(getattr(calibration, term) == getattr(IDEAL, term) for term in TERMS):
        calibration = Calibration(
            matrix=0.7,
            memory=0.7,
            link=0.7,
            network=0.7,
            overhead_s=1e-5,
            overlap=0.5,
            stack=LIBRARY_STACK,
            products=products,
            links=links,
        )
    stacks = {"eager": EAGER_STACK, "library": LIBRARY_STACK, "perfect": PERFECT_STACK, None: calibration.stack}
    return replace(calibration, name=name, stack=stacks[stack])


def _is_fitted(runs: Sequence[Run], plugins: PluginManager) -> bool:
    """Whether the runs' chip has a calibration that was fitted to other runs."""
    from phaze.cost import calibration_of
    from phaze.question import settled_cluster

    calibration = calibration_of(settled_cluster(runs[0].cluster, plugins).accelerator)
    return not (calibration.is_ideal or calibration.has_measured_kernels_only)


def _terms(
    text: str | None, predict: Predict, start: Calibration, most: int, has_prior: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    """What to fit: as asked, or what the runs show; and why not the others."""
    from phaze.calibration_fitting import separable_terms
    from phaze.cost.calibration import TERMS

    if text is None:
        return separable_terms(predict, start, _CANDIDATES, most, has_prior=has_prior)
    terms = tuple(part.strip() for part in text.split(","))
    for term in terms:
        if term not in TERMS:
            raise UnknownNameError("term of a calibration", term, TERMS)
    if len(set(terms)) < len(terms):
        raise QuestionError(f"--terms is {text!r}; expected every term once.")
    return terms, {}


def _with_reserve(fit: Fit, prepared: Sequence[PreparedRun]) -> Fit:
    """The fit, with the memory that devices held beyond what they need: the median over runs that say it."""
    from dataclasses import replace
    from statistics import median

    shares = [
        prediction.run.memory_bytes / prediction.needed_bytes - 1
        for prediction in prepared
        if prediction.run.memory_bytes
    ]
    if not shares:
        return fit
    return replace(fit, calibration=replace(fit.calibration, reserve=round(max(0.0, median(shares)), 4)))


def _show_fit(
    arguments: Namespace,
    console: Console,
    start: Calibration,
    fit: Fit,
    prepared: Sequence[PreparedRun],
    left: dict[str, str],
) -> None:
    from phaze.json_documents import to_document

    runs = [prediction.run for prediction in prepared]
    memory = [
        (prediction.run.name, prediction.run.memory_bytes, prediction.needed_bytes * (1 + fit.calibration.reserve))
        for prediction in prepared
        if prediction.run.memory_bytes
    ]
    notes = [f"{term}: the runs say nothing about it; it keeps its start" for term in fit.unseen]
    notes += [f"{first} and {second}: the runs cannot separate them" for first, second in fit.inseparable]
    notes += [f"{term} keeps {getattr(start, term):.4g}: {reason}" for term, reason in left.items()]
    document = {
        "calibration": to_document(fit.calibration),
        "terms": list(fit.terms),
        "runs": [
            {"name": run.name, "seconds": run.seconds, "error": error}
            for run, error in zip(runs, fit.errors, strict=True)
        ],
        "memory": [{"name": name, "bytes": held, "error": predicted / held - 1} for name, held, predicted in memory],
        "mean_error": fit.mean_error,
        "start_errors": fit.start_errors,
        "unseen": list(fit.unseen),
        "inseparable": [list(pair) for pair in fit.inseparable],
        "left": left,
    }
    _finish(arguments, console, fit.calibration, document, [*_fit_tables(start, fit, runs, memory), *_warnings(notes)])


def _fit_tables(
    start: Calibration, fit: Fit, runs: Sequence[Run], memory: Sequence[tuple[str, float, float]]
) -> list[Any]:
    rows = [
        (run.name, f"{run.seconds:.4g} s", f"{run.seconds * (1 + error):.4g} s", f"{error:+.1%}")
        for run, error in zip(runs, fit.errors, strict=True)
    ]
    terms = [
        (
            term,
            f"{getattr(start, term):.4g}",
            f"{getattr(fit.calibration, term):.4g}",
            f"{fit.slopes[term]:+.2f} %",
            f"{fit.start_errors[term]:.1%}",
        )
        for term in fit.terms
    ]
    headings = ("term", ">start", ">fitted", ">step per 1 % of it", ">error with its start")
    tables: list[Any] = [
        plain_table(("run", ">measured", ">predicted", ">error"), rows, title="measured steps"),
        plain_table(headings, terms, title="what was fitted"),
        f"mean error {fit.mean_error:.1%} over {len(runs)} runs, on the runs that it was fitted to",
    ]
    if memory:
        sizes = [
            (name, f"{held / 2**30:.1f} GiB", f"{predicted / 2**30:.1f} GiB", f"{predicted / held - 1:+.1%}")
            for name, held, predicted in memory
        ]
        title = f"memory, {fit.calibration.reserve:.1%} of it held in reserve"
        tables.append(plain_table(("run", ">measured", ">predicted", ">error"), sizes, title=title))
    return tables


def _warnings(notes: Sequence[str]) -> list[str]:
    return [f"warning: {note}" for note in notes]


def _from_trace(arguments: Namespace, console: Console) -> int:
    from phaze.calibration_fitting import Run, fit_trace, prepare_run, read_trace
    from phaze.installed import installed_plugins
    from phaze.json_documents import to_document

    for name in ("model", "cluster", "global_batch"):
        if getattr(arguments, name) is None:
            raise QuestionError(
                f"--trace needs --{name.replace('_', '-')}: the model, chip and batch that were traced."
            )
    traced = Run(
        name=arguments.trace,
        model=arguments.model,
        cluster=arguments.cluster,
        global_batch_size=arguments.global_batch,
        strategy={"dp": 1, "micro_batch_size": arguments.global_batch},
        seconds=1.0,
        precision=arguments.precision,
        sequence_length=arguments.sequence_length,
    )
    trace = read_trace(arguments.trace)
    plugins = installed_plugins()
    start = _start([traced], arguments.stack or "eager", "traced", plugins)
    prepared = prepare_run(traced, start.stack, plugins)
    fit = fit_trace(
        trace,
        prepared.passes(),
        start,
        name=f"traced in {arguments.trace}",
        update_bytes_s=prepared.update_bytes_s,
    )
    rows = [
        (kind, f"{measured:.4g} s", f"{predicted:.4g} s", f"{predicted / measured - 1:+.1%}" if measured else "")
        for kind, (measured, predicted) in fit.residuals.items()
    ]
    calibration = fit.calibration
    terms = ("matrix", "vector", "memory", "overhead_s")
    document = {
        "calibration": to_document(calibration),
        "terms": list(terms),
        "residuals": {kind: list(pair) for kind, pair in fit.residuals.items()},
        "steps": trace.steps,
        "kernels": trace.kernels,
        "unseen": list(fit.unseen),
    }
    texts: list[Any] = [
        plain_table(("class", ">traced", ">predicted", ">residual"), rows, title=f"{trace.kernels} kernels a step"),
        plain_table(("term", ">value"), [(term, f"{getattr(calibration, term):.4g}") for term in terms]),
    ]
    texts += [
        f"warning: {term}: the device hardly waits, so the trace does not show it; it keeps its start"
        for term in fit.unseen
    ]
    full = [term for term in ("matrix", "memory") if getattr(calibration, term) >= 1.0]
    texts += [
        f"warning: {term} is at its limit of 1: the machine is faster than the chip's description" for term in full
    ]
    _finish(arguments, console, calibration, document, texts)
    return ExitCode.FINE


def _finish(
    arguments: Namespace, console: Console, calibration: Calibration, document: dict[str, Any], texts: list[Any]
) -> None:
    from phaze.cost import save_calibration

    if arguments.out is not None:
        save_calibration(
            arguments.out, calibration, report={key: document[key] for key in document if key != "calibration"}
        )
        texts.append(f"written to {arguments.out}")
    show(console, arguments, document, *texts)


calibrate_chip = Command(
    name="calibrate",
    group=CommandGroup.HARDWARE,
    summary="fit a chip's prices to measured steps or to a profiled one",
    configure=configure,
    run=run,
)
