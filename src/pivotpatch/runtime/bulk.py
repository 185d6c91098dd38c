"""Tag any number of images: constant memory, any number of processes, every row once; its files: `parts`."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Any, Literal

from pivotpatch.errors import InputError, import_extra
from pivotpatch.process import Progress, Share, ignore
from pivotpatch.runtime.decoding import read_ahead
from pivotpatch.runtime.engine import Engine
from pivotpatch.runtime.packed import Found, Opened
from pivotpatch.runtime.parts import BETWEEN, SUFFIXES, Row, Summary, TagJob
from pivotpatch.runtime.prediction import Prediction, TagRule
from pivotpatch.runtime.predictor import Read, answer_batch, decode_for
from pivotpatch.runtime.tag_names import TagRules
from pivotpatch.writing import check_place, holding

FITTED, AS_THEY_ARE = TagRule(), TagRules()
ALONE = Share()

Work = Callable[[TagJob, list[range], Callable[..., bool], Callable[[int], bool]], bool]
"""Does the stretches that are left of a job, each by `tag_stretch`, which comes with its options set; tells how many
more images are done, and is told whether to go on. Whether all are done."""


def tag_pictures(
    engine: Engine,
    paths: Iterable[Found] | None,
    out: Path,
    *,
    rule: TagRule = FITTED,
    rules: TagRules = AS_THEY_ARE,
    all_probs: bool = False,
    unread: Mapping[str, int] | None = None,
    note: Mapping[str, Any] | None = None,
    share: Share = ALONE,
    overwrite: bool = False,
    batch_size: int = 64,
    threads: int = 1,
    on_error: Literal["skip", "error"] = "skip",
    progress: Progress = ignore,
    stopping: Callable[[], bool] | None = None,
    work: Work | None = None,
) -> Summary | None:
    """Write the tags of images to a file, one row per image in the order of `paths`.

    Columns are `picture`, `labels` and `probs`, both lists with the most probable first. What could not be read is
    listed in `<out>.failures.jsonl` instead, settings and counts are in `<out>.summary.json`.

    Work that was ended in whatever way goes on where the same is asked for again: no row is lost and none comes twice.
    Processes that share the work need not start or end together, nor be as many as before. Any other that comes while
    one is at work is refused (not on Windows, nor on network disks without locks).

    Args:
        engine: the model.
        paths: images, as `find_images` or `find_sources` yields them; None goes on with those that unfinished work
            began with.
        out: a .parquet, .jsonl or .csv file.
        rule: which labels an image gets.
        rules: which of them become tags, and what those are called.
        all_probs: add a column with the probability of every label, in the order that the summary lists.
        unread: files that were left out, by suffix, for the summary; complete once all `paths` have come.
        note: what else the rows depend on, such as the model's name; plain types. It is kept in the summary, and work
            goes on only where it is the same.
        share: which images are this process's.
        overwrite: begin anew whatever is there; not for several processes at one file.
        batch_size: images at once.
        threads: that decode while the model is at work.
        on_error: an image that cannot be read is listed, or ("error") ends the work with its `InputError`.
        progress: told how many images are found, then how many of this process's are done, and of how many.
        stopping: asked after each batch whether to stop; what is done is kept.
        work: what tags the stretches that are left, such as a cluster; by default this process.

    Returns:
        What came of it; None where it was stopped, or other processes have not finished their shares.
    """
    job = check_out(out, share, overwrite=overwrite, resume=paths is None)
    names = *map(rules.call, engine.labels), *rules.added
    odd = [label for label in names if BETWEEN in label]
    if odd and out.suffix.lower() == ".csv":
        wrong = f"the label {odd[0]!r} holds {BETWEEN!r}, which stands between labels"
        raise InputError(str(out), wrong, "write .parquet or .jsonl")
    renamed = dict(zip(engine.labels, names, strict=False))
    settings = {
        **(note or {}),
        "labels": engine.labels,
        "thresholds": engine.thresholds,
        **asdict(rule),
        "tags": None if rules == AS_THEY_ARE else asdict(rules) | {"rename": renamed},
        "all_probs": all_probs,
    }
    with holding(job.lock, shared=share.world > 1) as held:
        if not held:
            raise InputError(str(job.out), "another process is at work on it", "wait for it, or write to another file")
        if share.world == 1:
            job.clear_away()
        begun = partial(job.begin, settings, paths or (), unread, progress, overwrite=overwrite)
        if not (job.resume(settings) if paths is None else begun()):
            return job.read_summary()
        mine = share.stretch(job.settings["pictures"])
        gaps = job.find_gaps(mine)
        done = len(mine) - sum(map(len, gaps))
        if gaps:
            progress("tag", done, len(mine))

        def goes_on(count: int) -> bool:
            nonlocal done
            done += count
            progress("tag", done, len(mine))
            return not (stopping and stopping())

        options: dict[str, Any] = {"rule": rule, "rules": rules, "all_probs": all_probs, "batch_size": batch_size}
        tag: Callable[..., bool] = partial(tag_stretch, **options, threads=max(threads, 1), stop=on_error == "error")
        try:
            if gaps and work:
                finished = work(job, gaps, tag, goes_on)
            else:
                finished = all(tag(job, engine, gap, goes_on) for gap in gaps)
            return None if not finished or job.find_gaps() else job.join()
        except (OSError, InputError):
            if not job.out.exists():
                raise
            return job.read_summary()  # another process has finished it


def tag_stretch(
    job: TagJob,
    engine: Engine,
    stretch: range,
    goes_on: Callable[[int], bool],
    *,
    rule: TagRule,
    rules: TagRules,
    all_probs: bool,
    batch_size: int,
    threads: int,
    stop: bool,
) -> bool:
    """Tag a stretch of the list and keep its rows as parts; whether `goes_on` let all come."""
    images, named = tee(job.list_images(stretch))

    def make_row(found: Prediction | InputError, image: Opened) -> Row:
        if isinstance(found, InputError):
            if stop:
                raise found
            return {"picture": image.name, "error": str(found)}
        tags = rules.apply(rule.choose(found))
        row = {"picture": image.name, "labels": [tag.label for tag in tags], "probs": [tag.prob for tag in tags]}
        return {**row, "all_probs": found.probs.tolist()} if all_probs else row

    def read(image: Opened) -> Read:
        decoded = decode_for(engine, image.read(), name=image.name)
        return image.name, decoded.pixels, decoded

    with closing(read_ahead(images, read, batch_size=batch_size, threads=threads)) as ahead:
        batches = (list(map(make_row, answer_batch(engine, batch), named)) for batch in ahead)
        return job.keep(stretch.start, batches, goes_on)


def check_out(out: Path, share: Share, *, overwrite: bool = False, resume: bool = False) -> TagJob:
    """The job that `tag_pictures` would do; refused where it would not."""
    if not 0 <= share.rank < share.world:
        raise InputError("share", f"rank {share.rank} of {share.world}", "give a rank from 0 to world - 1")
    check_place(out, SUFFIXES, "a file of tags")
    if out.suffix.lower() == ".parquet":
        import_extra("pyarrow", "parquet")
    job = TagJob(out)
    if overwrite and share.world > 1:
        wrong = f"{share.world} processes cannot tell what is old from what one of them has begun"
        raise InputError("--overwrite", wrong, f"remove {job.out} and {job.parts} first")
    # One of several processes may come when the others have finished; an end in the last moment leaves its parts.
    unfinished = job.parts.exists() or job.leftovers
    if job.out.exists() and not (overwrite or resume or share.world > 1 or unfinished):
        raise InputError(str(job.out), "exists already", "write to another file, or replace it with --overwrite")
    return job
