"""Import an HLO or StableHLO file: find the module, have it parsed in the parser's process, build its graph."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phaze.errors import FormatError, ImportModelError
from phaze.file_reading import read_bytes
from phaze.frontends.hlo.dumps import Form, find_dumps, find_form
from phaze.frontends.hlo.parser_client import Parser, shared_parser
from phaze.frontends.stablehlo.argument_roles import infer_roles, read_selectors
from phaze.frontends.stablehlo.batch_factors import follow_batch
from phaze.frontends.stablehlo.module import Module
from phaze.frontends.stablehlo.training_graph import argument_names, build_graph
from phaze.ir import Graph

__all__ = ["ModuleBytes", "import_bytes", "import_file"]

TIME_LIMIT_S = 120.0
"""How long parsing may take by default: a large dump takes seconds, and a parser that hangs would take forever."""

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
    return import_bytes(_read(model), options, shared_parser())


def import_bytes(source: ModuleBytes, options: Mapping[str, object], parser: Parser) -> Graph:
    """The graph of a module, parsed by this parser."""
    limit = options.get("time_limit_s") or TIME_LIMIT_S
    if not isinstance(limit, int | float) or isinstance(limit, bool) or limit <= 0:
        raise ImportModelError(f"time_limit_s is {limit!r}; expected a positive number of seconds.")
    document = parser.parse(source.data, source.form, time_limit_s=float(limit), name=source.name)
    try:
        module = Module.from_document(document)
        graph = _graph(module, options, is_shuffled=source.form in (Form.HLO_TEXT, Form.HLO_PROTO))
    except RecursionError:
        raise FormatError(f"{source.name} is nested too deeply to be understood.") from None
    notes = (f"imported from {source.form}", *source.notes, *graph.notes)
    graph = replace(graph, notes=notes)
    size = options.get("micro_batch_size")
    return graph if size is None else graph.with_micro_batch(size)  # type: ignore[arg-type]


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


def _read(model: object) -> ModuleBytes:
    if isinstance(model, bytes):
        return _with_form(model, "the module")
    if not isinstance(model, str | os.PathLike):
        raise ImportModelError(f"an object of type {type(model).__name__} is no HLO file; pass a path or bytes.")
    path = Path(model)
    return _from_folder(path) if path.is_dir() else _from_file(path)


def _from_file(path: Path) -> ModuleBytes:
    return _with_form(read_bytes(path, "an HLO module"), str(path))


def _from_folder(path: Path) -> ModuleBytes:
    dumps = find_dumps(path)
    if not dumps:
        raise FormatError(
            f"the folder {str(path)!r} holds no dump of XLA or JAX; expected files such as "
            "module_0000.jit_step.before_optimizations.txt (--xla_dump_to with --xla_dump_hlo_as_text) or *.mlir."
        )
    source = _from_file(dumps[0].path)
    note = f"took {dumps[0].path.name}"
    if len(dumps) > 1:
        note += f", the largest of {len(dumps)} modules; pass a file to take another"
    return replace(source, notes=(note,))


def _with_form(data: bytes, name: str) -> ModuleBytes:
    form = find_form(data, name)
    if form is None:
        raise FormatError(
            f"{name} is no HLO: it is neither StableHLO (text or bytecode) nor HLO (text or proto); it begins with "
            f"{data[:SHOWN_BYTES]!r}."
        )
    notes = ("after optimizations: fusions are walked, layouts ignored",) if "after_optimizations" in name else ()
    return ModuleBytes(data, name, form, notes)
