"""The page in a real browser: drop, look, choose, slide, by mouse and by keyboard; silent, and asking nobody else."""

import csv
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from app_process import LABELS, AppProcess, AppThread
from made_engines import FixedEngine
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect

from pivotpatch.app.server import Access
from pivotpatch.runtime.predictor import Predictor

pytestmark = [pytest.mark.slow, pytest.mark.browser]

GIVEN = len(LABELS) - 1  # under the fitted thresholds


class Opened:
    """The page, what its console said, and whom it asked besides its own server."""

    def __init__(self, page: Page) -> None:
        self.page, self.said, self.asked = page, list[str](), list[str]()
        self.summary, self.spot = page.locator("#summary"), page.locator("#image .spot")
        self.tags = page.locator("#tags button.tag")
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))

    def choose_files(self, *paths: Path) -> None:
        self.page.get_by_label(re.compile("Drop images")).set_input_files(paths)


Open = Callable[..., Opened]


@pytest.fixture
def open_page(browser: Browser, app: AppProcess) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_(*, url: str = app.url, **options: Any) -> Opened:
            context = stack.enter_context(browser.new_context(viewport={"width": 1200, "height": 900}, **options))
            opened = Opened(context.new_page())
            opened.page.goto(url)
            expect(opened.summary).to_contain_text("No image yet")
            return opened

        yield open_


def read_spot(opened: Opened) -> list[float]:
    """Left, top, right and bottom of what is lit, as shares of the picture that is seen."""
    box: list[float] = opened.spot.evaluate(
        """(spot) => {
            const [lit, whole] = [spot, spot.parentElement.querySelector("img")].map((e) => e.getBoundingClientRect());
            return [(lit.left - whole.left) / whole.width, (lit.top - whole.top) / whole.height,
                    (lit.right - whole.left) / whole.width, (lit.bottom - whole.top) / whole.height];
        }"""
    )
    return box


def test_an_upload_is_tagged_in_silence_and_each_tag_lights_up_its_pivot_patch(
    open_page: Open, photo: Path, model: Path, app: AppProcess
) -> None:
    opened, expected = open_page(), Predictor.load(model)(photo)
    opened.choose_files(photo)
    expect(opened.tags).to_have_count(GIVEN)
    assert opened.tags.all_text_contents() == [tag.label for tag in expected.tags]
    for row, tag in zip(opened.page.locator("#tags tbody tr").all(), expected.tags, strict=True):
        values = [float(text) for text in row.locator(".value").all_text_contents()]
        assert values == pytest.approx([tag.prob, tag.image_prob, tag.patch_prob], abs=0.006)
    rows, columns = expected.size
    image = opened.page.locator("#image img")
    assert image.get_attribute("alt") == f"photo.jpg, {columns} x {rows} pixels"
    assert image.evaluate("(image) => image.decode().then(() => image.naturalWidth > 0)")
    expect(opened.spot).to_be_hidden()
    boxes = set()
    for place, tag in enumerate(expected.tags):
        opened.tags.nth(place).click()
        expect(opened.spot).to_be_visible()
        assert tag.box is not None
        shares = np.array(tag.box) / [columns, rows, columns, rows]
        assert read_spot(opened) == pytest.approx(shares.tolist(), abs=0.003)
        boxes.add(tag.box)
        assert opened.page.locator("#tags [aria-pressed=true]").all_text_contents() == [tag.label]
    assert len(boxes) > 1  # else any box would have done
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith((app.url, "data:", "blob:"))] == []
    assert opened.page.evaluate("typeof window.hit") == "undefined"  # no name of a label has run


def press_until(page: Page, target: Locator) -> None:
    """Press Tab until something has the focus, which must be seen."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if target.evaluate("(element) => element === document.activeElement"):
            assert target.evaluate("(element) => getComputedStyle(element).outlineStyle") == "solid"
            return
    raise AssertionError(f"no way to {target}")


def test_the_keyboard_is_enough(open_page: Open) -> None:
    opened = open_page()
    page = opened.page
    assert page.locator("img:not([alt])").count() == 0
    press_until(page, page.get_by_label(re.compile("Drop images")))
    press_until(page, page.get_by_role("button", name="Coffee"))
    page.keyboard.press("Enter")
    expect(opened.tags).to_have_count(GIVEN)
    assert page.locator("#image img").get_attribute("alt") == "coffee.jpg, 600 x 400 pixels"
    slider = page.get_by_role("slider")
    press_until(page, slider)
    page.keyboard.press("Home")
    expect(opened.tags).to_have_count(len(LABELS))
    page.keyboard.press("End")
    expect(opened.summary).to_contain_text("No tag")
    assert slider.evaluate("(element) => element === document.activeElement")
    page.keyboard.press("Home")
    expect(opened.summary).to_contain_text(f"{len(LABELS)} tags")
    press_until(page, opened.tags.first)
    page.keyboard.press("Space")
    expect(opened.spot).to_be_visible()
    press_until(page, opened.tags.nth(1))
    page.keyboard.press("Enter")
    assert opened.tags.nth(1).get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    expect(opened.spot).to_be_hidden()
    assert opened.said == []


def test_several_images_are_tagged_with_progress_and_each_can_be_chosen(
    open_page: Open, photo: Path, tmp_path: Path
) -> None:
    names = [f"image {place}.png" for place in range(12)]
    for place, name in enumerate(names):
        Image.new("RGB", (30 + place, 20), (20 * place, 90, 90)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    engine = FixedEngine(("cat", "cup"), (0.9, 0.6), patched=True)
    engine.gate.clear()
    with AppThread(engine) as app:
        opened = open_page(url=app.url)
        page = opened.page
        opened.choose_files(*(tmp_path / name for name in names), tmp_path / "notes.txt")
        expect(page.locator("#progress")).to_contain_text("of 13 tagged")
        engine.gate.set()
        thumbnails = page.locator("#strip button")
        expect(page.locator("#strip .done")).to_have_count(12)
        expect(page.locator("#progress")).to_be_hidden()
        assert [button.get_attribute("aria-label") for button in thumbnails.all()] == [
            *(f"{name}, tagged" for name in names),
            "notes.txt, failed",
        ]
        assert page.locator("#image img").get_attribute("alt") == "image 0.png, 30 x 20 pixels"
        thumbnails.nth(7).click()
        assert page.locator("#image img").get_attribute("alt") == "image 7.png, 37 x 20 pixels"
        expect(opened.summary).to_have_text("2 tags: cat, cup")
        thumbnails.nth(12).click()
        expect(opened.summary).to_contain_text("notes.txt: is in none of the known formats")
        page.get_by_role("button", name="Remove all images").click()
        expect(opened.summary).to_contain_text("No image yet")
        assert thumbnails.count() == 0
        opened.choose_files(photo)
        expect(opened.tags).to_have_count(2)


def test_tags_can_be_copied_and_downloaded(open_page: Open, photo: Path, tmp_path: Path) -> None:
    labels = ("cat", 'a "quoted", label', "dog")
    with AppThread(FixedEngine(labels, (0.9, 0.6, 0.2), patched=True)) as app:
        opened = open_page(url=app.url, permissions=["clipboard-read", "clipboard-write"])
        page = opened.page
        Image.new("RGB", (40, 30)).save(tmp_path / "=second, image.png")
        opened.choose_files(photo, tmp_path / "=second, image.png")
        expect(page.locator("#strip .done")).to_have_count(2)
        page.get_by_role("button", name="Copy tags").click()
        expect(page.locator("#said")).to_have_text("Copied.")
        assert page.evaluate("navigator.clipboard.readText()") == 'cat, a "quoted", label'
        saved = {}
        for kind in ("CSV", "JSON"):
            with page.expect_download() as download:
                page.get_by_role("button", name=f"Download {kind}").click()
            saved[kind] = download.value.path().read_text("utf-8")
        answers = json.loads(saved["JSON"])
        asked = json.loads(app.ask(photo.read_bytes()).body)
    rows = list(csv.DictReader(saved["CSV"].splitlines()))
    both = {"labels": 'cat|a "quoted", label', "probs": "0.9000|0.6000"}
    assert rows == [{"picture": "photo.jpg", **both}, {"picture": "'=second, image.png", **both}]  # no formula
    assert answers[0] == {**asked, "picture": "photo.jpg"}  # in the form of the endpoint, under the page's thresholds
    assert answers[1]["size"] == [30, 40]
    assert opened.said == []


@pytest.mark.parametrize("patched", [True, False])
def test_the_table_tells_what_each_look_would_give(patched: bool, open_page: Open, photo: Path) -> None:
    labels, probs, image_probs = ("car", "cat", "cup", "dog"), (0.1, 0.6, 0.9, 0.2), (0.1, 0.3, 0.8, 0.7)
    with AppThread(FixedEngine(labels, probs, image_probs=image_probs, patched=patched)) as app:
        opened = open_page(url=app.url)
        opened.choose_files(photo)
        expect(opened.summary).to_have_text("2 tags: cup, cat")
    rows = [row.locator("th, td").all_text_contents() for row in opened.page.locator("#tags tr").all()]
    shown = [[" ".join(cell.split()) for cell in row] for row in rows]
    if patched:
        assert shown == [
            ["Tag", "Probability image and parts", "Whole image alone", "Parts alone"],
            ["cup", "0.90 ✓ given", "0.80 ✓ given", "0.25"],
            ["cat not by the whole image alone", "0.60 ✓ given", "0.30", "0.25"],
            ["dog by the whole image alone only", "0.20", "0.70 ✓ given", "0.25"],
        ]
    else:  # the raw probability decides nothing
        assert shown == [["Tag", "Probability whole image"], ["cup", "0.90 ✓ given"], ["cat", "0.60 ✓ given"]]
    opened.choose_files(photo)
    expect(opened.summary).to_contain_text("photo.jpg: the server cannot be reached; is it running?")


def test_the_token_comes_with_the_address_or_is_asked_for(open_page: Open, photo: Path) -> None:
    with AppThread(FixedEngine(), access=Access(token="open-sesame")) as app:
        known = open_page(url=f"{app.url}/#token=open-sesame")
        known.choose_files(photo)
        expect(known.summary).to_have_text("1 tag: cat")
        assert "sesame" not in known.page.url
        stranger = open_page(url=app.url)
        stranger.choose_files(photo)
        expect(stranger.summary).to_contain_text("its token is missing or wrong")
        stranger.page.get_by_label(re.compile("asks for a token")).fill("open-sesame")
        stranger.page.get_by_role("button", name="Use it").click()
        expect(stranger.summary).to_have_text("1 tag: cat")
        expect(stranger.page.locator("#key")).to_be_hidden()
