"""`pivotpatch app`: a web page on this machine that tags images and shows why."""

import argparse
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.errors import InputError

if TYPE_CHECKING:
    from pivotpatch.app.server import Access

_TOKEN = re.compile(r"[\w.~+/=-]{8,}", re.ASCII)


def run_app(args: argparse.Namespace) -> int:
    """Serve until the process is told to end."""
    from pivotpatch.app.server import serve
    from pivotpatch.runtime.predictor import Predictor

    args.token = choose_token(args.token)  # refused before anything is loaded
    predictor = Predictor.load(args.model, device=args.device, effort=args.effort)
    name = Path(args.model).name
    listen(args, lambda listening, access: serve(predictor, listening, name=name, access=access))
    return 0


def listen(
    args: argparse.Namespace,
    serve: "Callable[[socket.socket, Access], object]",
    *,
    opened: Callable[[str], object] = str,
) -> None:
    """Serve whoever may call at a socket, whose address is printed, until Ctrl-C or SIGTERM.

    `opened` is told the address, too.
    """
    from pivotpatch.app.server import Access, is_loopback, open_socket

    token = args.token
    with open_socket(args.host, args.port) as listening:
        host, port = listening.getsockname()[:2]
        far = not is_loopback(listening)
        if far and token is None:
            warning = "whoever can reach this machine can use the page; add --token to keep others out"
            print(f"warning: {host} is not loopback: {warning}", file=sys.stderr)
        secret = "" if token is None else f"/#token={token}"  # browsers keep what follows # to themselves
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}{secret}"
        names = [*args.allow_host, *([args.host, socket.gethostname()] if far else [])]
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is held is given back then, too
        try:
            print(f"{url} (Ctrl-C ends it)", flush=True)
            opened(url)
            serve(listening, Access(token, far, names))
        except KeyboardInterrupt:  # the way to end it, no failure
            print(file=sys.stderr)
        finally:
            signal.signal(signal.SIGTERM, before)


def choose_token(given: str | None) -> str | None:
    """What requests must carry: as given, made up, or of the environment; None for nothing."""
    if given == "":  # --token without a value
        return secrets.token_urlsafe(24)
    token = given or os.environ.get("PIVOTPATCH_TOKEN")
    if token is None or _TOKEN.fullmatch(token):
        return token
    raise InputError("token", "it is too short or has other signs", "give 8 or more of A-Z a-z 0-9 . _ ~ + / = -")
