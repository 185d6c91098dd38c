"""Engines whose answers are known without a model."""

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pivotpatch.runtime.engine import Answer, Array, Pixels


@dataclass
class Means:
    """Says of an image the mean of its red, green and blue; with a grid, each patch has its share of that."""

    labels: tuple[str, ...] = ("red", "green", "blue")
    thresholds: tuple[float, ...] | None = None
    preferences: Mapping[str, tuple[float, ...]] = field(default_factory=dict, kw_only=True)
    picture_size: int = 8
    grid: int = 0
    overlap: float = 0.0
    effort: float = 1.0
    name: str = "means"
    interpolation: str = "bilinear"

    def ask(self, images: Pixels) -> Answer[Array]:
        """Answer images (B,S,S,3)."""
        side, half = self.picture_size, self.picture_size // 2
        assert images.dtype == np.uint8
        assert images.shape[1:] == (side, side, 3)
        probs = images.mean((1, 2), dtype=np.float32) / 255
        if not self.grid:
            return Answer(probs, probs)
        patches = images.reshape(-1, 2, half, 2, half, 3).mean((2, 4), dtype=np.float32).reshape(-1, 4, 3) + 1e-6
        return Answer(probs, probs, probs, patches / patches.sum(axis=1, keepdims=True))

    def digest(self) -> str:
        """Of the one model that there is."""
        return "means"


class FixedEngine(Means):
    """Its answer is set; it can be held up, and made to fail.

    Attributes:
        gate: answers wait until it is set.
        fault: raised in the place of an answer.
        batches: how many images it was asked about each time.
    """

    def __init__(
        self,
        labels: tuple[str, ...] = ("cat",),
        probs: tuple[float, ...] | None = (0.9,),
        *,
        image_probs: tuple[float, ...] | None = None,
        patched: bool = False,
    ) -> None:
        """Say `probs` of every image; None for the means of its channels."""
        super().__init__(labels, (0.5,) * len(labels), grid=2 if patched else 0)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.batches: list[int] = []
        self._probs, self._image_probs = probs, image_probs or probs

    def ask(self, images: Pixels) -> Answer[Array]:
        """Answer images (B,S,S,3) once the gate is open."""
        self.batches.append(len(images))
        self.entered.set()
        self.gate.wait(30)
        if self.fault:
            raise self.fault
        if self._probs is None:
            return super().ask(images)
        rows = np.ones((len(images), 1), np.float32)
        probs, image_probs = (rows * np.array(each, np.float32) for each in (self._probs, self._image_probs))
        if not self.grid:
            return Answer(probs, image_probs)
        weights = rows[..., None] * np.array([0.1, 0.2, 0.6, 0.1], np.float32)[:, None] * np.ones_like(probs)[:, None]
        return Answer(probs, image_probs, np.full_like(probs, 0.25), weights)


@dataclass
class Trouble(Means):
    """Makes trouble where it runs; for workers of a cluster.

    Attributes:
        folder: where it leaves a file named by its process.
        pause: seconds that it takes for each answer.
        deadly: an image of this colour ends the process.
        hangs_once: the first one of all falls silent.
    """

    thresholds: tuple[float, ...] | None = (0.5, 0.4, 0.3)
    folder: str = ""
    pause: float = 0.0
    deadly: tuple[int, int, int] | None = None
    hangs_once: bool = False

    def open(self) -> "Trouble":
        """As a worker does."""
        (Path(self.folder) / str(os.getpid())).touch()
        return self

    def ask(self, images: Pixels) -> Answer[Array]:
        """Answer images (B,S,S,3), or not."""
        time.sleep(self.pause)
        if self.deadly is not None and (images == np.array(self.deadly, np.uint8)).all((1, 2, 3)).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if self.hangs_once:
            with suppress(FileExistsError):
                (Path(self.folder) / "hung").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().ask(images)
