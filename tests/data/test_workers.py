import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest

from pivotpatch.data.workers import end_with_parent


def work(told: Connection) -> None:
    end_with_parent()
    told.send(os.getpid())
    time.sleep(60)


def start_worker(method: str, told: Connection) -> None:
    context: Any = multiprocessing.get_context(method)
    context.Process(target=work, args=(told,), daemon=True).start()
    time.sleep(60)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_ends_when_the_main_process_is_killed(method: str) -> None:
    context = multiprocessing.get_context("forkserver")
    heard, told = context.Pipe(duplex=False)
    main = context.Process(target=start_worker, args=(method, told))
    main.start()
    told.close()
    worker = heard.recv()
    assert main.pid is not None
    os.kill(worker, 0)
    os.kill(main.pid, signal.SIGKILL)
    with pytest.raises(EOFError):  # all that could write to the pipe have ended
        assert not heard.poll(20) or heard.recv()
    main.join()
