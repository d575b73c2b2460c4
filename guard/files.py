"""Reads and writes files. A file that can't be read is never taken for a missing one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from guard.messages import UserError, explained, require, shorten

PATIENCE = 5.0  # seconds for which a file that can't be read is tried again

T = TypeVar("T")


def if_there(work: Callable[[Path], T], path: Path) -> T | None:
    """Returns work(path), or None if no file or folder has this path. Raises UserError if the path can't be
    read for another reason, such as missing permission, a file server that fails, or a link to a disk that is
    not mounted. Before that, tries again for PATIENCE seconds. Path.glob and Path.is_file are not used,
    because they take such a path for a missing one."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return work(path)
        # NotADirectoryError: a part of the path is a file. ValueError: the path has a NUL.
        except (FileNotFoundError, NotADirectoryError, ValueError):
            links = filter(os.path.islink, (path, *path.parents))
            if all(map(os.path.exists, links)):  # False if a link's target is missing
                return None
            error = "a link without its target"
        except OSError as e:
            error = e.strerror
        require(
            time.monotonic() < end,
            f"{path} can't be read ({error})",
            "permission to read it, and a disk that works",
        )
        time.sleep(0.1)


def exists(path: Path) -> bool:
    """Returns whether a file or folder has this path. Raises UserError as `if_there` does."""
    return if_there(os.stat, path) is not None


def is_file(path: Path) -> bool:
    """Returns whether a file has this path. Raises UserError as `if_there` does."""
    return exists(path) and path.is_file()


def names_in(folder: Path) -> list[str]:
    """Returns the sorted names of the files in a folder; [] if there is no such folder. Raises UserError as
    `if_there` does."""
    return sorted(if_there(os.listdir, folder) or [])


def replace_text(path: Path, text: str) -> None:
    """Replaces the text of a file atomically. Raises OSError if the file can't be written."""
    temp = path.with_name(f".{path.name}.part")
    temp.write_text(text)
    temp.replace(path)


def lock_file(file: int, kind: int) -> bool:
    """Locks an open file or folder until it is closed. Returns False if another open file has a lock that
    excludes this one, else True. On a file system without locks, returns True and locks nothing.

    file: its descriptor
    kind: fcntl.LOCK_EX waits; fcntl.LOCK_EX | fcntl.LOCK_NB does not"""
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        pass
    return True


def follow_umask(file: Path) -> None:
    """Gives a file the permissions of its folder. safetensors makes files that only their owner can read."""
    with contextlib.suppress(OSError):  # all files of a mounted disk may belong to another user
        file.chmod(file.parent.stat().st_mode & 0o666)


# --- JSON rows


def checked(value: Any, shape: Mapping[str, Any], where: str) -> Any:
    """Returns a JSON value. Raises UserError if it is no dict, or if a value in it has a wrong type.

    shape: key -> type. A key may be missing if its type allows None
    where: the place of the JSON text, for the message"""
    if not isinstance(value, dict):
        raise UserError(f"{where}: {shorten(repr(value))}; needed: dict")
    for key, kind in shape.items():
        found = value.get(key)
        if not isinstance(found, kind):
            needed = getattr(kind, "__name__", kind)
            raise UserError(f"{where}: {key} is {shorten(repr(found))}; needed: {needed}")
    return value


ANY: dict[str, Any] = {}  # the shape of every dict


def read_json(file: Path, shape: Mapping[str, Any] = ANY) -> Any:
    """Returns the content of a JSON file; {} if there is no file. Raises UserError if the file can't be read,
    or if its content has another shape (see `checked`)."""
    data = if_there(Path.read_bytes, file)
    if data is None:
        return {}
    with explained(f"{file} is damaged", "an intact copy of it"):
        value = json.loads(data)
    return checked(value, shape, f"{file}")


def read_jsonl(path: Path, shape: Mapping[str, Any] = ANY) -> list[Any]:
    """Returns the rows of a .jsonl file, or [] if there is no file. Skips lines that a crash cut short.
    Raises UserError as `read_json` does."""
    data = if_there(Path.read_bytes, path) or b""
    rows = []
    # A row ends only at a line feed. str.splitlines() would also split at U+2028 inside a row.
    for number, line in enumerate(data.decode(errors="replace").split("\n"), 1):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            rows.append(checked(row, shape, f"{path}, line {number}"))
    return rows


def write_jsonl(path: Path, rows: Iterable[Mapping]) -> None:
    """Writes the rows as lines of JSON. Raises OSError if the file can't be written."""
    # UTF-8 can't encode a lone surrogate.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False), file=file)
