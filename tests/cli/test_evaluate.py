import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from verb import LABELS, QUICK, Errors, read_json, read_refusal, save, score, write_run

from pivotpatch.cli.main import main
from pivotpatch.core.metrics import precision_recall
from pivotpatch.core.policies import PerLabel, PriorMatched
from pivotpatch.data.address import open_records
from pivotpatch.data.records import RecordSet
from pivotpatch.inference.score_file import read_scores
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.values import Calibration


def evaluate(capsys: Errors, *words: str) -> dict[str, Any]:
    return read_json(capsys, "evaluate", *words)


def read_photos() -> RecordSet:
    return open_records("table:photos.csv").keep_labels(LABELS)


def forget(label: str) -> None:
    """Write a table of the same images that does not know a label."""
    rows = [row.split(",") for row in Path("photos.csv").read_text().splitlines()[1:]]
    kept = [f"{name},{'|'.join(each for each in labels.split('|') if each != label)}\n" for name, labels in rows]
    Path("few.csv").write_text("image,labels\n" + "".join(kept))


@pytest.mark.parametrize("policy", ["fitted", "prior", None])
def test_rules_of_a_model_decide_about_labels_that_are_judged(policy: str | None, photos: Path, capsys: Errors) -> None:
    model = save("model")
    Path("train.csv").write_text("image,labels\n0.png,cat\n1.png,cat|dog\n2.png,cat|fish\n3.png,dog\n")
    write_run("run", model, "data.val_fraction=0")
    model.thresholds = (0.4, 0.45, 0.6)
    model.calibration = Calibration("tde", "platt", (3.0, 2.0, 1.0), (0.1, 0.0, -0.1))
    save_checkpoint(model, "run/best", overwrite=True)
    forget("cat")
    words = QUICK if policy is None else (*QUICK, "--policy", policy)
    policy = policy or "fitted"  # what predict decides by is the default
    kinds = evaluate(capsys, "run", "photos.csv", *words)["kinds"]
    assert (kinds["image"]["decided"] is None) == (policy == "fitted")  # thresholds of TDE say nothing of it
    whole, few = kinds["tde"], evaluate(capsys, "run", "few.csv", *words)["kinds"]["tde"]
    for measure in ("precision", "recall"):
        assert few["decided"][measure] == whole["decided"][measure][1:]
    scores = score(model, read_photos())
    rule = PerLabel(model.thresholds) if policy == "fitted" else PriorMatched((0.75, 0.5, 0.25))
    probs = model.calibration.apply(scores.scaled("tde")) if policy == "fitted" else scores.logits["tde"]
    expected = precision_recall(probs, scores.target, policy=rule, labels=LABELS)
    assert whole["decided"]["recall"] == pytest.approx(expected.recall)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_tags_are_judged_as_predict_gave_them(suffix: str, photos: Path, capsys: Errors) -> None:
    model = save("model")
    model.thresholds = (0.4, 0.45, 0.6)
    model.calibration = Calibration("tde", "platt", (3.0, 2.0, 1.0), (0.1, 0.0, -0.1))
    save_checkpoint(model, "model", overwrite=True)
    Path("sub").mkdir()
    Image.new("RGB", (40, 40)).save("sub/other.png")
    for name, words in (("few", ()), ("all", ("--all-probs",))):
        predict = ["predict", ".", "--model", "model", "--out", f"sub/{name}{suffix}", "--workers", "0", *words]
        assert main(predict) == 0
    live = evaluate(capsys, "model", "photos.csv", *QUICK)
    whole = evaluate(capsys, f"sub/all{suffix}", "photos.csv", "--resamples", "0")
    assert whole["mAP"]["image"] == pytest.approx(live["mAP"]["tde"], abs=1e-6)
    assert main(["evaluate", f"sub/few{suffix}", "photos.csv", "--json"]) == 0
    captured = capsys.readouterr()
    assert "1 of 22 images are not in table:photos.csv and are left out" in captured.err
    assert "the tags alone: mAP, intervals and top-3 need predict --all-probs" in captured.err
    few = json.loads(captured.out)
    for measure in ("CP", "CR", "CF1", "OP", "OR", "OF1"):
        expected = live["kinds"]["tde"]["decided"][measure]
        assert whole["kinds"]["image"]["decided"][measure] == few["decided"][measure] == pytest.approx(expected)
    assert main(["evaluate", f"sub/few{suffix}", "photos.csv"]) == 0
    assert re.search(rf"CF1 +{100 * few['decided']['CF1']:.1f}", capsys.readouterr().out)
    few_tags = f"sub/few{suffix}"
    assert "alone; write it with" in read_refusal(capsys, "evaluate", few_tags, "photos.csv", "--policy", "top:1")
    assert "alone; write it with" in read_refusal(capsys, "audit", "pairs", few_tags, "photos.csv")
    Path("tags.toml").write_text("rename = {" + ", ".join(f"{name} = 'my {name}'" for name in LABELS) + "}")
    assert main(["predict", ".", "--model", "model", "--out", f"own{suffix}", "--tags", "tags.toml"]) == 0
    refused = read_refusal(capsys, "evaluate", f"own{suffix}", "photos.csv")
    assert "its tags have names of their own, such as 'my " in refused
    Path(f"{few_tags}.summary.json").write_text("{}")
    assert "its tags or few" in read_refusal(capsys, "evaluate", few_tags, "photos.csv")


def test_tags_are_matched_by_where_images_lie_before_the_ends_of_their_paths(photos: Path, capsys: Errors) -> None:
    save("model")
    images = [f"photos{i}.png" for i in range(21)]
    Path("store").mkdir()
    for name in images:
        Path("store", f"blob-{name}").write_bytes(Path(name).read_bytes())
        Path(name).unlink()
        Path(name).symlink_to(Path("store", f"blob-{name}").resolve())
    assert main(["predict", *images, "--model", "model", "--out", "tags.csv", "--all-probs"]) == 0
    here = evaluate(capsys, "tags.csv", "photos.csv", "--resamples", "0")
    assert here["mAP"]["image"] == pytest.approx(
        evaluate(capsys, "model", "photos.csv", *QUICK)["mAP"]["tde"], abs=1e-6
    )
    shutil.copytree(".", "../moved", symlinks=True)
    assert main(["evaluate", "tags.csv", "../moved/photos.csv"]) == 0
    assert "none of its images lies where table:../moved/photos.csv has them" in capsys.readouterr().err


def test_tags_of_rows_of_a_table_are_judged_by_that_table(photos: Path, capsys: Errors) -> None:
    """Bulk tagging names images inside a table by row, the table may have names of its own for them."""
    save("model")
    records = read_photos()
    rows = [{"bytes": records[i].image.read_bytes(), "path": f"{20 - i}.png"} for i in range(21)]  # type: ignore[union-attr]
    labels = [[LABELS[label] for label in record.positive] for record in records]
    Path("inside").mkdir()
    for name, part in (("a", slice(0, 9)), ("b", slice(9, 21))):
        pq.write_table(pa.table({"image": rows[part], "labels": labels[part]}), f"inside/{name}.parquet")
    packed = ["inside/b.parquet", "inside/a.parquet", "--model", "model", "--workers", "0"]
    assert main(["predict", *packed, "--out", "tags.parquet", "--all-probs"]) == 0
    capsys.readouterr()
    found = evaluate(capsys, "tags.parquet", "inside", "--resamples", "0")
    live = evaluate(capsys, "model", "inside", *QUICK)
    assert evaluate(capsys, "model", "inside/*.parquet", *QUICK)["mAP"] == live["mAP"]  # a pattern is no missing table
    assert found["mAP"]["image"] == pytest.approx(live["mAP"]["tde"], abs=1e-3)


@pytest.mark.parametrize("named", [True, False])
def test_rows_of_tables_of_one_name_are_told_apart_by_their_folders(named: bool, photos: Path, capsys: Errors) -> None:
    save("model")
    records = read_photos()
    held = [records[i].image.read_bytes() for i in range(20)]  # type: ignore[union-attr]
    rows = [{"bytes": row, "path": f"{i}.png"} for i, row in enumerate(held)] if named else held
    labels = [[LABELS[label] for label in record.positive] for record in records]
    for name, part in (("a", slice(0, 10)), ("b", slice(10, 20))):
        Path("inside", name).mkdir(parents=True)
        pq.write_table(pa.table({"image": rows[part], "labels": labels[part]}), f"inside/{name}/part.parquet")
    both = "table:inside/*/part.parquet"
    for name, data in (("a", "inside/a/part.parquet"), ("b", "inside/b/part.parquet"), ("*", both)):
        tagged = [*map(str, sorted(Path("inside").glob(f"{name}/part.parquet"))), "--model", "model", "--workers", "0"]
        assert main(["predict", *tagged, "--out", "tags.csv", "--all-probs", "--overwrite"]) == 0
        capsys.readouterr()
        found = evaluate(capsys, "tags.csv", both, "--resamples", "0")
        live = evaluate(capsys, "model", data, *QUICK, "--save", f"of-{name.strip('*')}.parquet")
        assert found["mAP"]["image"] == pytest.approx(live["mAP"]["tde"], abs=1e-3)


def test_tags_of_an_image_are_not_taken_for_those_of_another_with_the_end_of_its_path(
    photos: Path, capsys: Errors
) -> None:
    save("model")
    first, second, third = sorted(photos.glob("*.png"))[:3]
    for folder, files in (("train", (first, third)), ("test", (second,))):
        Path(folder).mkdir()
        for file in files:
            shutil.copy(file, folder)
    rows = "".join(f"{file.name},{LABELS[place % 2]}\n" for place, file in enumerate((first, second)))
    Path("truth.csv").write_text(f"image,labels\n{rows}")
    assert main(["predict", "train", "test", "--model", "model", "--out", "tags.jsonl", "--all-probs"]) == 0
    found = read_scores(Path("tags.jsonl"), records=open_records("table:truth.csv?root=test"), tell=print)
    assert found.pictures == (second.name,)
    assert f"1 of 2 images of table:truth.csv?root=test have no scores and are left out ({first.name})" in (
        capsys.readouterr().out
    )


def test_a_file_of_scores_is_judged_with_another_lam(photos: Path, capsys: Errors) -> None:
    model = save("model")
    evaluate(capsys, "model", "photos.csv", *QUICK, "--save", "whole.parquet", "--keep-patches")
    evaluate(
        capsys, "whole.parquet", "--resamples", "0", "--lam", "0.25", "--temperature", "2", "--save", "other.parquet"
    )
    scores = read_scores(Path("other.parquet"))
    assert isinstance(model, PatchClassifier)
    model.set_mixing(lam=0.25, temperature=2.0)
    torch.testing.assert_close(scores.get("tde"), score(model, read_photos()).get("tde"), rtol=1e-4, atol=1e-4)
    assert (scores.lam, scores.temperature) == (0.25, 2.0)


def test_a_mixture_that_cannot_be_made_or_kept_is_refused(photos: Path, capsys: Errors) -> None:
    model = save("model")
    model.thresholds = (0.3,) * len(LABELS)
    save_checkpoint(model, "tuned")
    evaluate(capsys, "tuned", "photos.csv", *QUICK, "--save", "whole.parquet")
    assert read_scores(Path("whole.parquet")).thresholds is not None
    again = ("evaluate", "whole.parquet", "--lam", "0.5", "--save")
    assert "--save: whole.parquet is the file" in read_refusal(capsys, *again, "whole.parquet")
    assert "again with --keep-patches" in read_refusal(capsys, "evaluate", "whole.parquet", "--temperature", "2")
    assert main([*again, "other.parquet", "--resamples", "0"]) == 0
    assert "thresholds and calibration are left out" in capsys.readouterr().err
    assert read_scores(Path("other.parquet")).thresholds is None
    Path("theirs.csv").write_text("picture,cat,target:cat\na.jpg,0.9,1\nb.jpg,0.1,0\n")
    assert "--lam: theirs.csv holds no logits" in read_refusal(capsys, "evaluate", "theirs.csv", "--lam", "0.5")
