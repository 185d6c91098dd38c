"""Tags by Daft: python daft_frame.py FOLDER_OF_IMAGES OUT."""

import sys

import daft
import pyarrow as pa

from pivotpatch.cluster import PatchTagger

TAGS = pa.struct({"labels": pa.list_(pa.string()), "probs": pa.list_(pa.float32()), "error": pa.string()})


@daft.cls
class Tagger:
    def __init__(self) -> None:
        self.tagger = PatchTagger(effort=0.6)

    @daft.method.batch(return_dtype=daft.DataType.from_arrow_type(TAGS), unnest=True, batch_size=64)
    def tag(self, content: daft.Series) -> pa.Array:
        return self.tagger(pa.record_batch({"bytes": content.to_arrow()})).select(TAGS.names).to_struct_array()


images = daft.from_glob_path(f"{sys.argv[1]}/**")  # also s3://, gs://
images.select("path", Tagger().tag(images["path"].download())).write_parquet(sys.argv[2])
