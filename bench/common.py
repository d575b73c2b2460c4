"""Functions that several benches use."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--monitor-interval", "1", "--nproc-per-node")


def arguments(doc: str, **defaults: Any) -> argparse.Namespace:
    """Parses the command line.

    doc: the text of --help
    defaults: flag -> default value. With the default False, the flag is a switch. With a tuple, it takes any
        number of words."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(f"--{name}", nargs="*", default=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def say(row: dict) -> None:
    print(json.dumps(row), flush=True)


def new_folder(out: str) -> Path:
    """Returns the absolute path of --out. Raises UserError if the path exists and is not an empty folder."""
    # not at the top: bench/vs_trl.py imports this file in the environment of TRL
    from guard.messages import require

    path = Path(out).absolute()
    require(not path.exists() or path.is_dir() and not any(path.iterdir()), f"{path} is not empty",
            "--out with a folder that is new or empty")
    return path


def environment(threads: int = 1) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def torchrun(ranks: int, *words: object) -> list[str]:
    """Returns the command that runs Python with the arguments `words`, under torchrun if `ranks` is above
    1."""
    return [sys.executable, *([*TORCHRUN, str(ranks)] if ranks > 1 else []), *map(str, words)]


def in_forks(calls: Sequence[tuple[Callable[[], None], Path]], jobs: int) -> Iterator[tuple[int, int]]:
    """Runs each call (function, file for its output) in a forked process, `jobs` at a time. Yields (index of
    the call, exit status) when a call ends."""
    def child(call: Callable[[], None], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        call()
        os._exit(0)

    context, running, waiting = multiprocessing.get_context("fork"), {}, list(enumerate(calls))
    while waiting or running:
        while waiting and len(running) < jobs:
            index, call = waiting.pop(0)
            process = context.Process(target=child, args=call)
            process.start()
            running[process] = index
        wait([process.sentinel for process in running])
        for process in [p for p in running if p.exitcode is not None]:
            yield running.pop(process), process.exitcode


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
