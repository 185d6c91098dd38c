import csv
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from made_engines import Means
from PIL import Image
from run_process import LIMITS, TaggingProcess, write_pictures

from pivotpatch.data.address import open_records
from pivotpatch.errors import InputError
from pivotpatch.process import Share
from pivotpatch.runtime.bulk import ALONE, FITTED, tag_pictures
from pivotpatch.runtime.files import find_images
from pivotpatch.runtime.parts import TagJob
from pivotpatch.runtime.prediction import TagRule
from pivotpatch.runtime.predictor import Predictor

ENGINE = Means(thresholds=LIMITS)
COUNT, BROKEN = 23, (0, 9, 10)
Row = dict[str, Any]


@pytest.fixture
def here(here: Path) -> Path:
    """A folder with 23 pictures, three of which cannot be read."""
    write_pictures(Path("pictures"), COUNT, broken=BROKEN)
    Path("out").mkdir()
    return here


def tag(name: str, **options: Any) -> Any:
    return tag_pictures(ENGINE, find_images(["pictures"]), Path("out") / name, batch_size=4, **options)


def expect(rule: TagRule = FITTED) -> list[Row]:
    """The rows, from the pictures one at a time."""
    predictor, rows = Predictor(ENGINE), []
    for path in sorted(Path("pictures").iterdir()):
        if int(path.stem) in BROKEN:
            continue
        prediction = predictor(str(path))
        tags = rule.choose(prediction)
        probs = [round(tag.prob, 6) for tag in tags]
        rows.append({"picture": prediction.picture, "labels": [tag.label for tag in tags], "probs": probs})
    return rows


def read(path: Path) -> list[Row]:
    """The rows of a file of tags, whatever its kind."""
    rows: list[Row]
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    else:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [
                {name: cell if name == "picture" else cell.split("|") if cell else [] for name, cell in row.items()}
                for row in csv.DictReader(file)
            ]
    for row in rows:
        for name in row.keys() - {"picture", "labels"}:
            row[name] = [round(float(prob), 6) for prob in row[name]]
    return rows


def check_finished(name: str = "tags.jsonl") -> None:
    """Every row is there once, in order, and nothing else is left."""
    out = Path("out") / name
    assert read(out) == expect()
    listed = [json.loads(line) for line in out.with_name(f"{name}.failures.jsonl").read_text("utf-8").splitlines()]
    assert [row["picture"] for row in listed] == [f"pictures/{place:04d}.png" for place in BROKEN]
    assert all("is in none of the known formats" in row["error"] for row in listed)
    summary = json.loads(out.with_name(f"{name}.summary.json").read_text("utf-8"))
    count = len(list(Path("pictures").iterdir()))
    assert (summary["pictures"], summary["tagged"], summary["failed"]) == (count, count - len(BROKEN), len(BROKEN))
    assert len(list(Path("out").iterdir())) == 3


@pytest.mark.parametrize(
    ("name", "threads", "rule"),
    [("a.parquet", 1, TagRule(threshold=0.5, top_k=1)), ("a.jsonl", 3, FITTED), ("a.csv", 1, TagRule(0.0))],
)
def test_rows_are_those_of_a_predictor_and_a_data_set_too(name: str, threads: int, rule: TagRule, here: Path) -> None:
    done: list[tuple[str, int, int | None]] = []
    note = {"model": "greens"}
    summary = tag(name, threads=threads, rule=rule, all_probs=True, note=note, progress=lambda *told: done.append(told))
    assert (summary.settings["model"], summary.settings["labels"]) == ("greens", list(ENGINE.labels))
    assert done == [("tag", min(4 * batch, COUNT), COUNT) for batch in range(7)]
    predictor, rows, expected = Predictor(ENGINE), read(Path("out") / name), expect(rule)
    for row in rows:
        assert row.pop("all_probs") == pytest.approx(predictor(row["picture"]).probs.tolist(), abs=1e-6)
    assert rows == expected
    records = open_records(f"table:out/{name}?root=.")
    known = [records.labels.names[place] for place in records[3].positive]
    assert (records[3].name, sorted(known)) == (expected[3]["picture"], sorted(expected[3]["labels"]))


def test_names_and_labels_of_any_kind_come_back(here: Path) -> None:
    odd = ['comma, "quote".png', "line\nbreak.png", "carriage\rreturn.png", "ünï ☃.png", "|.png"]
    for name in odd:
        Image.new("RGB", (4, 4), "red").save(name)

    labels = ('a, "b"', "ä\nb", "☃")
    for name in ("tags.csv", "tags.jsonl", "tags.parquet"):
        tag_pictures(Means(labels), find_images(odd), Path(name), rule=TagRule(top_k=3))
        assert [(row["picture"], row["labels"]) for row in read(Path(name))] == [(each, list(labels)) for each in odd]
    with pytest.raises(InputError, match=r"bar.csv: the label 'a\|b' holds '\|', .*; write .parquet or .jsonl"):
        tag_pictures(Means(("a|b", "c", "d")), find_images(odd), Path("bar.csv"))


@pytest.mark.skipif(os.name == "nt", reason="names of files are Unicode on Windows")
def test_a_name_that_is_no_unicode_does_not_end_the_work(here: Path) -> None:
    names = [os.fsdecode(b"caf\xe9.png"), os.fsdecode(b"gone\xe9.png"), "plain.png"]
    try:
        for name in (names[0], names[2]):
            Image.new("RGB", (4, 4), "red").save(name)
    except OSError:
        pytest.skip("this disk takes only names in UTF-8")
    for name in ("tags.csv", "tags.jsonl", "tags.parquet"):
        summary: Any = tag_pictures(Means(), iter(names), Path(name))
        assert (summary.tagged, summary.failed) == (2, 1)
        (failed,) = Path(f"{name}.failures.jsonl").read_text("utf-8").splitlines()
        assert json.loads(failed)["picture"] == names[1]
        expected = names[0] if name == "tags.jsonl" else r"caf\udce9.png"
        assert [row["picture"] for row in read(Path(name))] == [expected, "plain.png"]


def stop(name: str, *, batches: int, **options: Any) -> None:
    """Tag until some batches are done."""
    asked = [False] * (batches - 1)
    assert tag(name, stopping=lambda: not asked or asked.pop(), **options) is None


def test_a_stop_keeps_the_batch_and_the_same_goes_on(here: Path) -> None:
    stop("tags.jsonl", batches=3)
    kept = Path("out/tags.jsonl.parts/0000000000-0000000012.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(row)["picture"] for row in kept] == [f"pictures/{place:04d}.png" for place in range(12)]
    for begin, end in ((5, 10), (0, 3)):  # of others that did the same work
        Path(f"out/tags.jsonl.parts/{begin:010d}-{end:010d}.jsonl").write_text("".join(kept[begin:end]))
    done: list[int] = []
    tag("tags.jsonl", progress=lambda _what, at, _all: done.append(at))
    assert done[0] == 12
    check_finished()


@pytest.mark.slow
def test_a_kill_at_any_touch_of_the_disk_loses_and_doubles_nothing(here: Path) -> None:
    out, touches, left = here / "out" / "tags.jsonl", 0, True
    while left:  # until all that is left to do is clearing away
        touches += 1
        assert TaggingProcess(out, dies_at_touch=touches).wait() == -9
        left = not out.exists() or TagJob(out).parts.exists()
        tag("tags.jsonl")
        check_finished()
        for path in (here / "out").iterdir():
            path.unlink()
    assert touches > 15  # the list, six parts, three files


@pytest.mark.slow
def test_kills_at_random_moments_lose_and_double_nothing(here: Path) -> None:
    write_pictures(Path("pictures"), 150, broken=BROKEN)
    draw = random.Random(0)
    for _ in range(12):
        process = TaggingProcess(here / "out" / "tags.jsonl", threads=draw.choice([1, 1, 1, 3]))
        for _ in range(draw.randint(1, 3)):  # it tells where it begins, then of each batch
            process.hear()
        time.sleep(draw.uniform(0, 0.004))
        process.kill()
    assert not Path("out/tags.jsonl").exists()
    assert len(list(Path("out/tags.jsonl.parts").glob("0*.jsonl"))) >= 5
    tag("tags.jsonl")
    check_finished()


@pytest.mark.slow
def test_work_goes_on_with_another_number_of_processes(here: Path) -> None:
    out = here / "out" / "tags.jsonl"
    first = TaggingProcess(out, share=Share(0, 2))
    first.hear()
    first.hear()  # a batch is done, maybe all of the first half before the kill comes
    first.kill()
    begun = [path.name for path in Path("out/tags.jsonl.parts").glob("0*.jsonl")]
    assert TaggingProcess(out, share=Share(2, 3)).wait() == 0
    assert not out.exists()
    assert {path.name for path in Path("out/tags.jsonl.parts").glob("0*.jsonl")} > set(begun)
    tag("tags.jsonl")
    check_finished()


@pytest.mark.slow
@pytest.mark.parametrize("share", [ALONE, Share(0, 2)])
def test_a_second_process_is_refused_while_one_is_at_work_unless_they_share_it(share: Share, here: Path) -> None:
    out = here / "out" / "tags.jsonl"
    first = TaggingProcess(out, share=share)
    first.hear()
    os.kill(first.pid, signal.SIGSTOP)  # amid its work
    refused: list[dict[str, Any]] = [{}, {"overwrite": True}, {"share": Share(0, 2)}] if share == ALONE else [{}]
    for options in refused:
        with pytest.raises(InputError, match=r"tags\.jsonl: another process is at work on it"):
            tag("tags.jsonl", **options)
    if share != ALONE:
        assert TaggingProcess(out, share=Share(1, 2)).wait() == 0
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == 0
    check_finished()


def test_finished_work_is_replaced_only_when_that_is_asked_for(here: Path) -> None:
    tag("tags.jsonl")
    before = Path("out/tags.jsonl").stat().st_mtime_ns
    late = tag("tags.jsonl", share=Share(1, 2))  # has nothing to do
    assert late.tagged == COUNT - len(BROKEN)
    with pytest.raises(InputError, match="tags.jsonl: exists already"):
        tag("tags.jsonl", rule=TagRule(top_k=1))
    assert Path("out/tags.jsonl").stat().st_mtime_ns == before
    check_finished()
    for place in BROKEN:
        Path(f"pictures/{place:04d}.png").unlink()
    tag("tags.jsonl", rule=TagRule(top_k=1), overwrite=True)
    assert read(Path("out/tags.jsonl")) == expect(TagRule(top_k=1))
    assert not Path("out/tags.jsonl.failures.jsonl").exists()


def test_unfinished_work_goes_on_as_it_began_or_not_at_all(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop("tags.jsonl", batches=1, note={"model": "a"})
    with pytest.raises(InputError, match=r"begun with other model \(a then, b now\); give the same, begin anew"):
        tag("tags.jsonl", note={"model": "b"})
    Image.new("RGB", (4, 4)).save("pictures/new.png")
    with pytest.raises(InputError, match="the images are not the 23 that it began with; go on .* --resume"):
        tag("tags.jsonl", note={"model": "a"})
    monkeypatch.chdir("pictures")  # relative paths are those of the beginning
    tag_pictures(ENGINE, None, here / "out/tags.jsonl", note={"model": "a"})
    monkeypatch.chdir(here)
    Path("pictures/new.png").unlink()
    check_finished()
    with pytest.raises(InputError, match="there is no unfinished work; name images to begin"):
        tag_pictures(ENGINE, None, Path("out/other.jsonl"))
    assert tag_pictures(ENGINE, None, Path("out/tags.jsonl"), note={"model": "a"}) is not None


def test_an_unreadable_picture_ends_the_work_where_that_is_asked_for(here: Path) -> None:
    Image.new("RGB", (4, 4), "red").save("pictures/0000.png")
    with pytest.raises(InputError, match=r"0009.png: is in none of the known formats"):
        tag("tags.parquet", on_error="error")
    assert Path("out/tags.parquet.parts/0000000000-0000000008.jsonl").exists()


def test_rows_are_kept_in_parts_of_some_size(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pivotpatch.runtime.parts._ROWS", 7)
    seen: set[str] = set()
    tag("tags.parquet", progress=lambda *_: seen.update(path.name for path in Path("out").glob("*/0*")))
    assert seen >= {f"{a:010d}-{b:010d}.jsonl" for a, b in [(0, 8), (8, 16)]}
    check_finished("tags.parquet")
    assert pq.ParquetFile("out/tags.parquet").metadata.num_row_groups == 3


def test_what_cannot_be_done_is_refused(here: Path) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("tags.txt", {}, "tags.txt: is no name for a file of tags"),
        ("nowhere/tags.csv", {}, "there is no folder out/nowhere"),
        ("tags.csv", {"share": Share(2, 2)}, "rank 2 of 2"),
        ("tags.csv", {"share": Share(0, 2), "overwrite": True}, "remove out/tags.csv and out/tags.csv.parts first"),
    ]
    for name, options, message in refused:
        with pytest.raises(InputError, match=message):
            tag(name, **options)
    with pytest.raises(InputError, match="no image is named"):
        tag_pictures(ENGINE, iter(()), Path("out/tags.csv"))
    assert list(Path("out").iterdir()) == []


def test_damaged_work_is_named(here: Path) -> None:
    stop("tags.csv", batches=3)
    part = Path("out/tags.csv.parts/0000000000-0000000012.jsonl")
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="0000000000-0000000012.jsonl: damaged or cut short"):
        tag("tags.csv")
    assert not Path("out/tags.csv").exists()
    Path("out/tags.csv.parts/settings.json").write_text("{")
    with pytest.raises(InputError, match="settings.json: cannot be read .*; begin anew with --overwrite"):
        tag("tags.csv")
    tag("tags.csv", overwrite=True)
    check_finished("tags.csv")
