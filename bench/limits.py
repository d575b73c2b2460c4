"""What the device could do: floating-point operations and bytes a second, measured in the run that quotes them."""

from __future__ import annotations

import time

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


def device_name(device: torch.device) -> str:
    """As it stands in results."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
