"""A mistake is told in one line that says what to do, with exit status 1, and leaves everything as it was.

The commands and the lines stand in tests/golden/refused.txt; `python tests/golden/write.py --refused` writes it anew.
"""

from pathlib import Path

import pytest
from golden_verbs import inside, read_blocks
from refused_verbs import REFUSED, make_place, refuse, take_state


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    with inside(folder):
        make_place()
    return folder


@pytest.mark.parametrize(("command", "line"), read_blocks(REFUSED).items())
def test_a_mistake_is_one_line_and_changes_nothing(command: str, line: str, place: Path) -> None:
    with inside(place):
        before = take_state()
        assert refuse(command) == line
        assert take_state() == before
