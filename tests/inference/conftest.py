"""A data set for all tests that match files of scores with one."""

from pathlib import Path

import pytest

from pivotpatch.data.address import open_records
from pivotpatch.data.records import RecordSet


@pytest.fixture
def photos(tmp_path: Path) -> RecordSet:
    """Four pictures, of which none needs to be there."""
    (tmp_path / "photos.csv").write_text("image,labels\nd.jpg,cat|dog\na.jpg,dog\nc.jpg,\nb.jpg,fish|?cat\n")
    return open_records(f"table:{tmp_path / 'photos.csv'}")
