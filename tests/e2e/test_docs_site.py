"""The pages as a site: no dead link or anchor, readable on a telephone, searched from files without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: see requirements-dev.txt")
pytest.importorskip("material", reason="mkdocs-material is not installed: see requirements-dev.txt")

ROOT = Path(__file__).parents[2]
CHROMIUM = Path("/usr/bin/chromium")
TOP = ("index", "train", "agents/index", "media", "scale", "debug", "plugins", "operate")
TABS = ("Start", "Train", "Agents", "Images", "Scale", "Debug", "Plugins", "Operate")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a warning, e.g. of an anchor that is not there, is an error."""
    folder = tmp_path_factory.mktemp("site")
    for script in ("generate_reference.py", "generate_api.py"):  # as `make docs`: their pages are in no clone
        subprocess.run([sys.executable, ROOT / "docs" / script], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield found
        found.close()


def test_no_page_is_wider_than_its_window_or_asks_the_network(site: Path, browser: Any) -> None:
    view = browser.new_page()
    asked: list[str] = []
    view.on("request", lambda request: asked.append(request.url))
    wide = []
    for page in (page for page in sorted(site.rglob("*.html")) if page.name != "404.html"):  # which a server shows
        view.goto(page.as_uri())
        for width in (400, 1400):
            view.set_viewport_size({"width": width, "height": 900})
            if view.evaluate("document.documentElement.scrollWidth") > width:
                wide.append((page.relative_to(site), width))
    assert not wide
    assert asked
    assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]


def test_a_site_of_eight_tasks(site: Path, browser: Any) -> None:
    view = browser.new_page(viewport={"width": 1400, "height": 900})
    view.goto((site / "index.html").as_uri())
    assert tuple(tab.inner_text() for tab in view.locator(".md-tabs__link").all()) == TABS
    targets = [tab.get_attribute("href").removesuffix(".html") for tab in view.locator(".md-tabs__link").all()]
    assert [target.removeprefix("./") for target in targets] == list(TOP)


def test_the_search_works_from_files(site: Path, browser: Any) -> None:
    view = browser.new_page(viewport={"width": 1400, "height": 900})
    view.goto((site / "operate.html").as_uri())
    view.keyboard.press("/")
    view.keyboard.type("leave one out")
    view.wait_for_selector(".md-search-result__item", timeout=60_000)
    assert "GRPO" in view.locator(".md-search-result__list").inner_text()
