r"""Grades responses in processes that can be killed. grading/answers.py says which answers are right.

On some responses math-verify hangs, fills the memory or crashes, so it runs in other processes:

    trainer                      server: grading.worker            workers
    ┌────────┐ chunks (JSON)     ┌──────────────────────────┐ fork  ┌────────────────────────┐
    │        │ ────────────────> │ imports math-verify once │ ────> │ each grades a chunk;   │
    │ Grader │                   │                          │       │ killed at the deadline;│
    │        │ <──────────────── │ pebble.ProcessPool       │ <──── │ memory limit: MEMORY   │
    └────────┘ outcomes (JSON)   └──────────────────────────┘       └────────────────────────┘

A request asks for one comparison of answers or one call of a user's function. A chunk is one message with up
to CHUNK requests. The trainer has CUDA and threads, so it must not fork. A server forks the workers instead.

Departures from Open-Reasoner-Zero:

- ORZ's comparison ignores punctuation and accepts substrings: `1,2` equals `12`. Ours does not.
- ORZ's timeout includes the wait in the queue. Our deadline counts the worker's CPU time.
"""

import builtins
import ctypes
import fcntl
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
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from configs import CODE, ROOT, Say, UserError, nearest, require, short_hash, shorten
from grading.answers import KINDS, extract, grade, math_equal, normalise, quick_grade, repeats

REASONS = ("correct", "partial", "wrong", "unparsed", "truncated", "timeout", "error")
SPEC = "path/to/file.py:function"
MAX_ANSWER = 2000  # characters of an answer; a longer answer counts as "unparsed"
MEMORY = 2 << 30  # bytes that a worker may allocate after its fork
CACHE = 16_384  # maximum number of cached grades
MAX_REPLY = 200_000  # maximum number of characters of an environment's text
CHUNK = 16  # maximum number of requests in a chunk
LARGEST = (
    3.4028234e38  # largest float32; data.Pack has float32 rewards, so a larger reward is an error
)
MAX_TASKS = 250  # number of chunks after which a worker is replaced, because its sympy caches grow
ENDED = 222  # exit status of a worker after MAX_TASKS chunks
WALL = 4  # a chunk's wall-time limit, as a multiple of its CPU-time limit; it ends a worker that sleeps
LATE = 8  # the run ends if users' functions time out or end a worker this number of times in a row
TELL = 10  # seconds between a Grader's messages about what it waits for
SCORE = "response answer kind problem row sample".split()  # parameters that a reward may have
TURN = ["problem", "text", "turn"]  # parameters that an environment may have
# The server runs this file as the module __main__, because `serve` removes `grading.worker` from sys.modules.
# pebble pickles `_grade_chunk` and its results, so their module must stay in sys.modules. Files in the
# project's folder, which may be the user's, must not be imported in place of the standard library or of
# packages: so this folder comes after the standard library, and later after the packages (see `serve`).
SERVER = (
    "import runpy, sys; sys.path.insert([p.endswith('-packages') for p in sys.path].index(True), "
    "sys.argv[1]); runpy.run_module('grading.worker', run_name='__main__', alter_sys=True)"
)
LOW = 64  # a user's function may write to or close file descriptors below this number: see `serve`
START = 300  # seconds that a server may need to start from a slow disk

# A request to a worker is a tuple:
#     "compare", answer, gold, kind      call answers.grade
#     "score", function, JSON      call a reward function. JSON: parameter -> value
#     "reply", function, JSON      call the environment


class Grade(NamedTuple):
    """The grade of a response.

    reward: 1.0 or 0.0; from a custom reward, any finite float32
    reason: one of REASONS
    answer: the answer in the response; None if no answer was found, or if `reason` is "truncated"
        or "unparsed"."""

    reward: float
    reason: str
    answer: str | None


class Reply(NamedTuple):
    """The answer of an environment (--env) to a turn of the policy.

    text: what to append to the response; None ends the response
    reward: the response's reward. If it is None, the response is graded as usual
    done: True ends the response without appending `text`

    An environment may also return a str for Reply(str), None for Reply(), or a tuple for Reply(*tuple)."""

    text: str | None = None
    reward: float | None = None
    done: bool = False


# math-verify's parser takes seconds to build tables for each kind of expression. The server compares these
# pairs (answer=gold) before it forks workers for comparisons, so these workers inherit the tables.
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

_functions = {}  # "FILE.py:FUNCTION" -> the function
_modules = {}  # folder of a user's file -> {name: module} of the modules imported from this folder


def _outcome(what, *arguments):
    """Carry out a request. Returns the reward and its reason, or a Reply and "replied"."""
    if what == "reply":
        return _reply(*arguments), "replied"
    value = grade(*arguments) if what == "compare" else _call(*arguments)
    reward = _as_reward(value)
    return reward, reason_of(reward)


def reason_of(reward: float) -> str:
    """Returns "correct" for a reward of at least 1, "partial" for one above 0, else "wrong"."""
    return "correct" if reward >= 1 else "partial" if reward > 0 else "wrong"


def _reply(*request):
    """Call the environment. Returns its Reply. Raises an error if the Reply is not valid."""
    value = _call(*request)
    text, reward, done = Reply(*value) if isinstance(value, tuple) else Reply(value)
    if text is not None:
        if not isinstance(text, str):
            raise TypeError(f"--env returned {text!r:.80}; needed: a text, None or a Reply")
        if len(text) > MAX_REPLY:
            raise ValueError(f"the environment's text has {len(text)} characters, over {MAX_REPLY}")
        # The text must be valid Unicode: `encode` raises an error for a lone surrogate. `decode` returns a
        # plain str, because the server can't unpickle a user's subclass of str.
        text = text.encode().decode()
    if reward is not None:
        reward = _as_reward(reward)
    return Reply(text, reward, bool(done))


def _as_reward(value):
    reward = float(value)
    if not abs(reward) <= LARGEST:
        raise ValueError(f"the reward is {reward}; needed: a finite float32")
    return reward


def _call(spec, values):
    with _modules_beside(spec):
        return _functions[spec](**json.loads(values))


@contextmanager
def _modules_beside(spec):
    """Context manager in which a user's file ("FILE.py:FUNCTION") can import modules from its own folder.
    Afterwards these modules are in `_modules` and not in sys.modules, because two users' files may import
    modules of the same name."""
    folder = os.path.dirname(spec)
    usual = dict(vars(builtins))
    before = set(
        sys.modules
    )  # before `update` adds the folder's modules, because `added` must include them
    # After the standard library, so that a file such as types.py does not replace a part of it.
    sys.path.insert(next((i for i, p in enumerate(sys.path) if p.endswith("-packages")), 0), folder)
    sys.modules.update(_modules.get(folder, {}))
    try:
        yield
    finally:
        # pebble and other functions must not see builtins that the user's file replaces.
        for key in vars(builtins).keys() - usual.keys():
            delattr(builtins, key)
        vars(builtins).update(usual)
        with suppress(ValueError):  # the user's file may have removed the folder from sys.path
            sys.path.remove(folder)
        added = sys.modules.keys() - before
        if added:
            # A module of this folder has the name of its file. Its __file__ is not read, because lazy modules
            # such as torch.classes have a wrong one.
            names = {file.partition(".")[0] for file in os.listdir(folder)} - before
            _modules[folder] = _take_modules(names, added)


def _take_modules(names, among):
    """Remove modules from sys.modules: those of the set `among` that are in `names`, or are submodules of one
    in `names`. Returns a dict: name -> removed module."""
    found = [name for name in among if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}


def _grade_chunk(requests, deadline):
    """Returns the outcomes of the requests, and the mean seconds of a request. An outcome is
    (reward or Reply, reason, error message or None).

    deadline: CPU seconds for the chunk; each request may take an equal share. A request over its share ends
        this process, and the chunk has no outcomes. If the chunk had several requests, the Grader then sends
        each of them again, in a chunk of its own."""
    outcomes, start = [], time.monotonic()
    for request in requests:
        # After this CPU time the kernel sends SIGPROF. Without a handler, SIGPROF ends even C code.
        signal.setitimer(signal.ITIMER_PROF, deadline / len(requests))
        try:
            outcomes.append((*_outcome(*request), None))
        except BaseException as error:  # a custom reward may also raise SystemExit
            outcomes.append((0.0, "error", _message(error, request[1])))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return outcomes, (time.monotonic() - start) / len(requests)


def _message(error, spec):
    """Returns the error as one line of text. If the user's file raised it, the text ends with the file and
    the line number.

    spec: "FILE.py:FUNCTION"; for a "compare" request the answer, and then no file is named"""
    file = spec.rpartition(":")[0]
    places = [
        f" ({file}, line {line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == file
    ]
    try:
        text = str(error)
    except BaseException:
        text = "(its text raises an error, too)"
    return shorten(f"{type(error).__name__}: {text}{''.join(places[-1:])}", 500)


def _init_worker(*files):
    """Make this worker easy to kill, and limit its memory.

    files: the server's pipes, which a user's function must not use"""
    for file in files:
        os.close(file)
    # pebble's handler of SIGTERM would wait for C code such as 9**9**9.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            1, signal.SIGKILL
        )  # PR_SET_PDEATHSIG: the worker dies with the server
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        with suppress(ValueError):  # a lower limit is already set
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# --- in the server
# stdin: a JSON line [chunk number, requests] for each chunk.
# stdout: first the JSON line [0, [imported functions or error, hashes of their files], 0], then a JSON line
# [chunk number, outcomes, seconds] for each chunk.


def user_files(spec: str) -> dict[str, str]:
    """Returns a dict: key -> hash of a file's content, for the user's file FILE.py and for the user's other
    files that are imported by now. The hashes reveal edits. Files of torz and of installed packages are left
    out.

    spec: "FILE.py:FUNCTION". The key of FILE.py is ":FUNCTION". Other keys are names of modules."""
    path, _, function = spec.rpartition(":")
    modules = sys.modules | _modules.get(os.path.dirname(path), {})
    # Sorted, because modules come in another order in each process. `__dict__`, because lazy modules such as
    # torch.classes have an attribute __file__ that names no file.
    files = {
        name: file
        for name, module in sorted(modules.items())
        if (file := getattr(module, "__dict__", {}).get("__file__"))
        and "/lib/python3" not in file.replace("lib64", "lib")
        and Path(file) not in CODE
        and name not in ("sitecustomize", "usercustomize")
    }  # Python imports them at its start
    files[f":{function}"] = path
    return {key: short_hash(Path(file).read_bytes()) for key, file in files.items()}


def _import_function(spec, known):
    """Import the user's function `spec`, "FILE.py:FUNCTION". Returns (names of its parameters, `seconds`,
    `parallel`). Both numbers are 0 if the function declares no `seconds` (see Grader).

    known: the allowed names of parameters, which are the constant SCORE for a reward, and TURN for --env"""
    path, _, name = spec.rpartition(":")
    with _modules_beside(spec):
        module = runpy.run_path(path)
    if name not in module:
        raise NameError(f"no function {name!r}{nearest(name, module)}")
    _functions[spec] = function = module[name]
    signature = inspect.signature(function)
    # Without any of these names, the function may have **kwargs. Then it gets all arguments.
    names = [name for name in known if name in signature.parameters] or known
    signature.bind(**dict.fromkeys(names))  # raises TypeError if another parameter has no default
    seconds, parallel = (
        getattr(function, key, module.get(key, 0)) for key in ("seconds", "parallel")
    )
    return names, float(seconds), int(parallel or 16) if seconds else 0


@cache
def _warm():
    """Compare the pairs of WARM, once."""
    # Hide math-verify's warning that its own timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for pair in WARM.strip().splitlines():
        with suppress(Exception):
            math_equal(*map(normalise, pair.split("=", 1)))
    gc.freeze()  # see `serve`


class _Worker(get_context("fork").Process):
    """A worker process. For pebble, the `exitcode` 0 is a planned end, and any other value is a crash.

    A user's function may end the process with the status 0, and this must count as a crash. So a planned end
    (after MAX_TASKS chunks) has the status ENDED and the `exitcode` 0. For a crash, `exitcode` is the status
    as a text, such as "0"."""

    def run(self):
        super().run()
        sys.exit(ENDED)

    @property
    def exitcode(self):
        status = super().exitcode
        return 0 if status == ENDED else str(status)


def _die():
    """Kill the server, its workers and all processes that users' functions have started."""
    _kill_marked(MARK)
    os.killpg(os.getpid(), signal.SIGKILL)


MARK = os.environ.get("TORZ_GRADER", "none")


def _kill_marked(mark):
    """Kill the processes with TORZ_GRADER=`mark` in their environment, except for this process. A process
    that a user's function starts may be in another process group than the server."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found = f"TORZ_GRADER={mark}\0".encode() in (folder / "environ").read_bytes()
            if found and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)


def _watch(parent):
    """End the server when the trainer, process `parent`, has ended."""
    # When stdin closes, the server ends too. But after the trainer's end, another child of the trainer may
    # hold the pipe of stdin open.
    while os.getppid() == parent:
        time.sleep(0.5)
    _die()


def _dispatch(requests, replies, workers, deadline, found):
    """Read chunks from the pipe `requests`, let workers grade them, and write the outcomes to the pipe
    `replies`.

    found: "FILE.py:FUNCTION" -> the result of `_import_function`

    Each function has its own pool of workers, so that what it changes in its process reaches no other
    function. Comparisons also have their own pool. Its workers start after `_warm`, so they inherit the
    tables."""
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
    pools = {}
    for spec, (_, seconds, parallel) in {"compare": ((), 0, 0), **found}.items():
        pool = pebble.ProcessPool(
            parallel or workers, MAX_TASKS, _init_worker, [requests, replies], context=context
        )
        pools[spec] = pool, seconds or deadline, seconds or WALL * deadline
    with suppress(RuntimeError):  # pebble's pool breaks if someone kills an idle worker
        for line in os.fdopen(requests, "rb"):
            chunk, of_chunk = json.loads(line)
            name = _pool_of(of_chunk[0])
            if name == "compare":
                _warm()
            pool, cpu, wall = pools[name]
            future = pool.schedule(_grade_chunk, [of_chunk, cpu], timeout=wall)
            future.add_done_callback(partial(done, chunk, len(of_chunk)))


def serve(
    parent: int, workers: int, deadline: float, functions: Mapping[str, Sequence[str]]
) -> None:
    """Run the server until stdin closes, the trainer (process `parent`) ends, or a pool of workers breaks.

    functions: "FILE.py:FUNCTION" -> names that its parameters may have: SCORE for a reward, TURN for --env"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles ctrl-C
    requests, replies = (fcntl.fcntl(n, fcntl.F_DUPFD, LOW) for n in (0, 1))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a custom reward must not read the requests
    os.dup2(2, 1)  # a print in a custom reward must not mix with the replies
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    _take_modules(
        {"configs", "grading"}, set(sys.modules)
    )  # a user's file may import another `configs`
    sys.path.remove(ROOT)
    sys.path.append(ROOT)
    found, files = {}, {}
    try:
        for spec, known in functions.items():
            found[spec] = _import_function(spec, known)
            files[spec] = user_files(spec)
    except (Exception, SystemExit) as error:
        found = f"{'--env' if known == TURN else '--reward'} {spec} ({_message(error, spec)})"
    os.write(replies, json.dumps([0, (found, files), 0]).encode() + b"\n")
    if isinstance(found, str):
        _die()
    # A forked worker copies each memory page that it writes to. Garbage collection writes to all objects, so
    # it would copy the server's memory. gc.freeze exempts the objects that exist now.
    gc.freeze()
    while os.open(os.devnull, os.O_RDWR) < LOW:  # so that pebble's pipes get numbers from LOW on
        pass
    _dispatch(requests, replies, workers, deadline, found)
    _die()


# --- in the trainer


class Grader(AbstractContextManager):
    """Grades responses in processes that can be killed. Not thread-safe. Raises UserError for a function that
    can't be imported or does not take its arguments by the names in SCORE (customs) or TURN (env).

    workers     number of worker processes for comparisons; as many others call each function
    deadline    CPU seconds for one answer; the limit of wall time is WALL times as long
    customs     reward functions "FILE.py:FUNCTION". A function takes one or more arguments from SCORE, by
                name, and returns a float.
    env         the environment "FILE.py:FUNCTION". After a crash the call is repeated, so the result must
                depend only on the arguments.
    say         prints what the Grader waits for
    stop        a list that a signal such as ctrl-C fills; then `results` stops waiting

    A function that waits, for example for a network, can have a deadline and workers of its own. Its author
    sets two numbers, as attributes of the function or as globals of its file: `seconds`, the deadline of a
    call in wall time, and `parallel`, the number of parallel calls (default 16).

    If grading raises an error, the reward is 0 and the reason is "error"."""

    def __init__(
        self,
        workers: int = 1,
        deadline: float = 5.0,
        customs: Sequence[str] = (),
        env: str = "",
        say: Say = print,
        stop: Sequence = (),
    ) -> None:
        require(
            workers >= 1 and deadline > 0,
            f"workers={workers}, deadline={deadline}",
            "workers of at least 1, a deadline above 0",
        )
        self.customs = {custom: _check_spec(custom) for custom in customs}
        self.env = _check_spec(env) if env else ""
        functions = dict.fromkeys(self.customs.values(), SCORE) | ({self.env: TURN} if env else {})
        self.arguments = workers, deadline, functions
        self.say, self.stop, self.failure = say, stop, ""
        self.known = (
            None  # {function: result of `_import_function`}, or a failed import's error message
        )
        self.files = {}  # "FILE.py:FUNCTION" -> hashes of its files (see `user_files`) at the first import
        self._late = 0  # number of user-function calls in a row that timed out or ended a worker
        self.patience = (
            START + WALL * deadline
        )  # seconds after which a silent server counts as stalled
        self.errors = {}  # type of an error -> its first message
        self._told = 0  # number of messages that new_errors has returned
        self._grades = {}  # key -> Grade or Reply, for `results`
        self._cache = {}  # request -> Grade
        self._pending = {}  # request without outcome -> (key, answer) of each response that waits for it
        self._waiting = {}  # pool (see `_pool_of`) -> requests that are in no chunk yet
        self._size = 1  # number of requests in the next chunk; a chunk should take 0.1 s
        self._chunks = {}  # chunk number -> its requests, until the reply
        self._count = 0  # number of chunks so far
        self._process = None  # the server
        if functions:
            self._start()
            now = told = time.monotonic()
            end = now + self.patience
            # A server that has ended may have left output, which `_exchange(0)` reads.
            while (
                self.known is None
                and now < end
                and (self._process.poll() is None or self._exchange(0))
            ):
                self._exchange(1.0)
                now = time.monotonic()
                if now - told > TELL:
                    told = now
                    say(
                        f"waits up to {end - now:.0f} s more for the import of {' '.join(functions)}"
                    )
            if not isinstance(self.known, dict):
                self.close()
                found = (
                    self.known
                    or f"{' '.join(functions)}: its import ends the process, or does not end"
                )
                raise UserError(
                    f"can't use {found}; "
                    f"needed: {SPEC}, which can be imported, with parameters of these names: "
                    f"{' '.join(SCORE)}; --env: {' '.join(TURN)}"
                )

    def submit(
        self,
        key: Hashable,
        text: str,
        gold: str,
        stopped: bool,
        kind: str = "math",
        extractor: str = "orz",
        custom: str = "",
        **more: Any,
    ) -> None:
        """Queue a response for grading, without waiting. Raises UserError for an unknown kind or extractor.

        key: the response's key in `results`
        text: the response
        gold: the right answer
        stopped: whether the response ended with EOS or a stop string; if False, its reward is 0
        custom: the reward function, from `customs`; "" compares the answer in `text` with `gold`
        more: values of the function's parameters `problem`, `row` and `sample`. Without a function, `problem`
            is the text that an answer must not repeat (answers.repeats)"""
        require(
            bool(custom) or kind in KINDS,
            f"answer kind {kind!r} is unknown",
            f"one of {', '.join(KINDS)}",
        )
        answer, gold = extract(text, extractor), gold.strip()
        if not stopped:
            self._grades[key] = Grade(0.0, "truncated", None)
        elif custom:
            self._queue_call(
                key,
                "score",
                self.customs[custom],
                more | dict(response=text, answer=gold, kind=kind),
                answer,
            )
        elif found := self._grade_here(answer, gold, kind, more.get("problem") or ""):
            self._grades[key] = found
        else:
            self._queue(key, ("compare", answer, gold, kind), answer)
        if self._process:
            self._exchange(0)

    def ask(self, key: Hashable, problem: str, text: str, turn: int) -> None:
        """Queue the call env(problem, text, turn), without waiting. `results` will return the Reply for
        `key`. If the call fails, `results` will return a Grade with the reason "error" or "timeout" instead.

        turn: number of the turn, from 1"""
        self._queue_call(key, "reply", self.env, dict(problem=problem, text=text, turn=turn))
        self._exchange(0)

    def _grade_here(self, answer, gold, kind, problem):
        """Returns the Grade of an answer that needs no worker; None for all other answers."""
        if answer is None or len(answer) > MAX_ANSWER:
            return Grade(0.0, "unparsed", None)
        if kind == "math" and not answer.isdecimal() and repeats(answer, gold, problem):
            return Grade(0.0, "wrong", answer)
        known = self._cache.get(("compare", answer, gold, kind))
        if known:
            return known
        equal = quick_grade(answer, gold, kind)
        return None if equal is None else Grade(float(equal), reason_of(equal), answer)

    def _queue_call(self, key, what, spec, values, answer=None):
        """Queue a call of a user's function. values: parameter -> value"""
        names = self.known[spec][0]
        self._queue(key, (what, spec, json.dumps({name: values[name] for name in names})), answer)

    def _queue(self, key, request, answer):
        """Queue a request under `key`. Equal requests are sent once."""
        if self._process is None:
            self._start()
        keys = self._pending.setdefault(request, [])
        keys.append((key, answer))
        if len(keys) > 1:
            return
        if request[0] != "compare" and self.known[request[1]][1]:
            self._send(
                [request]
            )  # the function has `seconds`: one call per chunk, to run in parallel
            return
        waiting = self._waiting.setdefault(_pool_of(request), [])
        waiting.append(request)
        if len(waiting) >= self._size:
            self._send(self._waiting.pop(_pool_of(request)))

    def results(self) -> dict[Hashable, Grade | Reply]:
        """Wait for all outcomes. Returns a dict: key -> Grade or Reply, for each `submit` and `ask` since the
        last call. The wait ends early if `stop` is not empty or `failure` is set (see `check`). Then each
        response without an outcome gets a Grade with the reason "timeout". If the server dies or stalls
        twice, sets `failure`, or raises RuntimeError if there are no users' functions."""
        self._send_waiting()
        heard = told = time.monotonic()
        replaced = False
        while self._pending and not (self.stop or self.failure):
            replied, now = self._exchange(1.0), time.monotonic()
            if replied:
                heard = now
            elif self._process.poll() is not None or now - heard > self.patience:
                if replaced and not self.known:
                    raise RuntimeError(
                        "the grading server died or stalled twice, "
                        f"{len(self._pending)} left: see stderr"
                    )
                if replaced:
                    self.failure = (
                        f"the grading server died or stalled twice while it called "
                        f"{' '.join(self.known)}; needed: functions that end no other process"
                    )
                    break
                self._start()
                replaced, heard = True, now
            if now - told > TELL:
                told = now
                self.say(
                    f"grading: waits for {len(self._pending)} calls of "
                    f"{' '.join(self.known or ['math'])}; the last {self._late} timed out"
                )
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
        """Raises UserError in two cases: too many calls of users' functions in a row timed out or ended their
        worker, or a restarted server imported users' files that were edited after the first import."""
        if self.failure:
            raise UserError(self.failure)

    def new_errors(self) -> list[str]:
        """Returns the messages of `errors` that are new since the last call."""
        messages = list(self.errors.values())[self._told :]
        self._told = len(self.errors)
        return messages

    def close(self) -> None:
        """End the server and its workers. A later `submit` or `ask` starts another server."""
        if self._process:
            with (
                self._process,
                suppress(ProcessLookupError),
            ):  # `with` closes the pipes and waits for the end
                os.killpg(self._process.pid, signal.SIGKILL)
            _kill_marked(self._mark)
        self._process = None

    def __exit__(self, *_):
        self.close()

    def _start(self):
        """End the old server, start a new server, and send it all chunks that have no reply."""
        self.close()
        self._mark = os.urandom(8).hex()
        # -P: without it, the working folder would be in sys.path.
        command = [
            sys.executable,
            "-P",
            "-c",
            SERVER,
            ROOT,
            json.dumps([os.getpid(), *self.arguments]),
        ]
        # bufsize=0, because `poll` does not see bytes in a Python buffer. start_new_session, because ctrl-C
        # must not end the server.
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=os.environ
            | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORZ_GRADER": self._mark},
        )
        os.set_blocking(
            self._process.stdin.fileno(), False
        )  # the trainer must not wait for a busy server
        self._unsent = bytearray()
        self._unread = b""  # the last line from the server, if its end has not arrived yet
        chunks, self._chunks = self._chunks, {}
        for requests in chunks.values():
            self._send(requests)

    def _send(self, requests):
        """Put the requests into `_unsent` as one chunk."""
        self._count += 1
        self._chunks[self._count] = requests
        # json.dumps writes ASCII, so a response may contain NULs and lone surrogates.
        self._unsent += json.dumps([self._count, requests]).encode() + b"\n"

    def _send_waiting(self):
        for requests in self._waiting.values():
            self._send(requests)
        self._waiting = {}

    def _exchange(self, seconds):
        """Write requests to the server and read its replies. Waits at most `seconds` until a pipe is ready.
        Returns False if nothing was written or read."""
        stdin, stdout = self._process.stdin, self._process.stdout
        poll = select.poll()  # select.select() fails if the trainer has more than 1024 open files
        poll.register(stdout, select.POLLIN)
        if self._unsent:
            poll.register(stdin, select.POLLOUT)
        events = dict(poll.poll(seconds * 1000))
        writable = events.get(stdin.fileno()) == select.POLLOUT
        if writable:
            with suppress(BrokenPipeError):
                del self._unsent[: stdin.write(self._unsent) or 0]
        read = os.read(stdout.fileno(), 2**16) if stdout.fileno() in events else b""
        *lines, self._unread = (self._unread + read).split(b"\n")
        for line in lines:
            self._receive(*json.loads(line))
        return writable or read != b""

    def _receive(self, chunk, outcomes, seconds):
        """Store the outcomes of a chunk.

        outcomes: None if the worker died or timed out in a chunk of several requests. Then each request is
            sent again, alone.
        seconds: mean time of one request"""
        if chunk == 0:  # the server's first message: what it imported (see serve)
            known, files = outcomes
            self.known, self.files = self.known or known, self.files or files
            if files != self.files:
                self.failure = (
                    f"{' '.join(self.files)} was edited during the run, and a new grading server "
                    "imported it; needed: the files of the run's start, and the same command"
                )
            return
        self._size = min(CHUNK, 1 + int(0.1 / (seconds + 1e-6)))
        requests = self._chunks.pop(chunk)
        if outcomes is None:
            for request in requests:
                self._send([request])
            return
        for request, (value, reason, error) in zip(requests, outcomes, strict=True):
            if request[0] != "compare":
                late = reason == "timeout" or "WorkerDied" in (error or "")
                self._late = (self._late + 1) * late  # 0 after a call that was in time
                # Parallel calls may fail together, so `parallel` (see `_import_function`) raises the limit.
                if self._late >= max(LATE, 2 * self.known[request[1]][2]):
                    self.failure = (
                        f"{request[1]} timed out or ended its process "
                        f"{self._late} times in a row; needed: a function "
                        "that returns in time and ends no process, a larger --grade_deadline, "
                        "or `seconds = …` in its file"
                    )
            for key, answer in self._pending.pop(request):
                grade = Reply(*value) if reason == "replied" else Grade(value, reason, answer)
                self._grades[key] = grade
            # A busy machine may cause errors and timeouts, so they are not cached.
            if request[0] == "compare" and not error and reason != "timeout":
                self._cache[request] = grade
            if error:
                self.errors.setdefault(error.partition(":")[0], error)
        if len(self._cache) > CACHE:
            self._cache.clear()


def _pool_of(request):
    """Returns the name of the pool that carries out a request: "compare", or "FILE.py:FUNCTION"."""
    return request[0] if request[0] == "compare" else request[1]


def _check_spec(spec):
    """Returns `spec` with an absolute path. Raises UserError if `spec` has no colon."""
    path, _, name = spec.rpartition(":")
    require(":" in spec, f"the function {spec!r} is malformed", SPEC)
    return f"{Path(path).absolute()}:{name}"


if __name__ == "__main__":
    serve(*json.loads(sys.argv[2]))
