#!/usr/bin/env python3
"""Replaces the Python interpreter in bench/gpu_proof.sh, to test that script without a GPU.

    RESULTS=FOLDER PYTHON=bench/nullgpu/proof.py PYTHONPATH=NULLGPU sh NULLGPU/run.sh sh bench/gpu_proof.sh

gpu_proof.sh calls this file wherever it would call `python`. This file runs the same command on a stub CUDA
driver, with the smaller values in SMALL. The measured numbers mean nothing. NULLGPU is the folder of the stub
driver (see bench/nullgpu/trainer.py).
"""

import os
import runpy
import sys

SMALL = {"--prompts": "8", "--tokens": "32", "--max_response_len": "32"}  # flag -> its value here
assert "RESULTS" in os.environ, "these figures are no results; needed: RESULTS=FOLDER"
words = [SMALL.get(before, word) for before, word in zip(sys.argv, sys.argv[1:], strict=False)]
print("$ python", *words, file=sys.stderr, flush=True)
if words[1].startswith("bench."):
    # Benches use torch's default allocator options. Without this line, bench/nullgpu/trainer.py would set
    # those of train.py.
    os.environ["PYTORCH_ALLOC_CONF"] = ""
    words = ["-u", words[1].replace(".", "/") + ".py", *words[2:]]
# Only benches and the ranks of torchrun get the patches below. Their command lines begin with "-u": torchrun
# starts a rank as `PYTHON_EXEC -u train.py …`, and PYTHON_EXEC is this file. All others run without patches.
if words[0] != "-u":
    os.execve(sys.executable, [sys.executable, *words], os.environ | {"PYTHON_EXEC": __file__})
sys.path.insert(0, os.getcwd())

import numpy as np
from torch import Tensor, arange, tensor

from bench.nullgpu.run import nullgpu, stand_ins
from engines.torch_engine import TorchEngine
from guard import selfcheck
from log import Meter
from tools.plan import KNOWN

stand_ins()
KNOWN["0.5b"].layers = 2
new, check, decode, sizes = Meter.__init__, selfcheck.selfcheck, TorchEngine._wave, {}
most, repeat = Tensor.max, Tensor.repeat_interleave
# Every value read from the stub device is 0. The patches below supply the values that the program needs.
Meter.__init__ = lambda meter, device: new(meter)  # keeps the sums on the CPU
selfcheck.selfcheck = lambda engine, weights, logp, prompts: ("", check(
    engine, weights, lambda xs, t: logp(xs, t).new_zeros(sum(len(x.ids) for x in xs)), prompts)[1])


# On the stub, TorchEngine._wave yields nothing. `wave` runs it, then yields responses of full length.
def wave(engine, keys, requests, limits, *rest):
    sizes.update(len=len(requests[keys[0]]), limit=[max(limits.values())])
    yield from decode(engine, keys, requests, limits, *rest)
    for k in keys:
        yield engine.sample(k, requests[k], *np.zeros((2, limits[k]), np.int32), False)


TorchEngine._wave = wave
# TorchEngine._wave calls max() first for the largest limit, and later only for the longest prompt's length.
Tensor.max = lambda x, *args: (
    tensor((sizes["limit"] or [sizes["len"]]).pop()) if x.is_cuda and sizes and not args else most(x, *args))
Tensor.repeat_interleave = lambda x, n, *args: (
    repeat(x, n, output_size=len(n) * sizes["len"]) if isinstance(n, Tensor) else repeat(x, n, *args))
Tensor.unique = lambda x, **kwargs: (arange(len(x), device=x.device),) * 2  # as if no two values were equal
sys.argv = words[1:]
runpy.run_path(words[1], run_name="__main__")
nullgpu.quit()
