"""What a caller may hand to the mathematics."""

from torch import Tensor

from pivotpatch.errors import InputError


def check_shapes(where: str, layout: str, **tensors: Tensor) -> None:
    """Refuse tensors whose shapes are not as a layout says: a word per tensor, and one size per letter.

    >>> import torch
    >>> check_shapes("here", "BL BPL", logits=torch.zeros(2, 3), patch_logits=torch.zeros(2, 4, 3))
    """
    words, fits = layout.split(), True
    sizes: dict[str, int] = {}
    for word, tensor in zip(words, tensors.values(), strict=True):
        shape = list(tensor.shape) if isinstance(tensor, Tensor) else []
        common = [sizes.setdefault(letter, size) for letter, size in zip(word, shape, strict=False)]
        fits = fits and len(shape) == len(word) and common == shape
    if not fits:
        got = [tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in tensors.values()]
        told = ", ".join(f"{name} {shape}" for name, shape in zip(tensors, got, strict=True))
        wanted = ", ".join(f"{name} ({', '.join(word)})" for name, word in zip(tensors, words, strict=True))
        raise InputError(where, f"got {told}", f"give tensors {wanted}")
    if sizes.get("P") == 0:
        raise InputError(where, "there are no patches", "give one or more")
