"""`phaze report`: where the page is written, and what is said of files that are no plans."""

import json
from pathlib import Path

import pytest
from plans import small_plan

from phaze.cli import main


def test_the_page_lies_beside_the_plan_or_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_plan().save(tmp_path / "plan.json")
    assert main(["report", str(tmp_path / "plan.json")]) == 0
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(tmp_path / "plan.json"), "--out", str(tmp_path / "other.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("\n", 1)[1]) == {"written": str(tmp_path / "other.html")}
    assert (tmp_path / "other.html").read_text() == (tmp_path / "plan.html").read_text() == small_plan().to_html()


def test_the_page_is_opened_if_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    small_plan().save(tmp_path / "plan.json")
    assert main(["report", str(tmp_path / "plan.json"), "--open"]) == 0
    assert opened == [(tmp_path / "plan.html").as_uri()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a saved plan"),
        ('{"format": "other"}', "is not a saved plan"),
        ("PK\x03\x04", "is not a saved plan"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_by_name(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "foreign.json").write_text(content)
    assert main(["report", str(tmp_path / "foreign.json")]) == 1
    told = capsys.readouterr().err.replace("\n", " ")
    assert "foreign.json" in told
    assert message in told
    assert not (tmp_path / "foreign.html").exists()


def test_a_plans_trace_has_a_slice_for_every_event_of_the_simulator(tmp_path: Path) -> None:
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    assert main(["report", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "trace.json")]) == 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(plan.timeline().events)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(plan.step_time_s * 1e6)
    assert {frozenset(event) for event in slices} == {
        frozenset(("name", "cat", "ph", "ts", "dur", "pid", "tid", "args"))
    }
    lanes: dict[tuple[int, int], float] = {}
    for event in sorted(slices, key=lambda event: event["ts"]):  # slices of a thread may nest, but not cross
        lane = (event["pid"], event["tid"])
        assert event["dur"] > 0
        assert event["ts"] >= lanes.get(lane, 0.0) - 1e-3
        lanes[lane] = event["ts"] + event["dur"]
