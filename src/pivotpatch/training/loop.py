"""The one loop: step, log, save, evaluate, until the schedule ends, patience does, or somebody asks it to stop."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pivotpatch.data.loading import Failure, Loader
from pivotpatch.data.records import Tell
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import score_pictures
from pivotpatch.models.checkpoint import load_checkpoint
from pivotpatch.models.classifier import Classifier
from pivotpatch.training.build import Progress, Run, build_run, none_read, open_loader
from pivotpatch.training.config import RunConfig
from pivotpatch.training.folder import RunFolder, RunState
from pivotpatch.training.metrics import describe_run, measure_scores, sum_up_steps
from pivotpatch.training.nonfinite import HISTORY, check_weights, explain_nonfinite
from pivotpatch.training.processes import gather_named, join_processes, make_accelerator, open_trackers, own_settings
from pivotpatch.training.signals import StopSignals
from pivotpatch.training.step import collect_training, restore_training, take_step
from pivotpatch.writing import explain_disk_faults

AGREE_EVERY = 10  # steps at most between questions to the other processes whether one was asked to stop
AGREE_SECONDS = 2.0  # or so much time, for a launcher that was asked to stop kills its processes after a while

Report = Callable[[dict[str, Any]], None]


class FitResult(NamedTuple):
    """How a run ended.

    Attributes:
        metrics: the content of metrics.json.
        stopped_by: the signal that ended it early; None where it came to its end.
    """

    metrics: dict[str, Any]
    stopped_by: Signals | None


class _Interrupted(Exception):  # noqa: N818  # nothing went wrong
    """Somebody asked the run to stop, and all that it needs to go on is saved."""

    def __init__(self, asked: Signals) -> None:
        super().__init__(asked)
        self.asked = asked


class _Listeners(NamedTuple):
    """Who is told what is done, and each entry of the log."""

    progress: Progress
    report: Report


def fit(
    config: RunConfig,
    out: Path,
    *,
    progress: Progress | None = None,
    report: Report | None = None,
    tell: Tell | None = None,
) -> FitResult:
    """Train, in a new folder.

    Args:
        config: of the run.
        out: its folder, which must not exist or be empty.
        progress: told what is done (stage, steps or batches, of how many).
        report: told each entry of the log.
        tell: told which labels the network knows already, see `make_model`.
    """
    accelerator = make_accelerator(config, out)
    folder = RunFolder(out, config, writes=accelerator.is_main_process)
    folder.check_free()
    listeners = _Listeners(progress or (lambda *_: None), report or (lambda _: None))
    with closing(folder), own_settings(accelerator.device):
        run = build_run(config, accelerator, progress=listeners.progress, tell=tell)
        folder.create()  # only now: a mistake in the configuration leaves nothing that the next attempt stumbles on
        return _train(run, folder, RunState(records=len(run.records)), listeners=listeners)


def resume(out: Path, *, progress: Progress | None = None, report: Report | None = None) -> FitResult:
    """Go on with a run where its folder says it is, mid-epoch too; as if it had never stopped."""
    processes = join_processes()
    folder = RunFolder.open(out, writes=processes.is_main_process)
    listeners = _Listeners(progress or (lambda *_: None), report or (lambda _: None))
    with closing(folder), own_settings(processes.device):
        processes.wait_for_everyone()  # until the folder is tidy
        state = folder.load_state()
        if folder.is_finished():
            todo = f"start another; model.start_from={folder.best} begins with its weights"
            raise InputError(str(folder.root), "the run has come to its end", todo)
        folder.check_whole(state)
        accelerator = make_accelerator(folder.config, out)
        saved = folder.last if state.step > 0 else None
        run = build_run(folder.config, accelerator, saved=saved, progress=listeners.progress)
        if saved is None:
            state.records = len(run.records)
        else:
            _check_pictures(run, state)
            restore_training(run, folder.load_tensors(accelerator.device))
        folder.cut_log(state.logged)
        return _train(run, folder, state, listeners=listeners)


def choose_interval(pace: float) -> int:
    """Steps until processes ask each other again, for steps that take so many seconds.

    >>> choose_interval(0.01), choose_interval(0.6), choose_interval(60.0)
    (10, 3, 1)
    """
    return max(min(AGREE_EVERY, int(AGREE_SECONDS / max(pace, 1e-9))), 1)


def _check_pictures(run: Run, state: RunState) -> None:
    """Refuse to go on with other pictures than a run began with."""
    where, todo = run.config.data.train or "data.train", "give back what it was, or start anew"
    if len(run.records) != state.records:
        wrong = f"there are {len(run.records)} pictures to train on, the run began with {state.records}"
        raise InputError(where, wrong, todo)
    if run.records.labels.names != run.task.model.labels:
        raise InputError(where, "its labels are not those that the run began with", todo)


def _train(run: Run, folder: RunFolder, state: RunState, *, listeners: _Listeners) -> FitResult:
    with StopSignals() as stop:
        trainer = _Trainer(run, folder, state, stop=stop, listeners=listeners)
        try:
            with open_trackers(run.accelerator, run.config, step=state.step):
                result = trainer.train()
            folder.write_metrics(result.metrics)
        except InputError as error:
            raise trainer.tell_what_is_safe(error) from error
    return result


class _Recent(NamedTuple):
    """A step that was taken: its number, the row of `take_step` and its pictures."""

    step: int
    numbers: Tensor
    indices: Tensor


class _Trainer:
    """A run on its way.

    Attributes:
        run: what is trained.
        folder: where it is written.
        state: how far it is.
        recent: steps whose numbers are still on the device; looking at each would make it wait.
        history: numbers of the steps before those.
    """

    def __init__(
        self, run: Run, folder: RunFolder, state: RunState, *, stop: StopSignals, listeners: _Listeners
    ) -> None:
        self.run = run
        self.folder = folder
        self.state = state
        self.stop = stop
        self.listeners = listeners
        self.recent: list[_Recent] = []
        self.history: deque[list[float]] = deque(maxlen=HISTORY)
        self._began = time.perf_counter() - state.seconds
        self._logged = (time.perf_counter(), state.step)
        self._saved = state.step
        self._agreed, self._agree_at = (time.perf_counter(), state.step), state.step + 1

    def train(self) -> FitResult:
        """Take the steps that are left, then look at the test sets."""
        try:
            self.take_steps()
            tested = self.test()
        except _Interrupted as interrupted:
            return FitResult(self.describe(finished=False), interrupted.asked)
        return FitResult({**self.describe(finished=True), "test": tested}, None)

    def take_steps(self) -> None:
        """Train until the schedule ends, patience does, or somebody asks to stop."""
        run, state = self.run, self.state
        sampler, save_every = run.loader.epoch_sampler, run.config.output.save_every
        while True:
            epoch, done = divmod(state.step, run.steps_per_epoch)
            if done == 0 and state.step > state.evaluated:
                self.end_epoch(epoch)
            if state.step >= run.total_steps or self.lost_patience():
                return
            sampler.set_epoch(epoch, start=done)
            for number, (share, batch) in enumerate(zip(list(sampler), run.loader, strict=True), done):
                rows = sampler.rows(number)[np.isin(share, batch.indices)]
                numbers = take_step(run, batch, step=state.step, rows=rows)
                state.step += 1
                self.recent.append(_Recent(state.step, numbers, batch.indices))
                self.note_failures(batch.failures)
                self.look()
                asked = self.find_signal()
                if asked or state.step % save_every == 0:
                    self.save()
                if asked:
                    raise _Interrupted(asked)

    def end_epoch(self, epoch: int) -> None:
        """Save, evaluate where that is due, and keep the network where it is the best so far."""
        run, state, ends = self.run, self.state, self.state.step >= self.run.total_steps
        if not state.pictures:
            raise none_read(run.records)
        self.save()
        if run.val_loader is None and ends:
            self.folder.save_best(run.model)
        if run.val_loader is not None and (ends or epoch % run.config.evaluation.every == 0):
            found = measure_scores(run, self.score(run.val_loader, "validate"))
            means = {name: each.mean for name, each in found.items()}
            state.waited += 1
            if state.best is None or means[run.task.ranking] > state.best:
                state.best, state.best_step, state.waited = means[run.task.ranking], state.step, 0
                self.folder.save_best(run.model)
            self.write(
                {"step": state.step, "epoch": epoch, **{f"val_mAP_{name}": mean for name, mean in means.items()}}
            )
        state.evaluated = state.step
        self._logged = (time.perf_counter(), state.step)  # none of this is part of the speed of training

    def look(self, *, now: bool = False) -> None:
        """Read the numbers of recent steps, refuse any that are not finite, and write what is due to the log.

        On the CPU they are there at once; a GPU is asked only as often as the log needs it.
        """
        step, on_cpu = self.state.step, self.run.accelerator.device.type == "cpu"
        due = step % self.run.config.output.log_every == 0 or step % self.run.steps_per_epoch == 0
        if not self.recent or not (now or on_cpu or due):
            return
        table = torch.stack([taken.numbers for taken in self.recent])
        if self.run.accelerator.num_processes > 1:
            table = torch.cat([self.run.accelerator.reduce(table[:, :-1].contiguous(), "sum"), table[:, -1:]], dim=1)
        rows = table.tolist()
        for taken, row in zip(self.recent, rows, strict=True):
            if not all(map(math.isfinite, row)):
                raise explain_nonfinite(
                    self.run, step=taken.step, indices=taken.indices, numbers=row, before=self.history
                )
            self.state.pending.append(row)
            self.history.append(row)
        self.recent.clear()
        if due:
            self.log()
        self.listeners.progress("train", step, self.run.total_steps)

    def log(self) -> None:
        """Write the mean over the steps since the last entry, and begin the next."""
        now, (before, step) = time.perf_counter(), self._logged
        entry = sum_up_steps(self.run, self.state, since=step, seconds=now - before)
        self._logged = (now, self.state.step)
        self.write(entry)

    def write(self, entry: dict[str, Any]) -> None:
        """Add an entry to the log, the trackers and what the caller sees."""
        self.folder.add_to_log(entry)
        self.state.logged += 1
        told = {name: value for name, value in entry.items() if name != "step"}
        with explain_disk_faults(self.folder.root):
            self.run.accelerator.log(told, step=entry["step"])
        self.listeners.report(entry)

    def save(self) -> None:
        """Save all that is needed to go on, once it is known to be sound."""
        if self._saved == self.state.step:
            return
        self.look(now=True)
        self.gather_failures()
        self.state.seconds = time.perf_counter() - self._began
        tensors = collect_training(self.run)
        check_weights(tensors, step=self.state.step)
        self.folder.save_last(self.run.model, tensors, self.state)
        self._saved = self.state.step

    def tell_what_is_safe(self, error: InputError) -> InputError:
        """An error that ends the run, and what is left of it."""
        where, wrong, todo = error.parts
        safe = f"last/ holds step {self._saved}, --resume goes on there" if self._saved else "nothing was saved yet"
        return InputError(where, wrong, f"{todo}; {safe}")

    def score(self, loader: Loader, what: str, *, model: Classifier | None = None) -> Scores:
        """Scores of a loader's pictures by the network that is kept, or by another."""

        def watch(_what: str, done: int, total: int | None) -> None:
            if self.stop.received is not None and self.run.accelerator.num_processes == 1:
                raise _Interrupted(self.stop.received)
            self.listeners.progress(what, done, total)

        run = self.run
        scores = score_pictures(
            model or run.model, loader, accelerator=run.accelerator, dtype=run.dtype, progress=watch
        )
        self.note_failures(loader.failures)
        if len(scores) == 0:
            raise none_read(loader.records)
        return scores

    def lost_patience(self) -> bool:
        """Whether validation has not improved for as many evaluations as the configuration allows."""
        patience = self.run.config.evaluation.patience
        return patience is not None and self.state.waited >= patience

    def find_signal(self) -> Signals | None:
        """The signal that this process, or any of the others, was sent."""
        if self.run.accelerator.num_processes == 1:
            return self.stop.received
        step, now, (before, since) = self.state.step, time.perf_counter(), self._agreed
        if step < self._agree_at:
            return None
        own = torch.tensor([[int(self.stop.received or 0), (now - before) / (step - since)]])
        number, pace = self.run.accelerator.gather(own.to(self.run.accelerator.device)).amax(0).tolist()
        self._agreed = (now, step)
        self._agree_at = step + choose_interval(pace)  # the same in all, for they know the same pace
        return Signals(int(number)) if number else None

    def note_failures(self, failures: Iterable[Failure]) -> None:
        """Remember pictures that could not be read."""
        self.state.not_read |= {failure.name: str(failure.error) for failure in failures}

    def gather_failures(self) -> None:
        """Let each process know what the others could not read."""
        if self.run.config.data.on_error == "skip":
            self.state.not_read = gather_named(self.state.not_read, self.run.accelerator)

    def describe(self, *, finished: bool) -> dict[str, Any]:
        """What metrics.json says, but for the test sets."""
        self.gather_failures()
        return describe_run(self.run, self.state, seconds=time.perf_counter() - self._began, finished=finished)

    def test(self) -> dict[str, Any]:
        """Average precision on the test sets that the configuration names, by the network that was chosen."""
        run, config = self.run, self.run.config
        if not config.data.test:
            return {}
        run.accelerator.wait_for_everyone()  # until the first process has written it
        model = load_checkpoint(self.folder.best).to(run.accelerator.device)
        results = {}
        for address, records in run.tests.items():
            loader = open_loader(
                records, config, model=model, accelerator=run.accelerator, progress=self.listeners.progress
            )
            found = measure_scores(run, self.score(loader, f"test {address}", model=model))
            results[address] = {name: each.to_dict() for name, each in found.items()}
        return results
