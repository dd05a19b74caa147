"""A headless browser for the tests of the page, found on the machine's search path."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class Seen:
    """What a page did while it was open."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # console warnings and errors, uncaught exceptions
    dialogs: list[str] = field(default_factory=list)


def browser_path() -> str:
    """The first browser of NAMES on the search path."""
    found = [path for name in NAMES if (path := shutil.which(name))]
    if not found:
        raise FileNotFoundError(f"The tests of the page need a browser: install one of {', '.join(NAMES)}.")
    return found[0]


@contextmanager
def started() -> Iterator[Browser]:
    """A headless browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, path: Path, *, width: int = 1200, dark: bool = False) -> Iterator[tuple[Page, Seen]]:
    """A page from disk with nothing kept from other pages, and what it did."""
    scheme = "dark" if dark else "light"
    with browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:
        page, seen = context.new_page(), Seen()
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("console", lambda message: seen.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (seen.dialogs.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        yield page, seen


def draw_everything(page: Page) -> None:
    """Scrolls to every panel until its figure is drawn."""
    for panel in page.query_selector_all("[data-panel]"):
        panel.scroll_into_view_if_needed()
        panel.wait_for_selector(".main-svg", state="attached")
