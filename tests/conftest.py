"""Fixtures that more than one folder of tests needs."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from file_server import FileServer
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

settings.register_profile("tests", deadline=None)  # the time of an example depends on who else is at work
settings.load_profile("tests")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, in which a test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def file_server() -> Iterator[FileServer]:
    """Serves files on loopback while a test runs."""
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session", autouse=True)
def picture_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps pictures that are unpacked from Parquet files out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIVOTPATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A real one without a window; PIVOTPATCH_BROWSER names it where it is not on the path."""
    named = os.environ.get("PIVOTPATCH_BROWSER")
    place = named or next((found for found in map(shutil.which, BROWSERS) if found), None)
    if place is None:
        missing = f"no browser: none of {', '.join(BROWSERS)} is installed and PIVOTPATCH_BROWSER names none"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    root = hasattr(os, "geteuid") and os.geteuid() == 0  # Chromium refuses a sandbox there
    from playwright.sync_api import sync_playwright  # the tests of a GPU run without it

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=place, args=["--no-sandbox"] if root else [])
        yield launched
        launched.close()
