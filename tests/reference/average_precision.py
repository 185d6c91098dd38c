"""Average precision under the monotone envelope, by walking down every threshold."""


def envelope(scores: list[float], target: list[float]) -> float:
    """Area under precision as the best precision at each recall or a higher one."""
    positives = sum(target)
    points = []
    for threshold in sorted(set(scores), reverse=True):
        given = [t for s, t in zip(scores, target, strict=True) if s >= threshold]
        points.append((sum(given) / positives, sum(given) / len(given)))
    area, recall_before = 0.0, 0.0
    for i, (recall, _) in enumerate(points):
        best = max(precision for _, precision in points[i:])
        area += (recall - recall_before) * best
        recall_before = recall
    return area
