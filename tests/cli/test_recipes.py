import json
import subprocess
import sys
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
    assert ["coco-tresnet_l-pat", "tresnet_l.miil_in1k_448", "linear", "88.7"] in rows
    assert max(map(len, lines)) <= 80


def test_machines_read_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == {recipe.name for recipe in list_recipes()}
    assert rows["coco-resnet101-asl"]["published_map"] is None
    assert rows["voc2007-tresnet_l-pat"] == {
        "name": "voc2007-tresnet_l-pat",
        "title": "VOC 2007, TResNet-L: PAT-T",
        "data": "voc:data/voc2007/VOCdevkit@2007-trainval",
        "backbone": "tresnet_l.miil_in1k_448",
        "head": "linear",
        "task": "patch",
        "published_map": 96.2,
        "source": 'table 2, row "PAT-T + TResL"',
    }


def test_one_recipe_is_printed_to_be_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in list_recipes():
        assert main(["recipes", recipe.name]) == 0
        out = capsys.readouterr().out
        assert out == recipe.path.read_text("utf-8")
        (tmp_path / "mine.toml").write_text(out)
        assert load_config(tmp_path / "mine.toml") == load_config(recipe.path)
    assert main(["recipes", "coco-resnet101-pat", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ema"]["decay"] == 0.9997  # the defaults too


def test_an_unknown_or_broken_recipe_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "coco-resnet101-pta"]) == 1
    assert "recipe 'coco-resnet101-pta': there is none of that name; did you mean 'coco-resnet101-pat'?" in (
        capsys.readouterr().err
    )
    broken = tmp_path / "mine.toml"
    broken.write_text("[train]\nepoch = 3\n")
    assert main(["recipes", str(broken)]) == 1
    assert f"{broken}: unknown key 'train.epoch'; did you mean 'epochs'?" in capsys.readouterr().err


def test_neither_help_nor_the_list_waits_for_torch() -> None:
    script = (
        "import sys; from pivotpatch.cli.main import main\n"
        "try: main(['recipes', '--help'])\n"
        "except SystemExit: print('HEAVY', [name for name in ('torch', 'rich', 'pydantic') if name in sys.modules])\n"
        "main(['recipes']); main(['recipes', 'coco-resnet101-pat', '--json'])\n"
        "print('torch' in sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert "HEAVY []\n" in out
    assert out.endswith("False\n")
