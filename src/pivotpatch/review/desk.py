"""Who looks at what: hands out images and labels, no two people the same, and takes what they decide."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np

from pivotpatch.errors import InputError, check_known, quote
from pivotpatch.review.order import order_label, rate_doubts
from pivotpatch.review.pile import Pile, spread, stack_opinions
from pivotpatch.review.session import ABSENT, PRESENT, UNSURE, Entry, Session, now
from pivotpatch.runtime.prediction import Prediction
from pivotpatch.runtime.predictor import Predictor

LEASE_SECONDS = 120.0
"""That an image stays with whoever has it open; the page asks for more while it is open."""
GRID = 24
"""Images of one label at once."""
_KEPT = 64  # predictions
_PACE = 30  # decisions that the pace is taken from
_PAUSE = 120.0  # seconds between two decisions that are no work


class Desk:
    """Hands out images and takes decisions; `tab` is one open page, `who` a person."""

    def __init__(
        self,
        pile: Pile,
        session: Session,
        predictor: Predictor,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pile, self.session, self.predictor, self._clock = pile, session, predictor, clock
        self._place = {name: place for place, name in enumerate(pile.names)}
        self._leases: dict[tuple[int, str], tuple[str, float]] = {}  # by image and label ("" for all): tab and end
        self._passed: dict[str, set[int]] = {}  # by tab, images that it does not want; "" those that cannot be read
        self._see = lru_cache(_KEPT)(self._ask)
        self._times = deque[float](maxlen=_PACE)
        self._people: dict[str, tuple[str, float]] = {}  # by tab
        self._asking, self._leasing = Lock(), Lock()
        self._known = [label in predictor.labels for label in pile.doubts.labels]

    def next(self, tab: str) -> list[int]:
        """The image for a page, and the one that will probably follow; fewer at the end."""
        self._leave(tab, grid=False)
        passed = self._passed.get(tab, set()) | self._passed.get("", set())
        left = (
            image
            for image in self.pile.order.tolist()
            if image not in passed and not self.session.is_done(self.pile.names[image]) and self._free(image, "", tab)
        )
        found = list(islice(left, 2))
        self._lease(found[:1], "", tab)
        return found

    def show(self, image: int, tab: str) -> dict[str, Any]:
        """All that the page shows of an image; the model looks at it, if it has not yet."""
        self._lease([image], "", tab)
        prediction, doubts, name = self.look(image), self.pile.doubts, self.pile.names[image]
        decided = self.session.get(name)
        asked = [doubts.labels[label] for label in doubts.choose(image)]
        rows = [self._describe(image, label, prediction, decided) for label in dict.fromkeys((*asked, *decided))]
        return {
            "image": image,
            "name": name,
            "size": list(prediction.size),
            "reason": doubts.explain_image(image),
            "rows": rows,
        }

    def _describe(self, image: int, label: str, prediction: Prediction, decided: Mapping[str, int]) -> dict[str, Any]:
        doubts = self.pile.doubts
        row: dict[str, Any] = {"label": label, "prob": None, "box": None, "reason": "", "state": decided.get(label)}
        if label in doubts.labels:
            place = doubts.labels.index(label)
            given = doubts.given[image, place]
            row |= {"reason": doubts.explain(image, place), "given": None if np.isnan(given) else int(given)}
            row["state"] = decided.get(label, PRESENT if doubts.claims(image, place) else ABSENT)
        if label in prediction.labels:
            tag = prediction.get(label)
            row |= {"prob": tag.prob, "box": tag.box}
        return row

    def describe(self, image: int, label: str) -> dict[str, Any]:
        """A label of an image that somebody adds."""
        return self._describe(image, label, self.look(image), {label: PRESENT})

    def grid(self, tab: str, label: str, *, claimed: bool) -> tuple[list[dict[str, Any]], int]:
        """Images for "are these all cups?", or for "is any of these a cup?"; and how many are left with them."""
        check_known(label, self.pile.doubts.labels, where="review", what="label")
        self._leave(tab, grid=True)
        doubts, place = self.pile.doubts, self.pile.doubts.labels.index(label)
        left = [
            image
            for image in order_label(doubts, place, claimed=claimed).tolist()
            if label not in self.session.get(self.pile.names[image]) and self._free(image, label, tab)
        ]
        self._lease(left[:GRID], label, tab)
        return [self.name_cell(image, label) for image in left[:GRID]], len(left)

    def name_cell(self, image: int, label: str) -> dict[str, Any]:
        """An image of a grid."""
        doubts = self.pile.doubts
        reason = doubts.explain(image, doubts.labels.index(label)).partition(": ")[2] if label in doubts.labels else ""
        return {"image": image, "name": self.pile.names[image], "reason": reason}

    def decide(self, tab: str, entry: Entry) -> None:
        """Put a decision on the disk and give its images back."""
        for image, states in entry.states.items():
            if image not in self._place:
                raise InputError("review", f"{quote(image)} is none of its images", "load the page again")
            for label, state in states.items():
                check_known(label, sorted(self.session.known), where="review", what="label")
                if type(state) is not int or state not in (PRESENT, ABSENT, UNSURE):
                    raise InputError("review", f"{quote(state)} is no state", "give 1, 0 or -1")
        self.session.decide(entry._replace(when=now()))
        self._leave(tab, grid=entry.mode == "grid")
        if entry.mode == "image":
            self._times.append(self._clock())

    def undo(self, who: str, tab: str) -> dict[str, Any] | None:
        """Take back a person's last decision; what the page shows then, None where there is nothing to take back."""
        entry = self.session.undo(who)
        if entry is None:
            return None
        images = [self._place[name] for name in entry.states if name in self._place]
        if entry.mode == "image":
            return {"image": images[0] if images else None, "states": next(iter(entry.states.values()))}
        label = next(label for states in entry.states.values() for label in states)
        self._lease(images, label, tab)
        was = {name: states[label] for name, states in entry.states.items()}
        cells = [self.name_cell(image, label) for image in images]
        return {"label": label, "cells": [{**cell, "state": was[cell["name"]]} for cell in cells]}

    def put_off(self, tab: str, image: int) -> None:
        """Do not show an image to a page again."""
        self._passed.setdefault(tab, set()).add(image)

    def tell(self, tab: str, who: str) -> dict[str, Any]:
        """How far the review is; a page that asks keeps what it has open."""
        at = self._clock()
        with self._leasing:
            self._leases |= {
                key: (tab, at + LEASE_SECONDS) for key, (holder, _) in self._leases.items() if holder == tab
            }
        self._people[tab] = who, at + LEASE_SECONDS
        done = sum(self.session.is_done(name) for name in self.pile.names)
        today, entries = now()[:10], list(self.session.entries.values())
        gaps = [gap for gap in np.diff(list(self._times)).tolist() if gap < _PAUSE]
        pace = len(gaps) / sum(gaps) if gaps and sum(gaps) > 0 else None  # images per second, by all
        return {
            "all": len(self.pile.names),
            "done": done,
            "today": sum(entry.mode == "image" and entry.when[:10] == today for entry in entries),
            "per_hour": None if pace is None else round(3600 * pace),
            "seconds_left": None if pace is None else round((len(self.pile.names) - done) / pace),
            "people": len({name for name, end in self._people.values() if end > at}),
            "undo": any(entry.who == who for entry in entries),
            "fault": self.session.fault,
        }

    def look(self, image: int) -> Prediction:
        """What the model says of an image, which is kept for a while."""
        with self._asking:  # one question at a time
            return self._see(image)

    def _ask(self, image: int) -> Prediction:
        """Ask the model, and rate an image anew that had probabilities of some labels only, as in a file of tags."""
        prediction, doubts = self.predictor(self.pile.paths[image]), self.pile.doubts
        if not np.isnan(doubts.probs[image, self._known]).any():
            return prediction
        opinions = spread(stack_opinions(prediction), prediction.labels, doubts.labels)[:, None]
        found = rate_doubts(
            opinions[0],
            labels=doubts.labels,
            thresholds=doubts.thresholds,
            image_probs=opinions[1],
            patch_probs=opinions[2],
            given=doubts.given[image : image + 1],
            counts=np.nansum(doubts.level, axis=0),
        )
        for name in ("probs", "image_probs", "patch_probs", "level", "doubt", "kind"):
            getattr(doubts, name)[image] = getattr(found, name)[0]
        return prediction

    def _free(self, image: int, label: str, tab: str) -> bool:
        """Whether nobody else has an image open, or that label of it."""
        holder, end = self._leases.get((image, label), (tab, 0.0))
        return holder == tab or end <= self._clock()

    def _lease(self, images: Sequence[int], label: str, tab: str) -> None:
        end = self._clock() + LEASE_SECONDS
        with self._leasing:
            self._leases |= {(image, label): (tab, end) for image in images if self._free(image, label, tab)}

    def _leave(self, tab: str, *, grid: bool) -> None:
        """Forget what a page had open in one of its two modes, and what nobody came back for."""
        at = self._clock()
        with self._leasing:
            self._leases = {
                (image, label): (holder, end)
                for (image, label), (holder, end) in self._leases.items()
                if end > at and (holder != tab or bool(label) != grid)
            }
