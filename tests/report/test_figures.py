import re
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from pivotpatch.report.figures import LARGEST, embed_figure

HOSTILE = '<script>alert(1)</script> & "quoted" 犬 #000000'


def draw(points: int = 3, title: str = HOSTILE) -> Figure:
    figure = Figure(figsize=(3, 2), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.random.default_rng(0).random(points), marker="o", label="line")
    axes.fill_between([0, 1], [0, 1], hatch="/")
    axes.set_title(title, parse_math=False)
    axes.legend()
    return figure


def test_words_stay_words_and_are_escaped() -> None:
    shown = embed_figure(draw(), name="one", text='a "plot" <b>')
    page = ET.fromstring(str(shown))
    assert [element.text for element in page.iter("text") if "script" in (element.text or "")] == [HOSTILE]
    assert next(page.iter("svg")).attrib["aria-label"] == 'a "plot" <b>'
    assert "<script" not in shown


def test_black_is_the_ink_of_the_page_and_white_its_ground() -> None:
    attributes = [
        str(element.attrib) for element in ET.fromstring(str(embed_figure(draw(), name="one", text=""))).iter()
    ]
    assert any("currentColor" in each for each in attributes)
    assert any("var(--card)" in each for each in attributes)
    assert not any("#000000" in each or "#ffffff" in each for each in attributes)


def test_nothing_in_it_holds_for_the_rest_of_the_page_or_points_outside() -> None:
    one, other = (str(embed_figure(draw(), name=name, text="")) for name in ("one", "other"))
    ids = [re.findall(r'\sid="([^"]+)"', text) for text in (one, other)]
    assert ids[0]
    assert not set(ids[0]) & set(ids[1])
    used = re.findall(r"url\(#([^)]+)\)", one) + re.findall(r'href="#([^"]+)"', one)
    assert used
    assert set(used) <= set(ids[0])
    for unwanted in ("http", "<style", "<metadata", "xmlns", "<?xml", "<!DOCTYPE"):
        assert unwanted not in one


def test_a_figure_is_the_same_each_time_and_settings_return() -> None:
    before = dict(mpl.rcParams)
    assert embed_figure(draw(), name="one", text="") == embed_figure(draw(), name="one", text="")
    assert dict(mpl.rcParams) == before


def test_what_would_be_too_large_becomes_pixels() -> None:
    shown = embed_figure(draw(20_000, "many"), name="one", text='"many"')
    image = next(ET.fromstring(str(shown).replace('&#34;">', '&#34;"/>')).iter("img"))
    assert image.attrib["src"].startswith("data:image/png;base64,")
    assert image.attrib["alt"] == '"many"'
    assert len(shown) < LARGEST
