"""`pivotpatch app`: a web page on this machine that tags pictures and shows why."""

import argparse
import sys
from pathlib import Path

from pivotpatch.core.errors import InputError


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    app = verbs.add_parser(
        "app",
        help="tag pictures on a web page",
        description="Serve a web page that tags pictures and shows why, and the endpoint POST /api/predict. "
        "Nothing leaves this machine. Ctrl-C ends it.",
    )
    app.add_argument(
        "--model",
        default="tagger",
        help="a run, a checkpoint, an exported file, or a name such as hub:owner/name (tagger)",
    )
    app.add_argument("--device", help="such as cpu or cuda:1; a GPU where there is one by default")
    app.add_argument("--effort", type=float, default=1.0, help="from 0 to 1 (1)")
    app.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1, which others cannot reach)")
    app.add_argument("--port", type=int, default=7860, help="0 for any that is free (7860)")
    app.set_defaults(run=run_app)


def run_app(args: argparse.Namespace) -> int:
    """Serve until the process is told to end."""
    try:
        from pivotpatch.app.server import is_loopback, open_socket, serve
    except ModuleNotFoundError as error:
        raise InputError(str(error.name), "is not installed", "pip install pivotpatch[app]") from None
    from pivotpatch.inference.predictor import Predictor

    predictor = Predictor.load(args.model, device=args.device, effort=args.effort)
    with open_socket(args.host, args.port) as listening:
        host, port = listening.getsockname()[:2]
        if not is_loopback(listening):
            warning = "whoever can reach this machine can use the page; there is no password"
            print(f"warning: {host} is not loopback: {warning}", file=sys.stderr)
        print(f"http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)", flush=True)
        try:
            serve(predictor, listening, name=Path(args.model).name)
        except KeyboardInterrupt:  # the way to end it, no failure
            print(file=sys.stderr)
    return 0
