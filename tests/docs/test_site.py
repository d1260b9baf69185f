"""The site of docs/ builds without a warning, every link and anchor in it leads somewhere, and it loads nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import opened, started_browser
from repository import ROOT
from site_pages import PAGES

import phaze
from phaze.commands import COMMANDS
from phaze.commands.help_topics import TOPICS
from phaze.commands.installation_commands import SCHEMAS

LOADED = re.compile(r'<(?:script|link|img|source|iframe)\b[^>]*?\b(?:src|href)="([^"]*)"')
"""What a browser loads by itself when it shows a page."""

FOUND = """() => {
  document.querySelector(".md-search__input").dispatchEvent(new KeyboardEvent("keyup"));
  return document.querySelector(".md-search-result__link");
}"""
"""Whether the search has results; on a busy machine words may be typed before it listens, so the key goes up again."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a broken link, a missing anchor or any warning ends the build with an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    foreign = {
        str(page.relative_to(site)): [address for address in LOADED.findall(page.read_text()) if "//" in address]
        for page in site.rglob("*.html")
    }
    assert {page: addresses for page, addresses in foreign.items() if addresses} == {}


def test_pages_can_be_searched_as_files_without_a_network(site: Path) -> None:
    with started_browser() as browser, opened(browser, site / "index.html") as page:
        page.fill(".md-search__input", "marginal")
        page.wait_for_function(FOUND, polling=200, timeout=120_000)
        assert "Read a plan" in page.inner_text(".md-search-result")


def test_formulas_are_drawn_by_the_browser(site: Path) -> None:
    pages = [page.read_text() for page in (site / "how-it-works").glob("*.html")]
    assert all("<math " in page for page in pages)
    assert not any('class="arithmatex"' in page for page in pages)


def test_every_figure_is_shown_on_a_page(site: Path) -> None:
    text = "".join(page.read_text() for page in site.rglob("*.html"))
    figures = [path.name for path in (site / "figures").glob("*.svg")]
    assert [name for name in figures if f"figures/{name}" not in text] == []
    assert len(figures) == 8


def test_the_reference_has_every_public_name_command_and_format(site: Path) -> None:
    api, commands, formats = (
        (site / "reference" / f"{name}.html").read_text() for name in ("api", "command-line", "file-formats")
    )
    public = [name for name in phaze.__all__ if not name.startswith("_")]
    assert [name for name in public if not re.search(rf'id="phaze\.[\w.]*\b{name}"', api)] == []
    assert [command.name for command in COMMANDS if f'id="{command.name}"' not in commands] == []
    assert [kind for kind in SCHEMAS if f'id="{kind}"' not in formats] == []
    assert json.loads((site / "reference/schemas/plan.json").read_text()) == SCHEMAS["plan"]()


def test_the_reference_has_everything_that_pages_call_on_plans_and_runs(site: Path) -> None:
    pages = "".join((ROOT / "docs" / page).read_text() for page in PAGES if page != "reference/api.md")
    called = set(re.findall(r"\b(?:plan|run)\.([a-z_]+)\b", pages)) - {"json", "html", "md"}
    api = (site / "reference" / "api.html").read_text()
    assert len(called) > 20
    assert sorted(name for name in called if not re.search(rf"[.>]{name}[<\"]", api)) == []


def test_every_topic_that_an_error_names_has_its_part_of_the_questions(site: Path) -> None:
    text = (site / "faq.html").read_text()
    assert [topic for topic in TOPICS if f'id="{topic}"' not in text] == []
