"""The lock of a run's folder: two runs never write to one folder, on one host or on several."""

import atexit
import json
import os
import secrets
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

HEARTBEAT = 20.0  # seconds after which a run renews the time of its lock
DEAD = 120.0  # seconds without a heartbeat, after which its folder may be taken over


class FolderLock:
    """A run's claim on its folder: a file that names host and process, with a heartbeat. The lock of a
    process that is gone on this host, or of one elsewhere whose heartbeat stopped, is taken over."""

    def __init__(self, file: Path) -> None:
        self.file, self.ended = file, threading.Event()
        self.made: list[Path] = []  # folders that were made for this run, innermost first
        self.mine = {"host": os.uname().nodename, "system": _system(), "pid": os.getpid(),
                     "start": _start_of(os.getpid()), "id": secrets.token_hex(8)}

    def claim(self) -> str:
        """Take the lock. Returns an error message or "". May wait DEAD seconds for another host's heartbeat.
        Raises OSError."""
        while True:
            try:
                with self.file.open("x") as file:
                    json.dump(self.mine, file)
                break
            except FileExistsError:
                owner = self._owner()
                if self._is_alive(owner):
                    return (f"{self.file.parent} is in use by process {owner.get('pid')} on "
                            f"{owner.get('host')}; needed: the end of that run, or another --out")
                if self._owner() == owner:
                    self.file.unlink(missing_ok=True)
        threading.Thread(target=self._beat, daemon=True, name="lock").start()
        atexit.register(self.release)
        return ""

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the folder free, if it is still this run's. A run that was refused leaves no empty folders."""
        self.ended.set()
        with suppress(OSError):  # on a disk that failed it stays, and counts for nothing
            if self._owner() == self.mine:
                self.file.unlink(missing_ok=True)
                for folder in self.made:
                    folder.rmdir()  # OSError where it is not empty

    def _owner(self):
        try:
            return json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}

    def _is_alive(self, owner):
        host, system, pid = (owner.get(key) for key in ("host", "system", "pid"))
        if system == self.mine["system"]:
            return pid != os.getpid() and owner["start"] == _start_of(pid)
        before, began = self._beaten(), time.monotonic()
        patience = DEAD - max(0.0, _now_at(self.file.parent) - before)  # its clock may be ahead
        if patience > 0:
            print(f"{self.file} is of process {pid} on {host}; waiting for its heartbeat", flush=True)
        while self._beaten() == before and time.monotonic() - began < patience:
            time.sleep(2)
        return self._beaten() not in (before, 0.0)

    def _beaten(self):
        """When the owner last renewed the file; 0 where there is none."""
        try:
            return self.file.stat().st_mtime
        except OSError:
            return 0.0

    def _beat(self):
        """Renew the lock's time, until another run has the folder: then this one must not write any more."""
        while not self.ended.wait(HEARTBEAT):
            owner = self._owner()
            if owner == self.mine:
                with suppress(OSError):
                    os.utime(self.file)
            elif owner and owner["pid"] == os.getpid():  # a later run of this notebook
                return
            elif owner:
                print(f"{self.file.parent} was taken over by process {owner['pid']} on {owner['host']}: "
                      "leaving without a save", file=sys.__stderr__, flush=True)
                os._exit(1)


def _system():
    """What tells whether two processes see the same process numbers. Hosts may share a name; containers may
    share a kernel."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return os.uname().nodename


def _start_of(pid):
    """When a process of this host started, or "" where there is none: numbers of processes are used again."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _now_at(folder):
    """The time by the clock of the folder's file system, which may be another host's."""
    probe = folder / f".clock-{secrets.token_hex(4)}"
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now
