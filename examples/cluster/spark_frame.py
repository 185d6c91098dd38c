"""Tags by Spark, an iterator of Arrow batches per task: python spark_frame.py FOLDER_OF_IMAGES OUT."""

import sys
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

from pivotpatch.cluster import PatchTagger


def tag(batches: Iterator[Any]) -> Iterator[Any]:
    tagger = PatchTagger(effort=0.6, columns="content")
    for batch in batches:
        yield tagger(batch).select(["path", "labels", "probs", "error"])


spark = SparkSession.builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", 64).getOrCreate()
images = spark.read.format("binaryFile").load(sys.argv[1]).select("path", "content")
tagged = images.mapInArrow(tag, "path string, labels array<string>, probs array<float>, error string")
tagged.write.parquet(sys.argv[2])
