"""Tags beside photos: what is written and left alone, what it is called, and what could not be read."""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from verb import read_refusal

from pivotpatch.cli.main import main
from pivotpatch.runtime import files
from pivotpatch.runtime.predictor import TAGGER, Predictor

PAGE = Path(__file__).parents[2] / "src" / "pivotpatch" / "app" / "page"
NAMES = ("cat.jpg", "coffee.jpg", "trip/astronaut.jpg")
SUBJECT = "{http://purl.org/dc/elements/1.1/}subject"
LIST_ITEM = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li"
SLOW_TO_IMPORT = {"numpy", "PIL", "rich", "onnxruntime"}
NOT_IN_BASE = {"torch", "torchvision", "timm", "pydantic", "pyarrow", "matplotlib", "sklearn", "jinja2", "accelerate"}
# A process in which nothing but the base install can be imported; it says at its end what it has imported.
BASE = f"""
import atexit, sys
for name in {sorted(NOT_IN_BASE)}:
    sys.modules[name] = None
atexit.register(lambda: print("modules:", *(name for name in sys.modules if sys.modules[name]), file=sys.stderr))
from pivotpatch.cli.main import main
sys.exit(main())
"""
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


def test_an_image_that_cannot_be_read_does_not_end_the_work(photos: Path, capsys: Errors) -> None:
    (photos / "bad.jpg").write_bytes(b"no image")
    told = predict(capsys, "photos", "--write", "json")[1]
    assert told[0].startswith("not read: photos/bad.jpg: is in none of the known formats")
    assert told[1:] == ["wrote 3 sidecars, 0 unchanged, 1 could not be read"]
    for words in (("photos", "--on-error", "error"), ("photos/bad.jpg",)):
        told = predict(capsys, *words, "--write", "txt", status=1)[1]
        assert told[-1].startswith("pivotpatch: photos/bad.jpg: is in none of the known formats")


def test_a_caption_of_another_hand_stays_unless_it_is_to_be_overwritten(photos: Path, capsys: Errors) -> None:
    caption = photos / "cat.txt"
    caption.write_text("my cat\n", "utf-8")
    told = predict(capsys, "photos", "--write", "txt")[1]
    assert told[0].startswith("not written: photos/cat.txt: is there already and says something else")
    assert told[1] == "wrote 2 sidecars, 0 unchanged, 1 not written, 0 could not be read"
    assert caption.read_text("utf-8") == "my cat\n"
    assert "says something else" in read_refusal(capsys, "predict", "photos", "--write", "txt", "--on-error", "error")
    assert predict(capsys, "photos", "--write", "txt", "--overwrite")[1][0].startswith("wrote 1 sidecar, 2 unchanged")
    assert caption.read_text("utf-8") == "cat\n"


def test_two_images_do_not_share_a_caption(photos: Path, capsys: Errors) -> None:
    shutil.copy(photos / "coffee.jpg", photos / "cat.jpeg")
    words = "photos", "--write", "txt", "--overwrite"
    for wrote in ("wrote 3 sidecars, 0 unchanged", "wrote 0 sidecars, 3 unchanged"):
        told = predict(capsys, *words)[1]
        assert told[0].startswith(
            "not written: photos/cat.txt: is the caption of cat.jpeg and cannot be that of cat.jpg"
        )
        assert told[1] == f"{wrote}, 1 not written, 0 could not be read"


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
    table = "\n".join(predict(capsys, "photos/cat.jpg", "photos/trip", *rules)[0])
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


def test_bulk_work_does_not_go_on_with_other_rules(photos: Path, capsys: Errors) -> None:
    Path("tags.toml").write_text('always = ["Urlaub"]', "utf-8")
    words = "predict", "photos", "--out", "tags.csv", "--tags", "tags.toml"
    assert main([*words]) == 0
    with Path("tags.csv").open(encoding="utf-8") as file:
        assert [row["labels"].endswith("Urlaub") for row in csv.DictReader(file)] == [True] * 3
    settings = json.loads(Path("tags.csv.summary.json").read_text("utf-8"))["settings"]
    Path("tags.csv").unlink()
    Path("tags.csv.parts").mkdir()
    Path("tags.csv.parts/settings.json").write_text(json.dumps(settings), "utf-8")
    Path("tags.toml").write_text('always = ["Ferien"]', "utf-8")
    assert read_refusal(capsys, *words).startswith("tags.csv.parts: it was begun with other tags (")


@pytest.fixture
def without_heif(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the extra that reads HEIC were not installed."""
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    for known in (files.image_suffixes, files.unread_suffixes):
        known.cache_clear()
    yield
    for known in (files.image_suffixes, files.unread_suffixes):
        known.cache_clear()


@pytest.mark.usefixtures("without_heif")
def test_what_cannot_be_read_is_counted_and_named(photos: Path, capsys: Errors) -> None:
    for name in ("a.HEIC", "trip/b.heic", "c.nef", "d.ARW", "trip/e.dng", "f.mov", "notes.pdf", ".hidden.heic"):
        (photos / name).write_bytes(b"")
    expected = [
        "2 HEIC files were not read; pip install ",
        "3 raw files were not read; export them as JPEG first",
        "1 video was not read; only images get tags",
    ]
    for words in (("--json",), ("--write", "xmp"), ("--out", "tags.csv", "--json")):
        told = predict(capsys, "photos", *words)[1]
        assert [line[: len(start)] for line, start in zip(told[-3:], expected, strict=True)] == expected, words
    unread = {".heic": 2, ".nef": 1, ".arw": 1, ".dng": 1, ".mov": 1}
    assert json.loads(Path("tags.csv.summary.json").read_text("utf-8"))["unread"] == unread
    told = predict(capsys, "photos/*", "--write", "xmp")[1]
    assert told[-3].startswith("1 HEIC file was not read; ")
    refused = read_refusal(capsys, "predict", "photos/*.heic", "photos/*.HEIC")
    assert refused.startswith("photos/*.heic: there is no image in it; known kinds: ")
    refused = read_refusal(capsys, "predict", "photos/*.HEIC")
    assert refused.startswith("photos/*.HEIC: there is no image in it that can be read; 1 HEIC file was not read; pip")


def test_heic_files_are_images_where_the_extra_is_installed(photos: Path, here: Path) -> None:
    """The file is a JPEG by another name: which decoder reads it is told by its content."""
    (here / "extra").mkdir()
    (here / "extra" / "pillow_heif.py").write_text("def register_heif_opener():\n    raise AssertionError\n")
    (photos / "cat.jpg").rename(photos / "cat.HEIC")
    code = f"import sys\nsys.path.insert(0, {str(here / 'extra')!r})\n{BASE}"
    command = [sys.executable, "-c", code, "predict", "photos", "--json", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(json.loads(line)["picture"] for line in done.stdout.splitlines()) == [
        "photos/cat.HEIC",
        "photos/coffee.jpg",
        "photos/trip/astronaut.jpg",
    ]
    assert "HEIC file" not in done.stderr


def test_a_gpu_that_only_torch_has_is_not_asked_for_an_exported_file(
    photos: Path, capsys: Errors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    assert main(["predict", "photos", "--model", str(TAGGER), "--effort", "0", "--out", "tags.csv"]) == 0
    assert capsys.readouterr().err.endswith("wrote tags.csv, 3 images\n")


def test_many_images_have_a_word_of_progress(photos: Path, capsys: Errors) -> None:
    for number in range(9):
        shutil.copy(photos / "cat.jpg", photos / f"{number}.jpg")
    printed, told = predict(capsys, "photos", "--write", "json", "--effort", "0", "--batch-size", "5")
    assert printed == []
    assert told[0].startswith("tag: 1 of 12")
    assert told[-2].startswith("tag: 12 of 12, ")
    assert told[-1] == "wrote 12 sidecars, 0 unchanged, 0 could not be read"


def test_mistakes_are_told_before_anything_is_loaded(photos: Path, capsys: Errors) -> None:
    Path("odd.toml").write_text('deny = ["kat"]', "utf-8")
    for words, message in (
        (("--write", "xmp", "--out", "tags.csv"), "--write: tags go beside the images, not to --out"),
        (("--write", "xmp", "--explain", "x"), "--write: tags go beside the images, not to --explain"),
        (("--skip-tagged",), "--skip-tagged: it is an option of --write"),
        (("--overwrite",), "--overwrite: it is an option of --out and --write"),
        (("--write", "xmp", "--tags", "none.toml"), "none.toml: there is no such file"),
        (("--write", "xmp", "--tags", "odd.toml"), "odd.toml: deny: unknown label 'kat'; did you mean 'cat'?"),
        (("--effort", "2"), "--effort: effort is 2.0"),
        (("--model", "none.onnx"), "none.onnx: there is no such file"),
    ):
        assert read_refusal(capsys, "predict", "photos", *words).startswith(message)
    with pytest.raises(SystemExit) as left:
        main(["predict", "photos", "--write", "xmp,iptc"])
    assert left.value.code == 2
    assert "invalid choice: 'iptc' (choose from xmp, txt, json)" in capsys.readouterr().err


def run_base(*words: str, status: int) -> tuple[str, set[str]]:
    """What a command prints where only the base is installed, and the modules that it has imported."""
    done = subprocess.run([sys.executable, "-c", BASE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    told = done.stderr.splitlines()[-1].removeprefix("modules: ")
    return done.stdout, {name.partition(".")[0] for name in told.split()}


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("predict", "none.jpg"), 1),
        (("predict", "photos", "--nothing"), 2),
        (("predict", "photos", "--threshold", "2"), 1),
        (("predict", "photos", "--effort", "2"), 1),
        (("predict", "photos", "--model", "none"), 1),
        (("predict", "photos", "--write", "iptc"), 2),
        (("watch", "none"), 1),
    ],
)
def test_a_mistake_is_answered_before_anything_slow_is_imported(
    words: tuple[str, ...], status: int, photos: Path
) -> None:
    assert run_base(*words, status=status)[1].isdisjoint(SLOW_TO_IMPORT)


def test_a_photo_is_tagged_without_what_training_needs(photos: Path, known: dict[str, list[tuple[str, float]]]) -> None:
    printed, loaded = run_base("predict", "photos/cat.jpg", "--json", "--device", "cpu", status=0)
    assert [tag["label"] for tag in json.loads(printed)["tags"]] == [label for label, _ in known["cat.jpg"]]
    assert loaded.isdisjoint({"rich", "scipy", "pandas", "onnx", "starlette"})
    assert "cat" in run_base("predict", "photos/cat.jpg", "--explain", "why.png", status=0)[0]
    assert Path("why.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_app_needs_nothing_that_training_needs(photos: Path) -> None:
    pytest.importorskip("starlette")
    command = [sys.executable, "-c", BASE, "app", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        try:
            content = (photos / "cat.jpg").read_bytes()
            with urllib.request.urlopen(f"{address}/api/predict", content, timeout=60) as answer:
                assert [tag["label"] for tag in json.load(answer)["tags"]] == ["cat"]
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert b"<html" in answer.read()
        finally:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


def start_writing(count: int) -> "subprocess.Popen[str]":
    """Tag copies of a photo beside them; the process, once the first sidecar is there."""
    for number in range(count):
        shutil.copy("photos/cat.jpg", f"photos/{number:03}.jpg")
    command = [sys.executable, "-m", "pivotpatch", "predict", "photos", "--write", "json", "--effort", "0"]
    process = subprocess.Popen([*command, "--device", "cpu"], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not Path("photos/000.jpg.json").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return process


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_done(photos: Path, capsys: Errors) -> None:
    process = start_writing(400)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 128 + signal.SIGINT
    written = len(list(photos.rglob("*.json")))
    assert 0 < written < 403
    assert told[-2] == f"wrote {written} sidecars, 0 unchanged, 0 could not be read"
    assert told[-1] == f"stopped by SIGINT with {403 - written} images left; the same command goes on"
    told = predict(capsys, "photos", "--write", "json", "--effort", "0", "--skip-tagged")[1]
    skipped = f"{written} images tagged before"
    assert told[-1] == f"wrote {403 - written} sidecars, 0 unchanged, {skipped}, 0 could not be read"


@pytest.mark.slow
def test_a_kill_leaves_whole_sidecars(photos: Path, capsys: Errors) -> None:
    process = start_writing(200)
    process.kill()
    process.communicate()
    written = list(photos.rglob("*.json"))
    assert all(json.loads(path.read_text("utf-8"))["tags"][0]["label"] == "cat" for path in written)
    told = predict(capsys, "photos", "--write", "json", "--effort", "0")[1]
    assert told[-1] == f"wrote {203 - len(written)} sidecars, {len(written)} unchanged, 0 could not be read"
    assert len(list(photos.rglob("*.json*"))) == 203, "nothing else is left beside the photos"
