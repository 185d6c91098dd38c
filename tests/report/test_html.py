import re
from base64 import b64encode
from dataclasses import replace
from functools import cache
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from made_scores import HOSTILE, make_records, make_scores

from pivotpatch.audit.cooccurrence import compare_pairs, rate_pairs
from pivotpatch.core.metrics import average_precision, precision_recall
from pivotpatch.core.patches import patch_boxes
from pivotpatch.report.findings import Findings, Subject, gather_findings
from pivotpatch.report.html import LIMIT, clean, render_report, write_report

LABELS = tuple(f"label {letter}" for letter in "abcdefgh")


class Page(HTMLParser):
    """The elements of a page, and the text below each id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self.in_labels = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = dict(attrs)
        self.elements.append((tag, held))
        if tag == "table":
            self.in_labels = held.get("id") == "label-table"
        if self.in_labels and tag == "tr":
            self.rows.append([])
        if self.in_labels and tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if held.get("id"):
            self.open.append(str(held["id"]))
            self.texts[str(held["id"])] = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]] += data
        if self.in_labels and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.removesuffix("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.in_labels = False

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@cache
def gather(subject: Subject, baseline: Subject | None = None, images: int = 60) -> Findings:
    generator = torch.Generator().manual_seed(0)
    return gather_findings(subject, baseline=baseline, images=images, resamples=20, generator=generator)


def report(subject: Subject, baseline: Subject | None = None, **options: object) -> str:
    return render_report(gather(subject, baseline), subject, baseline=baseline, **options)  # type: ignore[arg-type]


SUBJECT = Subject("my run", make_scores(LABELS))
PLAIN = Subject("plain", make_scores(LABELS, patches=False))
BASELINE = Subject("the old one", make_scores(LABELS, patches=False, seed=1, skill=1.0))
LOG = [
    {"step": 1, "epoch": 0.5, "loss": 2.0, "loss_image": 1.0, "loss_patch": 1.0},
    {"step": 2, "epoch": 1.0, "val_mAP_tde": 0.5},
]
FULL = replace(SUBJECT, log=LOG)


@pytest.fixture(scope="module")
def full() -> str:
    return report(FULL, BASELINE, records=make_records(FULL.scores))


def list_sections(page: Page) -> list[str | None]:
    assert [link["href"] for link in page.find("a")] == [f"#{section['id']}" for section in page.find("section")]
    return [section["id"] for section in page.find("section")]


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (replace(PLAIN, scores=PLAIN.scores.select(torch.arange(20))), "summary labels curves cooccurrence"),
        (Subject("one", make_scores(("alone",), patches=False)), "summary labels curves errors calibration"),
    ],
)
def test_sections_are_there_where_their_data_are(subject: Subject, expected: str, full: str) -> None:
    page = Page(report(subject))
    assert list_sections(page) == expected.split()
    assert page.find("img") == []  # nobody said where the images are
    whole = "summary labels curves cooccurrence cases errors calibration training"
    assert " ".join(map(str, list_sections(Page(full)))) == whole


def test_the_summary_is_what_the_metrics_say(full: str) -> None:
    page, scores = Page(full), SUBJECT.scores
    found = average_precision(scores.get("tde"), scores.target)
    other = average_precision(BASELINE.scores.get("image"), scores.target)
    assert page.texts["map"].startswith(f"{100 * found.mean:.2f}")
    assert page.texts["difference"].startswith(f"{100 * (found.mean - other.mean):+.2f}")
    interval = gather(SUBJECT, BASELINE).evaluation.kinds["tde"].interval
    assert interval is not None
    assert f"95 % interval {100 * interval.low:.2f} to {100 * interval.high:.2f}; step-wise sum" in full
    decided = precision_recall(scores.probs("tde"), scores.target)
    row = re.search(r">TDE</th>(.*?)</tr>", full, re.DOTALL)
    assert row is not None
    cells = re.findall(r"<td>([\d.]+)</td>", row[1])
    expected = [decided.CP, decided.CR, decided.CF1, decided.OP, decided.OR, decided.OF1]
    assert cells == [f"{100 * found.mean:.2f}", *(f"{100 * value:.1f}" for value in expected)]


def test_the_table_is_what_the_metrics_say(full: str) -> None:
    head, *rows = Page(full).rows
    assert head == [
        *("label", "positives", "AP image", "AP patch", "AP TDE", "over baseline", "threshold", "precision", "recall")
    ]
    scores = SUBJECT.scores
    found = [average_precision(scores.get(kind), scores.target) for kind in ("image", "patch", "tde")]
    other = average_precision(BASELINE.scores.get("image"), scores.target)
    decided = precision_recall(scores.probs("tde"), scores.target)
    for place, row in enumerate(rows):
        values = [each.per_label[place] or 0.0 for each in found]
        precision, recall = decided.precision[place], decided.recall[place]
        assert precision is not None
        assert recall is not None
        assert row == [
            LABELS[place],
            str(found[0].positives[place]),
            *(f"{100 * value:.1f}" for value in values),
            f"{100 * (values[2] - (other.per_label[place] or 0.0)):+.1f}",
            "0.50",
            f"{100 * precision:.1f}",
            f"{100 * recall:.1f}",
        ]


def test_shares_of_pairs_are_what_the_audit_says(full: str) -> None:
    page = Page(full)
    comparison = compare_pairs(*(rate_pairs(each.scores) for each in (SUBJECT, BASELINE)))
    assert page.texts["cfpr"].startswith(f"{100 * (comparison.cfpr.share_improved or 0):.1f} %")
    assert page.texts["ctpr"].startswith(f"{100 * (comparison.ctpr.share_improved or 0):.1f} %")


def test_a_label_without_a_positive_has_a_dash_and_is_told() -> None:
    target = SUBJECT.scores.target.clone()
    target[:, 2] = 0
    text = report(replace(PLAIN, scores=replace(PLAIN.scores, target=target)))
    assert Page(text).rows[3] == ["label c", "0", "–", "0.50", "–", "–"]
    assert "1 labels have no positive image" in text


@pytest.fixture(scope="module")
def hostile() -> str:
    scores = make_scores(HOSTILE)
    subject = Subject(HOSTILE[0], scores, facts={HOSTILE[1]: HOSTILE[2]}, log=LOG)
    baseline = Subject(HOSTILE[3], make_scores(HOSTILE, patches=False, seed=1), facts={"model": HOSTILE[0]})
    return report(subject, baseline, records=make_records(scores))


def test_hostile_names_are_nothing_but_text(hostile: str) -> None:
    page = Page(hostile)
    assert len(page.find("script")) == len(page.find("style")) == 1
    assert page.find("iframe") == []
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert all(str(image["src"]).startswith("data:image/jpeg;base64,") for image in page.find("img"))
    assert [row[0] for row in page.rows[1:]] == [clean(label) for label in HOSTILE]
    assert page.rows[6][0] == "犬 ���"
    assert all(str(image["alt"]).startswith("image ") for image in page.find("img"))


def test_nothing_points_outside(full: str, hostile: str) -> None:
    text = full + hostile
    links = [
        str(value)
        for tag, attributes in Page(text).elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
    ]
    assert links
    assert all(re.match(r"#[\w-]+$|data:", link) for link in links)
    assert re.findall(r"url\((?!#)", text) == []
    assert "@import" not in text
    assert re.findall(r"\b(?:https?|ftp|wss?):", text.replace(HOSTILE[3].split("=")[1][:-1], "")) == []


def test_the_policy_lets_the_one_script_run_and_nothing_be_asked_for(full: str) -> None:
    (policy,) = [meta["content"] for meta in Page(full).find("meta") if "http-equiv" in meta]
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))
    script = re.search(r"<script>(.*?)</script>", full, re.DOTALL)
    assert script is not None
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{b64encode(sha256(script[1].encode()).digest()).decode()}'"
    assert rules["img-src"] == "data:"
    assert "connect-src" not in rules  # so default-src holds


def test_ids_are_unique_and_references_lead_to_one(full: str) -> None:
    ids = re.findall(r'\sid="([^"]+)"', full)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="#([^"]+)"', full)) | set(re.findall(r"url\(#([^)]+)\)", full))
    assert used | set(re.findall(r'aria-describedby="([^"]+)"', full)) <= set(ids)


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
    text = render_report(findings, subject, records=records, images=200)
    assert len(text.encode()) < LIMIT
    rows, shown = Page(text).rows[1:], len(Page(text).find("img"))
    assert 20 < shown < 40 + 3 * 33 + 60  # there was no room for more
    left_out = re.search(r"The (\d+) rarest labels are left out", text)
    assert left_out is not None
    assert len(rows) + int(left_out[1]) == count


def test_a_report_is_written_as_one_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    size = write_report(path, gather(SUBJECT), SUBJECT)
    assert path.stat().st_size == size
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_boxes_of_case_studies_overlap_as_the_patches_do() -> None:
    page = Page(report(replace(SUBJECT, scores=replace(SUBJECT.scores, overlap=0.5))))
    drawn = [(box["x"], box["y"], box["width"]) for box in page.find("rect") if box.get("stroke-width") == ".6"]
    expected = [
        (str(box.left), str(box.top), str(box.right - box.left)) for box in patch_boxes(100, 100, grid=2, overlap=0.5)
    ]
    assert drawn
    assert drawn == expected * (len(drawn) // 4)
