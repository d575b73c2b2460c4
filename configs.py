"""Every setting of a run, the presets and the layouts.

One frozen dataclass is both the configuration and the command line: `train.py PRESET --flag value`. The
comment beside a field is its help text. A value that can be derived is a property, never a second setting. A
flag beats the layout, the layout beats the preset, the preset beats the default. `python -m tools.plan
PRESET` shows what follows from the values.

The `orz-*` numbers are Open-Reasoner-Zero's (arXiv 2503.24290 and its playground files). What it calls
"nodes" are GPUs; here they are called ranks.

This file also holds what every other file needs: UserError, `require`, and the readers of JSON rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

ROOT = str(Path(__file__).resolve().parent)  # the project's folder


class UserError(Exception):
    """A user's mistake. Its message is one line: what was found; what is needed. Printed without a
    traceback."""


def require(ok: bool, found: str, needed: str) -> None:
    """Raise UserError("{found}; needed: {needed}") unless `ok`."""
    if not ok:
        raise UserError(f"{found}; needed: {needed}")


@contextlib.contextmanager
def user_errors(prog: str) -> Iterator[None]:
    """Around a command's main: a UserError ends the process with status 1 and one line, printed by the first
    rank of each machine. torchrun shows it again as the last thing on the screen, without a traceback."""
    for stream in (sys.stdout, sys.stderr):  # a response may hold what no terminal can show
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except UserError as e:
        line = f"{prog}: {e}"
        tell_torchrun(line)
        sys.exit(line if os.environ.get("LOCAL_RANK", "0") == "0" else 1)
    except KeyboardInterrupt:  # a traceback would hide what came before
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def tell_torchrun(text: str) -> None:
    """Write why this process ends to the file that torchrun reads. It shows the text of the first that
    failed. (torch's `record` writes the same file; it needs torch, and shows a traceback.)"""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": message}))


class Range(NamedTuple):
    """The values that a setting may have: from `low` to `high`, without `low` if `above`, without `high` if
    `below`."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def has(self, x: float) -> bool:
        """Whether x is in the range, and finite."""
        at_open_end = (self.above and x == self.low) or (self.below and x == self.high)
        return math.isfinite(x) and self.low <= x <= self.high and not at_open_end

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
        if self.high == math.inf:
            return low
        return f"{low}, {'below' if self.below else 'up to'} {self.high:g}"


Count = Annotated[int, Range(1)]
Amount = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Part = Annotated[float, Range(0, 1, above=True)]
Beta = Annotated[float, Range(0, 1, below=True)]
Advantage = Literal["group_mean_std", "group_mean", "group_mean_whiten", "group_mean_batch_std",
                    "leave_one_out", "return_whiten"]
Tracker = Literal["wandb"]
LENGTHS = ("steps", "epochs", "total_episodes")  # one of them sets the run's length


@dataclass(frozen=True)
class Config:
    """All settings of a run. Counts are in prompts, samples, tokens or updates, as their names say."""

    # --- what is trained, on what
    algo: Literal["ppo", "grpo"] = "ppo"  # ppo trains a critic; grpo compares the samples of one prompt
    model: str = ""  # base model: a Hugging Face folder (config, tokenizer, safetensors), or an id of the Hub
    critic_model: str = ""  # the critic's base model, a folder or an id; empty: --model
    data: tuple[str, ...] = ()  # training problems: .json, .jsonl or .parquet files, or OWNER/NAME:FILE (hub)
    data_weights: tuple[Positive, ...] = ()  # how often each file's problems come in an epoch; empty: once
    eval_data: tuple[str, ...] = ()  # held-out problems, one evaluation set a file
    template: str = "orz"  # prompt: orz, plain, chat (the tokenizer's own), or a text file with {problem}
    system_prompt: str = ""  # system turn of the chat template, for rows without one
    extractor: tuple[str, ...] = ("orz",)  # finds the answer in a response; DATASET=NAME: for one data set
    reward: tuple[str, ...] = ("math",)  # graders, NAME or NAME=WEIGHT: math, choice, exact, FILE.py:FUNCTION
    env: str = ""  # FILE.py:FUNCTION that answers each turn of a response; empty: responses have one turn
    max_turns: Count = 8  # turns of a response, with --env
    seed: Amount = 0  # the only source of randomness
    out: str = ""  # the run's folder; empty: runs/PRESET

    # --- length of the run: give one of the three; a step is one rollout and its updates
    steps: Amount = 0  # steps in all; 0: not given
    epochs: Amount = 0  # passes over the prompts; 0: not given
    total_episodes: Amount = 0  # prompt-response pairs in all; 0: not given
    eval_every: Amount = 10  # steps between evaluations (also at step 0 and at the end); 0: never
    save_every: Amount = 50  # steps between checkpoints (also at the end); 0: only at the end
    resume: str = "auto"  # auto: continue the run in --out; never: require an empty --out; or a checkpoint
    start_from: str = ""  # take weights from another run: RUN (its newest checkpoint), or RUN/STEP, RUN/best

    # --- the batch
    prompts_per_step: Count = 128  # prompts sampled each step
    samples_per_prompt: Count = 64  # responses to each prompt
    max_prompt_len: Count = 2048  # tokens; longer prompts are dropped when the data is loaded
    max_response_len: Count = 8000  # tokens
    max_model_len: Amount = 0  # tokens of prompt and response together; 0: the sum of the two
    resample_rounds: Amount = 0  # rounds that replace prompts whose samples all have one reward (grpo: DAPO)
    round_len: Amount = 0  # decode in rounds of so many tokens, rebalance the engines between them; 0: off
    carry: Annotated[float, Range(0, 8)] = 0.0  # extra prompts sampled at a time, as a share of a step's
    max_staleness: Count = 2  # steps after which a carried prompt must be complete, with --carry
    pack_len: Count = 16384  # tokens of one forward pass on one rank
    policy_updates: Count = 1  # optimizer steps on the policy per pass, each on its own minibatch
    critic_updates: Count = 12  # optimizer steps on the critic per pass, each on its own minibatch
    passes_per_step: Count = 1  # passes over a step's samples (PPO's epochs, TRL's num_iterations)

    # --- sampling and grading
    engine: Literal["auto", "torch", "vllm"] = "auto"  # auto: vllm on CUDA, torch on a CPU
    temperature: Positive = 1.0  # divides the logits, in the trainer as in the engine
    stop: tuple[str, ...] = ("User:", "Human:", "Assistant:", "</answer>")  # strings that end a response
    engine_share: Part = 0.7  # share of the device's memory that the awake engine may take
    max_num_seqs: Count = 512  # responses that one engine decodes at once
    tp: Count = 1  # ranks that share one engine (tensor parallel; vllm only)
    eval_samples: tuple[Count, ...] = (1,)  # responses to each held-out problem; one number, or one a set
    eval_temperature: tuple[NotNegative, ...] = (1.0,)  # 0: greedy; one for all sets, or one a set
    eval_response_len: Amount = 0  # tokens of a response in evaluation; 0: --max_response_len
    grade_workers: Count = 1  # grading processes beside each rank
    grade_deadline: Positive = 5.0  # CPU seconds that grading one answer may take
    selfcheck: bool = True  # compare vllm with the trainer's policy before the first step

    # --- optimizers: AdamW with fp32 weights and state
    policy_lr: Positive = 1e-6  # learning rate after warm-up
    critic_lr: Positive = 5e-6  # learning rate after warm-up
    warmup_updates: NotNegative = 50  # updates of linear warm-up; below 1: their share of the run
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"  # to --lr_end at the last step
    lr_end: NotNegative = 0.0  # both learning rates at the last step, with --lr_decay linear or cosine
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # AdamW's decay rates of its first and second moments
    weight_decay: NotNegative = 0.0  # AdamW's, times the learning rate per update
    grad_clip: Positive = 1.0  # largest global gradient norm

    # --- the loss
    gamma: Share = 1.0  # discount (ppo)
    lam: Share = 1.0  # GAE's lambda (ppo)
    clip_low: Share = 0.2  # the ratio is clipped below at 1 - clip_low
    clip_high: NotNegative = 0.2  # and above at 1 + clip_high
    value_clip: Positive | None = 0.2  # the critic's clip range; None: plain squared error, as in the paper
    freeze_policy_steps: Amount = 0  # first steps that train the critic alone
    kl_coef: NotNegative = 0.0  # weight of the KL term; 0: no reference model is loaded
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # of KL(policy || ref), per token
    kl_in: Literal["loss", "reward"] = "loss"  # where the KL term goes (reward: ppo, or return_whiten)
    ref_refresh: bool = False  # copy the policy to the reference at each epoch's end
    entropy_coef: NotNegative = 0.0  # weight of an entropy bonus in the policy's loss
    tis_clip: Positive | None = 2.0  # cap of the weight that corrects engine-trainer mismatch; None: off
    advantage: Advantage = "group_mean_std"  # how a group's rewards become advantages (grpo)
    ratio: Literal["token", "sequence", "clipped"] = "token"  # sequence: GSPO; clipped: CISPO (grpo)
    aggregation: Literal["token", "response", "max_len", "prompt"] = "token"  # what the loss is a mean over
    overlong_buffer: Amount = 0  # tokens before the limit over which the reward falls by up to 1 (DAPO)
    nonstop_penalty: NotNegative = 0.0  # taken from the reward of a response cut by length (Open-Instruct)
    mask_truncated: bool = False  # leave responses cut by length out of the loss
    drop_uniform: bool = False  # leave prompts whose responses all score the same out of the loss (grpo)

    # --- where and how it runs
    layout: Literal["any", "debug", "production"] = "any"  # debug: 8 ranks; production: 32; any: as started
    ranks: Amount = 0  # ranks that torchrun must have started; 0: any number
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of compute and gathers; auto: bfloat16 on CUDA
    shard_ranks: Amount = 0  # shard within groups of this many ranks, replicate across groups; 0: one group
    deterministic: bool = False  # bitwise-reproducible gradients on a GPU; slower
    recompute: str = "auto"  # layers recomputed in backward: none, layers (all), a number, auto (few as fit)
    offload: bool = True  # trainer state waits on the host while it isn't used (CUDA)
    keep: Count = 2  # newest checkpoints kept
    keep_best: str = "auto"  # metric whose best checkpoint is kept; auto: mean of eval/*/avg@k; empty: none
    save_samples: Literal["all", "some", "none"] = "some"  # some: of 8 prompts, every --eval_every steps
    save_logps: bool = False  # in samples/ and eval/: also token ids and the engine's log-probs
    track: tuple[Tracker, ...] = ()  # wandb: send metrics and samples to Weights & Biases too
    grace: Positive = 25.0  # seconds to save and leave after SIGTERM, SIGUSR1, ctrl-C; torchrun gives 30
    stall_limit: Positive = 3600.0  # longest seconds of a phase; then every rank prints its stack and ends
    go: bool = False  # start even if the checks of first responses or gold answers fail
    max_logp_gap: Positive = 0.1  # mean |engine - trainer| log-prob, in nats, that stops the run
    verbose: bool = False  # print the memory ledger each step, and vllm's own start-up messages

    def __post_init__(self) -> None:
        """Raises UserError for a value out of its range and for values that can't work together."""
        for name, allowed in ranges().items():
            value = getattr(self, name)
            for x in value if isinstance(value, tuple) else (value,):
                require(x is None or allowed.has(x), f"--{name} is {x}", f"--{name} {allowed}")
        self._check_batch()
        self._check_method()
        require("" not in self.stop, "--stop has an empty text", "texts that end a response, or none")
        require(bool(self.reward) and bool(self.extractor), "no --reward, or no --extractor", "at least one")
        require(not self.system_prompt or self.template == "chat", "--system_prompt without a chat template",
                "--template chat")
        require(not self.start_from or self.resume in ("auto", "never"),
                f"--start_from {self.start_from} and --resume {self.resume} are two starts",
                "one of them: --resume continues the same run, --start_from begins another")
        require(self.recompute in ("auto", "none", "layers") or self.recompute.isdecimal(),
                f"--recompute is {self.recompute}", "auto, none, layers, or a number of layers")
        for name, files, default in (("data_weights", self.data, 0), ("eval_samples", self.eval_data, 1),
                                     ("eval_temperature", self.eval_data, 1)):
            given = len(getattr(self, name))
            require(given in (default, len(files)), f"--{name} has {given} values for {len(files)} files",
                    f"{default} or one a file")

    def _check_batch(self):
        require(self.pack_len >= self.model_len, f"--pack_len {self.pack_len} is smaller than a prompt plus "
                f"its response ({self.max_prompt_len} + {self.max_response_len} tokens)",
                f"--pack_len {self.model_len}, or a smaller --max_prompt_len or --max_response_len")
        least, most = sorted((self.policy_updates, self.critic_updates))
        require(self.algo == "grpo" or most % least == 0, f"--policy_updates {self.policy_updates} and "
                f"--critic_updates {self.critic_updates}: one is not a multiple of the other",
                f"a multiple of {least} instead of {most}")
        require(self.minibatches <= self.samples_per_step, f"{self.minibatches} updates a step, but only "
                f"{self.samples_per_step} samples",
                "fewer --critic_updates or --policy_updates, or more samples")
        require(self.overlong_buffer < self.max_response_len, f"--overlong_buffer {self.overlong_buffer} is "
                "as long as a response", f"less than --max_response_len {self.max_response_len}")
        require(not self.carry or self.round_len > 0, f"--carry {self.carry} without --round_len",
                f"--round_len {-(-self.max_response_len // 16)}, or another number of tokens after which "
                "complete responses are counted")
        require(not (self.carry and self.resample_rounds), f"--carry {self.carry} with --resample_rounds "
                f"{self.resample_rounds}", "one of them")
        longest = self.max_response_len - (1 if self.carry else 0)  # after one round nothing is left to carry
        require(self.round_len <= longest, f"--round_len {self.round_len} with --carry {self.carry}, and "
                f"a response has at most {self.max_response_len} tokens", f"at most --round_len {longest}")

    def _check_method(self):
        if self.compares_samples:
            require(self.samples_per_prompt > 1, f"--samples_per_prompt is 1, and --advantage "
                    f"{self.advantage} compares the samples of one prompt",
                    "--samples_per_prompt 2 or more, --advantage return_whiten, or --algo ppo")
            require(self.kl_in == "loss", f"--kl_in reward needs per-token rewards, which --advantage "
                    f"{self.advantage} lacks", "--kl_in loss, or --advantage return_whiten")
        for name in ("resample_rounds", "drop_uniform"):
            require(not getattr(self, name) or self.compares_samples, f"--{name} looks for prompts whose "
                    "samples differ, and this run does not compare them",
                    f"no --{name}, or --algo grpo with another --advantage than return_whiten")
        require(not self.kl_coef or self.kl_in == "reward" or self.kl_estimator != "k1",
                "--kl_estimator k1 in the loss has a gradient without the reference in it",
                "--kl_estimator k2 or k3, or --kl_in reward")
        require(not self.carry or self.tis_clip is not None, f"--carry {self.carry} without --tis_clip: "
                "tokens of older weights are trained on, and not corrected", "--tis_clip 2")

    @property
    def keeps_ref(self) -> bool:
        """Whether checkpoints hold the reference: --model has another one."""
        return self.kl_coef > 0 and (self.ref_refresh or self.start_from != "")

    @property
    def compares_samples(self) -> bool:
        """Whether an advantage comes from the other samples of its prompt."""
        return self.algo == "grpo" and self.advantage != "return_whiten"

    @property
    def model_len(self) -> int:
        """Longest prompt and response together in training, in tokens."""
        both = self.max_prompt_len + self.max_response_len
        return min(both, self.max_model_len or both)

    @property
    def engine_len(self) -> int:
        """Longest prompt and response together that the engine may meet; evaluation may be longer than
        training."""
        return max(self.model_len, self.max_prompt_len + self.eval_response_len)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def extra_prompts(self) -> int:
        """Prompts that are sampled at a time beyond those of a step."""
        return round(self.carry * self.prompts_per_step)

    @property
    def minibatches(self) -> int:
        """How many minibatches a step's samples are cut into: one per update of the model that takes more
        updates. The other model's update takes several of them."""
        return max(self.policy_updates, self.critic_updates) if self.algo == "ppo" else self.policy_updates

    def engine_kind(self, on_gpu: bool) -> str:
        """The name in rollout.ENGINES of the engine that --engine means on a GPU or on a CPU."""
        if self.engine != "auto":
            return self.engine
        return "vllm" if on_gpu else "torch"

    def check_length(self) -> None:
        """Raises UserError unless one of the three lengths is given."""
        given = [name for name in LENGTHS if getattr(self, name)]
        require(len(given) == 1, f"the length of the run is given {len(given)} times "
                f"({', '.join(given) or 'not at all'})", "one of --steps, --epochs, --total_episodes")

    def with_steps(self, prompts: int) -> Config:
        """Returns this config with its length in `steps`. The length may be given as steps, epochs or
        total_episodes. `prompts`: prompts in an epoch. Raises UserError unless exactly one of the three is
        given."""
        self.check_length()
        episodes = self.total_episodes or self.epochs * prompts * self.samples_per_prompt
        steps = self.steps or -(-episodes // self.samples_per_step)
        require(self.freeze_policy_steps < steps, f"--freeze_policy_steps {self.freeze_policy_steps} of "
                f"{steps} steps leaves none that trains the policy", "fewer of them, or a longer run")
        return replace(self, steps=steps, epochs=0, total_episodes=0)

    def lr(self, name: Literal["policy", "critic"], step: int, update: int) -> float:
        """Returns the learning rate of optimizer step `update` (from 0) within `step`. It depends only on
        these counts, so a resumed run needs no scheduler state. ORZ-32B anneals with lr_decay="linear",
        lr_end=3e-7."""
        base = getattr(self, f"{name}_lr")
        per_step = getattr(self, f"{name}_updates") * self.passes_per_step
        first = self.freeze_policy_steps if name == "policy" else 0
        done, total = (step - first) * per_step + update, (self.steps - first) * per_step
        warmup = self.warmup_updates if self.warmup_updates >= 1 else round(self.warmup_updates * total)
        if done < warmup:
            return base * (done + 1) / warmup
        if self.lr_decay == "constant":
            return base
        progress = min(1.0, (done + 1 - warmup) / max(total - warmup, 1))
        if self.lr_decay == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return base + (self.lr_end - base) * progress

    @property
    def updates_per_step(self) -> int:
        """Number of the policy's optimizer steps per step. With one, the ratio is 1 and clipping does
        nothing."""
        return self.policy_updates * self.passes_per_step


@functools.cache
def ranges() -> dict[str, Range]:
    """The range of each setting that is a number, or several numbers."""
    hints = get_type_hints(Config, include_extras=True)
    return {name: found for name, hint in hints.items() for part in (hint, *get_args(hint))
            for found in get_args(part) if isinstance(found, Range)}


# Open-R1's system prompt, verbatim (its recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml).
OPEN_R1_SYSTEM = (
    "You are a helpful AI Assistant that provides well-reasoned and detailed responses. You first think "
    "about the reasoning process as an internal monologue and then provide the user with the answer. "
    "Respond in the following format: <think>\n...\n</think>\n<answer>\n...\n</answer>")
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."  # Qwen2.5-Math's
ORZ = Config(model="Qwen/Qwen2.5-7B", epochs=20, max_model_len=8192, ref_refresh=True, eval_samples=(16,))
ORZ_SMALL = replace(ORZ, pack_len=10048, engine_share=0.75)
GRPO = replace(ORZ, algo="grpo", engine_share=0.75, critic_updates=1)
TINY = Config(
    model="runs/tiny-base", data=("runs/tiny-base/train.jsonl",), eval_data=("runs/tiny-base/heldout.jsonl",),
    template="plain", stop=("</answer>",), steps=24, eval_every=12, save_every=12, prompts_per_step=32,
    samples_per_prompt=8, max_prompt_len=16, max_response_len=48, pack_len=4096, critic_updates=2,
    policy_lr=3e-4, critic_lr=5e-4, warmup_updates=2, lr_decay="linear", betas=(0.9, 0.99),
    recompute="none", max_num_seqs=256)

# Each preset with its paper and section. docs/algorithms.md has the departures from the papers.
PRESETS = {
    # The demo: sums of two numbers, a model of 0.4M parameters.
    "tiny-ppo": TINY,
    "tiny-grpo": replace(TINY, algo="grpo", critic_updates=1),
    # Ours: an evening on one 24-GB card.
    "gsm8k-0.5b-1gpu": replace(
        GRPO, model="Qwen/Qwen2.5-0.5B-Instruct", data=("openai/gsm8k:main/train-00000-of-00001.parquet",),
        eval_data=("openai/gsm8k:main/test-00000-of-00001.parquet",), template="chat",
        system_prompt=STEP_BY_STEP, extractor=("boxed",), stop=(), epochs=0, steps=234, prompts_per_step=64,
        samples_per_prompt=8, max_prompt_len=512, max_response_len=1024, max_model_len=0, ref_refresh=False,
        warmup_updates=10, eval_samples=(1,), eval_temperature=(0.0,), eval_every=25),
    # Open-Reasoner-Zero, arXiv 2503.24290 and its playground files: PPO with γ = λ = 1.
    "orz-0.5b": replace(ORZ_SMALL, model="Qwen/Qwen2.5-0.5B"),
    "orz-0.5b-1gpu": replace(ORZ_SMALL, model="Qwen/Qwen2.5-0.5B"),
    "orz-1.5b": replace(ORZ_SMALL, model="Qwen/Qwen2.5-1.5B"),
    "orz-7b": ORZ,
    "orz-32b": replace(ORZ, model="Qwen/Qwen2.5-32B", tp=4, max_response_len=16384, max_model_len=0,
                       pack_len=18432, eval_response_len=32768),
    # Open-Reasoner-Zero's GRPO, as its code behaves.
    "orz-7b-grpo": replace(GRPO, advantage="group_mean_whiten"),
    # DAPO, arXiv 2503.14476, eq. 8 to 13: the paper's 512 × 16 in 16 updates; a 7B model, not its 32B.
    "dapo-7b": replace(
        GRPO, data=("BytedTsinghua-SIA/DAPO-Math-17k:data/dapo-math-17k.parquet",), template="chat",
        extractor=("dapo",), reward=("math=2",), stop=(), prompts_per_step=512,
        samples_per_prompt=16, policy_updates=16, clip_high=0.28, resample_rounds=4, overlong_buffer=4096,
        max_response_len=20480, max_model_len=0, pack_len=22528, warmup_updates=320, eval_samples=(32,)),
    # Dr. GRPO, arXiv 2503.20783: no division by length or standard deviation.
    "dr-grpo-7b": replace(GRPO, advantage="group_mean", aggregation="max_len"),
    # RLOO, arXiv 2402.14740.
    "rloo-7b": replace(GRPO, advantage="leave_one_out"),
    # REINFORCE++, arXiv 2501.03262, and its variant with a group baseline. The KL's weight is ours.
    "reinforce++-7b": replace(GRPO, advantage="return_whiten", samples_per_prompt=1, prompts_per_step=1024,
                              kl_coef=1e-3, kl_in="reward", kl_estimator="k1", ref_refresh=False),
    "reinforce++-baseline-7b": replace(GRPO, advantage="group_mean_whiten", kl_coef=1e-3, kl_estimator="k2",
                                       ref_refresh=False),
    # GSPO, arXiv 2507.18071, eq. 5 to 7.
    "gspo-7b": replace(GRPO, ratio="sequence", aggregation="response", clip_low=3e-4, clip_high=4e-4,
                       policy_updates=4),
    # CISPO in MiniMax-M1, arXiv 2506.13585, eq. 4 and section 3.1. The upper bound is ScaleRL's.
    "cispo-7b": replace(GRPO, ratio="clipped", policy_updates=16, clip_low=1.0, clip_high=4.0),
    # ScaleRL, arXiv 2510.13786, section 4.
    "scale-rl-7b": replace(
        GRPO, advantage="group_mean_batch_std", ratio="clipped", aggregation="prompt", drop_uniform=True,
        clip_low=1.0, clip_high=4.0, prompts_per_step=48, samples_per_prompt=16, policy_updates=8,
        max_response_len=14336, max_model_len=0, policy_lr=5e-7, warmup_updates=100,
        weight_decay=0.01),
    # Open-R1's recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml: 7 GPUs × 16 × 4 responses a step.
    "open-r1-1.5b-grpo": replace(
        GRPO, model="Qwen/Qwen2.5-1.5B-Instruct", template="chat", system_prompt=OPEN_R1_SYSTEM,
        extractor=("answer_tag",), stop=(),
        reward=("math", "format", "tags"), prompts_per_step=28, samples_per_prompt=16, aggregation="response",
        max_prompt_len=512, max_response_len=1024, max_model_len=0, pack_len=10048, policy_lr=2e-5,
        lr_decay="cosine", warmup_updates=0.1, betas=(0.9, 0.999), epochs=1, eval_samples=(4,)),
    # RLVR of Tülu 3, arXiv 2411.15124, its PPO: 4 passes over 224 responses.
    "rlvr-8b": replace(
        ORZ, model="allenai/Llama-3.1-Tulu-3-8B-DPO", template="chat",
        extractor=("boxed", "gsm8k=last_number"), reward=("math=10",), stop=(),
        nonstop_penalty=10.0, kl_coef=0.05, kl_in="reward", kl_estimator="k1", ref_refresh=False, lam=0.95,
        prompts_per_step=224, samples_per_prompt=1, critic_updates=1, passes_per_step=4,
        max_response_len=2048, max_model_len=0, policy_lr=3e-7, critic_lr=3e-7, lr_decay="linear",
        warmup_updates=0, betas=(0.9, 0.999), epochs=0, total_episodes=10_000_000, eval_samples=(1,)),
}
# A layout sets the number of ranks, and on ORZ's own presets ORZ's numbers for debugging. The presets
# themselves have the production numbers.
LAYOUTS = {
    "any": {},
    "debug": dict(ranks=8, prompts_per_step=16, samples_per_prompt=2, critic_updates=1, engine_share=0.5),
    "production": dict(ranks=32),
}
RANKS = {"orz-0.5b": 8, "orz-0.5b-1gpu": 1, "orz-1.5b": 16}  # where ORZ's production differs from 32
NODE = 8  # ranks on one machine, in the layouts and in the commands that errors suggest
CHUNK_BYTES = 2**28  # of fp32 logits that model.py makes at once

# What a resumed run may change without changing the algorithm: where it runs, what it saves and tracks. dtype
# changes rounding. A checkpoint compares the problems themselves, so the files and the template may be named
# differently.
MAY_CHANGE = set("""
    out resume data data_weights template system_prompt steps epochs total_episodes eval_data eval_every
    eval_samples eval_temperature eval_response_len save_every keep keep_best grace stall_limit
    max_logp_gap critic_model engine engine_share max_num_seqs tp grade_workers grade_deadline layout ranks
    device dtype shard_ranks deterministic recompute offload pack_len selfcheck verbose go
    save_samples save_logps track
""".split())


def changed(old: dict, new: dict) -> list[str]:
    """Returns a text `field: old -> new` for each field whose change alters the algorithm. `new`: the result
    of dataclasses.asdict. `old`: an earlier result, read from JSON."""
    follows_length = new["lr_decay"] != "constant" or 0 < new["warmup_updates"] < 1
    free = MAY_CHANGE - ({"steps"} if follows_length else set())
    layouts = [(config, LAYOUTS[config["layout"]]) for config in (old, new)]
    by_flag = [k for config, fields in layouts for k in fields.keys() - MAY_CHANGE if config[k] != fields[k]]
    if old["layout"] != new["layout"] and not by_flag:
        free = free | LAYOUTS["debug"].keys()  # the numbers that a layout sets may change with it
    as_json = json.loads(json.dumps(new))
    return [f"{k}: {old[k]} -> {v}" for k, v in as_json.items() if k not in free and k in old and old[k] != v]


# --- the command line


def nearest(word: str, choices: Sequence[str]) -> str:
    """` (did you mean X?)` with the choice nearest to `word`, or "" where none is near."""
    close = difflib.get_close_matches(word, choices, 1, 0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def given_flags(argv: Sequence[str]) -> dict[str, str]:
    """Returns field -> first word of the value, for each flag of a command line, in order. `--no_go`,
    `--steps 3` and `--pack-len=9` give the fields go, steps and pack_len."""
    given = {}
    for word, following in itertools.pairwise([*argv, ""]):
        if re.match("--[a-zA-Z]", word):
            flag, _, value = word[2:].partition("=")
            given[flag.replace("-", "_").removeprefix("no_")] = value or following
    return given


def layout_of(given: Mapping[str, str]) -> str:
    """Returns the layout's name: from --layout, or else from the environment. DEBUG_MODE=True means debug, as
    in Open-Reasoner-Zero."""
    debug, of_debug = os.environ.get("DEBUG_MODE", ""), {"": "any", "False": "any", "True": "debug"}
    require(debug in of_debug, f"the environment says DEBUG_MODE={debug}", "True or False")
    name = given.get("layout", of_debug[debug])
    require(name in LAYOUTS, f"no layout {name!r}{nearest(name, list(LAYOUTS))}",
            "--layout " + ", ".join(LAYOUTS))
    return name


def layout_fields(preset: str, layout: str) -> dict[str, Any]:
    """What a layout sets on a preset."""
    if layout == "production" and preset in RANKS:
        return {"ranks": RANKS[preset]}
    fields = LAYOUTS[layout]
    return fields if preset.startswith("orz-") else {"ranks": fields.get("ranks", 0)}


def parse(argv: Sequence[str] | None = None, prog: str = "train.py", kind: type[Config] = Config) -> Config:
    """Config of the command line `PRESET [--flag value …]`; `argv` defaults to sys.argv's. kind: Config, or a
    subclass with flags of its own. Raises UserError, one line, for what can't be read. --help prints every
    flag with its meaning, and exits with status 0."""
    import tyro  # here, because importing configs must be quick

    argv = list(sys.argv[1:] if argv is None else argv)
    presets, name = ", ".join(PRESETS), "orz-7b" if {"-h", "--help"} & set(argv) else ""
    if argv and not argv[0].startswith("-"):
        name = argv.pop(0)
    require(name != "", "no preset given", f"{prog} PRESET, one of: {presets}")
    require(name in PRESETS, f"no preset {name!r}{nearest(name, list(PRESETS))}", presets)
    given, flags = given_flags(argv), ["--help", *(f"--{f.name}" for f in dataclasses.fields(kind))]
    for field in given:
        require(f"--{field}" in flags, f"no flag --{field}{nearest(f'--{field}', flags)}",
                f"a flag that {prog} --help lists")
    layout = layout_of(given)
    base = {"out": f"runs/{name}", **layout_fields(name, layout), "layout": layout}
    if given.keys() & LENGTHS:
        base |= dict.fromkeys(LENGTHS, 0)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            cfg = tyro.cli(kind, default=kind(**vars(PRESETS[name]) | base), args=argv,
                           prog=f"{prog} {name}", use_underscores=True,
                           description=f"{prog} PRESET [--flag value …]. Presets: {presets}.")
    except SystemExit as e:
        if not e.code:  # --help
            raise
        # tyro's message is in a coloured box: a title, the message, and more lines of help.
        text = re.sub(r"\x1b\[[0-9;]*m|[─-╿]", "", errors.getvalue().partition("\n")[2])
        text = " ".join(re.split("For full helptext|Argument helptext", text)[0].split())
        raise UserError(f"{text}; see {prog} {name} --help") from None
    cfg.check_length()
    for fields, has_effect, needed in EFFECTS:
        idle = [field for field in given if field in fields.split()]
        require(not idle or has_effect(cfg), f"--{' --'.join(idle)} has no effect in this run", needed)
    return cfg


def check_paths(cfg: Config) -> None:
    """Raises UserError if the model or a data file does not exist, before slow imports.

    Does not check a name that may be on the Hub; model.resolve and grading.rows.local_file check it later. On
    several machines nothing is checked here: the later checks say on which machine a file is missing."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return
    for path in filter(None, (cfg.model, cfg.critic_model)):
        if not HUB_ID.fullmatch(path):
            model_folder(path)
    for path in cfg.data + (cfg.eval_data if cfg.eval_every else ()):
        if path.endswith(DATA_FILES) and ":" not in path:
            data_file(path)


def set_allocator() -> None:
    """Set torch's allocator, unless the user has set it. To be called before torch is imported.

    On a GPU, expandable segments reduce fragmentation by 1 to 3 GiB. tools/plan.py assumes them. On the host,
    the allocator pins the bytes that are needed instead of the next power of 2. Such pinned blocks must not
    be cached: torch 2.13 reuses a cached block without checking its size (fixed by PyTorch pull request
    192722)."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = (
            "expandable_segments:True,pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1")


def check_trackers(cfg: Config) -> None:
    """Refuse a run whose --track names a package that is not installed. Raises UserError."""
    for name in cfg.track:
        require(importlib.util.find_spec(name) is not None, f"--track {name} without its package",
                f"pip install {name}")


def model_folder(path: str) -> Path:
    """The path of a model's folder. Raises UserError where there is none."""
    require(path != "" and Path(path).is_dir(), f"no model folder {path!r}{neighbour(path)}",
            _build(path) or "--model with a Hugging Face model folder or an id of the Hub")
    return Path(path)


def neighbour(path: str) -> str:
    """Returns the hint of `nearest` for a path that does not exist: a similar name in the same folder, or
    ""."""
    parent = Path(path).parent
    return nearest(path, [str(p) for p in parent.iterdir()]) if parent.is_dir() else ""


def data_file(path: str) -> Path:
    """The path of a data file. Raises UserError where there is none."""
    require(Path(path).is_file(), f"no data file {path}",
            _build(path) or "a .json, .jsonl or .parquet file that exists")
    return Path(path)


def _build(path):
    """What makes the folder of the tiny presets."""
    return "python -m tools.tiny, which makes it" if path.startswith(PRESETS["tiny-ppo"].model) else ""


def meanings() -> dict[str, str]:
    """Field of Config -> the comment beside it, which is also its help text."""
    return dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(Config), re.MULTILINE))


# Flags that only some algorithms read: the flags, whether they have an effect, what they need.
EFFECTS = (
    ("critic_model critic_updates critic_lr value_clip freeze_policy_steps",
     lambda c: c.algo == "ppo", "--algo ppo"),
    ("gamma lam", lambda c: c.algo == "ppo" or c.advantage == "return_whiten",
     "--algo ppo, or --advantage return_whiten"),
    ("advantage ratio aggregation resample_rounds drop_uniform", lambda c: c.algo == "grpo", "--algo grpo"),
    ("kl_in kl_estimator ref_refresh", lambda c: c.kl_coef > 0, "--kl_coef above 0"),
    ("max_turns", lambda c: c.env != "", "--env FILE.py:FUNCTION"),
    ("max_staleness", lambda c: c.carry > 0, "--carry above 0"),
    ("save_logps", lambda c: c.save_samples != "none", "--save_samples all or some"),
    ("lr_end", lambda c: c.lr_decay != "constant", "--lr_decay linear or cosine"),
    ("clip_low clip_high", lambda c: c.updates_per_step > 1,
     "--policy_updates 2 or more, or --passes_per_step: with one update a step the ratio is 1"),
)


# --- files and JSON rows


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text atomically: after a crash the file has the old text or the new text. Raises
    OSError."""
    temp = path.with_name(f".{path.name}.part")
    temp.write_text(text)
    temp.replace(path)


DATA_FILES = (".json", ".jsonl", ".parquet")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def read_jsonl(path: Path) -> list[Any]:
    """Rows of a .jsonl file; none if there is no file. A line that isn't JSON, which a crash may have cut
    short, is left out."""
    rows = []
    if path.is_file():
        # Not splitlines(), which also cuts at U+2028.
        with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):
                    rows.append(json.loads(line))
    return rows


GIB = 2**30


# --- numbers as text


def gib(n: float) -> str:
    """Bytes as text."""
    return f"{n / GIB:.1f} GiB" if n >= GIB / 2 else f"{n / 2**20:.1f} MiB"
