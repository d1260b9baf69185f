"""The pages of searches and comparisons in a real browser, and what notebooks show."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from browser import opened, started_browser
from designs import SMALL, some_points, tiny_model
from forgeries import forged
from nbclient import NotebookClient
from plans import QUESTION, small_cluster, small_graph
from playwright.sync_api import Browser
from repository import ROOT

import phaze
from phaze.cli import main
from phaze.errors import FormatError
from phaze.explore.saved_search import read_search, result_of_journal
from phaze.explore.search_result import SearchResult

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("search") / "search.journal"


@pytest.fixture(scope="module")
def result(journal: Path) -> SearchResult:
    return phaze.search(tiny_model(), space=some_points(8), gap=0.0, executor="serial", journal=journal, **SMALL)


def test_a_searchs_page_draws_every_evaluated_design_and_every_pruned_box(
    browser: Browser, result: SearchResult, tmp_path: Path
) -> None:
    result.save(tmp_path / "search.json")
    assert main(["report", str(tmp_path / "search.json")]) == 0
    document = json.loads((tmp_path / "search.json").read_text())
    evaluated = [row for row in document["explored"] if row["value"] is not None]
    assert len(evaluated) == sum(row.value is not None for row in result.explored) >= 1
    with opened(browser, tmp_path / "search.html") as page:
        assert page.locator("#designs-chart circle").count() == len(evaluated)
        assert page.locator("#designs-chart g[aria-label=link] path").count() == len(document["certificate"]["pruned"])
        assert page.locator("#shapes-chart g[fill=none] path").count() == len(evaluated) + 2
        page.locator("#designs-chart svg").focus()
        page.keyboard.press("ArrowRight")
        assert "samples/s" in (page.locator("#tip").text_content() or "")
    with opened(browser, tmp_path / "search.html", width=360, scheme="dark") as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_journal_gives_the_page_of_its_search(result: SearchResult, journal: Path, tmp_path: Path) -> None:
    again = result_of_journal(journal, [tiny_model()])
    assert replace(again, seconds=0.0, plans={}) == replace(result, seconds=0.0, plans={})
    assert again.plans["tiny"].step_time_s == result.plans["tiny"].step_time_s
    whole = journal.read_text().splitlines(keepends=True)
    (tmp_path / "cut.journal").write_text("".join(whole[: len(whole) - 2]))
    assert not result_of_journal(tmp_path / "cut.journal", [tiny_model()]).certificate.is_finished
    assert (tmp_path / "cut.journal").read_text() == "".join(whole[: len(whole) - 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2"),
        ({"objective": 3}, "objective is 3"),
        ({"best": None}, "lacks 'best'"),
        ({"format": "other"}, "is not a saved search"),
    ],
)
def test_a_damaged_search_is_refused(
    result: SearchResult, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    document = {**json.loads(result.to_json()), **change}
    document = {name: value for name, value in document.items() if value is not None}
    (tmp_path / "search.json").write_text(json.dumps(forged(document)))
    with pytest.raises(FormatError, match=message):
        read_search(tmp_path / "search.json")


def test_no_name_of_a_model_or_design_brings_markup(browser: Browser, result: SearchResult, tmp_path: Path) -> None:
    row = replace(result.best.models[0], model=HOSTILE)
    hostile = replace(result, best=replace(result.best, name=HOSTILE, models=(row,)))
    hostile.report(tmp_path / "search.html")
    with opened(browser, tmp_path / "search.html") as page:
        assert page.locator("img").count() == 0
        assert "onerror" in (page.locator("h1").text_content() or "")
    assert "<img" not in hostile._repr_html_()


def test_a_comparison_stands_side_by_side_with_what_differs_marked(browser: Browser, tmp_path: Path) -> None:
    for name, strategy in {"first": {"dp": 8}, "second": {"dp": 4, "pp": 2}}.items():
        options = {"cluster": small_cluster(), "strategy": strategy, "compares": False, **QUESTION}
        phaze.evaluate(small_graph(), **options).plan.save(tmp_path / f"{name}.json")
    page_path = tmp_path / "comparison.html"
    assert main(["compare", str(tmp_path / "first.json"), str(tmp_path / "second.json"), "--html", str(page_path)]) == 0
    plans = [phaze.load_plan(tmp_path / f"{name}.json") for name in ("first", "second")]
    comparison = phaze.compare(*plans)
    with opened(browser, page_path) as page:
        differing = sum(row.first != row.second for row in comparison.rows)
        assert page.locator("#differences tr.differs").count() == differing > 2
        events = page.eval_on_selector_all("canvas", "drawn => drawn.map((canvas) => Number(canvas.dataset.events))")
        assert events == [len(plan.timeline().events) for plan in plans]
    with opened(browser, page_path, width=360) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_notebook_shows_plan_graph_search_evaluation_and_comparison(tmp_path: Path) -> None:
    setup = f"import sys\nsys.path[:0] = [{str(ROOT / 'tests' / 'support')!r}, {str(ROOT / 'tests')!r}]\n"
    setup += "import phaze\nfrom designs import SMALL, some_points, tiny_model\nmodel = tiny_model()\n"
    question = "cluster='cpu:2', global_batch_size=8, micro_batch_size=1, tp=1"
    cells = {
        f"{setup}model": "forward work",
        f"plan = phaze.optimize(model, {question})\nplan": "place 0",
        f"priced = phaze.evaluate(model, strategy={{'dp': 2}}, {question})\npriced": "Most valuable single change",
        "phaze.compare(plan, priced.plan)": "second against first",
        "phaze.search(model, space=some_points(3), executor='serial', **SMALL)": "GiB of HBM",
    }
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    for cell, words in zip(notebook.cells, cells.values(), strict=True):
        shown = cell.outputs[-1]["data"]["text/html"]
        assert words in shown
        assert "<script" not in shown
