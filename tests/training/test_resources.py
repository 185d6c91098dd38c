"""What "auto" is decided to be, from numbers alone."""

from typing import Literal

import pytest

from pivotpatch.training.processes import FreeMemory, choose_compile, choose_hold

GB = 10**9


@pytest.mark.parametrize(
    ("images", "epochs", "device", "host", "place"),
    [
        (4, 12, 130, 100, "device"),  # coco256 on a large GPU
        (49, 80, 130, 120, "memory"),  # COCO at 448 pixels: a step needs the GPU's memory
        (49, 80, 130, 60, "nothing"),
        (49, 80, 0, 99, "memory"),  # no GPU
        (2, 80, 8, 1, "device"),  # a quarter of it
        (2.1, 80, 8, 1, "nothing"),
        (4, 1, 130, 100, "nothing"),  # each image is read once anyway
    ],
)
def test_images_are_held_where_they_fit(
    images: float, epochs: int, device: int, host: int, place: Literal["device", "memory", "nothing"]
) -> None:
    free = FreeMemory(device * GB, host * GB)
    chosen = choose_hold("auto", image_bytes=int(images * GB), epochs=epochs, free=free)
    assert chosen.value == place
    assert chosen.why.startswith(f"data.hold is {place}: ")
    assert choose_hold(place, image_bytes=2**60, epochs=2, free=FreeMemory(0, 0)).value == place  # the user decides


@pytest.mark.parametrize(
    ("steps", "seconds", "compiled"),
    [
        (50_000, 0.25, True),  # ResNet-50 at 448 pixels
        (400, 0.25, False),
        (400, 3.0, True),
        (5_000, 0.02, False),  # a small model
        (50_000, 0.02, True),
        (10**9, None, False),  # never on a CPU
    ],
)
def test_a_run_is_compiled_where_that_pays(steps: int, seconds: float | None, compiled: bool) -> None:
    chosen = choose_compile("auto", steps_left=steps, seconds_per_step=seconds)
    assert chosen.value == compiled
    assert chosen.why.startswith(f"precision.compile is {str(compiled).lower()}: ")
    for setting in (True, False):
        assert choose_compile(setting, steps_left=steps, seconds_per_step=seconds).value is setting
