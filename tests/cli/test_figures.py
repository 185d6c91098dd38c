"""Figures as files: signs that fonts lack, and pictures in their own shape."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from PIL import Image

from pivotpatch.cli.figures import decode_small, write_figures
from pivotpatch.data.address import open_records

DOG, HOOK = "犬", "\u1d81"  # the second is in a font that matplotlib brings along, but not in its usual one


def draw(text: str) -> Figure:
    figure = Figure()
    figure.subplots().set_xticks([0.5], [text])
    return figure


def have_fonts(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(fontManager, "ttflist", [font for font in fontManager.ttflist if font.name in names])


def test_signs_that_no_font_has_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_fonts(monkeypatch, "DejaVu Sans", "Last Resort High-Efficiency")
    write_figures({"a": draw(f"dog {DOG}"), "b": draw(DOG)}, tmp_path)
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == [f"drew {tmp_path / name}" for name in ("a.png", "b.png")]
    assert len(told) == 3
    assert f"no font on this machine has 1 of the signs ({DOG})" in told[2]


def test_another_font_has_what_the_usual_one_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_fonts(monkeypatch, "DejaVu Sans", "STIXGeneral")
    figure, plain = draw(f"dog {HOOK}"), draw("dog")
    write_figures({"a": figure, "b": plain}, tmp_path)
    assert "no font" not in capsys.readouterr().err
    (sign,), (word,) = (one.axes[0].get_xticklabels() for one in (figure, plain))
    assert sign.get_fontfamily() == ["sans-serif", "STIXGeneral"]
    assert word.get_fontfamily() == ["sans-serif"]


def test_nothing_to_draw_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_figures({}, tmp_path / "new")
    assert "there is nothing to show" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_pictures_keep_their_shape(tmp_path: Path) -> None:
    sizes = {"a": (1000, 500), "b": (30, 60), "c": (3000, 2)}
    for name, size in sizes.items():
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    (tmp_path / "t.csv").write_text("image,labels\n" + "".join(f"{name}.png,x\n" for name in sizes))
    found = decode_small(open_records(f"table:{tmp_path / 't.csv'}"), [2, 0, 1])
    assert [image.shape for image in found] == [(16, 448, 3), (224, 448, 3), (448, 224, 3)]
    assert all((image == np.array([255, 0, 0])).all() for image in found)
