"""Networks: timm in, logits out; knows no data."""
