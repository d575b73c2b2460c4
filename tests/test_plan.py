"""Tests of tools/plan.py."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, make_model, run_ranks
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import ckpt
import data
import dist
import model
import train
from bench.nullgpu.memory import CASES, case_of, planned
from configs import PRESETS, parse
from engines.torch_engine import Response, TorchEngine
from guard import checks
from guard.messages import GIB, UserError
from guard.start import as_before, load_models, with_checkpoint
from log import Logger, Meter
from tools import plan

DIMS = dict(vocab_size=301, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=112, num_hidden_layers=3)


@pytest.mark.parametrize("family,more", [
    ("qwen2", dict(tie_word_embeddings=True)), ("qwen2", dict(num_key_value_heads=4)),
    ("llama", dict(head_dim=24)), ("mistral", dict(tie_word_embeddings=True, head_dim=40))])
def test_parameters_are_counted_exactly(family, more, tmp_path):
    config = AutoConfig.for_model(family, **DIMS | more)
    config.save_pretrained(tmp_path)
    shape = plan.read_shape(str(tmp_path))
    assert shape == plan.shape_of(config.to_dict(), str(tmp_path))
    for name in ("num_key_value_heads", "head_dim"):
        with pytest.raises(UserError, match=f"has no {name} above 0: 2"):
            plan.shape_of(config.to_dict() | {name: "2"}, "x")
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config)
        config.num_labels = 1
        critic = AutoModelForSequenceClassification.from_config(config)
    assert shape.policy_params == sum(p.numel() for p in policy.parameters())
    assert shape.critic_params == sum(p.numel() for p in critic.parameters())
    assert shape.layer == sum(p.numel() for p in policy.model.layers[0].parameters())


def test_qwen25_7b_has_7_615_616_512_parameters():
    assert plan.KNOWN["7b"].policy_params == 7_615_616_512
    # The model cards of the other models say 0.49, 1.54, 32.8 and 8.03 billion parameters.
    assert {k: round(s.policy_params / 1e7) for k, s in plan.KNOWN.items() if k not in ("7b", "tiny")} == {
        "0.5b": 49, "1.5b": 154, "32b": 3276, "8b": 803,
        # Qwen3.5 without vision tower and multi-token prediction
        "3.5-0.8b": 75, "3.5-2b": 188, "3.5-4b": 421, "3.5-9b": 895, "3.5-27b": 2690}


def bytes_of(t: torch.Tensor) -> int:
    t = t.to_local() if isinstance(t, DTensor) else t
    return t.numel() * t.element_size()


def updated(cfg) -> dict[str, int]:
    """Updates policy and critic, then saves a checkpoint. Returns this rank's bytes of weights, gradients and
    optimizer state."""
    world = dist.init("cpu", "float32")
    policy, critic, ref = map(load_models(checks.case_of(cfg, world), world).get, ("policy", "critic", "ref"))
    out = Path(cfg.out)
    out.mkdir(exist_ok=True)
    log, used = Logger(out, cfg, False, 0, {}, {}), dict(weights=0, gradients=0, AdamW=0)
    for who in (policy, critic):
        for p in who.model.parameters():
            p.grad = torch.ones_like(p)
            used["gradients"] += bytes_of(p.grad)
        train.update(who, 1e-3, 0, cfg, Meter(), log)
        used["weights"] += sum(map(bytes_of, who.model.parameters()))
        used["AdamW"] += sum(bytes_of(v) for s in who.optimizer.state.values() for v in s.values())
    models = {t.name: (t.model, t.optimizer) for t in (policy, critic, ref)}
    saver = ckpt.Saver(out, models, cfg, {}, 0, pytest.fail)
    saver.save(1)
    saver.finish()
    return used


def test_state_and_checkpoint_are_what_tensors_and_files_take(base, tmp_path):
    larger = dict(hidden_size=256, intermediate_size=768, vocab_size=2000)
    config = AutoConfig.for_model("qwen2", **DIMS | larger)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    cfg = dataclasses.replace(base, model=str(tmp_path / "model"), out=str(tmp_path / "run"), kl_coef=0.05,
                              ref_refresh=True)
    shape = plan.read_shape(cfg.model)
    for used in run_ranks(2, updated, cfg):
        instants = dict(plan.memory(plan.Case(cfg, 2, [shape] * 3, None)))
        said = [instants[name] for name in ("policy", "critic")]
        for name, taken in used.items():
            assert taken == pytest.approx(sum(s[name] for s in said), rel=0.01), name
    files = list((tmp_path / "run" / "ckpt" / "step_000001").iterdir())
    assert len(files) >= 4
    assert sum(f.stat().st_size for f in files) == pytest.approx(
        plan.disk(plan.Case(cfg, 2, [shape] * 3, None))["disk, a checkpoint"], rel=0.02)


@pytest.mark.parametrize("keep_best,eval_data,best", [
    ("reward", (), True), ("auto", ("a.jsonl",), True), ("auto", (), False), ("", ("a.jsonl",), False)])
def test_the_disk_has_room_for_kept_checkpoints_and_the_one_that_is_written(
        keep_best, eval_data, best, base, tmp_path):
    cfg = dataclasses.replace(base, keep=2, keep_best=keep_best, eval_data=eval_data)
    evaluated = {"eval/a/avg@1": 1} if eval_data else {}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 1} | evaluated))
    for step in range(1, 6):
        folder = ckpt.step_folder(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "COMPLETE").touch()
    ckpt.prune(tmp_path, cfg.keep, cfg.keep_best)
    kept = len(ckpt.complete(tmp_path))
    assert kept == 2 + best
    planned = plan.disk(plan.Case(cfg, 2, [plan.read_shape(base.model)] * 3, None))
    most = planned["disk, all"] - planned["disk, exports"]
    assert most == (kept + 1) * planned["disk, a checkpoint"]


def test_a_models_exports_are_two_bytes_a_parameter(two_ranks, base):
    shape = plan.read_shape(base.model)
    export = two_ranks[0] / "export"
    taken = sum((export / name / "model.safetensors").stat().st_size for name in ("policy", "critic"))
    planned = plan.disk(plan.Case(base, 2, [shape] * 3, None))
    assert taken == pytest.approx(planned["disk, exports"], rel=0.03)


def case(*argv: str, gpu: str = "H100", world: int = 8, model: str = "7b", **more) -> plan.Case:
    """Returns a case. The flags have fixed values instead of those that the plan would choose."""
    longest = parse(argv).model_len
    fixed = {"--shard_ranks": "0", "--offload": "on", "--pack_len": str(max(16384, longest))}
    for flag, value in fixed.items():
        argv = argv if flag in argv else (*argv, flag, value)
    shape = plan.KNOWN[model]
    return plan.Case(parse(argv), world, [shape] * 3, plan.GPUS.get(gpu), local=min(world, 8), **more)


def memory(c: plan.Case) -> dict[str, Counter]:
    most = defaultdict(Counter)
    for phase, usage in plan.memory(c):
        most[phase] |= Counter(usage)
    return most


def test_memory_of_a_7b_by_hand():
    c = case("orz-7b", "--layout", "production", world=32)
    use, n, trained = memory(c), 7_615_616_512, 7_615_616_512 + 7_070_622_720
    assert use["policy"]["weights"] == use["policy"]["gradients"] == use["policy"]["AdamW"] / 2 == 4 * n / 32
    engine = use["rollout"]["total"] - use["rollout"]["CUDA and idle state"]
    assert engine == pytest.approx(0.7 * c.gpu.memory)
    assert use["rollout"]["engine weights"] == 2 * n
    assert c.kv_bytes == 57344 and plan.kv_tokens(c) == int(use["rollout"]["KV cache"] / 57344)
    # fp32 logits, and their gradient in bf16, of one chunk
    assert use["policy"]["logits"] == 1.5 * 2**30 and use["critic"]["logits"] == 0
    none, layers = (memory(case("orz-7b", "--layout", "production", "--recompute", mode, world=32))
                    for mode in ("none", "layers"))
    assert none["policy"]["activations"] > 7 * layers["policy"]["activations"]
    assert layers["policy"]["activations"] >= 28 * 16384 * 3584 * 2  # the input of every layer
    stays = memory(case("orz-7b", "--layout", "production", "--offload", "off", world=32))
    idle = stays["rollout"]["CUDA and idle state"] - use["rollout"]["CUDA and idle state"]
    assert idle == pytest.approx((1 + plan.HOLES) * 12 * trained / 32)
    for usage in use.values():
        total = usage.pop("total")
        assert max(usage.values()) <= total <= sum(usage.values())


@pytest.mark.parametrize("flags", [
    "orz-7b --layout debug", "orz-7b --layout debug --critic_updates 12", "rlvr-8b --prompts_per_step 9",
    "rlvr-8b --prompts_per_step 33", "orz-7b --prompts_per_step 1 --critic_updates 64", "scale-rl-7b"])
def test_the_largest_pack_of_the_longest_samples_is_counted(flags):
    """A pack has whole samples, and some ranks have a sample more than others."""
    c = case(*flags.split(), "--recompute", "layers", world=8)
    longest, samples = c.cfg.model_len, np.arange(c.cfg.samples_per_step)
    lengths = np.full(len(samples), longest)
    layout = data.assign(lengths, lengths, samples // c.cfg.samples_per_prompt, c.world, c.cfg, step=0)
    largest = max(len(pack) * longest for ranks in layout for packs in ranks for pack in packs)
    full = dataclasses.replace(c.cfg, pack_len=largest, prompts_per_step=10**6)  # its packs have this length
    for name, usage in memory(dataclasses.replace(c, cfg=full)).items():
        assert memory(c)[name]["activations"] >= usage["activations"], name


def test_a_sleeping_engine_is_counted():
    c = case("orz-7b", world=32)
    awake, asleep, other = (memory(dataclasses.replace(c, cfg=dataclasses.replace(c.cfg, engine=kind)))
                            for kind in ("torch", "vllm", "another"))
    assert c.cfg.engine == "vllm" and other == asleep == memory(c)
    # any engine but torch's is counted like vLLM
    for phase in ("sync", "policy", "critic"):
        assert asleep[phase]["sleeping engine"] == GIB / 2 and not awake[phase].get("sleeping engine")
    assert asleep["rollout"]["sleeping engine"] == 0  # an awake engine is counted in --engine_share


@pytest.mark.parametrize("eval_data,requests", [(("a.jsonl",), 999), ((), 12)])
def test_on_a_cpu_the_cache_is_planned_for_the_requests_of_evaluation_and_training(eval_data, requests, tiny):
    """A step has 12 responses."""
    cfg = dataclasses.replace(PRESETS["tiny-grpo"], model=tiny, eval_data=eval_data, prompts_per_step=3,
                              samples_per_prompt=4, max_num_seqs=64)
    waiting = [Response((i, 0), (5,) * cfg.max_prompt_len, cfg.max_response_len) for i in range(requests)]
    slots = TorchEngine(tiny, model.load_tokenizer(tiny), cfg)._allocate(waiting)
    taken = sum(x.nbytes for x in slots.cache.layers)
    usage = memory(plan.Case(cfg, 1, [plan.read_shape(tiny)] * 3, None))["rollout"]
    assert taken <= usage["KV cache"] <= 1.02 * taken


# Two layers of a model, --max_num_seqs, --eval_top_p, tokens of a prompt, and the GiB that the stub driver of
# bench/nullgpu counted at the peak of evaluation and rollout, without weights, KV cache and CUDA's context.
BESIDE = [("7b", 256, 1.0, 512, 1.47), ("0.5b", 256, 1.0, 512, 0.62), ("0.5b", 512, 1.0, 8, 1.35),
          ("0.5b", 512, 0.95, 8, 4.71)]


@pytest.mark.parametrize("size,slots,top_p,prompt,gib", BESIDE)
def test_the_torch_engines_buffers_are_what_a_rollout_needs(size, slots, top_p, prompt, gib):
    """The prompts fill packs, or evaluation samples with other CUDA graphs than training."""
    c = case(*f"orz-7b-grpo --engine torch --max_prompt_len {max(prompt, 64)} --max_model_len 0".split())
    cfg = dataclasses.replace(c.cfg, max_num_seqs=slots, eval_top_p=top_p)
    c = dataclasses.replace(c, cfg=cfg, shapes=[plan.KNOWN[size]] * 3)
    assert 0.99 * gib < memory(c)["rollout"]["engine buffers"] / GIB < gib + 0.65


@pytest.mark.parametrize("size,pack,gib", [("7b", 65536, 11.64), ("7b", 16384, 4.84), ("0.5b", 65536, 2.62)])
def test_a_reference_needs_what_the_stub_driver_counted(size, pack, gib):
    """gib: the peak of a forward pass with log-probs, without the model's own weights (bench/nullgpu)."""
    flags = f"orz-7b-grpo --kl_coef 0.1 --ref_model x --pack_len {pack}"
    c = case(*flags.split(), world=1)
    usage = memory(dataclasses.replace(c, shapes=[plan.KNOWN["0.5b"]] * 2 + [plan.KNOWN[size]]))["ref"]
    gathered, activations, logits = (usage[x] for x in ("gathered weights", "activations", "logits"))
    assert 1 <= (gathered + activations + logits) / GIB / gib < 1.09


def test_a_critic_of_another_shape_is_counted_as_itself():
    seven, half = plan.KNOWN["7b"], plan.KNOWN["0.5b"]
    same = case("orz-7b", world=32)
    small = dataclasses.replace(same, shapes=[seven, half, seven])
    assert small.params == {"critic": half.critic_params, "policy": seven.policy_params}
    of_policy = [[usage for phase, usage in plan.memory(c) if phase == "policy"] for c in (same, small)]
    assert of_policy[0] == of_policy[1] and len(of_policy[0]) > 1
    assert memory(small)["critic"]["weights"] == 4 * half.critic_params / 32
    assert plan.seconds(small, 256, 2000)["critic"] < plan.seconds(same, 256, 2000)["critic"] / 7


def test_the_flops_of_a_forward_pass_are_those_of_its_products():
    lengths, layers, heads, head_dim, params = np.array([3, 5]), 2, 4, 8, 1000
    attention = sum(2 * 2 * heads * head_dim * (t + 0.5) for n in lengths for t in range(n)) * layers
    flops = plan.forward_flops(params, layers, heads * head_dim, lengths, lengths**2)
    assert flops.sum() == 2 * params * 8 + attention
    assert plan.forward_flops(params, layers, heads * head_dim, 8, 34) == flops.sum()


def peaks(c: plan.Case, name: str) -> dict:
    cases = {n: dataclasses.replace(c, cfg=dataclasses.replace(c.cfg, recompute=str(n)))
             for n in range(c.models[name].layers + 1)}
    return {n: max(usage["total"] for phase, usage in plan.memory(other) if phase == name)
            for n, other in cases.items()}


@pytest.mark.parametrize("size,world,gpu", [("7b", 32, "H200"), ("7b", 32, "H100"), ("7b", 8, "H100"),
                                            ("32b", 32, "H100"), ("32b", 16, "A100-40"), ("0.5b", 1, "4090")])
def test_auto_recomputes_the_fewest_layers_that_leave_8_percent_of_the_device(size, world, gpu):
    """If no number of recomputed layers leaves 8 % free, all layers are recomputed."""
    c = case("orz-7b", gpu=gpu, world=world, model=size)
    for name, whole in c.recompute.items():
        of = peaks(c, name)
        *less, last = of.values()
        assert all(a > b for a, b in itertools.pairwise(less)) and last < 1.01 * less[-1]
        fitting = [n for n, peak in of.items() if peak <= 0.92 * c.gpu.memory]
        assert whole == (fitting or [c.models[name].layers])[0]


def test_on_a_cpu_auto_counts_the_machines_memory():
    """The ranks share the machine's memory. If its size is unknown, nothing is recomputed."""
    shape = plan.KNOWN["0.5b"]
    cfg = dataclasses.replace(PRESETS["tiny-grpo"], recompute="auto")
    c = plan.Case(cfg, 2, [shape] * 3, None, local=2)
    most, *_, least = peaks(c, "policy").values()
    for host, whole in ((0, 0), (2.2 * most / 0.92, 0), (2.02 * least / 0.92, shape.layers)):
        assert dataclasses.replace(c, host=host).recompute == {"policy": whole}


MEASURED = json.loads((ROOT / "bench" / "results" / "nullgpu-memory.json").read_text())["rows"]


def test_host_memory_is_at_most_the_limit_of_the_container(tmp_path, monkeypatch):
    (tmp_path / "none").write_text("max\n")
    (tmp_path / "some").write_text("7516192768\n")
    for names, most in (([], None), (["gone", "none"], None), (["none", "some"], 7 * 2**30)):
        monkeypatch.setattr(plan, "CGROUPS", [tmp_path / name for name in names])
        assert plan.host_memory() == most if most else plan.host_memory() > 2**30


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_up_to_9_percent_above_the_drivers_peak(name):
    """The driver is the stub CUDA driver of bench/nullgpu. It counts memory and computes nothing."""
    rows = [row for row in MEASURED if row["case"] == name]
    assert {row["flag"] for row in rows} == {"auto", "layers"}
    for row in rows:
        c = case_of(name, row["flag"])
        phase = row["phase"]
        assert 1 <= planned(c)[phase] / row["driver_gib"] <= 1.09 and not row["out_of_memory"], row
        assert row["layers"] == c.recompute.get(phase, "")
        if name.startswith("7B on 32") and row["flag"] == "auto" and phase == "policy":
            assert row["n_a_token"] <= 5.8


def test_batches_and_hours_of_orz_7b():
    c = case("orz-7b", "--layout", "production", world=32, prompts=57000)
    table = plan.plan_of(c)
    batches, run, models = table["batches"], table["run"], table["models"]
    assert batches["samples a step"] == 128 * 64 == 8192 and batches["longest pack, tokens"] == 16384
    assert batches["samples an engine"] == batches["samples a rank"] == 256
    assert models["samples an update"] == {"policy": 8192, "critic": pytest.approx(683, abs=0.5)}
    steps = -(-20 * 57000 // 128)
    assert (run["steps"], run["episodes"]) == (steps, 8192 * steps)
    assert models["updates"] == {"policy": steps, "critic": 12 * steps}
    time = table["estimated seconds"]
    assert time["step"]["quarter length"] == plan.seconds(c, 2048 / 8, 2000)["step"]
    for length, seconds in time["step"].items():
        for n, name in ((steps, f"{steps:,} steps, hours"), (1000, "1,000 steps, hours")):
            assert time[name][length] == pytest.approx(n * seconds / 3600)
    total, *items = table["memory of a rank, GiB"].values()
    for phase, n in total.items():
        assert n == pytest.approx(sum(item[phase] for item in items))


def test_a_gpu_is_known_by_a_whole_word_of_its_name_and_by_its_memory():
    for device, gib, name in [
            ("NVIDIA H100 80GB HBM3", 79.1, "H100"), ("NVIDIA H200", 139.8, "H200"),
            ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80"), ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"),
            ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40"), ("NVIDIA GeForce RTX 4090", 23.5, "4090")]:
        found = plan.gpu_of(device, gib * GIB)
        assert found == plan.GPUS[name]._replace(name=device), device
    for other in ("NVIDIA RTX A1000", "NVIDIA GH200 480GB", "NVIDIA GB200"):
        assert plan.gpu_of(other, GIB) == plan.GPU(other, GIB)


def test_seconds_scale_as_their_formulas_do():
    def phases(*argv, **how):
        return plan.seconds(case("orz-7b", "--offload", "off", *argv, **how), 256, 2000)

    h100, h200, a100 = (phases(gpu=g, world=32) for g in ("H100", "H200", "A100-80"))
    assert h200["rollout"] < h100["rollout"]
    optimizer = 12 * 28 * plan.OPTIMIZER_HOST[True]  # of 12 critic updates
    assert h200["critic"] == pytest.approx(3 * h200["values"] + optimizer)  # backward: two forward passes
    assert a100["values"] == pytest.approx(h100["values"] * 989 / 312)
    assert phases(world=64)["values"] == pytest.approx(h100["values"] / 2)
    assert a100["policy"] > 2 * h100["policy"] and phases(world=64)["policy"] < 0.51 * h100["policy"]
    assert h100["policy"] > 8 * 7.6e9 * 8192 * 2256 / 32 / 989e12  # the time at the GPUs' peak FLOP/s
    assert h100["rollout"] >= 8000 * 2 * 7.6e9 / 3.35e12  # each of 8,000 tokens reads the weights
    assert h100["step"] == pytest.approx(sum(v for k, v in h100.items() if k != "step"))
    assert "critic" not in plan.seconds(case("orz-7b-grpo", world=32), 256, 2000)
    none, half, layers = (phases("--recompute", mode)["critic"] - optimizer
                          for mode in ("none", "14", "layers"))
    assert half / none == pytest.approx(3.5 / 3) and layers / none == pytest.approx(4 / 3)


# The constants of the code that ran on the H200: FSDP on one rank, vLLM's own output processor, an output
# layer with ten passes over small chunks of logits, and AdamW without the fused kernel.
THEN = dict(DECODE_HOST={"vllm": (0.9e-3, 35e-6)}, LAYER_HOST=3.5e-3, OPTIMIZER_HOST={False: 4e-3},
            HEAD_BYTES=(40, 130), START={"vllm": 65.0}, LAYER_DECODE=0.0, MFU=0.35, MFU_HALF=0,
            CHUNK_BYTES={"cuda": 2**28})


STEP = "orz-7b-grpo --samples_per_prompt 8 --max_prompt_len 64 --max_response_len 512 --engine_share 0.4"


def of_h200(flags: str) -> plan.Case:
    flags += " --model x --template plain --max_model_len 0 --policy_updates 1 --steps 6 --pack_len 16384"
    return plan.Case(parse(flags.split()), 1, [plan.KNOWN["0.5b"]] * 3, plan.GPUS["H200"])


def test_the_plan_is_within_25_percent_of_what_an_h200_measured(monkeypatch):
    """docs/measured.md has the same figures. Means of steps 1 to 4, because step 0 pins memory."""
    for name, value in THEN.items():
        monkeypatch.setattr(plan, name, value)
    folder = ROOT / "bench" / "results" / "nvidia-h200"
    steps = [json.loads(line) for line in (folder / "step-0.5b-metrics.jsonl").open()]
    later = {name: np.mean([step[f"time/{name}"] for step in steps[1:]])
             for name in ("wake", "sync", "sleep", "policy", "step")}
    run = of_h200(f"{STEP} --prompts_per_step 32 --max_num_seqs 256 --offload on --engine vllm")
    planned, extra = plan.seconds(run, 7, 512), plan.extra_seconds(run)
    pairs = {
        "rollout": (planned["rollout"], np.mean([step["time/rollout"] for step in steps])),
        "policy": (planned["policy"], later["policy"]), "step": (planned["step"], later["step"]),
        "sync": (planned["sync"], later["wake"] + later["sync"] + later["sleep"]),
        "first step": (planned["step"] + extra["first step, longer by"], steps[0]["time/step"]),
        "start": (extra["start"], 65.0)}
    for row in map(json.loads, (folder / "train-0.5b.jsonl").open()):
        mode = {"none": "none", "999": "layers"}.get(row["recompute"])
        if mode and row["phase"] in ("logprobs", "policy", "critic"):
            kind = "orz-7b --critic_updates 1" if row["phase"] == "critic" else "orz-7b-grpo"
            c = of_h200(f"{kind} --prompts_per_step 4 --samples_per_prompt 8 --max_prompt_len 256 "
                        f"--max_response_len 768 --recompute {mode} --offload off")
            name = "critic" if row["phase"] == "critic" else "policy"
            forward, training = plan._passes(c, name, 256, 768)
            planned = forward if row["phase"] == "logprobs" else training
            pairs[f"{row['phase']} {mode}"] = planned, row["seconds"]
    assert len(pairs) == 12
    for what, (plans, measured) in pairs.items():
        assert 0.75 <= plans / measured <= 1.25, (what, plans, measured)


def test_the_plan_is_within_25_percent_of_what_the_second_h200_measured():
    """docs/measured.md has the same figures. Means without the first step and round, which load kernels."""
    folder, pairs = ROOT / "bench" / "results" / "nvidia-h200" / "2026-11-27", {}
    for engine in ("torch", "vllm"):
        c = of_h200(f"{STEP} --prompts_per_step 32 --max_num_seqs 256 --engine {engine}")
        planned = plan.seconds(c, 7, 512)
        steps = [json.loads(line) for line in (folder / f"step-{engine}.jsonl").open()]
        for what in ("rollout", "policy", "step"):
            measured = np.mean([step[f"time/{what}"] for step in steps[1:]])
            pairs[engine, what] = planned[what], measured
        starts = [value for name, value in steps[0].items() if name.startswith("time/start/")]
        pairs[engine, "start"] = plan.extra_seconds(c)["start"], sum(starts)
    rounds = defaultdict(list)
    for row in map(json.loads, (folder / "decode.jsonl").open()):
        if row.get("round", 0) > 0 and row["commit"] == "7b1e857":
            rounds[row["engine"], row["responses"]].append(row["seconds"])
    for (engine, responses), seconds in rounds.items():
        sizes = f"--prompts_per_step {responses // 8} --max_num_seqs {responses}"
        c = of_h200(f"{STEP} {sizes} --engine {engine}")
        pairs[engine, responses] = plan.decode_seconds(c, 47, 512), np.mean(seconds)
    assert len(pairs) == 14
    for what, (plans, measured) in pairs.items():
        assert 0.75 <= plans / measured <= 1.25, (what, plans, measured)


def test_the_plan_is_within_25_percent_of_7b_with_adapters_on_an_h200():
    """docs/measured.md has the same figures. Means without the first step."""
    folder = ROOT / "bench" / "results" / "nvidia-h200" / "2026-11-27-evening"
    flags = ("gsm8k-7b-1gpu --model x --system_prompt= --template plain --prompts_per_step 32 --eval_data "
             "--max_prompt_len 64 --max_response_len 512 --max_model_len 0 --policy_updates 1 --engine")
    for engine in ("torch", "vllm"):
        c = plan.Case(parse(f"{flags} {engine}".split()), 1, [plan.KNOWN["7b"]] * 3, plan.GPUS["H200"])
        planned = plan.seconds(c, 7, 512)
        steps = [json.loads(line) for line in (folder / f"lora-{engine}.jsonl").open()][1:]
        for what in ("rollout", "policy", "step"):
            measured = np.mean([step[f"time/{what}"] for step in steps])
            assert 0.75 <= planned[what] / measured <= 1.25, (engine, what, planned[what], measured)
        awake = max(usage["total"] for name, usage in plan.memory(c) if name == "rollout") / plan.GIB
        assert 1 <= awake / steps[-1]["mem/sampled_gb"] <= 1.1, engine


def test_auto_takes_the_torch_engine_where_vllm_waits_for_its_host():
    """It does so only for cases like those that were measured."""
    half = "orz-7b-grpo --model x --template plain --max_num_seqs 256"

    def chosen(flags, size="0.5b", gpu="H200", world=1):
        return plan.Case(parse(flags.split()), world, [plan.KNOWN[size]] * 3, plan.GPUS.get(gpu)).cfg.engine

    assert chosen(half) == chosen(half, gpu="H100") == "torch"
    assert chosen(half, "7b", world=8) == chosen(half, "32b", world=8) == "vllm"
    for flags, size in (("--engine vllm", "0.5b"), ("--dtype float32", "0.5b"), ("--tp 2", "0.5b"),
                        ("--env tests/test_envs.py:add", "0.5b"), ("", "3.5-0.8b")):
        assert chosen(f"{half} {flags}", size, world=2) == "vllm"
    assert chosen(f"{half} --engine torch", "7b") == "torch" and chosen(half, gpu="") == "auto"
    assert chosen(f"{half} --round_len 64") == "vllm"
    other = dataclasses.replace(plan.KNOWN["0.5b"], fused=False)
    assert plan.Case(parse(half.split()), 1, [other] * 3, plan.GPUS["H200"]).cfg.engine == "vllm"


def test_what_a_rank_of_orz_7b_sends_by_hand():
    """FSDP gathers the layers' bf16 weights twice and all other weights once. Gradients are in fp32."""
    n, layers = 7_615_616_512, 28 * 233_057_792
    gathered, gradients = 2 * (n + layers), 4 * n
    assert f"{gathered / GIB:.1f} {gradients / GIB:.1f}" == "26.3 28.4"
    sends, of_nodes = (plan.traffic(case("orz-7b", "--shard_ranks", ranks, world=32), "policy")
                       for ranks in ("0", "8"))
    assert sum(sends["forward"] + sends["backward"]) == pytest.approx(gathered * 31 / 32)
    assert sends["reduce"] == pytest.approx((gradients * 31 / 32 * 28 / 32, gradients * 31 / 32 * 4 / 32))
    assert sum(sends["all-reduce"]) == 0
    assert of_nodes == {"forward": (2 * n * 7 / 8, 0), "backward": (2 * layers * 7 / 8, 0),
                        "reduce": (gradients * 7 / 8, 0), "all-reduce": (0, 2 * gradients / 8 * 3 / 4)}


def test_what_a_rank_of_orz_7b_sends_in_a_step_by_hand():
    """Each of 12 minibatches has 10.7 packs, rounded up. A forward pass gathers all weights, a backward pass
    gathers the layers' weights and reduces the gradients. The critic's values are one more forward pass, the
    policy's sync is one in a step. Nodes sum gradients once an update: 12 of the critic, 1 of the policy."""
    c = case("orz-7b", "--shard_ranks", "8", world=32)
    policy, critic, layers, packs = 7_615_616_512, 7_070_622_720, 28 * 233_057_792, 12 * 11
    within = packs * (6 * (policy + critic) + 4 * layers + 2 * critic) + 2 * policy
    assert plan.sent_in_step(c) == pytest.approx((within * 7 / 8, (12 * critic + policy) * 2 * 4 / 8 * 3 / 4))
    rows = plan.plan_of(c)["network, full length"]
    sends, speeds = rows["GiB a rank sends/step"], rows["assumed GB/s of a rank"]
    assert sends["in its node"] == pytest.approx(within * 7 / 8 / GIB)
    assert speeds == pytest.approx({"in its node": 0.8 * 450, "between nodes": 0.8 * 3200 / 8 / 8})
    with_ref, old = (plan.sent_in_step(case("orz-7b", *flags.split(), "--shard_ranks", "8", world=32))
                     for flags in ("--kl_coef 0.1", "--policy_updates 2"))
    assert with_ref.within - within * 7 / 8 == pytest.approx(packs * 2 * policy * 7 / 8)
    assert old.within == pytest.approx((within + packs * 2 * policy) * 7 / 8)
    assert plan.sent_in_step(case("orz-7b", world=1)) == (0, 0)


@pytest.mark.parametrize("how,shards", [
    (dict(), 8), (dict(model="32b"), 32), (dict(model="32b", gpu="H200"), 8), (dict(host=300 * GIB), 32),
    (dict(host=400 * GIB), 8), (dict(world=12), 12), (dict(world=4), 4)])
def test_auto_shards_over_a_node_where_device_and_host_memory_allow_it(how, shards):
    """With --shard_ranks 8, the 7b model needs 368 GiB of a node's host memory: 400 suffice, 300 do not."""
    assert case("orz-7b", "--shard_ranks", "auto", **dict(world=32) | how).shards == shards


def test_a_resumed_run_keeps_the_groups_and_packs_that_it_has_not_typed(base):
    chosen = dict(shard_ranks=2, pack_len=512)
    typed = dataclasses.replace(base, shard_ranks=1, pack_len=4096)
    assert as_before(typed, chosen) == typed
    resumed = as_before(dataclasses.replace(base, shard_ranks="auto", pack_len=0), chosen)
    assert resumed == dataclasses.replace(base, **chosen)


def test_a_resumed_run_keeps_its_engine_on_a_gpu(base, monkeypatch):
    saved = {"ranks": 4, "config": {"start_from": "", "engine": "vllm"}}
    monkeypatch.setattr(ckpt, "read_state", lambda path: saved)
    for typed, tp, device, before, kept in [
            ("auto", 1, "cuda", "torch", "torch"), ("auto", 1, "cuda", "auto", "vllm"),
            ("auto", 2, "cuda", "torch", "auto"), ("torch", 1, "cuda", "vllm", "torch"),
            ("auto", 1, "cpu", "vllm", "auto")]:
        saved["config"]["engine"] = before
        world = SimpleNamespace(device=torch.device(device), size=2)
        cfg, _ = with_checkpoint(dataclasses.replace(base, engine=typed, tp=tp), world, Path("x"), True)
        assert cfg.engine == kept


def test_seconds_of_orz_7b_on_a_slow_network_by_hand():
    """In an update, ranks wait for the network only in the last backward pass, where nodes sum gradients.
    `waits(n)`: seconds of this wait for a model of n parameters, transfer time minus compute time."""
    instant, fast, slow, sharded = (
        case("orz-7b", "--network", speed, "--shard_ranks", groups, world=32, gpu="H200")
        for speed, groups in (("1e9", "auto"), ("0", "auto"), ("100", "auto"), ("100", "0")))
    packs, tokens, link = 12 * 11, 256 * 8192, 0.8 * 450e9  # each of 12 minibatches: 10.7 packs, rounded up

    speed = 0.6 * 3584 / 4184 * 989e12

    def waits(n, head=0.0):
        flop = 2 * (2 * 28 * 233_057_792 * tokens + 2 * 28 * 3584 * tokens * 8192)
        within = 4 * n * 7 / 8 / link + 2 * 28 * 233_057_792 * 7 / 8 / link
        return 8 * 2 * 3 / 4 * 4 * n / 8 / (0.8 * 100e9 / 8) + within - flop / packs / speed - head

    no_wait, at_3200, at_100, all_ranks = (
        plan.seconds(c, 192, 8000)["step"] for c in (instant, fast, slow, sharded))
    logits = 256 * 8000 / packs * 152_064
    product, read = 2 * logits * 3584 / (0.8 * 989e12), 14 * logits / (0.85 * 4.8e12)
    gradient = 4 * logits / 2**30 * 8 * 152_064 * 3584 / (0.85 * 4.8e12)
    waited = waits(7_615_616_512, 3 * product + read + gradient) + 12 * waits(7_070_622_720)
    assert at_100 - no_wait == pytest.approx(waited, rel=1e-3)
    assert at_100 < 1.15 * at_3200 and all_ranks > 1.3 * at_3200


@pytest.mark.parametrize("how,flag", {
    "long packs": (dict(argv=("orz-7b", "--pack_len", "262144"), world=32), "--pack_len 8192"),
    "activations": (dict(argv=("orz-7b", "--recompute", "none", "--pack_len", "32768"), world=32),
                    "--recompute auto"),
    "replicas": (dict(argv=("orz-7b", "--shard_ranks", "1"), world=32), "--shard_ranks auto"),
    "no offload": (dict(argv=("orz-7b", "--offload", "off", "--engine_share", "0.8")), "--offload on"),
    "share": (dict(argv=("orz-7b", "--engine_share", "0.15"), world=32), "--engine_share"),
    "engine": (dict(argv=("orz-32b", "--tp", "1"), world=64, model="32b", gpu="A100-40"), "--tp"),
    "several flags": (dict(argv=("orz-7b", "--offload", "off", "--pack_len", "262144", "--engine_share",
                                 "0.8")), "--offload on --pack_len 8192"),
    "ranks": (dict(argv=("orz-7b",), world=1), "2 ranks, 2 a machine"),
    "ranks and a flag": (dict(argv=("orz-7b", "--engine_share", "0.15"), world=1), "machine, --engine_share"),
}.values())
def test_what_cant_fit_is_refused_with_a_remedy_that_fits(how, flag):
    c = case(*how["argv"], **{k: v for k, v in how.items() if k != "argv"})
    assert plan.shortage(c) and "GiB" in plan.shortage(c)
    words = plan.remedy(c)
    assert flag in words, words
    more, *flags = words.split("--")
    if more:
        ranks, _, local, *_ = more.replace(",", "").split()
        c = dataclasses.replace(c, world=int(ranks), local=int(local))
    for name, _, value in (flag.strip().partition(" ") for flag in flags):
        value = value if value == "auto" else type(getattr(c.cfg, name))(value)
        c = dataclasses.replace(c, cfg=dataclasses.replace(c.cfg, **{name: value}))
    assert not plan.shortage(c)


def test_a_machine_with_too_little_memory_is_refused():
    shape = plan.KNOWN["7b"]
    small = plan.Case(PRESETS["tiny-ppo"], 2, [shape] * 3, None, local=2, host=16 * GIB)
    assert "a rank has 8.0 GiB" in plan.shortage(small)
    assert not plan.shortage(dataclasses.replace(small, host=2000 * GIB))
    hosts = case("orz-7b", "--layout", "production", world=32, host=32 * GIB)
    assert "ranks of a machine share 32.0 GiB" in plan.shortage(hosts)


@pytest.mark.parametrize("ranks,nodes,local", [(9, 3, 3), (11, 11, 1), (12, 2, 6), (16, 2, 8), (32, 4, 8)])
def test_the_printed_command_starts_the_planned_number_of_ranks(ranks, nodes, local):
    c = case("orz-7b", "--shard_ranks", "0", world=ranks)
    words = plan.command(c, ["orz-7b", "--gpu", "H100", "--json"])
    assert words.startswith(f"torchrun --nnodes {nodes} --nproc-per-node {local} ")
    assert words.endswith(" train.py orz-7b") and plan.command(case("orz-7b"), []) == "python train.py "
    assert ("network of a machine" in plan.plan_of(c)["run"]) and "network of a machine" not in plan.plan_of(
        case("orz-7b", world=8))["run"]


def test_the_command_prints_the_plan_at_once_and_without_torch():
    code = """if True:
        import sys, tools.plan
        sys.argv = "tools.plan orz-7b --layout production --gpu H200".split()
        tools.plan.main()
        print(*{"torch", "transformers", "matplotlib"} & {*sys.modules}, file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == "\n"  # no slow module was imported
    *lines, command = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert command == ("command: torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d "
                       "--rdzv-endpoint HOST:29500 train.py orz-7b --layout production")
    flat = " ".join(done.stdout.split())
    for words in ("ranks 32", "7,615,616,512", "samples a step 8,192", "samples an update 683 8,192",
                  "longest pack, tokens 16,384", "disk, a checkpoint 164", "of a rank's 139.8 GiB",
                  "assumed GB/s of a rank 360 40", "network of a machine 3,200 Gb/s", "length: vllm "):
        assert words in flat, words


@pytest.fixture
def said_by(monkeypatch, capsys):
    def said(words: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["tools.plan", *words.split(), "--json"])
        plan.main()
        return json.loads(capsys.readouterr().out)

    return said


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_of_the_json_stands_in_its_line_of_80_columns(name, said_by):
    said = said_by(f"{name} --ranks 8")
    assert said.pop("config")["ranks"] == 8 and said.pop("verdict")
    engine = said.pop("engine")
    assert re.match("engine: (vllm|torch); a rollout of quarter length: vllm ", engine)
    assert len(engine) <= 80
    assert (", torch " in engine) == (PRESETS[name].tp == 1 and "qwen3.5" not in name)
    lines = plan.as_text(said)
    assert max(map(len, lines)) <= 80
    for section, rows in said.items():
        at = next(i for i, line in enumerate(lines) if line.startswith(section))
        for name, value in rows.items():
            line = next(line for line in lines[at:] if line.startswith(f"  {name} "))
            for n in value.values() if isinstance(value, dict) else [value]:
                assert isinstance(n, str) or f" {n:,.1f}" in line or f" {n:,.0f}" in line, (section, name, n)


def test_the_plan_is_of_the_command_that_it_prints(capsys, monkeypatch, said_by):
    """12 ranks are 2 machines of 6, each with its own copy of the weights (--shard_ranks auto)."""
    words = "orz-7b --gpu H200 --ranks 12"
    said = said_by(words)
    assert said["run"]["ranks of a shard group"] == 6
    monkeypatch.setattr(sys, "argv", ["tools.plan", *words.split()])
    plan.main()
    local = int(re.search(r"--nproc-per-node (\d+) ", capsys.readouterr().out)[1])
    cfg, shapes = parse("orz-7b --ranks 12".split()), [plan.KNOWN["7b"]] * 3
    started = plan.Case(cfg, 12, shapes, plan.GPUS["H200"], local)
    for phase, usage in memory(started).items():
        total = said["memory of a rank, GiB"]["total"][phase]
        assert total * GIB == pytest.approx(usage["total"])


def test_the_command_reads_a_models_own_config_and_counts_the_data(tmp_path, said_by):
    folder = make_model(tmp_path / "m")
    rows = [f'{{"prompt": "{i}", "answer": "1"}}\n' for i in range(40)]
    (tmp_path / "d.jsonl").write_text("".join(rows * 3))  # training drops repeated rows
    said = said_by(f"tiny-ppo --model {folder} --data {tmp_path}/d.jsonl --epochs 4 --device cpu")
    real = sum(p.numel() for p in model.load_policy(folder).parameters())
    assert said["models"]["parameters"]["policy"] == real
    assert said["run"]["prompts"] == 40 and said["run"]["steps"] == 5
    assert "estimated seconds" not in said and said["engine"] == ""
    assert said_by("orz-7b --engine torch")["engine"].startswith("engine: torch; a ")
    for words, message in {"--model /no/such": "no /no/such/config.json; needed: --model",
                           "--gpu H1000": "choice 'H1000' for argument '--gpu'; needed: one of .*H100",
                           "--ranks 4 --tp 3": "4 ranks can't be divided .*; needed: a multiple"}.items():
        with pytest.raises(UserError, match=message):
            said_by(f"orz-7b {words}")
