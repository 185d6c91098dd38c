"""Tags beside photos: what is written and left alone, what it is called, and what could not be read."""

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from verb import read_refusal

from pivotpatch.cli.main import main
from pivotpatch.runtime.predictor import TAGGER, Predictor

PAGE = Path(__file__).parents[2] / "src" / "pivotpatch" / "app" / "page"
NAMES = ("cat.jpg", "coffee.jpg", "trip/astronaut.jpg")
SUBJECT = "{http://purl.org/dc/elements/1.1/}subject"
LIST_ITEM = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li"
Errors = pytest.CaptureFixture[str]


@pytest.fixture
def photos(here: Path) -> Path:
    """Three photos, one of them in a folder of its own."""
    folder = here / "photos"
    (folder / "trip").mkdir(parents=True)
    for name in NAMES:
        shutil.copy(PAGE / Path(name).name, folder / name)
    return folder


@pytest.fixture(scope="module")
def known() -> dict[str, list[tuple[str, float]]]:
    """The tags of each photo, by the name of its file."""
    predictor = Predictor.load(device="cpu")
    return {name: [(tag.label, tag.prob) for tag in predictor(PAGE / Path(name).name).tags] for name in NAMES}


def predict(capsys: Errors, *words: str, status: int = 0) -> tuple[list[str], list[str]]:
    """What is printed, and what is told."""
    capsys.readouterr()
    assert main(["predict", "--device", "cpu", *words]) == status
    said = capsys.readouterr()
    return said.out.splitlines(), said.err.splitlines()


def read_subjects(path: Path) -> list[str | None]:
    (subject,) = ET.parse(path).iter(SUBJECT)
    return [item.text for item in subject.iter(LIST_ITEM)]


def take_state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """When each file changed for the last time, and what is in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_tags_lie_beside_each_photo_and_a_second_run_changes_nothing(
    photos: Path, capsys: Errors, known: dict[str, list[tuple[str, float]]]
) -> None:
    before = take_state(photos)
    words = "photos", "--write", "xmp,txt", "--write", "json"
    printed, told = predict(capsys, *words)
    assert told == ["wrote 9 sidecars, 0 unchanged, 0 could not be read"]
    for name, tags in known.items():
        labels = [label for label, _ in tags]
        assert f"photos/{name}: {', '.join(labels)}" in printed
        assert read_subjects(photos / f"{name}.xmp") == labels
        assert (photos / name).with_suffix(".txt").read_text("utf-8") == f"{', '.join(labels)}\n"
        written = json.loads((photos / f"{name}.json").read_text("utf-8"))
        assert written == {
            "image": Path(name).name,
            "tags": [{"label": label, "prob": pytest.approx(prob, abs=1e-4)} for label, prob in tags],
        }
    after = take_state(photos)
    assert {name: after[name] for name in before} == before, "photos are never touched"
    assert predict(capsys, *words)[1] == ["wrote 0 sidecars, 9 unchanged, 0 could not be read"]
    assert take_state(photos) == after


def test_photos_that_were_tagged_can_be_skipped(photos: Path, capsys: Errors) -> None:
    predict(capsys, "photos/trip", "--write", "xmp,json")
    (photos / "trip" / "astronaut.jpg.json").unlink()  # not in every kind any more
    predict(capsys, "photos/cat.jpg", "--write", "xmp,json")
    printed, _ = predict(capsys, "photos", "--write", "xmp,json", "--skip-tagged", "--json")
    expected = {"pictures": 3, "written": 3, "unchanged": 1, "refused": 0, "skipped": 1, "failed": 0, "unread": {}}
    assert json.loads(printed[0]) == expected
    told = predict(capsys, "photos", "--write", "json", "--skip-tagged")[1]
    assert told == ["wrote 0 sidecars, 0 unchanged, 3 images tagged before, 0 could not be read"]


def test_what_cannot_be_read_or_written_is_told_and_does_not_end_the_work(photos: Path, capsys: Errors) -> None:
    (photos / "bad.jpg").write_bytes(b"no image")
    (photos / "raw.nef").touch()
    (photos / "coffee.txt").write_text("my own words\n", "utf-8")
    shutil.copy(photos / "coffee.jpg", photos / "cat.jpeg")  # with cat.jpg it would share a caption
    *told, counts, unread = predict(capsys, "photos", "--write", "txt")[1]
    assert [line.partition(";")[0] for line in told] == [
        "not read: photos/bad.jpg: is in none of the known formats",
        "not written: photos/cat.txt: is the caption of cat.jpeg and cannot be that of cat.jpg too",
        "not written: photos/coffee.txt: is there already and says something else",
    ]
    assert counts == "wrote 2 sidecars, 0 unchanged, 2 not written, 1 could not be read"
    assert unread == "1 raw file was not read; export it as JPEG first"
    assert (photos / "coffee.txt").read_text("utf-8") == "my own words\n"
    counts = predict(capsys, "photos", "--write", "txt", "--overwrite")[1][-2]
    assert counts == "wrote 1 sidecar, 2 unchanged, 1 not written, 1 could not be read"
    assert (photos / "coffee.txt").read_text("utf-8").startswith("cup, ")
    (photos / "coffee.txt").write_text("my own words\n", "utf-8")
    for words, wrong in (
        (("photos", "--on-error", "error"), "photos/bad.jpg: is in none of the known formats"),
        (("photos/bad.jpg",), "photos/bad.jpg: is in none of the known formats"),
        (("photos/coffee.jpg", "--on-error", "error"), "photos/coffee.txt: is there already and says something else"),
    ):
        assert predict(capsys, *words, "--write", "txt", status=1)[1][-1].startswith(f"pivotpatch: {wrong}")


RULES = """
language = "de"
deny = ["person"]
rename = { cat = "Tiere|Katze" }
always = ["Urlaub"]
"""


def test_rules_for_tags_hold_wherever_tags_go(
    photos: Path, here: Path, capsys: Errors, known: dict[str, list[tuple[str, float]]]
) -> None:
    Path("tags.toml").write_text(RULES, "utf-8")
    rules = "--tags", "tags.toml"
    table = "\n".join(predict(capsys, "photos/cat.jpg", "photos/trip", *rules, "--threshold", "0.1")[0])
    assert "Tiere|Katze" in table
    assert "Flasche" in table
    assert "person" not in table.lower()
    assert table.count("Urlaub") == 2
    Path("none.toml").write_text("allow = []", "utf-8")
    assert "no tag; --tags lets none through" in predict(capsys, "photos/cat.jpg", "--tags", "none.toml")[0][1]

    lines = [json.loads(line) for line in predict(capsys, "photos", *rules, "--json")[0]]
    listed = {line["picture"]: line["tags"] for line in lines}
    cat, holiday = listed["photos/cat.jpg"]
    assert (cat["label"], cat["prob"]) == ("Tiere|Katze", pytest.approx(known["cat.jpg"][0][1], abs=1e-4))
    assert cat["box"] is not None
    assert (holiday["label"], holiday["prob"], holiday["box"]) == ("Urlaub", 1.0, None)

    predict(capsys, "photos", *rules, "--write", "xmp,txt")
    assert read_subjects(photos / "cat.jpg.xmp") == ["Katze", "Urlaub"]
    assert (photos / "cat.txt").read_text("utf-8") == "Katze, Urlaub\n"
    assert not predict(capsys, "photos/cat.jpg", "--write", "xmp")[1][0].startswith("wrote 0")
    assert read_subjects(photos / "cat.jpg.xmp") == ["cat"], "another run takes out what the first has added"

    summary = json.loads(predict(capsys, "photos", *rules, "--out", "tags.jsonl", "--json")[0][0])
    assert summary["settings"]["tags"]["rename"]["cat"] == "Tiere|Katze"
    assert summary["settings"]["tags"]["rename"]["dog"] == "Hund"
    rows = {row["picture"]: row["labels"] for row in map(json.loads, Path("tags.jsonl").read_text().splitlines())}
    assert rows == {name: [tag["label"] for tag in tags] for name, tags in listed.items()}
    refused = read_refusal(capsys, "predict", "photos", *rules, "--out", "tags.csv")
    assert refused.startswith("tags.csv: the label 'Tiere|Katze' holds '|'")


def test_a_gpu_that_only_torch_has_is_not_asked_for_an_exported_file(
    photos: Path, capsys: Errors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    assert main(["predict", "photos", "--model", str(TAGGER), "--effort", "0", "--out", "tags.csv"]) == 0
    assert capsys.readouterr().err.endswith("wrote tags.csv, 3 images\n")
