import re
from base64 import b64decode
from dataclasses import replace
from functools import cache
from html import unescape
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
import torch
from made_scores import HOSTILE, make_records, make_scores
from PIL import Image

from pivotpatch.core.metrics import average_precision, precision_recall
from pivotpatch.report.findings import Findings, Subject, gather_findings
from pivotpatch.report.html import LIMIT, SIDE, Album, clean, render_report

LABELS = tuple(f"label {letter}" for letter in "abcdefgh")


class Page(HTMLParser):
    """The elements of a page, and the cells of its table of labels."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        table = text.partition('id="label-table"')[2].partition("</table>")[0]
        cells = [re.split(r"<t[dh][^>]*>", row)[1:] for row in table.split("<tr>")[1:]]
        self.rows = [[unescape(re.sub(r"<[^>]*>", "", cell)).strip("\n") for cell in row] for row in cells]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@cache
def gather(subject: Subject, baseline: Subject | None = None, images: int = 60) -> Findings:
    generator = torch.Generator().manual_seed(0)
    return gather_findings(subject, baseline=baseline, images=images, resamples=20, generator=generator)


def report(subject: Subject, baseline: Subject | None = None, **options: object) -> str:
    return render_report(gather(subject, baseline), **options)  # type: ignore[arg-type]


SUBJECT = Subject("my run", make_scores(LABELS))
PLAIN = Subject("plain", make_scores(LABELS, patches=False))
BASELINE = Subject("the old one", make_scores(LABELS, patches=False, seed=1, skill=1.0))


@pytest.fixture(scope="module")
def full() -> str:
    return report(SUBJECT, BASELINE, records=make_records(SUBJECT.scores))


def list_sections(page: Page) -> list[str | None]:
    assert [link["href"] for link in page.find("a")] == [f"#{section['id']}" for section in page.find("section")]
    return [section["id"] for section in page.find("section")]


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (replace(PLAIN, scores=PLAIN.scores.select(torch.arange(20))), "summary labels cooccurrence"),
        (Subject("one", make_scores(("alone",), patches=False)), "summary labels errors calibration"),
    ],
)
def test_sections_are_there_where_their_data_are(subject: Subject, expected: str, full: str) -> None:
    page = Page(report(subject))
    assert list_sections(page) == expected.split()
    assert "data:image/jpeg" not in report(subject)  # nobody said where the images are
    whole = "summary labels cooccurrence cases errors calibration"
    assert " ".join(map(str, list_sections(Page(full)))) == whole


def test_the_table_is_what_the_metrics_say(full: str) -> None:
    head, *rows = Page(full).rows
    assert " ".join(head) == "label positives AP image AP patch AP TDE over baseline threshold precision recall"
    scores = SUBJECT.scores
    found = [average_precision(scores.get(kind), scores.target) for kind in ("image", "patch", "tde")]
    other = average_precision(BASELINE.scores.get("image"), scores.target)
    decided = precision_recall(scores.probs("tde"), scores.target)
    for place, row in enumerate(rows):
        values = [each.per_label[place] or 0.0 for each in found]
        assert row == [
            LABELS[place],
            str(found[0].positives[place]),
            *(f"{100 * value:.1f}" for value in values),
            f"{100 * (values[2] - (other.per_label[place] or 0.0)):+.1f}",
            "0.50",
            *(f"{100 * (rate[place] or 0.0):.1f}" for rate in (decided.precision, decided.recall)),
        ]


@pytest.fixture(scope="module")
def hostile() -> str:
    scores = make_scores(HOSTILE)
    subject = Subject(HOSTILE[0], scores, facts={HOSTILE[1]: HOSTILE[2]})
    baseline = Subject(HOSTILE[3], make_scores(HOSTILE, patches=False, seed=1), facts={"model": HOSTILE[0]})
    return report(subject, baseline, records=make_records(scores))


def test_hostile_names_are_nothing_but_text(hostile: str) -> None:
    page = Page(hostile)
    assert len(page.find("script")) == len(page.find("style")) == 1
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert all(re.match(r"data:image/(jpeg|png);base64,", str(image["src"])) for image in page.find("img"))
    assert [row[0] for row in page.rows[1:]] == [clean(label) for label in HOSTILE]
    assert page.rows[6][0] == "犬 ���"


@pytest.mark.slow
def test_many_labels_with_long_names_and_images_of_noise_stay_below_the_limit() -> None:
    count = 1300
    scores = make_scores(tuple(f"{place} " + '"' * 300 for place in range(count)), count=60)
    target = torch.zeros(60, count)
    target[torch.arange(count) % 60, torch.arange(count)] = 1  # else all labels co-occur
    scores = replace(scores, target=target)
    subject = Subject('"' * 500, scores)
    findings = gather(subject, images=200)
    records = make_records(scores, size=(400, 400))
    text = render_report(findings, records=records, images=200)
    assert len(text.encode()) < LIMIT
    rows, shown = Page(text).rows[1:], text.count("data:image/jpeg")
    assert 20 < shown < 40 + 3 * 33 + 60  # there was no room for more
    (left_out,) = re.findall(r"The (\d+) rarest labels are left out", text)
    assert len(rows) + int(left_out) == count


def test_a_copy_is_the_image_of_its_row_and_there_are_no_more_than_there_is_room_for() -> None:
    scores = make_scores(("a", "b"), count=20)
    records = make_records(scores, size=(300, 600))
    copy = Album(records.select(np.arange(20)[::-1]), count=9, room=10**6).copy(3)
    assert copy is not None
    image = Image.open(BytesIO(b64decode(copy.address.removeprefix("data:image/jpeg;base64,"))))
    assert (copy.width, copy.height) == image.size == (SIDE, SIDE // 2)
    distances = {}
    for row in (3, 15, 16, 17):
        source = Image.fromarray(np.asarray(records.images.source(row))).resize(image.size)
        distances[row] = np.abs(np.asarray(image, dtype=float) - np.asarray(source, dtype=float)).mean()
    assert min(distances, key=distances.__getitem__) == 16
    album = Album(make_records(scores), count=3, room=10**6)
    assert [album.copy(row) is not None for row in range(5)] == [True, True, True, False, False]
    album = Album(make_records(scores, size=(500, 500)), count=20, room=100_000)
    made = [copy for copy in map(album.copy, range(9)) if copy is not None]
    assert 0 < len(made) < 9
    assert sum(len(copy.address) for copy in made) <= 100_000
    assert Album(make_records(scores), count=1, room=10**6).copy(9) is None  # it cannot be read
