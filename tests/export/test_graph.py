import copy

import numpy as np
import pytest
import torch
from made_networks import LABELS, ask, fit_made_up, make_network, make_pictures, make_plain
from torch import Tensor

from pivotpatch.core.patches import resize_images
from pivotpatch.errors import InputError
from pivotpatch.export.onnx import PictureGraph, check_difference, trace_pictures
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.runtime.decoding import resize_pixels
from pivotpatch.runtime.engine import Answer, Array, Pixels


class Off(TorchEngine):
    """What a file would say whose answers are wrong in a field."""

    def __init__(self, graph: PictureGraph, **wrong: float | None) -> None:
        super().__init__(graph.model)
        self.wrong = wrong

    def ask(self, images: Pixels) -> Answer[Array]:
        side = self.picture_size
        said = super().ask(np.stack([resize_pixels(image, (side, side)) for image in images]))
        changed = {name: None if by is None else getattr(said, name) + by for name, by in self.wrong.items()}
        return Answer(**said._asdict() | changed)


def test_the_graph_says_what_the_engine_says_and_leaves_the_model_alone() -> None:
    """Images are resized first."""
    model = make_network(source_size=64).train()
    fit_made_up(model)
    before, pictures = copy.deepcopy(model.state_dict()), make_pictures(3, 50, 90)
    graph = PictureGraph(model)
    said = Answer(*graph(pictures.permute(0, 2, 3, 1)))
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(said, ask(TorchEngine(model.eval()), resize_images(pictures, (64, 64))))
    assert (graph.description.labels, graph.description.thresholds) == (LABELS, model.thresholds)
    assert (graph.description.grid, graph.description.picture_size) == (2, 64)


def test_a_file_passes_with_its_difference_or_is_refused() -> None:
    graph = PictureGraph(make_network())
    assert check_difference(Off(graph), graph.engine, tolerance=1e-3) == 0
    assert check_difference(Off(graph, patch_probs=5e-4), graph.engine, tolerance=1e-3) == pytest.approx(5e-4, rel=1e-3)
    for name, by, said in (("weights", 0.002, "0.002, which is more than 0.001"), ("probs", float("nan"), "nan")):
        with pytest.raises(InputError, match=f"differ by {said}"):
            check_difference(Off(graph, **{name: by}), graph.engine, tolerance=1e-3)
    with pytest.raises(InputError, match="differ by inf"):
        check_difference(Off(graph, patch_probs=None), graph.engine, tolerance=1e-3)


def test_what_cannot_be_traced_is_told_in_one_line() -> None:
    model = make_plain()

    def look(_module: object, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].mean() > 0:  # a decision that depends on the picture has no place in a graph
            raise AssertionError

    model.register_forward_pre_hook(look)
    with pytest.raises(InputError, match="^export: torch cannot trace this model \\([^\n]+\\); try another"):
        trace_pictures(PictureGraph(model))
