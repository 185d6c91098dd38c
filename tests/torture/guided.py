"""Damage guided by coverage: atheris (libFuzzer) changes valid files to reach new lines of the readers.

It is needed for this part alone (`pip install atheris`). What is found is left in the folder `TORTURE_KEPT`, where
that is set.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from torture import damage

KINDS = ("image", "table", "json", "toml", "scores", "archive", "checkpoint")
_SLOW = {"checkpoint": 10, "archive": 2}  # by how much less often
_READERS = ("pivotpatch", "PIL", "json", "tomllib", "tarfile", "zipfile", "made_engines")


def run(folder: Path, *, long: bool, seed: int) -> tuple[dict[str, object], list[str]]:
    """Let a process of each kind change files until it has done so often; each ends at its first find."""
    if find_spec("atheris") is None:
        return {"guided": "not run: atheris is not installed"}, []
    wanted, found, counts = int(os.environ.get("GUIDED", 20_000 if long else 500)), list[str](), dict[str, object]()
    for kind in KINDS:
        corpus = folder / kind
        corpus.mkdir()
        for place, (_, content) in enumerate(damage.KINDS[kind].write()):
            (corpus / str(place)).write_bytes(bytes([place]) + content)
        begun = len(list(corpus.iterdir()))
        options = ["-timeout=10", "-rss_limit_mb=2048", f"-seed={seed + 1}", "-len_control=0", "-max_len=65536"]
        runs = f"-runs={wanted // _SLOW.get(kind, 1)}"
        command = [sys.executable, "-m", "torture.guided", kind, str(corpus), *options, runs]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        tried = re.findall(r"^#(\d+)\s+DONE|Done (\d+) runs", done.stderr, re.MULTILINE)
        counts[kind] = max((int(number) for pair in tried for number in pair if number), default=0)
        counts[f"{kind} new"] = len(list(corpus.iterdir())) - begun  # files that reach lines no other does
        if done.returncode:
            raised = re.findall(r"^(?:.*Error: .*|.*ERROR: .*)$", done.stderr, re.MULTILINE)
            found.append(f"{kind}: exit {done.returncode}, {(raised or [done.stderr[-300:]])[0][:500]}")
            if kept := os.environ.get("TORTURE_KEPT"):
                for path in (*folder.glob("crash-*"), *folder.glob("timeout-*"), *folder.glob("oom-*")):
                    shutil.move(path, Path(kept) / f"{kind}-{path.name}")
    return counts, found


def main() -> None:
    """Change files of one kind for ever, or as often as libFuzzer is told to."""
    import atheris  # type: ignore[import-untyped]

    with atheris.instrument_imports(include=list(_READERS)):  # what is imported in a reader is, too
        kind = sys.argv.pop(1)
        files = damage.KINDS[kind].write()
        for name, content in files:  # all imports come before the first try
            damage._try_one(kind, name, content)
    atheris.instrument_func(damage.KINDS[kind].read)

    def try_one(data: bytes) -> None:
        name = files[data[0] % len(files)][0] if data else "none"
        result = damage._try_one(kind, name, data[1:])
        if result not in ("answered", "refused"):
            raise AssertionError(result)

    atheris.Setup(sys.argv, try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
