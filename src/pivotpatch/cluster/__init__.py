"""Tags inside other engines (Ray Data, Daft, Spark, `datasets`), and tagging jobs on Ray; none is imported here."""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

if TYPE_CHECKING:
    from pivotpatch.cluster.on_ray import tag_on_ray as tag_on_ray
    from pivotpatch.cluster.tagger import PatchTagger as PatchTagger

__getattr__ = make_face(
    __name__,
    {
        "on_ray": "tag_on_ray",
        "tagger": "PatchTagger",
    },
)
