"""Documents are short, name no machine, and do what they say."""

import re
from pathlib import Path

import pytest
from documents import LANGUAGES, Step, blocks, is_as_told, run_step, steps
from repository import ROOT, tracked_files

LINE_BUDGETS = {"README.md": 150, "ARCHITECTURE.md": 100, "CONTRIBUTING.md": 60}
MACHINE_PATHS = re.compile(rb"/(?:home|Users|root|work|opt)/[A-Za-z0-9_.-]+|/tmp/[A-Za-z0-9_.-]+|[A-Z]:\\\\Users")
STEPS = [step for name in LINE_BUDGETS for step in steps(name, (ROOT / name).read_text())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all steps: a later one may read what an earlier one wrote."""
    return tmp_path_factory.mktemp("documents")


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_document_does_what_it_says(step: Step, folder: Path) -> None:
    printed = run_step(step, folder)
    if step.expected is not None:
        assert is_as_told(printed, step.expected), f"{step} prints\n{printed}\nand not\n{step.expected}"


def test_the_readme_shows_the_two_commands() -> None:
    assert {"make run", "make test"} <= {step.command for step in STEPS if step.document == "README.md"}


@pytest.mark.parametrize("name", LINE_BUDGETS)
def test_every_code_block_is_of_a_language_that_is_checked(name: str) -> None:
    assert {block.language for block in blocks((ROOT / name).read_text())} <= set(LANGUAGES)


@pytest.mark.parametrize("name", LINE_BUDGETS)
def test_a_document_keeps_to_its_budget_of_lines(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= LINE_BUDGETS[name]


@pytest.mark.parametrize("name", [*LINE_BUDGETS, "CHANGELOG.md", "benchmarks/README.md"])
def test_every_file_that_a_document_links_to_exists(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text())
    assert [link for link in links if not ((ROOT / name).parent / link).exists()] == []


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    found = {
        str(path.relative_to(ROOT)): [match.decode() for match in matches]
        for path in tracked_files()
        if (matches := MACHINE_PATHS.findall(path.read_bytes()))
    }
    assert found == {}


def test_blocks_are_read_as_the_steps_they_show() -> None:
    document = "\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n```console\n$ phaze --version\n$ true\nyes\n```\n"
    found = [(step.line, step.command, step.expected) for step in steps("x.md", document)]
    assert found[0][0] == 2
    assert found[0][1][1:] == ("-c", "print(1)\n")
    assert [expected for _, _, expected in found] == ["1\n", None, "yes\n"]
    assert [command for _, command, _ in found[1:]] == ["phaze --version", "true"]


def test_a_program_that_names_its_file_and_command_is_run_so(tmp_path: Path) -> None:
    (step,) = steps("x.md", "```python\n# told.py: python told.py again\nimport sys\nprint(sys.argv[1])\n```\n")
    assert run_step(step, tmp_path) == "again\n"


def test_a_drawing_after_a_program_and_a_sentence_is_not_its_output() -> None:
    document = "```python\nprint(1)\n```\nThe flow:\n\n```text\na -> b\n```\n"
    assert [step.expected for step in steps("x.md", document)] == [None]


@pytest.mark.parametrize(
    ("printed", "expected", "answer"),
    [
        ("a \nb\n", "a\nb\n", True),
        ("a\nb\n", "a\n", False),
        ("a\nb\nc\n", "a\n...\n", True),
        ("a\nb\nc\n", "...\nc\n", True),
        ("a\nb\nc\n", "...\nb\n", False),
        ("a.b\n", "a?b\n", False),
        ("a: b, c\nd\n", "a: b, ...\nd\n", True),
        ("a: b, c\nd\n", "a: b ...\nd\n", False),
    ],
)
def test_output_is_compared_line_by_line(printed: str, expected: str, answer: bool) -> None:
    assert is_as_told(printed, expected) is answer
