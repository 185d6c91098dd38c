"""What verbs tell on stderr in words, without waiting for rich."""

import os
import sys


def tell(line: str) -> None:
    """Print a line to stderr, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
