"""What the device could do, floating-point operations and bytes a second, measured in the run that quotes them; and what a
piece of work takes of its memory."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import torch


def best_seconds(f, device: torch.device, rounds: int = 8) -> float:
    """The least that f() takes in several rounds, until the device is done."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        f()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second read and written by copying a large tensor."""
    x = torch.zeros(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * len(x) / best_seconds(lambda: y.copy_(x), device)


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second in a product of large matrices of random numbers."""
    n = 8192 if device.type == "cuda" else 1536
    x, y = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / best_seconds(lambda: x @ y, device)


def peak_memory(f, device: torch.device) -> int:
    """Bytes that f() takes at its fullest, above what lies there before: of the device, or of this process on Linux."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        f()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - rest
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark is now what is resident
    rest = _resident("VmRSS")
    f()
    return _resident("VmHWM") - rest


def _resident(name: str) -> int:
    return next(int(x.split()[1]) * 1024 for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))


def device_name(device: torch.device) -> str:
    """As it stands in results."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
