import re
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

from pivotpatch.report.embed import LARGEST, SIDE, Album, Thumbnail, embed_figure

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
    assert "var(--card)" in attributes
    assert "#000000" not in attributes
    assert "#ffffff" not in attributes


def test_nothing_in_it_holds_for_the_rest_of_the_page_or_points_outside() -> None:
    one, other = (str(embed_figure(draw(), name=name, text="")) for name in ("one", "other"))
    ids = [re.findall(r'\sid="([^"]+)"', text) for text in (one, other)]
    assert not set(ids[0]) & set(ids[1])
    used = re.findall(r"url\(#([^)]+)\)", one) + re.findall(r'href="#([^"]+)"', one)
    assert used
    assert set(used) <= set(ids[0])
    for unwanted in ("http", "<style", "<metadata", "xmlns", "<?xml", "<!DOCTYPE"):
        assert unwanted not in one


def test_what_would_be_too_large_becomes_pixels() -> None:
    shown = embed_figure(draw(20_000, "many"), name="one", text='"many"')
    image = next(ET.fromstring(str(shown).replace('&#34;">', '&#34;"/>')).iter("img"))
    assert image.attrib["src"].startswith("data:image/png;base64,")
    assert image.attrib["alt"] == '"many"'
    assert len(shown) < LARGEST


def read(thumbnail: Thumbnail | None) -> Image.Image:
    assert thumbnail is not None
    kind, _, content = thumbnail.address.partition(",")
    assert kind == "data:image/jpeg;base64"
    image = Image.open(BytesIO(b64decode(content)))
    assert image.size == (thumbnail.width, thumbnail.height)
    return image


def test_a_copy_is_the_image_of_its_row_and_keeps_its_shape() -> None:
    records = make_records(SCORES, size=(300, 600))
    turned = replace(SCORES, indices=torch.arange(20).flip(0))
    image = read(Album(turned, records, count=9, room=10**6).copy(3))
    assert image.size == (SIDE, SIDE // 2)
    distances = {}
    for row in (3, 15, 16, 17):
        source = Image.fromarray(np.asarray(records.images.source(row))).resize(image.size)
        distances[row] = np.abs(np.asarray(image, dtype=float) - np.asarray(source, dtype=float)).mean()
    assert min(distances, key=distances.__getitem__) == 16
    assert read(Album(SCORES, make_records(SCORES, size=(30, 20)), count=1, room=10**6).copy(0)).size == (20, 30)


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
    assert Album(SCORES, None, count=1, room=10**6).copy(0) is None
    assert Album(replace(SCORES, indices=None), make_records(SCORES), count=1, room=10**6).copy(0) is None
