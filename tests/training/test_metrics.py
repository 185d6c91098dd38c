import pytest
import torch
from made_scores import make_scores
from reference.average_precision import envelope
from run_process import make_config
from sklearn.metrics import average_precision_score

from pivotpatch.inference.scores import Scores
from pivotpatch.training.build import Run, build_run
from pivotpatch.training.folder import RunState
from pivotpatch.training.metrics import describe_run, measure_scores, sum_up_steps
from pivotpatch.training.processes import make_accelerator

ROWS = [[8.0, 4.0, 4.0, 1.0], [3.0, 1.0, 1.0, 5.0], [2.0, 0.0, 5.0, 3.0]]  # loss of images and patches, pictures, norm


def make_run(*changes: str) -> Run:
    config = make_config("data.hold=nothing", *changes)
    return build_run(config, make_accelerator(config))


@pytest.fixture(scope="module")
def run() -> Run:
    """Of PAT-T, with seven steps an epoch."""
    return make_run()


def test_an_entry_is_the_mean_over_pictures_and_the_steps_are_counted_once(run: Run) -> None:
    state = RunState(step=10, pending=[*ROWS], pictures=7, train_seconds=1.0)
    entry = sum_up_steps(run, state, since=7, seconds=4.0)
    assert entry == {
        "step": 10,
        "epoch": pytest.approx(10 / 7),
        "loss": pytest.approx(18 / 10),
        "loss_image": pytest.approx(13 / 10),
        "loss_patch": pytest.approx(5 / 10),
        "gradient_norm": pytest.approx(3.0),  # of steps, however many pictures they had
        "lr": run.optimiser.param_groups[0]["lr"],
        "pictures_per_second": pytest.approx(10 / 4),
    }
    assert (state.pending, state.pictures, state.train_seconds) == ([], 17, 5.0)


def test_steps_from_before_a_resume_have_losses_but_no_time(run: Run) -> None:
    whole, resumed = (RunState(step=10, pending=[*ROWS]) for _ in range(2))
    expected = sum_up_steps(run, whole, since=7, seconds=4.0)
    entry = sum_up_steps(run, resumed, since=9, seconds=4.0)  # one of the three was taken since
    assert entry.pop("pictures_per_second") == pytest.approx(expected.pop("pictures_per_second") / 3)
    assert entry == expected
    assert resumed.pictures == 4  # a third of ten, and never none


def test_steps_without_a_picture_have_a_loss_all_the_same(run: Run) -> None:
    """Those of which nothing could be read."""
    entry = sum_up_steps(run, RunState(step=1, pending=[[0.0, 0.0, 0.0, 0.5]]), since=0, seconds=1.0)
    assert (entry["loss"], entry["gradient_norm"], entry["pictures_per_second"]) == (0, 0.5, 0)


def mean_precision(scores: Scores, kind: str, definition: str) -> float:
    """By scikit-learn, or by walking down every threshold."""
    means = []
    for logits, target in zip(scores.logits[kind].T, scores.target.T, strict=True):
        known = ~target.isnan()
        said, true = logits[known].tolist(), target[known].tolist()
        means.append(average_precision_score(true, said) if definition == "step" else envelope(said, true))
    return sum(means) / len(means)


@pytest.mark.parametrize("definition", ["step", "envelope"])
@pytest.mark.parametrize(
    ("kind", "expected"), [("patch", ["image", "patch", "tde"]), ("image", ["image"]), ("patch_only", ["patch"])]
)
def test_what_a_task_trains_is_measured_as_the_configuration_says(
    kind: str, expected: list[str], definition: str
) -> None:
    scores = make_scores(("cat", "dog", "cup"))
    found = measure_scores(make_run(f"task.kind={kind}", f"evaluation.definition={definition}"), scores)
    assert list(found) == expected
    for name, each in found.items():
        assert (each.labels, each.definition) == (("cat", "dog", "cup"), definition)
        assert each.mean == pytest.approx(mean_precision(scores, name, definition))


def test_a_run_that_has_not_begun_has_no_speed_and_no_best(run: Run) -> None:
    told = describe_run(run, RunState(), seconds=2.0, finished=False)
    assert (told["finished"], told["steps"], told["epochs"], told["seconds"]) == (False, 0, 0, 2.0)
    assert (told["pictures_per_second"], told["best_val_mAP"], told["best_step"]) == (None, None, 0)
    assert ("peak_memory_GB" in told) == (run.accelerator.device.type == "cuda")


def test_the_best_step_is_that_of_validation_or_else_the_last(run: Run) -> None:
    state = RunState(step=14, best=0.75, best_step=7, pictures=98, train_seconds=4.0, not_read={"b": "2", "a": "1"})
    told = describe_run(run, state, seconds=9.0, finished=True)
    assert (told["steps"], told["epochs"], told["pictures_per_second"]) == (14, 2, 24.5)
    assert (told["best_step"], told["best_val_mAP"]) == (7, 0.75)
    assert told["chosen_by"] == "validation mAP of the tde logits"
    assert told["average_precision"] == "step-wise sum over recall (scikit-learn)"
    assert list(told["not_read"].items()) == [("a", "1"), ("b", "2")]
    alone = describe_run(make_run("data.val_fraction=0"), RunState(step=14), seconds=9.0, finished=True)
    assert (alone["best_step"], alone["chosen_by"]) == (14, "nothing, the last step")


def test_a_state_is_only_looked_at(run: Run) -> None:
    state = RunState(step=3, pending=[*ROWS], not_read={"b": "2", "a": "1"})
    before, drawn = state.model_dump(), torch.get_rng_state()
    describe_run(run, state, seconds=1.0, finished=False)["not_read"]["c"] = "3"
    assert state.model_dump() == before
    assert torch.equal(torch.get_rng_state(), drawn)
