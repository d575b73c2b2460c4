"""Ends a run that hangs, turns a signal such as ctrl-C into a request to save and stop, and prints why a
process crashed."""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator

import torch.distributed as td

from dist import CURRENT, handled_signals, stop_signal
from guard.messages import printable, tell_torchrun

# In the traceback of a rank that lost its connection to another one
LOST = re.compile("gloo/transport|Dist(Backend|Network)Error")


def watch(limit: float) -> None:
    """Start a thread that ends the process, with status 1, in two cases:

    - No rank has made progress for `limit` seconds (see dist.progress). The thread first prints this
      process's stacks. Each rank ends itself.
    - A signal came, and the run has not ended --grace seconds later (see `handle_signals`).

    The threads of all ranks tell each other of progress and signals. So a rank may wait for other ranks as
    long as one of them makes progress, and a signal to one rank stops all."""
    # CURRENT: phase, progress and time limits of this process (dist.Phase)
    started = CURRENT.limit > 0  # by an earlier run in this process
    CURRENT.limit = limit
    if started:
        return
    # A connection of its own, because other threads may wait in the store.
    store = td.distributed_c10d._get_default_store().clone()
    # No daemon: if Python ended while a thread is inside the store's C++ code, the process would crash.
    threading.Thread(target=look, args=[store], name="watch").start()


def look(store: td.Store) -> None:
    """The thread of `watch`. store: shared by all ranks"""
    # A step is a call of dist.progress.
    told = 0  # steps of this rank that are already added to `store`
    heard = 0  # steps of all ranks, as last read from `store`
    moved = time.perf_counter()  # when `heard` last changed
    while time.perf_counter() - moved < CURRENT.limit:
        # Each turn of the loop restarts this timer. While C code holds the GIL, or if the store's machine is
        # lost, this thread hangs. Then the timer ends the process.
        faulthandler.dump_traceback_later(1.2 * CURRENT.limit + 30, exit=True, file=sys.__stderr__)
        time.sleep(0.5)
        if not threading.main_thread().is_alive():
            return
        steps = CURRENT.steps
        try:
            total = store.add("torz/steps", steps - told)
            share_stop(store)
        except RuntimeError:  # the process that has the store has ended
            store = td.HashStore()  # from now on, only this rank's steps count
            continue
        told = steps
        # Between two phases (see dist.watched), no progress is needed.
        if total != heard or not CURRENT.watched:
            heard = total
            moved = time.perf_counter()
        end_after_grace()
    with contextlib.suppress(OSError):  # the terminal was closed
        print_stacks(
            f"stalled: no rank made progress for {CURRENT.limit:.0f} s (--stall_limit); this one was in "
            f"phase {CURRENT.name}; the stacks of this process on {os.uname().nodename}:"
        )
    time.sleep(min(15.0, 0.3 * CURRENT.limit))  # the other ranks need time to print their stacks
    os._exit(1)


def end_after_grace() -> None:
    """End this process if a signal came more than --grace seconds ago."""
    # [name, time] of the signal, or []. A copy, because the run may end now and clear the list.
    signaled = stop_signal[:]
    if signaled and time.monotonic() - signaled[1] > CURRENT.grace:
        with contextlib.suppress(OSError):  # the terminal was closed
            print(
                f"{signaled[0]} came {CURRENT.grace:.0f} s ago (--grace), and phase "
                f"{CURRENT.name} has not ended: this process ends without saving",
                file=sys.stderr,
            )
        os._exit(1)


def share_stop(store: td.Store) -> None:
    """Tell the other ranks of a signal to this rank, or hear of a signal to another rank."""
    key = f"torz/stop/{CURRENT.runs}"  # each run of this process has another key
    if stop_signal:
        store.set(key, "")
    elif store.check([key]):
        request_stop("a signal to another rank")


def print_stacks(head: str) -> None:
    """Print `head` and the stacks of this process. Each line is one write, so that lines of several ranks do
    not mix."""
    with tempfile.TemporaryFile("w+") as file:
        # Python's module traceback would read source files, which may be on a disk that hangs.
        faulthandler.dump_traceback(file)
        file.seek(0)
        lines = [head, *file.read().splitlines()]
    for line in lines:
        os.write(2, f"rank {os.environ['RANK']}: {line}\n".encode())


@contextlib.contextmanager
def handle_signals(grace: float) -> Iterator[None]:
    """Context manager. Inside it, SIGTERM, SIGUSR1, SIGHUP (a closed terminal), SIGQUIT and ctrl-C request a
    stop (dist.stop_requested). If this process ignores SIGHUP or SIGQUIT, as under nohup, that signal
    requests nothing. If the body still runs `grace` seconds after the signal, the thread of `watch` ends
    the process with status 1. A ctrl-C more than 2 seconds after the first signal to this process ends the
    process at once, also with status 1."""
    CURRENT.grace = grace
    times = []  # of the signals to this process; another rank's signal also fills stop_signal

    def request(number, frame):
        times.append(time.monotonic())
        if not stop_signal:
            request_stop(signal.Signals(number).name)
        # torchrun repeats the first ctrl-C, so a second ctrl-C within 2 seconds is ignored.
        elif number == signal.SIGINT and times[-1] - times[0] > 2:
            os._exit(1)

    before = {number: signal.signal(number, request) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        CURRENT.runs += 1  # `share_stop` must not hear signals of this run in the next one
        stop_signal.clear()


def request_stop(name: str) -> None:
    """Ask this rank to stop (see dist.stop_requested). Rank 0 prints a line.

    This function must take no lock. A second signal can interrupt it, and the second call would wait forever
    for the first call's lock."""
    stop_signal.extend((name, time.monotonic()))
    if os.environ.get("RANK", "0") == "0":
        text = (
            f"\n{name}: the run saves and stops when phase {CURRENT.name} ends, "
            f"in at most {CURRENT.grace:.0f} s; a second ctrl-C ends it without saving\n"
        )
        with contextlib.suppress(OSError):  # the terminal was closed
            os.write(2, text.encode())


def report_crash() -> None:
    """Print the current exception, with the rank, its host and phase, and tell torchrun. Wait first if a
    connection was lost: another rank has the cause, and torchrun shows the failure of the earliest second."""
    why = printable(traceback.format_exc())
    if LOST.search(why):
        time.sleep(2)  # by then, torchrun has seen the other rank's end, and ends this one
    where = f"rank {os.environ['RANK']} on {os.uname().nodename}"
    print(f"{where} failed in phase {CURRENT.name}:\n{why}", file=sys.stderr, flush=True)
    tell_torchrun(why)
