"""One model for many askers: images that come at about the same time are answered together."""

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from io import BytesIO

from starlette.exceptions import HTTPException

from pivotpatch.errors import InputError
from pivotpatch.runtime.decoding import Decoded, check_header
from pivotpatch.runtime.engine import Engine
from pivotpatch.runtime.prediction import Prediction
from pivotpatch.runtime.predictor import ModelError, Read, answer_batch, decode_for

MAX_BYTES = 32_000_000
"""Of an image's file, for whoever takes files from others."""
BATCH = 32
"""Most images that the model sees at once."""
WAIT = 0.004
"""Seconds that an image waits for others."""
CAPACITY = 256
"""Most images that are waited for; one more is refused."""
_DECODERS = min(4, os.cpu_count() or 1)
_LOG = logging.getLogger(__name__)
_LARGE = 20_000_000  # pixels of an image that is decoded while no other such is: it may take up to 0.9 GB


def fail(error: Exception) -> HTTPException:
    """What whoever asked is told where something failed; the terminal is told how."""
    if isinstance(error, ModelError):
        _LOG.error("%s", error)
        return HTTPException(500, f"model: {error.parts[1]}; the server's terminal says more")
    _LOG.error("%s", error, exc_info=error)
    return HTTPException(500, f"server: it failed ({type(error).__name__}); its terminal says more")


class Batcher:
    """Answers images with one model, for the tasks of one event loop.

    A few threads decode. What is decoded within a moment is one batch for the model, which has a thread of its own;
    while it works, the next batch gathers.
    """

    def __init__(self, engine: Engine, *, batch_size: int = BATCH, capacity: int = CAPACITY) -> None:
        """Ask an engine about at most `batch_size` images at once; `capacity` may be on their way."""
        self.engine, self._most, self._room = engine, batch_size, capacity
        self._decoders = ThreadPoolExecutor(_DECODERS, "decoder")
        self._model = ThreadPoolExecutor(1, "model")
        self._one_large = threading.Lock()
        self._waiting: list[tuple[Decoded, asyncio.Future[Prediction]]] = []
        self._work: asyncio.Task[None] | None = None

    async def ask(self, content: bytes, *, name: str = "image") -> Prediction:
        """What is in an image, by the bytes of its file; the same as of the file on a disk."""
        if self._room == 0:
            raise HTTPException(503, "too many images wait for an answer; try again in a moment")
        self._room -= 1
        try:
            loop = asyncio.get_running_loop()
            decoded = await loop.run_in_executor(self._decoders, self._decode, content, name)
            answer: asyncio.Future[Prediction] = loop.create_future()
            self._waiting.append((decoded, answer))
            if self._work is None:
                self._work = loop.create_task(self._answer_all())
            return await answer
        finally:
            self._room += 1

    def close(self) -> None:
        """Drop what is not begun, and end the threads."""
        for threads in (self._decoders, self._model):
            threads.shutdown(cancel_futures=True)

    def _decode(self, content: bytes, name: str) -> Decoded:
        large = check_header(BytesIO(content), name=name) > _LARGE
        with self._one_large if large else nullcontext():
            return decode_for(self.engine, content, name=name)

    async def _answer_all(self) -> None:
        """Answer batch after batch until nobody waits."""
        loop, most = asyncio.get_running_loop(), self._most
        while self._waiting:
            if len(self._waiting) < most:
                await asyncio.sleep(WAIT)
            batch, self._waiting = self._waiting[:most], self._waiting[most:]
            read: list[Read | InputError] = [(None, decoded.pixels, decoded) for decoded, _ in batch]
            found: Sequence[Prediction | Exception]
            try:
                found = await loop.run_in_executor(self._model, answer_batch, self.engine, read)
            except Exception as error:  # whatever it is, the next batch is answered
                found = [fail(error)] * len(batch)
            for (_, answer), each in zip(batch, found, strict=True):
                if answer.done():  # whoever asked has gone
                    continue
                if isinstance(each, Exception):
                    answer.set_exception(each)
                else:
                    answer.set_result(each)
        self._work = None
