import time
from collections.abc import Iterator
from concurrent.futures import Future
from io import BytesIO

import pytest
import torch
from app_process import FixedEngine
from PIL import Image

from pivotpatch.app.batching import Batcher, BrokenError, BusyError
from pivotpatch.errors import InputError
from pivotpatch.inference.engine import Answer
from pivotpatch.inference.predictor import Predictor


class Means(FixedEngine):
    """An engine whose answer is known, the means of the channels."""

    def __init__(self) -> None:
        super().__init__(("red", "green", "blue"), (0.0,) * 3)
        self.batches: list[int] = []

    def __call__(self, pictures: torch.Tensor) -> Answer:
        self.batches.append(len(pictures))
        super().__call__(pictures)
        probs = pictures.float().mean((2, 3)) / 255
        return Answer(probs, probs)


@pytest.fixture
def engine() -> Means:
    return Means()


@pytest.fixture
def batcher(engine: Means) -> Iterator[Batcher]:
    made = Batcher(Predictor(engine), batch_size=16, wait=0.01, capacity=100)
    yield made
    engine.gate.set()
    made.close()


def paint(red: int, *, size: tuple[int, int] = (12, 10)) -> bytes:
    written = BytesIO()
    Image.new("RGB", size, (red, 0, 255 - red)).save(written, "PNG")
    return written.getvalue()


def test_everyone_gets_the_own_answer_and_what_gathers_is_the_next_batch(batcher: Batcher, engine: Means) -> None:
    engine.gate.clear()
    answers = [batcher.submit(paint(0))]
    assert engine.entered.wait(30)
    answers += [batcher.submit(paint(red)) for red in range(1, 41)]
    while batcher._decoded.qsize() < 40:
        time.sleep(0.01)
    engine.gate.set()
    for red, answer in enumerate(answers):
        prediction = answer.result(30)
        assert prediction.probs.tolist() == pytest.approx([red / 255, 0, 1 - red / 255], abs=1e-6)
        assert prediction.size == (10, 12)
    assert engine.batches == [1, 16, 16, 8]


def test_one_more_than_the_capacity_is_refused_until_there_is_room(engine: Means) -> None:
    batcher = Batcher(Predictor(engine), capacity=3)
    engine.gate.clear()
    waiting = [batcher.submit(paint(red)) for red in range(3)]
    with pytest.raises(BusyError, match="too many images wait for an answer; try again"):
        batcher.submit(paint(4))
    engine.gate.set()
    for answer in waiting:
        answer.result(30)
    for _ in range(4):  # each leaves its place to the next
        batcher.submit(paint(5)).result(30)
    with pytest.raises(InputError):
        batcher.submit(b"").result(30)
    batcher.submit(paint(6)).result(30)
    batcher.close()


def test_a_failure_of_the_network_is_told_and_the_next_picture_is_answered(batcher: Batcher, engine: Means) -> None:
    engine.fault = RuntimeError("out of order")
    with pytest.raises(BrokenError, match=r"^server: it failed \(RuntimeError\); its terminal says more$") as told:
        batcher.submit(paint(0)).result(30)
    assert str(told.value.__cause__) == "out of order"
    engine.fault = None
    assert batcher.submit(paint(0)).result(30).probs.tolist() == [0, 0, 1]


def test_who_goes_away_before_the_turn_costs_nothing(engine: Means) -> None:
    batcher = Batcher(Predictor(engine), capacity=1)
    gone: Future[object] = Future()
    batcher._decoders.submit(gone.result)  # keeps one decoder busy, and with as many again all of them
    for _ in range(batcher._decoders._max_workers - 1):
        batcher._decoders.submit(gone.result)
    left = batcher.submit(paint(1))
    assert left.cancel()
    stays = batcher.submit(paint(255))  # there is room again at once
    gone.set_result(None)
    assert stays.result(30).probs.tolist() == [1, 0, 0]
    assert engine.batches == [1]
    batcher.close()
