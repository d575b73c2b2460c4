"""Tests of adapters (--lora): against PEFT, against models with merged weights, and in whole runs."""

import dataclasses
import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

import families
import pytest
import ranks
import torch
from conftest import Operations, make_model, maths, run, run_ranks
from peft import PeftModel
from safetensors.torch import load_file, save_file

import ckpt
import data
import dist
import model
import train
from configs import parse
from guard.checks import case_of
from guard.identity import check_unchanged, weights_hash
from guard.messages import UserError, short_hash
from guard.start import load_models
from log import Meter
from tools import plan

RANK, ALPHA = 4, 6.0
NEAR = 1e-5


def fill(module: model.Adapted, seed: int) -> model.Adapted:
    """Gives B random values, because the gradient of A is 0 while B is 0."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in module.adapters.values():
            b.copy_(0.1 * torch.randn(b.shape, generator=random))
    return module


def frozen(path: str, load=model.load_policy, dtype=torch.float32) -> model.PackModel:
    return load(path, shard_fn=partial(model.freeze, lambda base: base, RANK, ALPHA, dtype))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return lambda name: families.make(root, name)


@pytest.mark.parametrize("name", [name for name in families.MODELS if "-" not in name])  # one of each family
def test_log_probs_gradients_and_merged_weights_are_those_of_peft(name, folder_of, tmp_path):
    """PEFT reads the exported adapter, which names its base by an absolute path. The bound is relative to the
    norm of all gradients."""
    path = folder_of(name)
    policy = fill(model.Adapted(frozen(path), seed=1), 2)
    out = tmp_path / "adapter"
    source = os.path.relpath(path)
    ckpt.write_export(out, partial(ckpt.write_adapter, model=policy, source=source), {})
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == path
    theirs = PeftModel.from_pretrained(families.original(path), out, is_trainable=True)
    samples = ranks.make_samples(6)
    p = data.pack(samples)
    logp, want = policy(p, 0.7)[0], families.original_logp(theirs, samples, 0.7)
    assert (logp - want).abs().max() < NEAR
    g = torch.randn(len(logp), generator=torch.Generator().manual_seed(0))
    (logp * g).sum().backward()
    (want * g).sum().backward()
    gradients = {n.replace(".default", ""): q.grad for n, q in theirs.named_parameters() if q.requires_grad}
    whole = torch.stack([x.norm() for x in gradients.values()]).norm()
    for key, pair in policy.adapters.items():
        for matrix, q in zip("AB", pair, strict=True):
            other = gradients.pop(f"base_model.model.{key.replace('/', '.')}.lora_{matrix}.weight")
            assert (q.grad - other).norm() < NEAR * (other.norm() + 1e-3 * whole)
    assert not gradients and all(q.grad is None for q in policy.base.parameters())
    merged = theirs.merge_and_unload().state_dict()
    for weight_name, weight in dist.full_weights(policy):
        torch.testing.assert_close(weight, merged[weight_name], rtol=1e-5, atol=1e-6)


def test_recomputation_uses_the_adapters_of_its_own_role(tiny):
    """Two roles share a base. Recomputing all layers changes no bit of a gradient."""
    p, gradients = data.pack(ranks.make_samples(8)), []
    for layers in (0, 2):
        base = frozen(tiny)
        base.recompute(layers)
        policy = fill(model.Adapted(base, seed=1), 2)
        critic = fill(model.Adapted(base, seed=1, critic=True), 3)
        critic(p)
        policy(p, 1.0)[0].sum().backward()
        critic(p).sum().backward()
        gradients.append([q.grad for q in (*policy.parameters(), *critic.parameters())])
    assert all(map(torch.equal, *gradients))


def test_new_adapters_change_no_bit_and_merged_weights_are_rounded_once(tiny):
    base = frozen(tiny, dtype=torch.bfloat16)
    base.compute_dtype = torch.bfloat16
    p, policy, ref = data.pack(ranks.make_samples(8)), model.Adapted(base), model.Adapted(base)
    ref.adapters.clear()
    with torch.no_grad():
        assert torch.equal(policy(p, 1.0)[0], ref(p, 1.0)[0])
    fill(policy, 5)
    for name, weight in dist.full_weights(policy):
        key, (w, whole) = name.removesuffix(".weight").replace(".", "/"), [base.get_parameter(name)] * 2
        if key in policy.adapters:
            a, b = policy.adapters[key]
            whole = (w.double() + ALPHA / RANK * b.double() @ a.double()).to(torch.bfloat16)
            assert (weight != whole).float().mean() < 1e-3  # fp64 rounds a few ties otherwise
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight, whole, rtol=2**-7, atol=0)


# --- one base, three roles


def roles_of(cfg):
    world = dist.init("cpu", "float32")
    policy, critic, ref = map(load_models(case_of(cfg, world), world).get, ("policy", "critic", "ref"))
    if cfg.lora:
        fill(policy.model, 1)
        fill(critic.model, 2)
        assert not [*ref.model.parameters()]
    return world, policy, critic, ref


def gradients(cfg, samples) -> dict[str, torch.Tensor]:
    """Returns the whole gradients of an update of policy and critic."""
    world, policy, critic, ref = roles_of(cfg)
    if cfg.lora:
        assert policy.model.base is critic.model.base is ref.model.base
    before = [dist.local(q).clone() for q in policy.model.base.parameters()]
    mine = [s for s in samples if s.prompt_id % world.size == world.rank]
    minibatches = train.make_packs(mine, 0, cfg, world, policy.model, Meter())
    meter, out = Meter(), {}
    minibatches = train.add_logp(minibatches, "ref_logp", ref, cfg)
    minibatches = train.estimate_advantages(critic, minibatches, cfg, meter)
    packs = train.updates_of(minibatches, 1)[0]
    assert len(packs) > 1
    denominators = train.counts(packs)
    sums = Operations(lambda op: "allreduce_" in op.name())
    for role, loss in ((policy, train.policy_pack_loss), (critic, train.critic_pack_loss)):
        with sums:
            for p in dist.accumulate(role.model, packs):
                loss(role.model, p, *denominators, cfg, meter).backward()
        out |= {f"{role.name}.{n}": ranks.full(q.grad) for n, q in role.model.named_parameters()}
    if cfg.lora:
        assert sums.counts[True] == 2  # the gradients of all adapters of a role are summed at once
        assert all(map(torch.equal, before, [dist.local(q) for q in policy.model.base.parameters()]))
    return out


def merged_models(cfg, out: Path) -> dict:
    """Writes policy and critic with merged fp32 weights to folders in `out`. Returns their A and B."""
    _, policy, critic, _ = roles_of(cfg)
    pairs = {}
    for role in (policy, critic):
        shutil.copytree(cfg.model, out / role.name)
        weights = {n: w.clone() for n, w in dist.full_weights(role.model)}
        save_file(weights, out / role.name / "model.safetensors", {"format": "pt"})
        pairs |= {f"{role.name}.{key}": [*map(torch.Tensor.detach, pair)]
                  for key, pair in role.model.adapters.items()}
    return pairs


def test_one_base_has_the_gradients_of_three_separate_models(base, untied, tmp_path):
    """The reference are three models with weights W + scale B A, trained whole on one rank. By the chain
    rule, the gradients are scale Bᵀ dW for A, and scale dW Aᵀ for B."""
    cfg = dataclasses.replace(base, model=untied, lora=RANK, lora_alpha=ALPHA, kl_coef=0.1, critic_updates=1,
                              pack_len=48)
    (pairs,) = run_ranks(1, merged_models, cfg, tmp_path)
    samples = ranks.make_samples(16)
    whole = dataclasses.replace(cfg, lora=0, model=f"{tmp_path}/policy", critic_model=f"{tmp_path}/critic",
                                ref_model=untied)
    (want,) = run_ranks(1, gradients, whole, samples)
    for world, shard_ranks in ((1, 0), (2, 0), (4, 2)):
        found = run_ranks(world, gradients, dataclasses.replace(cfg, shard_ranks=shard_ranks), samples)
        assert all(torch.equal(q, found[0][n]) for other in found for n, q in other.items())
        assert len(found[0]) == 2 * len(pairs) + 1
        for key, (a, b) in pairs.items():
            who, _, name = key.partition(".")
            dw = want[f"{who}.{name.replace('/', '.')}.weight"]
            expected = ALPHA / RANK * (b.T @ dw), ALPHA / RANK * (dw @ a.T)
            for i, g in enumerate(expected):
                ours = found[0][f"{who}.adapters.{name}.{i}"]
                torch.testing.assert_close(ours, g, rtol=1e-4, atol=1e-5 * float(g.abs().max()))
        torch.testing.assert_close(found[0]["critic.score.weight"], want["critic.score.weight"], rtol=1e-4,
                                   atol=1e-6)


def test_other_models_have_bases_of_their_own(base, untied, tiny, tmp_path):
    """A critic's own model gives it base and head."""
    head = torch.randn(1, model.load_config(untied).hidden_size)
    shutil.copytree(untied, tmp_path / "critic")
    weights = load_file(f"{untied}/model.safetensors") | {"score.weight": head}
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "critic/model.safetensors", {"format": "pt"})
    cfg = dataclasses.replace(base, model=tiny, critic_model=f"{tmp_path}/critic", ref_model=untied,
                              lora=RANK, kl_coef=0.1)
    assert run_ranks(2, bases, cfg) == [[3, head.tolist()]] * 2


def bases(cfg):
    world = dist.init("cpu", "float32")
    roles = load_models(case_of(cfg, world), world)
    found = dict(dist.full_weights(roles["critic"].model))
    assert "lm_head.weight" not in found
    return [len({id(role.model.base) for role in roles.values()}), found["score.weight"].tolist()]


def test_the_hash_of_a_base_is_of_all_its_files(tmp_path):
    names = [f"{i}.safetensors" for i in range(3)]
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes([i]) * 1000)
    digests = [hashlib.sha256((tmp_path / name).read_bytes()).digest() for name in names]
    assert weights_hash(str(tmp_path)) == short_hash(b"".join(digests))
    (tmp_path / "3.safetensors").symlink_to("gone")  # as in a cache of the Hub whose download has ended early
    weights_hash.cache_clear()
    with pytest.raises(UserError, match="3.safetensors can't be read .*; needed: an intact copy of"):
        weights_hash(str(tmp_path))


# --- runs


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """Returns config, folder, metrics and exported weights of a run on 2 ranks, and the base's first hash."""
    out = tmp_path_factory.mktemp("lora") / "a"
    cfg = dataclasses.replace(base, lora=RANK, kl_coef=0.01, ref_refresh=True, prompts_per_step=20,
                              samples_per_prompt=2)
    before = weights_hash(cfg.model)
    return cfg, out, *run(cfg, out, ranks=2), before


def test_a_resumed_run_equals_one_never_stopped_and_the_base_stays(adapted, tmp_path):
    """An epoch has 2 steps, so the reference gets the policy's adapters at the end of steps 1 and 3."""
    cfg, out, rows, policy, before = adapted
    weights_hash.cache_clear()
    assert weights_hash(cfg.model) == before and rows[2]["kl"] != rows[1]["kl"] > 0
    again = dataclasses.replace(cfg, resume=f"{out}/ckpt/step_000002")
    others, same = run(again, tmp_path / "b", ranks=2)
    assert maths(others) == maths(rows[2:])
    assert all(torch.equal(policy[k], same[k]) for k in policy)
    others, _ = run(again, tmp_path / "c", ranks=1)
    for name in ("reward", "grad_norm/policy", "grad_norm/critic", "kl"):
        assert others[0][name] == pytest.approx(rows[2][name], rel=1e-4)


def test_a_checkpoint_has_only_adapters_and_the_exports_are_merged(adapted, tmp_path):
    cfg, out, _, policy, _ = adapted
    tensors = {name: x for file in sorted((out / "ckpt/step_000004").glob("*.safetensors"))
               for name, x in load_file(file).items()}
    assert all("adapters" in name or "critic.score.weight" in name for name in tensors)
    ckpt.export(out, "last", tmp_path / "policy")
    ckpt.export(out, "last", tmp_path / "critic", "critic")
    ckpt.export(out, "last", tmp_path / "adapter", "adapter")
    again = load_file(tmp_path / "policy/model.safetensors")
    assert policy.keys() == again.keys() and all(torch.equal(policy[k], again[k]) for k in policy)
    critic, other = (load_file(f / "model.safetensors") for f in (out / "export/critic", tmp_path / "critic"))
    assert critic.keys() == other.keys() and all(torch.equal(critic[k], other[k]) for k in critic)
    peft = PeftModel.from_pretrained(families.original(cfg.model), tmp_path / "adapter")
    merged = peft.merge_and_unload().state_dict()
    for name in again:
        torch.testing.assert_close(again[name], merged[name].bfloat16(), rtol=2**-7, atol=1e-6)
    model.load_critic(str(tmp_path / "critic"))


def refused(cfg, out, needs: str) -> None:
    for message in run_ranks(1, ranks.main, dataclasses.replace(cfg, out=str(out))):
        assert needs in message and "; needed: " in message and "\n" not in message, message


def test_what_does_not_fit_the_adapters_of_a_run_is_refused(adapted, two_ranks, base, tmp_path):
    cfg, out, *_ = adapted
    change, new = dataclasses.replace, tmp_path / "new"
    refused(change(cfg, lora=8), out, "lora: 4 -> 8")
    refused(change(cfg, lora=0), out, "lora: 4 -> 0")
    refused(change(cfg, start_from=str(two_ranks[0])), new, "export")
    refused(change(base, start_from=str(out)), new, "lora: 4 -> 0")
    refused(change(cfg, lora=1000), new, "--lora 1000 is above 64, the smaller side of model.layers.0")
    with pytest.raises(UserError, match="has no adapter; needed: one of policy, critic"):
        ckpt.export(two_ranks[0], "last", tmp_path / "x", "adapter")
    with pytest.raises(UserError, match="--lora_alpha has no effect in this run; needed: --lora above 0"):
        parse(["tiny-ppo", "--lora_alpha", "8"])
    with pytest.raises(UserError, match="lora: 0 -> 4"):  # the checkpoint is older than --lora
        check_unchanged(out, {"read": {}}, {"lora": 4}, "")
    # one number in the middle of the base's file
    shutil.copytree(cfg.model, tmp_path / "other")
    file = tmp_path / "other/model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused(change(cfg, model=str(tmp_path / "other")), out, "policy's base: ")
    with pytest.raises(UserError, match="policy's base"):
        ckpt.export(out, "last", tmp_path / "x", base=str(tmp_path / "other"))


def test_a_run_starts_from_another_runs_adapters(adapted, tmp_path):
    """Policy, critic and reference get the adapters."""
    cfg, out, *_ = adapted
    rows, _ = run(dataclasses.replace(cfg, start_from=str(out), ref_refresh=False, steps=1), tmp_path / "s")
    assert rows[0]["kl"] == 0 and rows[-1]["kl" if "kl" in rows[-1] else "step"] >= 0


# --- the plan


def test_parameters_of_the_adapters_are_counted_exactly(tmp_path):
    path = make_model(tmp_path / "m")
    shape = plan.read_shape(path)
    policy = model.Adapted(frozen(path))
    assert sum(q.numel() for q in policy.parameters()) == shape.adapters(RANK)


def planned_and_loaded(cfg):
    """Returns the bytes of weights and optimizer states: planned, and those of the loaded models."""
    world = dist.init("cpu", "float32")
    case = case_of(cfg, world)
    roles = load_models(case, world).values()
    modules = {id(module): module for role in roles for module in (role.model, role.model.base)}
    numbers = sum(p.numel() for module in modules.values() for p in module.parameters())
    trained = sum(p.numel() for role in roles if role.optimizer for p in role.model.parameters())
    return case.state, 4 * (numbers + plan.MOMENTS * trained)


@pytest.mark.parametrize("critic,ref", [("", ""), ("tied", ""), ("untied", ""), ("", "tied"), ("", "untied"),
                                        ("tied", "tied"), ("untied", "tied")])
def test_roles_that_begin_with_the_policys_model_share_its_base_in_the_plan_too(base, critic, ref, request):
    """Also if --critic_model or --ref_model names this model."""
    folders = {"": "", "tied": base.model, "untied": request.getfixturevalue("untied")}
    cfg = dataclasses.replace(
        base, critic_model=folders[critic], ref_model=folders[ref], lora=RANK, kl_coef=0.1)
    planned, loaded = run_ranks(1, planned_and_loaded, cfg)[0]
    assert planned == pytest.approx(loaded, rel=0.03)


def test_one_h100_holds_ppo_of_7b_with_one_base():
    """2 bytes a weight for the base, 16 bytes for each number of two adapters."""
    cfg = parse(["orz-7b", "--lora", "32", "--ranks", "1", "--offload", "off"])
    c = plan.Case(cfg, 1, [plan.KNOWN["7b"]] * 3, plan.GPUS["H100"])
    adapter = 28 * 32 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert plan.shortage(c) == ""
    assert c.state == 2 * 7_615_616_512 + 2 * 12 * adapter
    assert plan.disk(c)["disk, a checkpoint"] == 2 * 12 * adapter
    assert plan.traffic(dataclasses.replace(c, world=8), "policy")["reduce"] == (0, 0)
