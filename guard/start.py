"""The checks at the start of a run, in order. If a check fails, all ranks raise the same UserError.

preflight       all ranks run the same program, and no other run uses the folder
check_same      all ranks read the same data and models
check_fit       memory and disk are large enough
check_gold      the gold answers can be graded
selfcheck.py    the engine and the trainer compute the same log-probs
first_look      some of the first responses score above 0"""

import fnmatch
import os
import random
import re
import shlex
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

import ckpt
import dist
from configs import (
    GIB,
    Config,
    Say,
    UserError,
    differences,
    explained,
    gib,
    if_there,
    names_in,
    nearest,
    read_json,
    require,
    short_hash,
    shorten,
)
from data import Problem, Sample, fingerprint, fix_date
from grading.answers import grade, readers
from grading.worker import MAX_ANSWER, Grader
from guard.lock import FolderLock
from model import folder_fingerprint, load_config, load_tokenizer
from rollout import Sets, accuracy, extractors, graders_of, terms_of
from tools import plan

# --- the machines


def preflight(cfg: Config, lock: FolderLock, main: bool) -> None:
    """Let rank 0 (`main`) make the run's folder and take its lock.

    Raises UserError if ranks differ in code, packages or settings, or if the folder is in use or not
    writable."""
    check_same(
        "runs",
        ckpt.VERSIONS | {"config": short_hash(repr(cfg).encode())},
        "the same code, packages and command line on every machine",
    )
    dist.together(lambda: claim_folder(cfg, lock) if main else None)
    dist.together(check_shared, lock, dist.gather(lock.mine)[0])


def claim_folder(cfg: Config, lock: FolderLock) -> None:
    """Makes the run's folder and takes its lock. Raises UserError if the folder:

    - is in use or not writable
    - is not empty, with --resume never (allowed after a restart by torchrun)
    - has a file or folder named in WRITTEN, but is not a run's folder
    - has a folder export/, but no complete checkpoint
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
        foreign = [] if is_run(folder) else [name for name in found if name in WRITTEN]
        require(
            not foreign,
            f"{folder} has {', '.join(foreign)}, which no run of torz wrote",
            "another --out",
        )
        require(
            "export" not in found or bool(ckpt.complete(folder)),
            f"{folder}/export is of a run whose checkpoints are gone",
            "another --out, so that the exported models stay",
        )
        # Checked now, so that the export at the end of the run does not fail.
        for who in ("policy", "critic"):
            ckpt.check_export_path(folder / "export" / who)
        lock.claim()


# Names of .git and of the files and folders that a run or tools.report writes. A new run refuses a folder
# --out that contains such a name, unless an earlier run wrote there. So a run overwrites no other files, and
# writes into no repository.
WRITTEN = (
    ".git config.json plan.json metrics.jsonl metrics.old.jsonl alarms.jsonl "
    "alarms.old.jsonl ckpt export samples eval tb nonfinite plot.png report.html"
).split()


def is_run(folder: Path) -> bool:
    """Returns whether an earlier run has written to this folder. Raises UserError if this can't be read."""
    if_there(Path.read_bytes, folder / "config.json")
    with suppress(UserError):
        if read_json(folder / "config.json").keys() >= {"algo", "versions"}:
            return True
    return bool(ckpt.complete(folder))


def check_shared(lock: FolderLock, owner: Mapping[str, Any]) -> None:
    """Raises UserError if this rank can't write to the lock's folder, or if rank 0 has another folder at this
    path. owner: content of rank 0's lock."""
    folder, needed = lock.file.parent, "--out on a file system that all ranks share"
    require(
        lock.owner() == owner,
        f"on this host, {folder} is another folder than on rank 0's host {owner['host']}",
        needed,
    )
    with explained(f"can't write to {folder}", needed, OSError):
        tempfile.TemporaryFile(dir=folder).close()


def check_same(verb: str, facts: Mapping[str, str], needed: str) -> None:
    """Raises UserError unless `facts` is the same on all ranks. The message names the hosts that differ.

    verb: "reads" gives "not every rank reads what rank 0 reads"
    facts: name -> text, such as a file's hash
    needed: what the user should do"""
    every = dist.gather((os.uname().nodename, facts))
    main_host, expected = every[0]
    other = sorted(
        {
            f"{host} ({'; '.join(differences(expected, found))})"
            for host, found in every
            if found != expected
        }
    )
    require(
        not other,
        f"not every rank {verb} what rank 0 on {main_host} {verb}: {', '.join(other)}",
        needed,
    )


def read_facts(
    cfg: Config, problems: Sequence[Problem], held_out: Sets, tokenizer: Any, grader: Grader
) -> tuple[ckpt.Facts, ckpt.Facts]:
    """Returns two dicts about what the run reads: name -> value, such as a hash. When the run is resumed, the
    first dict must be unchanged. Changes in the second dict are printed."""
    files, config = grader.files, vars(cfg)
    read = {
        "problems (--data, --template, --reward)": fingerprint(problems),
        "--env": files.get(cfg.env),
        "chat template": ckpt.template_hash(tokenizer, cfg.template),
        "--reward": [
            f"{t.name}={t.weight} {t.dataset}{t.kind or files.get(t.custom)}" for t in terms_of(cfg)
        ],
    }
    # A changed file or temperature would give other scores under the same metric name.
    read |= {
        f"--eval_data {name}": f"{len(found)} problems, {fingerprint(found)}, "
        f"temperature {cfg.eval_temperature[i % len(cfg.eval_temperature)]}"
        for i, (name, found) in enumerate(held_out.items())
    }
    noted = ckpt.VERSIONS | read  # config.json gets `noted`, so that tools.report can compare runs
    for who, used in ("policy", True), ("critic", cfg.algo == "ppo"), ("ref", cfg.has_ref):
        if used:
            read |= ckpt.model_facts(ckpt.source_of(who, config), tokenizer, who)
    if cfg.has_ref:
        weights = dist.weight_files(ckpt.source_of("ref", config))
        read["ref's weights"] = (
            "in the checkpoint" if cfg.keeps_ref else [*map(ckpt.crc32, weights)]
        )
    return read, noted | {
        f"files of --{name}": folder_fingerprint(config[name])
        for name in ("model", "critic_model", "ref_model")
        if config[name]
    }


def with_date(cfg: Config, tokenizer: Any, earlier: str, say: Say) -> Config:
    """Makes the chat template print the same date during the whole run. Returns the config with this date in
    the field `date`; "" if the template prints no date.

    The date is --date, else `earlier` (from the checkpoint), else today's date on rank 0. Raises UserError if
    --date is given, but the template prints no date. A collective: all ranks must call it."""
    day = cfg.date or earlier or dist.gather(str(date.today()))[0]
    day = fix_date(tokenizer, day) if cfg.template == "chat" else ""
    require(
        bool(day or not cfg.date),
        "--date has no effect: the prompts do not contain today's date",
        "no --date",
    )
    if day:
        say(f"the prompts contain a date: {day} during the whole run (--date)")
    return replace(cfg, date=day)


def settled(cfg: Config, world: dist.World, saved: Mapping[str, Any]) -> Config:
    """Returns the config with the plan's values in place of `auto` in --shard_ranks and --offload, and of
    --pack_len 0 (tools/plan.py, settle). If the number of ranks is the same as at the last save,
    --shard_ranks and --pack_len are the checkpoint's, so that gradients are rounded as before.

    saved: content of the checkpoint's state.json"""
    before = saved["config"] if saved.get("ranks") == world.size else {}
    if cfg.shard_ranks == "auto":
        cfg = replace(cfg, shard_ranks=before.get("shard_ranks", "auto"))
    if cfg.pack_len == 0:
        cfg = replace(cfg, pack_len=before.get("pack_len", 0))
    return case_of(cfg, world).cfg


def checkpoint_id(path: Path | None) -> str:
    """Returns the name and a hash of a complete checkpoint, or "none" if `path` is None."""
    if path is None:
        return "none"
    return f"{path.name} {short_hash(if_there(Path.read_bytes, path / 'COMPLETE') or b'')}"


def check_space(folder: Path, needed: float) -> None:
    """Raises UserError unless `folder` has `needed` bytes free for checkpoints and exports."""
    used = sum(f.stat().st_size for f in folder.glob("ckpt/*step_*/*") if f.is_file())
    # `used` counts as free, because the run will delete its old checkpoints.
    free = shutil.disk_usage(folder).free + used
    require(
        free >= needed,
        f"only {gib(free)} free in {folder} for checkpoints and exports",
        f"{gib(needed)} there, a smaller --keep, or another --out",
    )


def model_shapes(cfg: Config) -> list[plan.Shape]:
    """Returns the sizes of policy, critic and reference. Raises UserError if a model can't be read."""
    return [
        plan.shape_of(load_config(path).to_dict(), path)
        for path in (cfg.model, cfg.critic_model or cfg.model, cfg.ref_model or cfg.model)
    ]


def check_vocabularies(cfg: Config, tokenizer: Any) -> None:
    """Raises UserError unless --critic_model and --ref_model have all tokens of --model, with equal ids."""
    known = load_config(cfg.model).vocab_size
    ours = {token: i for token, i in tokenizer.get_vocab().items() if i < known}
    for flag in ("critic_model", "ref_model"):
        if path := getattr(cfg, flag):
            theirs = (
                load_tokenizer(path).get_vocab() if any(Path(path).glob("tokenizer*")) else ours
            )
            require(
                ours.items() <= theirs.items()
                and max(ours.values()) < load_config(path).vocab_size,
                f"--{flag} {path} has another vocabulary than --model {cfg.model}",
                f"a --{flag} with the policy's tokenizer",
            )


def check_keep_best(cfg: Config, held_out: Sequence[str]) -> None:
    """Raises UserError if --keep_best matches no metric. held_out: names of the evaluation sets."""
    if cfg.keep_best in ("", "auto"):
        return
    samples = cfg.eval_samples
    of_sets = [
        f"eval/{name}/{metric}"
        for i, name in enumerate(held_out)
        for metric in accuracy([], samples[i % len(samples)])
    ]
    every = [*of_sets, "reward", "score", "pass@n"]
    require(
        bool(fnmatch.filter(every, cfg.keep_best)),
        f"no metric {cfg.keep_best!r}{nearest(cfg.keep_best, every)}",
        "--keep_best " + (", ".join(of_sets[:3]) or "reward"),
    )


def case_of(cfg: Config, world: dist.World, problems: int = 0) -> plan.Case:
    """Returns the run as a plan.Case, from which tools/plan.py computes memory and time. GPU memory and host
    memory are the smallest of all ranks. A collective: all ranks must call it.

    problems: number of prompts in an epoch; 0: not given, so the plan assumes plan.ASSUMED_PROMPTS"""
    cuda = world.device.type == "cuda"
    device_bytes = torch.cuda.mem_get_info()[1] if cuda else 0
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    memory, host, fewer = map(
        min, zip(*dist.gather((device_bytes, plan.host_memory(), -local)), strict=True)
    )
    gpu = plan.gpu_of(torch.cuda.get_device_name(), memory) if cuda else None
    return plan.Case(cfg, world.size, model_shapes(cfg), gpu, -fewer, host, problems)


def check_fit(cfg: Config, world: dist.World, problems: int, say: Say) -> plan.Plan:
    """Returns the run's plan (tools/plan.py). Prints the plan's section "run" and the speed of the network.
    Raises UserError, with a remedy, if memory or disk is too small.

    problems: number of prompts in an epoch"""
    case = case_of(cfg, world, problems)
    planned, shortage = plan.plan_of(case), plan.shortage(case)
    say("\n".join([*plan.as_text({"run": planned["run"]}), ""]))
    require(not shortage, shortage, shortage and plan.remedy(case))
    disk = planned["host and disk, GiB"]["disk, all"]
    dist.together(check_space, Path(cfg.out).absolute(), disk * GIB)
    say(f"{plan.verdict(case)}\nthe whole plan: {Path(cfg.out) / 'plan.json'}\n")
    dist.check_network(world, case.local, (case.within, case.between), say)
    return planned


# --- the gold answers

GOLD_SAMPLE = 2_000  # maximum number of gold answers to check, drawn at random
GOLD_LIMIT = 0.01  # a run does not start if more than this share can't be graded
# A text that stands where a gold answer is missing. NuminaMath-1.5 has "proof" and "notfound".
PLACEHOLDER = re.compile(
    r"(\\(text|mathrm|boxed)\{|[\s$(\[{<])*(proof|proven|not.?(found|available)|missing|"
    r"(no|the)?.?answer|see .*(solution|proof|above)|none|null|nan|n/a|tbd|todo|\?+|"
    r"\.{2,}|…|-{2,})[\s$)\]}>.]*",
    re.IGNORECASE,
)
COMMON = 0.05  # a gold answer of a larger share of the problems is told


def check_gold(
    name: str,
    problems: Sequence[Problem],
    grader: Grader,
    cfg: Config,
    world: dist.World,
    say: Say,
    refuse: bool = True,
) -> None:
    """Prints how many gold answers of a data set can't be graded. Raises UserError if their share is above
    GOLD_LIMIT, unless `refuse` is False or --go is given. Problems that only the user's functions grade are
    not checked.

    name: the data set's name in the message"""
    terms = terms_of(cfg)
    indices = [
        i for i, p in enumerate(problems) if any(t.kind for t in graders_of(p.dataset, terms))
    ]
    if len(indices) > GOLD_SAMPLE:
        indices = random.Random(cfg.seed).sample(indices, GOLD_SAMPLE)
    bad = dist.gather_all(ungradable(problems, indices[world.rank :: world.size], grader))
    shown = [f"{problems[i].where} {problems[i].answer!a:.60}" for i in sorted(bad)[:5]]
    found = f"{name}: {len(bad)} of {len(indices)} gold answers can't be graded: {', '.join(shown)}"
    if bad:
        say(found)
    for line in odd_golds(problems):
        say(f"{name}: {line}")
    require(
        not refuse or cfg.go or len(bad) <= GOLD_LIMIT * len(indices),
        found,
        "answers that math-verify "
        'can read, another --reward, "reward": "exact" in such rows, or --go',
    )


def odd_golds(problems: Sequence[Problem]) -> list[str]:
    """Returns warnings, one line each: several gold answers of a prompt, one gold answer of many prompts."""
    golds, found = defaultdict(set), []  # golds: prompt -> its gold answers
    for p in problems:
        golds[p.ids].add(p.answer)
    several = [sorted(answers) for answers in golds.values() if len(answers) > 1]
    if several:
        found.append(
            f"{len(several)} prompts have several gold answers, such as {several[0]!a:.60}"
        )
    for text, count in Counter(p.answer for p in problems if p.kind != "choice").most_common(1):
        if count > max(COMMON * len(problems), 10):
            found.append(f"the gold answer of {count} of {len(problems)} problems is {text!a:.60}")
    return found


def ungradable(problems: Sequence[Problem], indices: Sequence[int], grader: Grader) -> list[int]:
    """Returns the indices of the problems whose gold answers can't be graded. `indices`: problems to check.
    A gold answer can't be graded if it:

    - is empty or longer than MAX_ANSWER characters
    - is not a letter, although its kind is "choice"
    - is a PLACEHOLDER, and its kind is "math"
    - has kind "math", and the grader raises an error or times out when it compares a test answer with it"""
    bad = []
    for i in indices:
        gold, kind = problems[i].answer.strip(), problems[i].kind
        if not gold or len(gold) > MAX_ANSWER or (kind == "choice" and not grade(gold, gold, kind)):
            bad.append(i)
        elif kind == "math" and PLACEHOLDER.fullmatch(gold):
            bad.append(i)
        elif kind == "math":
            # A wrong answer makes the grader parse `gold`. An answer equal to `gold` would not.
            other = "-1.5" if "." in gold else "-1"
            grader.submit(i, rf"<answer>\boxed{{{other}}}</answer>", gold, True, kind)
    grades = grader.results()
    return bad + [i for i, g in grades.items() if g.reason in ("error", "timeout")]


# --- reward parts


def check_parts(problems: Sequence[Problem], tokenizer: Any, cfg: Config) -> None:
    """Raises UserError for an extra reward in --reward that can't work:

    format, tags    need <think> in the response, so the prompt must not end with <think>
    length          needs several samples of a prompt, all in one step"""
    names = {t.name for t in terms_of(cfg)}
    require(
        "length" not in names or cfg.samples_per_prompt > 1,
        "--reward length compares the samples of a "
        "prompt, and each prompt has only one (--samples_per_prompt 1)",
        "--samples_per_prompt 2 or more, or --reward without length",
    )
    require(
        "length" not in names or not cfg.carry or cfg.compares_samples,
        "--reward length compares the "
        f"samples of a prompt, and --carry {cfg.carry} may train on them in several steps",
        "only one of them",
    )
    parts = " ".join(name for name in ("format", "tags") if name in names)
    prompt = tokenizer.decode(list(problems[0].ids))
    require(
        not parts or not prompt.rstrip().endswith("<think>"),
        f"--reward {parts} looks for <think> in the response, and the prompt of "
        f"--template {cfg.template} already ends in <think>",
        f"a --template that does not end in <think>, or --reward without {parts}",
    )


# --- the first responses


def first_look(
    cfg: Config,
    tokenizer: Any,
    batch: Sequence[Problem],
    samples: Sequence[Sample],
    say: Say,
    errors: Sequence[str] = (),
) -> None:
    """Prints three prompts of the first step, each with one response. Also prints how many responses were
    correct, wrong, truncated and so on.

    Without --go, raises UserError if all responses score 0, if more than half were cut by length, or if a
    function of --reward raised an error on all of them.

    batch: prompts of the step. samples: this rank's responses. errors: messages of its grader"""
    if dist.stop_requested():
        return
    shown = dist.gather_all(s for s in samples if s.sample_id == 0 and s.prompt_id < 3)
    for s in sorted(shown, key=lambda s: s.prompt_id):
        say(
            f"\nprompt    {shorten(tokenizer.decode(list(s.prompt)), 400)}\n"
            f"response  {shorten(s.text, 400) or '(empty)'}\n"
            f"graded    {s.reason}, {s.reward:g}: {s.answer!r}, gold "
            f"{batch[s.prompt_id].answer!r}"
        )
    reasons = Counter(dist.gather_all(s.reason for s in samples))
    total, cut = reasons.total(), reasons["truncated"]
    graded = ", ".join(f"{n} {why}" for why, n in reasons.most_common())
    say(f"\nof the first {total} responses: {graded}\n")
    found = Counter(
        dist.gather_all(
            name
            for s in samples
            if s.reason == "unparsed"
            for name in readers(s.policy_text)
            if name != "whole"
        )
    )
    others = ", ".join(f"{name} in {n}" for name, n in found.most_common())
    if others and reasons["unparsed"] > total / 20:
        say(
            f"--extractor {' '.join(cfg.extractor)} found no answer in "
            f"{reasons['unparsed']} responses; others would: {others}\n"
        )
    require(
        cfg.go or cut <= total / 2,
        f"{cut} of the first {total} responses were cut at "
        f"--max_response_len {cfg.max_response_len} and score 0",
        "a larger --max_response_len, a --template or --stop that ends responses, or "
        "--go to train anyway",
    )
    mostly, errors = reasons.most_common(1)[0][0], dist.gather_all(errors[:1])
    scored = any(dist.gather_all(s.reward for s in samples)) or not any(
        t.weight for t in terms_of(cfg)
    )
    first = f"; first error: {ascii(errors[0])[1:-1]}" if errors else ""
    remedy = {
        "unparsed": f"an --extractor that finds answers ({others or 'none does'}), or a --template "
        "that asks for the format of --extractor",
        "error": f"{'an --env' if cfg.env else 'a --reward'} that doesn't raise",
        "timeout": "a larger --grade_deadline",
    }
    require(
        cfg.go or scored,
        f"all of the first {total} responses score 0 (most common reason: "
        f"{mostly}{first}); to grade them again: python reward.py "
        f"{cfg.out}/samples/step_000000.jsonl --reward {shlex.join(cfg.reward)} "
        f"--extractor {extractors(cfg)['']} --deadline {cfg.grade_deadline:g}",
        remedy.get(mostly, "easier --data, or a --model that is sometimes right")
        + ", or --go to train anyway",
    )
    failures = Counter(dist.gather_all(name for s in samples for name in s.failed))
    failed = [
        name for name, n in failures.items() if n == total - cut
    ]  # truncated responses are not graded
    require(
        cfg.go or not failed,
        f"--reward {' '.join(failed)} failed on all of the first {total} responses{first}",
        "a function that doesn't raise, or --go to train anyway",
    )
