"""Fixtures that more than one folder of tests needs."""

import threading
from collections.abc import Iterator

import pytest
from file_server import FileServer


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
