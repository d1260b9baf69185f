"""What a file may hold: bounded in every way before anyone uses it, and refused with the name of what is wrong."""

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from phaze.errors import FormatError, LimitError
from phaze.file_access import parse_json, read_bytes, read_document, read_text
from phaze.limits import check_limit, limit_of


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"a": [1, 1e999]}', r"it\.a\[1\] is inf, too large a number"),
        ('{"a": {"b": NaN}}', "NaN is no number of JSON"),
        ('{"a": -Infinity}', "-Infinity is no number of JSON"),
        ('{"a": 9223372036854775808}', r"it\.a is 9223372036854775808, too large a number"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a": ["x\\ud800"]}', r"it\.a\[0\] is .*, half a character"),
        ('{"\\ud800": 1}', "a key with half a character"),
        ("[" * 101 + "]" * 101, "deeper than 100 levels"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a": 1', "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_a_value_that_nothing_can_hold_is_refused_with_its_field(text: str, complaint: str) -> None:
    with pytest.raises(FormatError, match=complaint):
        parse_json(text, "it", "a plan")


def test_a_document_of_another_tool_may_have_numbers_of_its_own() -> None:
    assert parse_json('{"time_step_limit": [0.0, Infinity]}', "it", "a config", is_foreign=True)
    with pytest.raises(FormatError, match="deeper"):
        parse_json("[" * 300 + "]" * 300, "it", "a config", is_foreign=True)


def test_what_is_within_the_bounds_is_read_as_it_is() -> None:
    document: Any = {"a": [1, -2.5, None, True, "\u00e4\U0001f600"], "b": {"c": 2**63 - 1}}
    text = '{"a": [1, -2.5, null, true, "\\u00e4\\ud83d\\ude00"], "b": {"c": 9223372036854775807}}'
    assert parse_json(text, "it", "a plan") == document


def test_a_gzipped_file_is_unpacked_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json.gz"
    packed = gzip.compress(b"[1]")
    assert read_document(written(path, packed), "a trace", unpacks=True) == [1]
    assert read_bytes(written(path, packed + gzip.compress(b" ")), "a trace", unpacks=True) == b"[1] "
    with pytest.raises(FormatError, match="gzipped and cut off"):
        read_bytes(written(path, packed[:-3]), "a trace", unpacks=True)
    with pytest.raises(FormatError, match="gzipped and damaged"):
        read_bytes(written(path, packed[:-8] + bytes(8)), "a trace", unpacks=True)
    monkeypatch.setenv("PHAZE_LIMITS", "file_mib=1")
    with pytest.raises(FormatError, match=r"larger than 1 MiB, unpacked.*PHAZE_LIMITS=file_mib=N"):
        read_bytes(written(path, gzip.compress(b" " * (50 << 20))), "a trace", unpacks=True)
    with pytest.raises(FormatError, match="larger than 1 MiB"):
        read_text(written(path, b"x" * ((1 << 20) + 1)), "a table")


def test_a_document_of_too_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHAZE_LIMITS", "values=1000")
    with pytest.raises(FormatError, match="more than 1,000 values"):
        parse_json("[" + "0," * 1000 + "0]", "it", "a plan")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", ".", "null\0character"):
        with pytest.raises(FormatError, match="cannot read"):
            read_bytes(tmp_path / name, "a plan")
    with pytest.raises(FormatError, match="a device, a pipe or a socket"):
        read_bytes("/dev/zero", "a plan")


def test_a_limit_is_raised_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LimitError, match=r"the batch is 9000000, more than the 1,048,576 .*PHAZE_LIMITS=batch=N"):
        check_limit("batch", 9_000_000, "the batch")
    monkeypatch.setenv("PHAZE_LIMITS", "devices=5, batch=9000000")
    check_limit("batch", 9_000_000, "the batch")
    assert limit_of("devices") == 5
    for wrong in ("devices", "colours=3", "devices=many", "devices=" + "9" * 30):
        monkeypatch.setenv("PHAZE_LIMITS", wrong)
        with pytest.raises(LimitError, match="expected such as devices=4194304"):
            limit_of("devices")
