"""A headless Chromium for tests that look at pages, and a page that fails a test by what it logs."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = (os.environ.get("CHROMIUM", "chromium"), "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@contextmanager
def started_browser() -> Iterator[Browser]:
    """The machine's own Chromium; what is missing is said with how to get it."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found, "no Chromium found, and the tests need one to look at pages (apt install chromium; or set CHROMIUM)"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, path: Path, *, width: int = 1280, scheme: str = "light", charts: int | None = None
) -> Iterator[Page]:
    """A page of a file, drawn; in the end nothing may have been logged, thrown or asked of a network."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(f"thrown: {error}"))
    page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.as_uri())
    page.wait_for_function("[...document.querySelectorAll('.chart')].every((chart) => chart.dataset.drawn)")
    yield page
    context.close()
    assert wrong == []
