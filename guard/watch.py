"""Ends a process that hangs, turns a signal such as ctrl-C into a request to save and stop, and prints why a
process crashed."""

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator

from configs import printable, tell_torchrun
from dist import CURRENT, not_ignored, stop_signal


def watch(limit: float) -> None:
    """Start a thread that ends the process, with status 1, in two cases:

    - A phase takes longer than `limit` seconds. The thread first prints this process's stacks. All ranks are
      in the same phase, so each ends itself.
    - A signal came, and the run has not ended --grace seconds later (see `handle_signals`)."""
    if CURRENT.limit:  # an earlier run in this process started the thread
        return
    CURRENT.limit = limit

    def look():
        while time.perf_counter() - CURRENT.began < limit:
            time.sleep(0.2)
            signaled = stop_signal[:]  # a copy, because the run may end now and clear the list
            if signaled and time.monotonic() - signaled[1] > CURRENT.grace:
                print(
                    f"{signaled[0]} came {CURRENT.grace:.0f} s ago (--grace), and phase "
                    f"{CURRENT.name} has not ended: this process ends without saving",
                    file=sys.stderr,
                )
                os._exit(1)
        print_stacks(
            f"stalled: phase {CURRENT.name} took more than {limit:.0f} s (--stall_limit); "
            f"the stacks of this process on {os.uname().nodename}:"
        )
        time.sleep(min(15.0, 0.3 * limit))  # the other ranks need time to print their stacks
        os._exit(1)

    threading.Thread(target=look, daemon=True, name="watch").start()


def print_stacks(head: str) -> None:
    """Print `head` and the stacks of this process. Each line is one write, so that lines of several ranks do
    not mix."""
    with tempfile.TemporaryFile("w+") as file:
        # Python's module traceback would read source files, which may be on a disk that hangs.
        faulthandler.dump_traceback(file)
        file.seek(0)
        lines = [head, *file.read().splitlines()]
    for line in lines:
        os.write(sys.__stderr__.fileno(), f"rank {os.environ['RANK']}: {line}\n".encode())


@contextlib.contextmanager
def handle_signals(grace: float) -> Iterator[None]:
    """Context manager. Inside it, SIGTERM, SIGUSR1, SIGHUP (a closed terminal), SIGQUIT and ctrl-C request a
    stop (dist.stop_requested). A SIGHUP or SIGQUIT that the caller ignores, as under nohup, does not. If the
    body still runs `grace` seconds after the signal, the thread of `watch` ends the process with status 1. A
    second ctrl-C ends the process at once, also with status 1."""
    CURRENT.grace = grace

    # The handler must take no lock. A second signal can interrupt it, and the second call would wait forever
    # for the first call's lock.
    def request(number, frame):
        now = time.monotonic()
        if not stop_signal:
            stop_signal.extend((signal.Signals(number).name, now))
            if os.environ.get("RANK", "0") == "0":
                text = (
                    f"\n{stop_signal[0]}: the run saves and stops when phase {CURRENT.name} ends, "
                    f"in at most {grace:.0f} s; a second ctrl-C ends it without saving\n"
                )
                with contextlib.suppress(OSError):  # the terminal was closed
                    os.write(2, text.encode())
        # torchrun repeats the first ctrl-C, so a second ctrl-C within 2 seconds is ignored.
        elif number == signal.SIGINT and now - stop_signal[1] > 2:
            os._exit(1)

    before = {
        number: signal.signal(number, request)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, *not_ignored())
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop_signal.clear()


def report_crash() -> None:
    """Print the current exception, with the rank, its host and phase, and tell torchrun."""
    why = printable(traceback.format_exc())
    where = f"rank {os.environ['RANK']} on {os.uname().nodename}"
    print(f"{where} failed in phase {CURRENT.name}:\n{why}", file=sys.stderr, flush=True)
    tell_torchrun(why)
