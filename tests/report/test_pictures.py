from base64 import b64decode
from dataclasses import replace
from io import BytesIO

import numpy as np
import torch
from made_scores import make_records, make_scores
from PIL import Image

from pivotpatch.report.pictures import SIDE, Album, Thumbnail

SCORES = make_scores(("a", "b"), count=20)


def read(thumbnail: Thumbnail | None) -> Image.Image:
    assert thumbnail is not None
    kind, _, content = thumbnail.address.partition(",")
    assert kind == "data:image/jpeg;base64"
    return Image.open(BytesIO(b64decode(content)))


def test_a_copy_is_the_picture_of_its_row_and_keeps_its_shape() -> None:
    records = make_records(SCORES, size=(300, 600))
    turned = replace(SCORES, indices=torch.arange(20).flip(0))
    made = Album(turned, records, count=9, room=10**6).copy(3)
    picture = read(made)
    assert made is not None
    assert picture.size == (made.width, made.height) == (SIDE, SIDE // 2)
    distances = {}
    for row in (3, 15, 16, 17):
        source = Image.fromarray(np.asarray(records.images.source(row))).resize(picture.size)
        distances[row] = np.abs(np.asarray(picture, dtype=float) - np.asarray(source, dtype=float)).mean()
    assert min(distances, key=distances.__getitem__) == 16


def test_a_small_picture_is_not_made_larger() -> None:
    assert read(Album(SCORES, make_records(SCORES, size=(30, 20)), count=1, room=10**6).copy(0)).size == (20, 30)


def test_there_are_no_more_than_were_asked_for() -> None:
    album = Album(SCORES, make_records(SCORES), count=3, room=10**6)
    assert [album.copy(row) is not None for row in range(5)] == [True, True, True, False, False]


def test_there_are_no_more_than_there_is_room_for() -> None:
    records = make_records(SCORES, size=(500, 500))
    album = Album(SCORES, records, count=20, room=100_000)
    made = [copy for copy in map(album.copy, range(9)) if copy is not None]
    assert 0 < len(made) < 9
    assert sum(len(copy.address) for copy in made) <= 100_000


def test_what_cannot_be_read_says_why_and_what_nobody_knows_is_none() -> None:
    made = Album(SCORES, make_records(SCORES), count=1, room=10**6).copy(9)
    assert made == Thumbnail(made.address if made else "", 0, 0, "is in none of the known formats")  # type: ignore[arg-type]
    assert Album(SCORES, None, count=1, room=10**6).copy(0) is None
    assert Album(replace(SCORES, indices=None), make_records(SCORES), count=1, room=10**6).copy(0) is None
