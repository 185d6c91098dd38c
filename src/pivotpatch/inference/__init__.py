"""Trained models at work.

`patch_inference` is PAT-I around anything that gives logits. `predictor` and `prediction` turn images into tags and ask
an `engine` (torch), an `exported` file (ONNX) or a `foreign` model; `bulk` tags millions, as a `bulk_job` on the disk.
`scoring` scores a data set, `scores` is what comes of it and `score_file` the same as a file; `plots` draws why.
"""
