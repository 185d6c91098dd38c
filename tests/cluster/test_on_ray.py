"""Jobs on a real Ray cluster of this machine: whatever ends, the rows are those of one process, each once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_engines import Trouble
from PIL import Image
from run_process import write_pictures

import pivotpatch.app
from pivotpatch.cli.main import main
from pivotpatch.cluster import on_ray
from pivotpatch.cluster.on_ray import tag_on_ray
from pivotpatch.errors import InputError
from pivotpatch.inference.engine import open_engine
from pivotpatch.runtime.bulk import tag_pictures
from pivotpatch.runtime.files import find_images
from pivotpatch.runtime.parts import Summary
from pivotpatch.runtime.predictor import Predictor

COUNT, BROKEN = 400, (0, 77, 399)
NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (pip install 'pivotpatch[ray]')")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster with room for three workers."""
    ray = pytest.importorskip("ray")
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the workers to find engines of the tests
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    patch.undo()


@pytest.fixture
def here(here: Path) -> Path:
    """A folder with 400 images, three of which cannot be read, and their tags by one process in one.jsonl."""
    write_pictures(Path("pictures"), COUNT, broken=BROKEN)
    Path("workers").mkdir()
    tag_pictures(Trouble(), find_images(["pictures"]), Path("one.jsonl"))
    return here


def tag(
    out: str, engine: Trouble | None = None, *, progress: Callable[[int], None] = lambda _: None, **options: Any
) -> Summary:
    engine = engine or Trouble(folder=str(Path("workers").resolve()), pause=0.05)
    summary = tag_pictures(
        engine,
        find_images(["pictures"]),
        Path(out),
        batch_size=8,
        progress=lambda _what, done, _of: progress(done),
        work=tag_on_ray(engine.open, engine.digest(), workers=2, **options),
    )
    assert summary is not None
    return summary


def check_same(out: str, *, but: int | None = None) -> None:
    """Rows and failures are those of one process, apart from an image."""
    for name in ("{}", "{}.failures.jsonl"):
        one, other = (Path(name.format(each)).read_text("utf-8").splitlines() for each in ("one.jsonl", out))
        kept = [[row for row in rows if but is None or f"{but:04d}.png" not in row] for rows in (one, other)]
        assert kept[0] == kept[1]
    assert not Path(f"{out}.parts").exists()


@pytest.mark.slow
@NEEDS_RAY
@pytest.mark.filterwarnings("ignore")
class TestCluster:
    """On one cluster, for it takes seconds to start."""

    def test_an_actor_and_a_process_that_are_killed_are_replaced(
        self, address: str, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drivers: list[Any] = []
        hire = on_ray._Driver._hire

        def note(driver: Any) -> None:
            drivers.append(driver)
            hire(driver)

        monkeypatch.setattr(on_ray._Driver, "_hire", note)
        ended: list[str] = []

        def end(done: int) -> None:
            if done >= 40 and not ended:
                ended.append("process")
                os.kill(int(next(Path("workers").iterdir()).name), signal.SIGKILL)
            elif done >= 150 and len(ended) == 1:
                ended.append("actor")
                drivers[0].ray.kill(drivers[0].hands[0].actor)

        said: list[str] = []
        summary = tag("tags.jsonl", progress=end, say=said.append)
        assert (summary.tagged, summary.failed, ended) == (COUNT - 3, 3, ["process", "actor"])
        assert len(list(Path("workers").iterdir())) == 4
        assert sum("a worker ended" in line for line in said) == 2
        check_same("tags.jsonl")

    def test_a_driver_that_is_killed_is_followed_by_another_engine_and_the_other_way_round(
        self, address: str, here: Path
    ) -> None:
        program = (
            "import sys; from test_on_ray import tag; sys.stdout.write('on\\n'); sys.stdout.flush();"
            f" tag('tags.jsonl', address={address!r})"
        )
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        driver = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths})
        while not list(Path().glob("tags.jsonl.parts/0*")):
            assert driver.poll() is None
            time.sleep(0.05)
        driver.kill()
        driver.wait()
        begun = len(list(Path().glob("tags.jsonl.parts/0*")))
        assert begun > 0
        assert not Path("tags.jsonl").exists()
        batches, engine = [False, False], Trouble()
        asked: dict[str, Any] = {"batch_size": 8, "stopping": lambda: not batches or batches.pop()}
        # One process does a little, then Ray the rest.
        assert tag_pictures(engine, find_images(["pictures"]), Path("tags.jsonl"), **asked) is None
        tag("tags.jsonl")
        check_same("tags.jsonl")

    def test_the_one_image_that_ends_its_worker_becomes_a_row(self, address: str, here: Path) -> None:
        Image.fromarray(np.full((9, 7, 3), (1, 2, 3), np.uint8)).save("pictures/0123.png")
        engine = Trouble(folder=str(here / "workers"), deadly=(1, 2, 3))
        summary = tag("tags.jsonl", engine)
        assert (summary.tagged, summary.failed) == (COUNT - 4, 4)
        rows = [json.loads(line) for line in Path("tags.jsonl.failures.jsonl").read_text("utf-8").splitlines()]
        assert rows[2]["picture"] == "pictures/0123.png"
        assert rows[2]["error"].startswith("pictures/0123.png: its worker ended each time (")
        check_same("tags.jsonl", but=123)

    def test_a_worker_that_falls_silent_is_replaced(self, address: str, here: Path) -> None:
        engine = Trouble(folder=str(here / "workers"), hangs_once=True)
        said: list[str] = []
        tag("tags.jsonl", engine, silence=3, say=said.append)
        assert any("it has not answered for 3 s" in line for line in said)
        check_same("tags.jsonl")
        for path in (here / "workers").glob("[0-9]*"):  # it is not there to end itself
            try:
                os.kill(int(path.name), signal.SIGKILL)
            except ProcessLookupError:
                continue

    def test_the_verb_stops_and_goes_on_and_says_what_one_process_says(
        self, address: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        words = ["predict", "pictures/00*.png", "--effort", "0", "--out"]
        assert main([*words, "a.jsonl"]) == 0
        ray = ["--engine", "ray", "--address", address, "--workers", "2"]
        look = on_ray._Driver._look_around

        def interrupt(driver: Any) -> None:
            look(driver)
            if any(hand.shard for hand in driver.hands):
                monkeypatch.undo()
                monkeypatch.chdir(here)
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(on_ray, "_POLL", 0.02)  # else all may be done before the first look
        monkeypatch.setattr(on_ray._Driver, "_look_around", interrupt)
        assert main([*words, "b.jsonl", *ray]) == 128 + signal.SIGTERM
        assert not Path("b.jsonl").exists()
        assert main([*words, "b.jsonl", *ray]) == 0
        assert Path("a.jsonl").read_text() == Path("b.jsonl").read_text()
        assert "wrote b.jsonl, 98 images" in capsys.readouterr().err

    def test_workers_with_half_a_gpu_each_say_what_onnx_runtime_says(self, address: str, here: Path) -> None:
        """Or with torch on the CPU, where there is no GPU."""
        gpu = torch.cuda.is_available()
        images = list(find_images([str(Path(pivotpatch.app.__file__).parent / "page")])) * 4
        engine = Predictor.load(effort=0).engine
        tag_pictures(engine, iter(images), Path("cpu.jsonl"))
        opened = partial(open_engine, "tagger", device="cuda" if gpu else "cpu", effort=0)
        work = tag_on_ray(opened, engine.digest(), workers=2, gpus=0.5 if gpu else 0)
        tag_pictures(engine, iter(images), Path("gpu.jsonl"), work=work)
        one, other = (
            [json.loads(line) for line in Path(name).read_text("utf-8").splitlines()]
            for name in ("cpu.jsonl", "gpu.jsonl")
        )
        assert len(one) == 12
        for expected, row in zip(one, other, strict=True):
            assert (row["picture"], row["labels"]) == (expected["picture"], expected["labels"])
            assert row["probs"] == pytest.approx(expected["probs"], abs=0.02)

    def test_what_is_wrong_everywhere_ends_the_work(self, address: str, here: Path) -> None:
        engine = Trouble(folder=str(here / "workers"))
        with pytest.raises(InputError, match="a worker has opened another one"):
            tag_pictures(engine, find_images(["pictures"]), Path("a.jsonl"), work=tag_on_ray(engine.open, "other"))
        work = tag_on_ray(engine.open, "means")
        with pytest.raises(InputError, match=r"\d{4}.png: is in none of the known formats"):
            tag_pictures(engine, find_images(["pictures"]), Path("b.jsonl"), on_error="error", work=work)
