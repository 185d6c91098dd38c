"""Trained networks as one file that runs without this package: ONNX, or compiled by AOTInductor."""
