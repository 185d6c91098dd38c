"""What the page shows, as HTML that the eye, the keyboard and the ear can use."""

from base64 import b64encode
from collections.abc import Sequence
from io import BytesIO

from markupsafe import Markup
from PIL import Image

from pivotpatch.app.examples import Example, encode
from pivotpatch.inference.prediction import Prediction, Tag

ROWS = 60
"""Most labels in a table."""
_PROBABLE = 5  # labels that are shown where none is given
_THUMBNAIL = (96, 96)

_HEAD = Markup("<h1>Tags, and what speaks for them</h1><p>The network {} knows {} labels. {}</p>")
_PATCHED_WAY = (
    "It looks at the whole image and at patches of it; a label counts where both together say so, so that the company "
    "which objects keep counts for less."
)
_PLAIN_WAY = "It looks at the whole image only."
_DROP = Markup(
    '<div class="drop"><label for="file">Drop a picture here, or choose one ({:.0f} MB at most)</label>'
    '<input id="file" type="file" accept="image/*" data-limit="{}"></div>'
)
_FIGURE = Markup(
    '<figure class="seen" data-size="{size}">'
    '<div class="frame"><img src="{address}" alt="{text}"><div class="spot" hidden></div></div>'
    '<figcaption role="status" data-usual="{usual}">{usual}</figcaption></figure>'
)
_TABLE = Markup(
    '<table class="tags"><caption>{caption}</caption><thead><tr><th scope="col">Tag</th>{heads}</tr></thead>'
    "<tbody>{rows}</tbody></table>{rest}"
)
_COLUMN = Markup('<th scope="col">{} <small>{}</small></th>')
_PATCHED = (("Both", "total direct effect"), ("Whole image", "baseline"), ("Patches", "alone"))
_PLAIN = (("Probability", "whole image"),)
_ROW = Markup('<tr class="{kind}"><th scope="row">{name}{note}</th>{cells}</tr>')
_BUTTON = Markup(
    '<button type="button" class="tag" aria-pressed="false" data-label="{label}" data-box="{box}" data-says="{says}">'
    "{label}</button>"
)
_NOTE = Markup(' <small class="note">{}</small>')
_CELL = Markup(
    '<td class="{kind}"><span class="value">{value:.2f}</span>{given}<span class="bar" aria-hidden="true" '
    'style="--value:{value:.4f};--threshold:{threshold:.4f}"></span></td>'
)
_GIVEN = Markup(' <span class="given"><span aria-hidden="true">✓</span><span class="unseen">given</span></span>')
_EXAMPLES = Markup("<h2>Examples</h2><ul>{}</ul>")
_EXAMPLE = Markup('<li><button type="button" data-place="{}"><img src="{}" alt="">{}</button></li>')
_MESSAGE = Markup('<p class="{kind}">{text}</p>')


def render_head(name: str, count: int, *, patched: bool) -> str:
    """What the page is for, with the network's name and how many labels it knows."""
    return _plain(_HEAD.format(name, count, _PATCHED_WAY if patched else _PLAIN_WAY))


def render_drop(limit: int) -> str:
    """The place for a file of so many bytes at most."""
    return _plain(_DROP.format(limit / 1e6, limit))


def render_picture(prediction: Prediction, *, name: str) -> str:
    """The picture, with a spot that lights up one of its patches."""
    rows, columns = prediction.size
    usual = "Choose a tag to see the patch that speaks most for it."
    if prediction.weights is None:
        usual = "This network looks at the whole image only."
    text = f"{name}, {columns} x {rows} pixels"
    return _plain(
        _FIGURE.format(
            address=_encode(Image.fromarray(prediction.image)), text=text, size=f"{columns} {rows}", usual=usual
        )
    )


def render_tags(prediction: Prediction) -> str:
    """The table of the labels that the network gives with patches, or would give without them."""
    tags = find_rows(prediction)
    caption = "Labels that are given, the most probable first. A line marks the threshold."
    if not tags:
        tags, caption = prediction.top(_PROBABLE), "No label is above its threshold; these are the most probable."
    patched = prediction.weights is not None
    heads = Markup("").join(_COLUMN.format(*head) for head in (_PATCHED if patched else _PLAIN))
    rows = Markup("").join(_render_row(tag) for tag in tags[:ROWS])
    more = len(tags) - ROWS
    rest = _MESSAGE.format(kind="rest", text=f"and {more} more labels") if more > 0 else ""
    return _plain(_TABLE.format(caption=caption, heads=heads, rows=rows, rest=rest))


def find_rows(prediction: Prediction) -> tuple[Tag, ...]:
    """The labels that are given with patches or by the whole image alone, the most probable first."""
    every = prediction.top(len(prediction.labels))
    return tuple(tag for tag in every if max(tag.prob, _baseline(tag)) > tag.threshold)


def render_summary(prediction: Prediction) -> str:
    """One line on what is in the picture."""
    names = [tag.label for tag in prediction.tags]
    count = f"{len(names)} tag{'' if len(names) == 1 else 's'}"
    text = f"{count}: {', '.join(names[:ROWS])}" if names else "No tag: no label is above its threshold."
    return _plain(_MESSAGE.format(kind="summary", text=text))


def render_error(text: str) -> str:
    """A message about what cannot be shown."""
    return _plain(_MESSAGE.format(kind="wrong", text=text))


def render_examples(examples: Sequence[Example]) -> str:
    """Buttons with small copies of the examples."""
    items = (
        _EXAMPLE.format(place, _encode(Image.open(BytesIO(example.content)).resize(_THUMBNAIL)), example.name)
        for place, example in enumerate(examples)
    )
    return _plain(_EXAMPLES.format(Markup("").join(items)))


def _baseline(tag: Tag) -> float:
    """What decides without patches: calibrated as the rest where there are none."""
    return tag.prob if tag.patch_prob is None else tag.image_prob


def _render_row(tag: Tag) -> Markup:
    given, baseline = tag.prob > tag.threshold, _baseline(tag) > tag.threshold
    values = [(tag.prob, given)]
    name, note, kind = Markup("{}").format(tag.label), Markup(""), "given" if given else "lost"
    if tag.patch_prob is not None:
        values += [(tag.image_prob, baseline), (tag.patch_prob, False)]
        name = _render_button(tag)
    if given != baseline:
        note = _NOTE.format("not by the baseline" if given else "by the baseline only")
    cells = (
        _CELL.format(kind=column, value=value, threshold=tag.threshold, given=_GIVEN if above else "")
        for column, (value, above) in zip(("both", "image", "patches"), values, strict=False)
    )
    return _ROW.format(kind=kind, name=name, note=note, cells=Markup("").join(cells))


def _render_button(tag: Tag) -> Markup:
    assert tag.weights is not None
    place, grid = tag.weights.index(max(tag.weights)), round(len(tag.weights) ** 0.5)
    says = (
        f"{tag.label}: the patch in row {place // grid + 1}, column {place % grid + 1} of {grid} x {grid} speaks most "
        f"for it, with {100 * tag.weights[place]:.0f} % of the weight."
    )
    return _BUTTON.format(label=tag.label, box=" ".join(map(str, tag.box or ())), says=says)


def _encode(picture: Image.Image) -> str:
    """A picture as an address that holds it."""
    return f"data:image/webp;base64,{b64encode(encode(picture)).decode('ascii')}"


def _plain(page: Markup) -> str:
    """HTML in which no template language finds anything of its own, nor JSON a sign that it cannot carry."""
    return str(page).replace("{", "&#123;").replace("$", "&#36;").encode("utf-8", "replace").decode("utf-8")
