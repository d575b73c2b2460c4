r"""Is this answer right? The only code here that meets untrusted input.

    python reward.py RESPONSES.jsonl [--reward my_reward.py:score]  # dry run of a reward on a file
    with Grader(workers=2) as grader:                              # streaming, in a training loop
        grader.submit("id", response, gold=r"\frac{1}{2}", stopped=True)
        print(grader.results())

The reward is 1 if the response stopped by itself and the \boxed{} in its <answer> equals the gold answer,
else 0. Equality is math-verify's, which hangs, eats memory or crashes on some of what a policy writes. So it
runs in processes that are killed at a deadline. They are forked from a light server (this file with --serve),
not from the trainer: a process with CUDA and threads must not fork, and spawning imports its `__main__`.

    trainer: Grader --(JSON lines)--> server: math-verify, imported and warmed --(fork)--> pebble's workers

Departs from Open-Reasoner-Zero on purpose. Its equality drops punctuation and compares substrings (`1,2` =
`12`, `5` = `5\text{ or }7`, nothing = nothing); ours does not. Its one-second timeout counted the time in the
queue, so right answers failed under load; our deadline is CPU time of the worker, so a reward does not depend
on how busy the machine is. Our zeros have a reason.
"""

import argparse
import ast
import collections
import contextlib
import difflib
import functools
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from fractions import Fraction

REASONS = ("correct", "wrong", "unparsed", "truncated", "timeout", "error")
KINDS = ("math", "choice", "exact")
MAX_ANSWER = 2000  # characters; a longer one is "unparsed": no gold answer comes near, parsing is superlinear
MEMORY = 2 << 30  # bytes of address space that a worker may add to what it was forked with
CACHE = 16_384  # graded (answer, gold, kind) triples to remember: the samples of one prompt mostly agree
CHUNK, LINGER = 16, 0.01  # answers that go to a worker together, seconds that the first waits for others: a trip costs 0.2 ms
WALL = 4  # deadlines by the clock after which a worker is killed too: it sleeps, or the machine is overloaded
SPEC = "path/to/file.py:function"


@dataclass(frozen=True)
class Grade:
    """`reward` is 1.0 or 0.0, or a custom reward's finite float; `reason` is one of REASONS."""
    reward: float
    reason: str
    answer: str | None


# ---- Extraction: one pass without backtracking, so hostile text costs no more than its length.

BRACE = re.compile(r"\\\\(?!boxed)|\\[{}]|(\\boxed\s*\{)|([{}])")  # \\, \{ and \} are LaTeX's, no grouping


def extract_answer(text: str) -> str | None:
    r"""The last balanced \boxed{} of the last <answer>...</answer> with one, stripped; None if none or empty.

    `text` must still have its stop string: without `</answer>` there is no answer. Linear in len(text).
    """
    for block in reversed(text.split("</answer>")[:-1]):
        _, opened, inside = block.partition("<answer>")
        if opened and (answer := _last_boxed(inside)) is not None:
            return answer.strip() or None
    return None


def _last_boxed(text: str) -> str | None:
    found, stack = (-1, -1), []  # the stack holds where each open box's content starts, -1 for a plain brace
    for match in BRACE.finditer(text):
        if match[1]:
            stack.append(match.end())
        elif match[2] == "{":
            stack.append(-1)
        elif match[2] and stack:
            found = max(found, (stack.pop(), match.start()))
    return text[slice(*found)] if found[0] >= 0 else None


# ---- Equality.

FRAC = re.compile(r"\\[dt]?frac\{(\d{1,40})\}\{(\d{1,40})\}", re.ASCII)
NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3}){1,6}(?:\.\d{1,40})?|\d{1,40}(?:\.\d{1,40}|/[1-9]\d{0,39})?)",
                    re.ASCII)
TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{([^{}]*)\}")
WORDS = re.compile(r"[A-Za-z]{4,}(?:[ -][A-Za-z]+)*")
LETTER = re.compile(r"(?:([A-Z])|\(([A-Z])\))\.?")
DELIMITED = re.compile(r"\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
# antlr builds its tables as it meets grammar, up to seconds for a first meeting. The server meets all this
# before it forks, and workers inherit the tables: else a right answer could run into its deadline.
WARM = (r"\frac{1}{2}=0.5", "x^2+2x+1=(x+1)^2", "(3,4)=(4,3)", r"\{1,2\}=1,2", r"2\sqrt{2}=\sqrt[3]{8}",
        r"(-\infty,3]=x<3", r"[0,1)\cup(2,3)=[0,1]", r"\begin{pmatrix}1\\2\end{pmatrix}=1 1/2", r"x\ge5=3:4",
        r"\pi r^2+\sin(x)=e^{2x}-\ln|y|", r"\binom{5}{2}+3!=10^{-3}", r"-3i+\log_2 8=50\%",
        r"1\frac12=\text{no}", r"1.5\times10^3=90^\circ", r"\dfrac{a_1}{b}=5\text{ or }7")


def grade(answer: str, gold: str, kind: str = "math") -> bool:
    r"""Does `answer` equal `gold`? As "math", as a "choice" (D, d, (D), D., \text{D}) or as "exact" strings.

    Runs here and without a deadline: untrusted answers belong to a Grader. Raises what math-verify raises,
    and ValueError for an unknown kind or a gold answer that cannot be parsed.
    """
    answer, gold = answer.strip(), gold.strip()
    quick = _quick(answer, gold, kind)
    return _math_equal(answer, gold) if quick is None else quick


def _quick(answer: str, gold: str, kind: str) -> bool | None:
    """What microseconds can decide, else None. Both sides are stripped."""
    if kind not in KINDS:
        raise ValueError(f"answer kind {kind!r} is unknown; needed: one of {', '.join(KINDS)}")
    if not answer or not gold:
        return False
    if kind == "choice":
        return (letter := _letter(gold)) is not None and _letter(answer) == letter
    if answer == gold or kind == "exact":
        return answer == gold
    a, b = _number(answer), _number(gold)
    if a is not None and b is not None and (a == b or ("." in answer) == ("." in gold)):
        return a == b  # else a fraction and a decimal, which may still agree to six places
    a, b = TEXT.sub(r"\1", answer).strip(), TEXT.sub(r"\1", gold).strip()
    if WORDS.fullmatch(a) and WORDS.fullmatch(b):  # to math-verify east = seat, products of the same letters
        return a.casefold() == b.casefold()
    return None


def _number(text: str) -> Fraction | None:
    text = FRAC.sub(r"\1/\2", text) if len(text) < 100 else ""
    return Fraction(text.replace(",", "")) if NUMBER.fullmatch(text) else None


def _letter(text: str) -> str | None:
    match = LETTER.fullmatch(TEXT.sub(r"\1", text).strip(" $").upper())
    return match and (match[1] or match[2])


@functools.lru_cache(4096)
def _parse(text: str) -> list:
    r"""math-verify's reading of one whole answer, [] if there is none.

    In \boxed{}, because the anchors that math-verify seeks in prose would let an answer choose what is read
    of it (it reads `7 $5$` as 5). For the same reason nothing is read of what has delimiters inside.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if match := DELIMITED.fullmatch(text):
        text = next(filter(None, match.groups()))
    text = re.sub(r"^\$(?=\d)", "", text)  # dollars
    if re.search(r"(?<!\\)\$|(?<!\\)\\[][()]|\\boxed|(?i:answer)", text):
        return []
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(rf"\boxed{{{text}}}", configs, parsing_timeout=None)  # None: no alarm(), the pool kills


def _math_equal(answer: str, gold: str) -> bool:
    from math_verify import verify

    right = _parse(gold)
    if not right:
        raise ValueError(f"the gold answer {gold[:80]!r} cannot be parsed")
    size = 1.0
    with contextlib.suppress(Exception):  # not every gold answer is a number
        size = abs(float(right[0]))
    # Decimals are compared to six places; to six digits of a tiny gold answer, for 10^{-7} is not 0.0.
    places = 5 - math.floor(math.log10(size)) if 0 < size < 1e-5 else 6
    try:
        return verify(right, _parse(answer), float_rounding=places, timeout_seconds=None, raise_on_error=True)
    except (RecursionError, MemoryError, OverflowError):  # the answer's size, not math-verify's fault
        return False


# ---- The server, `python reward.py --serve ...`: lists of requests as JSON lines on stdin, of grades on stdout.

_custom: Callable | Exception | None = None  # the user's function, or why there is none; set before forking


def _work(answer: str, gold: str, kind: str, seconds: float) -> tuple[float, str, str | None]:
    """(reward, reason, error), in a worker. With a custom reward `answer` is the whole response."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time; no handler: the kernel ends us, in C code too
    try:
        if _custom is None:
            return (1.0, "correct", None) if _math_equal(answer, gold) else (0.0, "wrong", None)
        if isinstance(_custom, Exception):
            raise _custom
        value = float(_custom(answer, gold, kind))  # a TypeError here says what came instead of a number
        if not math.isfinite(value):
            raise ValueError(f"the reward function returned {value}; needed: a finite float")
        return value, "correct" if value > 0 else "wrong", None
    except Exception as error:
        return 0.0, "error", f"{type(error).__name__}: {error}"[:500]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _work_all(requests: list[list[str]], deadline: float) -> tuple[list[tuple[float, str, str | None]], float]:
    """All of them within the deadline of one, for what takes long is tried again alone; and seconds that each took."""
    start = time.monotonic()
    return [_work(*r, deadline / len(requests)) for r in requests], (time.monotonic() - start) / len(requests)


def _failure(error: BaseException) -> tuple[float, str, str | None]:
    """What an answer gets that its worker did not come to the end of."""
    code = getattr(error, "exitcode", None)  # of pebble.ProcessExpired
    if isinstance(error, TimeoutError) or code == -signal.SIGPROF:
        return 0.0, "timeout", None
    what = f"{type(error).__name__}: {error}" if code is None else f"WorkerDied: exit code {code} while grading"
    return 0.0, "error", what[:500]


def _init_worker(pipes: tuple[int, ...]) -> None:
    for fd in pipes:  # the server's: held open here they would hide its end from the trainer
        os.close(fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler waits for C code (9**9**9) to return
    if sys.platform == "linux":
        import ctypes
        import resource

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan of a killed server
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load_custom(reward: str) -> Callable | Exception:
    import importlib.util

    try:
        path, _, name = reward.rpartition(":")
        sys.path.insert(0, os.path.dirname(path))
        spec = importlib.util.spec_from_file_location("custom_reward", path)
        sys.modules["custom_reward"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)
    except Exception as error:
        return error


def _warm() -> None:
    import logging

    from sympy.parsing import sympy_parser

    # Per number literal sympy executes `from sympy import *` to make these names, half the time of an answer.
    names: dict = {}
    exec("from sympy import *", names)
    sympy_parser.parse_expr = functools.partial(sympy_parser.parse_expr, global_dict=names)
    _parse_in_two_stages()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    for line in WARM:
        left, _, right = line.partition("=")
        with contextlib.suppress(Exception):
            _math_equal(left, right)


def _parse_in_two_stages() -> None:
    """ANTLR's two-stage parsing: by SLL prediction and, only where that fails, by LL, which looks at the whole context of
    each rule and is 20 times slower on intervals, sets and tuples. What SLL accepts LL reads the same way."""
    from antlr4.atn.PredictionMode import PredictionMode
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy as Latex

    parse, create_parser, mode = Latex.parse, Latex.create_parser, [PredictionMode.SLL]

    def create(self, *args):
        parser = create_parser(self, *args)
        parser._interp.predictionMode = mode[0]
        return parser

    def staged(self, latex):
        try:
            mode[0] = PredictionMode.SLL
            return parse(self, latex)
        except Exception:
            mode[0] = PredictionMode.LL
            return parse(self, latex)

    Latex.create_parser, Latex.parse = create, staged


def _die() -> None:
    """End the server and its workers, at once. It leads a session of its own: no one else is in its group."""
    os.killpg(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:  # stdin does not tell if another child of the trainer holds its pipe
        time.sleep(0.5)
    _die()


def serve(parent: int, workers: int, deadline: float, reward: str) -> None:
    """The server. Ends, and its workers with it, when stdin closes, `parent` is gone or the pool breaks."""
    import gc
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    import pebble

    global _custom
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the trainer's to handle
    requests, replies, lock = os.dup(0), os.dup(1), threading.Lock()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # so that a print in a custom reward does not mix with the replies
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    _custom = _load_custom(reward) if reward else _warm()
    gc.freeze()  # or the workers' collections would copy every page they share

    def reply(grades: list) -> None:
        with lock:
            os.write(replies, json.dumps(grades).encode() + b"\n")

    together = 1  # as many quick answers as take a worker 0.1 s

    def schedule(tasks: list[list]) -> None:
        future = pool.schedule(_work_all, [[request for _, *request in tasks], deadline], timeout=WALL * deadline)
        future.add_done_callback(functools.partial(done, tasks))

    def done(tasks: list[list], future: pebble.ProcessFuture) -> None:
        nonlocal together
        try:
            values, seconds = future.result()
            together = max(1, min(CHUNK, int(0.1 / max(seconds, 1e-6))))
        except BrokenProcessPool:
            _die()
        except BaseException as error:  # a custom reward's SystemExit, say
            together = 1
            if len(tasks) > 1:
                try:
                    for task in tasks:
                        schedule([task])
                except RuntimeError:  # the pool is broken
                    _die()
                return
            values = [_failure(error)]
        reply([[task, value] for (task, *_), value in zip(tasks, values, strict=True)])

    # A worker ends after some thousand answers, for sympy's caches grow; its successor is a fork, so it starts warm.
    pool = pebble.ProcessPool(workers, 250, _init_worker, [(requests, replies)], get_context("fork"))
    reply([])
    with contextlib.suppress(RuntimeError):  # a killed idle worker breaks pebble's pool: start over
        for line in os.fdopen(requests, "rb"):
            tasks = json.loads(line)
            size = min(together, math.ceil(len(tasks) / workers))
            for i in range(0, len(tasks), size):
                schedule(tasks[i:i + size])
    _die()


# ---- The trainer's side.


FLUSH = "flush"


class _Server:
    """The server's process and a thread for each pipe, so that neither side ever waits for the other."""

    def __init__(self, arguments: list[str], receive: Callable[["_Server", list | None], None]) -> None:
        command = [sys.executable, os.path.abspath(__file__), "--serve", str(os.getpid()), *arguments]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
                                        start_new_session=True)  # ctrl-C is not for it
        self.outbox: queue.SimpleQueue[list | str | None] = queue.SimpleQueue()  # a task, FLUSH, or None: the end
        self.receive, self.ready, self.dead = receive, False, False
        self.threads = [threading.Thread(target=f, daemon=True) for f in (self._write, self._read)]
        for thread in self.threads:
            thread.start()

    def _write(self) -> None:
        with contextlib.suppress(OSError), self.process.stdin as pipe:  # OSError: it died
            while (task := self.outbox.get()) is not None:
                tasks, until = [], time.monotonic() + LINGER
                while isinstance(task, list):
                    tasks.append(task)
                    try:
                        task = self.outbox.get(timeout=max(0.0, until - time.monotonic())) if len(tasks) < CHUNK else FLUSH
                    except queue.Empty:
                        break
                if tasks:
                    pipe.write(json.dumps(tasks).encode() + b"\n")  # ASCII, so NULs and lone surrogates pass
                    pipe.flush()
                if task is None:
                    break

    def _read(self) -> None:
        with self.process.stdout as pipe, contextlib.suppress(ValueError):  # ValueError: a line cut by death
            for line in pipe:
                self.receive(self, json.loads(line))
        self.receive(self, None)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.outbox.put(None)
        for thread in self.threads:
            thread.join()


class Grader:
    """Grades responses as they come, in processes that are killed. An answer may take `deadline` seconds of
    CPU time, and WALL times as many by the clock; waiting in the queue does not count.

    `reward` ("path/to/file.py:function") puts function(response, answer, kind) -> float in place of
    extraction and equality, called in a worker for each stopped response; ValueError if there is none. What
    fails is graded 0 as an "error": `errors` keeps the first message of each type, `last_error` the newest.
    Starts its server at the first answer that needs it. For use from one thread.
    """

    def __init__(self, workers: int = 1, deadline: float = 5.0, reward: str | None = None) -> None:
        if workers < 1 or deadline <= 0:
            raise ValueError(f"workers={workers}, deadline={deadline}; needed: at least 1, and more than 0")
        self.custom = reward is not None
        self.arguments = [str(workers), str(deadline), _check_spec(reward) if self.custom else ""]
        self.patience = WALL * deadline + 30  # while tasks wait one must end in that time; the rest is slack
        self.last_error: str | None = None
        self.errors: dict[str, str] = {}
        self._changed = threading.Condition()  # guards what follows, which the reader thread writes too
        self._grades: dict[Hashable, Grade] = {}
        self._cache: collections.OrderedDict[tuple, Grade] = collections.OrderedDict()
        self._tasks: dict[int, tuple[tuple, str | None, list[Hashable]]] = {}  # request, answer, keys
        self._ids: dict[tuple, int] = {}  # request -> its task, so that equal answers are graded once
        self._count = self._replies = 0
        self._server = _Server(self.arguments, self._receive) if self.custom else None

    def submit(self, key: Hashable, text: str, gold: str, stopped: bool, kind: str = "math") -> None:
        """Queue a response without waiting. `stopped`: it ended by EOS or a stop string, not by length."""
        gold, answer, grade = gold.strip(), None, None
        if not stopped:
            grade = Grade(0.0, "truncated", None)
        elif not self.custom:
            answer = extract_answer(text)
            if answer is None or len(answer) > MAX_ANSWER:
                grade = Grade(0.0, "unparsed", None)
            elif (equal := _quick(answer, gold, kind)) is not None:
                grade = Grade(float(equal), "correct" if equal else "wrong", answer)
        request = (text if self.custom else answer, gold, kind)
        with self._changed:
            grade = grade or self._cache.get(request)
            if grade:
                self._grades[key] = grade
            elif request in self._ids:
                self._tasks[self._ids[request]][2].append(key)
            else:
                self._count += 1
                self._ids[request], self._tasks[self._count] = self._count, (request, answer, [key])
                self._server = self._server or _Server(self.arguments, self._receive)
                self._send(self._count)

    def results(self) -> dict[Hashable, Grade]:
        """Wait for all that was submitted since the last call, and return it by key.

        A server that died or stalls is replaced and gets what is left again, once; then RuntimeError.
        """
        replaced = False
        if self._server:
            self._server.outbox.put(FLUSH)
        while True:
            with self._changed:
                before, server = self._replies, self._server
                if not self._tasks:
                    grades, self._grades = self._grades, {}
                    return grades
                patience = self.patience if server.ready else 300  # importing from a network disk takes time
                moved = self._changed.wait_for(lambda s=server, n=before: s.dead or self._replies > n,
                                               patience)
                if moved and not server.dead:
                    continue
                left = len(self._tasks)
            server.kill()  # without the lock, which its reader may be waiting for
            if replaced:
                raise RuntimeError(f"the grading server died or stalled twice, {left} left: see stderr")
            with self._changed:
                replaced, self._server = True, _Server(self.arguments, self._receive)
                for task in self._tasks:
                    self._send(task)
                self._server.outbox.put(FLUSH)

    def close(self) -> None:
        """End the server and its workers; what is not graded yet is dropped."""
        with self._changed:
            server, self._server, self._tasks, self._ids = self._server, None, {}, {}
        if server:
            server.kill()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, task: int) -> None:
        self._server.outbox.put([task, *self._tasks[task][0]])

    def _receive(self, server: _Server, message: list | None) -> None:
        """A reply, empty once it is ready, or None at the server's end; in its reader's thread."""
        with self._changed:
            self._replies += 1
            if message is None:
                server.dead = True
            else:
                server.ready = True
                for task, grade in message:
                    if task in self._tasks:  # else a predecessor's server had graded it
                        self._finish(task, *grade)
            self._changed.notify_all()

    def _finish(self, task: int, reward: float, reason: str, error: str | None) -> None:
        request, answer, keys = self._tasks.pop(task)
        del self._ids[request]
        grade = Grade(reward, reason, answer)
        self._grades.update(dict.fromkeys(keys, grade))
        if reason in ("correct", "wrong") and not self.custom:  # a timeout may be the machine's fault
            self._cache[request] = grade
            if len(self._cache) > CACHE:
                self._cache.popitem(last=False)
        if error and (name := error.partition(":")[0]) not in self.errors:
            self.errors[name] = self.last_error = error


def _check_spec(spec: str) -> str:
    """The spec with an absolute path. Reads the file without running it: that is for the server to do."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"reward {spec!r} is malformed; needed: {SPEC}")
    if not os.path.isfile(path):
        raise ValueError(f"reward {spec!r}: there is no file {os.path.abspath(path)!r}; needed: {SPEC}")
    try:
        with open(path, "rb") as file:
            body = ast.parse(file.read()).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"reward {spec!r}: {path} is not Python ({error}); needed: {SPEC}") from None
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    imported = [a.asname or a.name for node in body if isinstance(node, ast.ImportFrom) for a in node.names]
    if name not in names + imported:
        near = difflib.get_close_matches(name, names) or names[:5]
        raise ValueError(f"reward {spec!r}: {path} has no function {name!r}, "
                         f"it has {', '.join(near) or 'none'}; needed: {SPEC}")
    return f"{os.path.abspath(path)}:{name}"


# ---- The dry run.


def _rows(path: str) -> Iterator[dict]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            try:
                row = {"stopped": True, "kind": "math", **json.loads(line)}
            except (ValueError, TypeError, RecursionError):
                raise ValueError(f"{path}, row {number}: not a JSON object") from None
            for field, of in (("response", str), ("answer", str), ("stopped", bool), ("kind", str)):
                if not isinstance(row.get(field), of):
                    found = type(row[field]).__name__ if field in row else "missing"
                    raise ValueError(f"{path}, row {number}: {field!r} is {found}; needed: {of.__name__}")
            if row["kind"] not in KINDS:
                found, needed = repr(row["kind"]), ", ".join(KINDS)
                raise ValueError(f"{path}, row {number}: 'kind' is {found}; needed: one of {needed}")
            yield row


def dry_run(path: str, workers: int, deadline: float, reward: str | None) -> None:
    """Grade a file of responses; print the reasons, mean reward, seconds and the first three failures."""
    rows, start = list(_rows(path)), time.perf_counter()
    with Grader(workers, deadline, reward) as grader:
        for i, row in enumerate(rows):
            grader.submit(i, row["response"], row["answer"], row["stopped"], row["kind"])
        grades = grader.results()
    counts = collections.Counter(g.reason for g in grades.values())
    for reason in REASONS:
        print(f"{reason:10}{counts[reason]:8}{counts[reason] / max(1, len(rows)):8.1%}")
    mean = sum(g.reward for g in grades.values()) / max(1, len(rows))
    print(f"mean reward {mean:.4f}, {time.perf_counter() - start:.1f} s")
    for i in [i for i in range(len(rows)) if grades[i].reason in ("wrong", "unparsed")][:3]:
        answer, gold, end = grades[i].answer, rows[i]["answer"], rows[i]["response"][-200:]
        print(f"row {i + 1}, {grades[i].reason}: {answer!a}, gold {gold!a}, ends {end!a}")
    for message in grader.errors.values():
        print(f"error: {ascii(message)}")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        parent, workers, deadline, reward = sys.argv[2:]
        return serve(int(parent), int(workers), float(deadline), reward)
    parser = argparse.ArgumentParser(description="Is this answer right? A dry run of the reward: grades a "
                                     "file of responses; prints reasons, mean reward and first failures.")
    parser.add_argument("responses", metavar="RESPONSES.jsonl",
                        help='rows {"response": str, "answer": str, "stopped": true, "kind": "math"}; the '
                             "last two may be left out")
    parser.add_argument("--reward", metavar=SPEC, help="your own: function(response, answer, kind) -> float")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--deadline", type=float, default=5.0, help="CPU seconds for one answer (default 5)")
    args = parser.parse_args()
    try:
        dry_run(args.responses, args.workers, args.deadline, args.reward)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
