"""`phaze calibrate`: from a few measured steps, or one profiled step, to a calibration that planning takes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, positive_integer, show
from phaze.errors import QuestionError, UnknownNameError

if TYPE_CHECKING:
    from phaze.cost import Calibration
    from phaze.fitting import Fit, PreparedRun, Run

__all__ = ["calibrate_chip"]

_STACKS = ("eager", "library", "perfect")


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--measured", metavar="FILE", help="CSV of steps: model, cluster, global_batch, seconds, ..")
    source.add_argument("--trace", metavar="FILE", help="Chrome trace of torch.profiler of a training step")
    parser.add_argument("--terms", metavar="NAME,NAME", help="what to fit to measured steps (default: what they show)")
    parser.add_argument("--stack", choices=_STACKS, help="what the framework fuses and hides (default: the chip's own)")
    parser.add_argument("--model", metavar="MODEL", help="of the trace: a known name, a config.json or a saved graph")
    parser.add_argument("--cluster", metavar="CHIP:1", help="of the trace (one device)")
    parser.add_argument("--global-batch", type=positive_integer, metavar="N", help="sequences in the traced step")
    parser.add_argument("--precision", default="bf16", metavar="NAME", help="of the trace (default bf16)")
    parser.add_argument("--sequence-length", type=positive_integer, metavar="N", help="of the trace")
    parser.add_argument("--out", metavar="FILE", help="write the calibration")
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Fit, print, write."""
    return _from_steps(arguments, console) if arguments.measured else _from_trace(arguments, console)


def _from_steps(arguments: Namespace, console: Console) -> int:
    import numpy as np

    from phaze.fitting import fit_terms, prepare, read_steps
    from phaze.hooks import PluginManager

    plugins = PluginManager.load()
    runs = read_steps(arguments.measured)
    start = _start(runs[0], arguments.stack, f"fitted to {arguments.measured}")
    prepared = [prepare(one, start.stack, plugins) for one in runs]
    terms = _terms(arguments.terms, prepared)
    fit = fit_terms(
        lambda calibrations: np.stack([one.seconds(calibrations) for one in prepared], axis=1),
        [one.seconds for one in runs],
        start,
        terms,
    )
    _show_fit(arguments, console, runs, fit)
    return ExitCode.FINE


def _start(first: Run, stack: str | None, name: str) -> Calibration:
    """The chip's own calibration, or round numbers where it has none."""
    from dataclasses import replace

    from phaze.cost import EAGER_STACK, LIBRARY_STACK, PERFECT_STACK, Calibration, calibration_of
    from phaze.hooks import PluginManager
    from phaze.planner.request import settled_cluster

    own = calibration_of(settled_cluster(first.cluster, PluginManager.load()).accelerator)
    if own.is_ideal:
        own = Calibration(
            matrix=0.7, memory=0.7, link=0.7, network=0.7, overhead_s=1e-5, overlap=0.5, stack=LIBRARY_STACK
        )
    stacks = {"eager": EAGER_STACK, "library": LIBRARY_STACK, "perfect": PERFECT_STACK, None: own.stack}
    return replace(own, name=name, stack=stacks[stack])


def _terms(text: str | None, prepared: Sequence[PreparedRun]) -> tuple[str, ...]:
    from phaze.cost.calibration import TERMS

    if text is not None:
        terms = tuple(part.strip() for part in text.split(","))
        for term in terms:
            if term not in TERMS:
                raise UnknownNameError("term of a calibration", term, TERMS)
        if len(set(terms)) < len(terms):
            raise QuestionError(f"--terms is {text!r}; expected every term once.")
        return terms
    terms = ("matrix", "memory")
    if any(one.degrees.width * one.degrees.pipelines * one.degrees.devices > 1 for one in prepared):
        terms = (*terms, "link")
    return (*terms, "overhead_s") if len(prepared) > len(terms) else terms


def _show_fit(arguments: Namespace, console: Console, runs: Sequence[Run], fit: Fit) -> None:
    from phaze.records import to_document

    rows = [
        (one.name, f"{one.seconds:.4g} s", f"{one.seconds * (1 + error):.4g} s", f"{error:+.1%}")
        for one, error in zip(runs, fit.errors, strict=True)
    ]
    terms = [
        (term, f"{getattr(fit.calibration, term):.4g}", f"{fit.slopes[term]:+.2f} % of the step per 1 % of it")
        for term in fit.terms
    ]
    notes = [f"{term}: the runs say nothing about it; it keeps its start" for term in fit.unseen]
    notes += [f"{one} and {other}: the runs cannot separate them" for one, other in fit.inseparable]
    document = {
        "calibration": to_document(fit.calibration),
        "terms": list(fit.terms),
        "runs": [
            {"name": one.name, "seconds": one.seconds, "error": error}
            for one, error in zip(runs, fit.errors, strict=True)
        ],
        "mean_error": fit.mean_error,
        "unseen": list(fit.unseen),
        "inseparable": [list(pair) for pair in fit.inseparable],
    }
    texts: list[Any] = [
        plain_table(("run", ">measured", ">predicted", ">error"), rows, title="measured steps"),
        plain_table(("term", ">value", "effect"), terms, title="what was fitted"),
        f"mean error {fit.mean_error:.1%} over {len(runs)} runs, on the runs that it was fitted to",
        *(f"warning: {note}" for note in notes),
    ]
    _finish(arguments, console, fit.calibration, document, texts)


def _from_trace(arguments: Namespace, console: Console) -> int:
    from phaze.fitting import Run, fit_trace, prepare, read_trace
    from phaze.hooks import PluginManager
    from phaze.records import to_document

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
    start = _start(traced, arguments.stack or "eager", "traced")
    prepared = prepare(traced, start.stack, PluginManager.load())
    found = fit_trace(
        trace,
        prepared.passes(),
        start,
        name=f"traced in {arguments.trace}",
        update_bytes_s=prepared.update_bytes_s,
    )
    rows = [
        (kind, f"{measured:.4g} s", f"{predicted:.4g} s", f"{predicted / measured - 1:+.1%}" if measured else "")
        for kind, (measured, predicted) in found.residuals.items()
    ]
    calibration = found.calibration
    terms = ("matrix", "vector", "memory", "overhead_s")
    document = {
        "calibration": to_document(calibration),
        "terms": list(terms),
        "residuals": {kind: list(pair) for kind, pair in found.residuals.items()},
        "steps": trace.steps,
        "kernels": trace.kernels,
        "unseen": list(found.unseen),
    }
    texts: list[Any] = [
        plain_table(("class", ">traced", ">predicted", ">residual"), rows, title=f"{trace.kernels} kernels a step"),
        plain_table(("term", ">value"), [(term, f"{getattr(calibration, term):.4g}") for term in terms]),
    ]
    texts += [
        f"warning: {term}: the device hardly waits, so the trace does not show it; it keeps its start"
        for term in found.unseen
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
