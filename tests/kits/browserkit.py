"""A real browser for the pages of runs; without one the tests that need it are skipped, and say
so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

INSTALLED = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WHY = 'no browser: pip install -e ".[browser]" and `playwright install chromium`, or a chromium'


@contextmanager
def browser() -> Iterator[Any]:
    """Start a headless Chromium, Playwright's own or an installed one; skip where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason=WHY)
    with playwright.sync_playwright() as found:
        started = _started(found.chromium, playwright.Error)
        if started is None:
            pytest.skip(WHY)
        yield started
        started.close()


def _started(chromium: Any, error: type[Exception]) -> Any:
    paths = [None, *(path for path in map(shutil.which, INSTALLED) if path)]
    for path in paths:
        try:
            return chromium.launch(executable_path=path)
        except error:
            continue
    return None


class Visit:
    """A page that must not complain and must not ask for anything from elsewhere."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def elsewhere(self, home: str) -> list[str]:
        """Return what was asked for that is not below `home` and not on the page itself."""
        return [url for url in self.asked if not url.startswith((home, "data:"))]
