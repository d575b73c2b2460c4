"""Fixtures and helpers that several test files share."""

import atexit
import contextlib
import dataclasses
import functools
import gc
import inspect
import json
import logging
import os
import runpy
import signal
import string
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from transformers import PretrainedConfig

from bench.rehearse import free_port
from tools import tiny as tiny_model

torch.set_num_threads(1)
# transformers formats each config that it reads, for a line of a log that nothing shows.
PretrainedConfig.__repr__ = object.__repr__


def taught(task: tiny_model.Task, folder: Path, count: int, batches: int, batch: int) -> str:
    """Pretrains a model with `batches` updates of `batch` texts. It then solves half of `count` problems.
    Returns the model's folder, in which train.jsonl and heldout.jsonl both have these problems."""
    few = task._replace(problems=lambda rng: 2 * task.problems(rng)[:count])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(HELD_OUT=count, BATCHES=batches, BATCH=batch, WARMUP=5).items():
            patch.setattr(tiny_model, name, value)
        return tiny_model.build_task(few, str(folder))


@pytest.fixture(scope="session")
def half_right(tmp_path_factory) -> str:
    """Returns the folder of a tiny model. On four additions, half of its answers are right."""
    return taught(tiny_model.SUMS, tmp_path_factory.mktemp("taught") / "base", count=4, batches=80, batch=8)


def make_model(path: Path, seed: int = 0, layers: int = 2, tied: bool = True) -> str:
    """Saves a Qwen2 model with random weights, and the tokenizer of tools/tiny.py."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tools.tiny import make_tokenizer

    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer), hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=128, num_hidden_layers=layers, max_position_embeddings=512,
        tie_word_embeddings=tied, initializer_range=0.1, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.1)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture(scope="session")
def untied(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "untied", tied=False)


def responses(engine, prompts, n, temperature, max_tokens, seed, version, top_p=1.0):
    """Yields `n` samples of each prompt. prompts: prompt_id -> token ids"""
    requests = {(i, j): ids for i, ids in prompts.items() for j in range(n)}
    return engine.generate(requests, dict.fromkeys(requests, max_tokens), temperature, seed, version, top_p)


def wait_until(true, seconds: float = 300.0, pause: float = 0.02) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:  # the end of a failing test, never of one that passes
        time.sleep(pause)
    return bool(true())


class Operations(TorchDispatchMode):
    """A context manager that counts PyTorch operations by their `kind(op)`, such as True and False."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.counts = functools.cache(kind), Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.counts[self.kind(op)] += 1
        return op(*args, **kwargs or {})


# --- ranks
# pytest's process forks the ranks. A process that has started vLLM or a process group must not fork.
# test_z_engines.py starts both, so its name makes pytest run it last.


def _rank(target, rank, world, port, file, args):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    gc.freeze()  # vLLM collects garbage at each sleep, which takes 0.3 s with all imported modules
    # Forked processes share tqdm's lock. A rank killed while holding it would block the others.
    tqdm.set_lock(threading.RLock())
    torch.save(target(*args), file)
    sys.stdout.flush()
    os._exit(0)  # only the parent process may run pytest's exit handlers


def start_ranks(world: int, target, *args):
    """Starts ranks that run target(*args). Returns the processes and a folder for the results."""
    import multiprocessing as mp
    import tempfile

    assert not torch.distributed.is_initialized()
    context = mp.get_context("fork")
    folder, port = tempfile.TemporaryDirectory(), free_port()
    processes = [context.Process(target=_rank, args=(target, r, world, port, f"{folder.name}/{r}", args))
                 for r in range(world)]
    for p in processes:
        p.start()
    return processes, folder


def run_ranks(world: int, target, *args):
    """Runs target(*args) on `world` ranks. Returns the results in rank order."""
    processes, folder = start_ranks(world, target, *args)
    with folder:
        for p in processes:
            p.join(600)
        for p in processes:
            p.kill()
            p.join()
        assert all(p.exitcode == 0 for p in processes), [p.exitcode for p in processes]
        return [torch.load(f"{folder.name}/{r}", weights_only=False) for r in range(world)]


def forked(*words, environment=None, **options) -> subprocess.Popen:
    """Runs `python WORDS…` in a fork, which needs no new imports, with pipes for stdout and stderr. The ranks
    that it launches are forks of it.

    environment: all its environment variables; None: those of this process
    options: of subprocess.Popen"""

    def script():
        # subprocess waits until one of these files is closed. Their numbers stay in use: no new socket may
        # get the number of a file that an object of the parent still writes to, or closes.
        null = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2:
                with contextlib.suppress(OSError):
                    os.dup2(null, number, inheritable=False)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        logging.disable(logging.NOTSET)
        gc.freeze()  # else garbage collections would go through pytest's objects, and copy their pages
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # a new Python has none of the parent's handlers
                default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, default)
        SubprocessHandler._popen = fork_rank
        # torchrun looks at its stack often. For some frames, `inspect` searches all imported modules.
        inspect.getmodule = lambda *_: None
        sys.argv, sys.stdout, sys.stderr = [*words], open(1, "w", buffering=1), open(2, "w", buffering=1)
        run = runpy.run_path
        if words[0] == "-m":
            sys.argv, run = sys.argv[1:], functools.partial(runpy.run_module, alter_sys=True)
        tqdm.set_lock(threading.RLock())
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in a new Python
        atexit._clear()  # pytest's exit handlers
        status = 0
        try:
            run(sys.argv[0], run_name="__main__")
        except SystemExit as e:
            status = (print(e.code, file=sys.stderr) or 1) if isinstance(e.code, str) else e.code or 0
        except Exception:
            traceback.print_exc()
            status = 1
        atexit._run_exitfuncs()
        os._exit(status)

    return subprocess.Popen("forked", preexec_fn=script, text=True, **dict(stdout=-1, stderr=-1) | options)


def fork_rank(handler, args, environment) -> subprocess.Popen:
    """Replaces the function of torchrun that runs `python -u WORDS…` for a rank."""
    assert args[:2] == (sys.executable, "-u"), args
    return forked(*args[2:], environment=environment, stdout=handler._stdout, stderr=handler._stderr,
                  start_new_session=True)


REWARD = '''
def digits(response, answer, kind):
    """Share of digits. Random responses get different rewards, so a random model has something to learn."""
    return sum(c.isdigit() for c in response) / max(len(response), 1)

def odd(response, answer, kind):
    return 1.0 if int(answer) % 2 else digits(response, answer, kind)

def penalty(response, answer, kind):
    return -1.0

def broken(response, answer, kind):
    return response.no_such_attribute

def respond(problem, text, turn):
    """An environment that answers the first turn."""
    return "?" if turn == 1 else None
'''


@pytest.fixture(scope="session")
def base(tiny, tmp_path_factory):
    """Returns a config for 4 steps of PPO. The reward is the fraction of digits in a response."""
    from configs import PRESETS

    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 15) for b in range(10, 18)]
    (folder / "eval").mkdir()
    for name, part in ("train.jsonl", rows), ("eval/train.jsonl", rows[::4]):
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in part))
    (folder / "reward.py").write_text(REWARD)
    return dataclasses.replace(PRESETS["tiny-ppo"], model=tiny, data=(f"{folder}/train.jsonl",),
        eval_data=(f"{folder}/eval/train.jsonl",), reward=(f"{folder}/reward.py:digits",),
        stop=tuple(string.ascii_lowercase), device="cpu", dtype="float32", prompts_per_step=8,
        samples_per_prompt=4, max_response_len=24, pack_len=256, critic_updates=2, steps=4, save_every=2,
        eval_every=2, policy_lr=1e-3, critic_lr=1e-3, keep=5, go=True)


def run(cfg, out, ranks=1):
    """Trains into the folder `out`. Returns the metrics and the exported weights."""
    from ranks import main
    from safetensors.torch import load_file

    from log import read_metrics

    messages = run_ranks(ranks, main, dataclasses.replace(cfg, out=str(out)))
    assert messages == [""] * ranks, messages
    return read_metrics(Path(out)), load_file(f"{out}/export/policy/model.safetensors")


def maths(rows):
    """Returns the rows without times, speeds and memory, which differ between equal runs."""
    clock = ("time", "tokens_per_s", "tflops", "mem")
    return [{k: v for k, v in r.items() if not k.startswith(clock)} for r in rows]


@pytest.fixture(scope="session")
def two_ranks(base, tmp_path_factory):
    """Returns folder, metrics and exported weights of a run on 2 ranks."""
    out = tmp_path_factory.mktemp("run") / "a"
    return out, *run(base, out, ranks=2)


@pytest.fixture(scope="session")
def one_rank(base, tmp_path_factory):
    """Returns the same of a run on 1 rank, which takes a third of the time."""
    out = tmp_path_factory.mktemp("run") / "a"
    return out, *run(base, out)


def pytest_terminal_summary(terminalreporter):
    module = sys.modules.get("test_maths")
    if module and module.WORST:
        terminalreporter.section(f"largest error over {module.CASES} random ragged cases")
        for name, error in sorted(module.WORST.items()):
            terminalreporter.write_line(f"{name:32} {error:.1e}")
