"""Five thousand damaged files of every format: each is read, or refused with a PhazeError, quickly.

`make fuzz` draws more of them. What once failed is kept in `tests/data/fuzz/` under the name of its format, and must be
read or refused for good.
"""

import json
import random
from pathlib import Path

import pytest
from forgeries import forged
from fuzzing import Tally, drawn_inputs, try_input
from mutated_inputs import mutated_document
from readable_files import FORMATS, Format, named_format, plan_text

from phaze.errors import PhazeError
from phaze.plan.plan import plan_from_document
from phaze.tolerances import EQUAL_RESULTS

SEED = 2024
FOUND = sorted((Path(__file__).parents[1] / "data" / "fuzz").iterdir())


def tried(formats: tuple[Format, ...], seed: int, count: int, folder: Path) -> Tally:
    tally = Tally()
    for kind, data in drawn_inputs(formats, seed, count):
        try_input(kind, data, folder, tally)
    return tally


@pytest.mark.parametrize("part", range(3))
def test_a_damaged_file_is_read_or_refused(part: int, tmp_path: Path) -> None:
    tally = tried(FORMATS, SEED + part, 1000, tmp_path)
    assert [(failure.kind, failure.what) for failure in tally.failures] == []
    assert tally.tried == 1000
    assert tally.refused.total() > 500


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(20))
def test_many_damaged_files_are_read_or_refused(part: int, tmp_path: Path) -> None:
    tally = tried(FORMATS, 10 * SEED + part, 5000, tmp_path)
    assert [(failure.kind, failure.what) for failure in tally.failures] == []


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_a_good_file_of_every_format_is_read(kind: Format, tmp_path: Path) -> None:
    for data in kind.examples():
        (tmp_path / f"input{kind.suffix}").write_bytes(data)
        kind.use(tmp_path / f"input{kind.suffix}")


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_what_once_failed_is_read_or_refused(path: Path, tmp_path: Path) -> None:
    tally = Tally()
    try_input(named_format(path.name.rsplit("-", 1)[0].replace("-", " ")), path.read_bytes(), tmp_path, tally)
    assert tally.failures == []


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_a_forged_plan_that_is_accepted_claims_nothing_that_its_numbers_refute(count: int) -> None:
    """What is checked here is written a second time, in few words, beside `phaze.plan.plan_integrity`."""
    accepted = 0
    for number in range(count):
        chance = random.Random(f"forged/{number}")
        try:
            plan = plan_from_document(forged(mutated_document(json.loads(plan_text()), chance)))
        except PhazeError:
            continue
        accepted += 1
        assert abs(plan.gap - (1 - plan.bound_s / plan.step_time_s)) < EQUAL_RESULTS
        assert plan.gap + EQUAL_RESULTS >= 0
        assert (plan.status == "optimal") == (plan.gap <= EQUAL_RESULTS)
        assert (plan.status == "above the gap") == (plan.gap > plan.question.gap + EQUAL_RESULTS)
        assert plan.is_feasible == all(stage.fit == "fits" for stage in plan.stages)
        for stage in plan.stages:
            assert stage.memory_bytes["total"] <= stage.memory_bytes["capacity"] or stage.fit != "fits"
    assert accepted > 0
