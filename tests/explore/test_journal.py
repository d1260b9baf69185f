"""A search that goes on where it was killed, and journals that are damaged or of another search."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from designs import SMALL, some_points, tiny_model
from full_disks import full_disk

import phaze
from phaze.errors import FormatError, JournalWarning, PlanError
from phaze.explore.journal import Journal, is_journal

QUESTION: dict[str, Any] = {**SMALL, "micro_batch_size": (2,), "executor": "serial", "gap": 0.0}
HEADER = {"phaze": "0", "models": {"a": "1"}, "space": {"name": "paper"}, "prices": [], "question": {"gap": 0.01}}


def filled(path: Path) -> Path:
    """A journal with two results."""
    journal = Journal.open(path, HEADER)
    journal.add("one", 2.0, {"bound_s": 1.5})
    journal.add("two", float("inf"), {"bound_s": None})
    journal.close()
    return path


def test_results_are_read_back_exactly(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal")
    again = Journal.open(path, HEADER)
    assert again.find("one", 2.0) == {"bound_s": 1.5}
    assert again.find("two", float("inf")) == {"bound_s": None}
    assert again.find("three", 1.0) is None
    assert is_journal(path)
    again.close()


def test_a_torn_last_line_is_dropped_and_written_anew(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal")
    whole = path.read_bytes()
    for cut in range(len(whole) - 60, len(whole)):
        path.write_bytes(whole[:cut])
        journal = Journal.open(path, HEADER)
        assert ("two" in journal.records) == (whole[:cut].endswith(b"}\n"))
        journal.add("two", float("inf"), {"bound_s": None})
        journal.close()
        assert path.read_bytes() == whole


def test_behind_a_damaged_line_everything_is_dropped_with_a_warning(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal")
    lines = path.read_text().splitlines()
    for broken in (lines[1][:20], "[]", '{"task": 1}', "\\x00", lines[1].replace("1.5", "1.6"), lines[2]):
        path.write_text("\n".join([lines[0], broken, lines[2]]) + "\n")
        with pytest.raises(FormatError, match="line 2"):
            Journal.load(path)
        with pytest.warns(JournalWarning, match=r"line 2.* 0 results before it are good; 2 lines are not used"):
            resumed = Journal.open(path, HEADER)
        assert resumed.records == {}
        resumed.close()
        assert path.read_text() == lines[0] + "\n"


def test_no_digit_of_a_journal_can_be_flipped_unnoticed(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal")
    whole = path.read_bytes()
    for place in range(whole.index(b"\n") + 1, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(FormatError, match=r"line [23]"):
            Journal.load(path)


def test_lines_that_were_left_out_moved_or_repeated_are_noticed(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal")
    header, one, two = path.read_text().splitlines()
    for lines in ([header, two], [header, two, one], [header, one, one, two]):
        path.write_text("\n".join(lines) + "\n")
        with pytest.raises(FormatError, match="does not agree with its digest"):
            Journal.load(path)


def test_two_searches_cannot_write_to_one_journal(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal")
    whole = path.read_bytes()
    first = Journal.open(path, HEADER)
    with pytest.raises(FormatError, match="in use by another search"):
        Journal.open(path, HEADER)
    first.close()
    Journal.open(path, HEADER).close()
    assert path.read_bytes() == whole


def test_a_full_disk_at_any_write_of_a_search_is_told_and_resumed(tmp_path: Path) -> None:
    whole = phaze.search(tiny_model(), space=some_points(2), journal=tmp_path / "whole", **QUESTION)
    size = os.stat(tmp_path / "whole").st_size
    path = tmp_path / "journal"
    for most_bytes in range(50, size, size // 6):
        before = path.read_bytes() if path.exists() else b""
        with full_disk(most_bytes), pytest.raises(FormatError, match=r"cannot write the journal .*goes on from them"):
            phaze.search(tiny_model(), space=some_points(2), journal=path, **QUESTION)
        assert path.read_bytes().startswith(before)
        assert path.read_bytes() == b"" or path.read_bytes().endswith(b"\n")
    again = phaze.search(tiny_model(), space=some_points(2), journal=path, **QUESTION)
    assert (again.best, again.certificate) == (whole.best, whole.certificate)


def test_a_journal_whose_folder_vanishes_ends_the_search(tmp_path: Path) -> None:
    folder, moved = tmp_path / "folder", tmp_path / "moved"
    folder.mkdir()
    journal = Journal.open(folder / "journal", HEADER)
    journal.add("one", 2.0, {"bound_s": 1.5})
    folder.rename(moved)
    with pytest.raises(FormatError, match="was removed or replaced while the search ran"):
        journal.add("two", 2.0, {"bound_s": 1.5})
    journal.close()
    assert list(Journal.load(moved / "journal").records) == ["one"]


def test_what_cannot_be_a_journal_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, tmp_path / "none" / "journal", "/dev/null", "a\0b"):
        with pytest.raises(FormatError, match="cannot write the journal"):
            Journal.open(place, HEADER)


def test_a_search_without_time_says_what_its_journal_holds(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with pytest.raises(PlanError, match="has no results yet"):
        phaze.search(tiny_model(), space=some_points(2), journal=path, time_limit_s=1e-9, **QUESTION)


def test_a_journal_of_another_search_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal")
    for changed, told in (
        ({**HEADER, "phaze": "9"}, 'phaze was "0" and is "9" now'),
        ({**HEADER, "models": {"a": "2"}}, r'models\.a was "1" and is "2" now'),
        ({**HEADER, "question": {"gap": 0.0}}, r"question\.gap was 0\.01 and is 0\.0 now"),
    ):
        with pytest.raises(FormatError, match=told):
            Journal.open(path, changed)
    name = tmp_path / "real"
    phaze.search(tiny_model(), space=some_points(2), journal=name, **QUESTION)
    with pytest.raises(FormatError, match=r"another search: question\.gap"):
        phaze.search(tiny_model(), space=some_points(2), journal=name, **{**QUESTION, "gap": 0.5})


@pytest.mark.parametrize(
    "content", ["notes without an end of line", "a,b\n1,2\n", "{\n}\n", json.dumps({"format": "phaze-space"}), "x"]
)
def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(FormatError, match="is not the journal of a search"):
        Journal.open(path, HEADER)
    assert path.read_text() == content


def test_a_first_line_that_was_torn_is_written_anew(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal")
    first = path.read_bytes().splitlines(keepends=True)[0]
    for cut in range(len(first)):
        path.write_bytes(first[:cut])
        Journal.open(path, HEADER).close()
        assert path.read_bytes() == first


def test_the_same_models_in_another_order_are_another_search(tmp_path: Path) -> None:
    models, path = [tiny_model(name="a"), tiny_model(size=256, name="b")], tmp_path / "journal"
    phaze.search(models, space=some_points(1), journal=path, **QUESTION)
    with pytest.raises(FormatError, match="models was in the order a, b and is in the order b, a now"):
        phaze.search(models[::-1], space=some_points(1), journal=path, **QUESTION)


def test_a_task_with_another_cutoff_is_refused(tmp_path: Path) -> None:
    journal = Journal.load(filled(tmp_path / "journal"))
    with pytest.raises(FormatError, match="cutoff"):
        journal.find("one", 3.0)


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_a_search_killed_at_random_moments_goes_on_and_ends_with_the_same_answer(tmp_path: Path, kills: int) -> None:
    script = tmp_path / "killed.py"
    support = Path(__file__).parents[1] / "support"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(support)!r})\nimport phaze\nfrom designs import some_points, tiny_model\n"
        f"phaze.search(tiny_model(), space=some_points(6), journal=sys.argv[1], **{QUESTION!r})\n"
    )
    whole = phaze.search(tiny_model(), space=some_points(6), journal=tmp_path / "whole", **QUESTION)
    lines = (tmp_path / "whole").read_text().splitlines()
    path = tmp_path / "journal"
    moments = random.Random(0)
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, str(script), str(path)])
        wanted = moments.randint(1, len(lines) - 2)
        while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < wanted):
            time.sleep(0.005)
        time.sleep(moments.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 1 < len(path.read_text().splitlines()) <= len(lines)
    again = phaze.search(tiny_model(), space=some_points(6), journal=path, **QUESTION)
    assert again.best == whole.best
    assert again.certificate == whole.certificate
    assert sorted(path.read_text().splitlines()) == sorted(lines)


def test_what_a_journal_has_is_not_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = phaze.search(tiny_model(), space=some_points(3), journal=path, **QUESTION)
    size = os.stat(path).st_size
    heard: list[str] = []
    second = phaze.search(
        tiny_model(),
        space=some_points(3),
        journal=path,
        progress=lambda progress: heard.append(progress.doing),
        **QUESTION,
    )
    assert second.best == first.best
    assert os.stat(path).st_size == size
    assert all(doing.startswith("sweep") for doing in heard)
    assert all(json.loads(line) for line in path.read_text().splitlines())
