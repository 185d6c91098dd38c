import shlex
import signal
import threading
import time
from _thread import interrupt_main
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
from file_server import FileServer
from made_archives import serve_voc
from made_records import noise

from pivotpatch.cli.main import main
from pivotpatch.data.address import READERS, open_records
from pivotpatch.data.prepare import PLANS


@pytest.fixture
def photos(tmp_path: Path) -> str:
    """A table of 60 images, two of them equal, with a name that looks like markup."""
    rows = ["image,labels,split"]
    (tmp_path / "pictures").mkdir()
    for i in range(60):
        (tmp_path / "pictures" / f"{i:02}.png").write_bytes(noise(i % 59, kind="PNG"))
        labels = ["[bold]cat[/bold]"] * (i % 2 == 0) + ["dog"] * (i % 3 == 0) + ["emu"] * (i % 20 == 0)
        rows.append(f"pictures/{i:02}.png,{'|'.join(labels)},{'train' if i < 50 else 'test'}")
    (tmp_path / "photos.csv").write_text("\n".join(rows))
    return f"table:{tmp_path / 'photos.csv'}"


def test_check_compares_data_sets_and_names_are_no_markup(photos: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", f"{photos}@train", f"{photos}@test"]) == 0
    out = capsys.readouterr().out
    assert next(line.split()[:3] for line in out.splitlines() if "cat" in line) == ["[bold]cat[/bold]", "25", "50.0%"]
    assert "pictures/00.png in " in out[out.index("between the data sets") :]
    assert "in more than one data set: 1" in out


def test_missing_or_broken_images_are_one_line(photos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pictures" / "03.png").unlink()
    (tmp_path / "pictures" / "04.png").write_bytes(b"no image")
    assert main(["data", "check", photos]) == 1
    out, err = capsys.readouterr()
    assert "    pictures/04.png: is in none of the known formats" in out
    last = err.splitlines()[-1]
    assert "of 60 images, 1 missing (such as pictures/03.png) and 1 broken (such as pictures/04.png); restore" in last
    assert last.startswith("pivotpatch: table:")
    assert main(["data", "check", "--fast", photos]) == 0


def test_check_draws(photos: str, tmp_path: Path) -> None:
    two = [f"{photos}@train", f"{photos}@test", "--plot", str(tmp_path / "two.svg")]
    assert main(["data", "check", "--fast", *two]) == 0
    assert sorted(path.name for path in tmp_path.glob("two*")) == ["two-1.svg", "two-2.svg"]


def test_split_writes_parts_that_open_again(photos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "split", photos, "--parts", "train=0.8", "rest=0.2", "--seed", "3"]
    assert main([*arguments, "--out", str(tmp_path / "a")]) == 0
    lines = capsys.readouterr().out.splitlines()
    addresses = [shlex.split(line)[0] for line in lines]
    assert [line.split("  ")[1] for line in lines] == ["48 images, 3 of 3 labels", "12 images, 3 of 3 labels"]
    parts = [open_records(address) for address in addresses]
    names = {record.image for records in parts for record in records}
    assert names == {record.image for record in open_records(photos)}
    assert main([*arguments, "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / "split.parquet").read_bytes() == (tmp_path / "b" / "split.parquet").read_bytes()


def test_interrupted_prepare_is_status_130_and_goes_on_next_time(
    file_server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLANS, "voc2007", serve_voc(file_server, "http://far.invalid"))
    command = ["data", "prepare", "voc2007", "--root", str(tmp_path), "--base-url", file_server.url]  # a mirror
    served, part = file_server.files["test.tar"], tmp_path / "downloads" / "test.tar.part"
    served.pause = 0.1

    def interrupt() -> None:
        while not part.exists() or part.stat().st_size == 0:
            time.sleep(0.01)
        interrupt_main()

    threading.Thread(target=interrupt).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    try:
        assert main(command) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.endswith("pivotpatch: interrupted\n")
    kept = part.stat().st_size
    assert 0 < kept < len(served.content)
    served.pause = 0.0
    file_server.asked.clear()
    assert main(command) == 0
    assert file_server.asked == [f"bytes={kept}-"]


DOCUMENTATION = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", READERS)
def test_documentation_has_every_option_and_its_default(scheme: str) -> None:
    section = DOCUMENTATION.partition(f"### `{scheme}:`")[2].partition("\n##")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in section.splitlines() if line.startswith("| `")]
    documented = {row[1].strip("`"): row[2] for row in rows}
    module, _, function = READERS[scheme].partition(":")
    for parameter in signature(getattr(import_module(module), function)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            missing = f"docs/data.md, section `{scheme}:`, does not say what `{parameter.name}` means"
            assert f"`{parameter.name}`" in section, missing
            default = f"`{str(parameter.default).removesuffix('.0').lower()}`"
            assert parameter.default is None or documented.get(parameter.name, default) == default
