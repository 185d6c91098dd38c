"""One step: views, loss, gradients, update. What is drawn depends on seed, step and process alone."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.profiler import record_function

from pivotpatch.accel.device import can_run
from pivotpatch.accel.rewrites import quicken_training
from pivotpatch.data.augment import AugmentPolicy, draw_augmentation
from pivotpatch.data.loading import Batch
from pivotpatch.models.views import Views
from pivotpatch.models.weights import load_exactly
from pivotpatch.training.build import Run
from pivotpatch.training.features import read_features
from pivotpatch.training.optimiser import find_point, set_point
from pivotpatch.training.task import Kept

COMPILE_SECONDS = 120.0  # what compiling a model for training costs
COMPILE_GAIN = 1.4  # how many times as fast a compiled step is


def take_step(run: Run, batch: Batch, *, step: int, rows: NDArray[np.int64]) -> Tensor:
    """Train on this process's share of a batch; torch's profiler, if it is on, sees its sections by name.

    Args:
        run: what is trained.
        batch: the share; it may be empty, the process then only takes part.
        step: how many steps were taken before.
        rows: positions of the share's images in the whole batch.

    Returns:
        (K + 2,) on the device: the K parts of the loss summed over the share, how many images it has, and the
        norm of the model's gradient of the whole batch.
    """
    config = run.config
    point = find_point(step, total=run.total_steps, schedule=config.schedule)
    set_point(run.optimiser, point, peak=config.optimiser.lr)
    parts = compute_gradients(run, batch, step=step, rows=rows)
    with record_function("norm"):
        limit, norms = config.optimiser.clip_norm, list[Tensor]()
        for part in (run.task.model, *run.task.folds):  # heads of folds learn as if they were alone
            norms.append(get_total_norm([weight.grad for weight in part.parameters() if weight.grad is not None]))
            if limit is not None:
                clip_grads_with_norm_(list(part.parameters()), limit, norms[-1])
    with record_function("optimiser"):
        run.optimiser.step()
        run.optimiser.zero_grad()
    if run.accelerator.num_processes > 1:
        _agree_on_statistics(run, images=len(batch.indices))
    if run.average is not None:
        with record_function("average"):
            run.average.update(run.task.model, step=step + 1)
    count = parts.new_full((1,), len(batch.indices))  # filled on the device, which so need not be waited for
    return torch.cat([parts, count, norms[0][None]])


def compute_gradients(run: Run, batch: Batch, *, step: int, rows: NDArray[np.int64]) -> Tensor:
    """Add the gradient of the whole batch to the weights; the arguments are those of `take_step`.

    Every process ends with the same gradient: that of one process with the whole batch, but for batch norm, which
    knows only what its process sees at once.

    Returns:
        (K,) the parts of the loss, summed over the share.
    """
    device, config = run.accelerator.device, run.config
    torch.manual_seed(_mix(config.train.seed, step, run.accelerator.process_index))
    count, generator = run.task.views_per_image, torch.Generator().manual_seed(_mix(config.train.seed, step))
    if run.embedder is None:
        policy, number = AugmentPolicy(**config.augment.model_dump()), config.train.batch_size * count
        augmentation = draw_augmentation(number, policy=policy, generator=generator)
    else:
        other = torch.randint(2**31, (config.train.batch_size,), generator=generator)
    images, target, indices = batch.images, batch.target, batch.indices
    if len(images) == 0:  # a black image of which nothing is known costs nothing, but takes part in every exchange
        images, target = images.new_zeros(1, *images.shape[1:]), target.new_full((1, target.shape[1]), torch.nan)
        rows, indices = np.zeros(1, dtype=np.int64), torch.zeros(1, dtype=torch.int64)
    with record_function("transfer"):
        images = images.to(device, non_blocking=True)
    scale = _find_scale(run, target)
    total = torch.zeros(len(run.task.parts), device=device)
    whole = (images, target, torch.from_numpy(rows), indices)
    # Compiling for a batch of another size, the last of an epoch or one with unreadable images, would take minutes.
    usual = len(range(run.accelerator.process_index, config.train.batch_size, run.accelerator.num_processes))
    odd = run.compiled and len(images) != usual
    compiled = run.compiled and not odd and device.type == "cuda"
    shares = list(zip(*(part.chunk(config.train.accumulate) for part in whole), strict=True))
    for number, (pixels, truth, places, chosen) in enumerate(shares, 1):
        views: Views | Kept
        with record_function("views"):
            if run.embedder is not None:
                views = Kept(read_features(pixels, run.embedder.model), run.folds[chosen].to(device))
                if run.ordinary is not None:
                    also = run.ordinary.draw(places, other)
                    views = views._replace(ordinary=also, absent=run.ordinary.absent)
            else:
                drawn = places[:, None] * count + torch.arange(count)  # for these images, in the order of `make_views`
                order = torch.cat([drawn[:, 0], drawn[:, 1:].flatten()])
                views = run.task.make_views(pixels, augmentation=augmentation.select(order), compiled=compiled)
        with nullcontext() if number == len(shares) else run.accelerator.no_sync(run.step_module):
            autocast = torch.autocast(device.type, run.dtype, enabled=run.dtype != torch.float32)
            eagerly = torch.compiler.set_stance("force_eager") if odd else nullcontext()
            with record_function("forward"), autocast, eagerly:
                parts = run.step_module(views, truth.to(device, non_blocking=True))
            with record_function("backward"):
                (parts.sum() * scale).backward()
        total += parts.detach()
    return total


def _agree_on_statistics(run: Run, *, images: int) -> None:
    """Give every process the mean of what batch norms have seen, so that all evaluate and save the same model."""
    named = run.task.model.named_buffers()
    held = [buffer for name, buffer in named if name.endswith(("running_mean", "running_var"))]
    if not held:
        return
    weight = max(images, 1e-6)  # where no process has an image, all have seen the same black one
    total = run.accelerator.reduce(torch.cat([held[0].new_ones(1), *held]) * weight, "sum")
    means = (total[1:] / total[0]).split([len(buffer) for buffer in held])
    for buffer, mean in zip(held, means, strict=True):
        buffer.copy_(mean)


def _find_scale(run: Run, target: Tensor) -> Tensor | float:
    """What a summed loss is multiplied by, so that the mean of the processes' gradients is the batch's own."""
    processes = run.accelerator.num_processes
    if run.config.loss.reduction == "sum":
        return float(processes)
    known = (~torch.isnan(target)).sum().to(run.accelerator.device, torch.float32)
    if processes > 1:
        known = run.accelerator.reduce(known, "sum")
    return processes / known.clamp(min=1)


def _mix(*numbers: int) -> int:
    """A seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def compile_run(run: Run, *, steps_left: int) -> None:
    """Compile a run's steps where the configuration says so, or where that pays within the steps that are left."""
    setting, device, why = run.config.precision.compile, run.accelerator.device, ""
    compiled = setting is True
    if setting == "auto" and device.type != "cuda":
        why = ": there is no GPU"
    elif setting == "auto" and run.embedder is not None:
        why = ": the heads of a frozen backbone are trained in no time"
    elif setting == "auto":
        seconds = time_step(run)
        compiled = steps_left * seconds * (1 - 1 / COMPILE_GAIN) > COMPILE_SECONDS
        why = f": {steps_left:,} steps of {seconds:.2g} s are left, compiling costs {COMPILE_SECONDS:.0f} s"
        if compiled and not can_run(_compile_something, device):
            compiled, why = False, ": torch.compile does not work on this machine"
    run.compiled, run.choices["precision.compile"] = compiled, f"precision.compile is {str(compiled).lower()}{why}"
    if compiled:
        torch.compiler.reset()  # else torch gives up compiling after eight networks, such as the teachers of CPSD
        run.step_module.compile(dynamic=False)
        if device.type == "cuda":  # last, for it keeps the names of weights, but not the types of layers
            quicken_training(run.task.model)


def _compile_something(device: torch.device) -> None:
    torch.compile(lambda values: values + 1)(torch.ones(8, device=device))


def time_step(run: Run) -> float:
    """Seconds of a forward and backward pass of the slowest process; the run stays what it was."""
    accelerator, size = run.accelerator, run.task.picture_size
    count = -(-run.config.train.batch_size // accelerator.num_processes)
    black = Batch(
        torch.zeros(count, size, size, 3, dtype=torch.uint8).permute(0, 3, 1, 2),
        torch.full((count, len(run.records.labels)), torch.nan),
        torch.arange(count),
        (),
    )
    buffers = [(buffer, buffer.clone()) for buffer in run.task.buffers()]
    seconds = time_again(run, lambda: compute_gradients(run, black, step=0, rows=np.arange(count)))
    run.optimiser.zero_grad()
    for buffer, value in buffers:
        buffer.copy_(value)
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(accelerator.device)
    return float(accelerator.gather(torch.tensor([seconds], device=accelerator.device)).max())


def time_again(run: Run, work: Callable[[], object]) -> float:
    """Seconds that a run's device needs for some work the second time: the first also compiles and chooses kernels."""
    for _ in range(2):
        began = time.perf_counter()
        work()
        if run.accelerator.device.type == "cuda":
            torch.cuda.synchronize(run.accelerator.device)
        seconds = time.perf_counter() - began
    return seconds


def collect_training(run: Run) -> dict[str, Tensor]:
    """The weights in training and the optimiser's moments, by name."""
    tensors: dict[str, Tensor] = dict(run.task.state_dict())
    for name, weight in _name_weights(run).items():
        tensors |= {f"optimiser.{name}.{key}": value for key, value in run.optimiser.state.get(weight, {}).items()}
    return tensors


def _name_weights(run: Run) -> dict[str, Tensor]:
    """The weights of a task: those of its model by their names there, those of folds by theirs in the task."""
    return {name.removeprefix("model."): weight for name, weight in run.task.named_parameters()}


def restore_training(run: Run, tensors: Mapping[str, Tensor]) -> None:
    """Put what `collect_training` gave back in place."""
    held = {name: value for name, value in tensors.items() if not name.startswith("optimiser.")}
    load_exactly(run.task, held, where="training state")
    weights = _name_weights(run)
    for key, value in tensors.items():
        if key.startswith("optimiser."):
            name, _, moment = key.removeprefix("optimiser.").rpartition(".")
            if value.ndim > 0:  # in the memory order of its weight, which a fused optimiser insists on
                value = torch.empty_like(weights[name].detach()).copy_(value)
            run.optimiser.state[weights[name]][moment] = value
