"""The journal against a plain dictionary, torn at any byte; the table follows from it."""

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pivotpatch.errors import InputError
from pivotpatch.review.session import ABSENT, PRESENT, UNSURE, Entry, Session, States

LABELS = ("cat", "cup", "dog")


def entry(number: int, states: States, *, who: str = "ann", mode: str = "image") -> Entry:
    return Entry(str(number), who, "2026-01-01T00:00:00+00:00", states, mode)  # type: ignore[arg-type]


def read_table(path: Path) -> dict[str, dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return {row.pop("image"): row for row in csv.DictReader(file)}


def fold(done: list[Entry]) -> dict[str, dict[str, int]]:
    """What decisions come to, the last one winning."""
    states: dict[str, dict[str, int]] = {}
    for each in done:
        for image, labels in each.states.items():
            states.setdefault(image, {}).update(labels)
    return states


def test_decisions_and_undo_come_to_what_a_dictionary_says_also_after_a_restart(tmp_path: Path) -> None:
    dice, done, number = random.Random(0), list[Entry](), 0
    out = tmp_path / "review.csv"
    for _ in range(5):
        with Session(out, LABELS) as session:
            for _ in range(20):
                who = dice.choice(["ann", "bob"])
                mine = [each for each in done if each.who == who]
                if mine and dice.random() < 0.4:
                    assert session.undo(who) == mine[-1]
                    done.remove(mine[-1])
                else:
                    number += 1
                    chosen = dice.sample(LABELS, dice.randint(1, 3))
                    states = {f"{dice.randint(0, 5)}.jpg": {name: dice.choice([-1, 0, 1]) for name in chosen}}
                    done.append(entry(number, states, who=who))
                    session.decide(done[-1])
                    session.decide(done[-1])  # sent twice, it counts once
                for image, states_of in fold(done).items():
                    assert session.get(image) == states_of
                    assert session.is_done(image)
        shown = {PRESENT: "1", ABSENT: "0", UNSURE: ""}
        assert read_table(out) == {
            image: {label: shown[states.get(label, UNSURE)] for label in LABELS} for image, states in fold(done).items()
        }
    assert session.undo("nobody") is None


def test_a_journal_torn_at_any_byte_loses_the_torn_line_alone(tmp_path: Path) -> None:
    out = tmp_path / "review.csv"
    entries = [entry(1, {"ä": {"cat": 1}}), entry(2, {"ä": {"cat": 0}}, mode="grid")]
    with Session(out, LABELS) as session:
        for each in entries:
            session.decide(each)
        session.undo("ann")
    whole = session.journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    ends = [sum(map(len, lines[:count])) for count in range(len(lines) + 1)]
    kept = [[], entries[:1], entries, entries[:1]]
    for size in range(len(whole) + 1):
        session.journal.write_bytes(whole[:size])
        after = kept[sum(end <= size for end in ends) - 1]
        with Session(out, LABELS) as again:
            assert [*again.entries.values()] == after
            again.decide(entry(9, {"9.jpg": {"cup": 1}}))
        with Session(out, LABELS) as last:
            assert [*last.entries.values()] == [*after, entry(9, {"9.jpg": {"cup": 1}})]
        assert read_table(out)["9.jpg"] == {"cat": "", "cup": "1", "dog": ""}


def test_a_damaged_line_inside_is_named(tmp_path: Path) -> None:
    journal = tmp_path / "review.csv.journal.jsonl"
    for wrong in ("nonsense", '{"id": "1"}', '{"undo": "7"}', "[]"):
        journal.write_text(wrong + "\n{}\n")
        with pytest.raises(InputError, match="line 1 is damaged"), Session(tmp_path / "review.csv", LABELS):
            pass


def test_one_process_at_a_time(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pivotpatch.review.session import Session\n"
        "with Session(Path(sys.argv[1]), ('cat',)): pass"
    )
    with Session(tmp_path / "review.csv", LABELS):
        said = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "review.csv")], capture_output=True, text=True, check=False
        )
    assert "another process reviews to it" in said.stderr


def test_a_decision_without_room_is_refused_and_the_next_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "review.csv"
    with Session(out, LABELS) as session:
        session.decide(entry(1, {"1.jpg": {"cat": 1}}))

        def fail(_descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(InputError, match="No space left"):
                session.decide(entry(2, {"2.jpg": {"cat": 1}}))
        session.decide(entry(3, {"3.jpg": {"cat": 1}}))
    assert [json.loads(line)["id"] for line in session.journal.read_text().splitlines()] == ["1", "3"]
    assert read_table(out).keys() == {"1.jpg", "3.jpg"}


def test_labels_and_images_of_earlier_sessions_stay(tmp_path: Path) -> None:
    out = tmp_path / "review.csv"
    with Session(out, LABELS) as session:
        session.decide(entry(1, {"1.jpg": {"cup": 1}}))
    with Session(out, ("elk",)) as session:
        session.decide(entry(2, {"2.jpg": {"elk": 0}}))
        assert session.known == {"elk", "cup"}
    assert read_table(out) == {"1.jpg": {"elk": "", "cup": "1"}, "2.jpg": {"elk": "0", "cup": ""}}
