"""From disk to tensors; knows no model."""
