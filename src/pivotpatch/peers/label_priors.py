"""What is known of labels before any image is seen, as buffers that training fills: word vectors, co-occurrence."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pivotpatch.errors import InputError, explaining, shorten

SEED, DEVIATION = 0, 0.38
"""Of the vectors of labels that no file gives: their numbers deviate as GloVe's of MS-COCO's labels do."""
_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?", re.IGNORECASE)


class WordVectors(nn.Module):
    """A vector for each label (L,V): drawn from a normal distribution until others are given."""

    def __init__(self, labels: int, width: int) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.empty(labels, width))
        self.vectors: Tensor
        drawn = torch.randn(labels, width, generator=torch.Generator().manual_seed(SEED), device="cpu")
        self.vectors.copy_(DEVIATION * drawn)

    def take(self, vectors: Tensor) -> None:
        """Use these vectors (L,V) from now on."""
        if vectors.shape != self.vectors.shape:
            shapes = f"{tuple(vectors.shape)}, and the model was built for {tuple(self.vectors.shape)}"
            raise InputError("word vectors", f"they are {shapes}", "give a file with vectors of that length")
        self.vectors.copy_(vectors)


class LabelPrior(nn.Module):
    """Something that is made of the numbers of training images that show labels together."""

    def learn_counts(self, counts: Tensor) -> None:
        """Take counts (L,L) of images that show both of two labels; those of a label alone are on the diagonal."""
        raise NotImplementedError


class LabelGraph(LabelPrior):
    """Edges (L,L) between labels, which a function makes of counts; those of no images at all at first."""

    def __init__(self, labels: int, make_edges: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make_edges = make_edges
        self.register_buffer("edges", torch.empty(labels, labels))
        self.edges: Tensor
        self.learn_counts(torch.zeros(labels, labels, device="cpu"))

    def learn_counts(self, counts: Tensor) -> None:
        """Make the edges anew of counts (L,L)."""
        self.edges.copy_(self.make_edges(counts.float()))


def find_conditionals(counts: Tensor) -> Tensor:
    """P(j | i) (L,L), the share of images with label i that show j too; 0 on the diagonal, and where no image has i.

    >>> find_conditionals(torch.tensor([[4.0, 1.0], [1.0, 2.0]]))
    tensor([[0.0000, 0.2500],
            [0.5000, 0.0000]])
    """
    images = counts.diagonal()
    return (counts - torch.diag(images)) / images.clamp(min=1)[:, None]


def read_vectors(path: Path, labels: Sequence[str]) -> Tensor:
    """Vectors (L,V) of labels from a text file with a word and its numbers on each line, as GloVe and fastText write.

    A label is looked for as one word, its parts joined by `_` or `-`, then part by part: it gets the mean of those that
    are found. Capitals do not count. A first line of two numbers, how many words and how long, is passed over, and so
    are names of several words, such as "at name@domain.com" in GloVe's largest file.
    """
    parts = {label: label.lower().replace("_", " ").replace("-", " ").split() for label in labels}
    whole = {label: ["_".join(words), "-".join(words)] for label, words in parts.items()}
    wanted = {word for words in (*parts.values(), *whole.values()) for word in words}
    found: dict[str, Tensor] = {}
    wrong, todo = "cannot be read as text with a word and numbers on each line", "give GloVe's .txt or fastText's .vec"
    with explaining(str(path), wrong, todo, of=(OSError, ValueError)), path.open(encoding="utf-8") as file:
        for line in file:
            word, *numbers = line.rstrip().split(" ")
            word = word.lower()
            if word in wanted and word not in found and len(numbers) > 1 and _NUMBER.fullmatch(numbers[0]):
                found[word] = torch.tensor([float(number) for number in numbers])
    missing = [label for label in labels if not any(word in found for word in (*parts[label], *whole[label]))]
    if missing:
        wrong = f"it knows no word of {shorten(missing)}"
        raise InputError(str(path), wrong, "add a line for each, its words joined by _")
    if len({len(vector) for vector in found.values()}) > 1:
        raise InputError(str(path), "its vectors are not all of one length", "correct it there")

    chosen = [[word for word in whole[label] if word in found][:1] or parts[label] for label in labels]
    return torch.stack([torch.stack([found[w] for w in words if w in found]).mean(dim=0) for words in chosen])
