"""The README holds: its commands run, and every flag, file, function and metric that it names is there."""

import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, run

README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
PROSE = re.sub(r"^```.*?^```\n", "", README, flags=re.M | re.S)  # with the indented blocks
SPANS = [" ".join(s.split()) for s in re.findall(r"`([^`]+)`", re.sub(r"^    .*\n", "", PROSE, flags=re.M))]
TOOLS = ("python", "torchrun", "make", "pip", "tensorboard", "sbatch", "srun", "jupyter", "git")

# What isn't run here, and why. Everything else that the README tells people to type is.
CANNOT = {
    "make demo": "minutes, and a network to install from; test_train.py runs the same program",
    "make test": "this is it",
    "make rehearse": "33 processes and minutes",
    "make chaos": "twenty runs",
    "make bench": "half an hour, and the machine for itself",
    "torchrun": "GPUs, or several machines; that torchrun and train.py take its flags is checked below",
    "python train.py tiny-grpo": "a run of minutes; test_train.py runs such with a reward and data of its own",
    "python log.py runs/mine": "what the command before leaves; test_log.py runs it",
    "python rollout.py": "long responses; test_recipes.py runs it with short ones",
    "sbatch": "a cluster",
    "srun": "a cluster",
}
# What Slurm's programs take; theirs is not here to be asked.
SLURM = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "time", "requeue", "open-mode", "signal",
         "cpus-per-task"}
NO_FILES = {"NET/IB", "NET/Socket"}  # words of NCCL's
YOURS = {"my_reward.py", "FILE.py", "mine.jsonl"}  # the user's own
# Metrics that only some settings bring, and the settings.
ONLY = {"kl": dict(kl_coef=0.1), "eval/<set>/pass@<k>": dict(eval_samples=(4,)),
        "eval/<set>/maj@<k>": dict(eval_samples=(4,)), "time/ref": dict(kl_coef=0.1),
        "time/old_logp": dict(policy_updates=2)}
ON_CUDA = {"mfu", "mem/device_peak_gb"}


def commands() -> list[str]:
    """Every command in the README, on one line, without its comment."""
    blocks = re.findall(r"(?:^    .*\n)+", PROSE, re.M) + [body for kind, body in FENCED if kind in ("", "bash", "sh")]
    lines = [line for b in blocks for line in re.sub(r"\\\n\s*", " ", b).splitlines()] + SPANS
    words = [re.sub(r"(^|\s+)#.*", "", line).strip().removesuffix("&").split() for line in lines]
    return list(dict.fromkeys(" ".join(w) for w in words if len(w) > 1 and w[0] in TOOLS))


def section(title: str) -> str:
    """The text under a heading, to the next."""
    return README.partition(f"## {title}\n")[2].partition("\n## ")[0]


def glossary() -> dict[str, tuple[str, str]]:
    """Metric -> (unit, meaning)."""
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| (.*) \|$", section("What the metrics mean"), re.M)
    assert len(rows) == len({r[0] for r in rows}) > 30
    return {key: (unit.strip(), meaning) for key, unit, meaning in rows}


def pattern(metric: str) -> str:
    """Regular expression of the keys that a glossary entry stands for."""
    for hole, what in {"<reason>": "[a-z]+", "<set>": "[^/]+", "<phase>": "(?!step$)[a-z_]+", "<k>": r"\d+"}.items():
        metric = metric.replace(hole, what)
    return metric


@pytest.fixture(scope="session")
def placeholders(two_ranks, tmp_path_factory) -> dict[str, str]:
    """What stands for the README's capital words and user's files; the reward function is the README's own."""
    folder = tmp_path_factory.mktemp("docs")
    (body,) = [body for kind, body in FENCED if kind == "python" and "def score" in body]
    (folder / "my_reward.py").write_text(body)
    rows = [{"response": rf"<answer>\boxed{{{i}}}</answer>", "answer": "2"} for i in (2, 3)]
    (folder / "RESPONSES.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return {"RUN": str(two_ranks[0]), "STEP": "2", "OUT": f"{folder}/hf",
            **{name: f"{folder}/{name}" for name in ("RESPONSES.jsonl", "my_reward.py")}}


def test_commands_that_can_run_here_do(placeholders):
    ran, holes = [], "|".join(rf"(?<![\w/]){re.escape(name)}(?!\w)" for name in placeholders)
    for command in commands():
        if any(command.startswith(c) for c in CANNOT):
            continue
        assert command.startswith("python "), f"not run and not in CANNOT: {command}"
        filled = shlex.split(re.sub(holes, lambda m: placeholders[m[0]], command))
        done = subprocess.run([sys.executable, *filled[1:]], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0 and done.stdout, (filled, done.stdout[-500:], done.stderr[-2000:])
        ran.append(command.split()[1])
    assert {"configs.py", "train.py", "reward.py", "ckpt.py"} <= set(ran)


def test_commands_that_cannot_run_here_are_taken_by_torchrun_and_train():
    from torch.distributed.run import get_args_parser

    from configs import parse

    seen = 0
    for command in commands():
        at = command.find("torchrun ")
        if "train.py" not in command or at < 0:
            continue
        words = [w for w in shlex.split(command[at:])[1:] if w != "…"]
        said = get_args_parser().parse_args(words)
        assert said.training_script == "train.py"
        if said.training_script_args:
            parse(said.training_script_args)
            seen += 1
    assert seen >= 3


def test_shell_scripts_are_shell():
    scripts = [body for kind, body in FENCED if kind == "bash"]
    assert any("#SBATCH" in s for s in scripts)
    for s in scripts:
        assert subprocess.run(["bash", "-n"], input=s, text=True, capture_output=True, check=False).stderr == ""


def test_every_flag_exists():
    from torch.distributed.run import get_args_parser

    from configs import Config

    ours = {f.name for f in dataclasses.fields(Config)}
    scripts = {f for p in (*(ROOT / f"{n}.py" for n in ("reward", "tiny", "log", "plan")), *ROOT.glob("bench/*.py"))
               for f in re.findall(r'add_argument\("--([\w-]+)"', p.read_text(encoding="utf-8"))}
    theirs = {o.removeprefix("--") for a in get_args_parser()._actions for o in a.option_strings}
    switches = {f"no-{f.name}" for f in dataclasses.fields(Config) if f.type == "bool"}
    known = ours | switches | scripts | theirs | SLURM | {"logdir", "help"}
    named = set(re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", README))
    assert len(named & ours) > 20
    assert not {f for f in named if f not in known and f.replace("-", "_") not in ours}


def test_every_file_exists(two_ranks):
    keys, seen = [pattern(k) for k in glossary()], 0
    for name in {s for s in SPANS if re.fullmatch(r"[\w.…/-]+", s)}:
        suffix = re.fullmatch(r".*\w\.(py|json|jsonl|txt|md|toml|ipynb|png|html|sh)", name)
        if not (suffix or "/" in name) or name in NO_FILES | YOURS or any(re.fullmatch(k, name) for k in keys):
            continue
        name = name.removeprefix("runs/NAME/").replace("…/", "export/").replace("NNNNNN", "000002")
        made = name.rstrip("/") in re.findall(r'dump\(f"(\w+)/', (ROOT / "train.py").read_text(encoding="utf-8"))
        assert made or (ROOT / name).exists() or (two_ranks[0] / name).exists(), name
        seen += 1
    assert seen > 20
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_every_function_exists():
    modules, seen = {p.stem for p in ROOT.glob("*.py")}, 0
    for name in {s for s in SPANS if re.fullmatch(r"\w+(\.\w+)+", s) and s.partition(".")[0] in modules}:
        if name.endswith((".py", ".json", ".jsonl")):
            continue
        module, *path = name.split(".")
        what = importlib.import_module(module)
        for part in path:
            assert hasattr(what, part) or part in getattr(what, "__dataclass_fields__", ()), name
            what = getattr(what, part, None)
        seen += 1
    assert seen > 20


def test_rows_of_data_are_read():
    from data import problem_of

    rows = [s for s in SPANS if s.startswith('{"prompt"')]
    assert rows and all(problem_of(json.loads(r), "README") for r in rows)


@pytest.fixture(scope="module")
def unusual(base, tmp_path_factory):
    """Metrics of a step with all the settings of ONLY."""
    settings = {k: v for only in ONLY.values() for k, v in only.items()}
    rows, _ = run(dataclasses.replace(base, steps=1, eval_every=1, **settings), tmp_path_factory.mktemp("only") / "run")
    return rows


def test_the_glossary_is_the_metrics(two_ranks, unusual):
    """Each metric is explained, with its unit; each that is explained is produced, those of ONLY by their settings alone."""
    usual, special = ({k for r in rows for k in r} for rows in (two_ranks[1], unusual))
    entries = glossary()
    for key in usual | special:
        assert sum(bool(re.fullmatch(pattern(e), key)) for e in entries) == 1, f"{key} is not in the README once"
    for entry, (unit, meaning) in entries.items():
        assert unit and meaning, entry
        found = {key for key in usual if re.fullmatch(pattern(entry), key)}
        assert found or entry in ONLY or entry in ON_CUDA, f"no run produces {entry}"
    for entry in ONLY:
        assert not any(re.fullmatch(pattern(entry), key) for key in usual), f"{entry} needs no special setting"
        assert any(re.fullmatch(pattern(entry), key) for key in special), f"{ONLY[entry]} doesn't bring {entry}"
    source = (ROOT / "train.py").read_text(encoding="utf-8")
    assert all(f'["{key}"] = ' in source for key in ON_CUDA)


def test_the_glossary_names_every_phase_and_reason():
    from reward import REASONS

    phases = re.findall(r'dist\.phase\("(\w+)"\)', (ROOT / "train.py").read_text(encoding="utf-8"))
    assert set(re.findall(r"`(\w+)`", glossary()["time/<phase>"][1])) == {*phases, "wake", "sync", "sleep"}  # the ledger's
    assert set(re.findall(r"`(\w+)`", glossary()["grade/<reason>"][1])) == set(REASONS)
