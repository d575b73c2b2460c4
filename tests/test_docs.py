"""Tests that the commands in README.md, CONTRIBUTING.md and docs/*.md run, and that the flags, files and
functions in these files exist. Commands are found only in indented blocks, `bash` blocks and `code spans`."""

import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import transformers
from conftest import ROOT, forked, wait_until
from test_log import METRICS
from torch.distributed.run import get_args_parser

import configs
import train
from bench.algorithms import RECIPES
from configs import PRESETS
from grading.rows import problem_of
from tools import tiny
from tools.evaluate import EvalConfig
from tools.plan import PlanConfig
from tools.report import report_on, write_report

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
DOCS = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in FILES}
README = DOCS["README.md"]
TEXT = "\n\n".join(DOCS.values())
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.M | re.S)
PROSE = re.sub(r"^```.*?^```\n", "", TEXT, flags=re.M | re.S)
UNINDENTED = re.sub(r"^    .*\n", "", PROSE, flags=re.M)
SPANS = [" ".join(s.split()) for s in re.findall(r"`([^`]+)`", UNINDENTED)]
FOLDERS = ("engines", "grading", "guard", "layers", "tools")
SOURCES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p.read_text(encoding="utf-8")
           for folder in ("", *FOLDERS) for p in (ROOT / folder).glob("*.py") if p.stem != "__init__"}
TOOLS = ("python", "torchrun", "make", "pip", "ruff", "tensorboard", "sbatch", "srun", "jupyter", "git")

# Reason -> first words of the commands that the tests do not run for this reason.
CANNOT = {
    "takes minutes or hours": (
        "make demo", "make gsm8k", "make rehearse", "make chaos", "make bench", "python -m bench.tasks",
        "python -m bench.tail", "python -m bench.chaos", "python -m bench.ablations",
        "python -m bench.recurrent", "python -m tools.evaluate", "python train.py tiny-grpo"),
    "needs a GPU, a cluster or a network": (
        "torchrun", "sbatch", "srun", "pip install", "python train.py orz-7b --layout",
        "python train.py orz-32b", "python train.py gsm8k"),
    "needs the history of the repository": ("git show",),
    "serves until it is stopped": ("tensorboard", "jupyter lab", "python -m vllm.entrypoints"),
    "is this, or a part of it": ("make test", "ruff check", "ruff format")}
# Flags of Slurm's programs. Slurm is not installed, so the tests can't check them.
SLURM = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "time", "requeue", "open-mode",
         "signal", "cpus-per-task"}
NOT_FILES = {"NET/IB", "NET/Socket", "Qwen/Qwen2.5-0.5B", "wandb-id.txt"}  # the last needs --track
YOURS = {"my_reward.py", "my.py", "calculator.py", "guess.py", "gym_rows.py",  # files that a user writes
         "slow_engine.py", "vf_env.py", "FILE.py",
         "mine.jsonl", "subset.jsonl", "gym.jsonl", "gym-heldout.jsonl", "table.tex",
         "vf.jsonl", "vf-heldout.jsonl"}


def commands() -> list[str]:
    """Returns every command in the docs, as one line without its comment."""
    blocks = re.findall(r"(?:^    .*\n)+", PROSE, re.M)
    blocks += [body for kind, body in FENCED if kind in ("", "bash", "sh")]
    lines = [line for b in blocks for line in re.sub(r"\\\n\s*", " ", b).splitlines()] + SPANS
    words = [re.sub(r"(^|\s+)#.*", "", line).strip().removesuffix("&").split() for line in lines]
    return list(dict.fromkeys(" ".join(w) for w in words if len(w) > 1 and w[0] in TOOLS))


def tables(text: str, first: str) -> list[list[list[str]]]:
    """Returns the Markdown tables in `text` whose first head cell is `first`, as lists of rows."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        lines = [line for line in block.splitlines() if not re.fullmatch(r"[|:\s-]+", line)]
        head, *rows = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        if head[0] == first:
            found.append([head, *rows])
    return found


def settings(cell: str) -> dict:
    """Returns name -> Python value for each `name=value` in a table cell."""
    def value(text: str):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return getattr(configs, text, text)  # the docs write STEP_BY_STEP instead of its long text

    return {name: value(text) for name, text in re.findall(r"`(\w+)=([^`]+)`", cell)}


@pytest.fixture(scope="session")
def placeholders(two_ranks, tmp_path_factory) -> dict[str, str]:
    """Returns the replacement of each placeholder (such as RUN) in the docs' commands."""
    folder = tmp_path_factory.mktemp("docs")
    (body,) = re.findall(r"^```python\n(def score.*?)^```", README, re.M | re.S)
    (folder / "my_reward.py").write_text(body)
    files = ("my_reward.py", "compare.png", "table.tex")
    return {"RUN": str(two_ranks[0]), "RUN2": str(two_ranks[0]), "STEP": "2", "OUT": f"{folder}/hf",
            **{name: f"{folder}/{name}" for name in files}}


def test_commands_that_can_run_here_do(placeholders):
    ran = []
    holes = "|".join(rf"(?<![\w/]){re.escape(name)}(?!\w)" for name in placeholders)
    for command in commands():
        if any(command.startswith(starts) for starts in CANNOT.values()):
            continue
        assert command.startswith("python "), f"not run and not in CANNOT: {command}"
        filled = shlex.split(re.sub(holes, lambda m: placeholders[m[0]], command))
        process = forked(*filled[1:], cwd=ROOT)
        assert any(process.communicate()) and process.returncode == 0, filled
        ran.append(command.removeprefix("python ").removeprefix("-m ").split()[0])
    assert {"tools.plan", "train.py", "reward.py", "ckpt.py", "tools.report", "pytest"} <= set(ran)


def test_commands_that_cannot_run_here_are_taken_by_torchrun_and_train():
    seen = 0
    for command in commands():
        at = max(command.find("torchrun "), command.find("python train.py orz-7b --layout"))
        if "train.py" not in command or at < 0:
            continue
        words = [w for w in shlex.split(command[at:])[1:] if w != "…"]
        said = get_args_parser().parse_args(words)
        assert said.training_script == "train.py"
        if said.training_script_args:
            configs.parse(said.training_script_args)
            seen += 1
    assert seen >= 3


def test_every_make_target_and_requirements_file_exists():
    targets = re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    named = {c.split()[1] for c in commands() if c.startswith("make ")}
    assert named <= set(targets) and {"demo", "test"} <= named
    files = {name for c in commands() if c.startswith("pip ") for name in re.findall(r"-r (\S+)", c)}
    assert files and all((ROOT / name).is_file() for name in files)


STAND_INS = {  # these scripts replace Slurm's programs and write their arguments to files
    "scontrol": 'if [ "$1" = show ]; then echo first; else echo "$@" >> requeued; fi',
    "scancel": 'echo "$@" > cancelled; kill -USR1 "$(cat pid)"',
    # Stands in for the training run. At SIGUSR1 it takes 0.3 s to save, then exits. With LAST set, it also
    # writes the final export. With ENDS set, it exits at once with status 3.
    "srun": 'echo "$@" > arguments\n'
            "trap 'sleep 0.3; [ \"$LAST\" ] && mkdir -p run/export/policy; touch saved; exit 0' USR1\n"
            "echo $$ > pid\n"
            '[ "$ENDS" ] && exit 3\n'
            "for _ in $(seq 300); do sleep 0.1; done"}


@pytest.mark.parametrize("signalled, last", [(False, False), (True, False), (True, True)])
def test_the_slurm_script_saves_and_requeues(tmp_path, signalled, last):
    """The script requeues a run that Slurm's signal stops (`signalled`), but not a finished run (`last`)."""
    (script,) = [body for kind, body in FENCED if kind == "bash" and "#SBATCH" in body]
    assert script.count("OUT=/shared/runs/orz-7b\n") == 1
    (tmp_path / "job.sh").write_text(script.replace("OUT=/shared/runs/orz-7b\n", f"OUT={tmp_path}/run\n"))
    (tmp_path / "bin").mkdir()
    for name, body in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = os.environ | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "first,second", "SLURM_CPUS_ON_NODE": "4",
        "LAST": "1" if last else "", "ENDS": "" if signalled else "1"}
    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env)
    if signalled:
        assert wait_until((tmp_path / "pid").exists)
        job.send_signal(signal.SIGUSR1)
    status = job.wait(300)
    called = (tmp_path / "arguments").read_text()
    assert "--rdzv-endpoint first:29500 --rdzv-id 7.0 " in called and f"--out {tmp_path}/run" in called
    assert (tmp_path / "saved").exists() == signalled and (status == 3) == (not signalled)
    requeued = (tmp_path / "requeued").read_text() if (tmp_path / "requeued").exists() else ""
    assert requeued == ("requeue 7\n" if signalled and not last else "")
    if signalled:
        assert (tmp_path / "cancelled").read_text() == "--signal=USR1 7\n"


def test_rows_of_data_are_read():
    spans = [s for s in SPANS if s.startswith('{"prompt"')]
    assert all(problem_of(json.loads(r), "docs") for r in spans)
    (block,) = re.findall(r"^```json\n(.*?)^```", README, re.M | re.S)
    rows = [json.loads(line) for line in block.splitlines()]
    found = [problem_of(r, "README") for r in rows]
    assert [(r.text, r.answer) for r in found] == [("What is 12 + 30?", "42")] * 6


def test_every_flag_exists():
    fields = dataclasses.fields(PlanConfig) + dataclasses.fields(EvalConfig)
    ours = {f.name for f in fields}
    switches = {f"no-{f.name}" for f in fields if f.type == "bool"}
    sources = [*SOURCES.values(), *(p.read_text(encoding="utf-8") for p in ROOT.glob("bench/*.py"))]
    scripts = {f for text in sources for f in re.findall(r'add_argument\("--([\w-]+)"', text)}
    theirs = {o.removeprefix("--") for a in get_args_parser()._actions for o in a.option_strings}
    of_tools = {*inspect.signature(tiny.build).parameters, *inspect.signature(report_on).parameters}
    known = ours | switches | scripts | theirs | of_tools | SLURM | {"logdir", "help", "ipc", "exclude"}
    named = set(re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", TEXT))
    assert len(named & ours) > 20
    assert not {f for f in named if f not in known and f.replace("-", "_") not in ours}


def test_every_file_exists(two_ranks):
    if not (two_ranks[0] / "report.html").exists():  # a command of the docs writes it, too
        write_report(two_ranks[0])
    dumped = {n for text in SOURCES.values() for n in re.findall(r'dump\(f"(\w+)/', text)}
    seen = 0
    for name in {s for s in SPANS if re.fullmatch(r"[\w.…/-]+", s)}:
        suffix = re.fullmatch(r".*\w\.(py|json|jsonl|txt|md|toml|ipynb|png|html|sh|cff)", name)
        if not (suffix or "/" in name) or name in NOT_FILES | YOURS:
            continue
        if any(re.fullmatch(pattern, name) for pattern in METRICS.values()):
            continue
        name = name.removeprefix("runs/NAME/").replace("…/", "export/").replace("NNNNNN", "000002")
        made = name.rstrip("/") in dumped
        assert made or (ROOT / name).exists() or (two_ranks[0] / name).exists(), name
        seen += 1
    assert seen > 20


def test_every_link_resolves():
    seen = 0
    for doc, text in DOCS.items():
        for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
            path, _, heading = link.partition("#")
            file = (ROOT / doc).parent / path if path else ROOT / doc
            assert file.exists(), (doc, link)
            if heading:
                titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
                slugs = [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]
                assert heading in slugs, (doc, link)
            seen += 1
    assert seen > 15


def test_every_function_exists():
    named = {s for s in SPANS if re.fullmatch(r"\w+(\.\w+)+", s)}
    named |= set(re.findall(r"\b(?:ppo|grpo)\.\w+", DOCS["docs/algorithms.md"]))
    seen = 0
    for name in named:
        at = 2 if name.split(".")[0] in FOLDERS else 1
        module, path = ".".join(name.split(".")[:at]), name.split(".")[at:]
        if module not in SOURCES or name.endswith((".py", ".json", ".jsonl", ".html")):
            continue
        what = importlib.import_module(module)
        for part in path:
            assert hasattr(what, part) or part in getattr(what, "__dataclass_fields__", ()), name
            what = getattr(what, part, None)
        seen += 1
    assert seen > 20


def test_every_named_test_exists():
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", TEXT)
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), (file, test)
    assert len(named) >= 10


def test_the_faults_are_those_of_chaos():
    source = ast.parse((ROOT / "bench/chaos.py").read_text(encoding="utf-8"))
    (faults,) = [node.value.keys for node in source.body
                 if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAULTS"]
    (table,) = tables(DOCS["docs/faults.md"], "fault")
    named = [re.match(r"`(\w+)`", row[0])[1] for row in table[1:]]
    assert sorted(named) == sorted([*(key.value for key in faults), "node"])
    assert all("tests/" in row[3] or row[3] == "`bench/chaos.py` only" for row in table[1:])


def test_readme_is_short_and_starts_with_the_result():
    lines = README.splitlines()
    assert len(lines) <= 180
    start = "\n".join(lines[:45])
    for needed in ("plot.png", "make demo", "make test", "pip install", "for step in", "ran on one GPU only"):
        assert needed in start


def test_the_loop_calls_what_train_calls_in_its_order():
    (loop,) = re.findall(r"^```python\n(for step.*?)^```", README, re.M | re.S)
    source = inspect.getsource(train.train)
    assert source.count("learn(run, step, minibatches, meter)") == 1
    source = source.replace("learn(run, step, minibatches, meter)", inspect.getsource(train.learn))
    code, at = re.sub("#.*", "", loop), 0
    called = re.findall(r"(\w+)\(", code)
    for name in called:
        at = source.find(f"{name}(", at) + 1
        assert at, f"train.train does not call {name} there"
    assert len(called) > 8


def test_the_files_are_all_listed_and_import_only_downwards():
    """A file imports only later files of README's table, or files of its own folder."""
    (table,) = tables(README, "file")
    floors = [row[0].strip("`").removesuffix(".py").replace("/", ".") for row in table[1:]]
    assert sorted(floors) == sorted(SOURCES)
    code = [str(file.relative_to(ROOT).with_suffix("")).replace("/", ".") for file in configs.CODE]
    assert sorted(name for name in code if "__init__" not in name) == sorted(SOURCES)
    for i, name in enumerate(floors):
        imported = set()
        for node in ast.walk(ast.parse(SOURCES[name])):
            if isinstance(node, ast.Import):
                imported |= {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        above = {f for f in floors[:i] if f.partition(".")[0] != name.partition(".")[0] or "." not in f}
        assert not imported & above, f"{name} imports upwards: {imported & above}"
        roots = {m.partition(".")[0] for m in imported}
        assert "vllm" not in roots or name == "engines.vllm_engine", name
        assert name not in ("ppo", "grpo") or roots <= {"torch", "__future__"}, name
        assert name not in ("tools.plan", "configs") or "torch" not in roots, name


def test_no_file_has_the_name_of_a_package_that_transformers_looks_for():
    """Otherwise transformers would import our file in place of the package, from the folder of train.py."""
    text = inspect.getsource(transformers.utils.import_utils)
    packages = {name.partition(".")[0] for name in re.findall(r'_is_package_available\("([\w.]+)"', text)}
    assert len(packages) > 50 and not packages & {name.partition(".")[0] for name in SOURCES}


@pytest.mark.parametrize("file", ["tools/tiny.py", "train.py", "tools/evaluate.py", "ckpt.py", "reward.py"])
def test_without_triton_and_vllm_every_command_starts(file):
    """CPU builds of torch have no Triton."""
    code = ("import runpy, sys; sys.modules |= dict.fromkeys(('triton', 'vllm')); "
            "import transformers; transformers.AutoProcessor, transformers.Qwen2ForCausalLM; "
            f"runpy.run_path({file!r})")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_hours_are_the_plans():
    table = tables(DOCS["docs/cluster.md"], "preset")[0]
    seen = 0
    for preset, devices, host, disk, *hours in table[1:]:
        count, _, gpu = devices.partition(" × ")
        flags = *shlex.split(preset.strip("`")), "--ranks", count, "--gpu", gpu, "--json"
        for speed, found in zip((3200, 400, 100), hours if int(count) > 8 else hours[:1], strict=False):
            said = json.loads(forked("-m", "tools.plan", *flags, f"--network={speed}").communicate()[0])
            space, (low, high) = said["host and disk, GiB"], said["estimated seconds"]["step"].values()
            assert found == f"{low / 36:.1f} to {high / 36:.1f}", preset
        assert (host, disk) == (f"{space['machine']:.0f} GiB", f"{space['disk, all']:.0f} GiB"), preset
        assert said["verdict"].startswith("fits"), preset
        seen += 1
    assert seen > 4


def test_the_table_of_other_libraries_has_flags_of_ours():
    (table,) = tables(DOCS["docs/faq.md"], "torz")
    ours = [re.match(r"`--(\w+)`", row[0])[1] for row in table[1:]]
    assert {*ours} <= vars(PRESETS["orz-7b"]).keys() and len({*ours}) == len(ours) > 20


def test_the_presets_are_what_their_table_says():
    (table,) = tables(DOCS["docs/algorithms.md"], "preset")
    assert sorted(row[0].strip("`") for row in table[1:]) == sorted(PRESETS)
    compared = 0
    for name, paper, base, by, departures in table[1:]:
        assert paper and departures, name
        if base == "–":
            continue
        old, new = (dataclasses.asdict(PRESETS[p.strip("`")]) for p in (base, name))
        assert settings(by) == {k: v for k, v in new.items() if old[k] != v}, name
        compared += 1
    assert compared >= len(PRESETS) - 2


def test_the_table_of_models_has_every_preset():
    (table,) = tables((ROOT / "eval_sets/README.md").read_text(encoding="utf-8"), "preset")
    models = {name: model.strip("`") for row, model, _ in table[1:] for name in re.findall("`(.+?)`", row)}
    assert models == {name: cfg.model for name, cfg in PRESETS.items() if not name.startswith("tiny-")}


def test_the_recipes_are_what_their_table_says():
    (table,) = tables(DOCS["docs/algorithms.md"], "recipe")
    default = {"clip_low": 0.2, "clip_high": 0.2}
    assert {name: default | settings(fields) for name, _, fields in table[1:]} == RECIPES
