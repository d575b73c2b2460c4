"""What a run will take, before it takes it: which batch is which, memory, disk and seconds.

    python configs.py orz-7b --layout production [--model PATH] [--gpu H200] [--json]

Arithmetic on the config and on the few numbers of a model's config.json: no torch, no device. train.py prints the same at
its start, for the device it has, and refuses what can't fit there. Bytes are those of the fullest moment of each phase, as
dist.py, model.py and the loop of train.py hold them; seconds are estimates from datasheets, good to a factor of two or so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs import NODE, PRESETS, Config, UserError, nearest, need, parse

GIB = 2**30
STATE_BYTES = 12  # a parameter at rest and in a checkpoint: weight and AdamW's two moments, fp32
CHUNK_BYTES = 2**28  # of fp32 logits that model.py makes at once,
CHUNKS = 3  # of which its passes hold so many
SAMPLER = 6  # times its fp32 logits a sampler takes
OWN = 1.5 * GIB  # of a GPU, outside PyTorch's allocator: CUDA's context, NCCL's buffers
ENGINE_OWN = 1.5 * GIB  # vLLM's activations and CUDA graphs, without the logits of its sampler
PROCESS = 5 * GIB  # of the host, for one rank's libraries (torch, CUDA, vLLM)
SLACK = 0.85  # of what is estimated, not known, must fit
ESTIMATED = ("gathered", "activations", "logits", "summing", "AdamW's step")
MFU = 0.35  # share of a GPU's peak that training reaches; torchtitan has 33 to 39 % of an H100's on 8B
REACHED = 0.6  # share of a datasheet's bandwidth that is reached
NIC = 50e9  # bytes a second to other machines that one GPU adds: 400 Gb/s
PROBLEMS = 57_000  # prompts, where the data isn't at hand: about Open-Reasoner-Zero's


@dataclass(frozen=True)
class GPU:
    """A GPU's datasheet; of one that isn't known only the memory."""

    name: str
    memory: float  # bytes, as torch sees it
    flops: float = 0.0  # a second, dense bf16
    hbm: float = 0.0  # bytes a second from its own memory
    link: float = 0.0  # bytes a second to its neighbours, one way
    host: float = 0.0  # bytes a second to the host, one way


GPUS = {g.name: g for g in (
    GPU("H100", 79.1 * GIB, 989e12, 3.35e12, 450e9, 64e9), GPU("H200", 139.8 * GIB, 989e12, 4.8e12, 450e9, 64e9),
    GPU("B200", 178.3 * GIB, 2250e12, 8e12, 900e9, 64e9), GPU("A100-80", 79.2 * GIB, 312e12, 2.04e12, 300e9, 32e9),
    GPU("A100-40", 39.4 * GIB, 312e12, 1.56e12, 300e9, 32e9), GPU("L40S", 44.4 * GIB, 362e12, 0.86e12, 32e9, 32e9),
    GPU("4090", 23.5 * GIB, 165e12, 1.01e12, 32e9, 32e9))}


def gpu_of(device: str, memory: float) -> GPU:
    """The GPU that a driver calls `device`, with the memory it really has."""
    alike = [g for g in GPUS.values() if g.name.partition("-")[0] in device]
    known = min(alike, key=lambda g: abs(g.memory - memory), default=GPU(device, memory))
    return replace(known, memory=memory)


# --- the model


@dataclass(frozen=True)
class Shape:
    """A dense decoder of the family of Llama, Mistral, Qwen2 and Qwen3, in numbers."""

    name: str  # where the numbers are from
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    tied: bool = False
    head_dim: int = 0  # 0: hidden / heads
    qkv_bias: bool = True  # as Qwen2 has it
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def q(self) -> int:
        """Width of all heads' queries together."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv(self) -> int:
        """Width of all heads' keys together."""
        return self.q * self.kv_heads // self.heads

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer."""
        d, i = self.hidden, self.inner
        return (2 * d * (self.q + self.kv) + 3 * d * i + 2 * d + self.qkv_bias * (self.q + 2 * self.kv) + self.o_bias * d
                + self.mlp_bias * (2 * i + d) + self.qk_norm * 2 * self.q // self.heads)

    @property
    def policy(self) -> int:
        """Parameters as a language model."""
        return self.layers * self.layer + self.hidden + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def critic(self) -> int:
        """Parameters as a value model, whose head is a vector."""
        return self.layers * self.layer + 2 * self.hidden + self.vocab * self.hidden

    def activations(self, width: int) -> int:
        """Bytes that the backward pass of one layer keeps a token: fp32 inputs of two norms, else `width` bytes a number."""
        return 8 * self.hidden + width * (4 * self.hidden + 2 * self.q + 2 * self.kv + 4 * self.inner)


KNOWN = {  # by what a preset's name holds
    "0.5b": Shape("Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151936, tied=True),
    "1.5b": Shape("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151936, tied=True),
    "32b": Shape("Qwen2.5-32B", 64, 5120, 40, 8, 27648, 152064),
    "7b": Shape("Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064),
    "8b": Shape("Llama-3.1-8B", 32, 4096, 32, 8, 14336, 128256, qkv_bias=False),
    "tiny": Shape("tiny.py's model", 2, 128, 4, 2, 384, 263, tied=True)}


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    """The shape that a config.json says; other families than the four are counted as Llama's. Raises UserError."""
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    lacks = [k for k in keys if not config.get(k)]
    kind = config.get("model_type", "")
    need(not lacks, f"the config of {name} ({kind}) has no {', '.join(lacks)}", "a dense decoder like Llama or Qwen")
    need(not (config.get("num_experts") or config.get("num_local_experts")), f"{name} is a mixture of experts ({kind})",
         "a dense decoder")
    layers, hidden, heads, inner, vocab = (config[k] for k in keys)
    bias = bool(config.get("attention_bias"))
    return Shape(name, layers, hidden, heads, config.get("num_key_value_heads") or heads, inner, vocab,
                 bool(config.get("tie_word_embeddings")), config.get("head_dim") or 0, bias or kind == "qwen2",
                 bias and kind != "qwen2", bool(config.get("mlp_bias")), kind == "qwen3")


def read_shape(path: str) -> Shape:
    """The shape of the model in a folder. Raises UserError."""
    file = Path(path) / "config.json"
    need(file.is_file(), f"no {file}", "--model with a Hugging Face model folder")
    return shape_of(json.loads(file.read_text(encoding="utf-8")), path)


# --- the case


@dataclass(frozen=True)
class Case:
    """What a plan is of."""

    cfg: Config
    world: int  # ranks
    policy: Shape
    critic: Shape | None  # None: grpo
    gpu: GPU | None  # None: on CPUs
    local: int = 1  # ranks on one machine
    host: float = 0.0  # bytes of memory to be had on one machine; 0: not known
    problems: int = 0  # prompts to train on; 0: not known

    @property
    def shards(self) -> int:
        return self.cfg.shard_ranks or self.world

    @property
    def machines(self) -> int:
        return -(-self.world // self.local)

    @property
    def width(self) -> int:
        """Bytes of a number in compute and gathers."""
        return 4 if self.cfg.dtype == "float32" or (self.cfg.dtype == "auto" and not self.gpu) else 2

    @property
    def vllm(self) -> bool:
        return self.cfg.engine == "vllm" or (self.cfg.engine == "auto" and self.gpu is not None)

    @property
    def moves(self) -> bool:
        """Whether who isn't training waits on the host."""
        return self.cfg.offload and self.gpu is not None

    @property
    def trained(self) -> dict[str, int]:
        """Parameters of what is trained."""
        return ({"critic": self.critic.critic} if self.critic else {}) | {"policy": self.policy.policy}

    @property
    def state(self) -> float:
        """Bytes of one rank's shards at rest: all weights and moments, and a reference's weights."""
        return (STATE_BYTES * sum(self.trained.values()) + 4 * bool(self.cfg.kl_coef) * self.policy.policy) / self.shards

    @property
    def responses(self) -> int:
        """Samples of a step that one engine has to make."""
        return -(-self.cfg.prompts_per_step // max(self.world // self.cfg.tp, 1)) * self.cfg.samples_per_prompt

    @property
    def kv(self) -> int:
        """Bytes that one token's keys and values take of one rank."""
        return 2 * self.policy.layers * max(self.policy.kv // self.cfg.tp, self.policy.q // self.policy.heads) * self.width


def at_rest(n: int, shards: int) -> dict[str, float]:
    """Bytes of one rank's shards of a model of `n` parameters in training."""
    return {"weights": 4 * n / shards, "gradients": 4 * n / shards, "AdamW": 8 * n / shards}


Moment = dict[str, float]  # bytes that one rank's device holds (on CPUs: one rank), by item


def fullest(moments: Sequence[Moment]) -> Moment:
    """The one that takes most."""
    return max(moments, key=lambda m: sum(m.values()))


def updating(c: Case, shape: Shape, n: int, head: bool) -> list[Moment]:
    """The full moments of an update of `shape`'s `n` parameters; `head`: with log-probs."""
    b, d, v, layer = c.width, shape.hidden, shape.vocab, shape.layer
    root = n - shape.layers * layer  # embedding, norm and head, whole from the first layer's forward to the last's backward
    cfg, tokens = c.cfg, min(c.cfg.pack_len, -(-c.cfg.samples_per_step * c.cfg.model_len // (c.cfg.parts * c.world)))
    one = shape.activations(b)
    kept = tokens * (shape.layers * (b * d if cfg.checkpoint_activations else one) + 2 * b * d)
    working = tokens * ((one if cfg.checkpoint_activations else 0) + 3 * b * shape.inner + 8 * d)
    heads = v * d if head else d
    moments: list[Moment] = [
        {"gathered": b * root, "activations": kept, "logits": CHUNKS * min(CHUNK_BYTES, 4 * v * tokens) * head,
         "summing": (4 + b) * heads},  # the head's backward pass, its gradient in fp32 and once more
        {"gathered": b * (root + 3 * layer), "activations": kept + working,  # a layer's: one at work, the next coming
         "summing": b * heads + (b + 8) * layer},  # its gradients, and those of the one before on their way to the ranks
        {"summing": (4 + b) * root},  # the root's, last of all
        {"AdamW's step": 4 * n / c.shards}]
    return [at_rest(n, c.shards) | moment for moment in moments]


def memory(c: Case) -> dict[str, list[Moment]]:
    """The full moments of each phase. "beside": CUDA's own and, without offload, what the phase doesn't use."""
    cfg, b, p = c.cfg, c.width, c.policy
    engine = {"engine": b * p.policy / cfg.tp}
    always = {} if c.vllm else engine  # asleep, vLLM keeps nothing
    rows, root = min(cfg.max_num_seqs, c.responses), p.policy - p.layers * p.layer
    sampler = 4 * SAMPLER * (cfg.max_num_seqs if c.vllm else rows) * p.vocab

    def beside(here: float) -> Moment:
        return {"beside": OWN * bool(c.gpu) + (0 if c.moves else c.state - here / c.shards)}

    if c.vllm and c.gpu:
        work = ENGINE_OWN + sampler
        cache = max(cfg.engine_share * c.gpu.memory - engine["engine"] - work, 0.0)
    else:
        work, cache = sampler, 2**28 if c.vllm else rows * cfg.engine_len * c.kv
    arriving = {"weights": 4 * p.policy / c.shards, "gathered": 2 * b * max(root, p.layer)}
    out = {"sync": [arriving | engine | beside(4 * p.policy)],
           "rollout": [engine | {"engine's work": work, "KV cache": cache} | beside(0)]}
    for who, n in c.trained.items():
        moments = updating(c, p if who == "policy" else c.critic, n, head=who == "policy")
        out[who] = [m | always | beside(STATE_BYTES * n) for m in moments]
    return out


def kv_tokens(c: Case) -> int:
    """Tokens that an engine's cache holds."""
    return int(memory(c)["rollout"][0]["KV cache"] / c.kv)


def host(c: Case) -> dict[str, float]:
    """Bytes of the host that one rank needs beside its device."""
    return {"state": c.state if c.moves else 0.0, "checkpoint": STATE_BYTES * sum(c.trained.values()) / c.shards,
            "libraries": PROCESS if c.gpu else PROCESS / 10}


def host_memory() -> float:
    """Bytes of memory that this machine has to give; 0 where it doesn't say."""
    try:
        said = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024.0 * int(said["MemAvailable"].split()[0])
    except (OSError, KeyError):
        return 0.0


def disk(cfg: Config, policy: int, critic: int = 0) -> dict[str, int]:
    """Bytes of one checkpoint, how many lie there at most, bytes of the exports (bf16) and of all of it, for a policy and a
    critic of so many parameters. A reference is in it if it changes."""
    one = STATE_BYTES * (policy + critic) + 4 * policy * bool(cfg.kl_coef and cfg.ref_refresh)
    count, exports = cfg.keep + 1 + bool(cfg.keep_best and cfg.eval_data), 2 * (policy + critic)
    return {"checkpoint": one, "checkpoints": count, "exports": exports, "needed": count * one + exports}


def seconds(c: Case, prompt: float, response: float) -> dict[str, float]:
    """Seconds a step spends in each phase where prompts and responses are so long on average."""
    cfg, g, p, b, length = c.cfg, c.gpu, c.policy, c.width, prompt + response
    flops, hbm = MFU * g.flops, REACHED * g.hbm
    link = REACHED * (g.link if c.machines == 1 else min(g.link, c.local * NIC))
    batch = max(1, min(cfg.max_num_seqs, c.responses, kv_tokens(c) // length))
    read = b * p.policy + batch * (prompt + response / 2) * c.kv * cfg.tp
    decode = max(read / (cfg.tp * hbm), 2 * p.policy * batch / (cfg.tp * flops))
    tail = cfg.max_response_len * b * p.policy / (cfg.tp * hbm)
    tokens = cfg.samples_per_step * length / c.world
    passes = 4 if cfg.checkpoint_activations else 3  # forward, backward (twice that), and forward once more

    def forward(shape: Shape, n: int) -> float:
        return tokens * (2 * n + 2 * shape.layers * shape.q * length) / flops

    out = {"sync": b * p.policy / hbm + (b * p.policy / link if c.world > 1 else 0.0),
           "rollout": max(response * c.responses / batch * decode, tail)}
    if cfg.kl_coef:
        out["ref"] = forward(p, p.policy)
    if cfg.policy_updates > 1 or (cfg.kl_coef and cfg.kl_in == "reward"):
        out["old_logp"] = forward(p, p.policy)
    if c.critic:
        out["critic"] = (1 + passes) * forward(c.critic, c.critic.critic)
    out["policy"] = passes * forward(p, p.policy)
    if c.moves:
        out["offload"] = 2 * (c.state + 4 * p.policy / c.shards) / (REACHED * g.host)
    return out | {"step": sum(out.values())}


# --- does it fit?


def misfit(c: Case) -> str:
    """What is too small for this run, or nothing. On CPUs, where less is certain, only what is far too small."""
    def words(phase: str, items: Moment) -> str:
        most = sorted(items.items(), key=lambda x: -x[1])[:3]
        return f"phase {phase} takes {gib(sum(items.values()))} a rank ({', '.join(f'{k} {gib(v)}' for k, v in most)})"

    moments = sorted(((k, m) for k, ms in memory(c).items() for m in ms), key=lambda x: -sum(x[1].values()))
    if not c.gpu:
        least = c.local * sum(moments[0][1].values()) / 2
        return f"{words(*moments[0])}, and {_some(c.local, 'rank')} share {gib(c.host)}" if 0 < c.host < least else ""
    for phase, items in moments:
        if sum(v * (SLACK if k in ESTIMATED else 1) for k, v in items.items()) > c.gpu.memory:
            return f"{words(phase, items)}, and a GPU has {gib(c.gpu.memory)}"
    if kv_tokens(c) < c.cfg.engine_len:
        return (f"the engine's {c.cfg.engine_share:.0%} of {gib(c.gpu.memory)} holds {kv_tokens(c):,} tokens beside its "
                f"weights, and a prompt with its response takes {c.cfg.engine_len:,}")
    state = host(c)["state"]
    few = 0 < c.host < state * c.local
    return f"{_some(c.local, 'rank')} keep {gib(state)} each on a machine that has {gib(c.host)}" if few else ""


def fix(c: Case) -> str:
    """The first change that makes it fit and leaves the algorithm as it is: a flag, several of them, more ranks."""
    cfg = c.cfg
    free = {"checkpoint_activations": True, "offload": True, "pack_len": cfg.model_len, "shard_ranks": 0}
    free = {k: v for k, v in free.items() if getattr(cfg, k) != v and (c.gpu or k != "offload")}
    singles: list[dict[str, Any]] = [{k: v} for k, v in free.items()]
    if c.vllm:
        singles += [{"engine_share": x / 20} for x in sorted(range(4, 20), key=lambda x: abs(x / 20 - cfg.engine_share))]
        singles += [{"tp": n} for n in (2, 4, 8) if n > cfg.tp and c.world % n == 0]
    singles += [{"max_num_seqs": n} for n in (256, 128, 64, 32, 16, 8) if n < cfg.max_num_seqs]
    for change in (*singles, free, *(free | s for s in singles)):
        if not misfit(replace(c, cfg=replace(cfg, **change))):
            return _flags(change)
    for ranks in (c.world * 2**k for k in range(1, 11)):
        local = min(ranks, NODE) if c.gpu and c.machines == 1 else c.local
        for change in ({}, free):
            if not misfit(replace(c, cfg=replace(cfg, **change), world=ranks, local=local)):
                return f"{ranks} ranks on {_some(-(-ranks // local), 'machine')} {_flags(change)}".strip()
    return "a smaller --model, or devices with more memory"


def _flags(change: Mapping[str, Any]) -> str:
    return " ".join(f"--{k}" if v is True else f"--{k} {v}" for k, v in change.items())


def gib(n: float) -> str:
    """Bytes of memory for people."""
    return f"{n / GIB:.1f} GiB" if n >= GIB / 20 else f"{n / 2**20:.1f} MiB"


def size(n: float) -> str:
    """Bytes of a disk for people."""
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


# --- in print


@dataclass(frozen=True)
class Row:
    """A line of the plan: a number or one for each column, how it is shown, what it means. Without a number: a remark."""

    value: float | dict[str, float] | None
    shown: str | dict[str, str] = ""
    note: str = ""


def sections(c: Case) -> dict[str, dict[str, Row]]:
    """The plan: rows by name, by section."""
    out = {"run": _run(c), "batches": _batches(c), "memory": _memory(c), "host and disk": _host_and_disk(c)}
    return out | ({"seconds": _seconds(c)} if c.gpu and c.gpu.flops else {})


def as_dict(plan: Mapping[str, Mapping[str, Row]]) -> dict[str, dict[str, Any]]:
    """The plan's numbers, for JSON: counts, bytes, seconds."""
    return {section: {name: row.value for name, row in rows.items() if row.value is not None} for section, rows in plan.items()}


def as_text(plan: Mapping[str, Mapping[str, Row]]) -> dict[str, str]:
    """The plan as a table of two columns, for the report."""
    def cell(r: Row) -> str:
        shown = ", ".join(f"{k} {v}" for k, v in r.shown.items()) if isinstance(r.shown, dict) else r.shown.strip()
        return "; ".join(x for x in (shown, r.note) if x)

    return {f"{section}: {name}": cell(row) for section, rows in plan.items() for name, row in rows.items()}


def lines(plan: Mapping[str, Mapping[str, Row]], width: int = 80) -> Iterator[str]:
    """The plan as text: name, numbers, notes that wrap in a column of their own."""
    for section, rows in plan.items():
        columns = max((list(r.shown) for r in rows.values() if isinstance(r.shown, dict)), key=len, default=[])
        yield ""
        yield (f"{section.upper():24}" + "".join(f"{c:>9}" for c in columns)).rstrip()
        for name, row in rows.items():
            cells = [f"{v:>9}" for v in row.shown.values()] if isinstance(row.shown, dict) else [f"{row.shown:>14}"]
            left = f"  {name:22}" + "".join(cells) + "  " if row.value is not None else "  "
            notes = textwrap.wrap(row.note, width - len(left)) or [""]
            yield (left + notes[0]).rstrip()
            yield from (" " * len(left) + note for note in notes[1:])


def verdict(c: Case) -> str:
    """Whether it fits, and what would."""
    if lack := misfit(c):
        return f"does not fit: {lack}; needed: {fix(c)}"
    phase, most = max(((k, sum(fullest(v).values())) for k, v in memory(c).items()), key=lambda x: x[1])
    have = f" of {gib(c.gpu.memory)}" if c.gpu else f" of {gib(c.host)} that {c.local} ranks share" if c.host else ""
    return f"fits: the fullest phase, {phase}, takes {gib(most)}{have}"


def _row(n: float, unit: str = "", note: str = "") -> Row:
    return Row(n, f"{n:,.0f} {unit}".strip(), note)


def _short(x: float) -> str:
    return f"{x:,.1f}" if x < 1000 else f"{x:,.0f}"


def _some(n: int, one: str) -> str:
    return f"{n} {one}" if n == 1 else f"{n} {one}s"


def _run(c: Case) -> dict[str, Row]:
    cfg, full = c.cfg, c.cfg.with_steps(c.problems or PROBLEMS)
    engines = _some(max(c.world // cfg.tp, 1), "engine")
    rows = {"ranks": _row(c.world, note=f"{_some(c.machines, 'machine')} of {c.local}; {engines} of {cfg.tp}; weights and "
                          f"optimizer in {_some(c.shards, 'shard')}"),
            "policy parameters": _row(c.policy.policy, note=c.policy.name)}
    if c.critic:
        rows["critic parameters"] = _row(c.critic.critic, note="the same with a scalar head" if c.critic == c.policy else
                                         c.critic.name)
    guess = "" if c.problems else f" ({PROBLEMS:,}, about ORZ's; --data FILE counts yours)"
    rows["steps"] = _row(full.steps, note=f"over the prompts {cfg.epochs} times{guess}" if cfg.epochs else "")
    rows["episodes"] = _row(full.steps * cfg.samples_per_step, note="prompt-response pairs (Open-Instruct's total_episodes)")
    for who in c.trained:
        n = getattr(cfg, f"{who}_updates")
        rows[f"{who} updates"] = _row(n * (full.steps - cfg.freeze_policy_steps * (who == "policy")), note=f"{n} a step")
    return rows


def _batches(c: Case) -> dict[str, Row]:
    """Which batch is which, in the words of Open-Reasoner-Zero, OpenRLHF, verl and TRL too."""
    cfg, s = c.cfg, c.cfg.samples_per_step
    rows = {
        "prompts a step": _row(cfg.prompts_per_step, note="rollout_batch_size (ORZ, OpenRLHF), train_batch_size (verl)"),
        "samples a prompt": _row(cfg.samples_per_prompt, note="the group: n_samples_per_prompt (ORZ, OpenRLHF), rollout.n "
                                 "(verl), num_generations (TRL)"),
        "step": _row(s, "samples", f"global batch: {cfg.prompts_per_step} × {cfg.samples_per_prompt} = {s} episodes"),
        "step, an engine": _row(c.responses, "samples", f"decoded up to {cfg.max_num_seqs} at once: max_num_seqs (vLLM)")}
    for who in c.trained:
        n = getattr(cfg, f"{who}_updates")
        words = f"mini batch: {who}_update_steps {n} (ORZ)"
        if who == "policy":
            words += f", train_batch_size {s // n} (OpenRLHF), ppo_mini_batch_size {cfg.prompts_per_step / n:g} prompts (verl)"
        rows[f"{who} update"] = _row(s / n, "samples", words + "; parts of equal tokens, so about" * (n > 1))
        rows[f"{who} update, a rank"] = Row(s / n / c.world, f"{_short(s / n / c.world)} samples", "about: of equal tokens")
    return rows | {
        "pack": _row(cfg.pack_len, "tokens", "micro batch, in tokens: what a rank runs at once; gradients add up over its "
                     "packs. packing_max_len (ORZ), ppo_max_token_len_per_gpu (verl)"),
        "sample": _row(cfg.model_len, "tokens", f"at most: a prompt up to {cfg.max_prompt_len}, a response up to "
                       f"{cfg.max_response_len}")}


def _memory(c: Case) -> dict[str, Row]:
    table = {phase: {k: max(m.get(k, 0.0) for m in moments) for m in moments for k in m} | {
        "in all": sum(fullest(moments).values())} for phase, moments in memory(c).items()}
    unit, word = (GIB, "GiB") if max(items["in all"] for items in table.values()) > GIB / 2 else (2**20, "MiB")
    notes = {"weights": f"4 N / {c.shards}", "gradients": f"4 N / {c.shards}", "AdamW": f"8 N / {c.shards}",
             "engine": f"{c.width} N / {c.cfg.tp}", "in all": f"{word} a {'GPU' if c.gpu else 'rank'}"}
    names = sorted({n: 0 for items in table.values() for n in items}, key=["beside", "in all"].count)
    rows = {}
    for name in names:
        cells = {phase: items.get(name, 0.0) for phase, items in table.items()}
        rows[name] = Row(cells, {k: f"{v / unit:.1f}" if v else "·" for k, v in cells.items()}, notes.get(name, ""))
    tokens = kv_tokens(c)
    of = "of one layer, and the inputs of all" if c.cfg.checkpoint_activations else "of all layers; --checkpoint_activations"
    return rows | {
        "KV cache, tokens": _row(tokens, note=f"{c.kv * c.cfg.tp / 1024:g} KiB each"),
        "KV cache, samples": Row(tokens / c.cfg.model_len, f"{tokens / c.cfg.model_len:,.1f}",
                                 f"of full length at once; an engine makes {c.responses}"),
        "": Row(None, note="N: parameters. Each item at its largest, not all at one moment; in all: at the fullest one. "
                f"Activations: of {c.cfg.pack_len} tokens ({of}). Gathered: whole weights of embedding, head and the layers at "
                "work. Summing: whole gradients on their way to the shards. Beside: CUDA's own, and what doesn't leave.")}


def _host_and_disk(c: Case) -> dict[str, Row]:
    rank, files = host(c), disk(c.cfg, **c.trained)
    notes = {"state": "a rank: what waits for its phase (--offload)", "checkpoint": "a rank: the copy that is being written",
             "libraries": "a rank: torch" + ", CUDA, vLLM" * bool(c.gpu)}
    machine = c.local * (sum(rank.values()) + (0 if c.gpu else max(sum(fullest(m).values()) for m in memory(c).values())))
    best = "the best, " * (files["checkpoints"] > c.cfg.keep + 1)
    kept = f"{files['checkpoints']} checkpoints (--keep, {best}the one being written)"
    return {f"host, {k}": Row(v, gib(v), notes[k]) for k, v in rank.items() if v} | {
        "host, a machine": Row(machine, gib(machine), _some(c.local, "rank") + " with all of the above" * (not c.gpu)),
        "disk, a checkpoint": Row(files["checkpoint"], size(files["checkpoint"]), "12 N of all that is trained"),
        "disk, in all": Row(files["needed"], size(files["needed"]), f"{kept} and exports of {size(files['exports'])}")}


def _seconds(c: Case) -> dict[str, Row]:
    cfg, g = c.cfg, c.gpu
    prompt, response = cfg.max_prompt_len / 8, cfg.max_response_len / 4
    cases = {"quarter": seconds(c, prompt, response),
             "full": seconds(c, cfg.model_len - cfg.max_response_len, cfg.max_response_len)}
    passes, steps = 8 if cfg.checkpoint_activations else 6, cfg.with_steps(c.problems or PROBLEMS).steps
    notes = {"sync": "2 N / link + 2 N / HBM", "ref": "2 N FLOP a token", "old_logp": "2 N FLOP a token",
             "rollout": f"decode steps × (2 N + KV) / HBM; at least {cfg.max_response_len} × 2 N / HBM",
             "critic": f"(2 + {passes}) N FLOP a token, attention", "policy": f"{passes} N FLOP a token, attention",
             "offload": "state to the GPU and back", "run, days": f"{steps:,} steps, without evaluations"}
    for times in cases.values():
        times["run, days"] = steps * times["step"] / 86400
    rows = {name: Row({k: v[name] for k, v in cases.items()}, {k: _short(v[name]) for k, v in cases.items()},
                      notes.get(name, "")) for name in cases["full"]}
    return rows | {"": Row(None, note=(
        f"Estimates for {c.world} × {g.name}; quarter: responses of {response:,.0f} tokens after prompts of {prompt:,.0f}. By "
        f"datasheet {g.flops / 1e12:.0f} bf16 TFLOP/s, of which {MFU:.0%} are reached (MFU); HBM {g.hbm / 1e12:.2f} TB/s, link "
        f"{g.link / 1e9:.0f} GB/s ({NIC / 1e9:.0f} a GPU between machines), host {g.host / 1e9:.0f} GB/s, of which "
        f"{REACHED:.0%}."))}


# --- the command


def count_rows(paths: Sequence[str]) -> int:
    """Problems in .json and .jsonl files, before any is dropped; 0 where one can't be read so."""
    total = 0
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
            rows = json.loads(text) if text.lstrip().startswith("[") else [r for r in text.split("\n") if r.strip()]
            total += len(rows)
        except (OSError, ValueError):
            return 0
    return total


def case_of(cfg: Config, world: int, shapes: Sequence[Shape], gpu: GPU | None, **facts: Any) -> Case:
    """The case of a config: shapes of the policy and of what the critic starts from."""
    return Case(cfg, world, shapes[0], shapes[1] if cfg.algo == "ppo" else None, gpu, **facts)


def main() -> None:
    """`python configs.py PRESET [--gpu NAME] [--json] [flags of train.py]`: print the plan, and every value."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu", default="")
    parser.add_argument("--json", action="store_true")
    said, argv = parser.parse_known_args()
    try:
        cfg = parse(argv, prog="configs.py [--gpu NAME] [--json]")
        name = said.gpu or ("" if argv[0].startswith("tiny") or cfg.device == "cpu" else "H100")
        need(name in GPUS or not name, f"no GPU {name!r}{nearest(name, list(GPUS))}", "--gpu " + ", ".join(GPUS))
        world = cfg.ranks or int(os.environ.get("WORLD_SIZE", 1))
        known = next((s for k, s in KNOWN.items() if k in argv[0]), None)
        if known and cfg.model == PRESETS[argv[0]].model and not os.path.isdir(cfg.model):
            policy = replace(known, name=f"{known.name} by the preset's name; --model PATH reads yours")
        else:
            policy = read_shape(cfg.model)
        critic = read_shape(cfg.critic_model) if cfg.critic_model else policy
        case = case_of(cfg, world, (policy, critic), GPUS.get(name), local=min(world, NODE), problems=count_rows(cfg.data))
        plan = sections(case)
    except UserError as e:
        sys.exit(f"configs.py: {e}")
    values = dataclasses.asdict(cfg)
    if said.json:
        numbers = {"preset": argv[0], "gpu": name, **as_dict(plan), "verdict": verdict(case), "config": values}
        print(json.dumps(numbers, indent=1))
        return
    print(f"{argv[0]}, layout {cfg.layout}, on {f'{world} × {name}' if name else _some(world, 'CPU rank')}")
    print(*lines(plan), "", textwrap.fill(verdict(case), 80), "", "VALUES", sep="\n")
    print(textwrap.fill("  ".join(f"{k}={v}" for k, v in values.items()), 78, initial_indent="  ", subsequent_indent="  "))


if __name__ == "__main__":
    main()
