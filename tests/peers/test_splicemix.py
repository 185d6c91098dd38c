"""SpliceMix, cell by cell."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.peers.splicemix import GRIDS, draw_cells, find_inconsistency, splice_images, split_cells, unite_targets
from pivotpatch.training.config import load_config
from pivotpatch.training.task import SpliceTask, make_task

CHANGES = ["task.kind=image", "mix.share=0.5", "mix.consistent=true", "loss.name=binary_cross_entropy"]
LABELS = ["a", "b", "c"]


def test_cells_are_drawn_as_published() -> None:
    torch.manual_seed(0)
    drawn = [draw_cells(8, share=0.25) for _ in range(3000)]
    kinds = [tuple(cells.shape[1:]) for cells in drawn]
    assert {len(cells) for cells in drawn} == {2}
    for grid, chance in zip(GRIDS, (0.3, 0.4, 0.3), strict=True):
        assert kinds.count(grid) / len(kinds) == pytest.approx(chance, abs=0.03)
    grids = [grid.flatten().tolist() for cells in drawn for grid in cells]
    blank = [grid.count(-1) for grid in grids]
    assert sum(count > 0 for count in blank) / len(blank) == pytest.approx(0.3, abs=0.02)
    for grid, count in zip(grids, blank, strict=True):
        shown = [cell for cell in grid if cell >= 0]
        assert count < len(grid)
        assert len(set(shown)) == len(shown)
        assert set(shown) <= set(range(8))
    assert {cell for grid in grids for cell in grid} == set(range(-1, 8))
    assert draw_cells(1, share=0.25).max() == 0  # a batch of one image repeats it


def test_a_grid_shows_each_image_in_its_cell() -> None:
    images = torch.rand(4, 3, 10, 14)
    cells = torch.tensor([[[2, 0, -1], [1, 3, 0]], [[3, -1, 1], [0, 2, 2]]])
    spliced = splice_images(images, cells)
    assert spliced.shape == (2, 3, 10, 14)
    for grid in range(2):
        for row in range(2):
            for column in range(3):
                shown = spliced[grid, :, 5 * row : 5 * row + 5, 4 * column : 4 * column + 4]
                which = int(cells[grid, row, column])
                small = F.interpolate(images[which][None], size=(5, 4), mode="bilinear", antialias=True)[0]
                torch.testing.assert_close(shown, torch.zeros_like(shown) if which < 0 else small)
    assert not spliced[..., 12:].any()  # what three columns leave over


def test_a_grid_has_the_labels_of_all_its_images() -> None:
    nan = float("nan")
    target = torch.tensor([[1.0, 0.0, nan], [0.0, 0.0, 1.0], [0.0, nan, 0.0]])
    cells = torch.tensor([[[0, 1]], [[1, 2]], [[0, -1]], [[2, -1]]])
    wanted = torch.tensor([[1.0, 0.0, 1.0], [0.0, nan, 1.0], [1.0, 0.0, nan], [0.0, nan, 0.0]])
    torch.testing.assert_close(unite_targets(target, cells), wanted, equal_nan=True)


def test_cells_of_a_map_lie_where_those_of_the_image_lie() -> None:
    features = torch.arange(7.0)[None, None, None].expand(1, 1, 7, 7)
    found = [cell[0, 0, 0].tolist() for cell in split_cells(features, 2, 3)]
    assert found == [[0, 1, 2], [2, 3, 4], [4, 5, 6]] * 2
    assert [tuple(cell.shape[2:]) for cell in split_cells(features, 2, 3)] == [(4, 3)] * 6


def slow_costs(
    model: MultiLabelClassifier, images: Tensor, spliced: Tensor, cells: Tensor, target: Tensor
) -> list[float]:
    """The three parts, one image, cell and label at a time."""

    def cost(logits: Tensor, wanted: Tensor) -> float:
        probs = logits.sigmoid()
        terms = -(wanted * probs.log() + (1 - wanted) * (1 - probs).log())
        return float(terms[~wanted.isnan()].sum())

    logits = [model(image[None])[0] for image in images]
    parts = [sum(cost(row, wanted) for row, wanted in zip(logits, target, strict=True)), 0.0, 0.0]
    for grid, places in zip(spliced, cells, strict=True):
        parts[1] += cost(model(grid[None])[0], unite_targets(target, places[None])[0])
        features = model.backbone(grid[None])
        for cell, which in zip(split_cells(features, *places.shape), places.flatten().tolist(), strict=True):
            if which >= 0:
                parts[2] += cost(model.head(cell)[0], logits[which].sigmoid())
    return parts


def test_the_loss_is_that_of_images_grids_and_cells() -> None:
    torch.manual_seed(1)
    model = MultiLabelClassifier("test_resnet", LABELS, image_size=96).eval()
    task = make_task(model, load_config(None, CHANGES))
    assert isinstance(task, SpliceTask)
    assert task.parts == ("image", "spliced", "consistency")
    views: Any = task.make_views(torch.randint(256, (4, 3, 96, 96), dtype=torch.uint8))
    views.cells[0, 0, 0] = -1
    views = views._replace(spliced=splice_images(views.image, views.cells))
    target = torch.tensor([[1.0, 0.0, 1.0], [0.0, float("nan"), 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    found = task(views, target)
    with torch.no_grad():
        expected = slow_costs(model, views.image, views.spliced, views.cells, target)
    assert found.tolist() == pytest.approx(expected, rel=1e-4)


def test_an_image_that_only_fills_a_batch_costs_nothing() -> None:
    model = MultiLabelClassifier("test_resnet", LABELS, image_size=64).eval()
    task = make_task(model, load_config(None, CHANGES))
    views = task.make_views(torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8))
    nothing = torch.full((2, len(LABELS)), float("nan"))
    assert task(views, nothing).tolist() == [0.0, 0.0, 0.0]
    assert task(views, torch.zeros_like(nothing))[2] > 0


def test_a_whole_image_is_not_drawn_to_its_cell() -> None:
    whole, cell = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 1, 2, requires_grad=True)
    find_inconsistency(cell, whole, torch.zeros(1, 1, 1, dtype=torch.long)).backward()
    assert whole.grad is None
    assert cell.grad is not None
    assert (cell.grad > 0).all()
