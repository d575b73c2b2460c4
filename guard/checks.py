"""The checks at the start of a run, in order. If a check fails, all ranks raise the same UserError.

preflight       all ranks run the same program, and no other run uses the folder
identity.py     all ranks read the same data and models
check_fit       memory and disk are large enough
check_gold      the gold answers can be graded
selfcheck.py    the engine and the trainer compute the same log-probs
first_look      some of the first responses score above 0"""

import os
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import ckpt
import dist
from configs import Config, Say
from data import Problem, Sample
from grading.answers import grade
from grading.extract import readers
from grading.rows import WORD
from grading.worker import MAX_ANSWER, Grader
from guard.files import names_in, read_json
from guard.identity import VERSIONS, check_same, source_of
from guard.lock import FolderLock
from guard.messages import GIB, UserError, explained, gib, require, short_hash, shorten
from model import load_config, load_tokenizer
from reward import graders_of, terms_of
from rollout import max_positions
from tools import plan

# --- the machines


def preflight(
    cfg: Config,
    lock: FolderLock,
    main: bool,
) -> None:
    """Let rank 0 (`main`) make the run's folder and take its lock.

    Raises UserError if ranks differ in code, packages, settings or folder, or if the folder is in use or not
    writable."""
    # The first argument, "runs", is the verb of the message "not every rank runs what rank 0 runs".
    program = VERSIONS | {"config": short_hash(repr(cfg).encode())}
    check_same("runs", program, "the same code, packages and command line on every machine")
    dist.together(lambda: claim_folder(cfg, lock) if main else None)
    # Rank 0 wrote its name into the lock file. All ranks must find this name there.
    owner = {f"the lock in {lock.file.parent}": dist.together(lock.owner)}
    check_same("finds", owner, "--out on a file system that all ranks share")


# Names of .git and of the files and folders that a run or tools.report writes. A new run refuses a folder
# --out that contains such a name, unless an earlier run wrote there. So a run overwrites no other files, and
# writes into no repository.
WRITTEN = (
    ".git config.json plan.json metrics.jsonl metrics.old.jsonl alarms.jsonl "
    "alarms.old.jsonl ckpt export samples eval tb plot.png report.html"
).split()


def claim_folder(cfg: Config, lock: FolderLock) -> None:
    """Makes the run's folder and takes its lock. Raises UserError if the folder:

    - is in use or not writable
    - is not empty, with --resume never (allowed after a restart by torchrun)
    - has no complete checkpoint, but a file or folder named in WRITTEN, which this run would replace. If a
      run of torz wrote the folder (see `is_run`), only export/ is protected.
    - has files in export/policy or export/critic that no export wrote"""
    folder = lock.file.parent
    with explained(f"can't write to {folder}", "--out with a writable folder", OSError):
        found = [name for name in names_in(folder) if name != lock.file.name]
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        require(
            cfg.resume != "never" or restarted or not found,
            f"{folder} is not empty, and --resume is never",
            "an empty --out, or --resume auto",
        )
        if not ckpt.complete(folder):
            protected = ["export"] if is_run(folder) else WRITTEN
            foreign = ", ".join(name for name in found if name in protected)
            require(
                not foreign,
                f"{folder} has {foreign}, which a new run would replace",
                "another --out",
            )
        # Checked now, so that the export at the end of the run does not fail.
        for who in ("policy", "critic"):
            ckpt.check_export_path(folder / "export" / who)
        lock.claim()  # also makes the folder


def is_run(folder: Path) -> bool:
    """Returns whether an earlier run has written to this folder. Raises UserError if its config.json is
    damaged or can't be read."""
    return read_json(folder / "config.json").keys() >= {"algo", "versions"}


def case_of(
    cfg: Config,
    world: dist.World,
    problems: int = 0,
) -> plan.Case:
    """Returns the run as a plan.Case, from which tools/plan.py computes memory and time. GPU memory and host
    memory are the smallest of all ranks. A collective: all ranks must call it. Raises UserError if a model
    can't be read.

    problems: number of prompts in an epoch; 0: not given, so the plan assumes plan.ASSUMED_PROMPTS"""
    cuda = world.device.type == "cuda"
    device_bytes = torch.cuda.mem_get_info()[1] if cuda else 0  # total memory of this rank's GPU
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))  # number of ranks on this machine
    every = dist.gather((device_bytes, plan.host_memory(), local))
    # Each has one value per rank. Memory is in bytes.
    device_memory, host_memory, local_ranks = zip(*every, strict=True)
    gpu = None
    if cuda:
        gpu = plan.gpu_of(torch.cuda.get_device_name(), min(device_memory))
    shapes = model_shapes(cfg)
    return plan.Case(cfg, world.size, shapes, gpu, max(local_ranks), min(host_memory), problems)


def model_shapes(cfg: Config) -> list[plan.Shape]:
    """Returns the sizes of policy, critic and reference. Raises UserError if a model can't be read."""
    paths = [source_of(who, vars(cfg)) for who in ("policy", "critic", "ref")]
    return [plan.shape_of(load_config(path).to_dict(), path) for path in paths]


def check_fit(case: plan.Case, say: Say) -> plan.Plan:
    """Returns the run's plan (tools/plan.py). Prints the plan's section "run". Raises UserError, with
    a remedy, if memory or disk is too small."""
    planned = plan.plan_of(case)
    say("\n".join([*plan.as_text({"run": planned["run"]}), ""]))
    shortage = plan.shortage(case)
    if shortage:
        raise UserError(f"{shortage}; needed: {plan.remedy(case)}")
    disk = planned["host and disk, GiB"]["disk, all"]  # GiB
    dist.together(check_space, case.cfg.folder, disk * GIB)
    engine = plan.engine_choice(case)
    say(f"{plan.verdict(case)}\n{engine}".rstrip() + "\n")
    return planned


def check_space(folder: Path, needed: float) -> None:
    """Raises UserError unless `folder` has `needed` bytes free for checkpoints and exports."""
    # Folders that the run will delete count as free: its old checkpoints, and parts that a killed run left.
    # It keeps links, and what they lead to.
    ours = rf"\.?{ckpt.STEP.pattern}(\..*\.part)?"
    used = 0  # bytes
    for old in folder.glob("ckpt/*"):
        if re.fullmatch(ours, old.name) and not old.is_symlink():
            used += sum(file.stat().st_size for file in old.glob("*") if file.is_file())
    free = shutil.disk_usage(folder).free + used
    require(
        free >= needed,
        f"only {gib(free)} free in {folder} for checkpoints and exports",
        f"{gib(needed)} there, a smaller --keep, or another --out",
    )


# --- models and data


def check_vocabularies(cfg: Config, tokenizer: Any) -> None:
    """Raises UserError if --critic_model or --ref_model does not fit --model. It must have all tokens of
    --model, with equal ids, and enough positions. Its embedding must not be smaller, because the policy may
    also sample ids without a token."""
    vocab_size = load_config(cfg.model).vocab_size  # number of rows of the policy's embedding
    # A tokenizer may have tokens without a row in the embedding. The policy can't use them.
    ours = {token: i for token, i in tokenizer.get_vocab().items() if i < vocab_size}
    for flag in ("critic_model", "ref_model"):
        path = getattr(cfg, flag)
        if not path:
            continue
        require(
            ours.items() <= load_tokenizer(path).get_vocab().items()
            and vocab_size <= load_config(path).vocab_size,
            f"--{flag} {path} has another vocabulary than --model {cfg.model}, "
            "or a smaller embedding",
            f"a --{flag} with the policy's tokenizer",
        )
        require(
            cfg.model_len <= max_positions(load_config(path)),
            f"--{flag} {path} has fewer positions than the {cfg.model_len:,} tokens of a sample",
            f"a smaller --max_response_len, or another --{flag}",
        )


def check_parts(
    problems: Sequence[Problem],
    tokenizer: Any,
    cfg: Config,
) -> None:
    """Raises UserError if --reward has format or tags, which need <think> in the response, and the prompt
    already ends in <think>."""
    # not graders: a user's function may be named tags
    names = {t.name for t in terms_of(cfg) if not t.is_grader}
    prompt = tokenizer.decode(list(problems[0].ids))
    for part in {"format", "tags"} & names:
        require(
            not prompt.rstrip().endswith("<think>"),
            f"--reward {part} looks for <think> in the response, and the prompt of "
            f"--template {cfg.template} already ends in <think>",
            f"a --template that does not end in <think>, or --reward without {part}",
        )


# --- the gold answers

GOLD_SAMPLE = 2_000  # maximum number of gold answers to check, drawn at random
GOLD_LIMIT = 0.01  # a run does not start if more than this share can't be graded
# A warning names the most frequent gold answer if a larger share of the problems has it.
COMMON = 0.05
# A text that stands where a gold answer is missing, such as "proof" and "notfound" in NuminaMath-1.5; and the
# start of an object or of a whole response.
PLACEHOLDER = re.compile(
    r"(\\(text|mathrm|boxed)\{|[\s$(\[{<])*(proof|proven|not.?(found|available)|"
    r"missing|(no|the)?.?answer|see .*(solution|proof|above)|none|null|nan|n/a|"
    r"tbd|todo|\?+|\.{2,}|…|-{2,})[\s$)\]}>.]*|"
    r"""(\{\s*["'][^"']*["']\s*:|<(answer|think)>).*""",
    re.IGNORECASE | re.DOTALL,
)
MOST_WORDS = 15  # a gold answer with more words is a worked solution, as in Orca-Math


def check_gold(
    name: str,
    problems: Sequence[Problem],
    grader: Grader,
    cfg: Config,
    world: dist.World,
    say: Say,
) -> None:
    """Prints how many gold answers of a data set can't be graded, and the warnings of `odd_golds`. Each rank
    checks a part of the problems. Raises UserError if the share is above GOLD_LIMIT, unless --go is given.
    Problems that only the user's functions grade are not checked.

    name: the data set's name in the message"""
    terms = terms_of(cfg)
    compared = []  # indices of the problems whose answers a grader compares
    for i, p in enumerate(problems):
        if any(term.kind for term in graders_of(p.dataset, terms)):
            compared.append(i)
    if len(compared) > GOLD_SAMPLE:
        compared = random.Random(cfg.seed).sample(compared, GOLD_SAMPLE)
    # Indices of the problems whose gold answers can't be graded. Each rank checks its part of `compared`.
    bad = dist.gather_all(ungradable(problems, compared[world.rank :: world.size], grader))
    shown = [f"{problems[i].where} {problems[i].answer!a:.60}" for i in sorted(bad)[:5]]
    found = (
        f"{name}: {len(bad)} of {len(compared)} gold answers can't be graded: {', '.join(shown)}"
    )
    if bad:
        say(found)
    for line in odd_golds(problems):
        say(f"{name}: {line}")
    require(
        cfg.go or len(bad) <= GOLD_LIMIT * len(compared),
        found,
        'readable answers, another --reward, "reward": "exact" in such rows, or --go',
    )


def odd_golds(problems: Sequence[Problem]) -> list[str]:
    """Returns warnings, one line each: several gold answers of a prompt, one gold answer of many prompts."""
    found = []
    golds = defaultdict(set)  # tokens of a prompt -> its gold answers
    for p in problems:
        golds[p.ids].add(p.answer)
    several = [sorted(answers) for answers in golds.values() if len(answers) > 1]
    if several:
        found.append(
            f"{len(several)} prompts have several gold answers, such as {several[0]!a:.60}"
        )
    counts = Counter(p.answer for p in problems if p.kind != "choice")
    for text, count in counts.most_common(1):  # none if all problems have choices
        if count > max(COMMON * len(problems), 10):
            found.append(f"the gold answer of {count} of {len(problems)} problems is {text!a:.60}")
    return found


def ungradable(
    problems: Sequence[Problem],
    indices: Sequence[int],
    grader: Grader,
) -> list[int]:
    """Returns the indices of the problems whose gold answers can't be graded. `indices`: problems to check.
    A gold answer can't be graded if it:

    - is longer than MAX_ANSWER characters
    - is not a letter, although its kind is "choice"
    - is a PLACEHOLDER, or has more than MOST_WORDS words, and its kind is "math"
    - has kind "math", and the grader raises an error or times out when it compares a test answer with it"""
    bad = []
    for i in indices:
        gold = problems[i].answer
        kind = problems[i].kind
        if len(gold) > MAX_ANSWER:
            bad.append(i)
        elif kind == "choice" and not grade(gold, gold, kind):  # not a letter
            bad.append(i)
        elif kind == "math" and (
            PLACEHOLDER.fullmatch(gold) or len(WORD.findall(gold)) > MOST_WORDS
        ):
            bad.append(i)
        elif kind == "math":
            # A wrong answer makes the grader parse `gold`. An answer equal to `gold` would not.
            response = r"<answer>\boxed{-1}</answer>"
            grader.submit(i, response, gold, True, kind)  # True: the limit did not cut the response
    grades = grader.results()
    return bad + [i for i, g in grades.items() if g.reason in ("error", "timeout")]


# --- the first responses


def readers_of(texts: Iterable[str]) -> list[str]:
    """Returns the names of the extractors that find an answer in a response, for all responses."""
    found = []
    for text in texts:
        found += [name for name in readers(text) if name != "whole"]
    return found


def first_look(
    cfg: Config,
    tokenizer: Any,
    batch: Sequence[Problem],
    samples: Sequence[Sample],
    say: Say,
    errors: Sequence[str],
) -> None:
    """Prints three prompts of the first step, each with one response. Also prints how many responses were
    correct, wrong, truncated and so on.

    Without --go, raises UserError if more than half of the responses were cut by length, or if all have the
    same reward of at most 0.

    batch: prompts of the step. samples: this rank's responses. errors: messages of its grader"""
    shown = dist.gather_all(s for s in samples if s.sample_id == 0 and s.prompt_id < 3)
    for s in sorted(shown, key=lambda s: s.key):
        say(
            f"\nprompt    {shorten(tokenizer.decode(list(s.prompt)), 400)}\n"
            f"response  {shorten(s.text, 400) or '(empty)'}\n"
            f"graded    {s.reason}, {s.reward:g}: {s.answer!r}, "
            f"gold {batch[s.prompt_id].answer!r}"
        )
    reasons = Counter(dist.gather_all(s.reason for s in samples))
    rewards = dist.gather_all(s.reward for s in samples)
    errors = dist.gather_all(errors)
    graded = ", ".join(f"{n} {why}" for why, n in reasons.most_common())
    found = f"of the first {len(rewards)} responses: {graded}"
    if errors:
        found += f"; first error: {ascii(errors[0])[1:-1]}"  # without the quotes
    unread = [s.policy_text for s in samples if s.reason == "unparsed"]
    others = Counter(dist.gather_all(readers_of(unread))).most_common()
    # Whether many responses have an answer that --extractor does not find. With --env that does not matter if
    # there are rewards.
    lost = reasons["unparsed"] > len(rewards) / 20 and not (cfg.env and any(rewards))
    if others and lost:
        found += f"; answers that another --extractor finds: {dict(others)}"
    say(f"\n{found}\n")
    # Remedies, if the run is refused below
    finds = "answers that --extractor finds, " if lost else ""
    mostly_cut = reasons["truncated"] > len(rewards) / 2
    remedies = "a --max_response_len that fits, a --stop that ends responses, easier --data"
    if reasons["error"] > len(rewards) / 2:
        remedies = "a --reward (or --env) without errors"
    from_teacher = not any(term.weight for term in terms_of(cfg))
    is_hopeless = max(rewards) <= 0 and len({*rewards}) == 1 and not from_teacher
    require(
        cfg.go or not (is_hopeless or mostly_cut),
        found,
        f"{finds}{remedies}, or --go to train anyway",
    )
