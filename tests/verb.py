"""Verbs of the command line in this process: what they print as JSON, and how they refuse."""

import json
from typing import Any

import pytest

from pivotpatch.cli.main import main


def read_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What a verb prints."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def read_refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a mistake is told in."""
    capsys.readouterr()
    assert main([*words]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1].removeprefix("pivotpatch: ")
