"""Decisions that outlive a crash: a journal of lines, each on the disk before it counts, and the table made from it.

`review.csv.journal.jsonl` is the truth. Each line says who decided what of which images, or which earlier line is taken
back; nothing is ever changed in it. `review.csv` follows from it: a row for each image, a column for each label, 1
present, 0 absent, nothing where nobody looked or somebody could not tell.
"""

import csv
import errno
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Literal, NamedTuple

from pivotpatch.errors import InputError, explaining
from pivotpatch.writing import explain_disk_faults, flush, holding, replacing

PRESENT, ABSENT, UNSURE = 1, 0, -1
IMAGE_COLUMN = "image"
States = dict[str, dict[str, int]]
"""By image and label: `PRESENT`, `ABSENT` or `UNSURE`."""


class Entry(NamedTuple):
    """A decision."""

    id: str  # given by whoever decides, so that the same decision sent twice counts once
    who: str  # the person
    when: str  # in local time, as ISO 8601 writes it
    states: States  # what was decided
    mode: Literal["image", "grid"] = "image"  # "image", one image is done; "grid", one label of many images


class Session:
    """The decisions about images, from all sessions of one table; enter it, for one process at a time writes them."""

    def __init__(self, out: Path, labels: Sequence[str]) -> None:
        """Name the table, a .csv file, and its columns; labels that only earlier decisions name come behind them."""
        self.out, self.labels = out, tuple(labels)
        self.known = {*self.labels}  # and those of earlier sessions
        self.journal = out.with_name(f"{out.name}.journal.jsonl")
        self.entries: dict[str, Entry] = {}  # by id, in their order; without those taken back
        self._ids: set[str] = set()  # of those too
        self.fault: str | None = None  # what keeps the table from being written
        self._of_image: dict[str, list[Entry]] = {}  # the entries about each
        self._lock = Lock()
        self._writer = ThreadPoolExecutor(1, "table")
        self._next: Future[None] | None = None  # the last table that was asked for

    def __enter__(self) -> "Session":
        """Read the journal, mend its torn end, and write the table."""
        with ExitStack() as stack:
            if not stack.enter_context(holding(self.out.with_name(f".{self.out.name}.lock"))):
                raise InputError(str(self.out), "another process reviews to it", "use its page, or give another --out")
            fresh = not self.journal.exists()
            with explain_disk_faults(self.out.parent):
                whole = 0 if fresh else self._read()
                self._file = stack.enter_context(self.journal.open("ab", buffering=0))
                self._file.truncate(whole)
                flush(self.out.absolute().parent)
            if not fresh:
                self.write_table()
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._writer.submit(self._follow)  # once more, if it could not be written before
        self._writer.shutdown()
        self._held.close()

    def decide(self, entry: Entry) -> None:
        """Put a decision on the disk; one that is there already changes nothing."""
        with self._lock:
            if entry.id not in self._ids:
                self._append(entry._asdict())
                self._take(entry)

    def undo(self, who: str) -> Entry | None:
        """Take back the last decision of a person; None where there is none."""
        with self._lock:
            last = next((entry for entry in reversed(self.entries.values()) if entry.who == who), None)
            if last is not None:
                self._append({"undo": last.id, "who": who, "when": now()})
                self._drop(last.id)
            return last

    def get(self, image: str) -> dict[str, int]:
        """What is decided of an image, by label; the last decision wins."""
        return {label: state for entry in self._of_image.get(image, ()) for label, state in entry.states[image].items()}

    def is_done(self, image: str) -> bool:
        """Whether somebody has looked at an image as a whole."""
        return any(entry.mode == "image" for entry in self._of_image.get(image, ()))

    @property
    def images(self) -> list[str]:
        """All images that anything is decided of, in the order of the first decision."""
        return [image for image, entries in self._of_image.items() if entries]

    def write_table(self) -> None:
        """Write the table whole or not at all."""
        with self._lock:
            rows = {image: self.get(image) for image in self.images}
        others = dict.fromkeys(label for row in rows.values() for label in row)
        labels = list(dict.fromkeys([*self.labels, *others]))
        with explain_disk_faults(self.out.parent), replacing(self.out) as written:
            with written.open("w", encoding="utf-8", newline="") as file:
                table = csv.writer(file, lineterminator="\n")
                table.writerow([IMAGE_COLUMN, *labels])
                for image, row in rows.items():
                    states = (row.get(label, UNSURE) for label in labels)
                    table.writerow([image, *("" if state == UNSURE else state for state in states)])
            flush(written)

    def _follow(self) -> None:
        """Write the table that the journal comes to."""
        try:
            if self.journal.stat().st_size:
                self.write_table()
            self.fault = None
        except (InputError, OSError) as error:  # the journal has it all; the next decision tries again
            self.fault = str(error)

    def _append(self, line: Mapping[str, Any]) -> None:
        content = json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        with explain_disk_faults(self.out.parent):
            start = os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(start)  # a part of a line would swallow the next one
                raise
        if self._next is None or self._next.running() or self._next.done():  # else it has not begun, and has this too
            self._next = self._writer.submit(self._follow)

    def _read(self) -> int:
        """Take all entries; how many bytes are whole lines: what a crash has torn off the last one counts for none."""
        content = self.journal.read_bytes()
        lines = content.split(b"\n")
        for number, line in enumerate(lines[:-1], 1):
            with explaining(str(self.journal), f"line {number} is damaged", "mend or remove that line"):
                said = json.loads(line)
                if "undo" in said:
                    self._drop(said["undo"])
                else:
                    self._take(Entry(**said))
        return len(content) - len(lines[-1])

    def _take(self, entry: Entry) -> None:
        self._ids.add(entry.id)
        self.entries[entry.id] = entry
        for image, states in entry.states.items():
            self._of_image.setdefault(image, []).append(entry)
            self.known.update(states)

    def _drop(self, id_: str) -> None:
        for image in self.entries.pop(id_).states:  # another list: another thread may go through the old one
            self._of_image[image] = [other for other in self._of_image[image] if other.id != id_]


def now() -> str:
    """The local time, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
