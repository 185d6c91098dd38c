"""The tagger of engines for many machines: the same answers as `Predictor`, and a row for whatever it is given."""

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from made_engines import Means
from PIL import Image

from pivotpatch.cluster import PatchTagger
from pivotpatch.errors import InputError
from pivotpatch.runtime import Predictor
from pivotpatch.runtime.engine import Answer, Array, Pixels

COFFEE = Path(__file__).parents[2] / "docs" / "images" / "coffee.jpg"
THRESHOLDS = (0.2, 0.5, 0.9)


@pytest.fixture(scope="module")
def tagger() -> PatchTagger:
    return PatchTagger(effort=0)


@pytest.fixture
def means(monkeypatch: pytest.MonkeyPatch) -> PatchTagger:
    """A tagger whose model says the mean of red, green and blue."""
    monkeypatch.setattr(Predictor, "load", lambda *_, **__: Predictor(Means(thresholds=THRESHOLDS)))
    return PatchTagger()


def draw(*colour: int) -> bytes:
    written = BytesIO()
    Image.new("RGB", (9, 7), colour).save(written, "PNG")
    return written.getvalue()


def listed(rows: dict[str, Any]) -> list[tuple[list[str], list[float], str | None]]:
    return list(zip(*([value.as_py() for value in rows[name]] for name in ("labels", "probs", "error")), strict=True))


def test_an_image_gets_the_tags_of_a_predictor_however_it_is_given(tagger: PatchTagger) -> None:
    content = COFFEE.read_bytes()
    with Image.open(COFFEE) as image:
        pixels = np.array(image)
    tags = Predictor.load(effort=0)(COFFEE).tags
    expected = [tag.label for tag in tags], [tag.prob for tag in tags], None
    assert expected[0][0] == "cup"
    held = [content, bytearray(content), memoryview(content), {"bytes": content, "path": None}]
    named = [str(COFFEE), COFFEE, {"bytes": None, "path": str(COFFEE)}]
    assert listed(tagger({"bytes": held})) == [expected] * 4
    assert listed(tagger({"path": named})) == [expected] * 3
    assert listed(tagger({"path": np.array([str(COFFEE)])})) == [expected]
    assert listed(tagger({"image": [Image.open(COFFEE)]})) == [expected]
    stacked, single = listed(tagger({"image": np.stack([pixels, pixels])})), Predictor.load(effort=0)(pixels)
    assert stacked == [([tag.label for tag in single.tags], [tag.prob for tag in single.tags], None)] * 2


def test_rows_keep_their_order_in_a_batch_of_any_size(means: PatchTagger) -> None:
    reds = [place % 255 for place in range(300)]
    rows = listed(means({"bytes": [draw(red, 0, 255) for red in reds]}))
    for red, (labels, probs, error) in zip(reds, rows, strict=True):
        assert labels == (["blue", "red"] if red / 255 > THRESHOLDS[0] else ["blue"])
        assert probs == pytest.approx([1, red / 255][: len(labels)])
        assert error is None


def test_what_cannot_be_read_is_a_row_of_its_own(means: PatchTagger, tmp_path: Path) -> None:
    good = draw(255, 0, 0)
    rows = listed(means({"image": [good, b"no image", good[:-30], None, float("nan"), {"bytes": None}, good]}))
    assert [place for place, (labels, *_) in enumerate(rows) if labels == ["red"]] == [0, 6]
    assert [row[:2] for row in rows[1:6]] == [([], [])] * 5
    assert [str(error).partition(":")[0] for *_, error in rows[1:6]] == ["image"] * 5
    assert rows[3][2] == rows[5][2] == "image: there is no image in this row; fill it, or leave the row out"
    assert "is a float" in str(rows[4][2])
    arrays = [np.zeros((4, 4, 3)), np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4, 3), np.uint8)]
    assert all(error for *_, error in listed(means({"image": arrays})))
    paths = [str(tmp_path / "gone.png"), str(tmp_path), "a\0b", ""]
    assert all("cannot be read" in str(error) for *_, error in listed(means({"path": paths})))
    ((*_, nothing),) = listed(means({"bytes": [None], "path": [None]}))
    assert str(nothing).startswith("bytes or path: there is no image")


def test_other_columns_pass_through_and_none_is_overwritten(means: PatchTagger) -> None:
    batch = {"bytes": np.array([draw(255, 0, 0)], dtype=object), "id": np.array([7]), "labels": [["mine"]]}
    with pytest.raises(InputError, match="PatchTagger: the batch has labels already; rename"):
        means(batch)
    rows = PatchTagger(prefix="tagged_")(batch)
    assert list(rows) == [*batch, "tagged_labels", "tagged_probs", "tagged_error"]
    assert all(rows[name] is batch[name] for name in batch)
    assert rows["tagged_labels"][0].as_py() == ["red"]
    assert list(batch) == ["bytes", "id", "labels"]


def test_a_column_of_another_name_is_named(means: PatchTagger) -> None:
    batch = {"jpg": [draw(255, 0, 0)]}
    with pytest.raises(InputError, match=r"has the columns jpg, none of bytes, image, path; name the one with images"):
        means(batch)
    assert PatchTagger(columns="jpg")(batch)["labels"][0].as_py() == ["red"]


def test_every_batch_has_columns_of_the_same_types(means: PatchTagger) -> None:
    """Engines write each batch with its own schema; a column of nothing but empty lists must still be one of texts."""
    wanted = [pa.list_(pa.string()), pa.list_(pa.float32()), pa.string()]
    for batch in ([draw(255, 0, 0)], [draw(0, 0, 0)], [b"no image"], [None]):
        rows = means({"bytes": batch})
        assert [pa.array(rows[name]).type for name in ("labels", "probs", "error")] == wanted
        arrow = means(pa.table({"bytes": pa.array(batch, pa.binary())}))
        assert arrow.schema.types[1:] == wanted
        assert arrow.column_names == ["bytes", "labels", "probs", "error"]
        assert listed(arrow) == listed(rows)


def test_files_that_end_in_zeros_survive_numpys_bytes(means: PatchTagger) -> None:
    written = BytesIO()
    Image.new("RGB", (8, 8)).save(written, "BMP")
    assert written.getvalue().endswith(b"\0\0")
    assert listed(means({"bytes": np.array([written.getvalue(), draw(255, 0, 0)])})) == [
        ([], [], None),
        (["red"], [1.0], None),
    ]


def test_threads_share_a_tagger_and_its_model_is_asked_by_one_at_a_time(means: PatchTagger) -> None:
    class Single(Means):
        busy = threading.Lock()

        def ask(self, images: Pixels) -> Answer[Array]:
            assert self.busy.acquire(blocking=False), "asked by two"
            time.sleep(0.005)
            answer = super().ask(images)
            self.busy.release()
            return answer

    means.engine = Single(thresholds=THRESHOLDS)
    batches = [[draw(10 * place + step, 255, 0) for step in range(10)] for place in range(20)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: listed(means({"bytes": batch})), batches))
    assert found == [listed(means({"bytes": batch})) for batch in batches]
    assert len({str(rows) for rows in found}) > 10


def test_a_pickled_tagger_is_the_same(tagger: PatchTagger) -> None:
    batch = {"path": [str(COFFEE)]}
    again = pickle.loads(pickle.dumps(tagger))
    assert listed(again(batch)) == listed(tagger(batch))
    assert pickle.dumps(again) == pickle.dumps(tagger) == pickle.dumps(PatchTagger(effort=0))
    others = [PatchTagger(effort=0.6), PatchTagger(effort=0, columns="path"), PatchTagger(effort=0, prefix="x")]
    assert len({pickle.dumps(each) for each in [tagger, *others]}) == 4


def test_a_model_that_is_gone_or_fails_is_an_exception(means: PatchTagger, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Means):
        def ask(self, images: Pixels) -> Answer[Array]:
            raise InputError("means", "it cannot be run", "export the model again")

    means.engine = Broken()
    with pytest.raises(InputError, match="means: it cannot be run"):
        means({"bytes": [draw(255, 0, 0)]})
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"gone\.onnx: there is no such file"):
        PatchTagger("gone.onnx")
