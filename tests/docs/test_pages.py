"""The pages of docs/ do what they say: every program and command in them is run, and prints what is shown."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import LANGUAGES, Step, blocks, is_as_told, steps
from repository import ROOT

DOCS = ROOT / "docs"
RUNNER = ROOT / "tests" / "support" / "document_runner.py"
SHOWN_AS_FILES = ("csv", "json", "toml")
"""Languages of blocks that show a file, which is written and used by later steps."""


def pages(nav: object) -> Iterator[str]:
    """The pages of the site that people wrote, in the order of its navigation."""
    if isinstance(nav, str):
        if (DOCS / nav).exists():
            yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:  # type: ignore[attr-defined]
            yield from pages(part)


PAGES = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
STEPS = [step for page in PAGES for step in steps(page, (DOCS / page).read_text())]
QUICK = [step for step in STEPS if not step.is_exhaustive]
LONG = [step for step in STEPS if step.is_exhaustive]


def run_all(asked: list[Step], folder: Path) -> list[dict[str, Any]]:
    """What each step printed, or how it failed, all run in one process after the other."""
    listed = folder / "steps.json"
    listed.write_text(json.dumps([dataclasses.asdict(step) for step in asked]))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, RUNNER, listed, folder / "answers.json"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads((folder / "answers.json").read_text())
    return answers


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
