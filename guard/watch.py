"""Ends a hang, and turns signals into a stop after whole steps. dist.py has the phases and the stop flag."""

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import torch.distributed as td

from dist import CURRENT, stop_signal


def watch(limit: float) -> None:
    """Start a thread that detects a stall: a phase that takes longer than `limit` seconds on any rank. The
    thread then prints the stacks of this process and ends the process with status 1. So a hang becomes a
    restart, and every rank prints where it was."""
    if CURRENT.limit:  # an earlier run of this process started the thread
        return
    CURRENT.limit = limit
    store, every, ended = td.distributed_c10d._get_default_store(), min(5.0, limit / 10), threading.Event()

    def look():
        while not ended.wait(every) and td.is_initialized():
            try:
                who = stalled_rank(store, limit)
            except (RuntimeError, ValueError):  # the store is closed: another rank has ended
                return
            if who:
                print_stacks(f"stalled ({who} took more than {limit:.0f} s, --stall_limit); "
                             f"this rank is in phase {CURRENT.name}; its stacks:")
                time.sleep(3 * every)  # so that the other ranks print their stacks too
                os._exit(1)

    thread = threading.Thread(target=look, daemon=True, name="watch")
    thread.start()

    def end():
        ended.set()
        thread.join(10)

    # At exit Python kills daemon threads. A thread killed inside the store's C++ code aborts the process, so
    # the thread is ended first.
    atexit.register(end)


def stalled_rank(store: td.Store, limit: float) -> str:
    """Returns the rank that stalled first, with its host and phase, as text; "" if no rank has stalled. A
    stalled rank reports itself in the store."""
    if time.perf_counter() - CURRENT.began > limit:
        store.set("stalled", f"rank {td.get_rank()} on {os.uname().nodename} in phase {CURRENT.name}")
    elif not store.check(["stalled"]):
        return ""
    return store.get("stalled").decode()


def print_stacks(head: str) -> None:
    """Print the stack of each thread of this process, innermost call first. Each line starts with the rank
    and is one write, so the lines of several ranks do not mix."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)  # reads no source file: a hanging disk may be the cause
        file.seek(0)
        lines = file.read().splitlines()
    for line in [head, *lines]:
        os.write(sys.__stderr__.fileno(), f"rank {os.environ['RANK']}: {line}\n".encode())


@contextlib.contextmanager
def handle_signals(grace: float) -> Iterator[None]:
    """Inside, SIGTERM, SIGUSR1 and ctrl-C request a stop (`stop_requested`) instead of ending the process.
    The process ends anyway, with status 1, after `grace` seconds or at a second ctrl-C."""
    ended = threading.Event()

    def request(number, frame):  # takes no lock: another signal may come while it runs
        now = time.monotonic()
        if not stop_signal:
            stop_signal.extend((signal.Signals(number).name, now))
        elif number == signal.SIGINT and now - stop_signal[1] > 2:  # torchrun repeats the first ctrl-C
            os._exit(1)

    def watch_grace():
        while not ended.wait(0.2):
            if stop_signal and time.monotonic() - stop_signal[1] > grace:
                print(f"{stop_signal[0]} came {grace:.0f} s ago (--grace), and phase {CURRENT.name} has not "
                      "ended: leaving without a save", file=sys.stderr)
                os._exit(1)

    stop_signal.clear()
    threading.Thread(target=watch_grace, daemon=True, name="grace").start()
    before = {number: signal.signal(number, request)
              for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ended.set()
        stop_signal.clear()
