"""What the tests share: a tiny random Qwen2 with a character tokenizer, on disk as an ordinary Hugging Face folder."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch

torch.set_num_threads(1)


def make_model(path: Path, seed: int = 0, layers: int = 2, tied: bool = True, family: str = "qwen2") -> str:
    """Save a random decoder of about 60k parameters with a character tokenizer; returns the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    chars = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127)), "\n"]
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(chars)}, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<answer>", "</answer>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, num_hidden_layers=layers, max_position_embeddings=512, tie_word_embeddings=tied,
        initializer_range=0.1, eos_token_id=1, pad_token_id=0, bos_token_id=None)
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
