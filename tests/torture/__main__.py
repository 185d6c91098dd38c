"""`make torture`: kills, damaged inputs, faults of the system, and a server under load; TORTURE=long for hours.

`PYTHONPATH=tests python -m torture [kills|damage|guided|faults|server ...]`. The counts are printed as JSON; what was
found is a line each on stderr, and the exit status is 1. benchmarks/README.md says what was run and found.
"""

import json
import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

PARTS = ("kills", "damage", "guided", "faults", "server")


def main() -> int:
    """Run the parts that are named, or all."""
    wrong = [name for name in sys.argv[1:] if name not in PARTS]
    if wrong:
        print(f"torture: {wrong[0]} is no part; give some of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    long, seed = os.environ.get("TORTURE") == "long", int(os.environ.get("SEED", "0"))
    found: list[str] = []
    for name in sys.argv[1:] or PARTS:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            counts, finds = import_module(f"torture.{name}").run(Path(folder), long=long, seed=seed)
            os.chdir("/")
        found += finds
        print(json.dumps({"part": name, **counts, "found": len(finds), "seconds": round(time.monotonic() - begun)}))
        for line in finds:
            print(f"{name}: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
