"""The page in a real browser: drop, look, choose, slide, by mouse and by keyboard; silent, and asking nobody else."""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from app_process import LABELS, AppProcess
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect

from pivotpatch.inference.prediction import Prediction
from pivotpatch.inference.predictor import Predictor

GIVEN = len(LABELS) - 1  # under the fitted thresholds


@dataclass
class Opened:
    """The page, what its console said, and whom it asked besides its own server."""

    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def choose_file(self, path: Path) -> None:
        self.page.get_by_label(re.compile("Drop a picture")).set_input_files(path)

    @property
    def summary(self) -> Locator:
        return self.page.locator("#summary")

    @property
    def tags(self) -> Locator:
        return self.page.locator("#tags button.tag")

    @property
    def spot(self) -> Locator:
        return self.page.locator("#picture .spot")


Open = Callable[..., Opened]


@pytest.fixture
def open_page(browser: Browser, app: AppProcess) -> Iterator[Open]:
    contexts = []

    def open_(width: int = 1200, **options: object) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)  # type: ignore[arg-type]
        contexts.append(context)
        opened = Opened(context.new_page())
        page = opened.page
        page.on("request", lambda request: opened.asked.append(request.url))
        page.on("console", lambda message: opened.said.append(message.text))
        page.on("pageerror", lambda error: opened.said.append(str(error)))
        page.goto(app.url)
        expect(opened.summary).to_contain_text("No picture yet", timeout=30_000)
        return opened

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def expected(model: Path, photo: Path) -> Prediction:
    return Predictor.load(model)(photo)


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


def test_an_upload_is_tagged_in_silence_and_nobody_else_is_asked(
    open_page: Open, photo: Path, expected: Prediction, app: AppProcess, tmp_path: Path
) -> None:
    opened = open_page()
    opened.choose_file(photo)
    expect(opened.tags).to_have_count(GIVEN)
    assert opened.tags.all_text_contents() == [tag.label for tag in expected.tags]
    for row, tag in zip(opened.page.locator("#tags tbody tr").all(), expected.tags, strict=True):
        values = [float(text) for text in row.locator(".value").all_text_contents()]
        assert values == pytest.approx([tag.prob, tag.image_prob, tag.patch_prob], abs=0.006)
    image = opened.page.locator("#picture img")
    assert image.get_attribute("alt") == f"photo.jpg, {expected.size[1]} x {expected.size[0]} pixels"
    assert image.evaluate("(image) => image.decode().then(() => image.naturalWidth > 0)")
    opened.page.screenshot(path=tmp_path / "page.png", full_page=True)
    pixels = np.asarray(Image.open(tmp_path / "page.png").convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels[::97], axis=0)) > 100  # neither blank nor of one colour
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith((app.url, "data:", "blob:"))] == []
    assert opened.page.evaluate("typeof window.hit") == "undefined"  # no name of a label has run


def test_a_chosen_tag_lights_up_its_pivot_patch(open_page: Open, photo: Path, expected: Prediction) -> None:
    opened = open_page()
    opened.choose_file(photo)
    expect(opened.tags).to_have_count(GIVEN)
    expect(opened.spot).to_be_hidden()
    rows, columns = expected.size
    boxes = set()
    for place, tag in enumerate(expected.tags):
        opened.tags.nth(place).click()
        expect(opened.spot).to_be_visible()
        assert tag.box is not None
        shares = np.array(tag.box) / [columns, rows, columns, rows]
        assert read_spot(opened) == pytest.approx(shares.tolist(), abs=0.003)
        boxes.add(tag.box)
        assert opened.page.locator("#tags [aria-pressed=true]").all_text_contents() == [tag.label]
        assert (opened.page.locator("#picture figcaption").text_content() or "").startswith(f"{tag.label}: the patch")
    assert len(boxes) > 1  # else any box would have done
    opened.tags.nth(GIVEN - 1).click()
    expect(opened.spot).to_be_hidden()
    assert opened.page.locator("#tags [aria-pressed=true]").count() == 0
    assert opened.said == []


def test_the_slider_takes_the_place_of_the_fitted_thresholds(open_page: Open, photo: Path) -> None:
    opened = open_page()
    opened.choose_file(photo)
    expect(opened.tags).to_have_count(GIVEN)
    opened.tags.nth(2).click()
    chosen = opened.tags.nth(2).text_content()
    fitted, slider = opened.page.get_by_role("checkbox"), opened.page.get_by_role("slider")
    assert fitted.is_checked()
    slider.fill("0.01")
    expect(opened.summary).to_contain_text(f"{len(LABELS)} tags")
    expect(opened.tags).to_have_count(len(LABELS))
    assert not fitted.is_checked()
    assert opened.page.locator("#tags [aria-pressed=true]").all_text_contents() == [chosen]  # it stays lit
    slider.fill("0.99")
    expect(opened.summary).to_contain_text("No tag")
    expect(opened.page.locator("#tags caption")).to_contain_text("No label is above its threshold")
    fitted.check()
    expect(opened.summary).to_contain_text(f"{GIVEN} tags")
    assert opened.said == []


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
    press_until(page, page.get_by_label(re.compile("Drop a picture")))
    press_until(page, page.get_by_role("button", name="Clock"))
    page.keyboard.press("Enter")
    expect(opened.tags).to_have_count(GIVEN)
    assert page.locator("#picture img").get_attribute("alt") == "Clock, 384 x 384 pixels"
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


def test_a_screen_reader_finds_names_and_hears_news(open_page: Open, photo: Path) -> None:
    opened = open_page()
    opened.choose_file(photo)
    expect(opened.tags).to_have_count(GIVEN)
    page = opened.page
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea, [tabindex='0']")]
        .filter((e) => e.getClientRects().length && !e.closest("[aria-hidden=true]"))
        .filter((e) => !(e.ariaLabel || e.textContent.trim() || [...(e.labels ?? [])].some((l) => l.innerText)))
        .map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    assert page.locator("img:not([alt])").count() == 0
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.get_by_role("table").get_by_role("columnheader").count() == 4
    assert page.get_by_role("table").get_by_role("rowheader").count() == GIVEN
    expect(page.get_by_role("status").filter(has_text=f"{GIVEN} tags")).to_have_count(1)
    for name in ("Fitted threshold of each label", re.compile("One threshold for all")):
        expect(page.get_by_label(name).first).to_be_visible()


def test_bad_uploads_are_told_and_the_page_goes_on(open_page: Open, photo: Path, tmp_path: Path) -> None:
    opened = open_page()
    bad = {
        "notes.txt": (b"hello, I am no picture", "notes.txt: is in none of the known formats"),
        "cut.jpg": (photo.read_bytes()[:2000], "cut.jpg: cannot be decoded"),
        "huge.pgm": (b"P5 20000 20000 255\n", "20000 x 20000 = 400000000 pixels are more than the limit"),
        "heavy.jpg": (bytes(50_000_000), "heavy.jpg: 50 MB are more than the limit of 32 MB"),
        "empty.png": (b"", "empty.png: is empty"),
    }
    for name, (content, message) in bad.items():
        (tmp_path / name).write_bytes(content)
        opened.choose_file(tmp_path / name)
        expect(opened.summary).to_contain_text(message)
        expect(opened.tags).to_have_count(0)
        expect(opened.page.locator("#picture img")).to_have_count(0)
        opened.choose_file(photo)
        expect(opened.tags).to_have_count(GIVEN)
    assert opened.said == []


def test_a_file_can_be_dropped_anywhere(open_page: Open, photo: Path) -> None:
    opened = open_page()
    opened.page.evaluate(
        """async (content) => {
            const carried = new DataTransfer();
            const bytes = Uint8Array.from(atob(content), (sign) => sign.charCodeAt(0));
            carried.items.add(new File([bytes], "dropped.jpg"));
            const event = new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true });
            if (document.querySelector("h1").dispatchEvent(event)) throw new Error("the browser would open the file");
        }""",
        b64encode(photo.read_bytes()).decode("ascii"),
    )
    expect(opened.tags).to_have_count(GIVEN)
    assert (opened.page.locator("#picture img").get_attribute("alt") or "").startswith("dropped.jpg")


def test_what_would_ask_others_is_stopped_by_the_browser(open_page: Open) -> None:
    opened = open_page()
    refused = opened.page.evaluate("fetch('http://127.0.0.2:9/x').then(() => false, () => true)")
    assert refused
    assert any("Content Security Policy" in message for message in opened.said)


def test_the_night_is_dark_and_the_day_light(open_page: Open) -> None:
    def look(opened: Opened) -> list[float]:
        colours = opened.page.evaluate(
            """["backgroundColor", "color"].map((name) => {
                let place = document.querySelector("h1");
                while (name == "backgroundColor" && getComputedStyle(place)[name] == "rgba(0, 0, 0, 0)")
                    place = place.parentElement;
                return getComputedStyle(place)[name];
            })"""
        )
        return [sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3 for colour in colours]

    day, night = look(open_page(color_scheme="light")), look(open_page(color_scheme="dark"))
    assert day[0] > 200 > 60 > day[1]
    assert night[0] < 60 < 200 < night[1]


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_does_not_scroll_sideways(width: int, open_page: Open, photo: Path) -> None:
    opened = open_page(width, is_mobile=True, has_touch=True)
    opened.choose_file(photo)
    expect(opened.tags).to_have_count(GIVEN)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.tags.first.tap()
    expect(opened.spot).to_be_visible()
