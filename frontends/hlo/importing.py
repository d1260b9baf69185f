"""Import an HLO or StableHLO file: find the module, have it parsed in the parser's process, build its graph."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phaze.errors import FormatError, ImportModelError
from phaze.file_access import read_bytes
from phaze.frontends.hlo.dumps import Form, find_dumps, find_form
from phaze.frontends.hlo.parser_client import Parser, shared_parser
from phaze.frontends.stablehlo.argument_roles import infer_roles, read_selectors
from phaze.frontends.stablehlo.batch_and_expert_dims import follow_batch
from phaze.frontends.stablehlo.module import Module, product_flops
from phaze.frontends.stablehlo.training_graph import argument_names, build_graph
from phaze.ir import Graph

__all__ = ["ModuleBytes", "import_bytes", "import_file"]

TIME_LIMIT_S = 120.0
"""How long parsing may take by default: a large dump takes seconds, and a parser that hangs would take forever."""

MOST_COMPARED = 16
"""The most files of a folder of dumps that are read to find the one with the most flops: the largest ones."""

MOST_LISTED = 12
"""The most modules that a message lists."""

SHOWN_BYTES = 24
"""How many bytes of a file that is no module its message shows."""


@dataclass(frozen=True, slots=True)
class ModuleBytes:
    """The bytes of a module, what messages call them, their form, and notes of how they were found."""

    data: bytes
    name: str
    form: Form
    notes: tuple[str, ...] = ()


def import_file(model: object, inputs: object, options: Mapping[str, object]) -> Graph:
    """The graph of a file, of bytes, or of the module in a folder of dumps."""
    if inputs is not None:
        raise ImportModelError("an HLO module has its own inputs; pass it without any.")
    return _import(_read(model), options, shared_parser())


def import_bytes(source: ModuleBytes, options: Mapping[str, object], parser: Parser) -> Graph:
    """The graph of a module, parsed by this parser."""
    return _import((source,), options, parser)


def _import(sources: Sequence[ModuleBytes], options: Mapping[str, object], parser: Parser) -> Graph:
    """The graph of the module that the options name, else of the one with the most flops in products."""
    limit = options.get("time_limit_s") or TIME_LIMIT_S
    if not isinstance(limit, int | float) or isinstance(limit, bool) or limit <= 0:
        raise ImportModelError(f"time_limit_s is {limit!r}; expected a positive number of seconds.")
    candidates = [
        _FoundModule(source, Module.from_document(document))
        for source in sources
        for document in parser.parse(source.data, source.form, time_limit_s=float(limit), name=source.name)
    ]
    source, module = _chosen(candidates, options.get("module"))
    try:
        graph = _graph(module, options, is_shuffled=source.form in (Form.HLO_TEXT, Form.HLO_PROTO))
    except RecursionError:
        raise FormatError(f"{source.name} is nested too deeply to be understood.") from None
    graph = replace(graph, notes=(f"imported from {source.form}", *source.notes, *graph.notes))
    size = options.get("micro_batch_size")
    return graph if size is None else graph.with_micro_batch(size)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _FoundModule:
    """A module and the bytes that it was read from."""

    source: ModuleBytes
    module: Module

    @property
    def names(self) -> tuple[str, ...]:
        """What a caller may call it: the name of its file, with and without suffixes, and its own."""
        file = Path(self.source.name).name
        return (self.module.name, self.module.name.removeprefix("jit_"), file, file.partition(".")[0])


def _chosen(candidates: Sequence[_FoundModule], wanted: object) -> tuple[ModuleBytes, Module]:
    """The module of a name, else the one with the most flops in products, with a note where there are others."""
    if wanted is not None:
        named = [candidate for candidate in candidates if str(wanted) in candidate.names]
        if not named:
            listed = ", ".join(dict.fromkeys(candidate.module.name for candidate in candidates[:MOST_LISTED]))
            raise ImportModelError(
                f"there is no module {str(wanted)!r}; the {len(candidates)} modules here are {listed}."
            )
        return named[0].source, named[0].module
    if len(candidates) == 1:
        return candidates[0].source, candidates[0].module
    flops = [product_flops(candidate.module) for candidate in candidates]
    best = candidates[flops.index(max(flops))]
    note = (
        f"took the module {best.module.name} of {Path(best.source.name).name}, which has the most flops in products "
        f"({max(flops):.3g}) of {len(candidates)} modules; pass module= (--module NAME) to take another"
    )
    return replace(best.source, notes=(*best.source.notes, note)), best.module


def _graph(module: Module, options: Mapping[str, object], *, is_shuffled: bool) -> Graph:
    module = _with_options(module, options)
    names = argument_names(module)
    parameters, batch = read_selectors(options, "parameters"), read_selectors(options, "batch")
    loss = read_selectors(options, "loss")
    graph = build_graph(
        module,
        names,
        lambda run: infer_roles(run, names, parameters, batch, None if not loss else loss[0]),
        name=module.name.removeprefix("jit_"),
        is_shuffled=is_shuffled,
    )
    return follow_batch(graph)


def _with_options(module: Module, options: Mapping[str, object]) -> Module:
    """The module with the entry and the trips of loops that were asked for."""
    entry, trips = options.get("entry"), options.get("trips")
    if entry is not None:
        module = replace(module, entry=str(entry))
    if trips is None:
        return module
    if isinstance(trips, bool) or not isinstance(trips, int) or trips < 1:
        raise ImportModelError(f"trips is {trips!r}; expected a positive number of trips.")
    return replace(module, assumed_trips=trips)


def _read(model: object) -> tuple[ModuleBytes, ...]:
    if isinstance(model, bytes):
        return (_with_form(model, "the module"),)
    if not isinstance(model, str | os.PathLike):
        raise ImportModelError(f"an object of type {type(model).__name__} is no HLO file; pass a path or bytes.")
    path = Path(model)
    return _from_folder(path) if path.is_dir() else (_from_file(path),)


def _from_file(path: Path) -> ModuleBytes:
    return _with_form(read_bytes(path, "an HLO module", unpacks=True), str(path))


def _from_folder(path: Path) -> tuple[ModuleBytes, ...]:
    dumps = find_dumps(path)
    if not dumps:
        raise FormatError(
            f"the folder {str(path)!r} holds no dump of XLA or JAX; expected files such as "
            "module_0000.jit_step.before_optimizations.txt (--xla_dump_to with --xla_dump_hlo_as_text) or *.mlir."
        )
    sources = []
    for dump in dumps[:MOST_COMPARED]:
        source = _from_file(dump.path)
        if len(dumps) > MOST_COMPARED:
            note = f"of {len(dumps)} files of the folder the {MOST_COMPARED} largest were compared"
            source = replace(source, notes=(*source.notes, note))
        sources.append(source)
    return tuple(sources)


def _with_form(data: bytes, name: str) -> ModuleBytes:
    form = find_form(data, name)
    if form is None:
        raise FormatError(
            f"{name} is no HLO: it is neither StableHLO (text or bytecode) nor HLO (text or proto); it begins with "
            f"{data[:SHOWN_BYTES]!r}."
        )
    notes = ("after optimizations: fusions are walked, layouts ignored",) if "after_optimizations" in name else ()
    return ModuleBytes(data, name, form, notes)
