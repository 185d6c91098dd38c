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


def test_a_token_that_cannot_be_sent_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in ("", "short", "with a space", "ümlaut-ümlaut"):
        monkeypatch.setenv("PIVOTPATCH_TOKEN", token)
        assert main(["app"]) == 1
        assert capsys.readouterr().err.startswith("pivotpatch: token: it is too short or has other signs; give 8 or")
