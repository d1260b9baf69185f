"""Where the tasks of a search run: in this process, in local processes, on Dask, or on any concurrent.futures.Executor.

Tasks are functions of values, so it does not matter who runs them or how often. Local processes that die are replaced
and what they had not finished is run again; a Dask scheduler does the same for its workers.
"""

from __future__ import annotations

import ipaddress
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TypeVar

from phaze.errors import PlanError, QuestionError, shown
from phaze.planner.progress import TimeLimitError

__all__ = ["Workers", "open_workers"]

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_MOST_REPLACEMENTS = 3
_REPLACEMENTS_WITHIN_S = 3600.0
"""How often processes that died are replaced within an hour. A few may be killed by chance, in a search of days more of
them; that many in an hour die of what they compute."""

_DASK_TIMEOUT_S = 5
"""How long a Dask scheduler may take to answer before it counts as absent."""

_DASK = "dask://"
_PROCESSES = "processes"


@dataclass(slots=True, kw_only=True, eq=False)
class Workers:
    """Runs lists of tasks.

    Attributes:
        executor: where they run; None for this process.
        renew: makes another executor for one whose processes died; None where the executor is the caller's.
        replaced_at_s: when that was done, on the clock of `time.monotonic`.
        ends_at_s: when nothing more is waited for, on the same clock; None for never. Tasks of this process end first.
    """

    executor: Executor | None = None
    renew: Callable[[], Executor] | None = None
    replaced_at_s: list[float] = field(default_factory=list)
    ends_at_s: float | None = None

    def run(
        self,
        function: Callable[[_Task], _Result],
        tasks: Sequence[_Task],
        done: Callable[[int, _Result], object] = lambda index, result: None,
    ) -> list[_Result]:
        """The results in the order of the tasks; `done` is called with each result as it comes, in any order.

        Raises PlanError if processes keep dying, and TimeLimitError when the time is over.
        """
        results: dict[int, _Result] = {}
        if self.executor is None:
            for index, task in enumerate(tasks):
                results[index] = function(task)
                done(index, results[index])
        while len(results) < len(tasks):
            self._run_missing(function, tasks, results, done)
        return [results[index] for index in range(len(tasks))]

    def _run_missing(
        self,
        function: Callable[[_Task], _Result],
        tasks: Sequence[_Task],
        results: dict[int, _Result],
        done: Callable[[int, _Result], object],
    ) -> None:
        """Run the tasks without a result, until all have one or a process died."""
        assert self.executor is not None
        waiting: dict[Future[_Result], int] = {}
        try:
            for index, task in enumerate(tasks):
                if index not in results:
                    waiting[self.executor.submit(function, task)] = index
            for future in self._completed(waiting):
                index = waiting[future]
                results[index] = future.result()
                done(index, results[index])
        except BrokenExecutor as error:
            self._replace(error)
        except BaseException:
            for future in waiting:
                future.cancel()
            raise

    def _completed(self, waiting: Iterable[Future[_Result]]) -> Iterator[Future[_Result]]:
        """The futures as they are done; raises TimeLimitError when the time is over."""
        timeout_s = None if self.ends_at_s is None else max(0.0, self.ends_at_s - time.monotonic())
        futures = as_completed(waiting, timeout_s)
        while True:
            try:
                future = next(futures)
            except StopIteration:
                return
            except TimeoutError:
                raise TimeLimitError from None
            yield future

    def _replace(self, error: BrokenExecutor) -> None:
        now_s = time.monotonic()
        self.replaced_at_s.append(now_s)
        lately = sum(now_s - died_at_s < _REPLACEMENTS_WITHIN_S for died_at_s in self.replaced_at_s)
        if self.renew is None or lately > _MOST_REPLACEMENTS:
            raise PlanError(
                f"the processes that evaluate accelerators keep dying ({error}), {lately} times within an hour; there "
                "may be too little memory for so many of them: use fewer, such as executor='processes:1'. A journal "
                "keeps the tasks that were finished."
            ) from error
        assert self.executor is not None
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.executor = self.renew()


class _ScriptlessProcess(SpawnProcess):
    """A fresh interpreter (forking a process that has threads may lock up) that does not know the caller's script.

    Python would run the script again in each: one that calls `search` at its top would never get anywhere, and others
    would load their models once a process. No task needs anything of it.
    """

    def start(self) -> None:
        """Start while the main module is one without a file."""
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = script


class _ScriptlessContext(SpawnContext):
    """Makes processes without the caller's script, and can end all that it made."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[_ScriptlessProcess] = []

    def Process(self, *arguments: Any, **options: Any) -> _ScriptlessProcess:  # type: ignore[override]  # noqa: N802
        """Make a process; pools call this by its name, which multiprocessing sets."""
        self._made.append(_ScriptlessProcess(*arguments, **options))
        return self._made[-1]

    def end(self) -> None:
        """End every process that still runs, as a search that is over waits for nobody."""
        for process in self._made:
            if process.is_alive():
                process.terminate()


@contextmanager
def open_workers(executor: Executor | str | None, *, trust_scheduler: bool = False) -> Iterator[Workers]:
    """Workers of an executor: one of concurrent.futures, "serial", "processes[:N]" (None), or "dask://HOST:PORT".

    A Dask scheduler can run any code here and on its workers, so that one on another machine must be trusted in words.
    Raises QuestionError for anything else, and PlanError where Dask or its scheduler is missing.
    """
    if isinstance(executor, Executor):
        yield Workers(executor=executor)
        return
    if executor == "serial":
        yield Workers()
        return
    if isinstance(executor, str) and executor.startswith(_DASK):
        if not trust_scheduler and not _is_on_this_machine(executor.removeprefix(_DASK)):
            raise QuestionError(
                f"executor is {shown(executor)}, a scheduler on another machine; whoever runs it can run any program "
                "here. If you trust it, pass trust_scheduler=True, or --trust-scheduler."
            )
        with _dask_workers(executor) as workers:
            yield workers
        return
    name, _, count = (_PROCESSES if executor is None else str(executor)).partition(":")
    if name != _PROCESSES or not (count == "" or (count.isascii() and count.isdigit() and int(count) > 0)):
        raise QuestionError(
            f"executor is {shown(executor)}; expected 'serial', 'processes', 'processes:4', 'dask://HOST:PORT' or a "
            "concurrent.futures.Executor."
        )
    processes, context = int(count or os.cpu_count() or 1), _ScriptlessContext()

    def renew() -> Executor:
        return ProcessPoolExecutor(processes, mp_context=context, initializer=end_with_parent)

    workers = Workers(executor=renew(), renew=renew)
    try:
        yield workers
    finally:
        assert workers.executor is not None
        workers.executor.shutdown(wait=False, cancel_futures=True)
        context.end()


def end_with_parent() -> None:
    """Make this process end as soon as the one that started it ends or is killed: nobody else would end it."""

    def watch(parent: BaseProcess) -> None:
        parent.join()
        os._exit(1)

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=watch, args=(parent,), daemon=True).start()


def _is_on_this_machine(address: str) -> bool:
    """Whether a scheduler's HOST:PORT is one of this machine's loopback addresses."""
    host = address.rsplit(":", 1)[0].strip("[]").casefold()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _dask_workers(address: str) -> Iterator[Workers]:
    try:
        from distributed import Client, KilledWorker
    except ImportError as error:
        raise PlanError("Dask is not installed: pip install 'phaze-plugin[dask]', here and on its workers.") from error
    try:
        client = Client(f"tcp://{address.removeprefix(_DASK)}", timeout=_DASK_TIMEOUT_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise PlanError(
            f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler` and workers with "
            "`dask worker`, and pass its address as dask://HOST:PORT."
        ) from error
    try:
        yield Workers(executor=client.get_executor(pure=False, retries=_MOST_REPLACEMENTS))
    except KilledWorker as error:
        raise PlanError(
            f"workers of {address} keep dying ({error}); give them more memory. A journal keeps the tasks that were "
            "finished."
        ) from error
    finally:
        client.close()
