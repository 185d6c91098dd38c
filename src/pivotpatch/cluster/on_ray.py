"""A tagging job on a Ray cluster: its workers take shards of the list and write their parts, this process counts.

The state of a job is its parts and nothing else (`runtime/parts.py`), so that Ray only has to run workers: whoever of
them or of the drivers ends, what is not there as a part is done again. Ray's own checkpoints are not used.
"""

import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pivotpatch.errors import InputError, explaining, import_extra, quote_fault
from pivotpatch.runtime.bulk import Work
from pivotpatch.runtime.engine import Engine
from pivotpatch.runtime.parts import SHARD, TagJob

_SHARDS_EACH = 8  # per worker, where there are few images
_SMALLEST = 64
_POLL = 1.0  # seconds between two looks at the workers
_PATIENCE = 60.0  # seconds after which to say that no worker has started
_ENDING = 30.0  # seconds that workers have to keep what they have done when the work is stopped
_MOST_ENDS = 40  # workers that end one after the other, with nothing done between, until the work is given up


def tag_on_ray(
    open_engine: Callable[[], Engine],
    digest: str,
    *,
    address: str | None = None,
    workers: int | None = None,
    cpus: float = 1,
    gpus: float = 0,
    silence: float = 600,
    say: Callable[[str], None] = lambda _: None,
) -> Work:
    """What `tag_pictures` takes as `work`: the same on a Ray cluster. All machines must see the images and the output.

    A worker that ends, or that has nothing to tell for `silence` seconds, is replaced, and what it has not written is
    given to another. A shard whose workers end again and again is halved down to the image that does it, which becomes
    a row that could not be read. Workers that wait for room are what Ray's autoscaler goes by.

    Args:
        open_engine: opens the model in a worker.
        digest: of the model, which each worker's must have.
        address: of a cluster ("auto": the one that this machine is part of); by default Ray starts here and ends after.
        workers: how many; as many as the cluster has room for by default.
        cpus: cores per worker.
        gpus: GPUs per worker, also a part of one.
        silence: seconds.
        say: told what a person at the driver should know.
    """
    ray = import_extra("ray", "ray")

    def work(job: TagJob, gaps: list[range], tag: Callable[..., bool], goes_on: Callable[[int], bool]) -> bool:
        with _connected(ray, address):
            room = _count_room(ray, cpus, gpus)
            if room == 0 and address is None:
                wrong = f"Ray on this machine has no room for a worker with {cpus:g} CPUs and {gpus:g} GPUs"
                raise InputError("--engine ray", wrong, "ask for less, or name a cluster with --address")
            count = workers or max(room, 1)
            shards = _cut(gaps, count)
            start = ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=2)(_Worker).remote
            given = open_engine, job.out.absolute(), partial(tag, threads=max(int(cpus), 1))
            driver = _Driver(ray, job, lambda: start(*given), digest, shards, silence, say)
            return driver.run(min(count, len(shards)), goes_on)

    return work


def _cut(gaps: list[range], workers: int) -> deque["_Shard"]:
    """Shards of about 10,000 images, smaller where there are few for so many workers.

    >>> [shard.stretch for shard in _cut([range(100), range(150, 250)], 1)]
    [range(0, 64), range(64, 100), range(150, 214), range(214, 250)]
    """
    size = min(max(sum(map(len, gaps)) // (workers * _SHARDS_EACH), _SMALLEST), SHARD)
    return deque(_Shard(gap[at : at + size]) for gap in gaps for at in range(0, len(gap), size))


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to a cluster, or start one here, unless this process has done so."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent home
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of each worker without a GPU
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    local: dict[str, Any] = {} if address else {"include_dashboard": False}
    todo = "start one with `ray start --head`, or leave out --address"
    with explaining(address or "ray", "there is no Ray cluster to be had", todo):  # for many kinds of reasons
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **local)
    try:
        for number, handler in handlers.items():  # Ray has put its own in their place
            signal.signal(number, handler)
        yield
    finally:
        ray.shutdown()


def _count_room(ray: Any, cpus: float, gpus: float) -> int:
    """How many workers a cluster has room for."""
    has = ray.cluster_resources()
    rooms = [has.get(name, 0) / each for name, each in (("CPU", cpus), ("GPU", gpus)) if each > 0]
    return int(min(rooms, default=1) + 1e-6)


def _explain(error: Exception) -> str:
    """What Ray says of a worker that failed: the error it met, or how it ended."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return quote_fault(ValueError(raised[-1] if raised else "".join(lines[:1])))


class _Worker:
    """An actor: tags shards in one thread, and tells how far it is in another."""

    def __init__(self, open_engine: Callable[[], Engine], out: Path, tag: Callable[..., bool]) -> None:
        self._open, self._tag, self._job = open_engine, tag, TagJob(out)
        self._done, self._stopping = 0, False

    def prepare(self) -> str | InputError:
        """Open the model and the job; the model's digest, or what is wrong."""
        try:
            self._engine = self._open()
            self._job.read_settings()
            return self._engine.digest()
        except InputError as error:
            return error

    def tag(self, first: int, after: int) -> bool | InputError:
        """Tag a stretch of the list; whether all of it is done, or why the work must end."""
        self._done = 0
        try:
            return self._tag(self._job, self._engine, range(first, after), self._count)
        except InputError as error:
            return error

    def _count(self, more: int) -> bool:
        self._done += more
        return not self._stopping

    def count_done(self) -> int:
        """Images of its shard that are done."""
        return self._done

    def stop(self) -> None:
        """End after this batch."""
        self._stopping = True


@dataclass
class _Shard:
    stretch: range
    ends: int = 0  # workers that ended at it


@dataclass(eq=False)
class _Hand:
    """A worker as the driver knows it."""

    actor: Any
    task: Any  # that it does; None for nothing
    shard: _Shard | None = None  # None until the model is open
    counted: int = 0
    news: float = field(default_factory=time.monotonic)
    asked: Any = None  # how far it is


@dataclass
class _Driver:
    """Gives shards to workers until all are done."""

    ray: Any
    job: TagJob
    start: Callable[[], Any]
    digest: str
    left: deque[_Shard]
    silence: float
    say: Callable[[str], None]
    hands: list[_Hand] = field(default_factory=list)
    started: bool = False  # whether any worker has opened the model
    in_a_row: int = 0  # workers that ended with nothing done between
    fresh: int = 0  # images done since it was last told

    def run(self, workers: int, goes_on: Callable[[int], bool]) -> bool:
        """Do all shards; False where it was told to stop."""
        begun, looked, told = time.monotonic(), 0.0, False
        for _ in range(workers):
            self._hire()
        try:
            while self.left or any(hand.shard for hand in self.hands):
                idle = [hand for hand in self.hands if hand.task is None]
                while self.left and idle:
                    self._give(idle.pop(), self.left.popleft())
                tasks = {hand.task: hand for hand in self.hands if hand.task is not None}
                for task in self.ray.wait(list(tasks), timeout=_POLL)[0]:
                    self._hear(tasks[task])
                if time.monotonic() - looked > _POLL:
                    self._look_around()
                    looked = time.monotonic()
                if not told and time.monotonic() - begun > _PATIENCE and not any(each.shard for each in self.hands):
                    self.say("no worker has started; Ray has no room for one, or is still making it")
                    told = True
                fresh, self.fresh = self.fresh, 0
                if not goes_on(fresh):
                    self._stop()
                    return False
            return True
        finally:
            for hand in self.hands:
                with suppress(Exception):
                    self.ray.kill(hand.actor)

    def _hire(self) -> None:
        actor = self.start()
        self.hands.append(_Hand(actor, actor.prepare.remote()))

    def _give(self, hand: _Hand, shard: _Shard) -> None:
        hand.shard, hand.counted, hand.asked, hand.news = shard, 0, None, time.monotonic()
        hand.task = hand.actor.tag.remote(shard.stretch.start, shard.stretch.stop)

    def _hear(self, hand: _Hand) -> None:
        """What came of the model's opening or of a shard."""
        try:
            result = self.ray.get(hand.task)
        except Exception as error:  # the worker has ended, or met what is no fault of the user's
            self._lose(hand, _explain(error))
            return
        if isinstance(result, InputError):
            raise result
        if hand.shard is None and result != self.digest:
            raise InputError("model", "a worker has opened another one", "give all machines the same files")
        self.in_a_row, self.started = 0, True
        if hand.shard is not None:
            self._count(hand, len(hand.shard.stretch))
        hand.shard = hand.task = None

    def _lose(self, hand: _Hand, why: str) -> None:
        """Replace a worker, and give what it has not written to others."""
        self.hands.remove(hand)
        self.in_a_row += 1
        if self.in_a_row > (_MOST_ENDS if self.started else 2) + 2 * len(self.hands):
            wrong = f"workers end again and again ({why})"
            raise InputError("ray", wrong, "look at Ray's logs; what is done is kept, and the same command goes on")
        with suppress(Exception):
            self.ray.kill(hand.actor)
        self._hire()
        if hand.shard is not None:
            self._count(hand, 0)
            gaps = self.job.find_gaps(hand.shard.stretch)
            self.fresh += len(hand.shard.stretch) - sum(map(len, gaps))
            self.say(f"a worker ended; {sum(map(len, gaps)):,} images go to another ({why})")
            for gap in gaps:
                self._try_again(gap, hand.shard.ends + 1, why)

    def _try_again(self, stretch: range, ends: int, why: str) -> None:
        """Put a stretch back: whole after the first end of a worker, then by halves, an image as a row at last."""
        if ends < 2:
            self.left.appendleft(_Shard(stretch, ends))
        elif len(stretch) > 1:
            half = len(stretch) // 2
            self.left.extendleft(_Shard(each, ends - 1) for each in (stretch[half:], stretch[:half]))
        else:
            (image,) = self.job.list_images(stretch)
            error = InputError(image.name, f"its worker ended each time ({why})", "leave the image out")
            self.job.keep(stretch.start, [[{"picture": image.name, "error": str(error)}]], lambda _: True)
            self.fresh += 1

    def _count(self, hand: _Hand, done: int) -> None:
        self.fresh += done - hand.counted
        hand.counted = done

    def _look_around(self) -> None:
        """Ask all workers how far they are; one that has not moved for long is taken for lost."""
        now = time.monotonic()
        for hand in [each for each in self.hands if each.shard is not None]:
            if hand.asked is None:
                hand.asked = hand.actor.count_done.remote()
            elif self.ray.wait([hand.asked], timeout=0)[0]:
                with suppress(Exception):  # its task will tell that it has ended
                    done = self.ray.get(hand.asked)
                    if done != hand.counted:
                        hand.news = now
                        self._count(hand, done)
                hand.asked = None
            if now - hand.news > self.silence:
                self._lose(hand, f"it has not answered for {self.silence:g} s")

    def _stop(self) -> None:
        """Let the workers keep what they have done."""
        busy = [hand for hand in self.hands if hand.shard is not None]
        for hand in busy:
            hand.actor.stop.remote()
        if busy:
            self.ray.wait([hand.task for hand in busy], num_returns=len(busy), timeout=_ENDING)
