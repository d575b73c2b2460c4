"""Tests that a user's mistake ends with one line that names cause and remedy."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import ranks
import torch
from conftest import ROOT, forked, run_ranks
from safetensors.torch import load_file, save_file

import ckpt
import configs
import dist
import reward
from configs import check_paths, parse, run_command
from engines import vllm_engine
from guard import files
from guard.messages import UserError
from reward import check_functions
from tools import report
from tools import tiny as tiny_model

RUN = "tiny-grpo --model MODEL --data rows.jsonl"
# Mistakes found before torch is imported -> (arguments of train.py, part of the error).
AT_ONCE = {
    "no preset": ("", "no preset '' before the flags; needed: train.py PRESET --flag value …, where PRESET"),
    "a preset's name": ("orz7b", "no preset 'orz7b' (did you mean orz-7b?) before the flags; needed: "),
    "another library's flag": ("orz-7b --rollout.num_generations 8", "(did you mean --samples_per_prompt?)"),
    "where the KL term is": ("orz-7b --actor.use_kl_loss True", "(did you mean --kl_in?)"),
    "a flag's name": ("orz-7b --polcy_lr 1", "no flag --polcy_lr (did you mean --policy_lr?)"),
    "a flag of another library": ("orz-7b --actor.optim.lr 1", "(did you mean --policy_lr?)"),
    "a word for a number": ("orz-7b --steps ten", "--steps is 'ten'; needed: a whole number"),
    "a typo in a number": ("orz-7b --policy_lr 1e-4x", "--policy_lr is '1e-4x'; needed: a number"),
    "the beginning of a flag": ("orz-7b --temp 1", "--temp (did you mean --template or --template_args or"),
    "what no flag does": ("orz-7b --deepspeed x", "no flag --deepspeed (torz always shards with FSDP2); nee"),
    "a file of flags": ("orz-7b --config x.yaml", "no flag --config (put the flags into a shell script); "),
    "a logger": ("orz-7b --report_to tensorboard", "no flag --report_to (TensorBoard's files are always in"),
    "verl's words": ("orz-7b actor_rollout_ref.rollout.n=8", ".n=8 (did you mean --samples_per_prompt?)"),
    "verl's words alone": ("data.train_batch_size=8", "_size=8' (did you mean --prompts_per_step?) before"),
    "a mask of nothing": ("tiny-grpo --mismatch negative-mask", "needed: --mismatch_bounds 0.6 2"),
    "a flag for no purpose here": ("orz-7b --xyzzy 8", "no flag --xyzzy; needed: a flag that"),
    "a rank of adapters": ("orz-7b --lora_r 8", "no flag --lora_r (did you mean --lora?); needed: a flag"),
    "adapters as in TRL": ("orz-7b --use_peft true", "no flag --use_peft (did you mean --lora?); needed: a"),
    "a word without a flag": ("orz-7b more=1", "options: more=1; needed: one value after a"),
    "a value for a switch": ("orz-7b --go true", "options: true; needed: one value after a flag, none"),
    "a short pack": ("tiny-ppo --pack_len 60", "--pack_len 60 is smaller than a prompt plus"),
    "a limit without a prompt": ("orz-7b --max_response_len 9000", "--max_model_len 8192 is too small for a"),
    "minibatches that don't nest": ("orz-7b --critic_updates 5 --policy_updates 2", "one is not a multiple"),
    "what to recompute": ("orz-7b --recompute some", "--recompute is some; needed: auto, none, layers, or"),
    "a list in two parts": ("orz-7b --data a.jsonl --data b.jsonl", "--data is given twice; needed: all val"),
    "two lengths": ("orz-7b --steps 3 --epochs 1", "given 2 times (steps, epochs); needed: one of"),
    "a critic's rate alone": ("orz-7b-grpo --critic_lr 1e-5", "no effect in this run; needed: --algo ppo"),
    "a discount of groups": ("tiny-grpo --lam 0.9", "--lam has no effect in this run; needed: --algo ppo"),
    "bounds of no weights": ("tiny-ppo --mismatch none --mismatch_bounds 0 3", "needed: --mismatch token-tr"),
    "a KL without a reference": ("tiny-ppo --kl_estimator k1", "needed: --kl_coef above 0, or --ref_model"),
    "a teacher that changes": ("tiny-ppo --ref_model X --kl_coef 1 --ref_refresh", "--ref_refresh has no ef"),
    "an evaluation of nothing": (f"{RUN} --eval_top_p 0.9", "--eval_top_p has no effect in this run; needed"),
    "more updates than whole prompts": ("scale-rl-7b --prompts_per_step 7", "but only 7 prompts; needed"),
    "groups of one": ("reinforce++-7b --drop_uniform", "compare the samples"),
    "an empty stop string": ("tiny-ppo --stop </answer> ''", "--stop has an empty text, or a"),
    "a line break in quotes": ("tiny-ppo --stop '\\n'", "a backslash and an n; needed: texts that"),
    "a value with dashes": ("tiny-ppo --stop ---", "'---' is no flag; needed: --FLAG='---' for a value that"),
    "a model that is not there": ("tiny-ppo --model cut/none", "no model folder 'cut/none'; needed: "),
    "samples for other files": ("orz-7b --eval_data a.jsonl --eval_samples 1 2", "2 values for 1 files; ne"),
    "carry without rounds": ("tiny-grpo --carry 0.25", "--carry 0.25 with --round_len 0: no round"),
    "carry without correction": ("tiny-grpo --round_len 4 --carry 0.25 --mismatch none", "--mismatch tok"),
    "carry more than staleness": ("tiny-grpo --round_len 4 --carry 2.5", "needed: --max_staleness 3, or"),
    "carry and resampling": ("tiny-grpo --round_len 4 --carry 0.25 --resample_rounds 1",
                             "--resample_rounds 1 can't be used together"),
    "a seed that torch can't take": ("tiny-ppo --seed 18446744073709551617", "--seed"),
    "a round as long as a response": ("tiny-grpo --round_len 48 --carry 0.25", "needed: --round_len 3, or"),
    "a folder that is no text": (f"{RUN} --out caf\udce9", "caf\\udce9' is no text (UnicodeEncodeError: "),
    "a set that is no text": (f"{RUN} --eval_data h\udcff.jsonl", "the path 'h\\udcff.jsonl' is no text ("),
    "a data file's path": ("orz-7b --model MODEL --data none.jsonl", "no data file none.jsonl; needed: "),
    "an evaluation file's path": ("orz-7b --model MODEL --data rows.jsonl --eval_data a.j", "no data file a"),
    "a file as model": ("orz-7b --model rows.jsonl --data rows.jsonl", "no model folder 'rows.jsonl'; need"),
    "a run as model": ("orz-7b --model ran --data rows.jsonl", "of a model; needed: RUN/export/policy, or"),
    "a checkpoint as model": ("orz-7b --model ran/ckpt/step_000002", "ckpt.py export RUN last OUT"),
    "a reward's name": (f"{RUN} --reward maths", "no reward 'maths' (did you mean math?); needed: "),
    "a kind for a data set": (f"{RUN} --reward sums@exact", "--reward sums@exact names a data set, but no f"),
    "a part for a data set": (f"{RUN} --reward math sums@format=2", "or format for all rows"),
    "no reward and no teacher": (f"{RUN} --reward math=0 --kl_coef 1", "--reward math=0 has only weights of"),
    "a reward's file": (f"{RUN} --reward none.py:score", "'none.py:score' names no function in a f"),
    "a reward's function": (f"{RUN} --reward r.py:scor", "no 'scor' (did you mean score?) in r.py"),
    "an environment without function": (f"{RUN} --env r.py", "'r.py' names no function in a"),
    "an extractor's name": (f"{RUN} --extractor boxd", "extractor 'boxd' is unknown; needed: one of orz"),
    "a template's name": (f"{RUN} --template qwen", "no template 'qwen'; needed: --template orz, plain,"),
    "a critic's folder": ("tiny-ppo --model MODEL --data rows.jsonl --critic_model no", "no model folder '"),
    "data that are no file": ("orz-7b --model MODEL --data gym:countdown", "no data file gym:countdown"),
    "files without spaces": ("orz-7b --model MODEL --data a.json,b.json", "files .arrow, .parquet, .j"),
    "half a step": ("orz-7b --steps 1.5", "--steps is '1.5'; needed: a whole number"),
    "a step's name": ("orz-7b --profile last", "--profile is 'last'; needed: a whole number"),
    "a range without end": ("orz-7b --steps -3", "--steps is -3; needed: --steps from 0"),
    "verl's estimator": ("orz-7b algorithm.adv_estimator=gae", "(did you mean --advantage?); needed: one"),
    "an adapter as model": ("tiny-grpo --model adapter", "adapter is the folder of a run or an adapter,"),
    "the demo before its model": ("tiny-ppo", "needed: python -m tools.tiny, which makes")}

# Mistakes found after torch is imported -> (more arguments of train.py, part of the error).
ON_RANKS = {
    "layout debug": ("--layout debug", "--ranks is 8 (--layout debug), and 2 were started; needed: torchrun"),
    "ranks no multiple of tp": ("--tp 3", "engines of --tp 3; needed: a multiple of 3 ranks"),
    "no vllm": ("--engine vllm", "vllm can't be imported"), "no GPU": ("--device cuda", "0 GPUs on "),
    "a model without tokenizer": ("--model bare", "has no tokenizer; needed: "),
    "half a tokenizer": ("--model no_tokens", "the tokenizer in no_tokens can't encode 1+1; needed: its "),
    "a cut tokenizer": ("--model no_words", "the tokenizer in no_words can't be read (JSONDecodeError: "),
    "cut weights": ("--model cut", "cut/*.safetensors can't be read (SafetensorError: "),
    "weights of another shape": ("--model wide", "config.json and weights of wide differ in model."),
    "a critic as policy": ("--model critic", ", and a critic only as --critic_model"),
    "a reward's text": ("--reward cut.py:f", "can't use cut.py:f (IndentationError: "),
    "rewards without spaces": ("--reward math,format", "needed: --reward with some of, and spaces between"),
    "a model without safetensors": ("--model pickled", "has no .safetensors files; needed: weights saved by"),
    "a family": ("--model mamba", "mamba"),
    "a link without its file": ("--model linked", "linked/vocab.json can't be read (FileNotFoundError"),
    "a hub id without network": ("--model Org/nothing", "hf download Org/nothing"),
    "a folder without a model": ("--model nothing", "config.json"),
    "a download that ended early": ("--model half", "half/config.json is damaged ("),
    "no data": ("--data", "data"),
    "prompts that are too long": ("--max_prompt_len 2", "has more than 2 tokens"),
    "too long for the model": ("--max_response_len 600 --pack_len 4096", "has 512 positions, and a prompt w"),
    "a step that never comes": ("--profile 1000", "--profile 1000 in a run of "),
    "a template without problem": ("--template bare.txt", "lacks {problem}; needed: "),
    "a template's name": ("--template qwen", "no template 'qwen'; needed: --template orz, plain, chat"),
    "no chat template": ("--template chat", "this tokenizer has no chat template; needed: "),
    "rows of IFEval": ("--data ifeval.jsonl", "ifeval"),
    "gold answers that can't be read": ("--data unreadable.jsonl --no-go", "gold answers can't be graded"),
    "a checkpoint's path": ("--resume runs/none", "runs/none is no complete checkpoint; needed: "),
    "a run to start from": ("--start_from runs/none", "runs/none is no complete checkpoint; needed: "),
    "a folder that is in use": ("--resume never --out full", "is not empty, and --resume is never; needed: "),
    "somebody else's folder": ("--out full", "has config.json, which a new run would replace; needed: "),
    "a folder that nobody can make": ("--out /dev/null/run", "can't write to /dev/null/run"),
    "a disk that is too small": ("--keep 1000000000", "free in"),
    "memory that is too small": ("--max_num_seqs 1000000 --max_response_len 500000 --pack_len 600000 "
                                 "--samples_per_prompt 4000", "needed: --max_num_seqs")}


@pytest.fixture(scope="module")
def folder(tiny, base, tmp_path_factory):
    """Returns a folder with the broken files and models that AT_ONCE and ON_RANKS name."""
    path = tmp_path_factory.mktemp("mistakes")
    row = '{"prompt": "1+2=", "answer": "3"}\n'
    files = {"rows.jsonl": row, "r.py": "def score(response): pass\n", "cut.py": "def f(response):",
             "bare.txt": "Solve this.",
             "unreadable.jsonl": '{"prompt": "1+2=", "answer": "$$"}\n',
             "ifeval.jsonl": '{"prompt": "Write.", "ground_truth": "{}", "dataset": "ifeval"}\n'}
    for name, text in files.items():
        (path / name).write_text(text)
    without = {"bare": "tokenizer*", "no_tokens": "tokenizer.json", "pickled": "*.safetensors",
               "nothing": "*"}
    for name in (*without, "mamba", "half", "wide", "no_words", "cut", "critic", "linked"):
        shutil.copytree(tiny, path / name, ignore=shutil.ignore_patterns(without.get(name, "")))
    config = json.loads((path / "mamba" / "config.json").read_text())
    for name, change in ("mamba", {"model_type": "mamba"}), ("wide", {"intermediate_size": 96}):
        (path / name / "config.json").write_text(json.dumps(config | change))
    for file in ("half/config.json", "no_words/tokenizer.json", "cut/model.safetensors"):
        (path / file).write_bytes((path / file).read_bytes()[:-99])
    save_file(load_file(f"{tiny}/model.safetensors") | {"score.weight": torch.ones(1, config["hidden_size"])},
              path / "critic" / "model.safetensors")
    (path / "linked/vocab.json").symlink_to("gone")
    for name in ("ran/ckpt", "dir.json", "adapter/adapter_config.json"):
        (path / name).mkdir(parents=True)
    (path / "full").mkdir()
    (path / "full" / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_mistake_of_the_command_line_is_one_line(name, folder, tiny, monkeypatch):
    typed, words = AT_ONCE[name]
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as e:
        cfg = parse(shlex.split(typed.replace("MODEL", tiny).replace("FOLDER", str(folder))))
        check_paths(cfg)
        check_functions(cfg)
    assert words in str(e.value) and not re.search("[\n\x1b─-╿]", str(e.value)), str(e.value)


def test_a_model_may_be_in_a_folder_ckpt(tmp_path):
    (tmp_path / "ckpt/mine").mkdir(parents=True)
    with pytest.raises(UserError, match="mine is the folder of a run or an adapter"):
        configs.check_model(f"{tmp_path}/ckpt/mine")
    (tmp_path / "ckpt/mine/config.json").write_text("{}")
    configs.check_model(f"{tmp_path}/ckpt/mine")


def test_a_base_model_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't write to .*file/base .NotADirectoryError.*; needed: a f"):
        tiny_model.build(f"{tmp_path}/file/base")


def test_a_mistake_in_the_words_of_another_command_is_one_line(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "ckpt/step_000002").mkdir(parents=True)
    (run / "ckpt/step_000002/COMPLETE").write_text('{"state.json": {}}')
    (run / "metrics.jsonl").write_text('{"step": 0, "reward": 0}\n')
    (run / "config.json").write_text('{"algo')
    with pytest.raises(UserError, match="step_000002/2 is no complete checkpoint; needed: a run"):
        ckpt.main(["export", f"{run}/ckpt/step_000002", "2", f"{tmp_path}/out"])
    monkeypatch.setattr(sys, "argv", ["-", "a", "--b", "2"])
    for function, name in (reward.dry_run, "reward.py"), (tiny_model.build, "tools.tiny"):
        with pytest.raises(SystemExit, match=f"^{name}: .*options: --b, 2; needed: one value"):
            run_command(function, name)
    for out, words in (None, "config.json is damaged ("), (run, f"can't write {run} ("):
        with pytest.raises(UserError, match=re.escape(words)):
            report.report_on((run,), out)
        (run / "config.json").unlink(missing_ok=True)


@pytest.mark.parametrize(("typed", "said"), [
    ("orz-7b --model bar", "no model folder 'bar'; needed: "),
    (f"{RUN} --reward r:f", "'r:f' names no function"),
    (f"{RUN} --tp 2", "1 ranks can't be divided into engines of --tp 2"),
    (f"{RUN} --ranks 9", "--ranks is 9 (--layout any), and 1 were started"),
    (f"{RUN} --template bare.txt", "bare.txt lacks {problem}")])
def test_a_mistake_is_the_only_line_on_the_screen_and_is_said_before_torch_is_imported(
        folder, tiny, typed, said):
    words = typed.replace("MODEL", tiny).split()
    command = [sys.executable, "-X", "importtime", f"{ROOT}/train.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 1 and done.stdout == "" and len(lines) == 1, done.stderr
    assert lines[0].startswith(f"train.py: {said}") and "needed: " in lines[0]
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_a_mistake_that_ranks_find_is_one_line_on_each(folder, base, tiny, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(files, "PATIENCE", 0.05)
    common = ["tiny-ppo", "--model", tiny, "--eval_data", *base.data, "--dtype", "float32",
              "--go", "--out", "run"]
    commands = [[*common, *([] if "--data" in typed else ["--data", *base.data]), *typed.split()]
                for typed, _ in ON_RANKS.values()]
    messages = run_ranks(2, ranks.mistakes, commands)
    for (name, (_, words)), line, other in zip(ON_RANKS.items(), *messages, strict=True):
        assert line == other and words in line and "needed: " in line and "\n" not in line, (name, line)
    assert os.listdir(folder / "run") == ["lock"] and os.listdir(folder / "full") == ["config.json"]


def test_help_into_a_closed_pipe_is_no_traceback():
    pipe = f"{sys.executable} {ROOT}/train.py orz-7b --help | true"
    assert subprocess.run(["bash", "-c", pipe], capture_output=True, text=True).stderr == ""


# Escape sequences, a carriage return, and a character that reverses the direction of writing.
HOSTILE = "\x1b[2J\x1b]0;x\x07\x9b2J\r\u202e"
RAW = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]"


def test_the_refusal_of_a_hopeless_start_is_the_last_line(base, tiny, tmp_path):
    """All first responses are wrong, so the run is refused. The data's control characters are escaped."""
    data = tmp_path / f"{HOSTILE}.jsonl"
    rows = [{"prompt": f"{i} {HOSTILE[:8]}", "answer": f"{i}"} for i in range(9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = forked(f"{ROOT}/train.py", "tiny-ppo", "--model", tiny, "--data", str(data),
                     "--eval_every", "0", "--device", "cpu", "--out", f"{tmp_path}/run")
    output, errors = process.communicate()
    last = errors.splitlines()[-1]
    assert process.returncode == 1 and last.startswith("train.py: "), errors[-2000:]
    assert "of the first 256 responses" in last and "--go to train anyway" in last
    assert r"9 problems from" in output and r"\x1b[2J" in output and not re.search(RAW, output + errors)
    wrong = subprocess.run([sys.executable, "reward.py", HOSTILE], capture_output=True, cwd=ROOT)
    assert wrong.stderr.decode().startswith(f"reward.py: no data file {ascii(HOSTILE)[1:-1]}; needed: ")


def test_without_the_environment_a_command_says_what_to_activate():
    for words in ("train.py", "ckpt.py", "reward.py", "-mtools.plan", "-mtools.report", "-mtools.tiny"):
        done = subprocess.run([sys.executable, "-S", words], cwd=ROOT, capture_output=True, text=True)
        assert done.stderr == f"{sys.executable} has no tyro; needed: source {ROOT}/.venv/bin/activate\n"


def test_a_rank_without_torchrun_is_one_line(monkeypatch):
    alone = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="x", MASTER_PORT="99999")
    for changes, words in ({"MASTER_PORT": ""}, "RANK is set, but MASTER_PORT is ''; needed: unset RANK"), (
            {}, "MASTER_PORT is '99999'; needed: "), (
            {"WORLD_SIZE": "0", "MASTER_PORT": "1"}, "RANK is 0, and WORLD_SIZE 0; needed: unset RANK"):
        for name, value in (alone | changes).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=words):
            dist.init()


def test_a_mistake_that_launched_ranks_find_is_the_only_line(tmp_path):  # the ranks are small programs
    (tmp_path / "rank.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
                                      "from guard.messages import UserError, user_errors\n"
                                      "with user_errors('train.py'):\n    raise UserError('a; needed: b')\n")
    main = "import sys, dist\nsys.argv = ['rank.py']\nsys.exit(dist.launch(2, 9))\n"
    (tmp_path / "main.py").write_text(main)
    assert forked(f"{tmp_path}/main.py", cwd=tmp_path).communicate()[1] == "train.py: a; needed: b\n"


@pytest.mark.parametrize("wait,ranks", [("loading", "1"), ("problems from", "1"), ("gap", "1")])
def test_ctrl_c_ends_a_run_with_status_130_without_a_traceback(wait, ranks, base, tiny, tmp_path):
    """A run that is stopped before its first step saves nothing."""
    command = [f"{ROOT}/train.py", "tiny-ppo", "--model", tiny, "--data", *base.data,
               "--ranks", ranks, "--device", "cpu", "--go", "--out", f"{tmp_path}/new/run", "--reward",
               *base.reward, "--prompts_per_step", "2", "--samples_per_prompt", "2"]
    process = forked(*command) if wait != "loading" else subprocess.Popen(
        [sys.executable, "-u", *command], stdout=-1, stderr=-1, text=True)
    while wait not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in said, said
    assert bool([*tmp_path.glob("new/run/ckpt/step_*/COMPLETE")]) == (wait == "gap")
    assert wait == "gap" or {p.name for p in tmp_path.glob("new/run/*")} <= {"lock"}


def test_the_last_line_names_the_rank_that_was_killed(tmp_path):  # the ranks are small programs
    (tmp_path / "rank.py").write_text("import time\nprint('started', flush=True)\ntime.sleep(99)\n")
    main = "import sys, dist\nsys.argv = ['rank.py']\nsys.exit(dist.launch(2, 9))\n"
    (tmp_path / "main.py").write_text(main)
    process = forked(f"{tmp_path}/main.py", cwd=tmp_path)
    assert [process.stdout.readline() for _ in range(2)] == ["started\n"] * 2
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    said = process.communicate(timeout=300)[1].splitlines()
    assert said[-1].startswith("train.py: rank 1 ended with SIGKILL (") and "the same command" in said[-1]
    assert len(said) == process.returncode == 1, said


@pytest.mark.parametrize("version,fits", [("0.26.0", False), ("0.34.0", False),
                                          ("0.32.1+cpu", True), ("0.33.0", True)])
def test_a_vllm_that_was_not_tested_is_refused_with_its_version(version, fits, monkeypatch):
    """An empty module replaces vLLM."""
    vllm = types.ModuleType("vllm")
    vllm.__version__, vllm.LLM, vllm.SamplingParams = version, object, type("Empty", (), {})
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.delenv("TORZ_ANY_VLLM", raising=False)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "0")  # monkeypatch restores the variables that _import_vllm sets
    if fits:
        assert vllm_engine._import_vllm() is object
    else:
        with pytest.raises(UserError, match=rf"was not tested with vllm {re.escape(version)}; needed: pip "
                                            r"install -r requirements.txt \(vllm 0.32 or 0.33\), or"):
            vllm_engine._import_vllm()
