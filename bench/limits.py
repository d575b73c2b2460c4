"""Measures how fast a device multiplies matrices and copies memory, and how much memory a call takes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import torch


def best_seconds(f: Callable[[], object], device: torch.device, rounds: int = 8) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        f()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def copy_bandwidth(device: torch.device) -> float:
    """Returns bytes read plus bytes written, per second, when a large tensor is copied."""
    size = 2**30 if device.type == "cuda" else 2**27
    x = torch.zeros(size, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * size / best_seconds(lambda: y.copy_(x), device)


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    n = 8192 if device.type == "cuda" else 1536
    x, y = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / best_seconds(lambda: x @ y, device)


def peak_memory(f: Callable[[], object], device: torch.device) -> int:
    """Returns the peak memory during f() minus the memory before, in bytes. On a GPU, counts the memory of
    torch's tensors; on a CPU, the memory of this process (Linux only)."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Give freed memory back to the system. If f() used this memory again, the peak would not rise.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # 5 resets the peak, VmHWM
    before = _status("VmRSS")
    f()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu, {torch.get_num_threads()} threads"
