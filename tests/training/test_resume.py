"""Runs that are killed by SIGKILL, anywhere and again and again, end bit for bit like one that never stopped."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from run_process import TrainingProcess, make_config, read_run, read_step

from pivotpatch.training.config import RunConfig
from pivotpatch.training.processes import make_accelerator, open_trackers

pytestmark = pytest.mark.slow


def make_reference(config: RunConfig, folder: Path) -> dict[str, object]:
    assert TrainingProcess(folder, config).wait() == 0
    return read_run(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return make_reference(make_config(), tmp_path_factory.mktemp("reference") / "run")


def hear_step(process: TrainingProcess, random_state: random.Random) -> bool:
    """Wait until a few more steps are taken; False where the run ends before."""
    first, last = None, random_state.randint(1, 6)
    while heard := process.hear():
        what, done = heard
        if what == "train":
            first = done if first is None else first
            if done >= first + last - 1:
                return True
    return False


def hear_validation(process: TrainingProcess, _random_state: random.Random) -> bool:
    """Wait until some of the validation pictures are scored."""
    while heard := process.hear():
        if heard[0] == "validate":
            return True
    return False


def see_save(process: TrainingProcess, random_state: random.Random) -> bool:
    """Wait until something is being saved, and then a moment."""
    while process.is_alive():
        if list_leftovers(process.out):
            time.sleep(random_state.choice([0, 0, 0.002, 0.01]))
            return True
    return False


def list_leftovers(folder: Path) -> list[str]:
    """What only a save that is going on, or was cut short, has there."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return [name for name in names if name.startswith((".last.", ".best.")) or name.endswith((".old", ".tmp"))]


MOMENTS: tuple[Callable[[TrainingProcess, random.Random], bool], ...] = (
    hear_step,
    see_save,
    hear_step,
    hear_validation,
    see_save,
)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_is_killed_at_any_moment_ends_the_same(
    accumulate: int, reference: dict[str, object], tmp_path: Path
) -> None:
    """Ten kills each, or more until two hit a save: at random steps, during evaluations and during saves."""
    config, random_state = make_config(f"train.accumulate={accumulate}"), random.Random(accumulate)
    expected = reference if accumulate == 1 else make_reference(config, tmp_path / "reference")
    kills = in_saves = runs = 0

    def goes_on() -> bool:
        return kills < 10 or (in_saves < 2 and kills < 40)  # a save may be over before the signal comes

    while goes_on():
        runs += 1
        out = tmp_path / f"run{runs}"
        process = TrainingProcess(out, config)
        while goes_on() and MOMENTS[kills % len(MOMENTS)](process, random_state):
            process.kill()
            kills += 1
            in_saves += bool(list_leftovers(out))
            process = TrainingProcess(out, None if (out / "config.toml").exists() else config)
        assert process.wait() == 0
        assert read_run(out) == expected
    assert in_saves >= 2


def test_a_run_that_is_killed_at_each_change_of_its_folder_ends_the_same(
    reference: dict[str, object], tmp_path: Path
) -> None:
    """Each start is killed one change later than the one before, so that no place in a save is left out."""
    out, touch, in_between, saved = tmp_path / "run", 8, 0, 0
    status = TrainingProcess(out, make_config(), dies_at_touch=touch).wait()  # the ninth begins the first save
    while status != 0:
        assert status == -signal.SIGKILL
        in_between += (out / "last.old").exists() and not (out / "last").exists()
        whole = [name for name in ("last", "last.old") if (out / name / "state.json").exists()]
        before, saved, touch = saved, read_step(out, whole[0]) if whole else 0, touch + 1
        assert saved >= before  # nothing that was saved is lost
        status = TrainingProcess(out, dies_at_touch=touch).wait()
    assert touch - 8 > 20
    assert in_between > 0  # killed between the two renames of a save
    assert read_run(out) == reference


def test_worker_processes_and_held_pictures_give_the_same_run(reference: dict[str, object], tmp_path: Path) -> None:
    """And so does a killed run whose workers had already decoded what comes next."""
    out = tmp_path / "run"
    process = TrainingProcess(out, make_config("data.hold=nothing", "data.workers=1"))
    while (heard := process.hear()) and heard != ("train", 12):
        pass
    process.kill()
    assert read_step(out) == 8
    assert TrainingProcess(out).wait() == 0
    assert {**read_run(out), "config.toml": None} == reference


def test_tensorboard_forgets_steps_that_are_taken_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = make_config("output.trackers=tensorboard")
    for taken, steps in ((0, range(1, 8)), (0, range(1, 6)), (3, range(4, 10))):
        accelerator = make_accelerator(config, tmp_path)
        with open_trackers(accelerator, config, step=taken):
            for step in steps:
                accelerator.log({"loss": taken + step / 10}, step=step)
    events = accumulator.EventAccumulator(str(tmp_path / "tracks" / "pivotpatch")).Reload().Scalars("loss")
    expected = {**{step: step / 10 for step in (1, 2, 3)}, **{step: 3 + step / 10 for step in range(4, 10)}}
    assert {event.step: pytest.approx(event.value) for event in events} == expected
    assert len(events) == 9
