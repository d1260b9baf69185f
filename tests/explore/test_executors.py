"""The answer does not depend on where tasks run, nor on workers that die."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from designs import SMALL, some_points, tiny_model
from worker_functions import die, die_once, square

import phaze
from phaze.errors import PlanError, QuestionError
from phaze.explore import executors
from phaze.explore.design_search import _Watched
from phaze.explore.executors import Workers, open_workers
from phaze.explore.search_result import SearchProgress
from phaze.planner.progress import TimeLimitError

QUESTION: dict[str, Any] = {**SMALL, "micro_batch_size": (2,), "gap": 0.0}


def search_tiny(**options: Any) -> phaze.SearchResult:
    return phaze.search(tiny_model(), space=some_points(4), **{**QUESTION, **options})


def test_results_come_in_the_order_of_tasks_and_each_is_told_once() -> None:
    for executor in ("serial", ThreadPoolExecutor(2)):
        with open_workers(executor) as workers:
            told: dict[int, int] = {}
            assert workers.run(square, [3, 1, 2], told.__setitem__) == [9, 1, 4]
            assert told == {0: 9, 1: 1, 2: 4}


def test_a_process_that_dies_loses_no_task(tmp_path: Path) -> None:
    with open_workers("processes:2") as workers:
        tasks = [(value, str(tmp_path / "died")) for value in range(5)]
        assert workers.run(die_once, tasks) == list(range(5))
        assert workers.replaced_at_s


def search_in_processes(journal: str) -> None:
    """A search with workers of its own, to be killed."""
    phaze.search(tiny_model(), space=some_points(40), journal=journal, **{**QUESTION, "executor": "processes:2"})


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_script_may_search_at_its_top_and_is_not_run_again_by_its_workers(tmp_path: Path) -> None:
    tiny_model().save(tmp_path / "model.json")
    script = tmp_path / "script.py"
    script.write_text(
        "import phaze\n"
        "print('begun')\n"
        "space = phaze.space.grid(tensor_cores=1, tensor_rows=64, tensor_cols=64, vector_cores=1, buffer_mib=16)\n"
        f"result = phaze.search('model.json', space=space, executor='processes:1', **{QUESTION})\n"
        "print(result.best.name)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("begun\nt1x64x64-v1x64-b16m\n", "")


def test_workers_end_with_a_search_that_is_killed(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    search = multiprocessing.get_context("spawn").Process(target=search_in_processes, args=(str(journal),))
    search.start()
    assert search.pid is not None
    while search.is_alive() and not (journal.exists() and journal.read_bytes().count(b"\n") > 1):
        time.sleep(0.05)
    workers = children(search.pid)
    assert workers
    search.kill()
    search.join()
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        time.sleep(0.05)


def test_a_search_that_is_interrupted_waits_for_no_process() -> None:
    def interrupt(index: int, result: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_workers("processes:2") as workers:
        workers.run(time.sleep, [0.01, 600, 600], interrupt)
    # The pool waits for its processes in a thread of its own, so that one may have ended and not be counted yet.
    last_s = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < last_s:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []


def test_processes_that_keep_dying_are_an_error() -> None:
    with open_workers("processes:1") as workers, pytest.raises(PlanError, match="keep dying"):
        workers.run(die, [1])


def test_nothing_is_waited_for_when_the_time_is_over() -> None:
    released = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        workers = Workers(executor=pool, ends_at_s=time.monotonic() + 0.05)
        with pytest.raises(TimeLimitError):
            workers.run(lambda event: event.wait(60), [released])
        released.set()


def test_a_search_that_takes_longer_than_its_limit_says_why() -> None:
    def overtime(limit_s: float | None, late: list[tuple[float, str]]) -> str:
        return _Watched(Workers(), None, None, limit_s, time.monotonic() - 80.0, late).overtime()

    assert overtime(None, []) == overtime(100.0, []) == ""
    told = overtime(50.0, [(20.0, "evaluate/3/0")])
    assert "longer than the limit of 50 s: 20.0 s until evaluate/3/0 was done" in told
    assert "for the plans of the answer" in told
    assert "until" not in overtime(50.0, [])


class DeadPool(Executor):
    """A pool whose processes have died."""

    def submit(self, *_: object, **__: object) -> Future[Any]:  # type: ignore[override]
        """Tell so, as pools do."""
        raise BrokenExecutor("a process died")


def test_deaths_of_processes_are_counted_by_the_hour() -> None:
    def with_earlier_deaths(ago_s: float) -> Workers:
        died_at_s = [time.monotonic() - ago_s] * 3
        return Workers(executor=DeadPool(), renew=partial(ThreadPoolExecutor, 1), replaced_at_s=died_at_s)

    assert with_earlier_deaths(4000).run(square, [4]) == [16]
    with pytest.raises(PlanError, match="4 times within an hour"):
        with_earlier_deaths(1000).run(square, [4])


def test_a_search_is_the_same_in_one_process_in_threads_and_in_processes() -> None:
    first = search_tiny(executor="serial")
    for executor in (ThreadPoolExecutor(3), "processes:2"):
        again = search_tiny(executor=executor)
        assert again.best == first.best
        assert again.certificate == first.certificate
        assert again.explored == first.explored


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_answer_with_a_worker_killed_on_the_way() -> None:
    from distributed import LocalCluster

    first = search_tiny(executor="serial")
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        pids = [worker.pid for worker in cluster.workers.values()]
        killed: list[int] = []

        def kill_one(progress: SearchProgress) -> None:
            if not killed and progress.best is not None:
                killed.append(pids[0])
                os.kill(pids[0], signal.SIGKILL)

        address = cluster.scheduler_address.replace("tcp://", "dask://")
        again = search_tiny(executor=address, progress=kill_one)
        assert killed
    assert again.best == first.best
    assert again.certificate == first.certificate


@pytest.mark.parametrize("executor", ["threads", "processes:0", "processes:x", 3])
def test_an_executor_that_cannot_be_is_refused(executor: object) -> None:
    with pytest.raises(QuestionError, match="executor is"):
        search_tiny(executor=executor)


def test_a_scheduler_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_DASK_TIMEOUT_S", 0.2)
    with pytest.raises(PlanError, match="no Dask scheduler answers"), open_workers("dask://127.0.0.1:1"):
        pass


def test_workers_without_an_executor_run_in_this_process() -> None:
    assert Workers().run(square, [4]) == [16]
