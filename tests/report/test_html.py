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

from pivotpatch.audit.cooccurrence import rate_pairs
from pivotpatch.audit.pair_comparison import compare_pairs
from pivotpatch.core.metrics import average_precision, precision_recall
from pivotpatch.core.patches import patch_boxes
from pivotpatch.core.policies import PerLabel, PriorMatched
from pivotpatch.errors import InputError
from pivotpatch.report.findings import COUNTS, Counts, Findings, gather_findings
from pivotpatch.report.html import LIMIT, clean, render_report, write_report
from pivotpatch.report.subject import Subject

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
def gather(subject: Subject, baseline: Subject | None = None, counts: Counts = COUNTS) -> Findings:
    generator = torch.Generator().manual_seed(0)
    return gather_findings(subject, baseline=baseline, counts=counts, resamples=20, generator=generator)


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


@pytest.mark.parametrize(
    ("subject", "baseline", "expected"),
    [
        (FULL, BASELINE, "summary labels curves company cases errors calibration training"),
        (SUBJECT, None, "summary labels curves company cases errors calibration"),
        (PLAIN, BASELINE, "summary labels curves company errors calibration"),
        (PLAIN, None, "summary labels curves company errors calibration"),
        (replace(PLAIN, scores=PLAIN.scores.select(torch.arange(20))), None, "summary labels curves company"),
        (Subject("one", make_scores(("alone",), patches=False)), None, "summary labels curves errors calibration"),
    ],
)
def test_sections_are_there_where_their_data_are(subject: Subject, baseline: Subject | None, expected: str) -> None:
    page = Page(report(subject, baseline))
    assert [section["id"] for section in page.find("section")] == expected.split()
    links = [link["href"] for link in page.find("a")]
    assert links == [f"#{name}" for name in expected.split()]
    assert page.find("img") == []  # nobody said where the pictures are


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
    policy = PriorMatched.from_target(SUBJECT.scores.target)
    comparison = compare_pairs(*(rate_pairs(each.scores, policy=policy) for each in (SUBJECT, BASELINE)))
    assert page.texts["cfpr"].startswith(f"{100 * comparison.cfpr.share_improved:.1f} %")
    assert page.texts["ctpr"].startswith(f"{100 * comparison.ctpr.share_improved:.1f} %")


def test_a_label_without_a_positive_has_a_dash_and_is_told() -> None:
    target = SUBJECT.scores.target.clone()
    target[:, 2] = 0
    text = report(replace(SUBJECT, scores=replace(SUBJECT.scores, target=target)))
    assert Page(text).rows[3] == ["label c", "0", "–", "–", "–", "–", "0.50", "–", "–"]
    assert "1 labels have no positive picture" in text


def test_thresholds_of_ones_own_stand_in_the_table() -> None:
    thresholds = tuple(0.1 * (place + 1) for place in range(8))
    text = report(replace(SUBJECT, policy=PerLabel(thresholds)))
    rows = Page(text).rows[1:]
    decided = precision_recall(SUBJECT.scores.probs("tde"), SUBJECT.scores.target, policy=PerLabel(thresholds))
    assert [row[6] for row in rows] == [f"{value:.2f}" for value in thresholds]
    assert [row[7] for row in rows] == [f"{100 * (value or 0):.1f}" for value in decided.precision]


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
    assert f"picture {make_scores(HOSTILE).pictures[0][:14]}" in {str(image["alt"])[:22] for image in page.find("img")}


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


def test_pictures_are_shown_up_to_the_number_that_was_asked_for() -> None:
    records = make_records(SUBJECT.scores)
    for count in (0, 5):
        page = Page(report(SUBJECT, BASELINE, records=records, pictures=count))
        assert len(page.find("img")) in (range(1, count + 1) if count else (0,))
    assert {(image["loading"], image["decoding"]) for image in page.find("img")} == {("lazy", "async")}


def test_a_picture_that_cannot_be_read_is_told() -> None:
    scores = SUBJECT.scores
    unreadable = torch.arange(9, 120, 10)
    everywhere = replace(scores, indices=unreadable[torch.arange(120) % len(unreadable)])
    text = report(replace(SUBJECT, scores=everywhere), BASELINE, records=make_records(scores))
    assert Page(text).find("img") == []
    assert "is in none of the known formats" in text


def test_many_labels_with_long_names_and_pictures_of_noise_stay_below_the_limit() -> None:
    count = 1300
    scores = make_scores(tuple(f"{place} " + '"' * 300 for place in range(count)), count=60)
    target = torch.zeros(60, count)
    target[torch.arange(count) % 60, torch.arange(count)] = 1  # else all labels keep company with all others
    scores = replace(scores, target=target)
    subject = Subject('"' * 500, scores)
    findings = gather(subject, counts=Counts(cases=40, pairs=33, errors=60))
    records = make_records(scores, size=(400, 400))
    text = render_report(findings, subject, records=records, pictures=200)
    assert len(text.encode()) < LIMIT
    rows, shown = Page(text).rows[1:], len(Page(text).find("img"))
    assert 20 < shown < 40 + 3 * 33 + 60  # there was no room for more
    left_out = re.search(r"The (\d+) rarest labels are left out", text)
    assert left_out is not None
    assert len(rows) + int(left_out[1]) == count


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    findings = gather(SUBJECT)
    size = write_report(path, findings, SUBJECT)
    assert path.stat().st_size == size
    assert path.read_text("utf-8").startswith("<!doctype html>")
    with pytest.raises(InputError, match="No such file or directory; choose a folder that can be written to"):
        write_report(tmp_path / "nowhere" / "report.html", findings, SUBJECT)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_words_can_be_read_by_day_and_by_night(full: str) -> None:
    for block in re.findall(r":root \{(.*?)\}", full, re.DOTALL)[:2]:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
        for ink in ("ink", "soft", "link", "good", "bad"):
            for ground in ("page", "card", "shade"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)


def test_boxes_of_case_studies_overlap_as_the_patches_do() -> None:
    page = Page(report(replace(SUBJECT, scores=replace(SUBJECT.scores, overlap=0.5))))
    drawn = [(box["x"], box["y"], box["width"]) for box in page.find("rect") if box.get("stroke-width") == ".6"]
    expected = [
        (str(box.left), str(box.top), str(box.right - box.left)) for box in patch_boxes(100, 100, grid=2, overlap=0.5)
    ]
    assert drawn
    assert drawn == expected * (len(drawn) // 4)
