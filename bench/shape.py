"""A model folder of a real shape with random weights, and sums to sample, for machines that the network doesn't reach.

    python bench/shape.py OUT [--size 0.5b]

The tokenizer is the demo's, of bytes; the vocabulary is the shape's own, so most of what such a model says has no text.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
SIZES = {
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=128,
                 vocab_size=1024, max_position_embeddings=4096),
    "0.5b": dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864,
                 vocab_size=151936, max_position_embeddings=32768),  # Qwen2.5-0.5B
}


def build(out: str, size: str, seed: int = 0) -> str:
    """Write the folder: bf16 weights drawn from N(0, 0.02²), tied, and train.jsonl. Returns its path."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tiny import make_tokenizer

    path, tokenizer = Path(out), make_tokenizer()
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES[size], tie_word_embeddings=True, rope_theta=1e6, bos_token_id=None,
                                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 42) for b in range(10, 42)]
    (path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--size", choices=list(SIZES), default="0.5b")
    args = parser.parse_args()
    print(build(args.out, args.size))
