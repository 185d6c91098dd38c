"""A review in a real browser by keyboard alone; after each key that decides, the disk has it."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from app_process import ServerProcess
from PIL import Image
from playwright.sync_api import Browser, Page, expect

pytestmark = [pytest.mark.slow, pytest.mark.browser]

COUNT = 6
LABELS = ("red", "green", "blue", "grey", "sky")
# The engine of tests knows three labels; two more are new to it.
_SERVE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from made_engines import Means
from pivotpatch.cli.main import main
from pivotpatch.runtime.predictor import Predictor
Predictor.load = lambda *_, **__: Predictor(Means(thresholds=(0.5,) * 3, grid=2))
sys.exit(main())
"""


class Review(ServerProcess):
    """`pivotpatch review` of a folder in a process of its own."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.out, self.journal = folder / "review.csv", folder / "review.csv.journal.jsonl"
        words = [str(Path(__file__).parents[1]), "review", "photos", "--no-browser", "--labels", ",".join(LABELS)]
        super().__init__(_SERVE, *words, "--port", str(port), *options, folder=folder)

    def end(self) -> str:
        """Press Ctrl-C; what it said on stderr."""
        status, said = self.stop()
        assert status == 0, said
        return said

    def read_journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.journal.read_text("utf-8").splitlines()]

    def read_table(self) -> dict[str, dict[str, str]]:
        with self.out.open(encoding="utf-8", newline="") as file:
            return {row.pop("image"): row for row in csv.DictReader(file)}

    def expect_table(self, expected: dict[str, dict[str, str]], page: Page) -> None:
        """The table follows the journal within a moment."""
        for _ in range(100):
            if self.out.exists() and self.read_table() == expected:
                return
            page.wait_for_timeout(50)
        assert self.read_table() == expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images that are ever less doubtful about red; the last is green, too; a patch of each is brighter."""
    (tmp_path / "photos").mkdir()
    for place in range(COUNT):
        pixels = np.zeros((60, 80, 3), np.uint8)
        pixels[..., 0] = 122 + 12 * place
        pixels[..., 1] = 250 * (place == COUNT - 1)
        pixels[30:, 40:, 0] += 10
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{place}.png")
    return tmp_path


Open = Callable[..., Page]
Start = Callable[..., Review]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts reviews of the folder, and ends them whatever happens."""
    with ExitStack() as stack:

        def start_(*options: str, port: int = 0) -> Review:
            review = Review(folder, *options, port=port)
            stack.callback(review.kill)
            return review

        yield start_


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    said, asked, own = list[str](), list[str](), ["blob:"]
    with ExitStack() as stack:

        def open_(url: str, **options: Any) -> Page:
            context = stack.enter_context(browser.new_context(viewport={"width": 1200, "height": 900}, **options))
            page = context.new_page()
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            own.append(url)
            page.goto(url)
            return page

        yield open_
    assert said == []  # no error
    assert [url for url in asked if not url.startswith(tuple(own))] == []  # and nobody else was asked


def name(page: Page) -> str:
    return page.locator("#one figcaption").inner_text()


def expect_other(page: Page, before: str) -> str:
    """Wait until another image is shown; its name."""
    expect(page.locator("#one figcaption")).not_to_have_text(before)
    expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
    return name(page)


def state(page: Page, label: str) -> str | None:
    return page.locator(f'#tags li[data-label="{label}"] .tag').get_attribute("aria-pressed")


def row(**known: int) -> dict[str, str]:
    return {label: str(known[label]) if label in known else "" for label in LABELS}


def test_three_images_and_a_grid_by_keyboard_alone(start: Start, open_page: Open) -> None:
    review = start()
    page = open_page(review.url)
    press = page.keyboard.press
    expect(page.locator("#tags li")).to_have_count(5)
    assert page.locator("img:not([alt]), button:not(:has-text('')), [aria-label='']").count() == 0
    first = name(page)
    assert first == "photos/0.png"
    page.get_by_label("Your name").fill("Ann")
    page.locator("#done").focus()
    # What the model says is ticked, the reason is told, and the pivot patch of that label is framed.
    assert [state(page, label) for label in LABELS] == ["false"] * 5
    expect(page.locator("#reason")).to_have_text("red: 0.49, near its threshold 0.50")
    spot, image = page.locator(".spot").bounding_box(), page.locator("#one img").bounding_box()
    assert spot is not None
    assert image is not None
    assert (spot["x"] - image["x"]) / image["width"] == pytest.approx(0.5, abs=0.01)
    assert (spot["y"] - image["y"]) / image["height"] == pytest.approx(0.5, abs=0.01)
    # 1: red is there; Shift+2: nobody can tell; Enter.
    labels = page.locator("#tags li").evaluate_all("(items) => items.map((item) => item.dataset.label)")
    press(str(labels.index("red") + 1))
    assert state(page, "red") == "true"
    press(f"Shift+Digit{labels.index('grey') + 1}")
    assert state(page, "grey") == "mixed"
    press("Enter")
    second = expect_other(page, first)
    (entry,) = review.read_journal()
    assert (entry["who"], entry["states"]) == ("Ann", {first: {"red": 1, "green": 0, "blue": 0, "sky": 0, "grey": -1}})
    table = {first: row(red=1, green=0, blue=0, sky=0)}
    review.expect_table(table, page)
    # Arrows and Space on the second; the third is taken as it is.
    press("ArrowDown")
    focused = page.evaluate("document.activeElement.parentElement.dataset.label")
    before = state(page, focused)
    press("Space")
    assert state(page, focused) != before
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press("Enter")
    third = expect_other(page, second)
    assert len(review.read_journal()) == 2
    press("Enter")
    expect_other(page, third)
    # Undo twice goes back to the second image as it was left, then once more to the first.
    press("u")
    expect(page.locator("#one figcaption")).to_have_text(third)
    press("Backspace")
    expect(page.locator("#one figcaption")).to_have_text(second)
    assert state(page, focused) != before
    press("u")
    expect(page.locator("#one figcaption")).to_have_text(first)
    assert (state(page, "red"), state(page, "grey")) == ("true", "mixed")
    assert [("undo" in line) for line in review.read_journal()] == [False] * 3 + [True] * 3
    review.expect_table({}, page)
    expect(page.locator("#progress span")).to_contain_text("0 of 6 images")
    # One label of many images.
    press("g")
    expect(page.locator("#asked")).to_contain_text("Are these all “red”?")
    names = [str(cell.get_attribute("aria-label")) for cell in page.locator("#cells button").all()]
    assert names == [f"photos/{place}.png: red" for place in range(1, COUNT)]  # the most doubtful first
    press("ArrowRight")
    press("Space")
    press("Enter")
    expect(page.locator("#asked")).to_contain_text("No image is left")
    grid = {f"photos/{place}.png": {"red": int(place != 2)} for place in range(1, COUNT)}
    assert review.read_journal()[-1]["states"] == grid
    review.expect_table({image: row(**states) for image, states in grid.items()}, page)
    press("u")
    expect(page.locator("#cells button")).to_have_count(5)
    assert page.locator("#cells [aria-pressed=true]").get_attribute("aria-label") == "photos/2.png: no red"
    review.expect_table({}, page)
    press("g")
    expect(page.locator("#one")).to_be_visible()
    said = review.end()
    assert "Traceback" not in said


def test_a_label_is_added_by_typing_its_first_letters(start: Start, folder: Path, open_page: Open) -> None:
    (folder / "names.txt").write_text("\n".join([*LABELS, *(f"thing {number}" for number in range(20))]))
    review = start("--labels", "names.txt")
    page = open_page(review.url)
    expect(page.locator("#tags li")).not_to_have_count(0)
    shown = page.locator("#tags li").count()
    assert shown < 10  # of 25
    first = name(page)
    page.keyboard.press("a")
    page.keyboard.type("thing 1")
    expect(page.locator("#found [aria-selected=true]")).to_have_text("thing 1")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#tags li")).to_have_count(shown + 1)
    assert state(page, "thing 10") == "true"
    page.keyboard.press("Enter")
    expect_other(page, first)
    (line,) = review.read_journal()
    assert line["states"][first]["thing 10"] == 1
    assert len(line["states"][first]) == shown + 1  # all others stay unknown
    page.keyboard.press("s")
    review.end()
    known = [state for state in review.read_table()[first].values() if state]
    assert len(known) == shown + 1


def test_a_server_that_is_killed_loses_nothing_and_the_page_goes_on(start: Start, open_page: Open) -> None:
    review = start()
    page = open_page(review.url)
    expect(page.locator("#tags li")).to_have_count(5)
    first = name(page)
    page.keyboard.press("Enter")
    second = expect_other(page, first)
    review.kill()
    page.keyboard.press("1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("1 decision is kept here and will be sent")
    assert len(review.read_journal()) == 1
    review = start(port=review.port)
    third = expect_other(page, second)
    assert third not in (first, second)
    expect(page.get_by_role("alert")).to_be_hidden()
    entries = review.read_journal()
    assert [[*entry["states"]] for entry in entries] == [[first], [second]]
    expect(page.locator("#progress span")).to_contain_text("2 of 6 images")
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('review/')).length") == 0
    said = review.end()
    assert "1 of 6 images are reviewed already; going on with review.csv" in said
    assert "wrote review.csv, 2 images" in said


def test_by_touch_on_a_phone(start: Start, browser: Browser) -> None:
    review = start()
    with browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True) as context:
        page = context.new_page()
        page.goto(review.url)
        expect(page.locator("#tags li")).to_have_count(5)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for button in page.locator("#tags button, #ask .actions button").all():
            box = button.bounding_box()
            assert box is not None
            assert min(box["width"], box["height"]) >= 40
        first = name(page)
        page.locator('#tags li[data-label="red"] .tag').tap()
        page.locator('#tags li[data-label="sky"] .unsure').tap()
        page.locator("#done").tap()
        expect_other(page, first)
    (entry,) = review.read_journal()
    assert (entry["states"][first]["red"], entry["states"][first]["sky"]) == (1, -1)
    review.end()
