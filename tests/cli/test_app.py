import subprocess
import sys

import pytest

from pivotpatch.cli.main import main

WITHOUT = "import sys; sys.modules['starlette'] = None; from pivotpatch.cli.main import main; sys.exit(main(['app']))"


def test_a_network_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", "--model", "no-such-run"]) == 1
    told = capsys.readouterr()
    assert told.err.startswith("pivotpatch: no-such-run: is neither a bundled model nor a folder")
    assert (told.out, told.err.count("\n")) == ("", 1)


def test_without_the_extra_it_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("pivotpatch: starlette: is not installed; pip install ")
    assert done.stderr.endswith("[app]'\n")


@pytest.mark.parametrize("token", ["short", "with a space", "ümlaut-ümlaut"])
def test_a_token_that_cannot_be_sent_is_refused(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", "--token", token]) == 1
    assert capsys.readouterr().err == (
        "pivotpatch: token: it is too short or has other signs; give 8 or more of A-Z a-z 0-9 . _ ~ + / = -\n"
    )


def test_an_empty_token_in_the_environment_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIVOTPATCH_TOKEN", "")
    assert main(["app"]) == 1
    assert capsys.readouterr().err.startswith("pivotpatch: token: it is too short")
