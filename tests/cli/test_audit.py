"""`pivotpatch audit` as a user calls it: scores in, tables, JSON and figures out."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pivotpatch.audit.cooccurrence import rate_pairs
from pivotpatch.audit.stepwise import evaluate_steps
from pivotpatch.cli.main import main
from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.data.scenes import SCENE_LABELS, read_scenes
from pivotpatch.inference.score_file import write_scores
from pivotpatch.inference.scores import Scores
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier

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


def keep(scores: Scores, kind: str, labels: slice = slice(None)) -> Scores:
    """One kind of logits, and some of the labels."""
    logits = {kind: scores.get(kind)[:, labels]}
    return Scores(scores.labels[labels], scores.pictures, scores.target[:, labels], logits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores")
    model, baseline = make_scores(1.0, seed=1), make_scores(3.0, seed=2)
    write_scores(model, folder / "pat.parquet")
    write_scores(keep(baseline, "image"), folder / "asl.parquet")
    write_scores(keep(baseline, "patch"), folder / "alone.parquet")
    (folder / "run").mkdir()
    (folder / "three.csv").write_text("picture,image:a,target:a\nx,1,1\ny,-1,0\nz,2,1\n")
    return folder


@pytest.fixture
def audit(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Audit:
    monkeypatch.chdir(folder)

    def run(*words: str) -> str:
        assert main(["audit", *words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def read(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_help_lists_the_parts_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["audit", "--help"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for part in ("pairs", "steps", "scale", "label-errors", "cases", "effect"):
        assert len(next(line for line in lines if line and line[0] == part)) > 3


def test_pairs_are_compared_with_the_baseline(audit: Audit) -> None:
    found = read(audit(*PAIRS, *BESIDE, "--json"))
    wanted = rate_pairs(make_scores(1.0, seed=1))
    assert found["model"] == json.loads(json.dumps(wanted.to_dict()))
    assert found["baseline"] == json.loads(json.dumps(rate_pairs(keep(make_scores(3.0, seed=2), "image")).to_dict()))
    worst = found["worst"][0]
    row = found["model"]["pairs"][wanted.names.index((worst["label"], worst["company"]))]
    assert len(worst["false_positives"]) == round(row["cfpr"] * row["cfpr_pictures"])
    text = audit(*PAIRS, *BESIDE, "--count", "4")
    assert "conditional FPR: better in" in text
    assert "*: fewer than 20 images" in text
    assert sum("test-same/" in line for line in text.splitlines()) <= 4


def test_options_choose_pairs_kind_and_policy(audit: Audit) -> None:
    found = read(audit(*PAIRS, "--pair", "one; zero", "--pair", "{two;one}", "--kind", "image", "--json"))
    wanted = rate_pairs(make_scores(1.0, seed=1), kind="image", pairs=[("one", "zero"), ("two", "one")])
    assert found["pairs"] == json.loads(json.dumps(wanted.to_dict()))["pairs"]
    fewer = read(audit(*PAIRS, "--min-probability", "0.4", "--policy", "top:2", "--json"))
    assert all(row["probability"] > 0.4 for row in fewer["pairs"])
    assert fewer["definition"] == "top-2 labels of each image"
    prior = read(audit(*PAIRS, "--policy", "prior:scenes:@val?count=50", "--json"))
    assert prior["definition"] == "class-prior matched thresholds"


def test_steps_scale_label_errors_and_cases_are_told(audit: Audit) -> None:
    found = read(audit("steps", "pat.parquet", "--json"))
    assert found == json.loads(json.dumps(evaluate_steps(make_scores(1.0, seed=1)).to_dict()))
    text = audit("steps", "pat.parquet", "--count", "2")
    assert len([line for line in text.splitlines() if line.startswith(SCENE_LABELS.names)]) == 4
    scale = read(audit("scale", "pat.parquet", "alone.parquet", SCENES, "--json"))
    assert scale["difference"]["value"] == pytest.approx(scale["tde"] - scale["patch"])
    assert "difference" in audit("scale", "pat.parquet", "alone.parquet")
    errors = read(audit("label-errors", "pat.parquet", "--count", "3", "--json"))
    assert [error["rank"] for error in errors] == [1, 2, 3]
    assert errors[0]["picture"] in audit("label-errors", "pat.parquet", "--count", "3")
    cases = read(audit("cases", "pat.parquet", *BESIDE, "--count", "2", "--json"))
    assert [case["shown"] for case in cases] == [True, True, False, False]
    assert cases[0]["picture"] in audit("cases", "pat.parquet", *BESIDE, "--count", "2")


def test_what_is_printed_fits_80_columns(audit: Audit, tmp_path: Path) -> None:
    scores = make_scores(1.0, seed=1)
    names = tuple(f"a long name of {name}" for name in scores.labels)
    long = replace(scores, labels=names, pictures=tuple(f"{'folder/' * 12}{name}" for name in scores.pictures))
    path, other = str(tmp_path / "long.parquet"), str(tmp_path / "other.parquet")
    write_scores(long, path)
    write_scores(replace(long, logits={"image": -long.get("image")}, patch_logits=None, weights=None), other)
    for part in (["pairs", path, "--baseline", other], ["steps", path], ["cases", path, "--baseline", other]):
        text = audit(*part)
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text


def test_everything_is_drawn_and_nothing_is_overwritten(
    audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        assert main(["audit", *words, "--plot", str(plots)]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""  # it was refused before the work
        assert ".png: is there already; give --overwrite, or another folder" in captured.err
    drawn = sorted(path.stem for path in plots.iterdir())
    cases = [f"case_{number}" for number in (1, 2, 3, 4)]
    assert drawn == sorted([*cases, "false_positives", "label_errors", "pairs", "scale", "steps", "worst_pairs"])
    audit("pairs", "pat.parquet", *BESIDE, "--pair", "one;zero", "--plot", str(tmp_path / "given"))
    assert [path.name for path in (tmp_path / "given").iterdir()] == ["pairs.png"]
    before = (plots / "steps.png").stat().st_mtime_ns
    audit("steps", "pat.parquet", "--plot", str(plots), "--overwrite")
    assert (plots / "steps.png").stat().st_mtime_ns > before


def test_nothing_to_draw_is_said(audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cases", "pat.parquet", SCENES, "--baseline", "pat.parquet", "--plot", str(tmp_path / "plots")]
    assert main(["audit", *words]) == 0
    assert "there is nothing to show" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()


def test_named_pairs_need_their_own_labels_alone(audit: Audit, tmp_path: Path) -> None:
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    few = keep(make_scores(3.0, seed=2), "image", slice(3)).select(order)
    path = str(tmp_path / "few.parquet")
    write_scores(few, path)
    words = ("--pair", "one;zero", "--json")
    whole = read(audit(*PAIRS, *BESIDE, *words))
    for data in ((), (SCENES,)):
        assert read(audit(*PAIRS, *data, "--baseline", path, *words)) == whole
    turned = read(audit("pairs", path, "--baseline", "pat.parquet", *words))
    assert (turned["model"], turned["baseline"]) == (whole["baseline"], whole["model"])
    write_scores(few.select(torch.arange(9)), tmp_path / "fewer.parquet")
    with pytest.raises(AssertionError, match="fewer.parquet: "):
        audit(*PAIRS, "--baseline", str(tmp_path / "fewer.parquet"), *words)


def test_pairs_whose_context_never_comes_alone_are_listed_with_their_ctpr(audit: Audit, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("picture,a,b,target:a,target:b\nx,5,5,1,1\ny,3,4,1,1\nz,-3,-4,0,0\n")
    text = audit("pairs", str(tmp_path / "t.csv"))
    assert "without a CFPR, for no image shows the context alone: 2" in text
    cells = next(line.split() for line in text.splitlines() if line.startswith("a; b"))
    assert cells == ["a;", "b", "1.00", "-", "-", "0", "0.0", "100.0*"]


def test_a_sheet_shows_each_image_that_has_scores_once_and_in_its_own_shape(audit: Audit, tmp_path: Path) -> None:
    for name, colour in (("w", "blue"), ("x", "red"), ("y", "blue")):
        Image.new("RGB", (80, 20), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "data.csv").write_text("image,labels\nw.png,a\nx.png,b|c\ny.png,a|b|c\n")
    (tmp_path / "scores.csv").write_text("picture,image:a,image:b,image:c\nx.png,9,1,1\ny.png,8,1,1\n")
    text = audit("pairs", str(tmp_path / "scores.csv"), str(tmp_path / "data.csv"), "--plot", str(tmp_path))
    assert text.count("1.00  x.png") == 2  # beside b, and beside c
    with Image.open(tmp_path / "false_positives.png") as sheet:
        rows, columns = (np.asarray(sheet.convert("RGB")) == [255, 0, 0]).all(axis=2).nonzero()
        assert sheet.width < sheet.height
    assert np.ptp(columns) / np.ptp(rows) == pytest.approx(4, rel=0.1)


def save_model(path: Path) -> str:
    path.parent.mkdir(exist_ok=True)
    save_checkpoint(MultiLabelClassifier("test_resnet", SCENE_LABELS.names, image_size=64), path)
    return str(path)


def test_effects_are_tracked_for_a_run_and_a_baseline(audit: Audit, tmp_path: Path) -> None:
    one, run = save_model(tmp_path / "one"), str(Path(save_model(tmp_path / "run" / "best")).parent)
    scenes = "scenes:@test-same?count=20&size=64"
    found = read(audit("effect", run, scenes, "--baseline", one, "--json", "--plot", str(tmp_path)))
    assert list(found) == [run, one]
    kinds = [(among, kind) for among in ("objects", "scenes") for kind in ("image", "patch", "tde")]
    assert [[(row["among"], row["kind"]) for row in rows] for rows in found.values()] == [kinds, kinds]
    assert (tmp_path / "direct_effect.png").is_file()
    text = audit("effect", run, "scenes:@test-same?count=1&size=64")  # nothing can be ranked
    assert "over image" in text
    assert "nan" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pairs pat.parquet a.csv b.csv", "got pat.parquet, a.csv, b.csv; give SCORES [DATA]"),
        ("scale pat.parquet", "got pat.parquet; give SCORES PATCH_SCORES [DATA]"),
        ("pairs pat.parquet nowhere", "'nowhere': is neither an address nor a table or folder"),
        ("steps pat.parquet --count 0", "--count: 0 entries; give 1 or more"),
        ("pairs pat.parquet --policy fixed", "--policy: 'fixed' has no number"),
        ("pairs pat.parquet --policy tops:3", "unknown policy 'tops'; did you mean 'top'"),
        ("pairs pat.parquet --policy prior:nowhere", "--policy: 'nowhere' is no address"),
        ("pairs pat.parquet --pair one", "--pair: 'one' has no semicolon"),
        ("pairs pat.parquet --pair one;tow", "unknown label 'tow'; did you mean 'two'"),
        ("steps asl.parquet", "there are no 'patch' logits"),
        ("label-errors alone.parquet --plot x", "--plot: it is not known where the images are"),
        ("label-errors three.csv", "label-errors: 3 images are too few to calibrate by; give 5 or more"),
        ("pairs tagger", "not a file of scores; make some first: pivotpatch evaluate tagger DATA"),
        ("pairs pat.parquet --baseline run", "run: is a folder, not a file of scores"),
        ("effect pat.parquet", "pat.parquet: holds scores, no model; give a run or a checkpoint"),
        ("effect nowhere", "nowhere: is neither a run nor a checkpoint nor scores"),
    ],
)
def test_what_cannot_be_audited_is_told_in_one_line(
    words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(["audit", *words.split()]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
