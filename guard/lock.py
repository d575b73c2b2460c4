"""The lock of a run's folder: two runs never write to one folder, on one host or on several."""

import atexit
import contextlib
import json
import os
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any

from configs import require

HEARTBEAT = 20.0  # seconds between two renewals of the lock file's modification time
DEAD = 120.0  # seconds without a renewal after which another run may take the folder


class FolderLock(contextlib.AbstractContextManager):
    """A run's claim on its folder: a file with the host and process of the run. A thread renews the file's
    modification time every HEARTBEAT seconds.

    Another run takes over the lock in two cases: the owner was on the same host and is dead, or the owner is
    on another host and its heartbeat has stopped. A kernel lock (flock) would not do: on NFS the kernel lock
    of a dead host stays."""

    def __init__(self, file: Path) -> None:
        self.file, self.ended = file, threading.Event()
        self.made: list[Path] = []  # folders that `claim` made, innermost first
        self.mine = {"host": os.uname().nodename, "system": _system(), "pid": os.getpid(),
                     "start": _start_of(os.getpid()), "id": secrets.token_hex(8)}

    def claim(self) -> None:
        """Make the folder and take its lock. May wait DEAD seconds to see whether an owner on another host is
        alive. Raises UserError where another run has the folder, and OSError if the disk fails."""
        folder = self.file.parent
        self.made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        while not self._create():
            owner = self.owner()
            require(not self._is_alive(owner), f"{folder} is in use by process {owner.get('pid')} on "
                    f"{owner.get('host')}", "the end of that run, or another --out")
            if self.owner() == owner:
                self.file.unlink(missing_ok=True)
        threading.Thread(target=self._beat, daemon=True, name="lock").start()
        atexit.register(self.release)

    def _create(self):
        try:
            with self.file.open("x") as file:
                json.dump(self.mine, file)
            return True
        except FileExistsError:
            return False

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the lock if this run still owns it. Then remove the folders that `claim` made, if they are
        empty."""
        self.ended.set()
        with contextlib.suppress(OSError):  # a lock on a disk that failed stays, without a heartbeat
            if self.owner() == self.mine:
                self.file.unlink(missing_ok=True)
                for folder in self.made:
                    folder.rmdir()  # OSError where it is not empty

    def owner(self) -> dict[str, Any]:
        """Returns the content of the lock file; {} where no lock can be read."""
        try:
            return json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}

    def _is_alive(self, owner):
        """Returns whether the owner of the lock is alive. On the same host its process must exist. On another
        host it must renew the lock file while this function waits, at most DEAD seconds."""
        if owner.get("system") == self.mine["system"]:
            return owner["pid"] != os.getpid() and owner["start"] == _start_of(owner["pid"])
        before, began = self._beaten(), time.monotonic()
        os.utime(self.file.parent)  # sets the folder's time to now, by the clock of the file server
        patience = DEAD - max(0.0, self.file.parent.stat().st_mtime - before)
        if patience > 0:
            print(f"{self.file} is of another host; waiting for its heartbeat", flush=True)
        while self._beaten() == before and time.monotonic() - began < patience:
            time.sleep(2)
        return self._beaten() not in (before, 0.0)

    def _beaten(self):
        """Returns the modification time of the lock file in seconds; 0 if there is no file."""
        try:
            return self.file.stat().st_mtime
        except OSError:
            return 0.0

    def _beat(self):
        """Renew the lock's time. If another run has taken the folder over, end this process, so that it does
        not write to the folder any more."""
        while not self.ended.wait(HEARTBEAT):
            owner = self.owner()
            if owner == self.mine:
                with contextlib.suppress(OSError):
                    os.utime(self.file)
            elif owner and owner["pid"] == os.getpid():  # a later run of this notebook
                return
            elif owner:
                print(f"{self.file.parent} was taken over by process {owner['pid']} on {owner['host']}: "
                      "leaving without a save", file=sys.__stderr__, flush=True)
                os._exit(1)


def _system():
    """Returns an id of the kernel and process namespace. Two processes with equal ids can check each other's
    process numbers. A host name would not do: hosts may share a name, and containers share a kernel."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return os.uname().nodename


def _start_of(pid):
    """Returns the start time of a process of this host as text; "" if there is no such process. A later
    process with the same number has another start time."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
