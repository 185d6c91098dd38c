"""Tags inside other engines: Ray Data, Daft, Spark, `datasets`; none of them is imported here."""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

if TYPE_CHECKING:
    from pivotpatch.cluster.tagger import PatchTagger as PatchTagger

__getattr__ = make_face(
    __name__,
    {
        "tagger": "PatchTagger",
    },
)
