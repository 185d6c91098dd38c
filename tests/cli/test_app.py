import subprocess
import sys

import pytest

from pivotpatch.cli.main import main

WITHOUT = "import sys; sys.modules['gradio'] = None; from pivotpatch.cli.main import main; sys.exit(main(['app']))"


def test_a_network_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", "--model", "no-such-run"]) == 1
    told = capsys.readouterr()
    assert told.err.startswith("pivotpatch: no-such-run: is neither a bundled model nor a folder")
    assert (told.out, told.err.count("\n")) == ("", 1)


def test_without_the_extra_it_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "pivotpatch: gradio: is not installed; pip install pivotpatch[app]\n")
