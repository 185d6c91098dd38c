import copy

import pytest
import torch
from made_networks import LABELS, fit_made_up, make_network, make_pictures
from torch import Tensor

from pivotpatch.core.patches import resize_images
from pivotpatch.errors import InputError
from pivotpatch.export.graph import PictureGraph, check_difference, trace_pictures
from pivotpatch.inference.engine import Answer, TorchEngine


class Off(TorchEngine):
    """What a file would say whose answers are wrong in a field."""

    def __init__(self, graph: PictureGraph, **wrong: float | None) -> None:
        super().__init__(graph.model)
        self.wrong = wrong

    def __call__(self, pictures: Tensor) -> Answer:
        said = super().__call__(resize_images(pictures, (self.picture_size, self.picture_size)))
        changed = {name: None if by is None else getattr(said, name) + by for name, by in self.wrong.items()}
        return Answer(**said._asdict() | changed)


def test_the_graph_says_what_the_engine_says_and_resizes_first() -> None:
    model = make_network(source_size=64)
    fit_made_up(model)
    pictures = make_pictures(3, 50, 90)
    graph = PictureGraph(model)
    said = Answer(*graph(pictures.permute(0, 2, 3, 1)))
    torch.testing.assert_close(said, TorchEngine(model)(resize_images(pictures, (64, 64))))
    assert graph.description.labels == LABELS
    assert graph.description.thresholds == model.thresholds
    assert (graph.description.grid, graph.description.picture_size) == (2, 64)


def test_the_network_is_left_alone() -> None:
    model = make_network().double().train()
    before = copy.deepcopy(model.state_dict())
    PictureGraph(model)(make_pictures(2, 32, 32).permute(0, 2, 3, 1))
    assert model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_one_trace_serves_all_numbers_and_sizes_of_pictures() -> None:
    graph = PictureGraph(make_network(patches=False))
    traced = trace_pictures(graph).module()
    for shape in ((1, 32, 32), (5, 32, 32), (2, 41, 7)):
        pictures = make_pictures(*shape).permute(0, 2, 3, 1)
        torch.testing.assert_close(traced(pictures), graph(pictures))


def test_a_file_that_agrees_passes_with_its_difference() -> None:
    graph = PictureGraph(make_network())
    assert check_difference(Off(graph), graph, tolerance=1e-3) == 0
    assert check_difference(Off(graph, patch_probs=5e-4), graph, tolerance=1e-3) == pytest.approx(5e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"weights": 0.002}, "differ by 0.002, which is more than 0.001"),
        ({"probs": float("nan")}, "differ by nan"),
        ({"patch_probs": None}, "differ by inf"),
    ],
)
def test_a_file_that_differs_is_refused(wrong: dict[str, float | None], said: str) -> None:
    graph = PictureGraph(make_network())
    with pytest.raises(InputError, match=said):
        check_difference(Off(graph, **wrong), graph, tolerance=1e-3)


def test_what_cannot_be_traced_is_told_in_one_line() -> None:
    model = make_network(patches=False)

    def look(_module: object, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].mean() > 0:  # a decision that depends on the picture has no place in a graph
            raise AssertionError

    model.register_forward_pre_hook(look)
    with pytest.raises(InputError, match="^export: torch cannot trace this model \\([^\n]+\\); try another"):
        trace_pictures(PictureGraph(model))
