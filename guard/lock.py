"""The lock of a run's folder. It keeps other runs, on any host, from writing to the folder."""

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

HEARTBEAT = 20.0  # seconds between heartbeats; each renews the lock file's modification time
DEAD = 120.0  # seconds without a heartbeat; then a run on another host may take over the lock


class FolderLock:
    """A lock file in a run's folder. The file names the lock's owner: host and process.

    Another run takes over the lock if the owner's process has ended. An owner on another host counts as ended
    after DEAD seconds without a heartbeat.

    flock is not used, because on NFS the flock of a crashed host may never be released."""

    def __init__(self, file: Path) -> None:
        self.file, self.ended = file, threading.Event()
        self.mine = {"host": os.uname().nodename, "system": _system(), "pid": os.getpid(),
                     "start": _start_of(os.getpid())}

    def claim(self) -> None:
        """Makes the folder and takes its lock. If the lock's owner is on another host, waits up to DEAD
        seconds for a heartbeat. Raises UserError if another run uses the folder, and OSError if the folder
        can't be written to."""
        folder = self.file.parent
        folder.mkdir(parents=True, exist_ok=True)
        while not self._create():
            text, owner = self.file.read_bytes() if self.file.is_file() else b"", self.owner()
            require(b'{"host":'.startswith(text[:8]) and not self.file.is_dir(),
                    f"{self.file} is no lock of torz", "another place for it, or another --out")
            require(not self._is_alive(owner), f"{folder} is in use by process {owner.get('pid')} on "
                    f"{owner.get('host')}", "the end of that run, or another --out")
            if self.owner() == owner:  # no other run has taken over the lock meanwhile
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
        # If the disk fails, the lock file stays. Its heartbeat has ended, so a later run takes over the lock.
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
        """Returns whether the lock's owner is alive. If the owner is on another host, waits up to DEAD
        seconds for a heartbeat."""
        if owner.get("system") == self.mine["system"]:
            # A lock with our own pid is left from an earlier run: this run has no lock yet.
            return owner["pid"] != os.getpid() and owner["start"] == _start_of(owner["pid"])
        before, began = self._beaten(), time.monotonic()
        # The clocks of two hosts may differ, so the lock's age is measured by the file server's clock. utime
        # sets the folder's modification time by this clock.
        os.utime(self.file.parent)
        patience = DEAD - max(0.0, self.file.parent.stat().st_mtime - before)
        if patience > 0:
            print(f"the lock {self.file} belongs to a run on another host; waiting up to "
                  f"{patience:.0f} s to see whether that run is alive", flush=True)
        while self._beaten() == before and time.monotonic() - began < patience:
            time.sleep(2)
        return self._beaten() not in (before, 0.0)  # a new time; 0 means that the lock file is gone

    def _beaten(self):
        """Returns the lock file's modification time in seconds; 0 if there is no lock file."""
        try:
            return self.file.stat().st_mtime
        except OSError:
            return 0.0

    def _beat(self):
        """Renew the lock file until `release`. If another run has taken over the lock, end this process."""
        while not self.ended.wait(HEARTBEAT):
            owner = self.owner()
            if owner == self.mine:
                with contextlib.suppress(OSError):
                    os.utime(self.file)
            elif owner:
                print(f"{self.file.parent} was taken over by process {owner['pid']} on "
                      f"{owner['host']}: this process ends without saving", file=sys.__stderr__, flush=True)
                os._exit(1)


def _system():
    """Returns an id of this boot and this pid namespace. Process ids may be compared only if these ids are
    equal."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return os.uname().nodename


def _start_of(pid):
    """Returns the start time of process `pid`, or "" if there is no such process. A later process with the
    same pid has another start time."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
