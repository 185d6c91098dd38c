"""The report in a real browser: it renders, says nothing, asks nobody, sorts, and fits phones, night and paper."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from made_scores import HOSTILE, make_records, make_scores
from PIL import Image
from playwright.sync_api import Browser, Page, Route

from pivotpatch.core.metrics import average_precision
from pivotpatch.report import Subject, gather_findings, write_report
from pivotpatch.report.html import clean

pytestmark = pytest.mark.slow

COUNT = 1000
LOG = [{"step": 1, "epoch": 0.5, "loss": 2.0, "loss_image": 2.0}, {"step": 2, "epoch": 1.0, "val_mAP_tde": 0.5}]


@dataclass
class Opened:
    """A page, and what it said and asked for besides itself."""

    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything in it, on labels that try to be more than text."""
    scores = make_scores((*HOSTILE, "plain", "other"))
    subject = Subject(HOSTILE[0], scores, log=LOG, facts={"model": HOSTILE[1]})
    baseline = Subject(HOSTILE[3], make_scores(scores.labels, patches=False, seed=1))
    return write(tmp_path_factory.mktemp("report"), subject, baseline)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on a thousand labels, one of which has no positive image."""
    scores = make_scores(tuple(f"label {place}" for place in range(COUNT)), count=40, patches=False)
    target = torch.zeros_like(scores.target)
    target[torch.arange(1, COUNT) % 40, torch.arange(1, COUNT)] = 1
    return write(tmp_path_factory.mktemp("many"), Subject("many", replace(scores, target=target)), None)


def write(folder: Path, subject: Subject, baseline: Subject | None) -> Path:
    findings = gather_findings(subject, baseline=baseline, resamples=5, generator=torch.Generator().manual_seed(0))
    path = folder / "report.html"
    write_report(path, findings, subject, baseline=baseline, records=make_records(subject.scores))
    return path


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    contexts = []

    def open_(path: Path, width: int = 1200, **options: object) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)  # type: ignore[arg-type]
        contexts.append(context)
        opened = Opened(context.new_page())

        def answer(route: Route) -> None:
            if route.request.url == path.as_uri():
                route.continue_()
            else:
                opened.asked.append(route.request.url)
                route.abort()

        context.route("**/*", answer)
        opened.page.on("console", lambda message: opened.said.append(message.text))
        opened.page.on("pageerror", lambda error: opened.said.append(str(error)))
        opened.page.goto(path.as_uri())
        return opened

    yield open_
    for context in contexts:
        context.close()


def test_it_renders_in_silence_and_asks_nobody(reported: Path, open_page: Open, tmp_path: Path) -> None:
    opened = open_page(reported)
    page = opened.page
    for image in page.locator("img").all():
        image.scroll_into_view_if_needed()
    page.wait_for_function("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    assert page.locator("img").count() > 20
    assert page.locator(".plot svg").count() == 9
    assert all(box["height"] > 100 for box in (plot.bounding_box() for plot in page.locator(".plot svg").all()) if box)
    page.screenshot(path=tmp_path / "report.png", full_page=True)
    pixels = np.asarray(Image.open(tmp_path / "report.png").convert("RGB"))
    assert pixels.shape[0] > 3000
    assert len(np.unique(pixels.reshape(-1, 3)[::97], axis=0)) > 100  # neither blank nor of one colour
    assert (opened.said, opened.asked) == ([], [])


def test_hostile_names_are_shown_and_never_run(reported: Path, open_page: Open) -> None:
    page = open_page(reported).page
    names = page.locator("#label-table tbody th").all_text_contents()
    assert [name.strip() for name in names] == [clean(label).strip() for label in (*HOSTILE, "plain", "other")]
    page.wait_for_timeout(100)
    assert page.evaluate("typeof window.hit") == "undefined"
    assert page.locator("iframe").count() == 0
    assert page.title() == f"Report on {HOSTILE[0]}"


def test_even_a_script_that_got_in_would_not_run(reported: Path, open_page: Open, tmp_path: Path) -> None:
    path = tmp_path / "broken.html"
    bad = "<script>window.hit=1</script><img src='http://127.0.0.1:9/x.png' onerror='window.hit=2'>"
    path.write_text(reported.read_text("utf-8").replace("<main>", f"<main>{bad}"), "utf-8")
    opened = open_page(path)
    opened.page.wait_for_timeout(100)
    assert opened.page.evaluate("typeof window.hit") == "undefined"
    assert opened.asked == []
    assert any("Content Security Policy" in message for message in opened.said)


def read_column(page: Page, place: int) -> list[str]:
    cells = (
        f"[...document.querySelectorAll('#label-table tbody tr')].map((row) => row.cells[{place}].textContent.trim())"
    )
    found: list[str] = page.evaluate(cells)
    return found


def test_a_thousand_labels_sort_by_click(many: Path, open_page: Open) -> None:
    page = open_page(many).page
    head = page.locator("#label-table thead th").nth(2)
    before = read_column(page, 0)
    assert before == [f"label {place}" for place in range(COUNT)]
    for order, reverse in (("descending", True), ("ascending", False)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        *values, last = read_column(page, 2)
        assert last == "–"  # what is not known stays last
        assert list(map(float, values)) == sorted(map(float, values), reverse=reverse)
        assert sorted(read_column(page, 0)) == sorted(before)
    others = page.locator("#label-table thead th[aria-sort=none]")
    assert others.count() == page.locator("#label-table thead th").count() - 1


def test_rows_stay_whole_when_they_are_sorted(reported: Path, open_page: Open) -> None:
    scores = make_scores((*HOSTILE, "plain", "other"))
    found = average_precision(scores.get("tde"), scores.target).per_label
    expected = {
        clean(name).strip(): f"{100 * (value or 0):.1f}" for name, value in zip(scores.labels, found, strict=True)
    }
    page = open_page(reported).page
    page.locator("#label-table thead button", has_text="AP TDE").click()
    assert dict(zip(read_column(page, 0), read_column(page, 4), strict=True)) == expected


def test_it_sorts_by_keyboard_alone(reported: Path, open_page: Open) -> None:
    page = open_page(reported).page
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#label-table') !== null"):
            break
    assert page.evaluate("document.activeElement.textContent") == "label"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    first = read_column(page, 0)
    assert first == page.evaluate("(names) => names.sort((a, b) => a.localeCompare(b))", first)
    page.keyboard.press("Space")
    assert read_column(page, 0) == first[::-1]
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    positives = list(map(int, read_column(page, 1)))
    assert positives == sorted(positives, reverse=True)


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_phone_never_scrolls_sideways_but_inside_tables(width: int, reported: Path, open_page: Open) -> None:
    page = open_page(reported, width, device_scale_factor=2, is_mobile=width < 700, has_touch=True).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("innerWidth") == width  # a phone would zoom out to show what is too wide
    sizes = page.evaluate(
        "[...document.querySelectorAll('#labels .scroll')].map((e) => [e.scrollWidth, e.clientWidth])"
    )
    assert sizes[0][0] > sizes[0][1] if width < 700 else sizes
    small = page.evaluate(
        """[...document.querySelectorAll('.plot svg')].filter((svg) =>
        [...svg.querySelectorAll('text')].some((text) => text.getBoundingClientRect().height < 7)).length"""
    )
    assert small == 0  # words in figures can be read


def test_the_night_is_dark_and_paper_is_white(reported: Path, open_page: Open) -> None:
    def look(page: Page) -> list[float]:
        colours = page.evaluate(
            """['body', 'section', '.plot text'].map((name) => getComputedStyle(document.querySelector(name)))
            .map((style, place) => place == 2 ? style.fill : style.backgroundColor)"""
        )
        return [sum(map(int, colour[4:-1].split(","))) / 3 for colour in colours]

    day, night = (open_page(reported, color_scheme=scheme).page for scheme in ("light", "dark"))
    assert [shade > 200 for shade in look(day)] == [True, True, False]
    assert [shade > 200 for shade in look(night)] == [False, False, True]
    night.emulate_media(media="print", color_scheme="dark")
    assert [shade > 200 for shade in look(night)] == [True, True, False]


def test_paper_shows_all_rows_and_no_links(many: Path, open_page: Open) -> None:
    page = open_page(many).page
    region = page.locator("#labels .scroll")
    sizes = "(element) => [element.scrollHeight, element.clientHeight]"
    whole, shown = region.evaluate(sizes)
    assert whole > 5 * shown
    page.emulate_media(media="print")
    whole, shown = region.evaluate(sizes)
    assert whole <= shown + 1
    assert not page.locator("nav").is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_without_its_script_all_of_it_is_there(reported: Path, open_page: Open) -> None:
    page = open_page(reported, java_script_enabled=False).page
    assert page.locator("#label-table tbody tr").count() == len(HOSTILE) + 2
    assert Image.open(BytesIO(page.screenshot())).size == (1200, 900)
