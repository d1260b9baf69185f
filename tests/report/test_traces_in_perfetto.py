"""Traces of plans and of layers' schedules, read by Perfetto's own trace processor."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import started_browser
from perfetto import opened_trace, query
from plans import QUESTION, small_cluster, small_graph
from playwright.sync_api import Browser

import phaze
from phaze.cli import main

PIPELINE = {"dp": 2, "pp": 2, "tp": 2, "schedule": "interleaved-1f1b", "chunks": 2, "recompute": "full"}
SLICES = (
    "select process.pid as pid, thread.tid as tid, slice.name as name, slice.dur as dur from slice "
    "join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)"
)
LOSSES = "select name from stats where severity in ('error', 'data_loss') and value > 0"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as browser:
        yield browser


def check_that_perfetto_reads_all_of(path: Path, browser: Browser) -> int:
    """Every slice of the file is there under its lane, name and length in nanoseconds; how many there are."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    with opened_trace(browser, path) as page:
        rows = query(page, SLICES)
        assert query(page, LOSSES) == []
    assert Counter((pid, tid, name) for pid, tid, name, _ in rows) == Counter(
        (event["pid"], event["tid"], event["name"]) for event in events
    )
    assert sum(float(str(row[3])) for row in rows) == pytest.approx(
        sum(1e3 * event["dur"] for event in events), abs=len(events)
    )
    return len(rows)


def test_perfetto_finds_as_many_slices_of_a_plan_as_the_simulator_has_events(tmp_path: Path, browser: Browser) -> None:
    question = {**QUESTION, "tp": (2,)}
    plan = phaze.evaluate(small_graph(), cluster=small_cluster(), strategy=PIPELINE, compares=False, **question).plan
    plan.save(tmp_path / "plan.json")
    assert main(["report", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "trace.json")]) == 0
    assert check_that_perfetto_reads_all_of(tmp_path / "trace.json", browser) == len(plan.timeline().events)


def test_perfetto_finds_every_operator_of_a_layers_schedule(tmp_path: Path, browser: Browser) -> None:
    path = tmp_path / "trace.json"
    layer = ["--sequence-length", "128", "--layer", "transformer.h.0"]
    assert main(["schedule", "gpt2", "--chip", "tpuv4", *layer, "--trace", str(path)]) == 0
    assert check_that_perfetto_reads_all_of(path, browser) > 10
