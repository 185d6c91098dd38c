"""The command line: reads what is typed, imports the one verb that it names, and tells in a line what went wrong."""

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from pivotpatch import __version__
from pivotpatch.cli.usage import VERBS, add_verb
from pivotpatch.errors import InputError, explain_missing
from pivotpatch.process import keep_freed_memory, wait_asleep


def build_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """The parser of all verbs, or of one alone, which is there sooner."""
    parser = argparse.ArgumentParser(prog="pivotpatch", description="Multi-label image tagging with PAT.")
    parser.add_argument("--version", action="version", version=f"pivotpatch {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for name in VERBS if verb is None else (verb,):
        add_verb(verbs, name)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        0; 1 for what the user can mend, told in one line on stderr; 130 for an interrupt; 141 where the reader of the
        output went away. Wrong usage exits with 2.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sign that the screen lacks must not end the work
    first = next(iter(sys.argv[1:] if argv is None else argv), None)
    args = _parse(build_parser(first if first in VERBS else None), argv)
    if argv is None:  # the process is this command's own
        keep_freed_memory()
        wait_asleep()
    try:
        status = int(args.run(args))
        if sys.stdout:  # None where it was closed
            sys.stdout.flush()
        return status
    except InputError as error:
        print(f"pivotpatch: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if str(error.name).startswith("pivotpatch"):
            raise
        print(f"pivotpatch: {explain_missing(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pivotpatch: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        _drop_output()
        where, todo = str(error.filename or "output"), "check that there is room and that it may be used"
        print(f"pivotpatch: {InputError(where, error.strerror or str(error), todo)}", file=sys.stderr)
        return 1


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments; a verb that takes any number of words takes them after options too."""
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "words") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.words += rest
    return args


def _drop_output() -> None:
    """Send what is still held back to nowhere, or Python would fail over it once more on its way out."""
    if isinstance(sys.stdout, TextIOWrapper):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
