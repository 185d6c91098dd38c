import asyncio
from io import BytesIO

import pytest
from made_engines import FixedEngine
from PIL import Image
from starlette.exceptions import HTTPException

from pivotpatch.app.batching import Batcher
from pivotpatch.errors import InputError

COLOURS = ("red", "green", "blue")


def paint(red: int) -> bytes:
    written = BytesIO()
    Image.new("RGB", (12, 10), (red, 0, 255 - red)).save(written, "PNG")
    return written.getvalue()


def test_everyone_gets_the_own_answer_and_what_gathers_is_the_next_batch() -> None:
    engine = FixedEngine(COLOURS, None)

    async def ask_all() -> None:
        batcher = Batcher(engine, batch_size=16)
        engine.gate.clear()
        asked = [asyncio.create_task(batcher.ask(paint(0)))]
        await asyncio.to_thread(engine.entered.wait, 30)
        asked += [asyncio.create_task(batcher.ask(paint(red))) for red in range(1, 41)]
        while len(batcher._waiting) < 40:
            await asyncio.sleep(0.01)
        engine.gate.set()
        for red, prediction in enumerate(await asyncio.gather(*asked)):
            assert prediction.probs.tolist() == pytest.approx([red / 255, 0, 1 - red / 255], abs=1e-6)
            assert prediction.size == (10, 12)
        batcher.close()

    asyncio.run(ask_all())
    assert engine.batches == [1, 16, 16, 8]


def test_one_more_than_the_capacity_is_refused_and_whoever_goes_leaves_the_place() -> None:
    engine = FixedEngine(COLOURS, None)

    async def ask_too_many() -> None:
        batcher = Batcher(engine, capacity=3)
        engine.gate.clear()
        asked = [asyncio.create_task(batcher.ask(paint(red))) for red in range(3)]
        await asyncio.to_thread(engine.entered.wait, 30)
        with pytest.raises(HTTPException, match="too many images wait for an answer; try again"):
            await batcher.ask(paint(4))
        asked[2].cancel()
        await asyncio.sleep(0)
        asked[2] = asyncio.create_task(batcher.ask(paint(5)))
        engine.gate.set()
        assert [round(255 * float(each.probs[0])) for each in await asyncio.gather(*asked)] == [0, 1, 5]
        for _ in range(4):
            with pytest.raises(InputError):
                await batcher.ask(b"")
        await batcher.ask(paint(6))
        batcher.close()

    asyncio.run(ask_too_many())
