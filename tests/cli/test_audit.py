"""`pivotpatch audit` as a user calls it: scores in, tables, JSON and pictures out."""

import json
from collections.abc import Callable, Sequence
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
from pivotpatch.core.policies import PriorMatched
from pivotpatch.data.scenes import SCENE_LABELS, read_scenes
from pivotpatch.inference.score_file import write_scores
from pivotpatch.inference.scores import Scores
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier

COUNT = 150
SCENES = f"scenes:@test-same?count={COUNT}&size=64"


def make_scores(pull: float, *, seed: int) -> Scores:
    """A model that is pulled towards the companion of what it sees."""
    target = read_scenes("", "test-same", count=COUNT).target()
    generator = torch.Generator().manual_seed(seed)
    image = 4 * target - 2 + pull * target.roll(1, dims=1) + torch.randn(target.shape, generator=generator)
    patches = image[:, None] - pull * target.roll(1, dims=1)[:, None] + torch.randn(COUNT, 4, 10, generator=generator)
    out = combine_logits(image, patches)
    logits = {"image": out.image_logits, "patch": out.pooled_logits, "tde": out.tde_logits}
    pictures = tuple(f"test-same/{place}" for place in range(COUNT))
    return Scores(SCENE_LABELS.names, pictures, target, logits, out.patch_logits, out.weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores")
    model, baseline = make_scores(1.0, seed=1), make_scores(3.0, seed=2)
    write_scores(model, folder / "pat.parquet")
    write_scores(
        replace(baseline, logits={"image": baseline.get("image")}, patch_logits=None, weights=None), folder / "asl.npz"
    )
    write_scores(
        replace(model, logits={"patch": baseline.get("patch")}, patch_logits=None, weights=None),
        folder / "alone.parquet",
    )
    return folder


@pytest.fixture
def audit(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(folder)

    def run(*words: str) -> str:
        assert main(["audit", *words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def read(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_help_names_what_can_be_audited(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["audit", "--help"])
    text = capsys.readouterr().out
    for option in ("--pairs", "--steps", "--scale-study", "--label-errors", "--cases", "--effect", "--baseline"):
        assert option in text


def test_pairs_are_compared_with_the_baseline(audit: Callable[..., str]) -> None:
    found = read(audit("pat.parquet", "--baseline", "asl.npz", "--json"))
    scores = make_scores(1.0, seed=1)
    wanted = rate_pairs(scores, policy=PriorMatched.from_target(scores.target))
    assert found["model"] == json.loads(json.dumps(wanted.to_dict()))
    assert len(found["baseline"]["pairs"]) == len(wanted)
    curve = found["cfpr"]
    assert curve["improved"] + curve["worse"] + curve["tied"] + curve["undefined"] == len(wanted)
    worst = found["worst"][0]
    row = next(
        row for row in found["model"]["pairs"] if [row["label"], row["company"]] == [worst["label"], worst["company"]]
    )
    assert len(worst["false_positives"]) == round(row["cfpr"] * row["cfpr_pictures"])


def test_the_table_lists_the_worst_and_marks_few_pictures(audit: Callable[..., str]) -> None:
    text = audit("pat.parquet", "--baseline", "asl.npz", "--count", "4")
    assert "conditional FPR: better in" in text
    assert "* fewer than 20 pictures" in text
    assert sum("test-same/" in line for line in text.splitlines()) <= 4


def test_options_choose_pairs_kind_and_policy(audit: Callable[..., str]) -> None:
    scores = make_scores(1.0, seed=1)
    found = read(
        audit(
            "pat.parquet",
            "--pair",
            "one; zero",
            "--pair",
            "{two;one}",
            "--kind",
            "image",
            "--policy",
            "prior",
            "--json",
        )
    )
    policy = PriorMatched.from_target(scores.target)
    wanted = rate_pairs(scores, kind="image", policy=policy, pairs=[("one", "zero"), ("two", "one")])
    assert found["pairs"] == json.loads(json.dumps(wanted.to_dict()))["pairs"]
    fewer = read(audit("pat.parquet", "--min-probability", "0.4", "--policy", "top:2", "--json"))
    assert all(row["probability"] > 0.4 for row in fewer["pairs"])
    assert fewer["definition"] == "top-2 labels of each image"
    prior = read(audit("pat.parquet", "--policy", "prior:scenes:@val?count=50", "--json"))
    assert prior["definition"] == "class-prior matched thresholds"


def test_steps_are_those_of_the_function(audit: Callable[..., str]) -> None:
    found = read(audit("pat.parquet", "--steps", "--json"))
    assert found == json.loads(json.dumps(evaluate_steps(make_scores(1.0, seed=1)).to_dict()))
    text = audit("pat.parquet", "--steps", "--count", "2")
    assert len([line for line in text.splitlines() if line.startswith(SCENE_LABELS.names)]) == 4


def test_scale_label_errors_and_cases_are_told(audit: Callable[..., str]) -> None:
    scale = read(audit("pat.parquet", "--scale-study", "alone.parquet", "--json"))
    assert scale["difference"]["value"] == pytest.approx(scale["tde"] - scale["patch"])
    assert "difference" in audit("pat.parquet", "--scale-study", "alone.parquet")
    errors = read(audit("pat.parquet", "--label-errors", "--count", "3", "--json"))
    assert [error["rank"] for error in errors] == [1, 2, 3]
    assert errors[0]["picture"] in audit("pat.parquet", "--label-errors", "--count", "3")
    cases = read(audit("pat.parquet", "--cases", "--baseline", "asl.npz", "--count", "2", "--json"))
    assert [case["shown"] for case in cases] == [True, True, False, False]
    assert cases[0]["picture"] in audit("pat.parquet", "--cases", "--baseline", "asl.npz", "--count", "2")


def test_everything_is_drawn(audit: Callable[..., str], tmp_path: Path) -> None:
    out = ("--plot", str(tmp_path / "new" / "plots"), "--count", "2")
    beside = ("--baseline", "asl.npz")
    audit("pat.parquet", SCENES, *beside, *out)
    audit("pat.parquet", "--steps", *out)
    audit("pat.parquet", "--scale-study", "alone.parquet", *out[:2])
    audit("pat.parquet", SCENES, "--label-errors", *out)
    audit("pat.parquet", SCENES, "--cases", *beside, *out)
    drawn = sorted(path.stem for path in (tmp_path / "new" / "plots").iterdir())
    cases = [f"case_{number}" for number in (1, 2, 3, 4)]
    assert drawn == sorted([*cases, "false_positives", "label_errors", "pairs", "scale", "steps", "worst_pairs"])
    for path in (tmp_path / "new" / "plots").iterdir():
        with Image.open(path) as picture:
            assert picture.width >= 500


def test_cases_are_drawn_with_patches_that_overlap_as_the_file_says(audit: Callable[..., str], tmp_path: Path) -> None:
    scores = make_scores(1.0, seed=1)
    drawn = []
    for overlap in (0.0, 0.5):
        write_scores(replace(scores, overlap=overlap), tmp_path / "s.npz")
        words = (str(tmp_path / "s.npz"), SCENES, "--cases", "--baseline", "asl.npz", "--count", "1")
        audit(*words, "--plot", str(tmp_path))
        with Image.open(tmp_path / "case_1.png") as picture:
            drawn.append(np.asarray(picture.convert("RGB")))
    # The right border of the first patch: in the middle of the picture, or at two thirds of it.
    changed = (drawn[0] != drawn[1]).any(axis=2).any(axis=0).nonzero()[0]
    assert changed.size
    assert changed.max() < drawn[0].shape[1] / 2  # the bars beside the picture are the same


def test_effects_are_tracked_for_a_checkpoint_and_a_baseline(audit: Callable[..., str], tmp_path: Path) -> None:
    for name in ("one", "run/best"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(name))
            model = MultiLabelClassifier("test_resnet", SCENE_LABELS.names, image_size=64)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_checkpoint(model, tmp_path / name)
    words = (
        str(tmp_path / "run"),
        "scenes:@test-same?count=20&size=64",
        "--effect",
        "--baseline",
        str(tmp_path / "one"),
    )
    found = read(audit(*words, "--json", "--plot", str(tmp_path)))
    assert list(found) == [str(tmp_path / "run"), str(tmp_path / "one")]
    for rows in found.values():
        assert [(row["among"], row["kind"]) for row in rows] == [
            (among, kind) for among in ("objects", "scenes") for kind in ("image", "patch", "tde")
        ]
    assert (tmp_path / "direct_effect.png").is_file()
    assert "over image" in audit(*words)


def test_named_pairs_need_their_own_labels_alone(audit: Callable[..., str], tmp_path: Path) -> None:
    scores = make_scores(3.0, seed=2)
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    logits = {"image": scores.get("image")[:, :3]}
    few = Scores(scores.labels[:3], scores.pictures, scores.target[:, :3], logits).select(order)
    write_scores(few, tmp_path / "few.npz")
    words = ("--pair", "one;zero", "--json")
    whole = read(audit("pat.parquet", "--baseline", "asl.npz", *words))
    for data in ((), (SCENES,)):
        assert read(audit("pat.parquet", *data, "--baseline", str(tmp_path / "few.npz"), *words)) == whole
    turned = read(audit(str(tmp_path / "few.npz"), "--baseline", "pat.parquet", *words))
    assert (turned["model"], turned["baseline"]) == (whole["baseline"], whole["model"])
    top = read(audit("pat.parquet", "--baseline", str(tmp_path / "few.npz"), "--policy", "top:2", *words))
    assert top["model"] == read(audit("pat.parquet", "--baseline", "asl.npz", "--policy", "top:2", *words))["model"]
    write_scores(replace(few, target=1 - few.target), tmp_path / "other.npz")
    write_scores(few.select(torch.arange(9)), tmp_path / "fewer.npz")
    for name, message in (("other", "what is true of"), ("fewer", "its pictures are not those of the scores")):
        with pytest.raises(AssertionError, match=message):
            audit("pat.parquet", "--baseline", str(tmp_path / f"{name}.npz"), *words)


def write_table(folder: Path, names: Sequence[str], rows: Sequence[Sequence[float]]) -> str:
    """Scores of some pictures by labels "a" and "b"; what is above 0 is true."""
    lines = ["picture,a,b,target:a,target:b"]
    for name, row in zip(names, rows, strict=True):
        told = [int(value > 0) for value in row]
        lines.append(",".join(map(str, [name, *row, *told])))
    path = folder / "table.csv"
    path.write_text("\n".join(lines))
    return str(path)


def test_pairs_whose_company_never_comes_alone_are_listed_with_their_ctpr(
    audit: Callable[..., str], tmp_path: Path
) -> None:
    text = audit(write_table(tmp_path, "xyz", [[5, 5], [3, 4], [-3, -4]]))
    assert "2 pairs of labels" in text
    assert "without a CFPR, for no picture shows the company alone: 2" in text
    cells = next(line.split() for line in text.splitlines() if line.startswith("a "))
    assert cells == ["a", "b", "1.00", "-", "-", "0*", "0.0", "100.0", "34-100", "2*"]


def test_nothing_to_draw_is_said(audit: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_table(tmp_path, "xyz", [[5, -5], [-3, 4], [-3, -4]])
    assert main(["audit", table, "--baseline", table, "--plot", str(tmp_path / "plots")]) == 0
    assert "there is nothing to show" in capsys.readouterr().err
    same = ["audit", "pat.parquet", SCENES, "--cases", "--baseline", "pat.parquet", "--plot", str(tmp_path / "plots")]
    assert main(same) == 0
    assert "there is nothing to show" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()


def test_no_picture_is_shown_twice_on_a_sheet(audit: Callable[..., str], tmp_path: Path) -> None:
    for name in ("x.png", "y.png"):
        Image.new("RGB", (64, 64)).save(tmp_path / name)
    (tmp_path / "data.csv").write_text("image,labels\nx.png,b|c\ny.png,a|b|c\n")
    (tmp_path / "scores.csv").write_text("picture,image:a,image:b,image:c\nx.png,9,1,1\ny.png,8,1,1\n")
    text = audit(str(tmp_path / "scores.csv"), str(tmp_path / "data.csv"), "--plot", str(tmp_path))
    assert text.count("1.00 x.png") == 2  # in the company of b, and of c
    with Image.open(tmp_path / "false_positives.png") as sheet:
        assert sheet.width < sheet.height


def test_a_sheet_shows_the_pictures_that_have_scores_in_their_own_shape(
    audit: Callable[..., str], tmp_path: Path
) -> None:
    for name, colour in (("w", "blue"), ("x", "red"), ("y", "blue")):
        Image.new("RGB", (80, 20), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "data.csv").write_text("image,labels\nw.png,a\nx.png,b\ny.png,a|b\n")
    (tmp_path / "scores.csv").write_text("picture,image:a,image:b\nx.png,9,1\ny.png,8,1\n")
    audit(str(tmp_path / "scores.csv"), str(tmp_path / "data.csv"), "--plot", str(tmp_path))
    with Image.open(tmp_path / "false_positives.png") as sheet:
        rows, columns = (np.asarray(sheet.convert("RGB")) == [255, 0, 0]).all(axis=2).nonzero()
    assert np.ptp(columns) / np.ptp(rows) == pytest.approx(4, rel=0.1)


def test_an_effect_that_cannot_be_ranked_is_null(audit: Callable[..., str], tmp_path: Path) -> None:
    save_checkpoint(MultiLabelClassifier("test_resnet", SCENE_LABELS.names, image_size=64), tmp_path / "one")
    words = (str(tmp_path / "one"), "scenes:@test-same?count=1&size=64", "--effect")
    (rows,) = read(audit(*words, "--json", "--plot", str(tmp_path))).values()
    assert [row["mean"] for row in rows] == [None] * 6
    assert "nan" not in audit(*words)


def test_a_network_that_does_not_know_scenes_is_refused_before_another_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(MultiLabelClassifier("test_resnet", SCENE_LABELS.names, image_size=64), "one")
    save_checkpoint(MultiLabelClassifier("test_resnet", [*SCENE_LABELS.names[2:], "cat"], image_size=64), "two")
    assert main(["audit", "one", "scenes:@test-same?count=2&size=64", "--effect", "--baseline", "two"]) == 1
    assert capsys.readouterr().err == (
        f"pivotpatch: two: it does not know 2 of the 10 labels of scenes ({', '.join(SCENE_LABELS.names[:2])}); "
        "give a network that was trained on scenes:\n"
    )


def test_tables_need_no_scheme_for_effects(
    audit: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(MultiLabelClassifier("test_resnet", SCENE_LABELS.names, image_size=64), tmp_path / "one")
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("image,labels\na.png,one\n")
    assert main(["audit", str(tmp_path / "one"), str(tmp_path / "t.csv"), "--effect"]) == 1
    assert "direct effects are known on scenes only" in capsys.readouterr().err


def test_pictures_of_fewer_labels_are_audited_by_these(
    audit: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is told is told of scores that never knew the others."""
    scores, places = make_scores(1.0, seed=1), [2, 3, 7]
    names, target = [scores.labels[place] for place in places], scores.target[:, places]
    shown = ("|".join(name for name, there in zip(names, row, strict=True) if there) for row in target.tolist())
    rows = [f"{picture},{labels}" for picture, labels in zip(scores.pictures, shown, strict=True)]
    (folder / "few.csv").write_text("\n".join(["image,labels", *rows]))
    few = Scores(tuple(names), scores.pictures, target, {kind: each[:, places] for kind, each in scores.logits.items()})
    write_scores(few, folder / "few.parquet")
    for part in (["--pairs", "--min-probability", "0.05"], ["--steps"], ["--label-errors"]):
        assert main(["audit", "pat.parquet", "few.csv", *part, "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == (
            "judging 3 of 10 labels: two, three, seven; not in table:few.csv: zero, one, four and 4 more\n"
        )
        assert read(captured.out) == read(audit("few.parquet", *part, "--json"))
    image = make_scores(3.0, seed=2).get("image")[:, places]
    write_scores(replace(few, logits={"image": image}), folder / "few_asl.npz")  # all that a baseline need know
    common = ("--min-probability", "0.05", "--json")
    compared = read(audit("pat.parquet", "few.csv", "--baseline", "asl.npz", *common))
    assert compared == read(audit("few.parquet", "--baseline", "few_asl.npz", *common))
    assert compared["worst"]


def test_a_pair_may_be_of_labels_with_semicolons(audit: Callable[..., str], folder: Path) -> None:
    scores = make_scores(1.0, seed=1)
    write_scores(replace(scores, labels=("a;b?", ";", *scores.labels[2:])), folder / "signs.parquet")
    for text, pair in (("a;b?;two", ("a;b?", "two")), ("three; a;b?", ("three", "a;b?")), ("two;;", ("two", ";"))):
        (found,) = read(audit("signs.parquet", "--pair", text, "--json"))["worst"]
        assert (found["label"], found["company"]) == pair


@pytest.mark.parametrize("option", [("--kind", "patch"), ("--policy", "top:2"), ("--pair", "one;zero")])
def test_options_that_a_part_does_not_look_at_are_refused(
    audit: Callable[..., str], capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    assert main(["audit", "pat.parquet", "--steps", *option]) == 1
    assert f"{option[0]}: it means nothing beside --steps; leave one of the two out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pat.parquet", "a.csv", "b.csv"], "'b.csv': a third word"),
        (["pat.parquet", "nowhere"], "'nowhere': is neither an address nor a table or folder"),
        (["pat.parquet", "--count", "0"], "--count: 0 entries; give 1 or more"),
        (["pat.parquet", "--policy", "fixed"], "--policy: 'fixed' has no number"),
        (["pat.parquet", "--policy", "fixed:7"], "threshold is 7.0; give a probability"),
        (["pat.parquet", "--policy", "tops:3"], "unknown policy 'tops'; did you mean 'top'"),
        (["pat.parquet", "--policy", "prior:nowhere"], "--policy: 'nowhere' is no address"),
        (["pat.parquet", "--pair", "one"], "--pair: 'one' has no semicolon"),
        (["pat.parquet", "--pair", "one;tow"], "unknown label 'tow'; did you mean 'two'"),
        (["asl.npz", "--steps"], "there are no 'patch' logits"),
        (["pat.parquet", "--cases"], "--cases: there is nothing to compare with; give --baseline"),
        (["alone.parquet", "--label-errors", "--plot", "x"], "--plot: it is not known where the pictures are"),
        (
            ["pat.parquet", "--label-errors", "--baseline", "asl.npz"],
            "--baseline: it means nothing beside --label-errors",
        ),
        (
            ["pat.parquet", "--scale-study", "alone.parquet", "--count", "3"],
            "--count: it means nothing beside --scale-study; leave one of the two out",
        ),
        (["run", "--effect", "--count", "3"], "--count: it means nothing beside --effect; leave one of the two out"),
        (["three.csv", "--label-errors"], "--label-errors: 3 pictures are too few to calibrate by; give 5 or more"),
        (["tagger"], "tagger: is a model, not a file of scores; make some first: pivotpatch evaluate tagger DATA"),
        (["run"], "make some first: pivotpatch evaluate run DATA --save x.parquet --keep-patches"),
        (["pat.parquet", "--baseline", "run"], "run: is a folder, not a file of scores"),
        (["pat.parquet", "--effect"], "pat.parquet: holds scores, no network; give a run or a checkpoint"),
        (["nowhere", "--effect"], "nowhere: is neither a run nor a checkpoint nor scores"),
    ],
)
def test_what_cannot_be_audited_is_told_in_one_line(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "run").mkdir(exist_ok=True)
    (folder / "three.csv").write_text("picture,image:a,target:a\nx,1,1\ny,-1,0\nz,2,1\n")
    assert main(["audit", *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
