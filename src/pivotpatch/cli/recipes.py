"""`pivotpatch recipes`: list the recipes of the paper's tables, or print one."""

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pivotpatch.training.config import Recipe


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    recipes = verbs.add_parser(
        "recipes",
        help="list the recipes of the paper's tables, or print one",
        description="List the recipes for the rows of the paper's tables with the mAP that was published, in per cent."
        " With a name, print that recipe, to be changed and given to pivotpatch train as a file.",
    )
    recipes.add_argument("name", nargs="?", metavar="NAME", help="the recipe to print; all are listed by default")
    recipes.add_argument("--json", action="store_true", help="write JSON; of one recipe all settings, defaults too")
    recipes.set_defaults(run=run_recipes)


def run_recipes(args: argparse.Namespace) -> int:
    """List all recipes, or print one."""
    from pivotpatch.training.config import find_recipe, list_recipes, load_config

    if args.name is not None:
        path = find_recipe(args.name)
        config = load_config(path)
        print(config.model_dump_json() if args.json else path.read_text("utf-8").rstrip("\n"))
        return 0
    rows = [_describe(recipe) for recipe in list_recipes()]
    if args.json:
        print(json.dumps(rows))
    else:
        _print_table(rows)
    return 0


def _describe(recipe: "Recipe") -> dict[str, str | float | None]:
    from pivotpatch.training.config import load_config

    config = load_config(recipe.path)
    return {
        "name": recipe.name,
        "title": recipe.title,
        "data": config.data.train,
        "backbone": config.model.start_from or config.model.backbone,
        "head": config.model.head,
        "task": config.task.kind,
        "published_map": recipe.published,
        "source": recipe.source,
    }


def _print_table(rows: list[dict[str, str | float | None]]) -> None:
    """Names begin with the data and end with the method; the backbone gives way where the screen is narrow."""
    from rich.text import Text

    from pivotpatch.cli.console import Screen, make_table

    table = make_table(["name", "backbone", "head", "mAP"])
    table.columns[0].no_wrap, table.columns[1].no_wrap = True, False
    table.columns[1].justify = table.columns[2].justify = "left"
    for row in rows:
        published = row["published_map"]
        figure = "-" if published is None else f"{published:.1f}"
        backbone = Text(str(row["backbone"]), no_wrap=True, overflow="ellipsis")
        table.add_row(str(row["name"]), backbone, str(row["head"]), figure)
    Screen().print(table)
