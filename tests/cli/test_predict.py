import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from together import run_together, run_verb
from verb import read_refusal

from pivotpatch.cli.main import main
from pivotpatch.cli.predict import digest_engine
from pivotpatch.inference.predictor import Predictor
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier

LABELS = ("cat", "dog", "[red]hat")
COUNT = 20
Errors = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 20 pictures and a network that was never trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    generator = np.random.default_rng(0)
    Path("photos").mkdir()
    for place in range(COUNT):
        Image.fromarray(generator.integers(0, 256, (80, 60, 3), dtype=np.uint8)).save(f"photos/{place:02d}.png")
    torch.manual_seed(0)
    save_checkpoint(PatchClassifier("test_resnet", LABELS, image_size=64), "model")
    return tmp_path


def predict(capsys: Errors, *words: str, status: int = 0) -> str:
    """What is printed."""
    assert main(["predict", "--model", "model", *words]) == status
    return capsys.readouterr().out


def fail(capsys: Errors, *words: str) -> str:
    return read_refusal(capsys, "predict", "--model", "model", *words)


def test_one_json_object_a_line_says_what_a_prediction_says(here: Path, capsys: Errors) -> None:
    said = [json.loads(line) for line in predict(capsys, "photos", "--json", "--threshold", "0.48").splitlines()]
    predictor = Predictor.load("model")
    assert [row["picture"] for row in said] == [f"photos/{place:02d}.png" for place in range(COUNT)]
    for row in said[::7]:
        expected = predictor(row["picture"])
        assert row["size"] == [80, 60]
        given = [tag for tag in expected.top(3) if tag.prob > 0.48]
        assert [tag["label"] for tag in row["tags"]] == [tag.label for tag in given]
        for tag, known in zip(row["tags"], given, strict=True):
            assert tag["threshold"] == pytest.approx(0.48)
            assert tag["box"] == list(known.box or ())
            assert tag["prob"] == pytest.approx(known.prob, abs=1e-5)
            assert tag["weights"] == pytest.approx(known.weights, abs=1e-5)


def test_one_picture_is_one_object(here: Path, capsys: Errors) -> None:
    (only,) = predict(capsys, "photos/03.png", "--json", "--top-k", "2").splitlines()
    expected = Predictor.load("model")("photos/03.png").top(2)
    assert json.loads(only)["tags"] == [tag.to_dict() for tag in expected]


def test_a_table_tells_each_opinion_and_the_place_of_the_pivot_patch(here: Path, capsys: Errors) -> None:
    shown = predict(capsys, "photos/01.png", "photos/02.png", "--top-k", "3")
    predictor = Predictor.load("model")
    for name in ("photos/01.png", "photos/02.png"):
        assert f"{name} (60 x 80 pixels)" in shown
        for tag in predictor(name).top(3):
            assert tag.patch_prob is not None
            assert tag.box is not None
            place = f"{'top' if tag.box.top == 0 else 'bottom'} {'left' if tag.box.left == 0 else 'right'}"
            label = re.escape(tag.label if tag.prob > tag.threshold else f"({tag.label})")
            row = rf" {label} +{tag.prob:.2f}  \S+ +{tag.image_prob:.2f} +{tag.patch_prob:.2f}  {place}"
            assert re.search(row, shown)
    assert re.search(r"tag +both \(TDE\) +image +patches +pivot patch", shown)
    assert "no tag; the most probable is" in predict(capsys, "photos/01.png", "--threshold", "0.99")


def test_what_is_not_given_is_in_brackets(here: Path, capsys: Errors) -> None:
    model = load_checkpoint("model")
    first, second, *_ = Predictor.load("model")("photos/01.png").top(2)
    model.thresholds = tuple(0.9 if label == second.label else 0.1 for label in model.labels)
    save_checkpoint(model, "model", overwrite=True)
    shown = predict(capsys, "photos/01.png", "--top-k", "2")
    assert re.search(rf"\n  {first.label} .*\n  \({second.label}\) ", shown)
    lines = predict(capsys, *["photos/01.png"] * 9, "--top-k", "2").splitlines()
    assert lines == [f"photos/01.png: {first.label} {first.prob:.2f}, ({second.label}) {second.prob:.2f}"] * 9


@pytest.mark.parametrize("label", ["a label of many words " * 4, "AnEndlessLabel" * 8])
@pytest.mark.parametrize("kind", [PatchClassifier, MultiLabelClassifier])
def test_a_long_label_is_folded_and_numbers_stay_whole(
    label: str, kind: type[PatchClassifier] | type[MultiLabelClassifier], here: Path, capsys: Errors
) -> None:
    save_checkpoint(kind("test_resnet", [label.strip(), "cat"], image_size=64), "model", overwrite=True)
    shown = predict(capsys, "photos/01.png", "--top-k", "2")
    tags = Predictor.load("model")("photos/01.png").top(2)
    numbers = [f"{number:.2f}" for tag in tags for number in (tag.prob, tag.image_prob, tag.patch_prob or 0)]
    wanted = numbers if kind is PatchClassifier else numbers[::3]
    assert re.findall(r"\d\.\d\d", shown) == wanted
    assert max(map(len, shown.splitlines())) <= 80
    assert all(line.startswith("  ") for line in shown.splitlines()[1:] if line)
    names = "".join(line[2:].split("  ")[0] for line in shown.splitlines()[2:])
    assert label.replace(" ", "") in names.replace(" ", "")


def test_a_picture_of_one_pixel_is_tagged_in_every_way(here: Path, capsys: Errors) -> None:
    Image.new("RGB", (1, 1)).save("one.png")
    (said,) = predict(capsys, "one.png", "--json", "--top-k", "2", "--explain", "why.png").splitlines()
    assert [tag["box"] for tag in json.loads(said)["tags"]] == [[0, 0, 1, 1]] * 2
    assert "one.png (1 x 1 pixels)" in predict(capsys, "one.png", "--top-k", "2")
    predict(capsys, "one.png", "--out", "tags.jsonl", "--top-k", "2")
    (row,) = read_rows("tags.jsonl")
    assert row["labels"] == [tag["label"] for tag in json.loads(said)["tags"]]


def test_an_address_of_a_file_is_read_in_every_way(here: Path, capsys: Errors) -> None:
    odd = Path("photos/01.png").rename("a #1 photo.png").absolute()
    (said,) = predict(capsys, odd.as_uri(), "--json").splitlines()
    assert json.loads(said)["picture"] == str(odd)
    predict(capsys, odd.as_uri(), "--out", "tags.jsonl")
    assert [row["picture"] for row in read_rows("tags.jsonl")] == [str(odd)]


def test_a_network_without_patches_has_one_opinion(here: Path, capsys: Errors) -> None:
    save_checkpoint(MultiLabelClassifier("test_resnet", LABELS, image_size=64), "model", overwrite=True)
    shown = predict(capsys, "photos/01.png", "--top-k", "1")
    assert "probability" in shown
    assert "pivot" not in shown
    (said,) = predict(capsys, "photos/01.png", "--json", "--top-k", "1").splitlines()
    assert json.loads(said)["tags"][0]["box"] is None


def test_many_pictures_get_a_line_each(here: Path, capsys: Errors) -> None:
    lines = predict(capsys, "photos/*.png", "--top-k", "1").splitlines()
    assert len(lines) == COUNT
    assert re.fullmatch(r"photos/00.png: \S+ 0\.\d\d", lines[0])


def test_paths_come_from_stdin(here: Path, capsys: Errors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"photos/04.png\nphotos/02.png\n")))
    said = [json.loads(line)["picture"] for line in predict(capsys, "-", "photos/09.png", "--json").splitlines()]
    assert said == ["photos/04.png", "photos/02.png", "photos/09.png"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert fail(capsys, "-") == "pivotpatch predict: no picture is named; name files, folders or patterns"


def test_pictures_are_explained(here: Path, capsys: Errors) -> None:
    predict(capsys, "photos/01.png", "--explain", "why/one.png", "--top-k", "2")
    with Image.open("why/one.png") as drawn:
        assert drawn.width > drawn.height > 100
    predict(capsys, "photos/01.png", "photos/02.png", "--explain", "why")
    assert sorted(path.name for path in Path("why").iterdir()) == ["0001-01.png", "0002-02.png", "one.png"]
    predict(capsys, "photos/01.png", "--explain", "loud/WHY.PNG")
    assert [path.name for path in Path("loud").iterdir()] == ["WHY.PNG"]
    wrong = "--explain: all.png is one file for several pictures; name a folder"
    assert fail(capsys, "photos", "--explain", "all.png") == wrong
    assert fail(capsys, "photos/01.png", "--explain", "why") == "--explain: why is no PNG file; end it in .png"


def test_what_cannot_be_read_is_told_and_passed_over(here: Path, capsys: Errors) -> None:
    Path("photos/05.png").write_bytes(b"no picture")
    assert main(["predict", "--model", "model", "photos", "--json"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == COUNT - 1
    assert said.err.splitlines()[0].startswith("not read: photos/05.png: is in none of the known formats")
    assert said.err.splitlines()[-1] == f"1 of {COUNT} pictures could not be read"
    assert fail(capsys, "photos/05.png").startswith("photos/05.png: is in none of the known formats")
    Path("photos/06.png").write_bytes(b"")
    assert main(["predict", "--model", "model", "photos/05.png", "photos/06.png"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "2 of 2 pictures could not be read"
    assert main(["predict", "--model", "model", "photos", "--on-error", "error"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("pivotpatch: photos/05.png: ")


def test_a_file_of_tags_says_what_json_says(here: Path, capsys: Errors) -> None:
    Path("photos/05.png").write_bytes(b"no picture")
    words = ("photos", "--threshold", "0.48")
    rows = [json.loads(line) for line in predict(capsys, *words, "--json").splitlines()]
    assert main(["predict", "--model", "model", *words, "--out", "tags.parquet", "--json", "--batch-size", "6"]) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert (summary["out"], summary["tagged"], summary["failed"]) == ("tags.parquet", COUNT - 1, 1)
    assert (summary["settings"]["model"], summary["settings"]["effort"]) == ("model", 1.0)
    table = pq.read_table("tags.parquet").to_pylist()
    assert [row["picture"] for row in table] == [row["picture"] for row in rows]
    for row, known in zip(table, rows, strict=True):
        assert row["labels"] == [tag["label"] for tag in known["tags"]]
        assert row["probs"] == pytest.approx([tag["prob"] for tag in known["tags"]], abs=1e-5)
    told = said.err.splitlines()
    assert f"1 of {COUNT} pictures could not be read, listed in tags.parquet.failures.jsonl" in told
    assert f"wrote tags.parquet, {COUNT - 1} pictures" in told
    assert any(re.fullmatch(r"tag: 20 of 20, [\d.e+]+ pictures/s, 0:00:00 left", line) for line in told)
    (listed,) = Path("tags.parquet.failures.jsonl").read_text("utf-8").splitlines()
    assert json.loads(listed)["picture"] == "photos/05.png"


def test_nothing_but_failures_is_a_failure(here: Path, capsys: Errors) -> None:
    Path("bad.png").write_bytes(b"no picture")
    assert main(["predict", "--model", "model", "bad.png", "--out", "tags.csv"]) == 1
    assert Path("tags.csv").read_text() == "picture,labels,probs\n"


def test_another_network_of_the_same_name_does_not_go_on(here: Path, capsys: Errors) -> None:
    predict(capsys, "photos", "--out", "tags.csv")
    Path("tags.csv.parts").mkdir()
    settings = json.loads(Path("tags.csv.summary.json").read_text("utf-8"))["settings"]
    Path("tags.csv").unlink()
    Path("tags.csv.parts/settings.json").write_text(json.dumps(settings))
    save_checkpoint(PatchClassifier("test_resnet", LABELS, image_size=64), "model", overwrite=True)
    assert fail(capsys, "photos", "--out", "tags.csv").startswith("tags.csv.parts: it was begun with other weights (")


def test_one_network_is_the_same_however_a_device_wants_it(here: Path) -> None:
    def digest(*, fold: bool = True) -> str:
        return digest_engine(Predictor.load("model", device="cpu", fold=fold).engine, "model")

    before = digest()
    assert digest(fold=False) == before
    other = load_checkpoint("model")
    with torch.no_grad():
        next(other.parameters()).add_(1e-3)  # one of the backbone's
    save_checkpoint(other, "model", overwrite=True)
    assert digest() != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "pivotpatch predict: no picture is named; name files, folders or patterns"),
        (("nowhere",), "nowhere: there is no such file or folder; check the path"),
        (("photos/*.gif",), "photos/*.gif: there is no image in it; known kinds: .jpg"),
        (("photos", "--out", "tags.xlsx"), "tags.xlsx: is of no known kind of file; end it in .parquet, .jsonl, .csv"),
        (("photos", "--resume"), "--resume: it is an option of --out; give that too"),
        (("photos", "--all-probs"), "--all-probs: it is an option of --out"),
        (("photos", "--out", "t.csv", "--resume"), "--resume: work goes on as it began, without other pictures"),
        (("--resume", "--out", "t.csv"), "t.csv.parts: there is no unfinished work; name pictures to begin"),
        (("photos", "--out", "t.csv", "--explain", "x.png"), "--explain: nothing is drawn with --out"),
        (("photos", "--threshold", "2"), "threshold: 2.0 is no probability; give 0 to 1"),
        (("photos", "--out", "t.csv", "--workers", "-1"), "--workers: -1 is below 0; give 0 or more"),
        (("photos", "--workers", "0"), "--workers: it is an option of --out; give that too"),
        (("photos", "--batch-size", "0"), "--batch-size: 0 is below 1; give 1 or more"),
        (("photos", "--model", "tagge"), "tagge: is neither a bundled model nor a folder or file that is there"),
    ],
)
def test_mistakes_are_told_in_one_line(words: tuple[str, ...], message: str, here: Path, capsys: Errors) -> None:
    assert fail(capsys, *words).startswith(message)
    assert sorted(path.name for path in here.iterdir()) == ["model", "photos"]


def test_several_processes_need_a_file(here: Path, capsys: Errors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    wrong = "WORLD_SIZE: 2 processes would print the same; write to a file with --out"
    assert fail(capsys, "photos") == wrong
    assert fail(capsys, "-", "--out", "t.csv").startswith("-: several processes would share one stdin")
    monkeypatch.setenv("RANK", "two")
    assert fail(capsys, "photos").startswith("RANK, WORLD_SIZE: they are no numbers")


def test_finished_work_is_refused(here: Path, capsys: Errors) -> None:
    predict(capsys, "photos", "--out", "tags.csv")
    assert fail(capsys, "photos", "--out", "tags.csv").startswith("tags.csv: exists already; ")
    predict(capsys, "photos", "--out", "tags.csv", "--overwrite", "--top-k", "1")
    assert re.search(r"^photos/00.png,\S+,0\.\d+$", Path("tags.csv").read_text("utf-8"), re.MULTILINE)
    assert json.loads(predict(capsys, "--resume", "--out", "tags.csv", "--top-k", "1", "--json"))["tagged"] == COUNT


def read_rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def test_processes_of_a_launcher_share_the_work(here: Path, capsys: Errors) -> None:
    words = [str(here / "photos"), "--top-k", "1", "--batch-size", "3", "--workers", "0"]
    both = ["predict", "--model", str(here / "model"), *words, "--out"]
    said = run_together(run_verb, [*both, str(here / "both.jsonl")])
    assert [each.status for each in said] == [0, 0], said
    assert sum(f"wrote {here / 'both.jsonl'}" in each.err for each in said) >= 1
    said = run_together(run_verb, [*both, str(here / "s.jsonl"), "--shards"])
    assert [each.status for each in said] == [0, 0], said
    predict(capsys, *words, "--out", "one.jsonl")
    assert read_rows("both.jsonl") == read_rows("one.jsonl")
    parts = [read_rows(f"s-0000{rank}-of-00002.jsonl") for rank in range(2)]
    assert [len(part) for part in parts] == [COUNT // 2, COUNT // 2]
    assert parts[0] + parts[1] == read_rows("one.jsonl")


def test_an_interrupt_keeps_what_is_done(here: Path, capsys: Errors) -> None:
    listed = Path("list.txt")
    listed.write_text("photos/01.png\n" * 20_000)
    with listed.open() as stdin:
        command = [sys.executable, "-m", "pivotpatch", "predict", "--model", "model", "-", "--out", "tags.csv"]
        process = subprocess.Popen(
            [*command, "--workers", "0", "--batch-size", "2"], stdin=stdin, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        while not process.stderr.readline().startswith(b"tag: "):
            pass
        process.send_signal(signal.SIGINT)
        told = process.communicate()[1].decode()
    assert process.returncode == 128 + signal.SIGINT
    assert told.splitlines()[-1] == "stopped by SIGINT; the same command goes on"
    (part,) = Path("tags.csv.parts").glob("0*.parquet")
    assert 0 < pq.read_table(part).num_rows < 20_000
    assert not Path("tags.csv").exists()


def test_a_bar_on_a_terminal_tells_speed_and_time(here: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pivotpatch", "predict", "--model", "model", "photos", "--out", "tags.csv"]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--batch-size", "1"], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:
            break
    assert process.wait() == 0
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"tag .* 20/20 [\d.e+]+ pictures/s \d:\d\d:\d\d", plain), plain
    assert f"wrote tags.csv, {COUNT} pictures" in plain


@pytest.mark.parametrize("words", [(), ("--json",), ("--out", "tags.csv", "--workers", "0")], ids=["", "json", "out"])
def test_a_broken_network_is_told_once_and_not_blamed_on_pictures(
    words: tuple[str, ...], here: Path, capsys: Errors
) -> None:
    state = load_file("model/model.safetensors")
    state["head.project.weight"].fill_(3e38)
    save_file(state, "model/model.safetensors")
    Path("photos/05.png").write_bytes(b"no picture")
    assert main(["predict", "--model", "model", "photos", *words]) == 1
    said = capsys.readouterr()
    line = "pivotpatch: model: it answers nan where a probability is due; its weights or its description are damaged"
    assert said.err.splitlines()[-1].startswith(line)
    assert said.err.count("it answers nan") == 1
    assert "not read" not in said.err.replace("not read: photos/05.png", "")
    assert said.out == ""
    assert not Path("tags.csv").exists()
