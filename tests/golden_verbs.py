"""The verbs that the golden files hold the answers of, and the signatures of public names."""

import inspect
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import pivotpatch
from pivotpatch.cli.main import main

GOLDEN = Path(__file__).parent / "golden"
KEPT = GOLDEN / "kept"
IMAGES = "images/labels.csv"
SMALL = ["model.pretrained=false", "model.image_size=32", "data.workers=0"]
# In this order, and in a folder that holds a copy of what was kept.
VERBS: dict[str, list[str]] = {
    "data check": ["data", "check", IMAGES],
    "predict": ["predict", "images/0.png", "--model", "run"],
    "predict top": ["predict", "images/1.png", "--model", "run", "--top-k", "2"],
    "predict file": ["predict", "images", "--model", "run", "--out", "tags.jsonl"],
    "evaluate run": ["evaluate", "run", IMAGES],
    "evaluate scores": ["evaluate", "scores.parquet", "--per-label", "--policy", "fixed:0.5"],
    "evaluate PAT-I": ["evaluate", "checkpoint", IMAGES, "--patch-inference"],
    "audit pairs": ["audit", "pairs", "scores.parquet"],
    "audit pairs at equal recall": [
        "audit",
        "pairs",
        "scores.parquet",
        "--baseline",
        "baseline.parquet",
        "--equal-recall",
    ],
    "audit steps": ["audit", "steps", "scores.parquet"],
    "audit label errors": ["audit", "label-errors", "scores.parquet"],
    "audit cases": ["audit", "cases", "scores.parquet", "--baseline", "baseline.parquet"],
    "tune": ["tune", "run"],
    "train dry run": ["train", IMAGES, "--dry-run", "model.backbone=test_resnet", *SMALL],
    "train resume": ["train", "--resume", "stopped"],
    "recipes": ["recipes"],
}


# Those that show people the same everywhere: the others tell of times, or write a file.
SHOWN = [name for name in VERBS if not name.startswith("train") and name != "predict file"]


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder for a while."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def say(*words: str) -> Any:
    """What a verb prints as JSON: an object, or a list of those that it prints line by line."""
    written = StringIO()
    with redirect_stdout(written):
        assert main([*words, "--json"]) == 0, words
    text = written.getvalue()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


def show(*words: str) -> str:
    """What a verb prints for people in 80 columns, without bars and what pads a table."""
    written = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(written):
        patch.setenv("COLUMNS", "80")
        assert main([*words]) == 0, words
    lines = [re.sub(r"[█-▏]+", "", line).strip() for line in written.getvalue().splitlines()]
    assert all(len(line) <= 80 or "  " not in line for line in lines), words  # a sentence may go on
    return "\n".join(re.sub(r" +", " ", line) for line in lines if line)


def read_blocks(path: Path) -> dict[str, str]:
    """Each command of a golden file, a line that begins with $, and what is below it."""
    blocks = re.split(r"^\$ ", path.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return dict(block.strip().split("\n", 1) for block in blocks)


def describe_api() -> dict[str, Any]:
    """Public names, with the parameters of functions and of the public methods of classes."""
    return {name: _describe(getattr(pivotpatch, name)) for name in pivotpatch.__all__}


def _describe(thing: Any) -> Any:
    if not inspect.isclass(thing):
        return _list_parameters(thing)
    methods = {"__init__": thing} | {
        name: getattr(thing, name)
        for name, value in vars(thing).items()
        if not name.startswith("_") and callable(getattr(thing, name)) and not isinstance(value, type)
    }
    found: dict[str, Any] = {name: _list_parameters(method) for name, method in methods.items()}
    found["attributes"] = sorted(
        name for name, value in vars(thing).items() if isinstance(value, property) and not name.startswith("_")
    )
    return found


def _list_parameters(thing: Any) -> dict[str, str]:
    """Each parameter's kind and default; annotations may be spelt in other ways."""
    signature = inspect.signature(thing)
    return {
        name: f"{parameter.kind.description}"
        + ("" if parameter.default is parameter.empty else f", default {_show(parameter.default)}")
        for name, parameter in signature.parameters.items()
        if name != "self"
    }


def _show(value: Any) -> str:
    return "made anew" if "factory" in repr(value) else repr(value)
