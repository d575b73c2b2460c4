r"""Grades responses in processes that can be killed. grading/answers.py says which answers are right.

A user's function may hang, fill the memory or crash, and the values of two expressions may take seconds to
compare. So both run in other processes:

    trainer                      server: grading.worker            workers
    ┌────────┐ requests (JSON)   ┌──────────────────────────┐ fork  ┌────────────────────────┐
    │        │ ────────────────> │ imports grading, or      │ ────> │ carry out requests;    │
    │ Grader │                   │ the user's file, once    │       │ killed at the deadline;│
    │        │ <──────────────── │ pebble.ProcessPool       │ <──── │ memory limit: MEMORY   │
    └────────┘ outcomes (JSON)   └──────────────────────────┘       └────────────────────────┘

A request asks for one comparison of answers or one call of a user's function. Comparisons have one server.
Each user's function has a server of its own, so what its file changes in the process reaches no other
function. The trainer has CUDA and threads, so it must not fork. The servers fork the workers instead.

Departures from Open-Reasoner-Zero:

- ORZ's comparison ignores punctuation and accepts substrings: `1,2` equals `12`. Ours does not.
- ORZ's timeout includes the wait in the queue. Our deadline counts the worker's CPU time.
"""

import ctypes
import fcntl
import gc
import inspect
import io
import json
import os
import queue
import re
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from configs import CODE, ROOT, Say, limit_memory, nearest
from grading.answers import grade, quick_grade, repeats
from grading.extract import extract
from guard.messages import UserError, short_hash, shorten

# Of a grade. The outcome of an environment has the reason "replied" if it is no error and no timeout.
REASONS = ("correct", "partial", "wrong", "unparsed", "truncated", "timeout", "error")
SPEC = "path/to/file.py:function"
MAX_ANSWER = 2000  # characters of an answer; a longer answer gets the reason "unparsed"
MEMORY = 2 << 30  # bytes that a worker may allocate after its fork
MAX_REPLY = 200_000  # maximum number of characters of an environment's text
MAX_MESSAGE = 16 * MAX_REPLY  # bytes of a server's message; JSON has up to 12 bytes for a character
# The largest float32. data.Pack has float32 rewards, so a larger reward is an error.
LARGEST = 3.4028234e38
MAX_TASKS = 2000  # requests after which a worker is replaced, in case its memory grows
ENDED = 222  # exit status of a worker after MAX_TASKS requests
WALL = 4  # a request's wall-time limit, as a multiple of its CPU-time limit; it ends a worker that sleeps
LATE = 8  # the run ends if a user's function times out or ends a worker this often in a row
SLOW = "a larger --grade_deadline, or `seconds = …` in its file"  # for slow functions
TELL = 10  # seconds between a Grader's messages about what it waits for
SCORE = "response answer kind problem row sample".split()  # parameters that a reward may have
# For an error message, because the function may be one for verl or TRL: their names of these parameters, and
# ours after the colon
RENAME = " (solution_str, completions: response; ground_truth: answer; extra_info: row)"
TURN = ["problem", "text", "turn"]  # parameters that an environment may have
MAKE = ["problem", "row", "seed"]  # parameters that the class of an environment with state may have
OF_CLASS = (
    f"; or a class with methods step and close, and parameters of these names: {' '.join(MAKE)}"
)
# The code of a server. It runs this file as the module __main__. sys.argv[1] is the project's folder, and
# sys.argv[2] has the arguments of `serve`. Files in the project's folder, which may be the user's, must not
# be imported in place of the standard library or of packages: so this folder comes after the standard library
# in sys.path, and later after the packages (see `_import_function`).
SERVER = (
    "import runpy, sys; "
    "sys.path.insert([p.endswith('-packages') for p in sys.path].index(True), "
    "sys.argv[1]); "
    "runpy.run_module('grading.worker', run_name='__main__', alter_sys=True)"
)
LOW = 64  # a user's function may write to or close file descriptors below this number: see `serve`
START = 300  # seconds that a server may need to start from a slow disk
# Random name of this server: a variable in the environment of the server and of all its descendants.
MARK = os.environ.get("TORZ_GRADER", "none")


class Grade(NamedTuple):
    """The grade of a response.

    reward: 1.0 or 0.0; from a custom reward, any finite float32
    reason: one of REASONS
    answer: the answer in the response; None if no answer was found, if the length limit cut the
        response, or if `reason` is "unparsed"."""

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


# --- in a worker

# `serve` sets these for a user's function.
_function = grade  # a request's arguments -> a value
_is_env = False  # whether the function is an environment
_user_file = ""  # FILE.py
_live = {}  # seed of a response -> its environment with state, and the policy's turns that it has read


def _rewarded(value):
    """Returns a pair: `value`, which a reward function returned, as a float; and its reason (`reason_of`).
    Raises an error if the value is not a finite float32."""
    # float() would also read a text. numpy's texts have __float__.
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"the reward is {value!r:.80}; needed: a number")
    reward = float(value)
    if not abs(reward) <= LARGEST:  # also for NaN
        raise ValueError(f"the reward is {reward}; needed: a finite float32")
    return reward, reason_of(reward)


def reason_of(reward: float) -> str:
    """Returns "correct" for a reward of at least 1, "partial" for one above 0, else "wrong"."""
    if reward >= 1:
        return "correct"
    return "partial" if reward > 0 else "wrong"


def _replied(value):
    """Returns a pair: `value`, which an environment returned, as a Reply; and the reason "replied". Raises an
    error if the Reply is not valid."""
    is_reply = isinstance(value, tuple) and len(value) <= 3
    text, reward, done = Reply(*value) if is_reply else Reply(value)
    if text is not None:
        if not isinstance(text, str):
            raise TypeError(
                f"--env returned {text!r:.80}; needed: a text, None or (text, reward, done)"
            )
        if len(text) > MAX_REPLY:
            raise ValueError(f"the environment's text has {len(text)} characters, over {MAX_REPLY}")
        # The text must be valid Unicode: `encode` raises an error for a lone surrogate. `decode` returns a
        # plain str, because the server can't unpickle a user's subclass of str.
        text = text.encode().decode()
    if reward is not None:
        reward, _ = _rewarded(reward)
    if done not in (True, False):
        raise TypeError(f"--env returned done={done!r:.80}; needed: True or False")
    return Reply(text, reward, bool(done)), "replied"


def _take_turn(make, names, texts, **values):
    """Returns the environment's reply to a response's last turn. `texts`: the policy's turns so far. If this
    worker has no environment with exactly the earlier turns (after a crash, or in a resumed run), it makes
    one and replays the earlier turns first. An environment is closed after its last reply, after an error, or
    if `texts` is empty.

    make: the user's class; names: its parameters, some of `values`. See Grader.ask"""
    seed = values["seed"]
    env, seen = _live.pop(seed, (None, []))
    # `seen` has at least one turn. If `texts` is empty, texts[:-1] is [], and the environment is closed.
    if env and seen != texts[:-1]:
        env.close()
        env = None
    if not texts:
        return None
    if env is None:
        env = make(**{name: values[name] for name in names})
        seen = []
    going = False  # whether the response can have another turn
    try:
        for text in texts[len(seen) :]:
            reply, _ = _replied(env.step(text))
        going = reply.text is not None and not reply.done
    finally:
        if going:
            _live[seed] = env, texts
        else:
            env.close()
    return reply


def _carry_out(request, deadline):
    """Returns the outcome of a request (JSON): (reward or Reply, reason, error message or None). A request
    that takes more than `deadline` CPU seconds ends this process."""
    # After this CPU time the kernel sends SIGPROF. Without a handler, SIGPROF ends even C code.
    signal.setitimer(signal.ITIMER_PROF, deadline)
    try:
        value = _function(**json.loads(request))
        result, reason = _replied(value) if _is_env else _rewarded(value)
        outcome = (result, reason, None)
    except BaseException as error:  # a custom reward may also raise SystemExit
        outcome = (0.0, "error", _message(error))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return outcome


def _message(error):
    """Returns the error as one line of text. If the user's file raised it, the text ends with the file and
    the line number."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == _user_file:
            where = f" ({_user_file}, line {line})"
    return shorten(f"{type(error).__name__}: {error}{where}", 500)


def _init_worker(connection):
    """Make this worker easy to kill, and limit its memory.

    connection: the server's connection to the trainer, which a user's function must not use"""
    connection.close()
    # pebble's handler of SIGTERM would wait for C code such as 9**9**9.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: the worker dies with the server
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        limit_memory(MEMORY, for_good=True)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# --- in the server
# Its messages are JSON. First it sends [0, facts or error message] (see `_import_function`). Then it receives
# [number, request], and sends [number, outcome] (see `_carry_out`).


def _import_function(spec, known):
    """Import the user's function `spec`, "FILE.py:FUNCTION". Returns the function, and facts about it:

        names       names of its parameters; of a class, the arguments of `_take_turn`
        seconds     the variable `seconds` of the user's file: a call's deadline in wall time; 0 if missing
        parallel    its variable `parallel` (default 16): number of parallel calls; 0 without `seconds`
        files       see `user_files`

    known: the allowed names of parameters, which are the constant SCORE for a reward, and TURN for --env"""
    path, _, name = spec.rpartition(":")
    # The user's file may import another `configs`, `grading` or `guard`.
    for module in list(sys.modules):
        if module.partition(".")[0] in ("configs", "grading", "guard"):
            del sys.modules[module]
    before = set(sys.modules)
    # The user's folder takes this folder's place, so that a file such as types.py does not replace a part of
    # the standard library.
    sys.path[sys.path.index(ROOT)] = os.path.dirname(os.path.abspath(path))
    sys.path.append(ROOT)
    module = runpy.run_path(path)
    if name not in module:
        raise NameError(f"no function {name!r}{nearest(name, module)}")
    function = module[name]
    is_class = isinstance(function, type)
    if is_class:
        if known != TURN:
            raise TypeError(f"{name} is a class; only --env may be one")
        known = MAKE  # parameters of its __init__
    signature = inspect.signature(function)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    names = [name for name in known if takes_all or name in signature.parameters]
    if not names and not is_class:
        names = known  # no parameter has an allowed name, so `bind` refuses the function
    signature.bind(**dict.fromkeys(names))  # raises TypeError if another parameter has no default
    seconds = float(module.get("seconds", 0))
    if not 0 <= seconds <= 1e7:  # the timers of the system have limits
        raise ValueError(f"seconds = {seconds}, not a number from 0 to 1e7")
    parallel = int(module.get("parallel", 16)) if seconds else 0
    files = user_files(path, sys.modules.keys() - before)
    if is_class:
        function.step, function.close  # noqa: B018  raises AttributeError
        function = partial(_take_turn, function, names)
        names = [*MAKE, "texts"]
    return function, dict(names=names, seconds=seconds, parallel=parallel, files=files)


def user_files(path: str, imported: Iterable[str]) -> dict[str, str]:
    """Returns a dict: name of a module -> hash of its file, for the user's file `path` (name "") and for the
    user's other modules in the set `imported`. The hashes reveal edits. Files of torz and of installed
    packages, and modules in a zip file, are left out."""
    files = {"": path}  # name of a module -> its file
    for name in sorted(imported):
        # `__dict__`, because lazy modules such as torch.classes have an attribute __file__ of no file.
        file = getattr(sys.modules[name], "__dict__", {}).get("__file__")
        installed = file and "/lib/python3" in file.replace("lib64", "lib")
        # A module of a zip file has no file of its own.
        if file and not installed and Path(file) not in CODE and Path(file).is_file():
            files[name] = file
    return {name: short_hash(Path(file).read_bytes()) for name, file in files.items()}


class _Worker(get_context("fork").Process):
    """A worker process. For pebble, the `exitcode` 0 is a planned end, and any other value is a crash.

    A user's function may end the process with the status 0, and this must count as a crash. So a planned end
    (after MAX_TASKS requests) has the status ENDED and the `exitcode` 0. For a crash, `exitcode` is the
    status as a text, such as "0"."""

    def run(self):
        super().run()
        sys.exit(ENDED)

    @property
    def exitcode(self):
        status = super().exitcode
        return 0 if status == ENDED else str(status)


def _die():
    """Kill the server, its workers and all processes that the user's function has started."""
    _kill_marked(MARK)
    os.killpg(os.getpid(), signal.SIGKILL)


def _kill_marked(mark):
    """Kill the processes with TORZ_GRADER=`mark` in their environment, except for this process. A process
    that a user's function starts may be in another process group than the server."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found = f"TORZ_GRADER={mark}\0".encode() in (folder / "environ").read_bytes()
            if found and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)


def _in_thread(work, *arguments):
    threading.Thread(target=work, args=arguments, daemon=True).start()


def _watch(parent):
    """End the server when the trainer, process `parent`, has ended."""
    # When the connection closes, the server ends too. But after the trainer's end, another child of the
    # trainer may hold it open.
    while os.getppid() == parent:
        time.sleep(0.5)
    _die()


def _outcome_of(error):
    """Returns the outcome of a request whose worker has ended with `error`, which pebble raised."""
    status = getattr(error, "exitcode", "?")
    # A _Worker's exitcode is text after a crash. SIGPROF: the request used more than its CPU time.
    if isinstance(error, TimeoutError) or status == str(-signal.SIGPROF):
        return 0.0, "timeout", None
    message = f"the process ended with status {status} while grading ({error})"
    return 0.0, "error", f"WorkerDied: {message}"


def _dispatch(connection, workers, cpu, wall, has_state):
    """Receive requests, let workers carry them out, and send the outcomes.

    cpu, wall: seconds that a request may take
    has_state: whether a response's requests must all go to the same worker, which is not replaced"""
    import pebble

    lock = threading.Lock()

    def schedule(number, request):
        """Give a request (JSON) to a worker. All requests of a response have the same seed."""
        # Index in `pools`, which is set below. With state, each worker is a pool, so that it can be chosen.
        at = json.loads(request)["seed"] % workers if has_state else 0
        try:
            future = pools[at].schedule(_carry_out, [request, cpu], timeout=wall)
        except RuntimeError:  # someone has killed an idle worker
            _die()
        future.add_done_callback(partial(done, number))

    def done(number, future):
        """Send the outcome of a request. pebble calls this when `future` is done."""
        try:
            outcome = future.result()
        except BaseException as error:  # pebble raises it if the worker died or timed out
            outcome = _outcome_of(error)
        with lock:  # pebble calls `done` from several threads
            _send(connection, number, outcome)

    context = get_context("fork")
    context.Process = _Worker
    tasks = 0 if has_state else MAX_TASKS  # requests after which a worker is replaced; 0: never
    size = 1 if has_state else workers
    pools = []
    for _ in range(workers // size):
        pools.append(pebble.ProcessPool(size, tasks, _init_worker, [connection], context))
    with suppress(EOFError, OSError):
        while True:
            number, request = json.loads(connection.recv_bytes())
            schedule(number, request)


def _send(connection, *message):
    """Send `message` as a JSON list. Does nothing if the other side has closed the connection."""
    # json.dumps writes ASCII, so a response may contain NULs and lone surrogates.
    with suppress(OSError):
        connection.send_bytes(json.dumps(message).encode())


class _Output(io.FileIO):
    """A file that ignores errors of writing, as after the terminal was closed or on a full disk."""

    def write(self, data):
        with suppress(OSError):
            super().write(data)
        return len(data)


def serve(
    parent: int, handle: int, spec: str, known: Sequence[str], workers: int, deadline: float
) -> None:
    """Run a server until the trainer (process `parent`) ends, or the server's pool of workers breaks.

    handle: file descriptor of the connection to the trainer
    spec: the user's function "FILE.py:FUNCTION"; "": the server compares answers
    known: names that the function's parameters may have: SCORE for a reward, TURN for --env"""
    global _function, _is_env, _user_file
    # A `print` in a user's function must not fail, because the reward would be 0.
    sys.stdout = sys.stderr = io.TextIOWrapper(
        _Output(2, "w"), errors="backslashreplace", line_buffering=True
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles ctrl-C
    _in_thread(_watch, parent)
    # A user's function, or a library that it calls, may close low descriptors, such as 3. So move the
    # connection to LOW or higher.
    connection = Connection(fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, LOW))
    os.close(handle)
    facts = dict(seconds=0, parallel=0, names=[])  # when there is no function
    if spec:
        _is_env = known == TURN
        _user_file = spec.rpartition(":")[0]
        try:
            _function, facts = _import_function(spec, known)
        except (Exception, SystemExit) as error:
            _send(connection, 0, _message(error))
            _die()
    _send(connection, 0, facts)
    # A forked worker copies each memory page that it writes to. Garbage collection writes to all objects, so
    # it would copy the server's memory. gc.freeze exempts the objects that exist now.
    gc.freeze()
    # Take all descriptors below LOW, so that pebble's pipes get higher ones.
    while os.open(os.devnull, os.O_RDWR) < LOW:
        pass
    cpu = facts["seconds"] or deadline
    wall = facts["seconds"] or WALL * deadline
    workers = facts["parallel"] or workers
    has_state = "texts" in facts["names"]  # the function is a class
    _dispatch(connection, workers, cpu, wall, has_state)
    _die()


# --- in the trainer
# Two threads for each server send and receive, so the trainer never waits for a server that stands still.


def _send_all(connection, outbox):
    """Send each (number, request) of the queue `outbox`, up to None."""
    for numbered in iter(outbox.get, None):
        _send(connection, *numbered)


def _receive_all(connection, server, process):
    """Put (server, process, message) into the queue server.inbox for each message of the process. The last
    message is None: the process has ended, or a user's function has written something else to the
    connection."""
    try:
        while True:
            message = json.loads(connection.recv_bytes(MAX_MESSAGE))
            server.inbox.put((server, process, message))
    except Exception:
        server.inbox.put((server, process, None))


class _Server:
    """A server process as the trainer sees it, with the requests that have no outcome yet.

    inbox: queue of (server, process, message) for the messages of all servers
    spec: the user's function "FILE.py:FUNCTION", or "" to compare answers
    known: names that the function's parameters may have
    workers: number of worker processes
    deadline: CPU seconds of a request"""

    def __init__(self, inbox, spec, known, workers, deadline):
        self.inbox = inbox
        self.spec = spec
        self.known = known
        self.arguments = spec, known, workers, deadline
        self.facts = None  # see `_import_function`; None until the function has been imported
        self.late = 0  # number of calls in a row that timed out or ended a worker
        self.count = 0  # number of requests so far
        self.requests = {}  # number -> request: the arguments as JSON
        self.waiting = {}  # request -> (key, answer, stopped) of each response that waits for it
        self.process = None

    def start(self):
        """End the old process, start a new one, and send it all requests that have no outcome."""
        self.close()
        self.mark = os.urandom(8).hex()
        variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORZ_GRADER": self.mark}
        ours, theirs = Pipe()
        arguments = [os.getpid(), theirs.fileno(), *self.arguments]
        # -P: without it, the working folder would be in sys.path. start_new_session: ctrl-C must not end the
        # server. stdout=2: what a user's function prints goes to stderr.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, ROOT, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
            env=os.environ | variables,
        )
        theirs.close()
        self.outbox = queue.SimpleQueue()
        _in_thread(_send_all, ours, self.outbox)
        _in_thread(_receive_all, ours, self, self.process)
        self.ended = False  # whether it has closed the connection
        self.heard = time.monotonic()  # when its last message arrived
        for numbered in self.requests.items():
            self.outbox.put(numbered)

    def add(self, request, waiter):
        """Send a request, unless an equal one has no outcome yet.

        waiter: (key, answer, stopped) of the response that waits for the outcome"""
        if self.process is None:
            self.start()
        if not self.requests:
            self.heard = time.monotonic()  # an idle server is silent; its silence counts from now
        waiting = self.waiting.setdefault(request, [])
        waiting.append(waiter)
        if len(waiting) == 1:
            self.count += 1
            self.requests[self.count] = request
            self.outbox.put((self.count, request))

    @property
    def busy(self):
        """Whether the server still imports its function or has unanswered requests."""
        return self.process is not None and (self.facts is None or len(self.requests) > 0)

    def close(self):
        """Kill the process, its workers and what the user's function has started."""
        if self.process:
            self.outbox.put(None)
            # `with` waits for the end.
            with self.process, suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            _kill_marked(self.mark)
        self.process = None


class Grader(AbstractContextManager):
    """Grades responses in processes that can be killed. Not thread-safe. Raises UserError for a function that
    can't be imported or does not take its arguments by the names in SCORE (customs) or TURN (env).

    workers     number of worker processes for comparisons. Each function has as many of its own
    deadline    CPU seconds for one answer; the limit of wall time is WALL times as long
    customs     reward functions "FILE.py:FUNCTION". A function takes one or more arguments from SCORE, by
                name, and returns a float.
    env         the environment "FILE.py:FUNCTION" or "FILE.py:CLASS". Calls are repeated after a crash.
                So a function's result must depend only on its arguments. An object's result may also depend
                on the earlier turns.
    say         prints what the Grader waits for
    stop        a list that a signal such as ctrl-C fills; then `results` stops waiting
    progress    called for each message of a server, while `results` waits

    A function that waits, for example for a network, can have a deadline and workers of its own. Its author
    sets two numbers as globals of its file: `seconds`, the deadline of a call in wall time, and `parallel`,
    the number of parallel calls (default 16).

    If grading raises an error, the reward is 0 and the reason is "error"."""

    def __init__(
        self,
        workers: int = 1,
        deadline: float = 5.0,
        customs: Sequence[str] = (),
        env: str = "",
        say: Say = print,
        stop: Sequence = (),
        progress: Callable = lambda: None,
    ) -> None:
        self.env = env
        self.progress = progress
        known = dict.fromkeys(customs, SCORE)
        if env:
            known[env] = TURN
        self.inbox = queue.SimpleQueue()
        self.functions = {}
        for spec, names in known.items():
            self.functions[spec] = _Server(self.inbox, spec, names, workers, deadline)
        # This server starts when it is needed.
        self.comparisons = _Server(self.inbox, "", [], workers, deadline)
        self.servers = [*self.functions.values(), self.comparisons]
        self.say = say
        self.stop = ()  # until the functions are imported, a signal does not end `_wait`
        self.failure = ""  # why the run must end (see `check`); "": it need not
        # A server is replaced when it is silent for this time and the `seconds` of its file.
        self.patience = START + WALL * deadline
        self.errors = {}  # (type of an error, FILE.py:FUNCTION or "") -> its first message
        self._told = 0  # number of messages that new_errors has returned
        self._grades = {}  # key -> Grade or Reply, for `results`
        try:
            for server in self.functions.values():
                server.start()
            self._wait()
            self.check()
        except BaseException:  # also ctrl-C in a notebook
            self.close()
            raise
        self.stop = stop

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
        """Queue a response for grading, without waiting. Raises UserError for an unknown extractor, and for
        an unknown kind if the response has an answer.

        key: the response's key in `results`
        text: the response
        gold: the right answer
        stopped: whether the response ended with EOS or a stop string. If False, the length limit cut the
            response, and its reward is 0, or what the reward function returned if that is below 0
        custom: the reward function, from `customs`; "" compares the answer in `text` with `gold`
        more: values of the function's parameters `problem`, `row` and `sample`. Without a function, `problem`
            is the text that an answer must not repeat (answers.repeats)"""
        # A base model may end with a special token that is not its EOS, such as <|im_end|>.
        answer = extract(re.sub(r"<\|\w+\|>\s*\Z", "", text), extractor)
        gold = gold.strip()
        if custom:
            # The function's parameter `answer` gets the gold answer.
            values = more | dict(response=text, answer=gold, kind=kind)
            self._call(custom, values, (key, answer if stopped else None, stopped))
        elif not stopped:
            self._grades[key] = Grade(0.0, "truncated", None)
        elif found := _grade_here(answer, gold, kind, more.get("problem") or ""):
            self._grades[key] = found
        else:
            request = json.dumps(dict(answer=answer, gold=gold, kind=kind))
            self.comparisons.add(request, (key, answer, True))

    def ask(self, key: Hashable, texts: Sequence[str], **values: Any) -> None:
        """Queue the call of the environment for the policy's last turn, without waiting. `results` will
        return the Reply for `key`. If the call fails, `results` will return a Grade with the reason "error"
        or "timeout" instead.

        texts: all turns of the policy; () closes the response's environment, if it has state
        values: problem, its text; and for an environment with state: row, the row of the data file; seed, the
            response's own seed"""
        values |= dict(texts=texts, turn=len(texts), text="".join(texts[-1:]))
        self._call(self.env, values, (key, None, True))

    def release(self, seed: int) -> None:
        """Queue the closing of the environment of the response with this seed, if it is still open."""
        # Only an environment with state has the argument `texts`.
        if self.env and "texts" in self.functions[self.env].facts["names"]:
            self.ask(None, (), problem="", row=None, seed=seed)

    def _call(self, spec, values, waiter):
        """Queue a call of the user's function `spec`.

        values: parameter -> value
        waiter: see `_Server.add`"""
        server = self.functions[spec]
        arguments = {name: values[name] for name in server.facts["names"]}
        server.add(json.dumps(arguments), waiter)

    def results(self) -> dict[Hashable, Grade | Reply]:
        """Wait for all outcomes. Returns a dict: key -> Grade or Reply, for each `submit` and `ask` since the
        last call. The wait ends early if `stop` is not empty or `failure` is set (see `check`). Then each
        response without an outcome gets a Grade with the reason "timeout"."""
        self._wait()
        for server in self.servers:
            if server.requests:
                server.close()  # otherwise it would still work on these requests
            # The values are lists of (key, answer, stopped). `sum` joins them.
            for key, answer, _ in sum(server.waiting.values(), []):
                self._grades[key] = Grade(0.0, "timeout", answer)
            server.requests = {}
            server.waiting = {}
        grades = self._grades
        self._grades = {}
        return grades

    def _wait(self):
        """Wait until no server is busy, `stop` is not empty, or `failure` is set. A server that has died or
        stalled is replaced, once."""
        told = time.monotonic()  # when the last message was printed
        replaced = []  # servers that this call has replaced
        self._read(0)
        while (busy := [s for s in self.servers if s.busy]) and not (self.stop or self.failure):
            now = time.monotonic()
            for server in busy:
                declared = server.facts["seconds"] if server.facts else 0
                if not server.ended and now - server.heard < self.patience + declared:
                    continue  # it works
                if server in replaced or server.facts is None:
                    what = "a call" if server.facts else "its import"
                    self.failure = (
                        f"can't use {server.spec or 'grading/answers.py'}: {what} ended or stopped "
                        "its server; needed: a file that ends no other process"
                    )
                    return
                replaced.append(server)
                server.start()
            if now - told > TELL:
                told = now
                waits = [f"{len(s.requests)} calls of {s.spec or 'math'}" for s in busy]
                with suppress(OSError):  # the terminal was closed
                    self.say(f"grading: waits for {', '.join(waits)}")
            self._read(1.0)

    @property
    def reads_rows(self) -> bool:
        """Whether a reward function has the parameter `row`."""
        return any("row" in server.facts["names"] for server in self.functions.values())

    @property
    def files(self) -> dict[str, dict[str, str]]:
        """Returns a dict: "FILE.py:FUNCTION" -> hashes of its files (see `user_files`)."""
        return {spec: server.facts["files"] for spec, server in self.functions.items()}

    def check(self) -> None:
        """Raises UserError if a user's function can't be used: its server died or stalled twice, too many of
        its calls in a row timed out or ended their worker, or its file was edited during the run."""
        if self.failure:
            raise UserError(self.failure)

    def new_errors(self) -> list[str]:
        """Returns the messages of `errors` that are new since the last call."""
        messages = list(self.errors.values())[self._told :]
        self._told = len(self.errors)
        return messages

    def close(self) -> None:
        """End the servers and their workers. A later `submit` or `ask` starts another server."""
        for server in self.servers:
            server.close()

    def __exit__(self, *_):
        self.close()

    def _read(self, seconds):
        """Read the servers' messages. Waits at most `seconds` for one."""
        with suppress(queue.Empty):
            while True:
                server, process, message = self.inbox.get(timeout=seconds)
                seconds = 0  # only for the first message
                self.progress()
                if process is not server.process:  # a process that was replaced
                    continue
                server.heard = time.monotonic()
                if message is None:
                    server.ended = True
                elif message[0] == 0:  # requests are numbered from 1
                    self._imported(server, message[1])
                else:
                    self._receive(server, message[0], *message[1])

    def _imported(self, server, facts):
        """Store what a new server says about its function.

        facts: see `_import_function`; an error message if the import failed"""
        if isinstance(facts, str):
            self.failure = (
                f"can't use {server.spec} ({facts}); needed: {SPEC}, which can be imported, "
                f"with parameters of these names: {' '.join(server.known)}"
            )
            self.failure += RENAME if server.known is SCORE else OF_CLASS
        elif server.facts not in (None, facts):
            self.failure = (
                f"{server.spec} was edited during the run, and a new grading server "
                "imported it; needed: the files of the run's start, and the same command"
            )
        else:
            server.facts = facts

    def _receive(self, server, number, value, reason, error):
        """Store the outcome of a request: value (reward or Reply), reason, and error message or None."""
        for key, answer, stopped in server.waiting.pop(server.requests.pop(number)):
            grade = Reply(*value) if reason == "replied" else Grade(value, reason, answer)
            if not stopped and not error and reason != "timeout":
                # At most 0: the policy earns nothing for a cut response. Below 0: a response that
                # the length limit cuts escapes no penalty.
                grade = Grade(min(value, 0.0), "truncated", None)
            self._grades[key] = grade
        if error:
            kind = error.partition(":")[0]  # such as ValueError
            self.errors.setdefault((kind, server.spec), error)
        if server is self.comparisons:
            return
        if reason == "timeout":
            message = f"Timeout: a call of {server.spec} took too long; needed: {SLOW}"
            self.errors.setdefault((reason, server.spec), message)
        # The run ends if a user's function is late too often.
        late = reason == "timeout" or "WorkerDied" in (error or "")
        if late or key is not None:  # None: a call of `release`, which seldom calls the user's code
            server.late = server.late + 1 if late else 0
        # Parallel calls may fail together, so `parallel` raises the limit.
        if server.late >= max(LATE, 2 * server.facts["parallel"]):
            self.failure = (
                f"{server.spec} timed out or ended its process {server.late} times "
                f"in a row; needed: a function that returns in time and ends no process, {SLOW}"
            )


def _grade_here(answer, gold, kind, problem):
    """Returns the Grade of an answer that can be graded without a worker; None if it needs a worker."""
    if answer is None or len(answer) > MAX_ANSWER:
        return Grade(0.0, "unparsed", None)
    if kind == "math" and not answer.isdecimal() and repeats(answer, gold, problem):
        return Grade(0.0, "wrong", answer)
    equal = quick_grade(answer, gold, kind)
    if equal is None:
        return None
    return Grade(float(equal), reason_of(equal), answer)


if __name__ == "__main__":
    serve(*json.loads(sys.argv[2]))
