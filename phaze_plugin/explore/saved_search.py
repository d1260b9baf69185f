"""Searches that were saved: as a document, or as a journal.

A journal holds every task of a search with its result, so that the search is run again without computing anything; only
the models are needed, to ask the same question.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phaze.errors import FormatError, shown
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.design_search import run_search
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal, read_header
from phaze.explore.objectives import Metric
from phaze.explore.search_question import question_from_header
from phaze.explore.search_result import FORMAT, VERSION, SearchResult
from phaze.file_access import read_document
from phaze.installed import installed_plugins
from phaze.json_documents import from_document, without_digest
from phaze.planner.progress import TimeLimitError

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["is_saved_search", "read_search", "result_of_journal", "search_from_document"]

_HEAD_CHARACTERS = 200
"""How much of a file is read to see whether it is a saved search: enough for the format's name, which is first."""


def is_saved_search(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a saved search does."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return f'"{FORMAT}"' in file.read(_HEAD_CHARACTERS)
    except (OSError, UnicodeDecodeError):
        return False


def read_search(path: str | os.PathLike[str]) -> SearchResult:
    """The result that `SearchResult.save` wrote; raises FormatError as `search_from_document` does."""
    return search_from_document(read_document(path, "a saved search"), os.fspath(path))


def search_from_document(document: object, where: str = "search") -> SearchResult:
    """The result of a document; its table of explored accelerators has the evaluated ones only.

    Raises FormatError for a damaged document, one of another version, or one whose parts cannot be those of a search.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(f"{where} is not a saved search: its format is not {FORMAT!r}.")
    if document.get("version") != VERSION:
        raise FormatError(
            f"{where} has version {shown(document.get('version'))}; this program reads version {VERSION}. Search "
            "again, or give the journal of the search."
        )
    document = without_digest(document, where)
    body = {name: value for name, value in document.items() if name not in ("format", "version")}
    result = from_document(SearchResult, body, where)
    if result.objective not in (*Metric, "ratio"):
        raise FormatError(f"{where}.objective is {result.objective!r}; the file is damaged.")
    values = [result.best.value, result.certificate.value, *(row.step_time_s for row in result.best.models)]
    if min(values) <= 0:
        raise FormatError(f"{where} has a value or a step of {min(values)}; the file is damaged.")
    return result


@dataclass(slots=True, eq=False)
class _FinishedJournal(Journal):
    """A journal that is only read: what it lacks ends the search that asks for it."""

    def add(self, task: str, cutoff_s: float, result: Mapping[str, object]) -> None:
        """Nothing is added to a journal that is only looked at."""
        raise TimeLimitError


def result_of_journal(
    path: str | os.PathLike[str],
    models: Sequence[object] | None = None,
    *,
    plugins: PluginManager | None = None,
) -> SearchResult:
    """The result of a search from its journal; `models` are found by the names in it where none are given.

    Where the search was not finished, the result is the best so far. Raises FormatError for a damaged journal, and what
    reading the models raises.
    """
    started_s, header = time.monotonic(), read_header(path)
    names = header.get("models")
    if models is None and isinstance(names, Mapping):
        models = list(names)
    question = question_from_header(header, models, None, plugins=plugins or installed_plugins())
    journal = _FinishedJournal(Journal.load(path).records)
    return run_search(BestFirstSearch(question=question, workers=Workers(), journal=journal), started_s)
