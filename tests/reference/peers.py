"""Other systems' heads from their equations, one image, label and place at a time, on a head's own weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
State = Mapping[str, Array]


def softmax(values: Array) -> Array:
    powers = np.exp(values - values.max())
    return np.asarray(powers / powers.sum())


def sigmoid(value: Any) -> Any:
    return 1 / (1 + np.exp(-value))


def leaky(values: Array) -> Array:
    return np.where(values > 0, values, 0.2 * values)


def list_places(features: Array) -> list[Array]:
    """Vectors (D,) of the places of a map (D,h,w), row by row."""
    return [features[:, row, column] for row in range(features.shape[1]) for column in range(features.shape[2])]


def pool_pairs(features: Array) -> Array:
    """Means of blocks of two by two places, or of what is left of one at the end."""
    rows, columns = (range(0, size, 2) for size in features.shape[1:])
    return np.stack([[features[:, r : r + 2, c : c + 2].mean(axis=(1, 2)) for c in columns] for r in rows]).transpose(
        2, 0, 1
    )


def csra(state: State, features: Array, label: int, *, lam: float = 0.5) -> float:
    total = 0.0
    for head, sharp in enumerate((1, 2, 4, None)):
        weight = state["project.weight"][label, head]
        scores = np.array([weight @ place / np.sqrt(weight @ weight) for place in list_places(features)])
        attended = scores.max() if sharp is None else softmax(sharp * scores) @ scores
        total += float(scores.mean() + lam * attended)
    return total


def conditional(counts: Array, given: int, other: int) -> float:
    """P(other | given) of different labels."""
    return 0.0 if given == other or counts[given, given] == 0 else float(counts[given, other] / counts[given, given])


def ml_gcn_edges(counts: Array) -> Array:
    """The published steps, one entry at a time: threshold 0.4, a share of 0.2 for neighbours, D^-1/2 on both sides."""
    size = len(counts)
    near = [[float(conditional(counts, i, j) >= 0.4 and i != j) for j in range(size)] for i in range(size)]
    kept = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            column = sum(near[k][j] for k in range(size))
            kept[i, j] = 0.25 * near[i][j] / (column + 1e-6) + (i == j)
    degree = [sum(kept[i]) for i in range(size)]
    return np.array([[kept[j, i] / np.sqrt(degree[i] * degree[j]) for j in range(size)] for i in range(size)])


def ml_gcn(state: State, features: Array, label: int) -> float:
    edges, words = state["project.graph.edges"], state["project.words.vectors"]
    size = len(words)
    first = [leaky(sum(edges[i, j] * words[j] for j in range(size)) @ state["project.first"]) for i in range(size)]
    classifier = sum(edges[label, j] * first[j] for j in range(size)) @ state["project.second"]
    return float(sum(classifier[c] * features[c].max() for c in range(len(features))))


def add_gcn(state: State, features: Array, label: int) -> float:
    def conv(name: str, value: Array) -> Array:
        bias = state.get(f"{name}.bias", np.zeros(1))
        weight = state[f"{name}.weight"]
        return weight.reshape(weight.shape[0], -1) @ value + bias

    places, size = list_places(features), len(state["activation.weight"])
    active = np.array([conv("activation", place) for place in places])  # (N,L)
    found = [sum(sigmoid(active[n, k]) * conv("enter", place) for n, place in enumerate(places)) for k in range(size)]
    static = state["static_edges.weight"][..., 0]
    mixed = []
    for k in range(size):
        heard = leaky(sum(static[k, j] * found[j] for j in range(size)))
        mixed.append(found[k] + leaky(conv("static_weight", heard)))
    summary = conv("summary", np.mean(mixed, axis=0))
    mean, var = state["norm.running_mean"], state["norm.running_var"]
    summary = leaky((summary - mean) / np.sqrt(var + 1e-5) * state["norm.weight"] + state["norm.bias"])
    column = sigmoid(conv("dynamic_edges", np.concatenate([summary, mixed[label]])))  # from all labels to this one
    heard = leaky(sum(column[j] * mixed[j] for j in range(size)))
    feature = found[label] + leaky(conv("dynamic_weight", heard))
    score = feature @ state["project.weight"][label, :, 0] + state["project.bias"][label]
    return float((score + active[:, label].max()) / 2)


def ssgrl(state: State, features: Array, label: int) -> float:
    places, words, edges = list_places(pool_pairs(features)), state["words.vectors"], state["graph.edges"]
    size, width = len(words), len(features)
    first = []
    for k in range(size):
        met = [np.tanh((state["see.weight"] @ place) * (state["read.weight"] @ words[k])) for place in places]
        heat = [(state["attend.weight"] @ (state["mix.weight"] @ each))[0] for each in met]
        first.append(sum(share * place for share, place in zip(softmax(np.array(heat)), places, strict=True)))
    parts = [slice(0, width), slice(width, 2 * width), slice(-width, None)]  # update, reset, new

    def own(part: int, value: Array) -> Array:
        return np.asarray(state["state.weight"][parts[part]] @ value + state["state.bias"][parts[part]])

    now = first
    for _ in range(3):
        after = []
        for k in range(size):
            into = sum(edges[k, j] * now[j] for j in range(size))
            out = sum(edges[j, k] * now[j] for j in range(size))
            told = state["message.weight"] @ np.concatenate([into, out]) + state["message.bias"]
            update, reset = (sigmoid(told[parts[part]] + own(part, now[k])) for part in (0, 1))
            new = np.tanh(told[parts[2]] + own(2, reset * now[k]))
            after.append((1 - update) * now[k] + update * new)
        now = after
    joined = np.concatenate([now[label], first[label]])
    judged = np.tanh(state["leave.weight"] @ joined + state["leave.bias"])
    return float(judged @ state["project.weight"][label, :, 0] + state["project.bias"][label])


def ms_cma(state: State, features: Array, label: int) -> float:
    found = []
    for scale in (features, pool_pairs(features)):
        places, near = list_places(scale), []
        for place in places:
            hidden = np.maximum(state["enter.0.weight"][..., 0, 0] @ place + state["enter.0.bias"], 0)
            seen = state["enter.2.weight"][..., 0, 0] @ hidden + state["enter.2.bias"]
            vector = state["semantic.vectors"][label]
            near.append(max(float(seen @ vector / np.sqrt((seen @ seen) * (vector @ vector))), 0.0) + 1e-6)
        total = sum(near)
        found.append(sum(share / total * place for share, place in zip(near, places, strict=True)))
    return float(np.concatenate(found) @ state["project.weight"][label, :, 0] + state["project.bias"][label])


def attend(state: State, name: str, tokens: Sequence[Array], *, heads: int) -> list[Array]:
    """A transformer layer, normalised after each step."""

    def norm(value: Array, part: str) -> Array:
        scaled = (value - value.mean()) / np.sqrt(value.var() + 1e-5)
        return np.asarray(scaled * state[f"{name}.{part}.weight"] + state[f"{name}.{part}.bias"])

    weights, biases = (state[f"{name}.self_attention.in_proj_{part}"] for part in ("weight", "bias"))
    width = len(tokens[0])
    query, key, value = (
        [weights[start : start + width] @ token + biases[start : start + width] for token in tokens]
        for start in (0, width, 2 * width)
    )
    after = []
    for place, token in enumerate(tokens):
        joined = []
        for head in range(heads):
            part = slice(head * width // heads, (head + 1) * width // heads)
            heat = np.array([query[place][part] @ each[part] / np.sqrt(width / heads) for each in key])
            joined.append(sum(share * each[part] for share, each in zip(softmax(heat), value, strict=True)))
        out = state[f"{name}.self_attention.out_proj.weight"] @ np.concatenate(joined)
        told = norm(token + out + state[f"{name}.self_attention.out_proj.bias"], "self_norm")
        hidden = np.maximum(state[f"{name}.feedforward.0.weight"] @ told + state[f"{name}.feedforward.0.bias"], 0)
        added = state[f"{name}.feedforward.3.weight"] @ hidden + state[f"{name}.feedforward.3.bias"]
        after.append(norm(told + added, "feedforward_norm"))
    return after


def ida(state: State, features: Array, label: int) -> float:
    filters = [each / (np.sqrt(each @ each) + 1 / 32) for each in state["project.weight"][label]]
    width, tokens = len(filters[0]), list[Array]()
    for sample, each in enumerate(filters):
        parts = [place[sample * width : (sample + 1) * width] for place in list_places(features)]
        shares = softmax(np.array([each @ part for part in parts]))
        tokens.append(sum(share * part for share, part in zip(shares, parts, strict=True)))
    for layer in range(2):
        tokens = attend(state, f"second.{layer}", tokens, heads=1)
    left = state["leave.weight"] @ np.concatenate(tokens) + state["leave.bias"]
    return float(left @ np.concatenate(filters))


def c_tran(state: State, features: Array, label: int, *, known: Sequence[float] | None = None) -> float:
    queries = [each.copy() for each in state["queries"]]
    for place, value in enumerate(known or ()):
        if value in (0, 1):
            queries[place] += state["states"][int(value)]
    tokens = []
    for token in (*list_places(features), *queries):
        scaled = (token - token.mean()) / np.sqrt(token.var() + 1e-5)
        tokens.append(scaled * state["norm.weight"] + state["norm.bias"])
    for layer in range(3):
        tokens = attend(state, f"layers.{layer}", tokens, heads=4)
    judged = tokens[len(tokens) - len(queries) + label]
    return float(judged @ state["project.weight"][label, :, 0] + state["project.bias"][label])


def kssnet_edges(counts: Array) -> Array:
    """Symmetric co-occurrence from 0.03 on, four parts of it and six of the label itself, D^-1/2 on both sides."""
    size = len(counts)
    mixed = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            near = (conditional(counts, i, j) + conditional(counts, j, i)) / 2
            mixed[i, j] = 0.4 * (near if near >= 0.03 else 0.0) + 0.6 * (i == j)
    degree = [sum(mixed[i]) for i in range(size)]
    return np.array([[mixed[i, j] / np.sqrt(degree[i] * degree[j]) for j in range(size)] for i in range(size)])


def kssnet_labels(state: State, layers: int) -> list[Array]:
    """States of labels behind so many layers of KSSNet's graph network."""
    now, edges = list(state["words.vectors"]), state["graph.edges"]
    for number in range(layers):
        into = [leaky(each) if number else each for each in now]
        heard = [sum(edges[i, j] * into[j] for j in range(len(now))) for i in range(len(now))]
        first, second, bias = (state[f"layers.{number}.{part}"] for part in ("0.weight", "1.weight", "1.bias"))
        now = [second @ (first @ each) + bias for each in heard]
    return [np.tanh(each) for each in now]


def kssnet_injected(state: State, features: Array, stage: int) -> Array:
    """A stage's map (C,h,w) of an image, with what labels found at each place."""
    labels, added = kssnet_labels(state, stage + 1), features.copy()
    for row in range(features.shape[1]):
        for column in range(features.shape[2]):
            place = features[:, row, column]
            for number, label in enumerate(labels):
                added[:, row, column] += (label @ place) * state[f"laterals.{stage}"][number]
    return added


def kssnet(state: State, features: Array, label: int) -> float:
    pooled = np.mean(list_places(features), axis=0)
    layers = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    made = kssnet_labels(state, layers)[label]
    return float(pooled @ made + pooled @ state["project.weight"][label] + state["project.bias"][label])


def lstm(state: State, given: Array, held: tuple[Array, Array]) -> tuple[Array, Array]:
    """One step of an LSTM: gates in the order in, forget, new, out."""
    told = state["cell.weight_ih"] @ given + state["cell.bias_ih"] + state["cell.weight_hh"] @ held[0]
    enter, forget, new, leave = np.split(told + state["cell.bias_hh"], 4)
    kept = sigmoid(forget) * held[1] + sigmoid(enter) * np.tanh(new)
    return sigmoid(leave) * np.tanh(kept), kept


def start(state: State) -> tuple[Array, Array]:
    size = state["cell.weight_hh"].shape[1]
    return np.zeros(size), np.zeros(size)


def cnn_rnn(state: State, features: Array, label: int) -> float:
    image = state["see.weight"] @ np.mean(list_places(features), axis=0) + state["see.bias"]
    held, given, named, best = start(state), np.zeros(len(image)), list[int](), -np.inf
    for _ in range(4):
        held = lstm(state, given, held)
        judged = np.maximum(state["leave.weight"] @ held[0] + state["leave.bias"] + image, 0)
        scores = state["project.weight"] @ judged + state["project.bias"]
        best = max(best, float(scores[label]))
        named.append(max((each for each in range(len(scores)) if each not in named), key=lambda each: scores[each]))
        given = state["project.weight"][named[-1]]
    return best


def sample(features: Array, x: float, y: float) -> Array:
    """A map (D,h,w) between its places; -1 and 1 are its borders, beyond which it goes on as there."""
    height, width = features.shape[1:]
    row, column = (min(max(((at + 1) * size - 1) / 2, 0), size - 1) for at, size in ((y, height), (x, width)))
    top, left = int(row), int(column)
    total = np.zeros(len(features))
    for r, down in ((top, 1 - (row - top)), (min(top + 1, height - 1), row - top)):
        for c, right in ((left, 1 - (column - left)), (min(left + 1, width - 1), column - left)):
            total += down * right * features[:, r, c]
    return total


def rdal(state: State, features: Array, label: int) -> float:
    held, glimpse, best = start(state), np.mean(list_places(features), axis=0), -np.inf
    for x, y in ((-0.5, -0.5), (0.5, -0.5), (-0.5, 0.5), (0.5, 0.5), (np.nan, np.nan)):  # where to look next
        held = lstm(state, glimpse, held)
        judged = np.maximum(state["leave.weight"] @ held[0] + state["leave.bias"], 0)
        best = max(best, float(state["project.weight"][label] @ judged + state["project.bias"][label]))
        if not np.isnan(x):
            wide, high, right, down = state["locate.weight"] @ judged + state["locate.bias"]
            across = [x + np.tanh(right) / 2 + sigmoid(wide) * step for step in (-2 / 3, 0, 2 / 3)]
            rows = [y + np.tanh(down) / 2 + sigmoid(high) * step for step in (-2 / 3, 0, 2 / 3)]
            glimpse = np.mean([sample(features, at, row) for row in rows for at in across], axis=0)
    return best


def rarl(state: State, features: Array, label: int) -> float:
    held, x, y, best = start(state), 0.0, 0.0, -np.inf
    for _ in range(5):
        seen = []
        for half in (0.3, 0.6, 1.0):
            steps = [half * step for step in (-2 / 3, 0, 2 / 3)]
            seen.append(np.mean([sample(features, x + right, y + down) for down in steps for right in steps], axis=0))
        held = lstm(state, np.mean(seen, axis=0), held)
        judged = np.maximum(state["leave.weight"] @ held[0] + state["leave.bias"], 0)
        best = max(best, float(state["project.weight"][label] @ judged + state["project.bias"][label]))
        x, y = np.tanh(state["locate.weight"] @ judged + state["locate.bias"])
    return best


def svm(state: State, features: Array, label: int) -> float:
    pooled = np.mean(list_places(features), axis=0)
    scaled = 10 * pooled / np.sqrt(pooled @ pooled)
    return float(scaled @ state["project.weight"][label] + state["project.bias"][label])


def unit(vector: Array) -> Array:
    return np.asarray(vector / np.sqrt(vector @ vector))


def fev_lv(state: State, features: Array, label: int) -> float:
    regions = [unit(each) for each in (*list_places(features), *list_places(pool_pairs(features)))]
    centres, exemplars = ([unit(each) for each in state[f"project.{name}"]] for name in ("centres", "exemplars"))
    encoded, scores = [], []
    for number, centre in enumerate(centres):
        shares = [softmax(np.array([20 * region @ each for each in centres]))[number] for region in regions]
        encoded.append(unit(sum(share * (region - centre) for share, region in zip(shares, regions, strict=True))))
    for region in regions:
        near = softmax(np.array([20 * region @ each for each in exemplars]))
        scores.append(sum(share * state["project.labels_of"][label, m] for m, share in enumerate(near)))
    feature_view = unit(np.concatenate(encoded)) @ state["project.weight"][label]
    return float(30 * (feature_view + max(scores)) / 2 + state["project.bias"][label])


ORACLES: dict[str, Callable[..., float]] = {
    "csra": csra,
    "ml_gcn": ml_gcn,
    "add_gcn": add_gcn,
    "ssgrl": ssgrl,
    "ms_cma": ms_cma,
    "ida": ida,
    "c_tran": c_tran,
    "kssnet": kssnet,
    "cnn_rnn": cnn_rnn,
    "rdal": rdal,
    "rarl": rarl,
    "fev_lv": fev_lv,
    "svm": svm,
}
