"""What a trained network knows, for one with other labels."""

from collections.abc import Sequence

import torch

from pivotpatch.models.classifier import Architecture, SharedClassifier


def load_relabelled(model: SharedClassifier, trained: SharedClassifier) -> tuple[str, ...]:
    """Give a network the weights of one of the same kind and architecture that has other labels.

    What belongs to a label goes to the label of the same name. Labels that `trained` does not know keep what they have,
    and so does what depends on the number of labels in another way, such as the groups of ML-Decoder.

    Returns:
        The labels that both know.
    """
    if model.labels == trained.labels:
        model.load_state_dict(trained.state_dict())
        return model.labels
    shared = [name for name in model.labels if name in trained.labels]
    to, source = (torch.tensor([each.labels.index(name) for name in shared]).long() for each in (model, trained))
    places = _find_label_places(type(trained), trained.architecture, labels=trained.labels)
    held, given = model.state_dict(), trained.state_dict()
    for name, value in given.items():
        place = places[name]
        if place is None:
            held[name].copy_(value)
        elif place >= 0 and held[name].shape == _resize(value.shape, place, len(model.labels)):
            held[name].index_copy_(place, to, value.index_select(place, source))
    return tuple(shared)


def _find_label_places(
    kind: type[SharedClassifier], architecture: Architecture, *, labels: Sequence[str]
) -> dict[str, int | None]:
    """The dimension of each tensor that counts the labels; None where there is none, -1 where they count otherwise."""
    more = (*labels, "\n")  # no label of anybody's
    with torch.device("meta"):
        before, after = (kind(architecture, names).state_dict() for names in (labels, more))
    places: dict[str, int | None] = {}
    for name, value in before.items():
        steps = [there - here for here, there in zip(value.shape, after[name].shape, strict=True)]
        counts = [place for place, step in enumerate(steps) if step]
        places[name] = None if not counts else counts[0] if counts == [counts[0]] and steps[counts[0]] == 1 else -1
    return places


def _resize(shape: torch.Size, place: int, size: int) -> tuple[int, ...]:
    """A shape with another size in one dimension."""
    return (*shape[:place], size, *shape[place + 1 :])
