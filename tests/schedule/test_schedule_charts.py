"""What a schedule tells: utilisation, energy, a text chart, a trace."""

from __future__ import annotations

import json
import math

import pytest
from scheduling import random_problem

from phaze.schedule import Job, Resource, SchedulingProblem, chrome_trace, format_gantt, schedule_layer, utilization

PROBLEM = SchedulingProblem(
    jobs=(
        Job("project", Resource.TENSOR, 8.0, 2.0, 3.0, 5.0),
        Job("norm", Resource.VECTOR, 4.0, 4.0, 1.0, 2.0),
        Job("reduce", Resource.LINK, 3.0, math.inf, 0.5, 0.5),
        Job("view", Resource.NONE, 0.0),
        Job("fused", Resource.BOTH, 6.0, 6.0, 1.0, 1.0),
    ),
    edges=((0, 3), (3, 1), (0, 2), (1, 4)),
    tensor_cores=4,
    vector_cores=2,
    name="example",
)
GANTT = """\
example on 4 tensor and 2 vector cores: 12 s, optimal (list)
tensor all |aaaaaa................................|
  tensor 0 |...................ddddddddddddddddddd|
  vector 0 |......bbbbbbbbbbbbbddddddddddddddddddd|
      link |......cccccccccc......................|
a      0 us       2 s  tensor all           project
b       2 s       4 s  vector 0             norm
c       2 s       3 s  link                 reduce
d       6 s       6 s  tensor 0, vector 0   fused
tensor: peak 100%, average 29.2%
vector: peak 50%, average 41.7%
link: peak 100%, average 25.0%
"""


def test_utilisation_counts_spread_and_both_ops_on_their_kinds() -> None:
    shares = utilization(schedule_layer(PROBLEM, gap=0.0))
    assert shares[Resource.TENSOR].average == pytest.approx((2.0 * 4 + 6.0) / (4 * 12.0))
    assert shares[Resource.VECTOR].average == pytest.approx((4.0 + 6.0) / (2 * 12.0))
    assert (shares[Resource.TENSOR].peak, shares[Resource.VECTOR].peak, shares[Resource.LINK].peak) == (1.0, 0.5, 1.0)


def test_utilisation_never_exceeds_one() -> None:
    for seed in range(40):
        for share in utilization(schedule_layer(random_problem(seed, 9))).values():
            assert 0.0 <= share.average <= share.peak + 1e-9
            assert share.peak <= 1.0


def test_energy_follows_the_chosen_modes() -> None:
    assert schedule_layer(PROBLEM, gap=0.0).energy_j == pytest.approx(5.0 + 1.0 + 0.5 + 1.0)


def test_text_chart_shows_lanes_ops_and_shares() -> None:
    assert format_gantt(schedule_layer(PROBLEM, gap=0.0), width=38) == GANTT


def test_text_chart_of_an_infeasible_layer_says_why() -> None:
    none = SchedulingProblem(jobs=(Job("mm", Resource.TENSOR, 1.0),), edges=(), tensor_cores=0, vector_cores=1)
    text = "layer on 0 tensor and 1 vector cores: infeasible, op 'mm' needs a tensor core and there is none\n"
    assert format_gantt(schedule_layer(none)) == text
    assert chrome_trace(schedule_layer(none))["traceEvents"] == []
    assert all(share.peak == 0.0 for share in utilization(schedule_layer(none)).values())


def test_trace_is_json_that_a_viewer_reads() -> None:
    document = json.loads(json.dumps(chrome_trace(schedule_layer(PROBLEM, gap=0.0))))
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    lanes = {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M"}
    fused = [event for event in events if event["name"] == "fused"]
    assert sorted(lanes[event["tid"]] for event in fused) == ["tensor 0", "vector 0"]
    assert {event["name"] for event in events} == {job.name for job in PROBLEM.jobs}
    assert all(event["dur"] >= 0.0 and event["ts"] >= 0.0 for event in events)
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(12e6)
    assert document["otherData"]["status"] == "optimal"


def test_empty_layer_has_an_empty_chart() -> None:
    empty = SchedulingProblem(jobs=(), edges=(), tensor_cores=1, vector_cores=1)
    assert format_gantt(schedule_layer(empty)).startswith("layer on 1 tensor and 1 vector cores: 0 us, optimal")
