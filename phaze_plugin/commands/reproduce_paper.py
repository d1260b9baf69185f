"""`phaze reproduce`: the paper's experiments, for its nine models or some of them, on both readings of its network."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from phaze.commands.command import (
    Command,
    CommandGroup,
    ExitCode,
    add_json_option,
    plain_table,
    positive_integer,
    show,
)
from phaze.commands.question_arguments import numbers
from phaze.commands.search_designs import words

if TYPE_CHECKING:
    from collections.abc import Callable

    from phaze.explore.experiment_rows import ModelExperiment
    from phaze.explore.paper_experiments import OneChip
    from phaze.explore.search_question import SearchOptions

__all__ = ["reproduce_paper"]

_FORMAT = "phaze-experiments"
_VERSION = 1

_SHOWN_EVALUATIONS = (1, 10, 20, 50, 100)
"""After how many evaluations the page tells how far a method is."""


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help="some of the paper's nine models (default all)")
    parser.add_argument(
        "--network",
        type=words,
        default=("paper", "paper-artifact"),
        metavar="NAME,NAME",
        help="networks (default paper,paper-artifact: 4 GiB/s as written, and per millisecond as its artifact ran)",
    )
    parser.add_argument(
        "--method",
        type=words,
        default=("spotlight", "spotlight-delay", "tpe", "random"),
        metavar="NAME,NAME",
        help="baselines (default spotlight,spotlight-delay,tpe,random; none for none)",
    )
    parser.add_argument(
        "--one-chip",
        type=words,
        default=(),
        metavar="NAME,NAME",
        help="one chip for all models as well, by the average of their ratios, the worst, or both: average,worst",
    )
    parser.add_argument(
        "--seeds", type=positive_integer, default=10, metavar="N", help="runs of each baseline (default 10)"
    )
    parser.add_argument(
        "--evaluations", type=positive_integer, default=100, metavar="N", help="designs of each run (default 100)"
    )
    parser.add_argument("--devices", type=positive_integer, default=1024, metavar="N", help="(default 1024)")
    parser.add_argument("--global-batch", type=positive_integer, default=4096, metavar="N", help="(default 4096)")
    parser.add_argument("--space", default="paper", metavar="NAME", help="as for `phaze search` (default paper)")
    parser.add_argument(
        "--hbm", type=numbers, default=(32, 64, 80), metavar="N,N", help="memories to try, in GiB (default 32,64,80)"
    )
    parser.add_argument(
        "--gap",
        type=float,
        default=0.01,
        metavar="PART",
        help="end when the answer is proven to be this near to the best (default 0.01)",
    )
    parser.add_argument("--executor", default="serial", metavar="NAME", help="of the baselines (default serial)")
    parser.add_argument("--out", metavar="FILE", help="keep every finished row there as JSON, and go on from it")
    parser.add_argument("--journals", metavar="FOLDER", help="keep a journal of each exact search, for `phaze verify`")
    parser.add_argument("--csv", metavar="FILE", help="save a line for each contender and baseline")
    parser.add_argument("--convergence", metavar="FILE", help="save the best after each evaluation as CSV")
    parser.add_argument("--html", metavar="FILE", help="save a page")
    add_json_option(parser)
    parser.add_argument("--one-chip-csv", metavar="FILE", help="save a line for each model on the chip of all")
    parser.epilog = "One chip for other models: phaze search MODEL MODEL .. --devices 1024 [--combine worst]."


def run(arguments: Namespace, console: Console) -> int:
    """Run what is missing, print the tables and save them."""
    from phaze.explore.experiment_rows import FOUR_WAY_HEADINGS, METHOD_HEADINGS, network_notes
    from phaze.explore.paper_experiments import ONE_CHIP_HEADINGS
    from phaze.json_documents import to_document

    _check_arguments(arguments)
    kept = _Kept(arguments)
    rows, chips = _all_rows(arguments, kept), _all_chips(arguments, kept)
    methods = [cells for row in rows for cells in row.baseline_rows() if row.baselines]
    tables = [plain_table(FOUR_WAY_HEADINGS, [row.four_way() for row in rows])]
    if methods:
        tables.append(plain_table(METHOD_HEADINGS, methods))
    if chips:
        tables.append(plain_table(ONE_CHIP_HEADINGS, [cells for chip in chips for cells in chip.cells(rows)]))
    texts = list(_saved(arguments, rows, chips))
    document = {"format": _FORMAT, "version": _VERSION, "rows": to_document(rows), "one_chip": to_document(chips)}
    show(console, arguments, document, *tables, *network_notes(rows), *texts)
    return ExitCode.FINE


def _check_arguments(arguments: Namespace) -> None:
    """Raise QuestionError for unknown models and methods, and what cannot be saved, before hours of work."""
    from phaze.errors import QuestionError
    from phaze.explore.paper_experiments import EXPERT_STRATEGIES
    from phaze.explore.sampled_search import SAMPLED_METHODS
    from phaze.explore.search_question import COMBINATIONS
    from phaze.file_access import check_writable

    known: dict[str, tuple[list[str], list[str]]] = {
        "MODEL": (arguments.models, list(EXPERT_STRATEGIES)),
        "--method": ([] if arguments.method == ("none",) else arguments.method, list(SAMPLED_METHODS)),
        "--one-chip": (arguments.one_chip, list(COMBINATIONS)),
    }
    for name, (given, possible) in known.items():
        for value in given:
            if value not in possible:
                raise QuestionError(f"{name} has {value!r}; expected some of {', '.join(possible)}.")
    for path in (getattr(arguments, name) for name in ("out", "csv", "convergence", "html", "one_chip_csv")):
        if path is not None:
            check_writable(path)
    if arguments.journals is not None and not Path(arguments.journals).is_dir():
        raise QuestionError(f"--journals is {arguments.journals!r}; expected a folder that exists.")


def _settings(arguments: Namespace) -> dict[str, Any]:
    """What all rows of a file share; rows of other settings are not mixed with them."""
    names = ("method", "seeds", "evaluations", "devices", "global_batch", "space", "hbm", "gap")
    settings: dict[str, Any] = json.loads(json.dumps({name: getattr(arguments, name) for name in names}))
    return settings


class _Kept:
    """What the file of experiments has; everything that is added is kept there at once."""

    def __init__(self, arguments: Namespace) -> None:
        """Read the file; raises FormatError if it has rows of other settings."""
        from phaze.explore.experiment_rows import ModelExperiment
        from phaze.explore.paper_experiments import OneChip
        from phaze.json_documents import from_document

        self._arguments = arguments
        document = _kept_document(arguments)
        rows = [from_document(ModelExperiment, row, arguments.out) for row in document.get("rows", ())]
        chips = [from_document(OneChip, row, arguments.out) for row in document.get("one_chip", ())]
        self.rows = {(row.network, row.model): row for row in rows}
        self.chips = {(chip.network, chip.combine, tuple(row.model for row in chip.models)): chip for chip in chips}

    def save(self) -> None:
        """Write the file anew, if there is one."""
        from phaze.file_access import write_whole
        from phaze.json_documents import to_document

        if self._arguments.out is not None:
            document = {
                "format": _FORMAT,
                "version": _VERSION,
                "settings": _settings(self._arguments),
                "rows": to_document(list(self.rows.values())),
                "one_chip": to_document(list(self.chips.values())),
            }
            write_whole(self._arguments.out, json.dumps(document, indent=1))


def _kept_document(arguments: Namespace) -> dict[str, Any]:
    """The document of the file; raises FormatError if it is of other settings."""
    from phaze.errors import FormatError
    from phaze.file_access import read_document

    if arguments.out is None or not Path(arguments.out).exists() or not Path(arguments.out).stat().st_size:
        return {}
    document = read_document(arguments.out, "a file of experiments")
    if not isinstance(document, dict) or document.get("format") != _FORMAT or document.get("version") != _VERSION:
        raise FormatError(f"{arguments.out} is no file of experiments; name another one with --out.")
    if document.get("settings") != _settings(arguments):
        raise FormatError(f"{arguments.out} has rows of other settings; give the same options, or another --out.")
    return document


def _told(arguments: Namespace, text: str) -> None:
    """Say what is being done, where nobody reads JSON."""
    if not arguments.json:
        sys.stderr.write(f"{text}\n")


def _search_options(arguments: Namespace) -> SearchOptions:
    """How the space is searched, as `phaze.search` takes it."""
    return {
        "devices": arguments.devices,
        "global_batch_size": arguments.global_batch,
        "space": arguments.space,
        "hbm_gib": arguments.hbm,
        "gap": arguments.gap,
    }


def _all_rows(arguments: Namespace, kept: _Kept) -> list[ModelExperiment]:
    """The rows of all models and networks: those that the file has, and the others run now."""
    from phaze.explore.executors import open_workers
    from phaze.explore.paper_experiments import EXPERT_STRATEGIES, ExperimentSettings, run_experiment
    from phaze.explore.sampled_search import SearchMethod

    wanted = [(network, model) for network in arguments.network for model in arguments.models or EXPERT_STRATEGIES]
    settings = ExperimentSettings(
        methods=tuple(SearchMethod(method) for method in arguments.method if method != "none"),
        seeds=arguments.seeds,
        evaluations=arguments.evaluations,
        options=_search_options(arguments),
        journals=None if arguments.journals is None else Path(arguments.journals),
    )
    with open_workers(arguments.executor) as workers:
        for network, model in wanted:
            if (network, model) not in kept.rows:

                def report(doing: str, about: str = f"{model} on {network}") -> None:
                    _told(arguments, f"{about}: {doing}")

                experts = EXPERT_STRATEGIES[model]
                kept.rows[network, model] = run_experiment(
                    model, experts, network, settings, workers=workers, report=report
                )
                kept.save()
    return [kept.rows[key] for key in wanted]


def _all_chips(arguments: Namespace, kept: _Kept) -> list[OneChip]:
    """One chip for all models on each network, in each way that was asked for."""
    from phaze.explore.paper_experiments import EXPERT_STRATEGIES, run_one_chip

    models = tuple(arguments.models or EXPERT_STRATEGIES)
    wanted = [(network, combine, models) for network in arguments.network for combine in arguments.one_chip]
    for network, combine, _ in wanted:
        if (network, combine, models) not in kept.chips:
            _told(arguments, f"one chip for {len(models)} models on {network}, by the {combine} of their ratios")
            kept.chips[network, combine, models] = run_one_chip(models, network, combine, _search_options(arguments))
            kept.save()
    return [kept.chips[key] for key in wanted]


def _saved(arguments: Namespace, rows: list[ModelExperiment], chips: list[OneChip]) -> list[str]:
    """Save the tables, and say where."""
    from phaze.explore.experiment_rows import convergence_csv, experiments_csv
    from phaze.explore.paper_experiments import one_chip_csv
    from phaze.file_access import write_whole

    texts = []
    contents: dict[str, Callable[[], str]] = {
        "csv": lambda: experiments_csv(rows),
        "convergence": lambda: convergence_csv(rows),
        "one_chip_csv": lambda: one_chip_csv(chips),
        "html": lambda: _page(rows, chips),
    }
    for name, content in contents.items():
        path = getattr(arguments, name)
        if path is not None:
            write_whole(path, content())
            texts.append(f"saved to {path}")
    return texts


def _page(rows: list[ModelExperiment], chips: list[OneChip]) -> str:
    from phaze.explore.experiment_rows import FOUR_WAY_HEADINGS, METHOD_HEADINGS, network_notes
    from phaze.explore.paper_experiments import ONE_CHIP_HEADINGS
    from phaze.report.search_pages import experiments_page

    convergence = [
        [row.model, row.network, drawn.method, *(_part(drawn.convergence, count) for count in _SHOWN_EVALUATIONS)]
        for row in rows
        for drawn in row.baselines
    ]
    return experiments_page(
        (FOUR_WAY_HEADINGS, [row.four_way() for row in rows]),
        (METHOD_HEADINGS, [cells for row in rows for cells in row.baseline_rows()]),
        (("model", "network", "method", *(f">{count}" for count in _SHOWN_EVALUATIONS)), convergence),
        (ONE_CHIP_HEADINGS, [cells for chip in chips for cells in chip.cells(rows)]),
        network_notes(rows),
    )


def _part(convergence: tuple[float, ...], count: int) -> str:
    """The best after so many evaluations as a part of the last; empty beyond it."""
    if count > len(convergence) or not convergence[-1]:
        return ""
    return f"{convergence[count - 1] / convergence[-1]:.1%}"


reproduce_paper = Command(
    name="reproduce",
    group=CommandGroup.PLANS,
    summary="run the paper's experiments: chip, placement, both, and baselines",
    configure=configure,
    run=run,
)
