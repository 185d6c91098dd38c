"""Work for several processes that train together over gloo, and for one that does the same alone."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from run_process import WorkProcess

from pivotpatch.cli.main import main
from pivotpatch.data.loading import Batch
from pivotpatch.inference.scoring import score_pictures
from pivotpatch.training.build import Run, build_run
from pivotpatch.training.config import RunConfig
from pivotpatch.training.images import open_loader
from pivotpatch.training.processes import make_accelerator
from pivotpatch.training.step import compute_gradients, take_step

Arrays = dict[str, NDArray[Any]]


def walk(run: Run) -> Iterator[tuple[int, Batch, NDArray[np.int64]]]:
    """The batches of an epoch, each with its number and the rows of the whole batch that it holds."""
    sampler = run.loader.epoch_sampler
    for number, (share, batch) in enumerate(zip(list(sampler), run.loader, strict=True)):
        yield number, batch, sampler.rows(number)[np.isin(share, batch.indices)]


def find_gradients(config: RunConfig) -> list[Arrays]:
    """The gradient of each batch of the first epoch at the first weights, and the parts of its loss."""
    run, steps = build_run(config, make_accelerator(config)), []
    for number, batch, rows in walk(run):
        parts = compute_gradients(run, batch, step=number, rows=rows)
        found: Arrays = {"parts": parts.numpy(), "images": batch.indices.numpy()}
        for name, weight in run.task.model.named_parameters():
            found |= {name: weight.grad.numpy().copy()} if weight.grad is not None else {}
        run.task.zero_grad()
        steps.append(found)
    return steps


def train_epoch(config: RunConfig) -> list[Arrays]:
    """The model in training and the one that is kept, after an epoch."""
    run = build_run(config, make_accelerator(config))
    for number, batch, rows in walk(run):
        take_step(run, batch, step=number, rows=rows)
    return [{name: value.numpy() for name, value in m.state_dict().items()} for m in (run.task.model, run.model)]


def score_counts(config: RunConfig, counts: list[int]) -> list[Arrays]:
    """Scores of the first images, for each count of them."""
    accelerator = make_accelerator(config)
    run = build_run(config, accelerator)
    found: list[Arrays] = []
    for count in counts:
        loader = open_loader(run.records[:count], config, model=run.model, accelerator=accelerator)
        scores = score_pictures(run.model, loader, accelerator=accelerator, keep_patches=True)
        named = {"indices": scores.indices, "target": scores.target, "each": scores.patch_logits, **scores.logits}
        found.append({name: value.numpy() for name, value in named.items() if value is not None})
    return found


class Spoken(NamedTuple):
    """What a verb said: its exit status, stdout and stderr."""

    status: int
    out: str
    err: str


def run_verb(words: list[str]) -> Spoken:
    """What the command line says in one of the processes."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(words)
    return Spoken(status, out.getvalue(), err.getvalue())


def run_together(work: Callable[..., Any], *arguments: object, processes: int = 2) -> list[Any]:
    """Do some work in processes that know of each other; the results in the order of their ranks."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [WorkProcess(_enter, rank, processes, port, work, arguments) for rank in range(processes)]
    results = [each.hear() for each in started]
    assert [each.wait() for each in started] == [0] * processes
    return results


def _enter(
    rank: int, processes: int, port: int, work: Callable[..., Any], arguments: tuple[object, ...], told: Connection
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    told.send(work(*arguments))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
