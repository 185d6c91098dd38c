"""One model for many askers: images that come at about the same time are answered together."""

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from queue import Empty, Queue

from pivotpatch.data.decoding import Decoded, check_header, decode_with_size
from pivotpatch.inference.prediction import Prediction
from pivotpatch.inference.predictor import Predictor

MAX_BYTES = 32_000_000
"""Of an image's file, for whoever takes files from others."""
BATCH = 32
"""Most images that the model sees at once."""
WAIT = 0.004
"""Seconds that an image waits for others."""
CAPACITY = 256
"""Most images that are waited for; one more is refused."""
_DECODERS = min(4, os.cpu_count() or 1)
_LARGE = 20_000_000  # pixels of an image that is decoded while no other such is: it may take up to 0.9 GB


class BusyError(Exception):
    """So many wait already that one more is refused."""


class BrokenError(Exception):
    """The model failed, which no other image would mend; whoever asked is not told how, the terminal is."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"server: it failed ({type(cause).__name__}); its terminal says more")


@dataclass(frozen=True)
class _Job:
    """An image on its way: its file's bytes, and whoever waits for the answer."""

    content: bytes
    name: str
    answer: "Future[Prediction]" = field(default_factory=Future)


class Batcher:
    """Answers images from many threads with one model.

    A few threads decode; one collects what is decoded for a moment and asks the model about all of it at once. While
    the model works, the next batch gathers.
    """

    def __init__(
        self, predictor: Predictor, *, batch_size: int = BATCH, wait: float = WAIT, capacity: int = CAPACITY
    ) -> None:
        """Start the threads.

        Args:
            predictor: answers the images.
            batch_size: most images that it is asked about at once.
            wait: seconds that the first image of a batch waits for others.
            capacity: most images that may be on their way; `submit` refuses one more.
        """
        self.predictor = Predictor(predictor.engine, batch_size=batch_size)
        self._wait = wait
        self._room = threading.Semaphore(capacity)
        self._decoders = ThreadPoolExecutor(_DECODERS, "decoder")
        self._large_decoder = ThreadPoolExecutor(1, "large decoder")
        self._decoded: Queue[tuple[_Job, Decoded] | None] = Queue()
        self._worker = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._worker.start()

    def submit(self, content: bytes, *, name: str = "picture") -> "Future[Prediction]":
        """Ask about an image.

        Args:
            content: the bytes of its file.
            name: what messages call it.

        Returns:
            What will hold the answer, which is that of the file on a disk; of an image that cannot be read, the
            `InputError`; a `BrokenError` where the model failed.
        """
        if not self._room.acquire(blocking=False):
            raise BusyError("too many images wait for an answer; try again in a moment")
        job = _Job(content, name)
        job.answer.add_done_callback(lambda _: self._room.release())
        self._decoders.submit(self._decode, job)
        return job.answer

    def is_alive(self) -> bool:
        """Whether whoever asks will be answered."""
        return self._worker.is_alive()

    def close(self, *, drop: bool = False) -> None:
        """Answer what was asked so far, or drop what is not begun, then end the threads."""
        self._decoders.shutdown(cancel_futures=drop)
        self._large_decoder.shutdown(cancel_futures=drop)
        self._decoded.put(None)
        self._worker.join()

    def _decode(self, job: _Job) -> None:
        if not job.answer.set_running_or_notify_cancel():  # whoever asked has gone
            return
        try:
            if check_header(BytesIO(job.content), name=job.name) > _LARGE:
                self._large_decoder.submit(self._decode_pixels, job)  # so that small ones need not wait for it
            else:
                self._decode_pixels(job)
        except Exception as error:  # whatever it is, it is the asker's to hear
            job.answer.set_exception(error)

    def _decode_pixels(self, job: _Job) -> None:
        side = self.predictor.engine.picture_size
        try:
            self._decoded.put((job, decode_with_size(job.content, size=(side, side), name=job.name)))
        except Exception as error:  # as above
            job.answer.set_exception(error)

    def _work(self) -> None:
        while (first := self._decoded.get()) is not None:
            self._answer([first, *self._collect()])

    def _collect(self) -> list[tuple[_Job, Decoded]]:
        """What else is decoded within the time that a batch waits."""
        found: list[tuple[_Job, Decoded]] = []
        end = time.monotonic() + self._wait
        with suppress(Empty):
            while len(found) + 1 < self.predictor.batch_size:
                item = self._decoded.get(timeout=max(0.0, end - time.monotonic()))
                if item is None:
                    self._decoded.put(None)  # the end, for `_work` to see
                    break
                found.append(item)
        return found

    def _answer(self, batch: list[tuple[_Job, Decoded]]) -> None:
        try:
            predictions = self.predictor([decoded.pixels for _, decoded in batch])
        except Exception as error:  # as above: the thread must live on
            for job, _ in batch:
                job.answer.set_exception(_blame(error))
            return
        for (job, decoded), prediction in zip(batch, predictions, strict=True):
            job.answer.set_result(replace(prediction, size=decoded.size))


def _blame(error: Exception) -> BrokenError:
    broken = BrokenError(error)
    broken.__cause__ = error
    return broken
