"""What verbs tell on stderr in words, without waiting for rich."""

import os
import sys


def tell(line: str) -> None:
    """Print a line to stderr, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def write_amount(done: int, total: int | None, speed: float, unit: str) -> str:
    """How much of how much, and how fast."""
    if unit == "bytes":
        from rich.filesize import decimal

        of = "" if total is None else f" of {decimal(total)}"
        return f": {decimal(done)}{of}" + (f", {decimal(int(speed))}/s" if speed else "")
    of = "" if total is None else f" of {total:,}"
    return f": {done:,}{of}" + (f", {speed:.3g} {unit}/s" if speed and unit else "")
