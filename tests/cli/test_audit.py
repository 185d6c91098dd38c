"""`pivotpatch audit` as a user calls it: scores in, tables, JSON and figures out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from verb import Errors

from pivotpatch.audit.cooccurrence import rate_pairs
from pivotpatch.cli.main import main
from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.data.scenes import SCENE_LABELS, read_scenes
from pivotpatch.inference.score_file import write_scores
from pivotpatch.inference.scores import Scores

COUNT = 150
SCENES = f"scenes:@test-same?count={COUNT}&size=64"
PAIRS = ("pairs", "pat.parquet")
BESIDE = ("--baseline", "asl.parquet")
Audit = Callable[..., str]


def make_scores(pull: float, *, seed: int) -> Scores:
    """A model that is pulled towards the companion of what it sees."""
    target = read_scenes("", "test-same", count=COUNT).target()
    generator = torch.Generator().manual_seed(seed)
    image = 4 * target - 2 + pull * target.roll(1, dims=1) + torch.randn(target.shape, generator=generator)
    patches = image[:, None] - pull * target.roll(1, dims=1)[:, None] + torch.randn(COUNT, 4, 10, generator=generator)
    out = combine_logits(image, patches)
    logits = {"image": out.image_logits, "patch": out.pooled_logits, "tde": out.tde_logits}
    names = tuple(f"test-same/{place}" for place in range(COUNT))
    return Scores(SCENE_LABELS.names, names, target, logits, out.patch_logits, out.weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores")
    model, baseline = make_scores(1.0, seed=1), make_scores(3.0, seed=2)
    write_scores(model, folder / "pat.parquet")
    write_scores(baseline.only("image"), folder / "asl.parquet")
    write_scores(baseline.only("patch"), folder / "alone.parquet")
    (folder / "three.csv").write_text("picture,a,target:a\nx,1,1\ny,-1,0\nz,2,1\n")
    return folder


@pytest.fixture
def audit(folder: Path, capsys: Errors, monkeypatch: pytest.MonkeyPatch) -> Audit:
    monkeypatch.chdir(folder)

    def run(*words: str) -> str:
        assert main(["audit", *words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def read(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_steps_and_scale_are_of_the_definition_that_is_named(audit: Audit) -> None:
    step, envelope = (
        read(audit("steps", "pat.parquet", "--definition", definition, "--json")) for definition in ("step", "envelope")
    )
    assert envelope["mean"]["tde"] > step["mean"]["tde"]
    scale, other = (
        read(audit("scale", "pat.parquet", "alone.parquet", SCENES, "--json", "--definition", definition))
        for definition in ("step", "envelope")
    )
    assert envelope["mean"]["tde"] == pytest.approx(other["tde"])
    assert scale["difference"]["value"] == pytest.approx(scale["tde"] - scale["patch"])


def test_options_choose_pairs_and_policy(audit: Audit) -> None:
    found = read(audit(*PAIRS, "--pair", "one; zero", "--pair", "{two;one}", "--json"))
    wanted = rate_pairs(make_scores(1.0, seed=1), pairs=[("one", "zero"), ("two", "one")])
    assert found["pairs"] == json.loads(json.dumps(wanted.to_dict()))["pairs"]
    fewer = read(audit(*PAIRS, "--min-probability", "0.4", "--policy", "prior:scenes:@val?count=50", "--json"))
    assert all(row["probability"] > 0.4 for row in fewer["pairs"])
    assert fewer["definition"] == "class-prior matched thresholds"
    assert found["definition"] == "target-matched thresholds"


@pytest.mark.parametrize("policy", ["top:1", "best-fixed", "target"])
def test_a_model_beside_itself_is_tied_for_some_pairs_too(policy: str, audit: Audit) -> None:
    """Both sides decide among the same labels."""
    words = ("pairs", "pat.parquet", "--baseline", "pat.parquet", "--pair", "one;zero", "--policy", policy)
    assert "conditional FPR: better in 0 (0 %), worse in 0" in audit(*words)


def test_everything_is_drawn_and_nothing_is_overwritten(audit: Audit, tmp_path: Path, capsys: Errors) -> None:
    plots = tmp_path / "new" / "plots"
    calls = [
        ("pairs", "pat.parquet", SCENES, *BESIDE, "--count", "2"),
        ("steps", "pat.parquet"),
        ("scale", "pat.parquet", "alone.parquet"),
        ("label-errors", "pat.parquet", SCENES, "--count", "2"),
        ("cases", "pat.parquet", SCENES, *BESIDE, "--count", "2"),
    ]
    for words in calls:
        audit(*words, "--plot", str(plots))
    assert main(["audit", "steps", "pat.parquet", "--plot", str(plots)]) == 1
    assert "steps.png: is there already; give --overwrite, or another folder" in capsys.readouterr().err
    drawn = sorted(path.stem for path in plots.iterdir())
    assert drawn == ["case_1", "case_2", "false_positives", "label_errors", "pairs", "scale", "steps", "worst_pairs"]
    audit("pairs", "pat.parquet", *BESIDE, "--pair", "one;zero", "--plot", str(tmp_path / "given"))
    assert [path.name for path in (tmp_path / "given").iterdir()] == ["pairs.png"]
    audit("steps", "pat.parquet", "--plot", str(plots), "--overwrite")
    alone = ["cases", "pat.parquet", SCENES, "--baseline", "pat.parquet", "--plot", str(tmp_path / "none")]
    assert main(["audit", *alone]) == 0
    assert "there is nothing to show" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
