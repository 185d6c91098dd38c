"""What the colours of figures stand for: the Okabe-Ito set and grey, which every kind of colour vision tells apart."""

MODEL = "#0072B2"
BASELINE = "#808080"
KINDS = {"image": "#E69F00", "patch": "#56B4E9", "tde": MODEL}
"""Of logits; a model is judged by the last."""
RUNS = (MODEL, BASELINE, "#009E73", "#CC79A7", "#E69F00", "#D55E00")
"""Of several runs: the model, its baseline, and others."""
