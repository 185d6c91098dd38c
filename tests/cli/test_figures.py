"""Figures as files, and pictures in their own shape."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pivotpatch.cli.figures import decode_small, write_figures
from pivotpatch.data.address import open_records


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
