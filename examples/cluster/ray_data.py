"""Tags by Ray Data, on as many machines as the cluster has: python ray_data.py FOLDER_OF_IMAGES OUT."""

import sys

import ray.data

from pivotpatch.cluster import PatchTagger

images = ray.data.read_binary_files(sys.argv[1], include_paths=True)  # also s3://, gs://
workers = ray.data.ActorPoolStrategy(min_size=1, max_size=8)
tagged = images.map_batches(PatchTagger, fn_constructor_kwargs={"effort": 0.6}, batch_size=64, compute=workers)
tagged.drop_columns(["bytes"]).write_parquet(sys.argv[2])
