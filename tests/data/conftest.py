"""Records for all tests that load their pictures."""

import pytest
from made_records import COUNT, encoded, make_records

from pivotpatch.data.records import RecordSet


@pytest.fixture
def records() -> RecordSet:
    return make_records([encoded(index) for index in range(COUNT)])


@pytest.fixture
def damaged() -> RecordSet:
    """Pictures 2, 4, 5 and 8 cannot be read."""
    return make_records([b"damaged" if index in (2, 4, 5, 8) else encoded(index) for index in range(COUNT)])
