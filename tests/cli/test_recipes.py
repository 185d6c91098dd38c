from pathlib import Path

import pytest

from pivotpatch.cli.main import main
from pivotpatch.training import list_recipes, load_config


def test_all_recipes_are_listed_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[1:]]
    assert [row[0] for row in rows] == [recipe.name for recipe in list_recipes()]
    assert [row[-1] for row in rows] == [f"{r.published:.1f}" if r.published else "-" for r in list_recipes()]
    assert max(map(len, lines)) <= 80


def test_one_recipe_is_printed_to_be_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in list_recipes():
        assert main(["recipes", recipe.name]) == 0
        (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
        assert load_config(tmp_path / "mine.toml") == load_config(recipe.path)


def test_an_unknown_or_broken_recipe_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "coco-resnet101-pta"]) == 1
    assert "there is none of that name; did you mean 'coco-resnet101-pat'?" in capsys.readouterr().err
    broken = tmp_path / "mine.toml"
    broken.write_text("[train]\nepoch = 3\n")
    assert main(["recipes", str(broken)]) == 1
    assert f"{broken}: unknown key 'train.epoch'; did you mean 'epochs'?" in capsys.readouterr().err
