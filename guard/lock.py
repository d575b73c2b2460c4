"""The lock of a run's folder. It keeps other runs, on any host, from writing to the folder."""

import fcntl
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from configs import flock, from_json, if_there, require, show

PATIENCE = (
    120.0  # seconds to wait for a lock of another host; NFS keeps a lost host's lock for about 90 s
)
OWNER = {"host": str, "pid": int, "id": str}  # content of the lock file


class FolderLock:
    """An flock of the file `lock` in a run's folder. The file stays, and names the last owner.

    The operating system releases the flock when its process ends. If the process was on another host, and
    this host is lost, the file server releases the flock."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.handle = None
        self.mine = {"host": os.uname().nodename, "pid": os.getpid(), "id": secrets.token_hex(8)}

    def claim(self) -> None:
        """Makes the folder and takes its lock. Waits up to PATIENCE seconds for a run on another host.
        Raises UserError if another run uses the folder, and OSError if the folder can't be written to."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.owner()  # refuses a user's file of this name
        self.handle = self.file.open("a")
        end = time.monotonic() + PATIENCE
        while not flock(self.handle.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
            owner = {"host": "this host", "pid": "?"} | self.owner()
            by = f"process {owner['pid']} on {owner['host']}"
            elsewhere = owner["host"] not in ("this host", self.mine["host"])
            require(
                elsewhere and time.monotonic() < end,
                f"{self.file.parent} is in use by {by}",
                "the end of that run, or another --out",
            )
            show(f"{self.file.parent} is in use by {by}; waiting for its end")
            time.sleep(10)
        self.handle.truncate(0)
        json.dump(self.mine, self.handle)
        self.handle.flush()

    def refuse_living(self) -> None:
        """Raises UserError if another run uses the folder."""
        if self.owner():
            self.claim()
            self.release()

    def release(self) -> None:
        if self.handle:
            self.handle.close()

    def owner(self) -> dict[str, Any]:
        """Returns the content of the lock file; {} if there is no lock file, or if it is empty. Raises
        UserError if the file can't be read, or if no run of torz wrote it."""
        text = if_there(Path.read_bytes, self.file)
        return from_json(text, OWNER, self.file) if text else {}
