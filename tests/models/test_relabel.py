import pytest
import torch

from pivotpatch.models.classifier import Architecture, MultiLabelClassifier, SharedClassifier, load_relabelled
from pivotpatch.models.patch_classifier import PatchClassifier

OLD, NEW = ("cat", "dog", "sofa"), ("lamp", "sofa", "cat", "tree", "moon")
OPTIONS = {"linear": {}, "query2label": {"width": 32}, "ml_decoder": {"width": 32}}


def make(kind: type[SharedClassifier], head: str, labels: tuple[str, ...], *, seed: int) -> SharedClassifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(Architecture("test_resnet", head, 64, {}, OPTIONS[head]), labels)
        for value in model.state_dict().values():  # buffers and biases too, which begin alike
            if value.is_floating_point():
                value.copy_(0.1 * torch.rand_like(value))
    return model.eval()


@pytest.mark.parametrize("head", list(OPTIONS))
def test_a_label_that_was_not_known_keeps_its_own_weights_and_all_else_is_taken(head: str) -> None:
    trained, model = make(PatchClassifier, head, OLD, seed=0), make(PatchClassifier, head, NEW, seed=1)
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    assert load_relabelled(model, trained) == ("sofa", "cat")
    for name, value in model.state_dict().items():
        if value.shape == trained.state_dict()[name].shape:
            torch.testing.assert_close(value, trained.state_dict()[name])
        else:  # the one dimension in which they differ counts the labels
            (place,) = (d for d, size in enumerate(value.shape) if size != trained.state_dict()[name].shape[d])
            for row, label in enumerate(NEW):
                is_known = label in OLD
                source = trained.state_dict()[name].select(place, OLD.index(label)) if is_known else None
                wanted = fresh[name].select(place, row) if source is None else source
                torch.testing.assert_close(value.select(place, row), wanted)


def test_the_same_labels_are_the_same_network_also_where_a_decoder_groups_them() -> None:
    labels = tuple(f"label {number}" for number in range(120))  # more than ML-Decoder has groups
    trained = make(MultiLabelClassifier, "ml_decoder", labels, seed=0)
    model = make(MultiLabelClassifier, "ml_decoder", labels, seed=1)
    assert load_relabelled(model, trained) == labels
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, trained.state_dict()[name])
