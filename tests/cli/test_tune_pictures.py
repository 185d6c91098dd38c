"""Which pictures a network may be tuned on, asked without fitting anything; test_tune.py has the verb's messages."""

import io
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from pivotpatch.cli.sources import Source
from pivotpatch.cli.tune_pictures import check_scores, open_tuning_pictures
from pivotpatch.data.address import open_records
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.training.build import open_training_records
from pivotpatch.training.config import load_config

COUNT = 10
MODEL = MultiLabelClassifier("test_vit", ["cat", "dog"], image_size=32)
REFUSED = "of its .* pictures are among those that the run was trained on"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two folders with the same names of files, each with a table."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIVOTPATCH_CACHE", str(tmp_path / "cache"))
    for folder in ("ours", "theirs"):
        Path(folder).mkdir()
        write_table(f"{folder}/all.csv", range(COUNT))
    return tmp_path


def write_table(path: str, places: range) -> str:
    """A table of pictures, which nobody opens; its labels stand in another order than those of the network."""
    rows = [f"{place}.png,{place % 2},{place % 3 // 2}\n" for place in places]
    Path(path).write_text("image,dog,cat\n" + "".join(rows))
    return f"table:{path}"


def make_source(train: str | None, *changes: str) -> Source:
    """A network that was trained on these pictures, half of which were held out; a checkpoint where there are none."""
    words = [f"data.train={train}", "data.val_fraction=0.5", "data.labels=['cat', 'dog']", *changes]
    return Source(Path("run"), MODEL, None if train is None else load_config(None, words), Path("run/best"))


def make_scores(records: RecordSet, *, data: str | None = None) -> Scores:
    names, target = tuple(record.name for record in records), records.target()
    return Scores(records.labels.names, names, target, {"image": torch.zeros_like(target)}, data=data)


def names_of(records: RecordSet | None) -> list[str]:
    assert records is not None
    return [record.name for record in records]


def test_named_pictures_have_the_labels_in_the_order_of_the_network() -> None:
    found = open_tuning_pictures(make_source("table:ours/all.csv"), ["run", "theirs/all.csv"], scored=False)
    assert found is not None
    assert found.labels.names == ("cat", "dog")
    expected = torch.tensor([[place % 3 // 2, place % 2] for place in range(COUNT)], dtype=torch.float32)
    assert torch.equal(found.target(), expected)  # and the same names elsewhere are other pictures


def test_what_was_held_out_may_be_named_but_nothing_besides() -> None:
    source = make_source("table:ours/all.csv")
    assert source.config is not None
    train, val = open_training_records(source.config)
    held = names_of(open_tuning_pictures(source, ["run"], scored=False))
    assert held == names_of(val)
    rows = Path("ours/all.csv").read_text().splitlines()
    allowed = [row for row in rows if row.partition(",")[0] not in names_of(train)]
    Path("ours/held.csv").write_text("\n".join(allowed))
    assert sorted(names_of(open_tuning_pictures(source, ["run", "ours/held.csv"], scored=False))) == sorted(held)
    one = next(row for row in rows if row.partition(",")[0] in names_of(train))
    Path("ours/more.csv").write_text("\n".join([*allowed, one]))
    with pytest.raises(InputError, match=f"table:ours/more.csv: 1 of its {len(held) + 1} pictures are among"):
        open_tuning_pictures(source, ["run", "ours/more.csv"], scored=False)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="no links here")
def test_training_pictures_are_known_behind_a_link() -> None:
    Path("link").symlink_to("ours")
    with pytest.raises(InputError, match=REFUSED):
        open_tuning_pictures(make_source("table:ours/all.csv"), ["run", "link/all.csv"], scored=False)


def write_parquet(path: str) -> str:
    """Pictures inside a table; without a place in a folder, their names alone tell them apart."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    columns = {
        "image": [{"bytes": buffer.getvalue(), "path": f"{place}.png"} for place in range(COUNT)],
        "labels": [["cat"] if place % 2 else ["dog"] for place in range(COUNT)],
    }
    pq.write_table(pa.table(columns), path)
    return f"table:{path}"


def test_pictures_inside_a_table_are_those_of_that_table() -> None:
    source = make_source(write_parquet("ours/all.parquet"))
    other = write_parquet("theirs/all.parquet")
    assert len(names_of(open_tuning_pictures(source, ["run", other], scored=False))) == COUNT
    for again in ("ours/all.parquet", f"table:{Path.cwd()}/ours/all.parquet"):
        with pytest.raises(InputError, match=f"5 {REFUSED}"):
            open_tuning_pictures(source, ["run", again], scored=False)


def test_scores_alone_bring_no_pictures() -> None:
    for source in (make_source("table:ours/all.csv"), make_source(None)):
        assert open_tuning_pictures(source, ["run"], scored=True) is None
    for source, wrong in (
        (make_source(None), "a checkpoint knows no pictures"),
        (make_source("table:ours/all.csv", "data.val_fraction=0"), "the run held out no pictures"),
    ):
        with pytest.raises(InputError, match=f"run: {wrong}; name validation pictures after it"):
            open_tuning_pictures(source, ["run"], scored=False)


def check(source: Source, scores: Scores) -> None:
    check_scores(source, scores, records=None, where=Path("x.npz"))


@pytest.mark.parametrize("data", ["table:ours/all.csv", None, "table:gone.csv"])
def test_scores_of_training_pictures_are_known_by_their_data_or_else_by_names_and_truth(data: str | None) -> None:
    source = make_source("table:ours/all.csv")
    assert source.config is not None
    train, val = open_training_records(source.config)
    assert val is not None
    check(source, make_scores(val, data=data))
    with pytest.raises(InputError, match=f"x.npz: {len(train)} {REFUSED}; give the run alone"):
        check(source, make_scores(train, data=data))
    check(make_source(None), make_scores(train, data=data))  # a checkpoint does not tell what it was trained on


def test_names_that_half_of_the_pictures_share_are_chance() -> None:
    """Where no data set is told: of as many strangers, then of one less."""
    source = make_source("table:ours/all.csv", "data.val_fraction=0")
    assert source.config is not None
    train = open_training_records(source.config).train
    write_table("theirs/far.csv", range(100, 100 + COUNT))
    far = open_records("table:theirs/far.csv").keep_labels(("cat", "dog"))

    def mix(strangers: int) -> Scores:
        ours, theirs = make_scores(train), make_scores(far[:strangers])
        target = torch.cat([ours.target, theirs.target])
        return Scores(ours.labels, ours.pictures + theirs.pictures, target, {"image": torch.zeros_like(target)})

    check(source, mix(COUNT))
    with pytest.raises(InputError, match=f"x.npz: {COUNT} of its {2 * COUNT - 1} pictures are among .*; name others"):
        check(source, mix(COUNT - 1))


def test_scores_beside_named_pictures_are_not_compared_with_the_training_pictures_again() -> None:
    """`open_tuning_pictures` has looked at the pictures; only scenes need a look at how they were made."""
    source, drawn = make_source("table:ours/all.csv"), "scenes:@val?count=6&size=32"
    records = open_records("table:theirs/all.csv").keep_labels(("cat", "dog"))
    check_scores(source, make_scores(records, data="table:ours/all.csv"), records=records, where=Path("x.npz"))
    scenes = open_records(drawn)
    for told in (drawn, "scenes:@val?count=3&size=32", None):  # fewer of the same are the same
        check_scores(source, make_scores(scenes, data=told), records=scenes, where=Path("x.npz"))
    with pytest.raises(InputError, match=r"x.npz: it was made of scenes:@val\?count=6&size=32&seed=5, not of scenes"):
        check_scores(source, make_scores(scenes, data=f"{drawn}&seed=5"), records=scenes, where=Path("x.npz"))
