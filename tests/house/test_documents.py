"""Documents are short, and name no machine."""

import re

import pytest
from repository import ROOT, tracked_files

LINE_BUDGETS = {"README.md": 150, "ARCHITECTURE.md": 100, "CONTRIBUTING.md": 60}
MACHINE_PATHS = re.compile(rb"/(?:home|Users|root|work|opt)/[A-Za-z0-9_.-]+|/tmp/[A-Za-z0-9_.-]+|[A-Z]:\\\\Users")


@pytest.mark.parametrize("name", LINE_BUDGETS)
def test_a_document_keeps_to_its_budget_of_lines(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= LINE_BUDGETS[name]


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    found = {
        str(path.relative_to(ROOT)): [match.decode() for match in matches]
        for path in tracked_files()
        if (matches := MACHINE_PATHS.findall(path.read_bytes()))
    }
    assert found == {}
