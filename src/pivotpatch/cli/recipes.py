"""`pivotpatch recipes`: list the recipes of the paper's tables, print one, or compare scores with its published row."""

import argparse
import json
from typing import Any

from rich.text import Text

from pivotpatch.cli.console import Screen, make_table
from pivotpatch.errors import InputError
from pivotpatch.training.config import find_recipe, list_recipes, load_config


def run_recipes(args: argparse.Namespace) -> int:
    """List all recipes, print one, or compare scores with one."""
    if args.compare is not None:
        return _compare(args)
    if args.name is not None:
        path = find_recipe(args.name)
        config = load_config(path)
        print(config.model_dump_json() if args.json else path.read_text("utf-8").rstrip("\n"))
        return 0
    rows: list[dict[str, Any]] = [
        {
            "name": recipe.name,
            "title": recipe.title,
            "data": config.data.train,
            "backbone": config.model.start_from or config.model.backbone,
            "head": config.model.head,
            "task": config.task.kind,
            "published_map": recipe.published,
            "source": recipe.source,
        }
        for recipe, config in ((recipe, load_config(recipe.path)) for recipe in list_recipes())
    ]
    if args.json:
        print(json.dumps(rows))
        return 0
    table = make_table(["name", "backbone", "head", "mAP"])
    table.columns[0].no_wrap = True  # the backbone gives way where the screen is narrow
    table.columns[1].no_wrap, table.columns[1].justify, table.columns[2].justify = False, "left", "left"
    for row in rows:
        backbone = Text(row["backbone"], no_wrap=True, overflow="ellipsis")
        table.add_row(row["name"], backbone, row["head"], _write(row["published_map"]))
    Screen().print(table)
    return 0


def _write(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.1f}"


def _compare(args: argparse.Namespace) -> int:
    """Print what scores are worth beside the paper's row: the model's logits, and PAT-I's where the paper has them."""
    import torch

    from pivotpatch.audit import evaluate_scores
    from pivotpatch.cli.sources import read_policy, read_score_file
    from pivotpatch.core.metrics import MEASURES

    if args.name is None:
        raise InputError("--compare", "there is no recipe to compare with", "name one before it")
    path = find_recipe(args.name)
    file = path.parent / "published.json"
    rows = json.loads(file.read_text("utf-8")).get(path.stem) if file.is_file() else None
    if rows is None:
        raise InputError(f"recipe {args.name!r}", "the paper prints no row of it", "choose one with an mAP in the list")
    scores = read_score_file(args.compare)
    policy = read_policy(args.policy, scores.labels)
    found = evaluate_scores(scores, policy=policy, resamples=0, generator=torch.Generator())
    kind = {"patch": "tde", "patch_only": "patch"}.get(load_config(path).task.kind, "image")
    told, rule = dict[str, Any](), ""
    for row, paper in rows.items():
        judged = kind if row == "model" else "tde"
        if judged not in found.kinds:
            continue
        precision, decided = found.kinds[judged].precision, found.kinds[judged].decided
        if decided is None:
            raise InputError("--policy", f"the thresholds are not for {judged} logits", "choose fixed:P or prior:DATA")
        rule = decided.definition
        ours = {"mAP": precision.mean, **{name: getattr(decided, name) for name in MEASURES}}
        ours |= dict(zip(scores.labels, precision.per_label, strict=True)) if "AP" in paper else {}
        printed = {**paper, **paper.get("AP", {})}
        told[row] = {
            name: {"paper": printed.get(name), "ours": None if value is None else 100 * value}
            for name, value in ours.items()
        }
    if not told:
        raise InputError(str(args.compare), f"there are no {kind!r} logits", "score with the model of the recipe")
    if args.json:
        print(json.dumps({"recipe": path.stem, "policy": rule, **told}))
        return 0
    screen = Screen()
    for row, measures in told.items():
        screen.print(f"{path.stem}{', PAT-I around it' if row == 'patch_inference' else ''}, in per cent")
        table = make_table(["", "paper", "ours", "difference"])
        for name, each in measures.items():
            paper, ours = each["paper"], each["ours"]
            difference = "" if paper is None or ours is None else f"{ours - paper:+.1f}"
            table.add_row(name, _write(paper), _write(ours), difference)
        screen.print(table)
    screen.print(f"ours: step-wise AP; CP to OF1 by {rule}")
    return 0
