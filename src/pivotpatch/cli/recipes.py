"""`pivotpatch recipes`: list the recipes of the paper's tables, or print one."""

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pivotpatch.training.recipes import Recipe

# Where no terminal says how wide it is, so wide that no line is broken.
_WIDTH = 120


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
    from pivotpatch.training.config import load_config
    from pivotpatch.training.recipes import find_recipe, list_recipes

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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in ("name", "data", "backbone", "head", "task"):
        table.add_column(heading, no_wrap=heading != "backbone")  # the one that gives way on a narrow screen
    table.add_column("paper\nmAP", justify="right")
    for row in rows:
        published = row["published_map"]
        table.add_row(
            str(row["name"]),
            str(row["data"] or "yours").partition(":")[0],
            Text(str(row["backbone"]), no_wrap=True, overflow="ellipsis"),
            str(row["head"]),
            str(row["task"]),
            "-" if published is None else f"{published:.1f}",
        )
    # Printed by print, so that a reader who went away is met as in every other verb.
    with console.capture() as printed:
        console.print(table)
    print(printed.get(), end="")
