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

from bench.nullgpu.run import nullgpu, stand_ins
from guard import selfcheck
from log import Meter
from tools.plan import KNOWN

stand_ins()
KNOWN["0.5b"].layers = 2
new, check = Meter.__init__, selfcheck.selfcheck
# Every value read from the stub device is 0. The patches below supply the values that the program needs.
Meter.__init__ = lambda meter, device: new(meter)  # keeps the sums on the CPU
selfcheck.selfcheck = lambda engine, weights, logp, prompts: ("", check(
    engine, weights, lambda xs, t: logp(xs, t).new_zeros(sum(len(x.ids) for x in xs)), prompts)[1])

sys.argv = words[1:]
runpy.run_path(words[1], run_name="__main__")
nullgpu.quit()
