"""The lock of a run's folder. It keeps other runs, on any host, from writing to the folder."""

import atexit
import fcntl
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from guard.files import if_there, lock_file, read_json
from guard.messages import explained, require, show

# Seconds to wait for a lock of another host. NFS keeps the lock of a lost host for about 90 s.
LOCK_PATIENCE = 120.0


class FolderLock:
    """An flock (a lock of the operating system) of the file `lock` in a run's folder. The file stays, and
    names the last owner.

    The operating system releases the flock when its process ends. If the process was on another host, and
    this host is lost, the file server releases the flock."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.handle = None
        self.mine = {"host": os.uname().nodename, "pid": os.getpid(), "id": secrets.token_hex(8)}

    def claim(self) -> None:
        """Makes the folder and takes its lock. Waits up to LOCK_PATIENCE seconds for a run on another host.
        Raises UserError if another run uses the folder, and OSError if the folder can't be written to."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.owner()  # refuses a user's file of this name
        # without a buffer, whose text `release` would try to write again after a full disk
        self.handle = self.file.open("ab", buffering=0)
        end = time.monotonic() + LOCK_PATIENCE
        while not lock_file(self.handle.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
            owner = self.owner()
            # Only the lock of another host can outlast its run, so only then this run waits.
            by = f"process {owner.get('pid')} on {owner.get('host')}"
            require(
                owner.get("host") != self.mine["host"] and time.monotonic() < end,
                f"{self.file.parent} is in use by {by}",
                "the end of that run, or another --out",
            )
            show(f"{self.file.parent} is in use by {by}; waiting for its end")
            time.sleep(10)
        self.handle.truncate(0)  # removes the last owner's name
        self.handle.write(json.dumps(self.mine).encode())
        # Otherwise NFS may show the new text to other hosts only when the file is closed.
        os.fsync(self.handle.fileno())
        atexit.register(self.release)  # keeps this object, and so the lock, until the process ends

    def refuse_living(self) -> None:
        """Raises UserError if another run uses the folder, or if its lock can't be written."""
        if self.owner():
            with explained(f"can't write {self.file}", "permission and space", OSError):
                self.claim()
                self.release()

    def release(self) -> None:
        if self.handle:
            self.handle.close()

    def owner(self) -> dict[str, Any]:
        """Returns the content of the lock file; {} if there is no lock file, or if it is empty. Raises
        UserError if the file can't be read, or if no run of torz wrote it."""
        text = if_there(Path.read_bytes, self.file)
        return read_json(self.file, {"host": str}) if text else {}
