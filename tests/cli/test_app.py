import sys

import pytest

from pivotpatch.cli.main import main


def test_without_the_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("pivotpatch.app", "starlette"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert main(["app"]) == 1
    assert capsys.readouterr().err.startswith("pivotpatch: starlette: is not installed; pip install ")
