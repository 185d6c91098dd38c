"""A report as one HTML file that needs nothing besides itself: it opens offline and asks nobody for anything."""

import math
import re
from base64 import b64encode
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from pivotpatch import __version__
from pivotpatch.audit.cases import CaseStudy
from pivotpatch.audit.plots import plot_pair_curves, shrink_image
from pivotpatch.core.metrics import DEFINITIONS, MEASURES
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError
from pivotpatch.report.findings import BASELINE, PAIRS_PER_LABEL, Findings
from pivotpatch.runtime.values import patch_boxes
from pivotpatch.tuning.plots import CURVE_COLOURS, plot_reliability
from pivotpatch.writing import explain_disk_faults, replacing

LIMIT = 5_000_000
"""Bytes that a report never reaches."""
ROOM_FOR_IMAGES, MOST_LABELS = 2_200_000, 1000  # characters, and rows; the rest is for figures and words
SIDE = 240
"""Pixels of the longer side of an image."""
NAMES = {"image": "image", "patch": "patch", "tde": "TDE"}
_OPINIONS = {"image": "whole image", "patch": "its patches", "tde": "both (TDE)"}
_SMALLEST = 0.68  # of its own size, to which a figure may shrink on a narrow screen before it scrolls
_DPI = 150  # of figures
_LONGEST = 160  # characters of a name that are shown
# Signs that no XML may hold, halves of signs, and those that turn the text around them.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
_PAGE = files("pivotpatch.report") / "page"


def clean(text: str) -> str:
    r"""A name from anywhere, fit to be shown: no unfit sign, and not too long.

    >>> clean("a\x00b")
    'a�b'
    """
    text = _UNFIT.sub("\ufffd", text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def write_percent(value: float | None, digits: int) -> str:
    """A share in per cent; a dash where it is not known.

    >>> write_percent(0.125, 1), write_percent(None, 1)
    ('12.5', '–')
    """
    return "–" if value is None or math.isnan(value) else f"{100 * value:.{digits}f}"


def write_report(path: Path, findings: Findings, *, records: RecordSet | None = None, images: int = 60) -> int:
    """Write a report, whole or not at all, and return how many bytes it has; see `render_report`."""
    page = render_report(findings, records=records, images=images).encode()
    with explain_disk_faults(path.parent), replacing(path) as written:
        written.write_bytes(page)
    return len(page)


def render_report(findings: Findings, *, records: RecordSet | None = None, images: int = 60) -> str:
    """A report as HTML; of the images that were scored, `records`, at most so many are shown."""
    subject, baseline, evaluation = findings.subject, findings.baseline, findings.evaluation
    indices = subject.scores.indices
    scored = None if records is None or indices is None else records.select(indices.numpy())
    album = Album(scored, count=images, room=ROOM_FOR_IMAGES)
    counted = evaluation.kinds[evaluation.ranking]
    positives = counted.precision.positives
    kept = sorted(sorted(range(len(positives)), key=lambda label: -positives[label])[:MOST_LABELS])
    results = {NAMES[kind]: each for kind, each in evaluation.kinds.items()}
    if baseline is not None and evaluation.baseline is not None:
        results[f"baseline {baseline.name}"] = evaluation.baseline
    script = (_PAGE / "report.js").read_text("utf-8")
    own = b64encode(sha256(script.encode()).digest()).decode("ascii")
    context: dict[str, Any] = {
        "title": f"Report on {subject.name}",
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        "version": __version__,
        # A browser may run the one script that belongs to the page, and ask nobody for anything.
        "policy": Markup(  # noqa: S704  # no word of a user; neither are the next two
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{own}'; base-uri 'none'; form-action 'none'"
        ),
        "script": Markup(script),  # noqa: S704
        "style": Markup((_PAGE / "report.css").read_text("utf-8")),  # noqa: S704
        "findings": findings,
        "found": evaluation,
        "counted": counted,
        "definition": DEFINITIONS[evaluation.definition],
        "names": NAMES,
        "measures": MEASURES,
        "results": results,
        "facts": _list_facts(findings, records),
        "kept": kept,
        "cases": [_show_case(study, album, findings) for study in findings.cases],
        "worst": [(pair, [(each, album.copy(each.row)) for each in pair.examples]) for pair in findings.worst],
        "errors": [(error, album.copy(error.row)) for error in findings.errors],
        "per_label": PAIRS_PER_LABEL,
        "pair_plot": None,
        "calibration_plot": None,
    }
    if findings.comparison is not None:
        compared = plot_pair_curves(findings.comparison, names=("model", BASELINE if baseline else "image logits"))
        told = "conditional FPR and TPR of all pairs, sorted by the reference"
        context["pair_plot"] = embed_figure(compared, text=told)
    if findings.curves:
        figure = plot_reliability(findings.curves)
        context["calibration_plot"] = embed_figure(figure, text="share of positives by probability")
    headings = {
        "summary": ("Summary", True),
        "labels": ("Labels", True),
        "cooccurrence": ("Co-occurring labels", context["pair_plot"] or context["worst"]),
        "cases": ("Case studies", context["cases"]),
        "errors": ("Likely label errors", context["errors"]),
        "calibration": ("Calibration", context["calibration_plot"]),
    }
    context["sections"] = {name: text for name, (text, there) in headings.items() if there}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pivotpatch.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # Every value passes here on its way into the page, so that none can be forgotten.
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    environment.filters["percent"] = write_percent
    page = environment.get_template("report.html").render(context)
    assert len(page.encode()) < LIMIT, "every part of a report has its limit"
    return page


def _list_facts(findings: Findings, records: RecordSet | None) -> dict[str, str]:
    scores, baseline = findings.subject.scores, findings.baseline
    missing = 0 if records is None else len(records) - len(scores)
    facts = {
        "data": records.name if records is not None else "as the scores tell it",
        "images": f"{len(scores):,}" + (f" of {len(records or ()):,}; {missing:,} have no scores" if missing else ""),
        "labels": f"{len(scores.labels):,}",
        **findings.subject.facts,
    }
    if baseline is not None:
        facts |= {f"baseline {name}": text for name, text in {"name": baseline.name, **baseline.facts}.items()}
    return facts


def _show_case(study: CaseStudy, album: "Album", findings: Findings) -> dict[str, Any]:
    """A case study with its image, its patches' shares, and how much nearer to the truth than the reference it is."""
    opinions = _OPINIONS if findings.baseline is None else {BASELINE: BASELINE, **_OPINIONS}
    bars = [(name, getattr(study, kind), CURVE_COLOURS[kind]) for kind, name in opinions.items()]
    thumbnail = album.copy(study.row)
    height = round(100 * thumbnail.height / thumbnail.width) if thumbnail else 100
    side, grid = math.isqrt(len(study.weights)), None
    if side**2 == len(study.weights) and height >= side:
        boxes = patch_boxes(height, 100, grid=side, overlap=findings.subject.scores.overlap)
        grid = {"height": height, "cells": list(zip(boxes, study.weights, strict=True))}
    gain = (study.tde - study.baseline) * (1 if study.shown else -1)
    return {"study": study, "gain": gain, "bars": bars, "thumbnail": thumbnail, "grid": grid}


def embed_figure(figure: Figure, *, text: str) -> Markup:
    """A figure as an image in HTML; `text` tells what it shows."""
    written = BytesIO()
    figure.savefig(written, format="png", dpi=_DPI)
    address, points = b64encode(written.getvalue()).decode("ascii"), figure.get_figwidth() * 72
    size = f"min-width:min({_SMALLEST * points:.0f}pt,28rem);max-width:{1.5 * points:.0f}pt"
    return Markup('<div class="plot"><div style="{}"><img src="data:image/png;base64,{}" alt="{}"></div></div>').format(
        size, address, text
    )


class Thumbnail(NamedTuple):
    """A small copy of an image: a `data:` address, and its pixels."""

    address: Markup
    width: int
    height: int


@dataclass
class Album:
    """Makes small copies of the images of a data set, until a number or a size is reached."""

    records: RecordSet | None  # the images, where it is known which they are
    count: int  # images that may still be copied
    room: int  # characters of addresses that there still is room for

    def copy(self, row: int) -> Thumbnail | None:
        """A small copy of an image; None where it cannot be read or has no room."""
        if self.records is None or self.count < 1:
            return None
        try:
            small = shrink_image(self.records, row, side=SIDE)
        except InputError:
            return None
        written = BytesIO()
        small.save(written, "JPEG", optimize=True)
        address = Markup("data:image/jpeg;base64,{}").format(b64encode(written.getvalue()).decode("ascii"))
        if len(address) > self.room:
            return None
        self.count -= 1
        self.room -= len(address)
        return Thumbnail(address, *small.size)
