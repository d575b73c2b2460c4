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

from configs import UserError, from_json, if_there, require

HEARTBEAT = 20.0  # seconds between heartbeats; each renews the lock file's modification time
DEAD = 120.0  # seconds without a heartbeat; then a run on another host may take over the lock
OWNER = {
    "host": str,
    "pid": int,
    "start": str,
}  # content of the lock file; of new ones, also "system"


class FolderLock:
    """A lock file in a run's folder. The file names the lock's owner: host and process.

    Another run takes over the lock if the owner's process has ended. An owner on another host counts as ended
    after DEAD seconds without a heartbeat.

    flock is not used, because on NFS the flock of a crashed host may never be released."""

    def __init__(self, file: Path) -> None:
        self.file, self.ended = file, threading.Event()
        self.mine = {
            "host": os.uname().nodename,
            "system": _system(),
            "pid": os.getpid(),
            "start": _start_of(os.getpid()),
        }

    def claim(self) -> None:
        """Makes the folder and takes its lock. If the lock's owner may be on another host, waits up to DEAD
        seconds for a heartbeat. Raises UserError if another run uses the folder, and OSError if the folder
        can't be written to."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        while not self._create():
            self.refuse_living()
            owner = self.owner()
            elsewhere = owner.get("system") != self.mine["system"]
            require(
                not elsewhere or not self._beats(owner),
                self._in_use(owner),
                "the end of that run, or another --out",
            )
            if self.owner() == owner:  # no other run has taken over the lock meanwhile
                self.file.unlink(missing_ok=True)
        threading.Thread(target=self._beat, daemon=True, name="lock").start()
        atexit.register(self.release)

    def refuse_living(self) -> None:
        """Raises UserError if the lock's owner is a living process of this host."""
        owner = self.owner()
        # A lock with our own pid is left from an earlier run: this run has no lock yet.
        alive = (
            owner.get("system") == self.mine["system"]
            and owner["pid"] != os.getpid()
            and owner["start"] == _start_of(owner["pid"])
        )
        require(not alive, self._in_use(owner), "the end of that run, or another --out")

    def _in_use(self, owner):
        by = f"process {owner['pid']} on {owner['host']}" if owner else "another run"
        return f"{self.file.parent} is in use by {by}"

    def _create(self):
        try:
            file = self.file.open("x")
        except FileExistsError:
            return False
        try:
            with file:
                json.dump(self.mine, file)
        except OSError:  # the disk is full: leave no empty lock
            self.file.unlink()
            raise
        return True

    def release(self) -> None:
        """Stop the heartbeat. If this run still owns the lock, remove the lock."""
        self.ended.set()
        # If the disk fails, the lock file stays. Its heartbeat has ended, so a later run takes over the lock.
        with contextlib.suppress(OSError, UserError):
            if self.owner() == self.mine:
                self.file.unlink(missing_ok=True)

    def owner(self) -> dict[str, Any]:
        """Returns the content of the lock file; {} if there is no lock file, or if a crash has cut it. Raises
        UserError if the file can't be read, or if no run of torz wrote it."""
        text = if_there(Path.read_bytes, self.file) or b""
        begin = b'{"host":'
        require(
            begin.startswith(text[: len(begin)]),
            f"{self.file} is no lock of torz",
            "another place for it, or another --out",
        )
        return from_json(text, OWNER, self.file) if text.strip().endswith(b"}") else {}

    def check(self) -> None:
        """Ends this process if another run has taken over the lock, for example while this process was
        stopped. Call it before each write to the folder."""
        owner = {}
        with contextlib.suppress(UserError):  # unreadable: the next call looks again
            owner = self.owner()
        if owner not in ({}, self.mine):
            print(
                f"{self.file.parent} was taken over by process {owner['pid']} on "
                f"{owner['host']}: this process ends without saving",
                file=sys.__stderr__,
                flush=True,
            )
            os._exit(1)

    def _beats(self, owner):
        """Returns whether the lock's owner is alive. Waits up to DEAD seconds for its heartbeat."""
        before, began = self._beaten(), time.monotonic()
        # The clocks of two hosts may differ, so the lock's age is measured by the file server's clock. utime
        # sets the folder's modification time by this clock.
        os.utime(self.file.parent)
        patience = DEAD - max(0.0, self.file.parent.stat().st_mtime - before)
        if patience > 0:
            what = (
                "belongs to a run on another host"
                if owner
                else "is empty or cut, as a crash leaves it"
            )
            print(
                f"the lock {self.file} {what}; waiting up to {patience:.0f} s to see whether its run is "
                "alive",
                flush=True,
            )
        while (
            self._beaten() == before
            and self.owner() == owner
            and time.monotonic() - began < patience
        ):
            time.sleep(2)
        # A new time is a heartbeat. 0 means that the lock file is gone.
        return self.owner() == owner and self._beaten() not in (before, 0.0)

    def _beaten(self):
        """Returns the lock file's modification time in seconds; 0 if there is no lock file."""
        try:
            return self.file.stat().st_mtime
        except OSError:
            return 0.0

    def _beat(self):
        """Renew the lock file until `release`."""
        while not self.ended.wait(HEARTBEAT):
            self.check()
            with contextlib.suppress(OSError):
                os.utime(self.file)


def _system():
    """Returns an id of this boot and this pid namespace. Process ids may be compared only if these ids are
    equal."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            "/proc/self/ns/pid"
        )
    return os.uname().nodename


def _start_of(pid):
    """Returns the start time of process `pid`, or "" if there is no such process. A later process with the
    same pid has another start time."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
