"""Tags by Hugging Face `datasets`: python hf_datasets.py FOLDER_OF_IMAGES OUT."""

import sys
from pathlib import Path

import datasets

from pivotpatch.cluster import PatchTagger

images = datasets.load_dataset("imagefolder", data_dir=sys.argv[1], split="train")
images = images.cast_column("image", datasets.Image(decode=False)).flatten()  # the tagger decodes what it needs
tagger = PatchTagger(effort=0.6, columns=("image.bytes", "image.path"))
tagged = images.map(tagger, batched=True, batch_size=64, num_proc=2)
Path(sys.argv[2]).mkdir()
tagged.remove_columns("image.bytes").rename_column("image.path", "path").to_parquet(f"{sys.argv[2]}/tags.parquet")
