"""The report in a real browser: it renders, says nothing, asks nobody, sorts, and fits phones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from made_scores import HOSTILE, make_records, make_scores
from playwright.sync_api import Browser, Page, Route

from pivotpatch.report import Subject, gather_findings, write_report
from pivotpatch.report.html import clean

pytestmark = [pytest.mark.slow, pytest.mark.browser]


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
    subject = Subject(HOSTILE[0], scores, facts={"model": HOSTILE[1]})
    baseline = Subject(HOSTILE[3], make_scores(scores.labels, patches=False, seed=1))
    findings = gather_findings(subject, baseline=baseline, resamples=5, generator=torch.Generator().manual_seed(0))
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, findings, records=make_records(subject.scores))
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


def test_it_renders_in_silence_and_asks_nobody(reported: Path, open_page: Open) -> None:
    opened = open_page(reported)
    page = opened.page
    for image in page.locator("img").all():
        image.scroll_into_view_if_needed()
    page.wait_for_function("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    assert page.locator("img").count() > 20
    assert page.locator(".plot img").count() == 2
    assert all(box["height"] > 100 for box in (plot.bounding_box() for plot in page.locator(".plot img").all()) if box)
    names = page.locator("#label-table tbody th").all_text_contents()
    assert [name.strip() for name in names] == [clean(label).strip() for label in (*HOSTILE, "plain", "other")]
    assert page.evaluate("typeof window.hit") == "undefined"  # what hostile names would set
    assert (opened.said, opened.asked) == ([], [])


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


def test_labels_sort_by_click_with_their_rows(reported: Path, open_page: Open) -> None:
    page = open_page(reported).page
    head = page.locator("#label-table thead th", has_text="AP TDE")
    before = dict(zip(read_column(page, 0), read_column(page, 4), strict=True))
    for order, reverse in (("descending", True), ("ascending", False)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        values = list(map(float, read_column(page, 4)))
        assert values == sorted(values, reverse=reverse)
        assert dict(zip(read_column(page, 0), read_column(page, 4), strict=True)) == before


@pytest.mark.parametrize("width", [320, 768])
def test_a_phone_never_scrolls_sideways_but_inside_tables(width: int, reported: Path, open_page: Open) -> None:
    page = open_page(reported, width, device_scale_factor=2, is_mobile=width < 700, has_touch=True).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("innerWidth") == width  # a phone would zoom out to show what is too wide
    widths = page.evaluate("[...document.querySelectorAll('.plot img')].map((image) => image.clientWidth)")
    assert min(widths) > 0.6 * 260  # words in figures can be read
