"""Trained models as one ONNX file that runs without this package, or as a checkpoint of half the bytes."""
