"""The pages of docs/ do what they say: every program and command in them is run, and prints what is shown."""

import re
from pathlib import Path
from typing import Any

import pytest
from documents import LANGUAGES, Step, blocks, is_as_told, steps
from repository import ROOMS, ROOT, source_files
from rewrite_outputs import rewritten
from site_pages import DOCS, LONG, PAGES, QUICK, run_all

SHOWN_AS_FILES = ("csv", "json", "toml")
"""Languages of blocks that show a file, which is written and used by later steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all pages: a later one may read what an earlier one wrote."""
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    return run_all(QUICK, folder)


def check(step: Step, answer: dict[str, Any]) -> None:
    assert answer["error"] == "", f"{step}: {answer['error']}"
    if step.expected is not None:
        printed = answer["printed"]
        assert is_as_told(printed, step.expected), f"{step} prints\n{printed}\nand not\n{step.expected}"


@pytest.mark.parametrize("index", range(len(QUICK)), ids=lambda index: str(QUICK[index]))
def test_a_page_does_what_it_says(index: int, told: list[dict[str, Any]]) -> None:
    check(QUICK[index], told[index])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("step", LONG, ids=str)
def test_a_long_step_of_a_page_does_what_it_says(step: Step, folder: Path) -> None:
    check(step, run_all([step], folder)[0])


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_of_a_page_is_run_shown_as_a_file_or_a_drawing(page: str) -> None:
    found = blocks((DOCS / page).read_text())
    assert {block.language for block in found if not block.title} <= set(LANGUAGES)
    assert {block.language for block in found if block.title} <= {*SHOWN_AS_FILES, "python"}
    assert (DOCS / page).read_text().count("```") == 2 * len(found), "a block that this test does not see"


def test_a_block_with_a_title_is_a_file_and_a_comment_marks_a_block() -> None:
    document = '```json title="a.json"\n{}\n```\n\n<!-- fails -->\n```console\n$ phaze report a.json\n```\n'
    file, command = steps("x.md", document)
    assert (file.file, file.command) == (("a.json", "{}\n"), "")
    assert (command.command, command.mark, command.line) == ("phaze report a.json", "fails", 6)


@pytest.mark.parametrize(
    ("block", "output"),
    [
        ("```console\n$ phaze --version\nphaze 1\n$ true\n```\n", "phaze 2\n"),
        ("```python\nprint('phaze 2')\n```\n\n```text\nphaze 1\n```\n", "phaze 2\n"),
    ],
)
def test_an_output_that_changed_is_rewritten_in_its_place(block: str, output: str) -> None:
    page = f"phaze 1\n\n{block}\nphaze 1\n"
    step = steps("x.md", page)[0]
    told = rewritten(page, step, output)
    assert told == f"phaze 1\n\n{block.replace('phaze 1', 'phaze 2')}\nphaze 1\n"


def test_an_output_that_is_shown_in_parts_is_left_to_people() -> None:
    page = "```console\n$ phaze --version\n...\nphaze 1\n```\n"
    assert rewritten(page, steps("x.md", page)[0], "phaze 2\n") is None


def test_messages_that_are_quoted_among_the_questions_are_those_of_the_code() -> None:
    quoted = re.findall(r'^\*\*"(.+?)"', (DOCS / "faq.md").read_text(), flags=re.MULTILINE)
    code = "".join(path.read_text() for room in ROOMS for path in source_files(room))
    assert len(quoted) > 10
    assert [words for words in quoted if words not in code] == []


def test_errors_that_pages_tell_are_those_of_the_benchmarks() -> None:
    told = (ROOT / "benchmarks" / "README.md").read_text().splitlines()
    table = re.findall(r"^\| .+ \| (\d+) \| ([\d.]+ %) \|$", (DOCS / "how-it-works/cost.md").read_text(), re.MULTILINE)
    assert len(table) > 5
    vtrain = re.search(
        r"error is ([\d.]+ %) on one node .* and ([\d.]+ %) on many", (DOCS / "comparison.md").read_text()
    )
    assert vtrain is not None
    for runs, error in [*table, ("537", vtrain[1]), ("62", vtrain[2])]:
        assert any(re.search(rf"\| {runs}( of \d+)? \|", line) and f"| {error} |" in line for line in told), error
