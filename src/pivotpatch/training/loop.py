"""The one loop: step, log, save, evaluate, until the schedule ends, patience does, or somebody asks it to stop."""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from pivotpatch.core.metrics import DEFINITIONS, AveragePrecision, average_precision
from pivotpatch.data.check import count_shared, digest_images
from pivotpatch.data.loading import Failure, Loader
from pivotpatch.data.records import Tell
from pivotpatch.errors import InputError, shorten
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.open import load_checkpoint
from pivotpatch.peers.cpsd import divide_labels
from pivotpatch.process import Progress, StopSignals, ignore
from pivotpatch.training.build import Run, build_run
from pivotpatch.training.config import DistilSection, RunConfig, load_config, settle_config
from pivotpatch.training.dry_run import tell_full_time
from pivotpatch.training.features import FOLDER, Features
from pivotpatch.training.folder import CONFIG, RunFolder, RunState
from pivotpatch.training.gain import keep_known, measure_gain, score_loader, score_unseen, tune_folds
from pivotpatch.training.images import none_read, open_loader, open_training_records
from pivotpatch.training.model import choose_frozen, make_model, settle_model
from pivotpatch.training.processes import gather_named, join_processes, make_accelerator, open_trackers, own_settings
from pivotpatch.training.step import collect_training, compile_run, restore_training, take_step
from pivotpatch.training.task import check_extras
from pivotpatch.writing import explain_disk_faults

AGREE_EVERY = 5  # steps between questions to the other processes whether one was asked to stop

_MEND = "lower optimiser.lr, set optimiser.clip_norm, or try precision.dtype=float32"

Report = Callable[[dict[str, Any]], None]


class FitResult(NamedTuple):
    """How a run ended: the content of metrics.json, and the signal that ended it early, if one did."""

    metrics: dict[str, Any]
    stopped_by: Signals | None


class _Interrupted(Exception):  # noqa: N818  # nothing went wrong
    """Somebody asked the run to stop by the signal in `args`, and all that it needs to go on is saved."""


def fit(
    config: RunConfig, out: str | Path, *, progress: Progress = ignore, report: Report = ignore, tell: Tell = ignore
) -> FitResult:
    """Train, in a new folder.

    Args:
        config: of the run.
        out: its folder, which must not exist or be empty.
        progress: told what is done (stage, steps or batches, of how many).
        report: told each entry of the log.
        tell: told in a line each what was chosen, and which labels the model knows already.
    """
    out = Path(out)
    accelerator = make_accelerator(config, out)
    folder = RunFolder(out, config, writes=accelerator.is_main_process)
    folder.check_free()
    config = settle_model(config, tell=tell)
    if config.distil.groups and not config.distil.teachers:
        made = _train_teachers(config, out, progress=progress, report=report, tell=tell)
        if isinstance(made, FitResult):
            return made
        config = config.model_copy(update={"distil": config.distil.model_copy(update={"teachers": made})})
    with closing(folder), own_settings(accelerator.device):
        run = build_run(config, accelerator, keep=out.parent / FOLDER, progress=progress, tell=tell)
        compile_run(run, steps_left=run.total_steps)
        run.choices["model.frozen"] += tell_full_time(run, config)
        folder.config = run.config
        folder.create(run.choices)  # only now: a wrong configuration leaves nothing that the next attempt stumbles on
        state = RunState(records=len(run.records), held_out=digest_images(run.val))
        return _Trainer(run, folder, state, progress, report).train(tell)


def _train_teachers(config: RunConfig, out: Path, **told: Any) -> tuple[str, ...] | FitResult:
    """Train the teachers of CPSD that are not there yet; their checkpoints, or how one ended that somebody stopped."""
    records, home = open_training_records(config).train, out.parent / f"{out.name}-teachers"
    _check_student(config, records.labels.names)  # teachers that it could not learn from would take as long
    labels = divide_labels(records.labels.names, records.count_pairs(), config.distil.groups)
    for number, (name, group) in enumerate(labels.items(), 1):
        # Corrections must not add test images to teachers either; without any, nobody has to score them.
        tests = config.data.test if config.data.corrections else ()
        data = config.data.model_copy(update={"labels": group, "test": tests})
        wanted, folder = config.model_copy(update={"data": data, "distil": DistilSection()}), home / name
        told["tell"](f"teacher {number} of {len(labels)}, {name}: {shorten(group)}")
        begun = (folder / CONFIG).is_file()
        if begun:
            held = RunFolder(folder, load_config(folder / CONFIG))
            if held.config != settle_config(wanted, frozen=held.config.model.frozen is True):
                wrong = "is a teacher that was trained with other settings"
                raise InputError(str(folder), wrong, f"remove {home}, or name the teachers in distil.teachers")
            if held.finished:
                continue
        result = resume(folder, **told) if begun else fit(wanted, folder, **told)
        if result.stopped_by is not None:
            return result
    return tuple(str(home / name / "best") for name in labels)


def _check_student(config: RunConfig, labels: tuple[str, ...]) -> None:
    """Refuse what CPSD's student would refuse when its teachers are there."""
    with torch.random.fork_rng(devices=[]):
        model = make_model(config, labels)
    check_extras(config, head=model.architecture.head)
    choose_frozen(config, model, torch.device("cpu"))


def resume(out: str | Path, *, progress: Progress = ignore, report: Report = ignore, tell: Tell = ignore) -> FitResult:
    """Go on with a run where its folder says it is, mid-epoch too; as if it had never stopped."""
    out = Path(out)
    processes = join_processes()
    folder = RunFolder.open(out, writes=processes.is_main_process)
    with closing(folder), own_settings(processes.device):
        processes.wait_for_everyone()  # until the folder is tidy
        state = folder.load_state()
        folder.check_resumable(state)
        accelerator = make_accelerator(folder.config, out)
        saved = folder.last if state.step > 0 else None
        if folder.config.model.frozen == "auto":  # of a run from before there was a choice
            folder.config = settle_config(folder.config, frozen=False)
        run = build_run(folder.config, accelerator, saved=saved, keep=out.parent / FOLDER, progress=progress)
        if saved is not None:
            _check_images(run, state)
            restore_training(run, folder.load_tensors(accelerator.device))
        state.records, state.held_out = len(run.records), digest_images(run.val)
        compile_run(run, steps_left=run.total_steps - state.step)
        folder.cut_log(state.logged)
        return _Trainer(run, folder, state, progress, report).train(tell)


def _check_images(run: Run, state: RunState) -> None:
    """Refuse to go on with other images than a run began with."""
    now, began = (len(run.records), run.records.labels.names), (state.records, run.task.model.labels)
    if now != began:
        told = [f"{count} images of {len(names)} labels ({shorten(names)})" for count, names in (now, began)]
        wrong, todo = f"there are {told[0]}, the run began with {told[1]}", "give back what it was, or start anew"
        raise InputError(run.records.name, wrong, todo)
    if state.held_out not in ("", digest_images(run.val)):
        wrong = "it has changed, so that others would choose the model than those that the run began with"
        where = run.records.name if run.val is None else run.val.name
        raise InputError(where, wrong, "give back what there was, or start anew")


@dataclass
class _Trainer:
    """A run on its way."""

    run: Run
    folder: RunFolder
    state: RunState  # how far it is
    progress: Progress
    report: Report

    def __post_init__(self) -> None:
        self.stop = StopSignals()
        self.saved = self.state.step  # what `last/` holds
        # Steps whose numbers are still on the device (reading each would wait for it), with their images.
        self.recent: list[tuple[Tensor, Tensor]] = []
        self.clock = time.perf_counter()  # until when the time of steps is counted
        self.began = self.clock - self.state.seconds
        self.kept: float | None = None  # of what labels learned that the model knew, see `keep_known`

    def train(self, tell: Tell) -> FitResult:
        """Take the steps that are left, score the test sets, and write what came of it."""
        run, tested, stopped_by = self.run, dict[str, Any](), None
        for line in run.choices.values():
            tell(line)
        try:
            with self.stop:
                with open_trackers(run.accelerator, run.config, step=self.state.step):
                    try:
                        self.prepare(tell)
                        self.take_steps()
                        tested |= self.finish()
                        tested["test"] = self.test()
                    except _Interrupted as interrupted:
                        stopped_by = interrupted.args[0]
                    except KeyboardInterrupt:
                        if self.stop.patient:
                            raise
                        stopped_by = self.stop.received
                    metrics = self.describe(finished=stopped_by is None) | tested
                self.folder.write_metrics(metrics)
        except InputError as error:
            where, wrong, todo = error.parts
            safe = "nothing was saved yet"
            if self.saved:
                safe = f"{self.folder.last} holds step {self.saved}, --resume {self.folder.root} goes on there"
            raise InputError(where, wrong, f"{todo}; {safe}") from error
        return FitResult(metrics, stopped_by)

    def prepare(self, tell: Tell) -> None:
        """Have a frozen backbone's features computed, and score a model that was trained before as it came."""
        run, ranking = self.run, self.run.task.ranking
        if run.embedder is not None:
            sets = [each.batches.dataset for each in (run.loader, run.val_loader) if each is not None]
            run.embedder.fill([each for each in sets if isinstance(each, Features)], self.watch)
        if run.config.model.start_from is not None and run.val_loader is not None and self.state.step == 0:
            scores = score_unseen(run, run.task.model, progress=self.heed)
            mean = average_precision(scores.get(ranking), scores.target).mean
            tell(f"before any step: mAP {100 * mean:.2f} on {len(scores):,} images; labels new to it rank at chance")
            self.folder.write_before(scores.get(ranking))
        self.clock = time.perf_counter()  # none of this is part of the speed of training

    def finish(self) -> dict[str, Any]:
        """Fit thresholds, calibration and effort where folds allow it, and find what was gained since the beginning."""
        run, before = self.run, self.folder.load_before()
        found: dict[str, Any] = {}
        if run.task.folds:
            tuned = tune_folds(run, progress=self.heed)
            tuned.store(run.model)
            self.folder.save_best(run.model)
            found["tuned"] = {
                "images": tuned.pictures,
                "calibration": tuned.method,
                "thresholds": str(tuned.thresholds),
                "kept": self.kept,
            }
        if before is not None and run.val_loader is not None:
            run.accelerator.wait_for_everyone()  # until the first process has written it
            best = run.model if run.embedder else load_checkpoint(self.folder.best).to(run.accelerator.device)
            after = score_unseen(run, best, progress=self.heed)
            if len(after) == len(before):  # else images went or came since
                found["gain"] = measure_gain(before, after, definition=run.config.evaluation.definition)
                found["gain"]["trained_on"] = count_shared(run.records, run.val_loader.records)[0]
        return found

    def watch(self, what: str, done: int, total: int | None) -> None:
        """Tell of progress, and stop where somebody asked for that."""
        if self.stop.received is not None and self.run.accelerator.num_processes == 1:
            raise _Interrupted(self.stop.received)
        self.progress(what, done, total)

    def heed(self, what: str, done: int, total: int | None) -> None:
        """As `watch`, but say nothing of what heads do with features in a moment."""
        if self.run.embedder is None or self.stop.received is not None:
            self.watch(what, done, total)

    def take_steps(self) -> None:
        """Train until the schedule ends, patience does, or somebody asks to stop."""
        run, state, patience = self.run, self.state, self.run.config.evaluation.patience
        sampler, save_every = run.loader.epoch_sampler, run.config.output.save_every
        # Compiling takes minutes, and never ends where the processes that do it were sent the signal too.
        self.stop.patient = not run.compiled or run.accelerator.num_processes > 1
        while True:
            epoch, done = divmod(state.step, run.steps_per_epoch)
            if done == 0 and state.step > state.evaluated:
                self.end_epoch(epoch)
            if state.step >= run.total_steps or (patience is not None and state.waited >= patience):
                return
            sampler.set_epoch(epoch, start=done)
            for number, (share, batch) in enumerate(zip(list(sampler), run.loader, strict=True), done):
                rows = sampler.rows(number)[np.isin(share, batch.indices)]
                numbers = take_step(run, batch, step=state.step, rows=rows)
                self.stop.patient = True
                state.step += 1
                self.recent.append((numbers, batch.indices))
                self.note_failures(batch.failures)
                self.look()
                asked = self.find_signal()
                if asked or state.step % save_every == 0:
                    self.save()
                if asked:
                    raise _Interrupted(asked)

    def end_epoch(self, epoch: int) -> None:
        """Save, evaluate where that is due, and keep the model where it is the best so far."""
        run, state, ends = self.run, self.state, self.state.step >= self.run.total_steps
        if not state.pictures:
            raise none_read(run.records)
        if ends or run.embedder is None:  # epochs of heads take no time
            self.save()
        if ends and run.task.folds:
            self.kept = keep_known(run, progress=self.heed)
        if run.val_loader is None and ends:
            self.folder.save_best(run.model)
        if run.val_loader is not None and (ends or (run.embedder is None and epoch % run.config.evaluation.every == 0)):
            found = self.measure(run.model, run.val_loader, "validate")
            means = {f"val_mAP_{name}": each.mean for name, each in found.items()}
            state.waited += 1
            if state.best is None or found[run.task.ranking].mean > state.best:
                state.best, state.best_step, state.waited = found[run.task.ranking].mean, state.step, 0
                self.folder.save_best(run.model)
            self.write({"step": state.step, "epoch": epoch, **means})
        state.evaluated = state.step
        self.clock = time.perf_counter()  # none of this is part of the speed of training

    def look(self, *, now: bool = False) -> None:
        """Read the numbers of recent steps, refuse any that are not finite, and write what is due to the log.

        On the CPU they are there at once; a GPU is asked only as often as the log needs it.
        """
        run, step = self.run, self.state.step
        due = step % run.config.output.log_every == 0 or step % run.steps_per_epoch == 0
        if not self.recent or not (now or due or run.accelerator.device.type == "cpu"):
            return
        table = torch.stack([numbers for numbers, _ in self.recent])
        if run.accelerator.num_processes > 1:
            table[:, :-1] = run.accelerator.reduce(table[:, :-1].contiguous(), "sum")
        first = step - len(self.recent) + 1
        for number, (row, (_, indices)) in enumerate(zip(table.tolist(), self.recent, strict=True), first):
            if not all(map(math.isfinite, row)):
                raise self.explain_nonfinite(number, indices, row)
            self.state.pending.append(row)
        self.recent.clear()
        before, self.clock = self.clock, time.perf_counter()
        self.state.pending_seconds += self.clock - before
        if due:
            self.write(sum_up_steps(run, self.state))
        self.progress("train", step, run.total_steps)

    def write(self, entry: dict[str, Any]) -> None:
        """Add an entry to the log, the trackers and what the caller sees."""
        self.folder.add_to_log(entry)
        self.state.logged += 1
        told = {name: value for name, value in entry.items() if name != "step"}
        with explain_disk_faults(self.folder.root):
            self.run.accelerator.log(told, step=entry["step"])
        self.report(entry)

    def save(self) -> None:
        """Save all that is needed to go on, once it is known to be sound."""
        if self.saved == self.state.step:
            return
        self.look(now=True)
        self.state.not_read = gather_named(self.state.not_read, self.run.accelerator)
        self.state.seconds = time.perf_counter() - self.began
        tensors = collect_training(self.run)
        for name, value in tensors.items():  # the loss was finite, but it is that of the weights before the step
            if not torch.isfinite(value).all():
                raise InputError(f"step {self.state.step}", f"{name} is not finite", _MEND)
        self.folder.save_last(self.run.model, tensors, self.state)
        self.saved = self.state.step

    def measure(self, model: Classifier, loader: Loader, what: str) -> dict[str, AveragePrecision]:
        """Average precision of each kind of logits that the task trains, on a loader's images."""
        run, definition = self.run, self.run.config.evaluation.definition
        scores = score_loader(run, model, loader, progress=lambda _, *done: self.watch(what, *done))
        self.note_failures(loader.failures)
        if len(scores) == 0:
            raise none_read(loader.records)
        return {
            kind: average_precision(logits, scores.target, definition=definition, labels=scores.labels)
            for kind, logits in scores.logits.items()
            if kind in (*run.task.parts, run.task.ranking)
        }

    def find_signal(self) -> Signals | None:
        """The signal that this process, or any of the others, was sent."""
        accelerator = self.run.accelerator
        if accelerator.num_processes == 1:
            return self.stop.received
        if self.state.step % AGREE_EVERY:
            return None
        own = torch.tensor([int(self.stop.received or 0)], device=accelerator.device)
        number = int(accelerator.gather(own).max())
        return Signals(number) if number else None

    def note_failures(self, failures: Iterable[Failure]) -> None:
        """Remember images that could not be read."""
        self.state.not_read |= {failure.name: str(failure.error) for failure in failures}

    def explain_nonfinite(self, step: int, indices: Tensor, numbers: list[float]) -> InputError:
        """The error of a loss or gradient of this process's images (B,) that is not finite; all processes take part."""
        chosen = indices.tolist()
        if self.run.accelerator.num_processes > 1:
            chosen = gather_object(chosen)
        names = shorten(map(self.run.records.name_at, chosen))
        *losses, _, gradient = numbers
        what = "gradient" if all(map(math.isfinite, losses)) else "loss"
        first = step == 1 and what == "loss"
        todo = "check the weights it began with, model.weights or model.start_from" if first else _MEND
        wrong = f"the {what} of {names} is not finite ({sum(losses)}, gradient norm {gradient})"
        return InputError(f"step {step}", wrong, todo)

    def describe(self, *, finished: bool) -> dict[str, Any]:
        """What metrics.json says, but for the test sets."""
        run, state, ranking = self.run, self.state, self.run.task.ranking
        chosen = run.val_loader is not None and run.embedder is None
        metrics: dict[str, Any] = {
            "finished": finished,
            "frozen": run.embedder is not None,
            "steps": state.step,
            "epochs": state.step / run.steps_per_epoch,
            "seconds": time.perf_counter() - self.began,
            "pictures_per_second": state.pictures / state.train_seconds if state.pictures else None,
            "average_precision": DEFINITIONS[run.config.evaluation.definition],
            "ranking": ranking,
            "chosen_by": f"validation mAP of the {ranking} logits" if chosen else "nothing, the last step",
            "best_step": state.best_step if chosen else state.step,
            "best_val_mAP": state.best,
            "not_read": dict(sorted(gather_named(state.not_read, run.accelerator).items())),
        }
        if run.accelerator.device.type == "cuda":
            metrics["peak_memory_GB"] = torch.cuda.max_memory_allocated(run.accelerator.device) / 1e9
        return metrics

    def test(self) -> dict[str, Any]:
        """Average precision of the chosen model on the test sets that the configuration names."""
        run = self.run
        if not run.tests:
            return {}
        run.accelerator.wait_for_everyone()  # until the first process has written it
        model = load_checkpoint(self.folder.best).to(run.accelerator.device)
        results = {}
        for address, records in run.tests.items():
            loader = open_loader(records, run.config, model=model, accelerator=run.accelerator)
            found = self.measure(model, loader, f"test {address}")
            results[address] = {name: each.to_dict() for name, each in found.items()}
        return results


def sum_up_steps(run: Run, state: RunState) -> dict[str, Any]:
    """Make an entry of the log from the steps that wait for one, and count them as logged."""
    *parts, pictures, norms = map(sum, zip(*state.pending, strict=True))
    losses = {name: part / max(pictures, 1) for name, part in zip(run.task.parts, parts, strict=True)}
    entry = {
        "step": state.step,
        "epoch": state.step / run.steps_per_epoch,
        "loss": sum(losses.values()),
        **{f"loss_{name}": value for name, value in losses.items()},
        "gradient_norm": norms / len(state.pending),
        "lr": max(group["lr"] for group in run.optimiser.param_groups),
        "pictures_per_second": pictures / state.pending_seconds,
    }
    state.pictures += int(pictures)
    state.train_seconds += state.pending_seconds
    state.pending, state.pending_seconds = [], 0.0
    return entry
