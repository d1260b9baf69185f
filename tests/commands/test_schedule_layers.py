"""`phaze schedule`: one layer's operators on the cores of a chip."""

import json
from pathlib import Path

import pytest

from phaze.cli import main

SMALL = ["schedule", "gpt2", "--chip", "tpuv4", "--sequence-length", "128"]
BLOCK = [*SMALL, "--layer", "transformer.h.0"]
WAYS = [
    ["--method", "auto"],
    ["--method", "exact"],
    ["--method", "cp-sat"],
    ["--method", "milp"],
    ["--method", "list"],
    ["--solver", "highs"],
    ["--solver", "scip"],
    ["--method", "milp", "--solver", "gurobi"],
]


def document_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_without_a_layer_every_distinct_one_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    assert "gpt2 on tpuv4, forward, microbatch 1" in out
    assert [line.split()[0] for line in out.splitlines() if " 0.00%" in line] == [
        "transformer.wte",
        "transformer.h.0",
        "transformer.ln_f",
    ]
    assert 'add --layer "transformer.h.0" to see the schedule of one of them.' in out


def test_a_layer_is_drawn_with_its_bound_and_utilisation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BLOCK, "--micro-batch-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "transformer.h.0 on 8 tensor and 2 vector cores" in out
    assert "tensor all |" in out
    assert "transformer.h.0.mlp.c_fc" in out
    assert "tensor: peak 100%" in out
    assert "vector: peak" in out
    assert "makespan" in out
    assert "bound" in out


def test_tensor_parallel_layers_hold_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    document = document_of([*BLOCK, "--tp", "2", "--phase", "backward"], capsys)
    jobs = document["jobs"]
    assert isinstance(jobs, list)
    links = [job for job in jobs if job["resource"] == "link"]
    assert links
    assert all(link["tensor_core"] is None and not link["is_spread"] for link in links)
    assert document["title"] == "gpt2 on tpuv4, backward, microbatch 1, tp 2"


def test_all_methods_and_solvers_agree_within_their_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    documents = [document_of([*BLOCK, *way], capsys) for way in WAYS]
    spans = [float(str(document["makespan_s"])) for document in documents]
    bounds = [float(str(document["bound_s"])) for document in documents]
    assert max(bounds) <= min(spans) * (1 + 1e-6)
    proven = [span for span, way in zip(spans, WAYS, strict=True) if way != ["--method", "list"]]
    assert max(proven) <= min(proven) / (1 - 0.01) * (1 + 1e-6)
    assert {str(document["method"]) for document in documents} >= {"list", "cp-sat", "milp on highs", "milp on gurobi"}


def test_the_trace_is_a_file_that_viewers_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert main([*BLOCK, "--trace", str(path)]) == 0
    assert f"trace written to {path.name}" in capsys.readouterr().out.replace("\n", "").replace(str(tmp_path) + "/", "")
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}


def test_json_holds_every_layer_and_job(capsys: pytest.CaptureFixture[str]) -> None:
    document = document_of(SMALL, capsys)
    layers = document["layers"]
    assert isinstance(layers, list)
    assert [layer["count"] for layer in layers] == [1, 12, 1]
    for layer in layers:
        assert layer["time_s"] >= layer["time_bound_s"] > 0.0
        assert layer["time_s"] == pytest.approx(max(layer["makespan_s"], layer["memory_s"]))
        assert max(job["end_s"] for job in layer["jobs"]) == layer["makespan_s"]
        assert set(layer["utilization"]) == {"tensor", "vector", "link"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([*SMALL, "--layer", "transformer.h.00"], "Did you mean transformer.h.0?"),
        (["schedule", "gpt2", "--chip", "tpuv44"], "Did you mean tpuv4"),
        ([*SMALL, "--method", "magic"], "unknown scheduling method 'magic'. Known: auto, cp-sat, exact, list, milp."),
        ([*SMALL, "--solver", "higs"], "unknown solver 'higs'. Did you mean highs?"),
        ([*SMALL, "--solver", "highs", "--method", "exact"], "exact uses no linear solver"),
        ([*SMALL, "--trace", "trace.json"], "name it with --layer"),
    ],
)
def test_what_cannot_be_is_one_readable_block(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err.replace("\n", " ")
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("arguments", [["schedule", "gpt2"], [*SMALL, "--gap", "1"], [*SMALL, "--phase", "update"]])
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
