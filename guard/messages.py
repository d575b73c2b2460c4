"""Messages: what a user's mistake prints, and numbers as text."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class UserError(Exception):
    """A mistake that the user can fix. The message is one line: `FOUND; needed: NEEDED`."""


def require(ok: bool, found: str, needed: str) -> None:
    """Raises UserError with the text `FOUND; needed: NEEDED` unless `ok`."""
    if not ok:
        raise UserError(f"{found}; needed: {needed}")


@contextlib.contextmanager
def explained(found: str, needed: str, kind: Any = Exception) -> Iterator[None]:
    """Context manager that turns an error of the class `kind` into a UserError with the text `FOUND (the
    error); needed: NEEDED`. The default is every Exception, because json, pyarrow and tokenizers
    raise errors of many classes."""
    try:
        yield
    except kind as e:
        reason = shorten(f"{type(e).__name__}: {e}", 200)
        raise UserError(f"{found} ({reason}); needed: {needed}") from None


@contextlib.contextmanager
def user_errors(prog: str) -> Iterator[None]:
    """Context manager for a command's main function. Prints a UserError as one line and ends the process with
    status 1. If all ranks of a machine raise the error, only one process prints the line."""
    for number, name in {1: "stdout", 2: "stderr"}.items():
        if getattr(sys, name) is None:  # closed: the next file to be opened might get its number
            os.set_inheritable(os.dup2(os.open(os.devnull, os.O_RDWR), number), True)
            setattr(sys, name, open(number, "w"))
    for stream in (sys.stdout, sys.stderr):
        # A terminal may not be able to encode a response.
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        yield
    except UserError as e:
        line = printable(f"{prog}: {e}").replace("\n", r"\n")  # a path may have a line break
        tell_torchrun(line)
        # RANK: set in every rank. LOCAL_RANK: the rank's number on its machine.
        # With TORZ_LAUNCHED, the parent process, which started the ranks, prints the line.
        other_rank = "RANK" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0"
        silent = other_rank or "TORZ_LAUNCHED" in os.environ
        sys.exit(1 if silent else line)
    except KeyboardInterrupt:  # a traceback would hide the last messages
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def tell_torchrun(text: str) -> None:
    """Write `text`, the reason why this process ends, to torchrun's error file. torchrun prints the text of
    the first process that fails."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        more = {"timestamp": int(time.time())}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))


def show(text: str) -> None:
    """Print a text, with escapes instead of control characters (see `printable`)."""
    print(printable(text))


def printable(text: str) -> str:
    r"""Returns the text with escapes such as \x1b instead of characters that control a terminal."""
    controls = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
    return re.sub(controls, lambda match: ascii(match[0])[1:-1], text)


def shorten(text: str, most: int = 66) -> str:
    """Returns the text in one line. A line of more than `most` characters gets … in place of its middle."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most // 2 - 1]} … {text[2 - most // 2 :]}"


# --- numbers, hashes and differences as text


def differences(old: Mapping, new: Mapping) -> list[str]:
    """Returns a list with the text `key: old -> new` for each key that has different values in both dicts.
    They are compared in their JSON form (tuples become lists), because `old` may come from a JSON file."""
    old = json.loads(json.dumps(old))
    new = json.loads(json.dumps(new))
    return [f"{k}: {old[k]} -> {v}" for k, v in new.items() if k in old and old[k] != v]


def short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


GIB = 2**30


def gib(n: float) -> str:
    return f"{n / GIB:.1f} GiB" if n >= GIB / 2 else f"{n / 2**20:.1f} MiB"
