"""What "auto" is decided to be, from numbers alone."""

import subprocess
import sys
from typing import Literal

import pytest
from run_process import make_config

from pivotpatch.training.build import build_run
from pivotpatch.training.processes import make_accelerator
from pivotpatch.training.resources import FreeMemory, choose_compile, choose_hold, measure_free_memory
from pivotpatch.training.step import compile_run

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
    assert chosen.place == place
    assert chosen.why.startswith(f"data.hold is {place}: ")
    assert choose_hold(place, image_bytes=2**60, epochs=2, free=FreeMemory(0, 0)).place == place  # the user decides


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
    assert chosen.compiled == compiled
    assert chosen.why.startswith(f"precision.compile is {str(compiled).lower()}: ")
    for setting in (True, False):
        assert choose_compile(setting, steps_left=steps, seconds_per_step=seconds).compiled is setting


def test_processes_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = make_accelerator(make_config())
    alone = measure_free_memory(accelerator).host
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert measure_free_memory(accelerator).host == pytest.approx(alone / 4, rel=0.2)


def test_a_run_says_what_was_chosen() -> None:
    config = make_config("data.hold=nothing", "precision.compile=false")
    run = build_run(config, make_accelerator(config))
    compile_run(run, steps_left=10)
    assert run.choices == {"data.hold": "data.hold is nothing", "precision.compile": "precision.compile is false"}
    assert (run.held_bytes, run.compiled) == (0, False)
    auto = build_run(make_config(), make_accelerator(config), decode=False)
    assert auto.held_bytes == 63 * 3 * 32**2
    assert auto.choices["data.hold"].partition(": ")[0] in ("data.hold is memory", "data.hold is device")


def test_a_configuration_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from pivotpatch.training import list_recipes, load_config\n"
        "print(len([load_config(recipe.path) for recipe in list_recipes()]) > 30, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
