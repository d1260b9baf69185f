"""Plans' pages in a real browser: drawn from the saved plan alone, complete, usable by pointer and keyboard, safe."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import opened, started_browser
from plans import QUESTION, small_cluster, small_graph
from playwright.sync_api import Browser, Page

import phaze
from phaze.plan.plan import Plan
from phaze.plan.plan_integrity import PlanStatus
from phaze.report.plan_page import plan_page

PIPELINE = {"dp": 2, "pp": 2, "tp": 2, "schedule": "interleaved-1f1b", "chunks": 2, "recompute": "full"}
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>\"'&<!--\u2028"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def searched() -> Plan:
    return phaze.optimize(small_graph(), cluster=small_cluster(), explain=True, **QUESTION)


@pytest.fixture(scope="module")
def pipelined() -> Plan:
    question = {**QUESTION, "tp": (2,)}
    return phaze.evaluate(small_graph(), cluster=small_cluster(), strategy=PIPELINE, compares=False, **question).plan


@pytest.fixture(scope="module")
def pages(searched: Plan, pipelined: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of plans that were saved and loaded."""
    folder = tmp_path_factory.mktemp("pages")
    for name, plan in {"searched": searched, "pipelined": pipelined}.items():
        plan.save(folder / f"{name}.json")
        phaze.load_plan(folder / f"{name}.json").report(folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in ("searched", "pipelined")}


def count(page: Page, selector: str) -> int:
    return page.locator(selector).count()


def test_every_chart_has_as_many_marks_as_the_saved_plan(
    browser: Browser, pages: dict[str, Path], pipelined: Plan, searched: Plan
) -> None:
    document = json.loads(pipelined.to_json())
    items = [
        size
        for stage in document["stages"][: pipelined.strategy.pp]
        for item, size in stage["memory_bytes"].items()
        if item not in ("total", "capacity") and size > 0
    ]
    with opened(browser, pages["pipelined"]) as page:
        assert int(page.locator("canvas").get_attribute("data-events") or 0) == len(pipelined.timeline().events)
        assert count(page, "#memory-chart g[aria-label=bar] rect") == len(items)
        assert count(page, "#mesh-chart rect") == 8
        assert count(page, "#layers-chart rect") == sum(len(kind["ops"]) for kind in document["layer_kinds"])
        assert count(page, "#layouts tbody tr") == sum(map(len, document["layouts"].values()))
        assert count(page, "#timeline tbody tr") == len(document["stages"]) == 4
    with opened(browser, pages["searched"]) as page:
        assert count(page, "#landscape-chart circle") == len(searched.landscape.seconds) > 2
        assert count(page, "#others tbody tr") == len(searched.runners_up) + len(searched.changes) > 3


def test_the_timeline_zooms_by_button_key_and_wheel_and_tells_what_is_under_the_pointer(
    browser: Browser, pages: dict[str, Path], pipelined: Plan
) -> None:
    with opened(browser, pages["pipelined"]) as page:
        canvas = page.locator("canvas")

        def span() -> tuple[float, float]:
            return float(canvas.get_attribute("data-first") or -1), float(canvas.get_attribute("data-last") or -1)

        whole = span()
        assert whole == pytest.approx((0, pipelined.step_time_s))
        page.get_by_role("button", name="Zoom in").click()
        first, last = span()
        assert last - first == pytest.approx(pipelined.step_time_s / 2)
        assert int(canvas.get_attribute("data-shown") or 0) < len(pipelined.timeline().events)
        canvas.focus()
        page.keyboard.press("+")
        assert span()[1] - span()[0] == pytest.approx((last - first) / 2)
        page.keyboard.press("ArrowLeft")
        assert span()[0] < first + (last - first) / 4
        page.keyboard.press("0")
        assert span() == pytest.approx(whole)
        canvas.hover(position={"x": 600, "y": 60})
        page.mouse.wheel(0, -300)
        assert span()[1] - span()[0] < pipelined.step_time_s
        assert (
            re.search(r"\bs at\b|idle|microbatch|update|reduce", page.locator("#tip").text_content() or "") is not None
        )


def test_marks_tell_their_numbers_to_pointer_and_keyboard(
    browser: Browser, pages: dict[str, Path], searched: Plan
) -> None:
    with opened(browser, pages["searched"]) as page:
        tip = page.locator("#tip")
        page.locator("#memory-chart g[aria-label=bar] rect").first.hover()
        assert re.fullmatch(r"place 0: parameters [\d.]+ GiB\nin all [\d.]+ GiB", tip.text_content() or "")
        page.keyboard.press("Escape")
        assert tip.is_hidden()
        page.mouse.move(0, 0)  # the focus scrolls the page: a pointer that rests may come to lie on another mark
        page.locator("#landscape-chart svg").focus()
        page.keyboard.press("ArrowRight")
        assert (tip.text_content() or "").startswith("dp ")
        first = tip.text_content()
        page.keyboard.press("ArrowRight")
        assert tip.text_content() != first
        page.keyboard.press("Escape")
        assert tip.is_hidden()


def test_layouts_are_filtered_by_words(browser: Browser, pages: dict[str, Path], pipelined: Plan) -> None:
    names = [*pipelined.layouts.parameters, *pipelined.layouts.boundaries]
    with opened(browser, pages["pipelined"]) as page:
        page.get_by_placeholder("such as").fill("dense bias")
        wanted = sum("dense" in name and "bias" in name for name in names)
        assert 0 < wanted < len(names)
        assert count(page, "#layouts-table tbody tr:visible") == wanted
        assert page.locator("#layouts-table-count").text_content() == f"{wanted} of {len(names)}"


def test_dark_follows_the_system_and_the_button(browser: Browser, pages: dict[str, Path]) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, pages["searched"], scheme="dark") as page:
        dark = page.evaluate(background)
        button = page.get_by_role("button", name="Light")
        assert button.get_attribute("aria-pressed") == "true"
        button.focus()
        page.keyboard.press("Enter")
        light = page.evaluate(background)
        assert page.get_by_role("button", name="Dark").get_attribute("aria-pressed") == "false"
    assert dark != light
    with opened(browser, pages["searched"]) as page:
        assert page.evaluate(background) == light


@pytest.mark.parametrize("name", ["searched", "pipelined"])
def test_a_phone_needs_no_horizontal_scroll(browser: Browser, pages: dict[str, Path], name: str) -> None:
    with opened(browser, pages[name], width=360) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_every_part_has_a_name_and_the_contents_lead_to_it(browser: Browser, pages: dict[str, Path]) -> None:
    with opened(browser, pages["searched"]) as page:
        targets = page.eval_on_selector_all("nav a, .skip", "links => links.map((link) => link.getAttribute('href'))")
        assert [target for target in targets if not count(page, target)] == []
        unnamed = page.eval_on_selector_all(
            "section, svg, canvas, .chart, .scrolled, input",
            """nodes => nodes.filter((node) => !node.getAttribute("aria-label") && !node.labels?.length
            && !document.getElementById(node.getAttribute("aria-labelledby"))).map((node) => node.outerHTML)""",
        )
        assert unnamed == []
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"


def test_paper_gets_every_table_and_no_controls(browser: Browser, pages: dict[str, Path], pipelined: Plan) -> None:
    with opened(browser, pages["pipelined"]) as page:
        assert not page.locator("#memory tbody").is_visible()
        page.emulate_media(media="print")
        assert page.locator("#memory tbody").is_visible()
        assert count(page, "#layouts tbody tr:visible") == sum(
            map(len, (pipelined.layouts.parameters, pipelined.layouts.boundaries))
        )
        assert count(page, "nav:visible, button:visible, input:visible") == 0


def test_no_name_brings_its_own_markup_or_script(browser: Browser, pipelined: Plan, tmp_path: Path) -> None:
    stage = pipelined.stages[0]
    kind = pipelined.layer_kinds[0]
    hostile = replace(
        pipelined,
        model=replace(pipelined.model, name=HOSTILE),
        binds=(HOSTILE,),
        stages=(replace(stage, layers=(replace(stage.layers[0], path=HOSTILE),)), *pipelined.stages[1:]),
        layer_kinds=(
            replace(kind, name=HOSTILE, ops=(replace(kind.ops[0], name=HOSTILE),)),
            *pipelined.layer_kinds[1:],
        ),
        layouts=replace(pipelined.layouts, parameters={HOSTILE: next(iter(pipelined.layouts.parameters.values()))}),
    )
    hostile.save(tmp_path / "plan.json")
    phaze.load_plan(tmp_path / "plan.json").report(tmp_path / "plan.html")
    with opened(browser, tmp_path / "plan.html") as page:
        assert "onerror" in (page.locator("h1").text_content() or "")
        assert page.title().startswith("</script>")
        assert count(page, "img") == 0
        assert count(page, "script") == 1 + 2 + 4
        assert (
            page.evaluate("[...document.scripts].filter((script) => script.textContent.includes('broken')).length") == 1
        )
    assert "<img" not in hostile._repr_html_()


@pytest.mark.parametrize("status", PlanStatus)
def test_the_page_says_the_proof_of_a_plan_of_every_status(searched: Plan, status: PlanStatus) -> None:
    page = plan_page(replace(searched, status=status, gap=0.0572))
    assert (
        "does not fit"
        if status is PlanStatus.DOES_NOT_FIT
        else "optimal"
        if status is PlanStatus.OPTIMAL
        else "≤ 5.72 %"
    ) in page
    assert ("% was asked" in page) == (status is PlanStatus.ABOVE_GAP)


def test_the_page_of_gpt3_on_1024_devices_is_below_a_megabyte_and_complete(browser: Browser, tmp_path: Path) -> None:
    strategy = {
        "dp": 16,
        "tp": 8,
        "pp": 8,
        "schedule": "interleaved-1f1b",
        "chunks": 3,
        "micro_batch_size": 1,
        "zero": 1,
    }
    plan = phaze.evaluate(
        "gpt3-175b", cluster="a100-80gb:1024", global_batch_size=1536, strategy=strategy, compares=False
    ).plan
    plan.report(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size < 800_000  # leaves room for the strategies that a search meets
    with opened(browser, tmp_path / "plan.html") as page:
        assert count(page, "#mesh-chart rect") == 1024
        assert int(page.locator("canvas").get_attribute("data-shown") or 0) == len(plan.timeline().events) > 9000
