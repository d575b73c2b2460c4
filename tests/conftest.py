"""What the tests share: a tiny random Qwen2 with a byte tokenizer, on disk as an ordinary Hugging Face folder."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch

torch.set_num_threads(1)


def make_model(path: Path, seed: int = 0, layers: int = 2, tied: bool = True, family: str = "qwen2") -> str:
    """Save a random decoder of about 90k parameters with the demo's byte tokenizer; returns the folder. Heads of 32: vLLM's CPU
    attention takes none smaller."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tiny import make_tokenizer

    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=128, num_hidden_layers=layers, max_position_embeddings=512, tie_word_embeddings=tied,
        initializer_range=0.1, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None)
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
    """Folder of a tied random model."""
    return make_model(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture(scope="session")
def untied(tmp_path_factory) -> str:
    """Folder of an untied random model."""
    return make_model(tmp_path_factory.mktemp("model") / "untied", tied=False)


# --- ranks: forked from this process, which has imported everything and started nothing. Files run in alphabetical order, and
# the one that puts vLLM and a process group into this process is the last.


def _rank(target, rank, world, port, box, args):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.save(target(*args), box)
    sys.stdout.flush()
    os._exit(0)  # what pytest would run at exit is not this process's to run


def run_ranks(world: int, target, *args):
    """target(*args) in `world` new processes that see torchrun's environment; returns what each returned."""
    import multiprocessing as mp
    import socket
    import tempfile

    assert not torch.distributed.is_initialized()
    context = mp.get_context("fork")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as box:
        processes = [context.Process(target=_rank, args=(target, r, world, port, f"{box}/{r}", args)) for r in range(world)]
        for p in processes:
            p.start()
        for p in processes:
            p.join(600)
        assert all(p.exitcode == 0 for p in processes), [p.exitcode for p in processes]
        return [torch.load(f"{box}/{r}", weights_only=False) for r in range(world)]
