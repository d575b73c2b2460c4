#!/usr/bin/env python3
"""Replaces the Python interpreter in bench/gpu_proof.sh, to test that script without a GPU.

    RESULTS=FOLDER PYTHON=bench/nullgpu/proof.py PYTHONPATH=NULLGPU sh NULLGPU/run.sh sh bench/gpu_proof.sh

gpu_proof.sh calls this file wherever it would call `python`. This file runs the same command on a stub CUDA
driver, with the smaller values in SMALL. The measured numbers mean nothing, and part "resume" fails, because
the stub computes no weights. NULLGPU is the folder of the stub driver (see bench/nullgpu/trainer.py).
"""

import os
import runpy
import sys

SMALL = {"--prompts": "8", "--tokens": "32", "--max_response_len": "32"}  # flag -> its value here
assert "RESULTS" in os.environ, "these figures are no results; needed: RESULTS=FOLDER"
words = [SMALL.get(before, word) for before, word in zip(sys.argv, sys.argv[1:], strict=False)]
print("$ python", *words, file=sys.stderr, flush=True)
name = words[1] if words[0] == "-m" else words[0]
sys.path.insert(0, os.getcwd())
if name in ("-c", "tools.tiny", "bench.shape", "bench.verdict"):  # these need no patches
    os.execv(sys.executable, [sys.executable, *words])
if name == "train.py":
    import configs

    configs.set_allocator()  # as train.py does before it imports torch

from bench.nullgpu.run import nullgpu, sampled_counts, stand_ins
from guard import selfcheck
from log import Meter
from tools.plan import KNOWN

stand_ins()
if name == "bench/trl_side.py":
    sampled_counts()
KNOWN["0.5b"].layers = 2
new, check = Meter.__init__, selfcheck.selfcheck
# Every value read from the stub device is 0. The patches below supply the values that the program needs.
Meter.__init__ = lambda meter, device: new(meter)  # keeps the sums on the CPU
selfcheck.selfcheck = lambda engine, weights, logp, prompts: ("", check(
    engine, weights, lambda xs, t: logp(xs, t).new_zeros(sum(len(x.ids) for x in xs)), prompts)[1])

sys.argv = words[words[0] == "-m":]
if words[0] == "-m":
    runpy.run_module(name, run_name="__main__", alter_sys=True)
else:
    runpy.run_path(name, run_name="__main__")
nullgpu.quit()
