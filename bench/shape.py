"""Writes a model folder with a real model's shape and random weights, for machines without a network.

    python -m bench.shape OUT [--size 0.5b] [--device cpu]

The folder also has the demo's tokenizer, and problems such as 12+30= in train.jsonl. Except for
--size tiny, the model's vocabulary is far larger than the tokenizer's. So most sampled tokens have no text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SIZES = ("tiny", "0.5b", "1.5b", "7b", "8b", "32b", "3.5-0.8b", "3.5-2b", "3.5-4b", "3.5-9b", "3.5-27b")


def config_of(size: str, layers: int = 0, vocab: int = 0):
    """Returns the Hugging Face config of KNOWN[size]. layers, vocab: replace the shape's values, if not 0."""
    from transformers import Qwen2Config, Qwen3_5TextConfig

    from tools.plan import KNOWN

    s = KNOWN[size]
    common = dict(
        hidden_size=s.hidden, num_hidden_layers=layers or s.layers, num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads, intermediate_size=s.inner, vocab_size=vocab or s.vocab,
        max_position_embeddings=32768, tie_word_embeddings=s.tied, bos_token_id=None)
    if not s.delta.layers:
        return Qwen2Config(**common, rope_theta=1e6)
    return Qwen3_5TextConfig(
        **common, head_dim=s.head_dim, linear_num_key_heads=s.delta.key_heads,
        linear_num_value_heads=s.delta.heads, linear_key_head_dim=s.delta.key_dim,
        linear_value_head_dim=s.delta.dim, linear_conv_kernel_dim=s.delta.kernel,
        rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25,
                             mrope_section=[11, 11, 10], mrope_interleaved=True))


def build(out: str, size: str, seed: int = 0, layers: int = 0, vocab: int = 0, chat: bool = False,
          device: str = "cpu") -> str:
    """Writes the model folder `out`: random bf16 weights, a tokenizer and train.jsonl. Returns the folder's
    path. size, layers, vocab: see `config_of`. chat: whether the tokenizer has a chat template.
    device: of the random numbers; a CPU takes up to a minute"""
    import torch
    from transformers import AutoModelForCausalLM

    from bench.tasks import chat_tokenizer
    from tools.tiny import make_tokenizer

    path, tokenizer = Path(out), chat_tokenizer() if chat else make_tokenizer()
    torch.manual_seed(seed)
    config = config_of(size, layers, vocab)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    numbers = range(10, 42)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    (path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    print(build(args.out, args.size, device=args.device))
