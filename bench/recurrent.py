"""Teaches a tiny Qwen3.5 to add, through vLLM on a CPU: its delta nets are trained by PPO and by GRPO.

    python -m bench.recurrent [--algo ppo grpo] [--steps 24] [--work runs/recurrent]

The base model is that of tools/tiny.py with another architecture: one layer with a delta net, one with
attention. It is pretrained on the same texts, in one and a half minutes of a CPU core. Then each algorithm is
a run of train.py in its own process, in bf16: vLLM's CPU kernels of the delta net take nothing else.

Writes bench/results/recurrent.md: the rewards, the accuracy on held-out problems, the gap between engine and
trainer, and the number of alarms. A finished run in --work is not trained again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F

from bench.common import RESULTS, ROOT, arguments, environment, markdown

LEGEND = """\
A tiny Qwen3.5 (one layer with a delta net, one with attention; {params:,} parameters) learns the demo's task.
It is pretrained on the demo's texts. vLLM's CPU build samples, in bf16. `accuracy`: of 512 held-out problems,
one sample each. `gap`: mean difference of the log-probs of engine and trainer in a step, in nats a token.

"""


def config(**settings):
    """Returns the config of the base model. settings: those of tools/tiny.py for its Qwen2"""
    from transformers import Qwen3_5TextConfig

    settings |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    return Qwen3_5TextConfig(
        **settings, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=64, linear_value_head_dim=64,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25,
                             mrope_section=[3, 3, 2], mrope_interleaved=True))


def delta_rule(query, key, value, g, beta, **_):
    """Returns the outputs (B, L, heads, d) of the gated delta rule, and None in place of the last state. The
    whole row is one chunk, whose triangular system torch solves. transformers' rule pads each row to 64
    tokens and solves the system in a loop."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    g, beta = g.transpose(1, 2).cumsum(-1), beta.transpose(1, 2)[..., None]
    q, k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1)
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool).triu(1)
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(later, -torch.inf).exp()
    system = (beta * k) @ k.mT * decay
    written = torch.linalg.solve_triangular(system, beta * v, upper=False, unitriangular=True)
    return ((q @ k.mT * decay) @ written).transpose(1, 2), None


def build(out: str) -> str:
    """Pretrains the base model. Returns its folder."""
    from transformers import Qwen3_5ForCausalLM
    from transformers.models.qwen3_5 import modeling_qwen3_5

    from tools import tiny

    modeling_qwen3_5.torch_chunk_gated_delta_rule = delta_rule
    tiny.Qwen2Config, tiny.Qwen2ForCausalLM = config, Qwen3_5ForCausalLM
    return tiny.build(out)


def train(words: list[str]) -> None:
    """Runs train.py, with an empty module in place of torchvision where that is missing."""
    import configs

    cfg = configs.parse(words)
    configs.set_allocator()
    import train

    sys.path.append(str(ROOT / "tests"))
    import families

    families.stand_in_for_torchvision()
    train.main(cfg)


def row_of(out: Path, algo: str) -> list[str]:
    """Returns the row of a run in the table."""
    from log import read_metrics

    score, rows = "eval/heldout/avg@1", read_metrics(out)
    steps = [row for row in rows if "reward" in row]
    rewards = " ".join(f"{row['reward']:.2f}" for row in steps)
    scores = ", ".join(f"{row[score]:.3f} (step {row['step']})" for row in rows if score in row)
    gap = max(row["logp_gap/mean"] for row in steps)
    alarms = (out / "alarms.jsonl").read_text().count("\n")
    return [algo, rewards, scores, f"{gap:.0e}", str(alarms)]


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        train(sys.argv[2:])
        sys.stdout.flush()
        os._exit(0)  # without vLLM's exit handlers, which would hang
    args = arguments(__doc__, algo=("ppo", "grpo"), steps=24, work="runs/recurrent")
    torch.set_num_threads(1)
    work = Path(args.work).absolute()
    base = build(str(work / "base"))
    for algo in args.algo:
        flags = dict(model=base, data=f"{base}/train.jsonl", eval_data=f"{base}/heldout.jsonl", engine="vllm",
                     dtype="bfloat16", device="cpu", steps=args.steps, eval_every=args.steps // 2,
                     out=work / algo)
        words = [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
        if not (work / algo / "export/policy").exists():
            command = [sys.executable, "-m", "bench.recurrent", "--one", f"tiny-{algo}", *words]
            subprocess.run(command, env=environment(), check=True)
    import model

    params = sum(p.numel() for p in model.load_policy(base).parameters())
    done = [algo for algo in ("ppo", "grpo") if (work / algo / "export/policy").exists()]
    table = markdown(("algorithm", "reward of each step", "accuracy", "largest gap", "alarms"),
                     [row_of(work / algo, algo) for algo in done])
    (RESULTS / "recurrent.md").write_text(LEGEND.format(params=params) + table)
    print(table)


if __name__ == "__main__":
    main()
