r"""Grades responses in processes that can be killed. grading/answers.py says which answers are right.

Numbers, units, sets and words are compared at once. math-verify compares expressions. On some answers of a
policy it hangs, fills the memory or crashes, so it runs in processes that can be killed:

    trainer                      server: grading.worker            workers
    ┌────────┐ chunks (JSON)     ┌──────────────────────────┐ fork  ┌────────────────────────┐
    │        │ ────────────────> │ imports math-verify once │ ────> │ grade a chunk each;    │
    │ Grader │                   │                          │       │ killed at the deadline │
    │        │ <──────────────── │ pebble.ProcessPool       │ <──── │ and above MEMORY       │
    └────────┘ outcomes (JSON)   └──────────────────────────┘       └────────────────────────┘

The trainer does not start the workers itself. It has CUDA and threads, so it must not fork; a spawned
process would import the trainer's `__main__`, and math-verify for seconds. A server that dies or stalls is
replaced once. If the trainer dies, the server and its workers end.

Departures from Open-Reasoner-Zero. Its equality drops punctuation and compares substrings (`1,2` = `12`,
`5` = `5\text{ or }7`, empty = empty); ours does not (grading/answers.py). Its timeout of one second includes
the wait in the queue, so right answers fail under load; our deadline is CPU time of the worker, so a reward
does not depend on how busy the machine is. Every zero of ours has a reason (REASONS).
"""

import ctypes
import gc
import json
import logging
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from configs import ROOT, UserError, nearest, require
from grading.answers import KINDS, extract, grade, math_equal, normalise, quick_grade

REASONS = ("correct", "wrong", "unparsed", "truncated", "timeout", "error")
SPEC = "path/to/file.py:function"
MAX_ANSWER = 2000  # characters; a longer one is "unparsed": no gold answer is so long, and parsing is slow
MEMORY = 2 << 30  # bytes of address space that a worker may add after the fork
CACHE = 16_384  # grades to remember by (answer, gold, kind): samples of one prompt often have equal answers
MAX_REPLY = 200_000  # characters of an environment's text
CHUNK = 16  # most requests that a worker takes at once: each trip to it costs 0.2 ms
LARGEST = 3.4028234e38  # absolute value of a custom reward: packs hold rewards as float32
MAX_TASKS = 250  # chunks after which a fresh fork replaces a worker: sympy's caches grow
WALL = 4  # a worker is also killed after WALL deadlines by the clock: it sleeps, or the machine is overloaded
# The server's functions are those of __main__, so that torz's modules can be dropped from sys.modules.
SERVER = ("import runpy, sys; sys.path[0] = sys.argv[1]; "
          "runpy.run_module('grading.worker', run_name='__main__', alter_sys=True)")
START = 300  # seconds that a server may take to start: importing from a network disk is slow

# What the trainer sends to a worker:
#     "compare", answer, gold, kind                is the answer right?
#     "score", function, response, gold, kind      call a user's reward
#     "reply", function, problem, text, turn       call the environment
Request = tuple


@dataclass(frozen=True)
class Grade:
    """The grade of a response. reward: 1.0 or 0.0, or the number of a custom reward, within the range of
    float32. reason: one of REASONS. answer: the extracted answer; None without one."""
    reward: float
    reason: str
    answer: str | None


class Reply(NamedTuple):
    """What an environment (--env) returns after a turn of the policy.

    text: is appended to the response, and the policy writes its next turn after it. None: the response is
    complete. reward: replaces the grade of the response. None: the response is graded as usual. done: true if
    the response is complete; then `text` is not appended.
    An environment may also return a str for Reply(text), None for Reply(), or a tuple for Reply(*tuple)."""
    text: str | None = None
    reward: float | None = None
    done: bool = False


# ANTLR, math-verify's parser, builds tables when it first meets a piece of grammar. That takes up to seconds,
# so a right answer could time out. The server parses these pairs (answer=gold) before it forks workers, and
# the workers inherit the tables.
WARM = r"""
\frac{1}{2}x=0.5x
x^2+2x+1=(x+1)^2
\{1,2\}=1,2
2\sqrt{2}=\sqrt[3]{8}
x\ge5y=3:4
\pi r^2+\sin(x)=e^{2x}-\ln|y|
\binom{5}{2}+3!=10^{-3}
-3i+\log_2 8=50\%
1.5\times10^3=90^\circ
\dfrac{a_1}{b}=5
[0,1)\cup(2,3)=[0,1]
\begin{pmatrix}1\\2\end{pmatrix}=(3,4)
\int_0^1 x dx=\sum_{k=1}^n k
\lim_{x\to0} x=\lfloor x\rfloor
"""


# --- in a worker

_functions = {}  # FILE.py:FUNCTION -> the user's function, or the error of importing its file
_modules = {}  # folder of a user's file -> the modules imported from the folder: name -> module


def _outcome(what, *arguments):
    """Carries out a request. Returns 1. the value: a reward, or the environment's Reply; 2. the reason:
    "correct" or "wrong" for a reward, "replied" for a Reply."""
    if what == "reply":
        return _reply(*arguments), "replied"
    value = grade(*arguments) if what == "compare" else _call(*arguments)
    reward = _as_reward(value, "the reward")
    return reward, "correct" if reward > 0 else "wrong"


def _reply(*request):
    """Returns the environment's Reply. Raises an exception if the reply can't be used."""
    value = _call(*request)
    text, reward, done = Reply(*value) if isinstance(value, tuple) else Reply(value)
    if text is not None:
        if len(text) > MAX_REPLY:
            raise ValueError(f"the environment's text has {len(text)} characters, over {MAX_REPLY}")
        text = text.encode().decode()  # a plain str; raises for no str, and for half of a surrogate pair
    if reward is not None:
        reward = _as_reward(reward, "the environment's reward")
    return Reply(text, reward, bool(done))


def _as_reward(value, what):
    reward = float(value)
    if not abs(reward) <= LARGEST:
        raise ValueError(f"{what} is {reward}; needed: a finite float32")
    return reward


def _call(spec, *arguments):
    """Calls the user's function FILE.py:FUNCTION and returns its result."""
    function = _functions[spec]
    if isinstance(function, Exception):
        raise function
    with _modules_beside(spec):
        return function(*arguments)


@contextmanager
def _modules_beside(spec):
    """Context in which a user's file can import the modules of its own folder. spec: FILE.py:FUNCTION.

    On entry the folder becomes the first in sys.path. On exit the folder's modules are moved from sys.modules
    to `_modules`, because the folder of another user's file may have modules of the same names. The next
    entry brings them back.

    A module belongs to the folder if a file there has its name. Its attributes are not read, because a lazy
    module (torch.classes) raises an error then."""
    folder = os.path.dirname(spec)
    names = {file.partition(".")[0] for file in os.listdir(folder)} - sys.modules.keys()
    sys.path.insert(0, folder)
    sys.modules.update(_modules.get(folder, {}))
    try:
        yield
    finally:
        with suppress(ValueError):  # the file may change the path too
            sys.path.remove(folder)
        _modules[folder] = _take_modules(names)


def _take_modules(names):
    """Remove the modules `names` and their submodules from sys.modules. Returns name -> removed module."""
    found = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}


def _grade_chunk(requests, deadline):
    """Returns 1. for each request: reward or Reply, reason, and error message or None; 2. the mean seconds of
    a request. A timeout or a crash ends this process instead.

    All requests of the chunk together have the deadline of one answer. After a timeout the Grader sends the
    requests again, each in a chunk of its own.
    """
    outcomes, start = [], time.monotonic()
    for request in requests:
        # CPU time. The signal has no handler, so the kernel ends even C code.
        signal.setitimer(signal.ITIMER_PROF, deadline / len(requests))
        try:
            outcomes.append((*_outcome(*request), None))
        except BaseException as error:  # also the SystemExit of a custom reward
            message = " ".join(f"{type(error).__name__}: {error}".split())
            outcomes.append((0.0, "error", message[:500]))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return outcomes, (time.monotonic() - start) / len(requests)


def _init_worker():
    """Make this worker easy to kill, and limit its memory."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler waits until C code (9**9**9) returns
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the server
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        with suppress(ValueError):  # the machine's own limit is lower
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# --- in the server: JSON lines [chunk, requests] on stdin, [chunk, outcomes, seconds] on stdout


def _import_function(spec):
    """Returns the function FILE.py:FUNCTION. If the file can't be imported, returns the ImportError."""
    path, _, name = spec.rpartition(":")
    try:
        with _modules_beside(spec):
            return runpy.run_path(path)[name]
    except (Exception, SystemExit) as error:
        return ImportError(f"{path} can't be imported: {error!r}")


def _warm():
    """Import math-verify and let it parse the pairs of WARM."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    for pair in WARM.strip().splitlines():
        with suppress(Exception):
            math_equal(*map(normalise, pair.split("=", 1)))


def _die():
    """Kill the server and its workers, which together are a process group."""
    os.killpg(os.getpid(), signal.SIGKILL)


def _watch(parent):
    """End the server when the trainer is gone."""
    while os.getppid() == parent:  # stdin stays open if another child of the trainer holds its pipe
        time.sleep(0.5)
    _die()


def _dispatch(requests, replies, workers, deadline):
    """Give each chunk from the pipe `requests` to a worker and write [chunk, outcomes, seconds] to the pipe
    `replies`.

    The outcomes are None if the worker did not finish a chunk of several requests. Returns when `requests`
    closes or the pool breaks.
    """
    import pebble

    lock = threading.Lock()

    def done(chunk, size, future):
        try:
            outcomes, seconds = future.result()
        except BrokenProcessPool:
            _die()
        except Exception as error:  # pebble's, since the worker did not finish
            code = getattr(error, "exitcode", None)
            late = isinstance(error, TimeoutError) or code == -signal.SIGPROF
            message = None if late else f"WorkerDied: {error}, exit code {code}"
            outcomes = [(0.0, "timeout" if late else "error", message)] if size == 1 else None
            seconds = deadline
        with lock:  # pebble calls `done` from several threads
            os.write(replies, json.dumps([chunk, outcomes, seconds]).encode() + b"\n")

    pool = pebble.ProcessPool(workers, MAX_TASKS, _init_worker, context=get_context("fork"))
    with suppress(RuntimeError):  # a killed idle worker breaks pebble's pool
        for line in os.fdopen(requests, "rb"):
            chunk, of_chunk = json.loads(line)
            future = pool.schedule(_grade_chunk, [of_chunk, deadline], timeout=WALL * deadline)
            future.add_done_callback(partial(done, chunk, len(of_chunk)))


def serve(parent: int, workers: int, deadline: float, functions: Sequence[str], compares: bool) -> None:
    """The server. It and its workers end when stdin closes, `parent` is gone or the pool breaks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles ctrl-C
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a custom reward must not read the requests
    os.dup2(2, 1)  # a print in a custom reward must not mix with the replies
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    _take_modules({"configs", "grading"})  # a user's file may have modules of these names beside it
    _functions.update((spec, _import_function(spec)) for spec in functions)
    if compares:
        _warm()
    gc.freeze()  # else garbage collection in a worker would copy every page that it shares
    _dispatch(requests, replies, workers, deadline)
    _die()


# --- in the trainer


class Grader(AbstractContextManager):
    """Grades responses while others are generated, in processes that can be killed. Use it from one thread.

    deadline    CPU seconds for one answer; by the clock WALL times as many. Waiting in the queue is free.
    customs     users' functions ("path/to/file.py:function") that `submit` may name. A worker calls
                function(response, answer, kind) -> float for each stopped response, in place of extraction
                and equality.
    compares    answers are compared too; else the server starts without math-verify.
    env         the function ("path/to/file.py:function") that `ask` calls in a worker, within the same
                deadline. After a neighbour's crash it is called again, so it must be a function of its
                arguments.

    Raises UserError if there is no such function. A failed answer gets 0 and the reason "error"; `errors`
    keeps the first message of each type. The server starts at once for users' functions, else with the first
    answer that needs it.
    """

    def __init__(self, workers: int = 1, deadline: float = 5.0, customs: Sequence[str] = (),
                 compares: bool = True, env: str = "") -> None:
        require(workers >= 1 and deadline > 0, f"workers={workers}, deadline={deadline}",
                "workers of at least 1, a deadline above 0")
        self.customs = {custom: _check_spec(custom) for custom in customs}
        self.env = _check_spec(env, "--env") if env else ""
        functions = [*self.customs.values(), *filter(None, [self.env])]
        self.arguments = workers, deadline, functions, compares
        self.patience = START + WALL * deadline  # seconds without a reply after which the server has stalled
        self.errors = {}  # type of an error -> its first message
        self._told = 0  # number of messages in `errors` that new_errors has returned
        self._grades = {}  # key -> Grade or Reply, what results() returns next
        self._cache = {}  # request -> Grade
        self._pending = {}  # request -> [(key, extracted answer)]; equal requests are graded once
        self._waiting = []  # requests of the next chunk
        self._size = 1  # requests in a chunk: as many as a worker grades in 0.1 s
        self._chunks = {}  # number -> requests, of chunks without a reply
        self._count = 0  # chunks so far
        self._process = None  # the server
        if functions:
            self._start()

    def submit(self, key: Hashable, text: str, gold: str, stopped: bool, kind: str = "math",
               extractor: str = "orz", custom: str = "") -> None:
        """Queue a response without waiting. `stopped`: it ended by EOS or a stop string, not by length.
        `custom`: one of the Grader's custom rewards, which then grades it; its answer is extracted anyway,
        for a majority vote. Raises UserError for an unknown kind or extractor."""
        require(bool(custom) or kind in KINDS, f"answer kind {kind!r} is unknown",
                f"one of {', '.join(KINDS)}")
        answer, gold = extract(text, extractor), gold.strip()
        if not stopped:
            self._grades[key] = Grade(0.0, "truncated", None)
        elif custom:
            self._queue(key, ("score", self.customs[custom], text, gold, kind), answer)
        elif found := self._grade_here(answer, gold, kind):
            self._grades[key] = found
        else:
            self._queue(key, ("compare", answer, gold, kind), answer)
        if self._process:
            self._exchange(0)

    def ask(self, key: Hashable, problem: str, text: str, turn: int) -> None:
        """Queue a call env(problem, text, turn) without waiting. results() returns the environment's Reply
        under `key`. If the call failed, results() returns a Grade with the reason "error" or "timeout"."""
        self._queue(key, ("reply", self.env, problem, text, turn))
        self._exchange(0)

    def _grade_here(self, answer, gold, kind):
        """Returns the grade if it can be found without a worker, else None."""
        if answer is None or len(answer) > MAX_ANSWER:
            return Grade(0.0, "unparsed", None)
        known = self._cache.get(("compare", answer, gold, kind))
        if known:
            return known
        equal = quick_grade(answer, gold, kind)
        if equal is None:
            return None
        return Grade(float(equal), "correct" if equal else "wrong", answer)

    def _queue(self, key, request, answer=None):
        """Queue a request, unless an equal one is queued."""
        if self._process is None:
            self._start()
        keys = self._pending.setdefault(request, [])
        keys.append((key, answer))
        if len(keys) == 1:
            self._waiting.append(request)
        if len(self._waiting) >= self._size:
            self._send_waiting()

    def results(self) -> dict[Hashable, Grade | Reply]:
        """Wait for everything that was submitted or asked since the last call. Returns key -> Grade or Reply.
        Raises RuntimeError if the server died or stalled, and then its replacement did too."""
        self._send_waiting()
        replaced = False
        while self._pending:
            if not self._exchange(self.patience):
                if replaced:
                    raise RuntimeError("the grading server died or stalled twice, "
                                       f"{len(self._pending)} left: see stderr")
                self._start()
                replaced = True
        grades, self._grades = self._grades, {}
        return grades

    def new_errors(self) -> list[str]:
        """Returns the messages in `errors` that an earlier call has not returned."""
        messages = list(self.errors.values())[self._told:]
        self._told = len(self.errors)
        return messages

    def close(self) -> None:
        """End the server and its workers. A later `submit` starts another one."""
        if self._process:
            with self._process, suppress(ProcessLookupError):  # closes the pipes and waits
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None

    def __exit__(self, *_):
        self.close()

    def _start(self):
        """Start a server. An old server is ended first, and its unanswered chunks go to the new server."""
        self.close()
        command = [sys.executable, "-c", SERVER, ROOT, json.dumps([os.getpid(), *self.arguments])]
        # bufsize=0: `poll` sees all that was not read. A new session: ctrl-C does not reach the server.
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        os.set_blocking(self._process.stdin.fileno(), False)  # a busy server must not stop the trainer
        self._unsent = bytearray()
        self._unread = b""  # incomplete last line of the server's replies
        chunks, self._chunks = self._chunks, {}
        for requests in chunks.values():
            self._send(requests)

    def _send(self, requests):
        """Queue a chunk; `_exchange` writes it."""
        self._count += 1
        self._chunks[self._count] = requests
        # JSON is ASCII here, so NULs and lone surrogates pass.
        self._unsent += json.dumps([self._count, requests]).encode() + b"\n"

    def _send_waiting(self):
        if self._waiting:
            self._send(self._waiting)
            self._waiting = []

    def _exchange(self, seconds):
        """Write to the server's pipe and read from it. Waits at most `seconds` until one of the two is
        possible. Returns False if neither was possible: the time is up or the server is dead."""
        stdin, stdout = self._process.stdin, self._process.stdout
        poll = select.poll()  # select() fails if the trainer has over 1024 open files
        poll.register(stdout, select.POLLIN)
        if self._unsent:
            poll.register(stdin, select.POLLOUT)
        events = dict(poll.poll(seconds * 1000))
        writable = events.get(stdin.fileno()) == select.POLLOUT
        if writable:
            with suppress(BrokenPipeError):
                del self._unsent[:stdin.write(self._unsent) or 0]
        read = os.read(stdout.fileno(), 2**16) if stdout.fileno() in events else b""
        *lines, self._unread = (self._unread + read).split(b"\n")
        for line in lines:
            self._receive(*json.loads(line))
        return writable or read != b""

    def _receive(self, chunk, outcomes, seconds):
        """Store the outcomes of a chunk. outcomes: None if the worker died. seconds: mean of a request."""
        self._size = min(CHUNK, 1 + int(0.1 / (seconds + 1e-6)))
        requests = self._chunks.pop(chunk, [])
        if outcomes is None:  # send the requests one by one: then only the one that killed the worker fails
            for request in requests:
                self._send([request])
            return
        for request, (value, reason, error) in zip(requests, outcomes, strict=True):
            for key, answer in self._pending.pop(request):
                grade = Reply(*value) if reason == "replied" else Grade(value, reason, answer)
                self._grades[key] = grade
            if request[0] == "compare" and not error and reason != "timeout":  # may be the machine's fault
                self._cache[request] = grade
            if error:
                self.errors.setdefault(error.partition(":")[0], error)
        if len(self._cache) > CACHE:
            self._cache.clear()


def _check_spec(spec, what="reward"):
    """Returns `spec` with an absolute path. Raises UserError if the file can't be read or lacks the function.
    The file is only compiled here; the server runs it."""
    path, _, name = spec.rpartition(":")
    require(":" in spec, f"{what} {spec!r} is malformed", SPEC)
    file = Path(path).absolute()
    try:
        names = compile(file.read_bytes(), file, "exec").co_names  # all names that the file defines or uses
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{what} {spec!r} can't be read ({error}); needed: {SPEC}") from None
    require(name in names, f"{what} {spec!r}: {path} has no function {name!r}{nearest(name, names)}", SPEC)
    return f"{file}:{name}"


if __name__ == "__main__":
    serve(*json.loads(sys.argv[2]))
