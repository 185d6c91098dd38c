"""Fonts for texts in any script: labels are in the language of whoever made the data."""

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.text import Text

_PLACEHOLDERS = "Last Resort"  # begins the name of a font that has a box for every sign
_BOX = "\N{WHITE SQUARE}"  # in the usual font


def choose_fonts(figure: Figure) -> set[str]:
    """Let texts fall back on installed fonts that have the signs which the usual one lacks; those that none has."""
    texts = figure.findobj(Text)
    signs = {sign for text in texts for sign in text.get_text() if sign.isprintable()}
    usual = get_font(findfont(FontProperties())).get_charmap()
    lacking = {sign for sign in signs if ord(sign) not in usual}
    families = []
    for font in fontManager.ttflist:
        if not lacking:
            break
        if font.name.startswith(_PLACEHOLDERS):
            continue
        held = get_font(font.fname).get_charmap()
        had = {sign for sign in lacking if ord(sign) in held}
        if had:
            families.append(font.name)
            lacking -= had
    if families:
        for text in texts:
            text.set_fontfamily([*text.get_fontfamily(), *families])
    return lacking


def settle_fonts(figure: Figure) -> None:
    """Choose fonts, and write boxes for signs that none has: so they are drawn anyway, with a warning for each."""
    boxes = dict.fromkeys(map(ord, choose_fonts(figure)), _BOX)
    if not boxes:
        return
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        names = [text.get_text() for text in axis.get_ticklabels()]
        if any(name != name.translate(boxes) for name in names):  # an axis writes these anew whenever it is drawn
            axis.set_ticklabels([name.translate(boxes) for name in names])
    for text in figure.findobj(Text):
        text.set_text(text.get_text().translate(boxes))
