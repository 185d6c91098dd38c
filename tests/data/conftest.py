"""Records for all tests that load their images, and a cache of its own for each test."""

from pathlib import Path

import pytest
from made_records import COUNT, encoded, make_records

from pivotpatch.data.records import RecordSet


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "unpacked"
    monkeypatch.setenv("PIVOTPATCH_CACHE", str(folder))
    return folder


@pytest.fixture
def records() -> RecordSet:
    return make_records([encoded(index) for index in range(COUNT)])


@pytest.fixture
def damaged() -> RecordSet:
    """Pictures 2, 4, 5 and 8 cannot be read."""
    return make_records([b"damaged" if index in (2, 4, 5, 8) else encoded(index) for index in range(COUNT)])
