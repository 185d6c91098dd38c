"""What every benchmark on a GPU says of its machine, and how it keeps its figures."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def describe_machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    return {"device": name, "torch": torch.__version__}


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write all figures so far, or nothing where no file is named."""
    if path is not None:
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        unfinished.replace(path)
