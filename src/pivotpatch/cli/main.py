"""The command line: one file per verb; heavy imports happen inside the verb that needs them."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from pivotpatch import __version__
from pivotpatch.core.errors import InputError

# Each verb is a module of this package with `add_parser(verbs)`, which sets `run` as its default.
VERBS = ("data",)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = argparse.ArgumentParser(prog="pivotpatch", description="Multi-label image tagging with PAT.")
    parser.add_argument("--version", action="version", version=f"pivotpatch {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb in VERBS:
        import_module(f"pivotpatch.cli.{verb}").add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb: exit 0, 1 for what the user can mend (one line on stderr), 2 for usage, 130 for an interrupt."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except InputError as error:
        print(f"pivotpatch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pivotpatch: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
