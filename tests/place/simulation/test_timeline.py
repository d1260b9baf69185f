"""The timeline of a placed pipeline, as events, as text and as a Chrome trace."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_problems import chain_problem, random_problem
from property_examples import examples

from phaze.place import EventKind, find_placement

seeds = st.integers(0, 2**32 - 1)


def test_the_timeline_shows_every_pass_and_ends_with_the_batch() -> None:
    best = find_placement(chain_problem()).best
    assert best is not None
    timeline = best.timeline
    forwards = [event for event in timeline.events if event.kind is EventKind.FORWARD]
    assert len(forwards) == best.micro_batches * len(best.stages)
    assert max(event.end_s for event in timeline.events) == pytest.approx(best.time_s)
    text = timeline.text(60)
    assert len(text.splitlines()) == timeline.devices + 2
    assert "0" in text.splitlines()[0]
    trace = timeline.chrome_trace()
    assert json.loads(json.dumps(trace)) == trace
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    names = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in names}
    links = [event for event in slices if lanes[event["pid"], event["tid"]] == "links"]
    assert {event["cat"] for event in links} <= {"receive", "reduce"}


@examples(25)
@given(seeds)
def test_events_of_a_device_do_not_overlap(seed: int) -> None:
    best = find_placement(random_problem(seed, largest=5, most_devices=8)).best
    if best is None:
        return
    for device in range(best.timeline.devices):
        events = sorted((event.start_s, event.end_s) for event in best.timeline.events if event.device == device)
        starts, ends = np.array(events).T
        assert (starts[1:] >= ends[:-1] - 1e-9).all()
        assert math.isclose(ends.max(), best.timeline.time_s) or ends.max() < best.timeline.time_s
