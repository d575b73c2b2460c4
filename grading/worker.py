r"""Grades responses in processes that can be killed. grading/answers.py says which answers are right.

The trainer itself compares numbers, units, sets and words. math-verify compares expressions. On some
responses math-verify hangs, fills the memory or crashes, so it runs in other processes:

    trainer                      server: grading.worker            workers
    ┌────────┐ chunks (JSON)     ┌──────────────────────────┐ fork  ┌────────────────────────┐
    │        │ ────────────────> │ imports math-verify once │ ────> │ each grades a chunk;   │
    │ Grader │                   │                          │       │ killed at the deadline;│
    │        │ <──────────────── │ pebble.ProcessPool       │ <──── │ memory limit: MEMORY   │
    └────────┘ outcomes (JSON)   └──────────────────────────┘       └────────────────────────┘

The trainer can't fork the workers, because a process with CUDA and threads must not fork. So a server forks
them. If the server dies or stalls, the Grader starts another server and sends all requests without an outcome
again. If the trainer dies, the server and its workers end.

Departures from Open-Reasoner-Zero:

- ORZ's comparison ignores punctuation and accepts substrings: `1,2` equals `12`, and `5` equals
  `5\text{ or }7`. Ours does not.
- ORZ's timeout of one second includes the wait in the queue, so right answers fail on a busy machine. Our
  deadline counts the worker's CPU time, so a reward does not depend on how busy the machine is.
- Each of our grades has a reason, one of REASONS.
"""

import ctypes
import gc
import inspect
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
import traceback
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from configs import CODE, ROOT, Say, UserError, nearest, require, short_hash, shorten
from grading.answers import KINDS, extract, grade, math_equal, normalise, quick_grade

REASONS = ("correct", "partial", "wrong", "unparsed", "truncated", "timeout", "error")
SPEC = "path/to/file.py:function"
MAX_ANSWER = 2000  # characters of an answer; a longer one would be slow to parse, so it counts as "unparsed"
MEMORY = 2 << 30  # bytes of address space that a worker may allocate after its fork
CACHE = 16_384  # maximum number of cached grades; the samples of a prompt often have the same answer
MAX_REPLY = 200_000  # maximum number of characters of a text that an environment returns
CHUNK = 16  # maximum number of requests in a chunk; each chunk is one message to a worker and costs 0.2 ms
LARGEST = 3.4028234e38  # largest absolute value of a custom reward: a pack stores rewards as float32
MAX_TASKS = 250  # after this number of chunks a worker ends and is replaced, because its sympy caches grow
ENDED = 222  # exit status of a worker that ends after MAX_TASKS chunks; see _Worker
WALL = 4  # a deadline counts CPU time; a worker that sleeps is killed after 4 deadlines of wall time
LATE = 8  # the run ends if users' functions time out, or end a worker, this number of times in a row
TELL = 10  # after each 10 seconds, a Grader says what it waits for
SCORE, MORE = ["response", "answer", "kind"], ["problem", "row", "sample"]  # arguments of a reward function
TURN = ["problem", "text", "turn"]  # arguments of an environment
# Starts the server. A user's file may import its own modules named `grading` and `configs`. So `serve` takes
# ours out of sys.modules, and this file runs under the name __main__.
SERVER = ("import runpy, sys; sys.path[0] = sys.argv[1]; "
          "runpy.run_module('grading.worker', run_name='__main__', alter_sys=True)")
START = 300  # a server may need this number of seconds to start, because network disks are slow

# A request that the trainer sends to a worker. Its first entry says what the worker does. kind: one of KINDS.
#     "compare", answer, gold, kind                call answers.grade(answer, gold, kind)
#     "score", function, response, gold, kind      call a user's reward function by position
#     "score", function, JSON                      call a user's reward function by name, with a JSON object
#     "reply", function, problem, text, turn       call the environment; turn: number of the turn, from 1
Request = tuple


class Grade(NamedTuple):
    """The grade of a response.

    reward: 1.0 or 0.0; a custom reward may return any finite float32
    reason: one of REASONS
    answer: the answer that was found in the response; None if no answer was found"""
    reward: float
    reason: str
    answer: str | None


class Reply(NamedTuple):
    """The answer of an environment (--env) to a turn of the policy.

    text: the text to append to the response, before the policy's next turn. None ends the response.
    reward: the reward of the response, in place of its grade. None: the response is graded as usual.
    done: True ends the response without appending `text`.

    An environment's function may also return a str for Reply(text), None for Reply(), or a tuple for
    Reply(*tuple)."""
    text: str | None = None
    reward: float | None = None
    done: bool = False


# math-verify's parser builds tables when it first parses a kind of expression. Building can take seconds, so
# a right answer could time out. Therefore the server compares these pairs (answer=gold) before it forks the
# workers, which inherit the tables.
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

_functions = {}  # "FILE.py:FUNCTION" -> a function that takes the values in a Request
_modules = {}  # folder of a user's file -> {name: module} of the modules imported from this folder


def _outcome(what, *arguments):
    """Carry out a Request. For "compare" and "score", returns the reward and its reason. For "reply", returns
    the environment's Reply and "replied"."""
    if what == "reply":
        return _reply(*arguments), "replied"
    value = grade(*arguments) if what == "compare" else _call(*arguments)
    reward = _as_reward(value, "the reward")
    return reward, reason_of(reward)


def reason_of(reward: float) -> str:
    """Returns the reason of a reward: a reward between 0 and 1 is "partial"."""
    return "correct" if reward >= 1 else "partial" if reward > 0 else "wrong"


def _reply(*request):
    """Calls the environment and returns its Reply. Raises an exception if the Reply is not valid."""
    value = _call(*request)
    text, reward, done = Reply(*value) if isinstance(value, tuple) else Reply(value)
    if text is not None:
        if not isinstance(text, str):
            raise TypeError(f"--env returned {text!r:.80}; needed: a text, None or a Reply")
        if len(text) > MAX_REPLY:
            raise ValueError(f"the environment's text has {len(text)} characters, over {MAX_REPLY}")
        # encode() raises an error if UTF-8 can't encode `text`. decode() returns a plain str, because the
        # server can't unpickle a subclass of str that the user's file defines.
        text = text.encode().decode()
    if reward is not None:
        reward = _as_reward(reward, "the environment's reward")
    return Reply(text, reward, bool(done))


def _as_reward(value, what):
    reward = float(value)
    if not abs(reward) <= LARGEST:
        raise ValueError(f"{what} is {reward}; needed: a finite float32")
    return reward


def _call(spec, *arguments):
    """Calls the user's function `spec`, "FILE.py:FUNCTION", and returns its result."""
    with _modules_beside(spec):
        return _functions[spec](*arguments)


@contextmanager
def _modules_beside(spec):
    """Context manager. Inside it, a user's file can import modules from its own folder. spec:
    "FILE.py:FUNCTION".

    On exit, the modules of the folder are moved from sys.modules to `_modules`, because the folder of another
    user's file may have modules of the same names. The next `with` for this folder puts them back.

    A module belongs to the folder if the folder has a file with the module's name. Reading __file__ instead
    would raise an error for lazy modules such as torch.classes."""
    folder = os.path.dirname(spec)
    before = set(sys.modules)
    sys.path.insert(0, folder)
    sys.modules.update(_modules.get(folder, {}))
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's file may have removed the folder from sys.path
            sys.path.remove(folder)
        added = sys.modules.keys() - before
        if added:  # most calls add no module, and listing the folder takes time
            names = {file.partition(".")[0] for file in os.listdir(folder)} - before
            _modules[folder] = _take_modules(names, added)


def _take_modules(names, among):
    """Remove the modules `names` and their submodules from sys.modules. Returns name -> removed module.
    among: names of the modules that may be removed"""
    found = [name for name in among if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}


def _grade_chunk(requests, deadline):
    """Returns the outcome of each request, (reward or Reply, reason, error message or None), and the mean
    seconds of a request. A timeout or a crash ends this process.

    Each of the n requests gets deadline / n. After a timeout, the Grader sends each request again in a chunk
    of its own, so a slow request finally gets the whole deadline.
    """
    outcomes, start = [], time.monotonic()
    for request in requests:
        # When this CPU time is used up, the kernel sends SIGPROF. SIGPROF has no handler, so SIGPROF ends the
        # process even in C code.
        signal.setitimer(signal.ITIMER_PROF, deadline / len(requests))
        try:
            outcomes.append((*_outcome(*request), None))
        except BaseException as error:  # a custom reward may also raise SystemExit
            outcomes.append((0.0, "error", _message(error, request[1])))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return outcomes, (time.monotonic() - start) / len(requests)


def _message(error, spec):
    """Returns the error as one line of text, with the line of the user's file that failed. spec:
    "FILE.py:FUNCTION". For a "compare" request, spec is the answer, so no file matches and no line is
    added."""
    file = spec.rpartition(":")[0]
    places = [f" ({file}, line {line})" for frame, line in traceback.walk_tb(error.__traceback__)
              if frame.f_code.co_filename == file]
    return shorten(f"{type(error).__name__}: {error}{''.join(places[-1:])}", 500)


def _init_worker():
    """Make this worker easy to kill, and limit its memory."""
    # pebble's handler of SIGTERM would wait until the current C code returns, for example in 9**9**9. The
    # default action ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: if the server ends, kill this process
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        with suppress(ValueError):  # ValueError: a lower limit is already set; keep it
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# --- in the server
# stdin brings a JSON line [chunk number, requests] for each chunk.
# stdout takes a JSON line [chunk number, outcomes, seconds] for each chunk. Before them, a line with number 0
# says what the server imported: the functions and their files, or an error message.


def user_files(spec: str) -> dict[str, str]:
    """Returns name -> hash of the content, for the user's file in `spec`, "FILE.py:FUNCTION", and for the
    files and packages beside it that were imported with it. Files of torz beside it are left out. The user's
    file is listed under the function's name, so that the result does not depend on the file's path."""
    path, _, function = spec.rpartition(":")
    folder = os.path.dirname(path)
    # `_modules` selects by name. So it may have an installed package, such as wandb, if the folder has an
    # entry of this name (wandb writes its logs to one). Only files inside the folder are hashed.
    files = {file for name, module in _modules.get(folder, {}).items() if (
        file := getattr(module, "__file__", None) or "").startswith(f"{folder}/{name.partition('.')[0]}")}
    return {function if file == path else os.path.relpath(file, folder): short_hash(Path(file).read_bytes())
            for file in sorted(files - {*map(str, CODE)} | {path})}


def _import_function(spec, arguments):
    """Import the user's function `spec`, "FILE.py:FUNCTION". Returns
    1. the names of the arguments that the function gets by name; [] if it gets `arguments` by position
    2. the function's deadline `seconds` (see Grader); 0 if it has none
    3. `parallel`, how many calls of the function run at once (16 by default); 0 if it has no deadline

    arguments: SCORE for a reward function, TURN for an environment"""
    path, _, name = spec.rpartition(":")
    with _modules_beside(spec):
        module = runpy.run_path(path)
    if name not in module:
        raise NameError(f"no function {name!r}{nearest(name, module)}")
    _functions[spec] = function = module[name]
    signature, names = inspect.signature(function), []
    if arguments == SCORE and signature.parameters.keys() & set(MORE):
        names = [name for name in SCORE + MORE if name in signature.parameters]
        _functions[spec] = lambda values: function(**json.loads(values))
        signature.bind(**dict.fromkeys(names))
    else:
        signature.bind(*arguments)
    seconds, parallel = (getattr(function, key, module.get(key, 0)) for key in ("seconds", "parallel"))
    return names, float(seconds), int(parallel or 16) if seconds else 0


def _warm():
    """Import math-verify and compare the pairs of WARM, so that its parser builds its tables."""
    # Hide math-verify's warning that its own timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for pair in WARM.strip().splitlines():
        with suppress(Exception):
            math_equal(*map(normalise, pair.split("=", 1)))


class _Worker(get_context("fork").Process):
    """A worker process. pebble takes exit status 0 to mean that the worker ended as planned, after MAX_TASKS
    chunks of requests. But a user's function may also end the process with status 0, and then pebble would
    wait until the request times out. Therefore a worker that ends as planned exits with status ENDED, and
    `exitcode` shows this to pebble as 0. Every other status, also a real 0, is shown as text, which pebble
    takes for a crash."""

    def run(self):
        super().run()
        sys.exit(ENDED)

    @property
    def exitcode(self):
        status = super().exitcode
        return 0 if status == ENDED else str(status)


def _die():
    """Kill the server and its workers, which together are a process group."""
    os.killpg(os.getpid(), signal.SIGKILL)


def _watch(parent):
    """End the server when the trainer, process `parent`, has ended."""
    # The server also ends at the end of stdin. But stdin does not end if another child of the trainer holds
    # the pipe open.
    while os.getppid() == parent:
        time.sleep(0.5)
    _die()


def _dispatch(requests, replies, workers, deadline, found):
    """Read chunks from the pipe `requests`, let workers grade them, and write the outcomes to the pipe
    `replies`. Returns when `requests` closes. If a pool breaks, the server ends.

    A user's function that declares `seconds` has its own pool of `parallel` workers. All other requests share
    one pool. found: function -> the result of `_import_function`

    If the worker died or timed out in a chunk of several requests, the outcomes are None. The Grader then
    sends each of these requests again in a chunk of its own.
    """
    import pebble

    lock = threading.Lock()

    def done(chunk, size, future):
        try:
            outcomes, seconds = future.result()
        except BrokenProcessPool:
            _die()
        except Exception as error:  # pebble raises it if the worker died or timed out
            status = getattr(error, "exitcode", "?")
            late = isinstance(error, TimeoutError) or status == str(-signal.SIGPROF)
            message = f"WorkerDied: the process ended with status {status} while grading ({error})"
            outcome = (0.0, "timeout", None) if late else (0.0, "error", message)
            outcomes = [outcome] if size == 1 else None
            seconds = deadline
        with lock:  # pebble calls `done` from several threads
            os.write(replies, json.dumps([chunk, outcomes, seconds]).encode() + b"\n")

    context = get_context("fork")
    context.Process = _Worker
    make_pool = partial(pebble.ProcessPool, max_tasks=MAX_TASKS, initializer=_init_worker, context=context)
    usual = make_pool(workers), deadline, WALL * deadline
    pools = {spec: (make_pool(parallel), seconds, seconds)
             for spec, (_, seconds, parallel) in found.items() if seconds}
    with suppress(RuntimeError):  # pebble's pool breaks if someone kills an idle worker
        for line in os.fdopen(requests, "rb"):
            chunk, of_chunk = json.loads(line)
            pool, cpu, wall = pools.get(of_chunk[0][1], usual)
            future = pool.schedule(_grade_chunk, [of_chunk, cpu], timeout=wall)
            future.add_done_callback(partial(done, chunk, len(of_chunk)))


def serve(parent: int, workers: int, deadline: float, functions: Mapping[str, Sequence[str]],
          compares: bool) -> None:
    """Run the server. The server and its workers end when stdin closes, when the trainer (process `parent`)
    has ended, or when the pool of workers breaks.

    functions: users' functions, "FILE.py:FUNCTION" -> its arguments: SCORE (reward) or TURN (--env)
    compares: whether the trainer will send "compare" requests"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles ctrl-C
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a custom reward must not read the requests
    os.dup2(2, 1)  # a print in a custom reward must not mix with the replies
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    _take_modules({"configs", "grading"}, set(sys.modules))  # so a user's file can import its own `configs`
    found, files = {}, {}
    try:
        for spec, arguments in functions.items():
            found[spec] = _import_function(spec, arguments)
            files[spec] = user_files(spec)
    except (Exception, SystemExit) as error:
        found = f"{'--env' if arguments == TURN else '--reward'} {spec} ({_message(error, spec)})"
    os.write(replies, json.dumps([0, (found, files), 0]).encode() + b"\n")
    if isinstance(found, str):
        _die()
    if compares:
        _warm()
    # A worker shares memory pages with the server until the worker writes to them. Garbage collection writes
    # to all objects, so all pages would be copied. gc.freeze exempts the objects that exist now.
    gc.freeze()
    _dispatch(requests, replies, workers, deadline, found)
    _die()


# --- in the trainer


class Grader(AbstractContextManager):
    """Grades responses in processes that can be killed, while the engine generates more responses. A server
    process forks and feeds them, and is replaced if it dies (see the top of this file). Not thread-safe.

    workers     number of worker processes
    deadline    CPU seconds for one answer; its wall time may be WALL times as long. The wait in the queue
                does not count.
    customs     users' reward functions ("path/to/file.py:function") that `submit` may name. A worker calls
                function(response, gold answer, kind) -> float in place of a comparison; kind is one of KINDS.
                A function with a parameter `problem`, `row` or `sample` gets all arguments by name. A
                response that was cut by length gets reward 0 without a call.
    compares    whether `submit` compares answers; if False, the server does not import math-verify
    env         the environment's function ("path/to/file.py:function"), which `ask` calls in a worker with
                the same deadline. The result must depend only on the arguments, because a call is repeated
                if its worker or the server dies.
    say         prints what the Grader waits for
    stop        `results` waits only while this list is empty; a signal that stops the run fills the list

    A function that waits, for example for a server, declares `seconds`, its deadline in wall time, and
    `parallel`, the number of calls at once. Both are attributes of the function or of its file.

    Raises UserError if a function does not exist, can't be imported or has parameters that are not listed
    above. If grading raises an error, the reward is 0 and the reason is "error". `errors` keeps the first
    message of each type of error. `failure` is "" or a message, which `check` raises: users' functions timed
    out or ended a worker LATE times in a row, or a new server imported files edited during the run.
    """

    def __init__(self, workers: int = 1, deadline: float = 5.0, customs: Sequence[str] = (),
                 compares: bool = True, env: str = "", say: Say = print, stop: Sequence = ()) -> None:
        require(workers >= 1 and deadline > 0, f"workers={workers}, deadline={deadline}",
                "workers of at least 1, a deadline above 0")
        self.customs = {custom: _check_spec(custom) for custom in customs}
        self.env = _check_spec(env, "--env") if env else ""
        functions = dict.fromkeys(self.customs.values(), SCORE) | ({self.env: TURN} if env else {})
        self.arguments = workers, deadline, functions, compares
        self.say, self.stop, self.failure = say, stop, ""
        self.known = None  # user's function -> result of `_import_function`; a str: the error of an import
        self.files = {}  # user's function -> hashes of its files at the first import (`user_files`)
        self._late = 0  # calls of users' functions in a row that timed out or ended a worker
        self.patience = START + WALL * deadline  # seconds to wait for the server before it counts as stalled
        self.errors = {}  # type of an error -> the first message of this type
        self._told = 0  # number of messages in `errors` that new_errors has already returned
        self._grades = {}  # key -> Grade or Reply: the next return value of `results`
        self._cache = {}  # request -> Grade
        self._pending = {}  # request without outcome -> (key, answer) of each response that waits
        self._waiting = []  # requests that are not yet in a chunk
        self._size = 1  # number of requests in the next chunk, chosen so that a chunk takes about 0.1 s
        self._chunks = {}  # chunk number -> its requests, for the chunks without a reply
        self._count = 0  # number of chunks so far
        self._process = None  # the server's process
        if functions:
            self._start()
            now = told = time.monotonic()
            end = now + self.patience
            # `_exchange` also reads what a server wrote before it ended
            while self.known is None and now < end and (self._process.poll() is None or self._exchange(0)):
                self._exchange(1.0)
                now = time.monotonic()
                if now - told > TELL:
                    told = now
                    say(f"waits for the import of {' '.join(functions)}")
            if not isinstance(self.known, dict):
                self.close()
                found = self.known or f"{' '.join(functions)}: its import ends the process, or does not end"
                raise UserError(f"can't use {found}; "
                                f"needed: {SPEC}, a function of ({', '.join(SCORE)}) or of some of "
                                f"({', '.join(SCORE + MORE)}); --env: of ({', '.join(TURN)})")

    def submit(self, key: Hashable, text: str, gold: str, stopped: bool, kind: str = "math",
               extractor: str = "orz", custom: str = "", **more: Any) -> None:
        """Queue a response for grading, without waiting. Raises UserError for an unknown kind or extractor.

        key: the key of the response's grade in `results`
        stopped: whether the response ended with EOS or a stop string; if False, it was cut by length
        custom: one of `customs`, which grades the response in place of a comparison
        more: values of `problem`, `row` and `sample`, for a user's function with parameters of these names"""
        require(bool(custom) or kind in KINDS, f"answer kind {kind!r} is unknown",
                f"one of {', '.join(KINDS)}")
        answer, gold = extract(text, extractor), gold.strip()
        if not stopped:
            self._grades[key] = Grade(0.0, "truncated", None)
        elif custom:
            spec, values = self.customs[custom], more | dict(response=text, answer=gold, kind=kind)
            names = self.known[spec][0]
            by_name = json.dumps({name: values[name] for name in names})
            self._queue(key, ("score", spec, *([by_name] if names else (text, gold, kind))), answer)
        elif found := self._grade_here(answer, gold, kind):
            self._grades[key] = found
        else:
            self._queue(key, ("compare", answer, gold, kind), answer)
        if self._process:
            self._exchange(0)

    def ask(self, key: Hashable, problem: str, text: str, turn: int) -> None:
        """Queue the call env(problem, text, turn), without waiting. `results` will contain the environment's
        Reply under `key`, or a Grade with the reason "error" or "timeout" if the call failed."""
        self._queue(key, ("reply", self.env, problem, text, turn))
        self._exchange(0)

    def _grade_here(self, answer, gold, kind):
        """Returns the Grade of an answer that needs no worker: the answer is missing or too long, or this
        comparison is in the cache, or quick_grade decides. Returns None for all other answers."""
        if answer is None or len(answer) > MAX_ANSWER:
            return Grade(0.0, "unparsed", None)
        known = self._cache.get(("compare", answer, gold, kind))
        if known:
            return known
        equal = quick_grade(answer, gold, kind)
        return None if equal is None else Grade(float(equal), reason_of(equal), answer)

    def _queue(self, key, request, answer=None):
        """Queue a request under `key`. Equal requests are sent once."""
        if self._process is None:
            self._start()
        keys = self._pending.setdefault(request, [])
        keys.append((key, answer))
        if len(keys) > 1:
            return
        if request[0] != "compare" and self.known[request[1]][1]:
            self._send([request])  # one call a chunk, so that slow calls run in parallel
        else:
            self._waiting.append(request)
        if len(self._waiting) >= self._size:
            self._send_waiting()

    def results(self) -> dict[Hashable, Grade | Reply]:
        """Wait for the outcomes of all requests. Returns key -> Grade or Reply for each `submit` and `ask`
        since the last call. If a signal asked the run to stop (`stop`) or the run must fail (`failure`), it
        waits no longer: requests without an outcome get the reason "timeout". A server that died or stalled
        is replaced once; the second time, RuntimeError is raised."""
        self._send_waiting()
        heard = told = time.monotonic()
        replaced = False
        while self._pending and not (self.stop or self.failure):
            replied, now = self._exchange(1.0), time.monotonic()
            if replied:
                heard = now
            elif self._process.poll() is not None or now - heard > self.patience:
                if replaced:
                    raise RuntimeError("the grading server died or stalled twice, "
                                       f"{len(self._pending)} left: see stderr")
                self._start()
                replaced, heard = True, now
            if now - told > TELL:
                told = now
                self.say(f"grading: waits for {len(self._pending)} calls of "
                         f"{' '.join(self.known or ['math'])}; the last {self._late} timed out")
        if self._pending:
            self.close()  # otherwise the server would still work on these requests
        for key, answer in sum(self._pending.values(), []):
            self._grades[key] = Grade(0.0, "timeout", answer)
        self._pending, self._chunks = {}, {}
        grades, self._grades = self._grades, {}
        return grades

    @property
    def reads_rows(self) -> bool:
        """Whether a reward function has the parameter `row`."""
        return any("row" in names for names, *_ in (self.known or {}).values())

    def check(self) -> None:
        """Raises UserError if too many calls of users' functions in a row timed out or ended their worker
        (see `_receive`), or if a new server imported files that were edited during the run."""
        if self.failure:
            raise UserError(self.failure)

    def new_errors(self) -> list[str]:
        """Returns the messages of `errors` that are new since the last call."""
        messages = list(self.errors.values())[self._told:]
        self._told = len(self.errors)
        return messages

    def close(self) -> None:
        """End the server and its workers. A later `submit` or `ask` starts another server."""
        if self._process:
            with self._process, suppress(ProcessLookupError):  # `with` closes the pipes and waits for the end
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None

    def __exit__(self, *_):
        self.close()

    def _start(self):
        """End the old server, if there is one, and start a new server. The chunks that the old server has not
        answered are sent to the new server."""
        self.close()
        command = [sys.executable, "-c", SERVER, ROOT, json.dumps([os.getpid(), *self.arguments])]
        # bufsize=0, because `poll` does not see bytes in a Python buffer. start_new_session=True, so that
        # ctrl-C does not reach the server.
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        os.set_blocking(self._process.stdin.fileno(), False)  # the trainer must not wait for a busy server
        self._unsent = bytearray()
        self._unread = b""  # the last line from the server, if its end has not arrived yet
        chunks, self._chunks = self._chunks, {}
        for requests in chunks.values():
            self._send(requests)

    def _send(self, requests):
        """Put the requests into `_unsent` as one chunk, for `_exchange` to write."""
        self._count += 1
        self._chunks[self._count] = requests
        # json.dumps writes ASCII, so a response may contain NULs and lone surrogates.
        self._unsent += json.dumps([self._count, requests]).encode() + b"\n"

    def _send_waiting(self):
        if self._waiting:
            self._send(self._waiting)
            self._waiting = []

    def _exchange(self, seconds):
        """Write requests to the server, and read its replies. Waits at most `seconds` until one of the two is
        possible. Returns False if nothing was written or read in this time, or if the server is dead."""
        stdin, stdout = self._process.stdin, self._process.stdout
        poll = select.poll()  # select.select() fails if the trainer has more than 1024 open files
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
        """Store the outcomes of the chunk with number `chunk`. seconds: mean time of one request. If the
        outcomes are None, the worker died or timed out in a chunk of several requests. Then each request is
        sent again in a chunk of its own. A chunk of one request always has an outcome."""
        if chunk == 0:  # the server's first message: what it imported (see serve)
            known, files = outcomes
            self.known, self.files = self.known or known, self.files or files
            if files != self.files:
                self.failure = (f"{' '.join(self.files)} was edited during the run, and a new grading server "
                                "imported it; needed: the files of the run's start, and the same command")
            return
        self._size = min(CHUNK, 1 + int(0.1 / (seconds + 1e-6)))
        requests = self._chunks.pop(chunk, [])
        if outcomes is None:
            for request in requests:
                self._send([request])
            return
        for request, (value, reason, error) in zip(requests, outcomes, strict=True):
            if request[0] != "compare":
                late = reason == "timeout" or "WorkerDied" in (error or "")
                self._late = (self._late + 1) * late
                if self._late >= max(LATE, 2 * self.known[request[1]][2]):
                    self.failure = (f"{request[1]} timed out or ended its process "
                                    f"{self._late} times in a row; needed: a function "
                                    "that returns in time, a larger --grade_deadline, "
                                    "or `seconds = …` in its file")
            for key, answer in self._pending.pop(request):
                grade = Reply(*value) if reason == "replied" else Grade(value, reason, answer)
                self._grades[key] = grade
            # Errors and timeouts are not cached, because a busy machine may have caused them.
            if request[0] == "compare" and not error and reason != "timeout":
                self._cache[request] = grade
            if error:
                self.errors.setdefault(error.partition(":")[0], error)
        if len(self._cache) > CACHE:
            self._cache.clear()


def _check_spec(spec, what="reward"):
    """Returns `spec` ("FILE.py:FUNCTION") with an absolute path. Raises UserError if it has no colon."""
    path, _, name = spec.rpartition(":")
    require(":" in spec, f"{what} {spec!r} is malformed", SPEC)
    return f"{Path(path).absolute()}:{name}"


if __name__ == "__main__":
    serve(*json.loads(sys.argv[2]))
