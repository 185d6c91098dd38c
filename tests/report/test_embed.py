from base64 import b64decode
from dataclasses import replace
from io import BytesIO
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
import torch
from made_scores import make_records, make_scores
from matplotlib.figure import Figure
from PIL import Image

from pivotpatch.report.embed import LARGEST, SIDE, Album, embed_figure

HOSTILE = '<script>alert(1)</script> & "quoted" 犬 #000000'
SCORES = make_scores(("a", "b"), count=20)


def draw(points: int = 3, title: str = HOSTILE) -> Figure:
    figure = Figure(figsize=(3, 2), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.random.default_rng(0).random(points), marker="o", label="line")
    axes.fill_between([0, 1], [0, 1], hatch="/")
    axes.set_title(title, parse_math=False)
    axes.legend()
    return figure


def test_words_stay_words_and_colours_become_the_page_s() -> None:
    before = dict(mpl.rcParams)
    shown = embed_figure(draw(), name="one", text='a "plot" <b>')
    assert shown == embed_figure(draw(), name="one", text='a "plot" <b>')
    assert dict(mpl.rcParams) == before
    page = ET.fromstring(str(shown))
    assert [element.text for element in page.iter("text") if "script" in (element.text or "")] == [HOSTILE]
    assert next(page.iter("svg")).attrib["aria-label"] == 'a "plot" <b>'
    assert "<script" not in shown
    attributes = str([element.attrib for element in page.iter()])
    assert "currentColor" in attributes
    assert "#000000" not in attributes
    for unwanted in ("http", "<style", "<metadata", "xmlns", "<?xml", "<!DOCTYPE"):
        assert unwanted not in shown
    # What would be too large becomes pixels.
    many = embed_figure(draw(20_000, "many"), name="one", text='"many"')
    assert 'src="data:image/png;base64,' in many
    assert len(many) < LARGEST


def test_a_copy_is_the_image_of_its_row_and_keeps_its_shape() -> None:
    records = make_records(SCORES, size=(300, 600))
    turned = replace(SCORES, indices=torch.arange(20).flip(0))
    copy = Album(turned, records, count=9, room=10**6).copy(3)
    assert copy is not None
    image = Image.open(BytesIO(b64decode(copy.address.removeprefix("data:image/jpeg;base64,"))))
    assert (copy.width, copy.height) == image.size == (SIDE, SIDE // 2)
    distances = {}
    for row in (3, 15, 16, 17):
        source = Image.fromarray(np.asarray(records.images.source(row))).resize(image.size)
        distances[row] = np.abs(np.asarray(image, dtype=float) - np.asarray(source, dtype=float)).mean()
    assert min(distances, key=distances.__getitem__) == 16


def test_there_are_no_more_than_were_asked_for_or_than_there_is_room_for() -> None:
    album = Album(SCORES, make_records(SCORES), count=3, room=10**6)
    assert [album.copy(row) is not None for row in range(5)] == [True, True, True, False, False]
    album = Album(SCORES, make_records(SCORES, size=(500, 500)), count=20, room=100_000)
    made = [copy for copy in map(album.copy, range(9)) if copy is not None]
    assert 0 < len(made) < 9
    assert sum(len(copy.address) for copy in made) <= 100_000


def test_what_cannot_be_read_says_why_and_what_nobody_knows_is_none() -> None:
    made = Album(SCORES, make_records(SCORES), count=1, room=10**6).copy(9)
    assert made is not None
    assert (made.address, made.problem) == ("", "is in none of the known formats")
    assert Album(replace(SCORES, indices=None), make_records(SCORES), count=1, room=10**6).copy(0) is None
