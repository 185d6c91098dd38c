import re
from html.parser import HTMLParser

import numpy as np
import torch
from made_scores import HOSTILE

from pivotpatch.app.examples import draw_examples
from pivotpatch.app.rendering import (
    ROWS,
    find_rows,
    render_error,
    render_examples,
    render_head,
    render_picture,
    render_summary,
    render_tags,
)
from pivotpatch.inference.prediction import Prediction


def predict(
    probs: list[float],
    image_probs: list[float],
    *,
    labels: tuple[str, ...] = ("cat", "cup", "dog", "car"),
    patched: bool = True,
) -> Prediction:
    weights = torch.tensor([0.1, 0.2, 0.6, 0.1])[:, None].expand(4, len(labels))
    return Prediction(
        picture=None,
        source=np.full((30, 40, 3), 99, np.uint8),
        size=(300, 400),
        labels=labels,
        probs=torch.tensor(probs),
        image_probs=torch.tensor(image_probs),
        patch_probs=torch.full((len(labels),), 0.25) if patched else None,
        weights=weights if patched else None,
        thresholds=torch.full((len(labels),), 0.5),
    )


class Read(HTMLParser):
    """Elements with their attributes, rows of text, and whether all that was opened was closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("img", "input"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def get(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


MIXED = predict([0.6, 0.9, 0.2, 0.1], [0.3, 0.8, 0.7, 0.4])


def test_rows_are_what_either_gives_and_say_where_they_differ() -> None:
    assert [tag.label for tag in find_rows(MIXED)] == ["cup", "cat", "dog"]
    head, *rows = Read(render_tags(MIXED)).rows
    assert head == ["Tag", "Both total direct effect", "Whole image baseline", "Patches alone"]
    assert rows == [
        ["cup", "0.90 ✓given", "0.80 ✓given", "0.25"],
        ["cat not by the baseline", "0.60 ✓given", "0.30", "0.25"],
        ["dog by the baseline only", "0.20", "0.70 ✓given", "0.25"],
    ]
    assert '<p class="summary">2 tags: cup, cat</p>' == render_summary(MIXED)


def test_buttons_know_the_pivot_patch_and_bars_their_lengths() -> None:
    page = Read(render_tags(MIXED))
    buttons = page.get("button")
    assert [button["data-label"] for button in buttons] == ["cup", "cat", "dog"]
    for button in buttons:
        assert button["data-box"] == "0 150 200 300"
        assert "row 2, column 1 of 2 x 2" in str(button["data-says"])
        assert "60 %" in str(button["data-says"])
        assert (button["type"], button["aria-pressed"]) == ("button", "false")
    bars = [str(span["style"]) for span in page.get("span") if span.get("class") == "bar"]
    assert bars[3:6] == [f"--value:{value};--threshold:0.5000" for value in ("0.6000", "0.3000", "0.2500")]


def test_where_nothing_is_given_the_most_probable_are_shown() -> None:
    quiet = predict([0.4, 0.3, 0.2, 0.1], [0.1] * 4)
    page = render_tags(quiet)
    assert "No label is above its threshold; these are the most probable." in page
    assert [row[0] for row in Read(page).rows[1:]] == ["cat", "cup", "dog", "car"]
    assert "No tag" in render_summary(quiet)


def test_a_network_without_patches_has_one_column_and_no_buttons() -> None:
    # Its probability to decide with may be calibrated; the raw one does not decide anything.
    page = Read(render_tags(predict([0.6, 0.9, 0.2, 0.1], [0.9] * 4, patched=False)))
    assert page.rows == [["Tag", "Probability whole image"], ["cup", "0.90 ✓given"], ["cat", "0.60 ✓given"]]
    assert page.get("button") == []
    assert "whole image only" in render_picture(predict([0.6] * 4, [0.6] * 4, patched=False), name="a")
    assert "patches of it" not in render_head("net", 4, patched=False)


def test_a_long_list_is_cut_and_says_so() -> None:
    count = ROWS + 7
    many = predict([0.9] * count, [0.9] * count, labels=tuple(f"label {place}" for place in range(count)))
    page = render_tags(many)
    assert len(Read(page).rows) == ROWS + 1
    assert "and 7 more labels" in page
    assert f"{count} tags" in render_summary(many)


def test_hostile_names_stay_text() -> None:
    hostile = (*HOSTILE, "${alert(1)}", "{{#each}}")
    prediction = predict([0.9] * len(hostile), [0.1] * len(hostile), labels=hostile)
    for name in hostile:
        pages = [render_tags(prediction), render_summary(prediction), render_picture(prediction, name=name)]
        pages += [render_error(name), render_head(name, 2, patched=True)]
        for page in pages:
            assert not re.search(r"[{$]", page)  # what a template would take for its own
            assert {tag for tag, _ in Read(page).found}.isdisjoint({"script", "iframe", "svg", "style", "b"})
            page.encode("utf-8")
    names = [row[0].removesuffix(" not by the baseline") for row in Read(render_tags(prediction)).rows[1:]]
    assert names == [name.encode("utf-8", "replace").decode("utf-8") for name in hostile]


def test_pictures_have_words_and_examples_are_buttons() -> None:
    figure = Read(render_picture(MIXED, name="a cat.jpg"))
    assert figure.get("img")[0]["alt"] == "a cat.jpg, 400 x 300 pixels"
    assert figure.get("figure")[0]["data-size"] == "400 300"
    page = Read(render_examples(draw_examples(("cat",))))
    assert [button["data-place"] for button in page.get("button")] == ["0", "1", "2"]
    assert all(str(image["src"]).startswith("data:image/") for image in page.get("img"))
