"""Files are written whole or not at all; links are followed, and what is no file is refused."""

import os
from pathlib import Path

import pytest
from full_disks import full_disk

from phaze.errors import FormatError
from phaze.file_access import check_writable, write_whole


def test_a_file_that_cannot_be_written_whole_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, "before")
    with full_disk(10), pytest.raises(FormatError, match=r"cannot write .*What was there before is unchanged"):
        write_whole(path, "much more than ten bytes")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["plan.json"]
    with pytest.raises(FormatError, match="surrogates not allowed"):
        write_whole(path, "\ud800")
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path, link = tmp_path / "real" / "plan.json", tmp_path / "link.json"
    link.symlink_to(path)
    for text in ("made through the link", "and replaced"):
        write_whole(link, text)
        assert link.is_symlink()
        assert path.read_text() == text


def test_permissions_of_a_file_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, "a")
    path.chmod(0o600)
    write_whole(path, "b")
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_file_is_refused_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for place in (tmp_path / "pipe", tmp_path / "folder", Path("/dev/null"), loop, tmp_path / "none" / "x", "a\0b"):
        for write in (check_writable, lambda path: write_whole(path, "text")):
            with pytest.raises(FormatError, match="cannot write"):
                write(place)
    assert sorted(os.listdir(tmp_path)) == ["folder", "loop", "pipe"]
