"""The lock of a run's folder. While a run uses the folder, no other run on any host can write to it."""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from configs import require

HEARTBEAT = 20.0  # the lock's owner renews the modification time of the lock file every 20 seconds
DEAD = 120.0  # after this number of seconds without a renewal, another run may take over the folder


class FolderLock:
    """A lock file in a run's folder. The file names its owner: the host and the process of a run. The owner
    has a heartbeat: a thread that renews the file's modification time every HEARTBEAT seconds.

    Another run takes over the lock if the owner ran on the same host and is dead, or if the owner ran on
    another host and its heartbeat has stopped. flock is no alternative: on NFS, the flock of a crashed host
    may never be released."""

    def __init__(self, file: Path) -> None:
        self.file, self.ended = file, threading.Event()
        self.mine = {"host": os.uname().nodename, "system": _system(), "pid": os.getpid(),
                     "start": _start_of(os.getpid())}

    def claim(self) -> None:
        """Make the folder and take its lock. If a run on another host owns the lock, waits up to DEAD seconds
        for a heartbeat. Raises UserError if another run uses the folder, and OSError if the disk fails."""
        folder = self.file.parent
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

    def release(self) -> None:
        """Stop the heartbeat. If this run still owns the lock, remove the lock."""
        self.ended.set()
        # After an error of the disk the lock file stays. Another run can take over the lock, because the
        # heartbeat has stopped.
        with contextlib.suppress(OSError):
            if self.owner() == self.mine:
                self.file.unlink(missing_ok=True)

    def owner(self) -> dict[str, Any]:
        """Returns the content of the lock file; {} if the file can't be read."""
        try:
            return json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}

    def _is_alive(self, owner):
        """Returns whether the owner of the lock is alive. For an owner on another host, waits up to DEAD
        seconds for a heartbeat."""
        if owner.get("system") == self.mine["system"]:
            return owner["pid"] != os.getpid() and owner["start"] == _start_of(owner["pid"])
        before, began = self._beaten(), time.monotonic()
        # The clocks of two hosts may differ. So the age of the last heartbeat is measured with the clock of
        # the file server: utime sets the folder's modification time to the server's time.
        os.utime(self.file.parent)
        patience = DEAD - max(0.0, self.file.parent.stat().st_mtime - before)
        if patience > 0:
            print(f"the lock {self.file} belongs to a run on another host; waiting up to {patience:.0f} s to "
                  "see whether that run is alive", flush=True)
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
        """Renew the modification time of the lock file until `release`. If another run has taken over the
        lock, end this process, so that it no longer writes to the folder."""
        while not self.ended.wait(HEARTBEAT):
            owner = self.owner()
            if owner == self.mine:
                with contextlib.suppress(OSError):
                    os.utime(self.file)
            elif owner:
                print(f"{self.file.parent} was taken over by process {owner['pid']} on {owner['host']}: "
                      "this process ends without saving", file=sys.__stderr__, flush=True)
                os._exit(1)


def _system():
    """Returns a text that identifies the booted kernel and the process namespace. A pid is unique only within
    this system: two hosts may have the same name, and each container has its own pids."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return os.uname().nodename


def _start_of(pid):
    """Returns the start time of process `pid` as text; "" if there is no such process. Two processes that had
    the same pid have different start times."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
