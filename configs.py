"""The settings of a run (Config), the presets and the layouts.

A preset is a named set of settings. A layout sets the number of ranks; the layout `debug` also gives the
`orz-*` presets a small batch.

Config is also the command line: `train.py PRESET --flag value`. A flag beats the layout, the layout beats the
preset, the preset beats the default.

The values of the `orz-*` presets are those of Open-Reasoner-Zero (ORZ, arXiv 2503.24290). In ORZ's code, a
node is one GPU. In torz, a node is a machine."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import inspect
import io
import math
import os
import re
import resource
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

from guard.files import if_there, is_file, names_in
from guard.messages import GIB, UserError, explained, require, user_errors

Say = Callable[[str], None]  # prints or logs a line of text
ROOT = str(Path(__file__).resolve().parent)  # the project's folder
MODULES = "train rollout ppo grpo dist ckpt data configs model reward engine log".split()
# All source files of torz, for the hash of its code. Other files in ROOT, such as a reward function, are the
# user's.
CODE = [Path(ROOT, f"{name}.py") for name in sorted(MODULES)]
for folder in ("engines", "grading", "guard", "layers", "tools"):
    CODE += sorted(Path(ROOT, folder).glob("*.py"))
# Checked here, because every command imports this file before any third-party package.
if importlib.util.find_spec("tyro") is None:
    sys.exit(f"{sys.executable} has no tyro; needed: source {ROOT}/.venv/bin/activate")


class Range(NamedTuple):
    """Allowed values of a setting: from `low` to `high`, without `low` if `above` is true."""

    low: float
    high: float = math.inf
    above: bool = False

    def has(self, x: float) -> bool:
        return (
            math.isfinite(x) and self.low <= x <= self.high and not (self.above and x == self.low)
        )

    def __str__(self) -> str:
        top = f" to {self.high:g}" if self.high < math.inf else ""
        return f"{'above' if self.above else 'from'} {self.low:g}{top}"


# Types of Config's fields. Config raises UserError for a value outside its field's Range.
Count = Annotated[int, Range(1)]
Amount = Annotated[int, Range(0)]
Positive = Annotated[float, Range(1e-30, 1e30)]  # fp32 has numbers from 1e-38 to 3e38
NotNegative = Annotated[float, Range(0, 1e30)]
Share = Annotated[float, Range(0, 1)]
Part = Annotated[float, Range(0, 1, above=True)]  # as Share, but not 0
Beta = Annotated[float, Range(0, 0.999999)]  # AdamW refuses 1
Seconds = Annotated[float, Range(0, 1e7, above=True)]  # the timers of the system have limits
# vLLM's lowest temperature above 0. With a much lower one, logits in fp32 become infinite.
COLDEST = 0.01
Advantage = Literal[
    "group_mean_std",
    "group_mean",
    "group_mean_whiten",
    "group_mean_batch_std",
    "group_mean_over_mean",
    "group_each_std",
    "leave_one_out",
    "return_whiten",
]
Mismatch = Literal[
    "none",
    "token-truncate",
    "token-mask",
    "sequence-truncate",
    "sequence-mask",
    "geometric-truncate",
    "geometric-mask",
    "negative-mask",
]
Ratio = Literal["token", "sequence", "clipped", "binary_tv", "binary_kl"]
LENGTHS = ("steps", "epochs", "total_episodes")  # the run's length is given by one of these flags


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    # fmt: off
    # --- changed in most runs
    model: str = ""  # base model: a Hugging Face folder, or an id of the Hub
    data: tuple[str, ...] = ()  # training problems: .json, .jsonl, .parquet, .arrow, or OWNER/NAME:FILE
    eval_data: tuple[str, ...] = ()  # files of held-out problems; each file is one evaluation set
    reward: tuple[str, ...] = ("math",)  # added: math, choice, exact, FILE.py:FUNCTION, …; math=2: weight 2
    steps: Amount = 0  # number of steps; 0: given by --epochs or --total_episodes
    out: str = ""  # the run's folder; empty: runs/PRESET
    prompts_per_step: Count = 128  # prompts in each step
    samples_per_prompt: Count = 64  # responses to each prompt
    max_response_len: Count = 8000  # maximum tokens of a response
    policy_lr: Part = 1e-6  # learning rate after warm-up
    kl_coef: NotNegative = 0.0  # weight of the KL term; 0: no KL term
    ranks: Amount = 0  # number of ranks; 0: those that torchrun started, else 1; more than 8 need torchrun

    # --- the algorithm, models and data
    algo: Literal["ppo", "grpo"] = "ppo"  # ppo trains a critic; grpo compares a prompt's samples
    critic_model: str = ""  # the critic's base model, a folder or an id; empty: --model
    ref_model: str = ""  # the KL term's reference model, a folder or an id; empty: the run's first policy
    lora: Amount = 0  # train adapters of this rank (LoRA) over a frozen model; 0: train all weights
    lora_alpha: Positive = 32.0  # adapters are multiplied by lora_alpha / lora
    template: str = "orz"  # prompt template: orz, plain, chat (the tokenizer's), or a file with {problem}
    system_prompt: str = ""  # with --template chat: system prompt for rows without one
    template_args: tuple[str, ...] = ()  # with --template chat: arguments such as enable_thinking=false
    date: str = "2024-07-26"  # date that a chat template prints instead of today's
    extractor: tuple[str, ...] = ("orz",)  # where the answer is: orz, boxed, …; DATASET=NAME for one data set
    env: str = ""  # environment FILE.py:FUNCTION or :CLASS, called after each turn; empty: one turn
    max_turns: Count = 8  # with --env: maximum number of the policy's turns in a response
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0  # the only source of randomness

    # --- length of the run: one of steps, epochs, total_episodes
    epochs: Amount = 0  # passes over the prompts; 0: not given
    total_episodes: Amount = 0  # length of the run, in responses; 0: not given
    eval_every: Amount = 10  # steps between evaluations; 0: never
    save_every: Amount = 50  # steps between checkpoints; 0: only at the end
    resume: str = "auto"  # auto: continue --out; PATH: checkpoint for a new --out; never: --out must be empty
    start_from: str = ""  # begin with another run's weights: RUN (newest checkpoint), RUN/STEP or RUN/best

    # --- the batch
    max_prompt_len: Count = 2048  # maximum tokens of a prompt; longer ones are dropped
    max_model_len: Amount = 0  # maximum tokens of prompt + response; 0: --max_prompt_len + --max_response_len
    skip_solved: Share = 0.0  # skip a prompt in later steps if this share of its responses was right; 0: off
    resample_rounds: Amount = 0  # how often a step may replace prompts whose first rewards are equal (DAPO)
    round_len: Amount = 0  # sample in rounds of this many tokens; ranks are balanced between rounds; 0: off
    carry: Annotated[float, Range(0, 8)] = 0.0  # partial rollouts: extra prompts, as a share; 0: off
    max_staleness: Count = 2  # with --carry: a step waits for responses that began this many steps earlier
    pack_len: Amount = 0  # maximum tokens of a pack, the micro-batch of one forward pass; 0: by the plan
    policy_updates: Count = 1  # policy updates in a pass over a step's samples
    critic_updates: Count = 12  # critic updates in a pass over a step's samples
    passes_per_step: Count = 1  # passes over a step's samples (PPO's epochs)

    # --- sampling and grading
    engine: Literal["auto", "torch", "vllm"] = "auto"  # auto: CPU: torch; CUDA: as planned, else vllm
    temperature: Annotated[float, Range(COLDEST)] = 1.0  # of sampling, and of the log-probs in the trainer
    stop: tuple[str, ...] = ("User:", "Human:", "Assistant:", "</answer>")  # strings that end a response
    engine_share: Part = 0.7  # fraction of GPU memory that the engine may use while it samples
    max_num_seqs: Count = 512  # maximum responses that one engine decodes at once
    tp: Count = 1  # ranks that share one engine (tensor parallel; vllm only)
    eval_samples: tuple[Count, ...] = (1,)  # responses to each held-out problem; one number, or one per set
    eval_temperature: tuple[NotNegative, ...] = (1.0,)  # 0: greedy; one number, or one per set
    eval_top_p: Part = 1.0  # top-p (nucleus sampling) in evaluation; 1: all tokens
    eval_response_len: Amount = 0  # maximum tokens of a response in evaluation; 0: --max_response_len
    grade_workers: Count = 1  # grading processes of each rank; as many more for each function
    grade_deadline: Seconds = 5.0  # CPU seconds to grade one answer
    selfcheck: bool = True  # before the first step, compare vllm's log-probs with the trainer's

    # --- optimizers: AdamW with fp32 weights and state
    critic_lr: Part = 5e-6  # learning rate after warm-up
    warmup_updates: NotNegative = 50  # linear warm-up, in updates; below 1: fraction of the run's updates
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"  # schedule after warm-up
    lr_end: NotNegative = 0.0  # learning rate after the last update, with --lr_decay linear or cosine
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # AdamW's beta1 and beta2
    weight_decay: NotNegative = 0.0  # AdamW's weight decay
    adam_eps: Positive = 1e-8  # AdamW's epsilon
    grad_clip: Positive = 1.0  # maximum global gradient norm

    # --- the loss
    gamma: Share = 1.0  # discount (ppo, and --advantage return_whiten)
    lam: Share = 1.0  # GAE's lambda (ppo, and --advantage return_whiten)
    clip_low: Share = 0.2  # the ratio is clipped to at least 1 - clip_low; DPPO: bound for advantages < 0
    clip_high: NotNegative = 0.2  # the ratio is clipped to at most 1 + clip_high; DPPO: bound for others
    value_clip: Positive | None = 0.2  # clip range of the value loss; None: plain squared error
    freeze_policy_steps: Amount = 0  # number of first steps that train only the critic
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # estimator of KL(policy || ref), in metric and reward
    kl_in: Literal["loss", "reward"] = "loss"  # where the KL term is added; reward needs ppo or return_whiten
    ref_refresh: bool = False  # after each epoch, copy the policy to the reference; not with --ref_model
    entropy_coef: NotNegative = 0.0  # weight of an entropy bonus
    mismatch: Mismatch = "token-truncate"  # importance weights p_trainer / p_engine in the loss; none: off
    mismatch_bounds: tuple[NotNegative, NotNegative] = (0.0, 2.0)  # outside: clamped (…-truncate), 0 (…-mask)
    advantage: Advantage = "group_mean_std"  # how rewards become advantages (grpo)
    ratio: Ratio = "token"  # sequence: GSPO; clipped: CISPO; binary_…: DPPO (grpo)
    aggregation: Literal["token", "response", "max_len", "prompt"] = "token"  # average of token losses (grpo)
    overlong_buffer: Amount = 0  # length penalty from this many tokens before the limit; 0: off (DAPO)
    nonstop_penalty: NotNegative = 0.0  # subtracted from rewards of responses cut by length
    mask_truncated: bool = False  # exclude responses cut by length from the loss
    drop_uniform: bool = False  # leave out of the loss: prompts whose responses have equal scores (grpo)

    # --- where and how it runs
    layout: Literal["any", "debug", "production"] = "any"  # sets --ranks: 8 (debug), by preset (production)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is a GPU, else cpu
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # compute dtype; auto: bf16 on CUDA, fp32 on a CPU
    shard_ranks: Amount | Literal["auto"] = 0  # ranks per model copy; 0: all; auto: one node if memory allows
    network: NotNegative = 0.0  # Gb/s between nodes, for estimates of tools/plan.py; 0: usual for this GPU
    deterministic: bool = False  # bitwise-reproducible gradients on a GPU; slower
    recompute: str = "auto"  # activation checkpointing of no layer (none), all (layers), N, or enough (auto)
    offload: Literal["auto", "on", "off"] = "auto"  # on: unused weights and optimizer state are on the host
    keep: Count = 2  # number of newest checkpoints to keep
    keep_best: str = "auto"  # keep the best checkpoint by this metric; auto: mean eval/*/avg@k; empty: none
    save_samples: Literal["all", "some"] = "some"  # some: of 8 prompts, once in --eval_every steps
    save_logps: bool = False  # write token ids and the engine's log-probs (4 decimals) to samples/ and eval/
    profile: Amount | None = None  # run this step under torch's profiler; writes a trace to --out; None: off
    track: tuple[Literal["wandb"], ...] = ()  # wandb: send metrics and samples to Weights & Biases
    grace: Seconds = 25.0  # seconds to save and exit after a signal; torchrun kills after 30
    stall_limit: Seconds = 3600.0  # maximum seconds without progress of any rank; then all ranks exit
    go: bool = False  # start even if the gold answers or the first responses fail their check
    max_logp_gap: Positive = 0.1  # stop if the mean log-prob gap |engine - trainer| exceeds this (nats)
    # fmt: on

    def __post_init__(self) -> None:
        """Raises UserError for a value out of its range and for values that can't work together."""
        for name, allowed in ranges().items():
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else [value]
            for x in values:
                ok = x in (None, "auto") or allowed.has(x)  # some fields also allow None or "auto"
                require(ok, f"--{name} is {x}", f"--{name} {allowed}")
        self._check_batch()
        self._check_method()
        require(
            {"", r"\n"}.isdisjoint(self.stop),  # r"\n": two characters, a likely mistake
            r"--stop has an empty text, or a backslash and an n",
            r"texts that a response may end with; in bash, $'\n' is a line break",
        )
        for name in ("system_prompt", "template_args"):
            require(
                not getattr(self, name) or self.template == "chat",
                f"--{name} has no effect with --template {self.template}",
                f"--template chat, or an empty --{name}",
            )
        require(
            not self.start_from or self.resume in ("auto", "never"),
            f"--start_from begins a run, and --resume {self.resume} continues one",
            "only one of them",
        )
        require(
            self.recompute in ("auto", "none", "layers") or self.recompute.isdecimal(),
            f"--recompute is {self.recompute}",
            "auto, none, layers, or a number of layers",
        )
        for name in ("eval_samples", "eval_temperature"):
            given = len(getattr(self, name))
            require(
                given in (1, len(self.eval_data)),
                f"--{name} has {given} values for {len(self.eval_data)} files",
                "1 value, or one for each file",
            )

        require(
            not any(0 < t < COLDEST for t in self.eval_temperature),
            f"--eval_temperature has a number between 0 and {COLDEST}",
            f"0, or numbers from {COLDEST}",
        )

    def _check_batch(self):
        # model_len: most tokens of a prompt plus its response
        require(
            self.max_response_len < self.model_len,
            f"--max_model_len {self.max_model_len} is too small for a prompt and "
            f"--max_response_len {self.max_response_len}",
            "--max_model_len 0, or a smaller --max_response_len",
        )
        require(
            self.pack_len == 0 or self.pack_len >= self.model_len,
            f"--pack_len {self.pack_len} is smaller than a prompt plus its response "
            f"({self.max_prompt_len} + {self.max_response_len} tokens)",
            f"--pack_len {self.model_len}, smaller --max_prompt_len or --max_response_len",
        )
        least, most = sorted((self.policy_updates, self.critic_updates))
        require(
            self.algo == "grpo" or most % least == 0,
            f"--policy_updates {self.policy_updates} and "
            f"--critic_updates {self.critic_updates}: one is not a multiple of the other",
            f"a multiple of {least} instead of {most}",
        )
        # whole_prompts: all samples of a prompt are in the same update
        unit = "prompts" if self.whole_prompts else "samples"
        available = self.prompts_per_step if self.whole_prompts else self.samples_per_step
        require(
            self.minibatches <= available,
            f"{self.minibatches} updates a step, but only {available} {unit}",
            f"fewer --critic_updates or --policy_updates, or more {unit}",
        )

    def _check_method(self):
        if self.compares_samples:  # GRPO with another advantage than return_whiten
            require(
                self.samples_per_prompt > 1,
                f"--samples_per_prompt is 1, and --advantage "
                f"{self.advantage} compares the samples of one prompt",
                "--samples_per_prompt 2 or more, --advantage return_whiten, or --algo ppo",
            )
            require(
                self.kl_in == "loss",
                f"--kl_in reward needs rewards of tokens; --advantage {self.advantage} has none",
                "--kl_in loss, or --advantage return_whiten",
            )
        low, high = self.mismatch_bounds
        require(
            low <= 1 <= high,
            f"--mismatch_bounds {low:g} {high:g} leaves out 1, a ratio without mismatch",
            "LOW up to 1, and HIGH from 1",
        )
        require(
            low > 0 or self.mismatch != "negative-mask",
            "--mismatch negative-mask with the lower bound 0 masks nothing",
            "--mismatch_bounds 0.6 2",
        )
        require(
            self.overlong_buffer < self.max_response_len,
            f"--overlong_buffer {self.overlong_buffer} is not shorter than a response",
            f"less than --max_response_len {self.max_response_len}",
        )
        require(
            self.algo == "ppo"
            or self.advantage != "group_mean_over_mean"
            or not (self.overlong_buffer or self.nonstop_penalty),
            "--advantage group_mean_over_mean needs scores from 0, and a length penalty makes negative ones",
            "--overlong_buffer 0 --nonstop_penalty 0, or another --advantage",
        )
        require(
            self.compares_samples or not (self.resample_rounds or self.drop_uniform),
            "--resample_rounds and --drop_uniform compare the samples of a prompt",
            "--resample_rounds 0 --no_drop_uniform, or --algo grpo without return_whiten",
        )
        self._check_carry()

    def _check_carry(self):
        if self.carry:
            carry = f"--carry {self.carry}"
            require(
                0 < self.round_len < self.max_response_len,
                f"{carry} with --round_len {self.round_len}: no round ends before responses do",
                # 16 rounds: a sixteenth of the maximum, rounded up
                f"--round_len {-(-self.max_response_len // 16)}, or another number of tokens",
            )
            # A step trains on no more than prompts_per_step of the prompts that are due.
            require(
                self.carry <= self.max_staleness,
                f"{carry} with --max_staleness {self.max_staleness}: responses get older than that",
                f"--max_staleness {math.ceil(self.carry)}, or a smaller --carry",
            )
            require(
                not self.resample_rounds,
                f"{carry} and --resample_rounds {self.resample_rounds} can't be used together",
                "only one of them",
            )
            require(
                self.mismatch != "none",
                f"{carry} with --mismatch none: nothing corrects for tokens of older weights",
                "--mismatch token-truncate",
            )

    @property
    def folder(self) -> Path:
        """The run's folder --out, as an absolute path."""
        return Path(self.out).absolute()

    @property
    def has_ref(self) -> bool:
        """Whether the run has a reference model. With --kl_coef 0, --ref_model only adds the metric kl."""
        return self.kl_coef > 0 or self.ref_model != ""

    @property
    def models(self) -> list[str]:
        """The run's models: "policy", with PPO "critic", and with a KL term or --ref_model "ref"."""
        used = {"policy": True, "critic": self.algo == "ppo", "ref": self.has_ref}
        return [who for who in used if used[who]]

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL term is subtracted from the reward of each token."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def needs_old_logp(self) -> bool:
        """Whether a step computes the policy's log-probs in a forward pass before its first update. With a
        single update, the loss computes the same log-probs. But a KL term in the reward needs them before
        the update."""
        return self.updates_per_step > 1 or self.kl_in_reward

    @property
    def makes_ref(self) -> bool:
        """Whether the KL term's reference begins as a copy of the run's policy."""
        return self.kl_coef > 0 and not self.ref_model

    @property
    def refreshes_ref(self) -> bool:
        """Whether the policy is copied to the reference after each epoch."""
        return self.ref_refresh and self.makes_ref

    @property
    def keeps_ref(self) -> bool:
        """Whether checkpoints hold the reference's weights. They do if the reference was copied from the
        policy (--ref_refresh, --start_from), because then no model folder has its weights."""
        return self.refreshes_ref or (self.makes_ref and self.start_from != "")

    @property
    def compares_samples(self) -> bool:
        """Whether a sample's advantage depends on the other samples of its prompt."""
        return self.algo == "grpo" and self.advantage != "return_whiten"

    @property
    def whole_prompts(self) -> bool:
        """Whether all samples of a prompt are in the same update."""
        return self.algo == "grpo" and self.aggregation == "prompt"

    @property
    def model_len(self) -> int:
        """Maximum tokens of a prompt plus its response in training."""
        both = self.max_prompt_len + self.max_response_len
        return min(both, self.max_model_len or both)

    @property
    def engine_len(self) -> int:
        """Maximum tokens of a prompt plus its response in evaluation and in the engine."""
        if self.eval_response_len > self.max_response_len:
            return self.max_prompt_len + self.eval_response_len
        return self.model_len

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def extra_prompts(self) -> int:
        """Number of prompts that --carry samples in addition to the prompts that a step needs."""
        return round(self.carry * self.prompts_per_step)

    @property
    def minibatches(self) -> int:
        """Number of minibatches that a step's samples are divided into."""
        if self.algo == "ppo":
            return max(self.policy_updates, self.critic_updates)
        return self.policy_updates

    def engine_kind(self, on_gpu: bool) -> str:
        """Returns "torch" or "vllm". In a run on a GPU, the plan has replaced `auto` (tools.plan.settle)."""
        if self.engine != "auto":
            return self.engine
        return "vllm" if on_gpu else "torch"

    def torch_buffers(self, hidden: int, inner: int, vocab: int, number_bytes: int) -> float:
        """Returns the bytes that the torch engine needs on a GPU beside its weights and its cache.

        hidden, inner, vocab: sizes of the model, as in tools.plan.Shape
        number_bytes: bytes of a number in the compute dtype"""
        logits = 4 * self.max_num_seqs * vocab  # of a decoding step, in fp32
        # Copies of the logits: in the memory of the CUDA graphs, and in a step without a graph, which may be
        # of half as many responses
        of_graphs, of_step = (10, 5) if self.eval_top_p < 1 else (2, 2)
        # With rounds or an environment, a prompt may have an unfinished response or earlier turns.
        longest = self.engine_len if self.round_len or self.env else self.max_prompt_len
        # A pack of prompts holds the most activations in the MLP (fitted to what bench/nullgpu counted).
        activations = number_bytes * max(PREFILL, longest) * (4 * inner + 5 * hidden)
        # 0.35 GiB: free memory in pieces, and cuBLAS
        return of_graphs * logits + max(of_step * logits, activations) + 0.35 * GIB

    def check_length(self) -> None:
        """Raises UserError unless exactly one of --steps, --epochs and --total_episodes is given."""
        given = [name for name in LENGTHS if getattr(self, name)]
        require(
            len(given) == 1,
            f"the length of the run is given {len(given)} times "
            f"({', '.join(given) or 'not at all'})",
            "one of --steps, --epochs, --total_episodes",
        )

    def with_steps(self, prompts: int) -> Config:
        """Returns this config with --epochs or --total_episodes converted to `steps`.

        Raises UserError if not exactly one of --steps, --epochs and --total_episodes is given, if
        --freeze_policy_steps leaves no step that trains the policy, or if --profile is not the number of a
        step.

        prompts: number of prompts in an epoch"""
        self.check_length()
        episodes = self.total_episodes or self.epochs * prompts * self.samples_per_prompt
        steps = self.steps or -(-episodes // self.samples_per_step)  # rounded up
        require(
            self.freeze_policy_steps < steps,
            f"--freeze_policy_steps {self.freeze_policy_steps}: none "
            f"of the {steps} steps trains the policy",
            "a smaller number, or a longer run",
        )
        require(
            self.profile is None or self.profile < steps,
            f"--profile {self.profile} in a run of {steps} steps",
            f"--profile 0 to {steps - 1}",
        )
        return replace(self, steps=steps, epochs=0, total_episodes=0)

    def lr(self, name: Literal["policy", "critic"], step: int, update: int) -> float:
        """Returns the learning rate of update number `update` (from 0) within step number `step`. The
        policy's schedule begins after --freeze_policy_steps."""
        base = getattr(self, f"{name}_lr")
        per_step = getattr(self, f"{name}_updates") * self.passes_per_step
        # The first step that trains this model
        first = self.freeze_policy_steps if name == "policy" else 0
        done = (step - first) * per_step + update  # updates of this model before this update
        total = (self.steps - first) * per_step  # updates of this model in the run
        warmup = self.warmup_updates
        if warmup < 1:  # a fraction of the run's updates
            warmup = round(warmup * total)
        if done < warmup:
            # min: with 1.5 updates of warm-up, the second update would get 2 / 1.5 of `base`
            return base * min(1, (done + 1) / warmup)
        if self.lr_decay == "constant":
            return base
        # As in torch's LinearLR and CosineAnnealingLR, the rate reaches `lr_end` one update after the last.
        progress = (done - warmup) / (total - warmup)
        if self.lr_decay == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return base + (self.lr_end - base) * progress

    @property
    def updates_per_step(self) -> int:
        """Number of policy updates in a step. With one update, the policy's ratio is always 1."""
        return self.policy_updates * self.passes_per_step

    @property
    def clips(self) -> bool:
        """Whether --clip_low and --clip_high can have an effect."""
        return self.updates_per_step > 1 or self.ratio.startswith("binary")

    @property
    def clips_values(self) -> bool:
        """Whether --value_clip can have an effect."""
        return self.critic_updates * self.passes_per_step > 1


@functools.cache
def ranges() -> dict[str, Range]:
    """Returns a dict: field of Config -> its allowed range."""
    allowed = {}
    for name, hint in get_type_hints(Config, include_extras=True).items():
        for part in (hint, *get_args(hint)):  # a part of Count | None, or of tuple[Count, ...]
            for found in get_args(part):
                if isinstance(found, Range):
                    allowed[name] = found
    return allowed


# Open-R1's system prompt (its recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml).
OPEN_R1_SYSTEM = (
    "You are a helpful AI Assistant that provides well-reasoned and detailed "
    "responses. You first think about the reasoning process as an internal "
    "monologue and then provide the user with the answer. Respond in the following "
    "format: <think>\n...\n</think>\n<answer>\n...\n</answer>"
)
# Qwen2.5-Math's system prompt.
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
# The bases of the presets. ORZ and ORZ_SMALL are PPO.
ORZ = Config(
    model="Qwen/Qwen2.5-7B",
    epochs=20,
    max_model_len=8192,
    ref_refresh=True,
    eval_samples=(16,),
    shard_ranks="auto",
    data=("Open-Reasoner-Zero/orz_math_57k_collection:orz_math_57k_collection.json",),
)
ORZ_SMALL = replace(ORZ, model="Qwen/Qwen2.5-0.5B", engine_share=0.75)
GRPO = replace(ORZ, algo="grpo", engine_share=0.75, critic_updates=1)
TINY = Config(
    model="runs/tiny-base-0",
    data=("runs/tiny-base-0/train.jsonl",),
    eval_data=("runs/tiny-base-0/heldout.jsonl",),
    template="plain",
    stop=("</answer>",),
    steps=24,
    eval_every=12,
    save_every=12,
    prompts_per_step=32,
    samples_per_prompt=8,
    max_prompt_len=16,
    max_response_len=48,
    pack_len=4096,
    critic_updates=2,
    policy_lr=3e-4,
    critic_lr=5e-4,
    warmup_updates=2,
    lr_decay="linear",
    betas=(0.9, 0.99),
    recompute="none",
    max_num_seqs=256,
)

# docs/algorithms.md lists the departures from the papers.
PRESETS = {
    # A demo: a model of 0.4M parameters learns to add two numbers.
    "tiny-ppo": TINY,
    "tiny-grpo": replace(TINY, algo="grpo", critic_updates=1),
    # Not from a paper: GSM8K on one 24-GB GPU, in one evening.
    "gsm8k-0.5b-1gpu": replace(
        GRPO,
        model="Qwen/Qwen2.5-0.5B-Instruct",
        data=("openai/gsm8k:main/train-00000-of-00001.parquet",),
        eval_data=("openai/gsm8k:main/test-00000-of-00001.parquet",),
        template="chat",
        system_prompt=STEP_BY_STEP,
        extractor=("boxed",),
        stop=(),
        epochs=0,
        steps=234,
        prompts_per_step=64,
        samples_per_prompt=8,
        max_prompt_len=512,
        max_response_len=1024,
        max_model_len=0,
        ref_refresh=False,
        warmup_updates=10,
        eval_samples=(1,),
        eval_temperature=(0.0,),
        eval_every=25,
    ),
    # Open-Reasoner-Zero, arXiv 2503.24290: PPO with γ = λ = 1. The values of engine_share are from
    # playground/ in its repository.
    "orz-0.5b": ORZ_SMALL,
    "orz-0.5b-1gpu": ORZ_SMALL,  # --layout production sets 1 rank instead of 8 (RANKS)
    "orz-1.5b": replace(ORZ_SMALL, model="Qwen/Qwen2.5-1.5B", engine_share=0.7),
    "orz-7b": ORZ,
    "orz-32b": replace(
        ORZ,
        model="Qwen/Qwen2.5-32B",
        tp=4,
        max_response_len=16384,
        max_model_len=0,
        eval_response_len=32768,
    ),
    # The GRPO of Open-Reasoner-Zero's code.
    "orz-7b-grpo": replace(GRPO, advantage="group_mean_whiten"),
    # DAPO, arXiv 2503.14476, eq. 8 to 13 and section 4.1, for a 32B model. Weight decay and betas are verl's,
    # because the paper states none.
    "dapo-7b": replace(
        GRPO,
        data=("BytedTsinghua-SIA/DAPO-Math-17k:data/dapo-math-17k.parquet",),
        template="chat",
        extractor=("dapo",),
        reward=("math=2",),
        stop=(),
        prompts_per_step=512,
        samples_per_prompt=16,
        policy_updates=16,
        clip_high=0.28,
        resample_rounds=4,
        overlong_buffer=4096,
        max_response_len=20480,
        max_model_len=0,
        warmup_updates=320,
        betas=(0.9, 0.999),
        weight_decay=0.1,
        eval_samples=(32,),
        eval_top_p=0.7,
    ),
    # Dr. GRPO, arXiv 2503.20783: no division by length or standard deviation.
    "dr-grpo-7b": replace(GRPO, advantage="group_mean", aggregation="max_len"),
    # RLOO, arXiv 2402.14740.
    "rloo-7b": replace(GRPO, advantage="leave_one_out"),
    # REINFORCE++, arXiv 2501.03262, and its variant with a group baseline. kl_coef is our own choice.
    "reinforce++-7b": replace(
        GRPO,
        advantage="return_whiten",
        samples_per_prompt=1,
        prompts_per_step=1024,
        kl_coef=1e-3,
        kl_in="reward",
        kl_estimator="k1",
        ref_refresh=False,
    ),
    "reinforce++-baseline-7b": replace(
        GRPO, advantage="group_mean_whiten", kl_coef=1e-3, kl_estimator="k2", ref_refresh=False
    ),
    # GSPO, arXiv 2507.18071, eq. 5 to 7 and section 5.1.
    "gspo-7b": replace(
        GRPO,
        ratio="sequence",
        aggregation="response",
        clip_low=3e-4,
        clip_high=4e-4,
        policy_updates=4,
    ),
    # CISPO of MiniMax-M1, arXiv 2506.13585, eq. 4, sections 3.1 and 3.2. clip_high is ScaleRL's.
    "cispo-7b": replace(
        GRPO, ratio="clipped", policy_updates=16, clip_low=1.0, clip_high=4.0, adam_eps=1e-15
    ),
    # ScaleRL, arXiv 2510.13786, section 4 and appendix A.3. A step has 8 updates with 48 prompts each. The
    # paper calls this PPO-off-policy-8 (section 3.1).
    "scale-rl-7b": replace(
        GRPO,
        advantage="group_mean_batch_std",
        ratio="clipped",
        aggregation="prompt",
        drop_uniform=True,
        clip_low=1.0,
        clip_high=4.0,
        prompts_per_step=384,
        samples_per_prompt=16,
        policy_updates=8,
        max_response_len=14336,
        max_model_len=0,
        policy_lr=5e-7,
        warmup_updates=100,
        skip_solved=0.9,
        weight_decay=0.01,
        adam_eps=1e-15,
    ),
    # Open-R1's config_demo.yaml. Its step has 7 GPUs × a batch of 16 × 4 accumulation steps = 448 responses.
    # This preset has the same number: 28 prompts × 16 samples.
    "open-r1-1.5b-grpo": replace(
        GRPO,
        model="Qwen/Qwen2.5-1.5B-Instruct",
        data=(),
        template="chat",
        system_prompt=OPEN_R1_SYSTEM,
        extractor=("answer_tag",),
        stop=(),
        reward=("math", "format", "tags"),
        prompts_per_step=28,
        samples_per_prompt=16,
        aggregation="response",
        max_prompt_len=512,
        max_response_len=1024,
        max_model_len=0,
        policy_lr=2e-5,
        lr_decay="cosine",
        warmup_updates=0.1,
        betas=(0.9, 0.999),
        epochs=1,
        eval_samples=(4,),
    ),
    # Tülu 3's RLVR with PPO, arXiv 2411.15124, table 21. total_episodes is from Open-Instruct's
    # docs/tulu3.md. Weight decay and betas are torch's defaults, as in Open-Instruct's code.
    "rlvr-8b": replace(
        ORZ,
        model="allenai/Llama-3.1-Tulu-3-8B-DPO",
        data=(),
        template="chat",
        extractor=("boxed", "gsm8k=last_number"),
        reward=("math=10",),
        stop=(),
        nonstop_penalty=10.0,
        kl_coef=0.05,
        kl_in="reward",
        kl_estimator="k1",
        ref_refresh=False,
        lam=0.95,
        prompts_per_step=224,
        samples_per_prompt=1,
        critic_updates=1,
        passes_per_step=4,
        max_response_len=2048,
        max_model_len=0,
        policy_lr=3e-7,
        critic_lr=3e-7,
        lr_decay="linear",
        warmup_updates=0,
        betas=(0.9, 0.999),
        weight_decay=0.01,
        epochs=0,
        total_episodes=10_000_000,
        eval_samples=(1,),
    ),
}
# Two of the presets with a newer base model. Never run on a GPU.
PRESETS |= {
    "orz-qwen3.5-2b": replace(PRESETS["orz-1.5b"], model="Qwen/Qwen3.5-2B-Base"),
    "gsm8k-qwen3.5-0.8b-1gpu": replace(
        PRESETS["gsm8k-0.5b-1gpu"],
        model="Qwen/Qwen3.5-0.8B",
        template_args=("enable_thinking=false",),
        max_num_seqs=128,  # a response's recurrent states take 37 MiB
    ),
}
# Adapters (LoRA). The learning rates are ten times those of full training ("LoRA Without Regret",
# thinkingmachines.ai/blog/lora, 2025). With this engine_share, one H100 holds the base beside the awake
# engine.
PRESETS |= {
    "gsm8k-7b-1gpu": replace(
        PRESETS["gsm8k-0.5b-1gpu"],
        model="Qwen/Qwen2.5-7B-Instruct",
        lora=32,
        policy_lr=1e-5,
        engine_share=0.7,
    ),
    "orz-7b-lora": replace(ORZ, lora=32, policy_lr=1e-5, critic_lr=5e-5),
}
# The layout "debug" also sets these values in the orz-* presets, as Open-Reasoner-Zero's debug mode does.
DEBUG = dict(prompts_per_step=16, samples_per_prompt=2, critic_updates=1, engine_share=0.5)
# Preset -> number of ranks in its production layout, as in Open-Reasoner-Zero. All other presets have 32.
RANKS = {"orz-0.5b": 8, "orz-0.5b-1gpu": 1, "orz-1.5b": 16, "orz-qwen3.5-2b": 16}
NODE = 8  # ranks on a usual machine; train.py starts up to this many without torchrun
# layers/head.py computes the fp32 logits in chunks of at most this many bytes. A large chunk is fast on a
# GPU, because each chunk reads and writes the output layer's whole gradient.
CHUNK_BYTES = {"cpu": 2**28, "cuda": 2**30}
LLAMA_LIKE = ("llama", "qwen2")  # model types whose layers are Llama's, with or without biases
# Tokens of a page of the torch engine's KV cache on a GPU; FlashAttention takes multiples
KV_PAGE = 256
PREFILL = 8192  # most tokens of a pack of prompts in the torch engine; a longer prompt is a pack of its own

# --- the command line


def nearest(word: str, choices: Iterable[str]) -> str:
    """Returns ` (did you mean X or Y?)` for the choices that begin with `word`, or for the most similar
    choice; "" if no choice is similar."""
    close = [choice for choice in choices if word and choice.startswith(word)]
    # At most 1 choice, with a similarity of at least 0.7
    close = close or difflib.get_close_matches(word, choices, 1, 0.7)
    if not close:
        return ""
    return f" (did you mean {' or '.join(close)}?)"


def given_flags(argv: Sequence[str]) -> list[str]:
    """Returns the names of the flags in `argv`, as fields of Config: --no_NAME is a flag of the field NAME.
    Unknown flags are also returned. Raises UserError for a word such as `---`."""
    for word in argv:
        require(
            not re.match("--(?![a-zA-Z])", word),
            f"{word!r} is no flag",
            f"--FLAG={word!r} for a value that begins with --",
        )
    flags = [word[2:].partition("=")[0] for word in argv if word.startswith("--")]
    return [flag.replace("-", "_").removeprefix("no_") for flag in flags]


def hint(flag: str, known: Sequence[str]) -> str:
    """Returns ` (did you mean --NAME?)` for the flag that an unknown flag may stand for, or "". The table in
    docs/faq.md has the flags of other libraries."""
    word = flag.rpartition(".")[2]  # without a section's name, as in train.micro_batch_size
    faq = if_there(Path.read_text, Path(ROOT, "docs/faq.md")) or ""
    for line in faq.splitlines():
        names = re.findall(r"`([-\w]+)`", line)
        # A row with our flag and those of other libraries: | `--lora` | … | `lora_rank` | …
        if word in names[1:] and names[0].startswith("--"):
            return f" (did you mean {names[0]}?)"
        # A row of the table of settings that torz lacks: | `bf16`, `fp16` | what to use instead |
        if word in names and line.count("|") == 3:
            return f" ({line.split('|')[2].strip()})"
    return nearest(f"--{word}", [f"--{name}" for name in known])


def layout_of(argv: Sequence[str], ranks: str) -> str:
    """Returns the value of --layout. Without this flag, the environment variable DEBUG_MODE decides, as in
    Open-Reasoner-Zero: "debug", unless it is False. Without both, `ranks` decides.

    ranks: the number of ranks that torchrun started, as text; "": the number does not decide"""
    typed = re.findall(r"--layout[= ](\S+)", " ".join(argv))
    if typed:
        return typed[-1]  # as for all flags, the last one counts
    if os.environ.get("DEBUG_MODE", "False") != "False":
        return "debug"
    return {"8": "debug", "32": "production"}.get(ranks, "any")


def settings(name: str, layout: str, given: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of a preset in a layout, as a dict: field of Config -> value.

    given: names of the user's flags. --data removes the preset's evaluation sets. --steps, --epochs and
        --total_episodes (LENGTHS) remove the preset's length"""
    base = vars(PRESETS[name]) | {"out": f"runs/{name}", "layout": layout}
    if layout == "production":
        base["ranks"] = RANKS.get(name, 32)
    if layout == "debug":
        base["ranks"] = 8
        if name.startswith("orz-"):
            base |= DEBUG
    if "data" in given:  # the preset's evaluation sets may not fit the user's data
        base["eval_data"] = ()
    if set(given) & set(LENGTHS):
        base |= dict.fromkeys(LENGTHS, 0)
    return base


def parse(
    argv: Sequence[str] | None = None, prog: str = "train.py", kind: type[Config] = Config
) -> Config:
    """Returns the config of the command line `PRESET [--flag value …]`. Raises UserError if the command line
    is wrong.

    Under torchrun, PRESET may be left out. The default is orz-7b, with the layout "debug" on 8 ranks and
    "production" on 32.

    argv: words of the command line; default: sys.argv[1:]
    kind: Config or a subclass with more flags"""
    import tyro  # imported here, so that `import configs` is quick

    flags = list(sys.argv[1:] if argv is None else argv)  # later without the preset's name
    # In --out=~/x, bash does not replace the ~ by the home folder.
    flags = [word.replace("=~/", f"={Path.home()}/") for word in flags]
    ranks = os.environ.get("WORLD_SIZE", "")  # set by torchrun
    name = ""
    if flags and not flags[0].startswith("-"):
        name = flags.pop(0)
        ranks = ""  # with a typed preset, the number of ranks does not choose the layout
    elif ranks or {"-h", "--help"} & set(flags):
        name = "orz-7b"
    usage = f"{prog} PRESET --flag value …, where PRESET is one of: {', '.join(PRESETS)}"
    meant = nearest(name, PRESETS) or hint(name.partition("=")[0], ())
    require(name in PRESETS, f"no preset {name!r}{meant} before the flags", usage)
    given = given_flags(flags)
    known = ["help", *(field.name for field in fields(kind))]
    for flag in given:
        require(
            flag in known,
            f"no flag --{flag}{hint(flag, known)}",
            f"a flag that {prog} --help lists",
        )
    default = kind(**settings(name, layout_of(flags, ranks), given))
    command = f"{prog} {name}"
    said = io.StringIO()  # tyro's text of --help
    try:
        with contextlib.redirect_stdout(said), tyro_errors(command):
            cfg = tyro.cli(kind, default=default, args=flags, prog=command, use_underscores=True)
    except SystemExit:  # --help
        print(textwrap.fill(usage, 80, break_on_hyphens=False), end="\n\n")
        print(in_groups(said.getvalue()))
        raise
    if kind is Config and not cfg.out:  # tools.evaluate has another default than runs/PRESET
        cfg = replace(cfg, out=default.out)
    cfg.check_length()
    check_given(cfg, given)
    return cfg


# `parse` refuses flags without effect. A row has four columns: flags; a field or property of Config; the
# value of the field with which these flags have no effect; what the error message asks for.
NO_EFFECT = (
    (
        "critic_model critic_updates critic_lr value_clip freeze_policy_steps",
        "algo",
        "grpo",
        "--algo ppo",
    ),
    ("advantage ratio aggregation", "algo", "ppo", "--algo grpo"),
    ("gamma lam", "compares_samples", True, "--algo ppo, or --advantage return_whiten"),
    ("kl_in", "kl_coef", 0, "--kl_coef above 0"),
    ("ref_refresh", "makes_ref", False, "--kl_coef above 0, without --ref_model"),
    ("kl_estimator", "has_ref", False, "--kl_coef above 0, or --ref_model"),
    ("mismatch_bounds", "mismatch", "none", "--mismatch token-truncate, or another but none"),
    # With one update, the ratio is 1.
    ("clip_low clip_high", "clips", False, "--policy_updates 2 or --passes_per_step 2"),
    ("value_clip", "clips_values", False, "--critic_updates 2 or --passes_per_step 2"),
    ("lora_alpha", "lora", 0, "--lora above 0"),
    ("lr_end", "lr_decay", "constant", "--lr_decay linear or cosine"),
    # --data removes the preset's evaluation sets (see `settings`). --eval_response_len is not in this row: it
    # also sets the length that tools.plan gives the engine.
    ("eval_samples eval_temperature eval_top_p", "eval_data", (), "--eval_data with files"),
    ("eval_samples eval_temperature eval_top_p", "eval_every", 0, "--eval_every above 0"),
    ("max_turns", "env", "", "--env FILE.py:FUNCTION"),
    ("max_staleness", "carry", 0, "--carry above 0"),
)


def check_given(cfg: Config, given: Sequence[str]) -> None:
    """Raises UserError for a list that is given twice, and for flags without effect (NO_EFFECT)."""
    for field in given:
        require(
            given.count(field) == 1 or not isinstance(getattr(cfg, field), tuple),
            f"--{field} is given twice",
            f"all values after one --{field}, separated by spaces",
        )
    for flags, setting, idle_value, needed in NO_EFFECT:
        idle = [field for field in given if field in flags.split()]
        require(
            not (idle and getattr(cfg, setting) == idle_value),
            f"--{' --'.join(idle)} has no effect in this run",
            needed,
        )


@contextlib.contextmanager
def tyro_errors(command: str) -> Iterator[None]:
    """Context manager around tyro.cli. Turns tyro's message about a wrong command line into a UserError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as e:
        if not e.code:  # --help
            raise
        # tyro prints a box. Lines of dashes separate its title, the error, sometimes hints, and more help:
        #     ╭─ Value error ───────────────────────────────────────────────────────╮
        #     │ Error parsing --steps: invalid literal for int() with base 10: 'x'  │
        #     │ ─────────────────────────────────────────────────────────────────── │
        #     │ For full helptext, see train.py tiny-ppo --help                     │
        #     ╰─────────────────────────────────────────────────────────────────────╯
        box = re.sub(r"\x1b\[[\d;]*m|[│├╮╰]", "", said.getvalue())
        parts = [" ".join(part.split()) for part in re.split("[-─]{9,}", box)]
        # parts[1] is the error: FOUND, or FOUND. Expected NEEDED.
        found, _, needed = parts[1].strip(".").partition(". Expected ")
        foreign = re.search(r"options: ([\w.]+)=", found)  # Unrecognized options: micro_batch=3
        if foreign:
            # (): only the table of docs/faq.md. tyro itself suggests flags of ours.
            found += hint(foreign[1], ())
        # As in the box above, or "… could not convert string to float: 'x'"
        number = re.search(r"(--\w+):.* (int|float)\b.*(\'.*\')", found)  # flag, type, 'value'
        if number:
            found = f"{number[1]} is {number[3]}"
            needed = "a whole number" if number[2] == "int" else "a number"
        needed = needed or f"one value after a flag, none after a switch; see {command} --help"
        raise UserError(f"{found}; needed: {needed}") from None


def run_command(function: Callable, prog: str) -> Any:
    """Calls `function` with arguments from the command line (sys.argv), and returns its result. A UserError
    ends the process (see user_errors)."""
    import tyro

    with user_errors(prog):
        with tyro_errors(prog):  # hides stderr, so `function` must run later
            # later(…) returns partial(function, …), which holds the arguments and runs nothing.
            later = functools.partial(functools.partial, function)
            # Without `description`, tyro would take the docstring of functools.partial.
            about = inspect.getdoc(function).partition("\nArgs:")[0]
            # wraps: tyro reads function's signature from `later`.
            call = tyro.cli(functools.wraps(function)(later), prog=prog, description=about)
        return call()


def in_groups(text: str) -> str:
    """Returns tyro's text of --help with a title above each group of flags. The titles are the comments
    `# --- title` in Config. A title belongs above the flag of the next field, `first`."""
    for title, first in re.findall(r"# --- (.+)\n    (\w+):", inspect.getsource(Config)):
        text = text.replace(f"\n  --{first} ", f"\n\n {title}\n  --{first} ")
    return text


def check_paths(cfg: Config) -> None:
    """Raises UserError if a model, a template or a data file does not exist, or if --out or --eval_data is
    not UTF-8, because TensorBoard writes their names. Skips names on the Hugging Face Hub. On several
    machines, does not look for models and data. Later checks cover all."""
    for path in (f"{cfg.folder}", *cfg.eval_data):
        with explained(f"the path {path!a} is no text", "UTF-8 for --out and --eval_data"):
            path.encode()
    # prompt_form, model_folder and data_file raise the UserErrors. Their results are not needed here.
    prompt_form(cfg.template)
    # torchrun sets both variables. They differ if there are several machines.
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return
    for model in (cfg.model, cfg.critic_model or cfg.model, cfg.ref_model or cfg.model):
        if not from_hub(model):
            model_folder(model)
    for path in cfg.data + cfg.eval_data:
        if not re.match("[^/]+/[^/]+:", path):  # OWNER/NAME:FILE of the Hub
            data_file(path)


def set_allocator() -> None:
    """Sets the options of torch's memory allocators, unless the user has set some. Must be called before
    torch is imported.

    Big blocks of pinned host memory are not cached, because torch 2.13 would reuse them without checking
    their size (PyTorch pull request 192722). torch 2.11 has no such options, and would not start."""
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return
    # Imported only here: it takes 0.07 s, and the grading servers, which import this file, do not need it.
    from importlib.metadata import version

    options = "expandable_segments:True"
    if not version("torch").startswith("2.11"):
        options += ",pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"
    os.environ["PYTORCH_ALLOC_CONF"] = options


def check_model(path: str) -> None:
    """Raises UserError if `path` is a run's folder (which has a folder ckpt), a checkpoint (RUN/ckpt/STEP) or
    an adapter. A run's folder, too, has a config.json, but not that of a model."""
    names = names_in(Path(path))
    is_part = Path(path).parent.name == "ckpt" or "adapter_config.json" in names
    require(
        "ckpt" not in names and ("config.json" in names or not is_part),
        f"{path} is the folder of a run or an adapter, not of a model",
        "RUN/export/policy, or first: python ckpt.py export RUN last OUT",
    )


def from_hub(name: str) -> bool:
    """Returns whether `name` means a model of the Hugging Face Hub: `name` has the form OWNER/NAME, and there
    is no folder OWNER."""
    of_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name)
    # TINY.model is runs/tiny-base-0. If the folder runs is missing, it is still no name of the Hub.
    return bool(of_hub) and name != TINY.model and not Path(name).parent.is_dir()


def model_folder(path: str) -> Path:
    """Returns Path(path). Raises UserError if it is not a model's folder."""
    check_model(path)
    needed = "--model with a Hugging Face model folder or an id of the Hub"
    if path == TINY.model:
        needed = "python -m tools.tiny, which makes it"
    require(path != "" and Path(path).is_dir(), f"no model folder {path!r}", needed)
    return Path(path)


DATA_FILES = (".arrow", ".parquet", ".jsonl", ".json")


def data_file(path: str) -> Path:
    """Returns the path of a data file. Raises UserError if there is no such file, if it can't be reached, or
    if its name does not end in one of DATA_FILES."""
    file = Path(path)
    require(
        is_file(file) and path.endswith(DATA_FILES),
        f"no data file {path}",
        f"files {', '.join(DATA_FILES)} with spaces between (CSV: docs/forking.md), "
        "or OWNER/NAME:FILE",
    )
    return file


TEMPLATES = {
    # Open-Reasoner-Zero's prompt, word for word
    "orz": (
        "A conversation between User and Assistant. The User asks a question, and the "
        "Assistant solves it. The Assistant first thinks about the reasoning process "
        "in the mind and then provides the User with the answer. The reasoning process "
        "is enclosed within <think> </think> and answer is enclosed within <answer> "
        "</answer> tags, respectively, i.e., <think> reasoning process here </think> "
        "<answer> answer here </answer>. User: You must put your answer inside "
        "<answer> </answer> tags, i.e., <answer> answer here </answer>. And your final "
        "answer will be extracted automatically by the \\boxed{} tag.\n"
        "This is the problem:\n{problem}\nAssistant: <think>"
    ),
    "plain": "{problem}<think>",
}


def prompt_form(template: str) -> str:
    """Returns the text of a template, which contains {problem}; for "chat", returns "". Raises UserError if
    the template is missing or lacks {problem}."""
    if template == "chat":
        return ""
    if template in TEMPLATES:
        return TEMPLATES[template]
    require(
        is_file(Path(template)),
        f"no template {template!r}",
        "--template orz, plain, chat or a text file with {problem}",
    )
    with explained(f"{template} can't be read", "a UTF-8 text with {problem}"):
        form = Path(template).read_text(encoding="utf-8-sig")
    require("{problem}" in form, f"{template} lacks {{problem}}", "a text with {problem} in it")
    return form


def meanings(kind: type[Config] = Config) -> dict[str, str]:
    """Returns a dict: field of Config -> the comment beside the field, which is its help text."""
    return dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(kind), re.MULTILINE))


def limit_memory(more: int, for_good: bool = False) -> None:
    """Limits the memory of this process to what it uses now and `more` bytes. for_good: whether the process
    can't raise the limit again."""
    with contextlib.suppress(OSError, ValueError):  # no Linux, or a lower limit is already set
        pages = int(Path("/proc/self/statm").read_text().split()[0])  # of the address space
        most = pages * resource.getpagesize() + more
        _, hard = resource.getrlimit(resource.RLIMIT_AS)  # the process may set limits up to `hard`
        resource.setrlimit(resource.RLIMIT_AS, (most, most if for_good else hard))


MARKER = "torz.json"  # the file that marks a folder as an export
