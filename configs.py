"""Every knob, its presets and layouts.

One frozen dataclass is the configuration and the command line: `train.py PRESET --flag value` (the comment beside a
field is its help). What can be derived is a property, never a second knob; `python configs.py PRESET` prints the plan.
A flag beats the layout, which beats the preset, which beats the defaults.

The `orz-*` numbers are Open-Reasoner-Zero's (arXiv 2503.24290 and its playground files); what they call "nodes" are
GPUs, called ranks here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Config:
    """All of a run. Counts are in prompts, samples, tokens or updates, as their names say."""

    # --- what is trained, on what
    algo: Literal["ppo", "grpo"] = "ppo"  # ppo has a critic; grpo compares the samples of one prompt
    model: str = ""  # Hugging Face folder of the base model (config, tokenizer, safetensors)
    critic_model: str = ""  # Hugging Face folder the critic starts from; empty: the policy's
    data: tuple[str, ...] = ()  # training problems: .json, .jsonl or .parquet files
    data_weights: tuple[float, ...] = ()  # how often each file's problems come in an epoch; empty: once
    eval_data: tuple[str, ...] = ()  # held-out problems, one set a file
    template: str = "orz"  # prompt: orz, plain, chat (the tokenizer's own), or a text file with {problem}
    reward: str = "math"  # of rows that don't name theirs: math, choice, exact; or for all your own path/to/file.py:function
    seed: int = 0  # the only source of randomness
    out: str = ""  # the run's folder; empty: runs/PRESET

    # --- length of the run: one of the three; a step is one rollout plus its updates
    steps: int = 0  # steps in all; 0: not given
    epochs: int = 0  # passes over the prompts; 0: not given
    total_episodes: int = 0  # prompt-response pairs in all; 0: not given
    eval_every: int = 10  # steps between evaluations (also at step 0 and at the end); 0: never
    save_every: int = 50  # steps between checkpoints (also at the end); 0: only at the end
    resume: str = "auto"  # auto: continue what is in --out; never: start in an empty folder; or a checkpoint's folder

    # --- the batch
    prompts_per_step: int = 128  # prompts sampled each step
    samples_per_prompt: int = 64  # responses to each prompt
    max_prompt_len: int = 2048  # tokens; longer prompts are dropped when the data is loaded
    max_response_len: int = 8000  # tokens
    max_model_len: int = 0  # tokens of prompt and response together; 0: the sum of the two
    resample_rounds: int = 0  # rounds in which other prompts replace those whose samples all score the same (grpo: DAPO)
    pack_len: int = 16384  # tokens that one rank's forward pass sees at once
    policy_updates: int = 1  # optimizer steps on the policy in a step, each on its part of the samples
    critic_updates: int = 12  # optimizer steps on the critic in a step, each on its part of the samples

    # --- sampling and grading
    engine: Literal["auto", "torch", "vllm"] = "auto"  # auto: vllm on CUDA, torch on a CPU
    temperature: float = 1.0  # divides the logits, in the trainer as in the engine
    stop: tuple[str, ...] = ("User:", "Human:", "Assistant:", "</answer>")  # strings that end a response
    engine_share: float = 0.7  # share of the device's memory that the engine may take while it is awake
    max_num_seqs: int = 512  # responses that one engine decodes at once
    tp: int = 1  # ranks that share one engine (tensor parallel; vllm only)
    eval_samples: tuple[int, ...] = (1,)  # responses to each held-out problem; one number for all sets, or one a set
    eval_temperature: tuple[float, ...] = (1.0,)  # 0: greedy; one for all sets, or one a set
    eval_response_len: int = 0  # tokens of a response in evaluation; 0: --max_response_len
    grade_workers: int = 1  # grading processes beside each rank
    grade_deadline: float = 5.0  # seconds of work that one answer may cost
    selfcheck: bool = True  # before the first step: does vllm sample from the very policy that is trained?

    # --- optimizers: AdamW with fp32 masters and state
    policy_lr: float = 1e-6  # learning rate after warm-up
    critic_lr: float = 5e-6  # learning rate after warm-up
    warmup_updates: int = 50  # updates of linear warm-up; the first one already moves
    lr_decay: Literal["constant", "linear"] = "constant"  # linear: to --lr_end at the last step
    lr_end: float = 0.0  # both learning rates at the last step, where they decay
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's decay rates of its first and second moments
    weight_decay: float = 0.0  # AdamW's, times the learning rate an update
    grad_clip: float = 1.0  # global gradient norm

    # --- the loss
    gamma: float = 1.0  # discount (ppo)
    lam: float = 1.0  # GAE's lambda (ppo)
    clip_low: float = 0.2  # the ratio is clipped at 1 - clip_low
    clip_high: float = 0.2  # and at 1 + clip_high
    value_clip: float | None = 0.2  # the critic's clip range; None: plain squared error, as in the paper
    freeze_policy_steps: int = 0  # first steps, which train the critic alone
    kl_coef: float = 0.0  # 0: no reference model is loaded
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # of KL(policy || ref), per token
    kl_in: Literal["loss", "reward"] = "loss"  # where the KL term goes (reward: ppo only)
    ref_refresh: bool = False  # the reference becomes the policy at each epoch's end
    entropy_coef: float = 0.0  # entropy bonus in the policy's loss
    tis_clip: float | None = 2.0  # cap of the weight that corrects engine-trainer mismatch; None: no correction
    advantage: Literal["group_mean_std", "group_mean", "group_mean_whiten", "leave_one_out"] = "group_mean_std"  # grpo
    ratio: Literal["token", "sequence", "clipped"] = "token"  # sequence: GSPO; clipped: CISPO (grpo)
    aggregation: Literal["token", "response", "max_len"] = "token"  # the loss is a mean over these (grpo)
    overlong_buffer: int = 0  # last tokens before --max_response_len over which the reward falls by up to 1 (DAPO)
    mask_truncated: bool = False  # responses cut by length don't enter the loss

    # --- where and how it runs
    layout: Literal["any", "debug", "production"] = "any"  # debug: 8 ranks; production: 32; any: what is there
    ranks: int = 0  # ranks that torchrun must have started; 0: any number
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of compute and gathers; auto: bfloat16 on CUDA
    shard_ranks: int = 0  # shard within groups of so many ranks, replicate across them; 0: shard over all
    checkpoint_activations: bool = True  # recompute each layer in the backward pass
    offload: bool = True  # trainer state goes to the host while the engine is awake (CUDA)
    keep: int = 2  # newest checkpoints kept
    keep_best: str = "auto"  # metric whose highest checkpoint is kept too; auto: mean of all eval/*/avg@k; empty: none
    grace: float = 25.0  # seconds to save and leave after SIGTERM, SIGUSR1 or ctrl-C; torchrun itself gives 30
    stall_limit: float = 3600.0  # seconds that one phase may take before every rank prints its stack and ends
    go: bool = False  # train although the first responses all score 0, or most are cut by length
    max_logp_gap: float = 0.1  # mean |engine - trainer| log-prob, in nats, that stops the run
    verbose: bool = False  # show the memory ledger at each step, and what vllm says when it starts

    def __post_init__(self) -> None:
        """Raises UserError, in one line, for what can't work together."""
        for name in COUNTS:
            need(getattr(self, name) >= 1, f"--{name} is {getattr(self, name)}", f"--{name} 1 or more")
        need(self.pack_len >= self.model_len, f"--pack_len {self.pack_len} is smaller than a prompt plus its response "
             f"({self.max_prompt_len} + {self.max_response_len} tokens)",
             f"--pack_len {self.model_len}, or a smaller --max_prompt_len or --max_response_len")
        many, few = max(self.policy_updates, self.critic_updates), min(self.policy_updates, self.critic_updates)
        need(self.algo == "grpo" or many % few == 0, f"--policy_updates {self.policy_updates} and --critic_updates "
             f"{self.critic_updates} cut a step's samples into parts that don't nest", f"a multiple of {few} for {many}")
        need(self.temperature > 0, f"--temperature is {self.temperature}", "more than 0: training samples")
        need(self.algo == "ppo" or self.samples_per_prompt > 1, "--samples_per_prompt is 1, and grpo compares the "
             "samples of one prompt", "--samples_per_prompt 2 or more, or --algo ppo")
        need(self.algo == "ppo" or self.kl_in == "loss", "--kl_in reward needs per-token rewards, which grpo lacks",
             "--kl_in loss")
        need(not self.resample_rounds or self.algo == "grpo", "--resample_rounds looks for groups with something to compare, "
             "and ppo compares with its critic", "--resample_rounds 0, or --algo grpo")
        need(self.overlong_buffer < self.max_response_len, f"--overlong_buffer {self.overlong_buffer} is all of a response",
             f"less than --max_response_len {self.max_response_len}")
        for name, files, few in (("data_weights", self.data, 0), ("eval_samples", self.eval_data, 1),
                                 ("eval_temperature", self.eval_data, 1)):
            given = len(getattr(self, name))
            need(given in (few, len(files)), f"--{name} has {given} values for {len(files)} files",
                 f"one a file, or {('none', 'one')[few]}")
        need(min(self.data_weights, default=1) > 0 and min(self.eval_samples) > 0, "a weight or a number of samples below 1",
             "--data_weights over 0, --eval_samples 1 or more")
        need(self.parts <= self.samples_per_step, f"{self.parts} updates a step, but only {self.samples_per_step} "
             "samples", "fewer --critic_updates or --policy_updates, or more samples")

    @property
    def model_len(self) -> int:
        """Longest prompt and response together, in tokens."""
        both = self.max_prompt_len + self.max_response_len
        return min(both, self.max_model_len) if self.max_model_len else both

    @property
    def engine_len(self) -> int:
        """Longest prompt and response that the engine may meet: an evaluation may be longer than what is trained on."""
        return max(self.model_len, self.max_prompt_len + self.eval_response_len if self.eval_response_len else 0)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def parts(self) -> int:
        """Into how many parts a step's samples are cut: one for each update of whoever takes more of them."""
        return max(self.policy_updates, self.critic_updates) if self.algo == "ppo" else self.policy_updates

    def with_steps(self, prompts: int) -> Config:
        """This config with its length in steps, whichever of the three was given. `prompts`: how many were loaded."""
        given = [n for n in ("steps", "epochs", "total_episodes") if getattr(self, n)]
        need(len(given) == 1, f"the length of the run is given {len(given)} times ({', '.join(given) or 'not at all'})",
             "one of --steps, --epochs, --total_episodes")
        episodes = self.total_episodes or self.epochs * prompts * self.samples_per_prompt
        return self if self.steps else replace(self, steps=-(-episodes // self.samples_per_step), epochs=0,
                                               total_episodes=0)

    def lr(self, who: Literal["policy", "critic"], step: int, update: int) -> float:
        """Learning rate of the `update`-th (from 0) optimizer step of `step`: a function of the counts alone, so that a
        resumed run needs no scheduler's state. ORZ-32B's annealing is lr_decay="linear", lr_end=3e-7."""
        base, per_step = getattr(self, f"{who}_lr"), getattr(self, f"{who}_updates")
        first = self.freeze_policy_steps if who == "policy" else 0
        done = (step - first) * per_step + update
        if done < self.warmup_updates:
            return base * (done + 1) / self.warmup_updates
        if self.lr_decay == "constant":
            return base
        left = max((self.steps - first) * per_step - self.warmup_updates, 1)
        return base + (self.lr_end - base) * min(1.0, (done + 1 - self.warmup_updates) / left)


COUNTS = ("prompts_per_step", "samples_per_prompt", "policy_updates", "critic_updates", "max_prompt_len",
          "max_response_len", "pack_len", "tp", "max_num_seqs", "grade_workers", "keep")


class UserError(ValueError):
    """A user's mistake: one line that says what was found and what is needed. Printed without a traceback."""


def need(ok: bool, found: str, fix: str) -> None:
    """Raise UserError in the house's one-line form unless ok."""
    if not ok:
        raise UserError(f"{found}; needed: {fix}")


ORZ = Config(epochs=20, max_model_len=8192, ref_refresh=True, eval_samples=(16,))
ORZ_SMALL = replace(ORZ, pack_len=10048, engine_share=0.75)
GRPO = replace(ORZ, algo="grpo", engine_share=0.75, critic_updates=1)
TINY = Config(
    model="runs/tiny-base", data=("runs/tiny-base/train.jsonl",), eval_data=("runs/tiny-base/eval.jsonl",),
    template="plain", stop=("</answer>",), steps=24, eval_every=12, save_every=12, prompts_per_step=32,
    samples_per_prompt=8, max_prompt_len=16, max_response_len=48, pack_len=4096, critic_updates=2, policy_lr=3e-4,
    critic_lr=5e-4, warmup_updates=2, lr_decay="linear", betas=(0.9, 0.99), checkpoint_activations=False, max_num_seqs=256)

PRESETS: dict[str, Config] = {
    "tiny-ppo": TINY,
    "tiny-grpo": replace(TINY, algo="grpo", critic_updates=1),
    "orz-0.5b": ORZ_SMALL,
    "orz-0.5b-1gpu": ORZ_SMALL,
    "orz-1.5b": ORZ_SMALL,
    "orz-7b": ORZ,
    "orz-32b": replace(ORZ, tp=4, max_response_len=16384, max_model_len=0, pack_len=18432, eval_response_len=32768),
    "orz-7b-grpo": replace(GRPO, advantage="group_mean_whiten"),
    "dapo-7b": replace(GRPO, clip_high=0.28, resample_rounds=4, overlong_buffer=1600),
    "dr-grpo-7b": replace(GRPO, advantage="group_mean", aggregation="max_len"),
    "rloo-7b": replace(GRPO, advantage="leave_one_out"),
    "reinforce++-7b": replace(GRPO, advantage="group_mean_whiten"),
    "gspo-7b": replace(GRPO, ratio="sequence", aggregation="response", clip_low=3e-4, clip_high=4e-4, policy_updates=4),
    "cispo-7b": replace(GRPO, ratio="clipped", policy_updates=4),
    "open-r1-7b-grpo": replace(GRPO, template="chat", samples_per_prompt=16, aggregation="response", epochs=1,
                               eval_samples=(4,)),
    "rlvr-8b": replace(ORZ, template="chat", kl_coef=0.05, critic_updates=4, policy_updates=4, epochs=0,
                       total_episodes=10_000_000, samples_per_prompt=4, max_response_len=2048, max_model_len=0,
                       ref_refresh=False, eval_samples=(1,)),
}
LAYOUTS: dict[str, dict] = {
    "any": {},
    "debug": dict(ranks=8, prompts_per_step=16, samples_per_prompt=2, critic_updates=1, engine_share=0.5),
    "production": dict(ranks=32, prompts_per_step=128, samples_per_prompt=64, critic_updates=12, engine_share=0.7),
}
NODE = 8  # ranks on one machine, in the layouts and in the commands that errors suggest


# What a resumed run may change: none of it enters the maths of a step. Data and template are held to by their problems.
MAY_CHANGE = {
    "out", "resume", "data", "data_weights", "template", "steps", "epochs", "total_episodes", "eval_data", "eval_every",
    "eval_samples", "eval_temperature", "eval_response_len", "save_every", "keep", "keep_best", "grace", "stall_limit",
    "max_logp_gap", "critic_model", "engine", "engine_share", "max_num_seqs", "tp", "grade_workers", "grade_deadline",
    "layout", "ranks", "device", "dtype", "shard_ranks", "checkpoint_activations", "offload", "pack_len",
    "selfcheck", "verbose", "go"}


def changed(old: dict, new: dict) -> list[str]:
    """`field: old -> new` of each field that makes `new` (as dataclasses.asdict gives it) another algorithm than `old`."""
    free = MAY_CHANGE - ({"steps"} if new["lr_decay"] != "constant" else set())
    if old.get("layout") != new["layout"]:
        free = free | {k for values in LAYOUTS.values() for k in values}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in new.items()}  # as JSON has it
    return [f"{k}: {old[k]} -> {v}" for k, v in plain.items() if k not in free and k in old and old[k] != v]


def nearest(word: str, choices: Sequence[str]) -> str:
    """`word`'s nearest neighbour among choices as ` (did you mean X?)`, or nothing."""
    close = difflib.get_close_matches(word, choices, 1, 0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def layout_of(argv: Sequence[str]) -> str:
    """The layout that the command line or, as Open-Reasoner-Zero's users type it, DEBUG_MODE asks for."""
    debug = os.environ.get("DEBUG_MODE", "").lower()
    need(debug in ("", "true", "false", "1", "0"), f"the environment says DEBUG_MODE={debug}", "True or False")
    name = "debug" if debug in ("true", "1") else "any"
    for i, a in enumerate(argv):
        if a.startswith("--layout"):
            name = a.partition("=")[2] or (argv[i + 1] if i + 1 < len(argv) else "")
    need(name in LAYOUTS, f"no layout {name!r}{nearest(name, list(LAYOUTS))}", "--layout " + ", ".join(LAYOUTS))
    return name


def help_text(default: Config, prog: str, width: int = 80) -> str:
    """Every flag in its group, with what it takes, its meaning and `default`'s value: the dataclass's own source."""
    kinds = {"str": "TEXT", "int": "N", "float": "X", "float | None": "X|None", "bool": "", "tuple[str, ...]": "TEXT …",
             "tuple[int, ...]": "N …", "tuple[float, ...]": "X …", "tuple[float, float]": "X X"}
    lines = textwrap.wrap(f"presets: {', '.join(PRESETS)}", width, subsequent_indent="  ")
    lines = [f"usage: {prog} PRESET [--flag value …]", *lines, "in brackets: the preset's values"]
    for line in inspect.getsource(Config).splitlines():
        if group := re.match(r"    # --- (.+)", line):
            lines += ["", group[1]]
        elif field := re.match(r"    (\w+): (.+?) = .*?  # (.+)", line):
            name, kind, meaning = field.groups()
            value = getattr(default, name)
            choices = " | ".join(re.findall('"(.+?)"', kind))
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            left = f"  --{name} {kinds.get(kind, '')}".rstrip() + (f", --no-{name}" if kind == "bool" else "")
            text = f"{meaning}{': ' if choices else ''}{choices} [{shown or 'none'}]"
            rows = textwrap.wrap(text, width - 30, break_on_hyphens=False)
            lines += [left, *(" " * 30 + r for r in rows)] if len(left) > 28 else [
                f"{left:30}{rows[0]}", *(" " * 30 + r for r in rows[1:])]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None, prog: str = "train.py") -> Config:
    """Config of `PRESET [--flag value …]`. Raises UserError, one line, for what can't be read; --help exits 0."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv.pop(0) if argv and not argv[0].startswith("-") else None
    if {"-h", "--help"} & set(argv) and name in (None, *PRESETS):
        print(help_text(PRESETS[name or "orz-7b"], prog))
        sys.exit(0)
    need(name is not None, "no preset given", f"{prog} PRESET, one of: {', '.join(PRESETS)}")
    need(name in PRESETS, f"no preset {name!r}{nearest(name, list(PRESETS))}", ", ".join(PRESETS))
    fields = [f.name for f in dataclasses.fields(Config)]
    given = [re.sub(r"^no_", "", a[2:].partition("=")[0].replace("-", "_")) for a in argv if re.match("--[a-zA-Z]", a)]
    for g in given:
        need(g in fields, f"no flag --{g}{nearest('--' + g, ['--' + f for f in fields])}",
             f"a flag that {prog} --help lists")
    layout = layout_of(argv)
    base = {"out": f"runs/{name}", **LAYOUTS[layout], "layout": layout}
    if {"steps", "epochs", "total_episodes"} & set(given):
        base |= dict(steps=0, epochs=0, total_episodes=0)
    # The preset is not validated before the flags are in: --pack_len alone may make it whole.
    default = object.__new__(Config)
    for f in fields:
        object.__setattr__(default, f, base.get(f, getattr(PRESETS[name], f)))
    import tyro  # after --help, which doesn't wait for it

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(Config, default=default, args=argv, prog=f"{prog} {name}")
    except SystemExit:
        words = re.sub(r"[─-╿\s]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())).strip()
        words = words.partition("For full helptext")[0].removeprefix("Value error Error parsing Config: ").strip()
        raise UserError(f"{words}; see {prog} {name} --help") from None


def check_ranks(cfg: Config, world: int) -> None:
    """Raises UserError unless `world` ranks are what the layout, tp and shard_ranks can use."""
    nodes = f"--nnodes {cfg.ranks // NODE} --nproc-per-node {NODE}" if cfg.ranks > NODE else f"--nproc-per-node {cfg.ranks}"
    need(cfg.ranks in (0, world), f"--layout {cfg.layout} is for {cfg.ranks} ranks, and {world} were started",
         f"torchrun {nodes} train.py …, or --layout any")
    need(world % cfg.tp == 0, f"{world} ranks don't divide into engines of --tp {cfg.tp}",
         f"a multiple of {cfg.tp} ranks, or --tp 1")
    need(world % (cfg.shard_ranks or 1) == 0, f"{world} ranks don't divide into groups of --shard_ranks "
         f"{cfg.shard_ranks}", "a divisor of the number of ranks, or 0")


if __name__ == "__main__":
    from plan import main  # the arithmetic is there

    main()
