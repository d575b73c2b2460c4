"""Tests of dist.py, and of gradients on several ranks."""

import dataclasses
import os
import pickle
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Operations, forked, run_ranks, wait_until
from ranks import (
    all_gradients,
    in_bf16,
    make_samples,
    meet,
    one_rank_with_and_without_fsdp,
    updates_with_moves,
    weights,
)
from safetensors.torch import load_file

import dist
from bench.rehearse import free_port
from configs import PRESETS
from log import read_metrics


def config(tiny, **changes):
    base = dict(model=tiny, device="cpu", dtype="float32", pack_len=64, max_prompt_len=16,
                max_response_len=32, prompts_per_step=6, samples_per_prompt=4, critic_updates=2)
    return dataclasses.replace(PRESETS["tiny-ppo"], **base | changes)


def agree(a, b, tolerance=1e-5):
    for name in a.keys() - {"metrics", "packs", "sent"}:
        error = (a[name] - b[name]).norm() / (b[name].norm() + 1e-12)
        assert error <= tolerance, (name, float(error))
    for key, value in a["metrics"].items():
        assert value == pytest.approx(b["metrics"][key], rel=1e-4, abs=1e-6), key


JOBS = {
    "ppo": dict(), "ppo with kl and entropy": dict(kl_coef=0.1, entropy_coef=0.01, lam=0.9, value_clip=None),
    "grpo": dict(algo="grpo", aggregation="response"),
    "gspo, whitened": dict(algo="grpo", ratio="sequence", advantage="group_mean_whiten",
                           aggregation="max_len"),
    # On four ranks, some have no sample. They compute a filler: a pack without a token in the loss.
    "two samples": dict(critic_updates=1, prompts_per_step=1, samples_per_prompt=2)}


def jobs(tiny, **changes):
    return [(config(tiny, **kind | changes), make_samples(2 if name == "two samples" else 16))
            for name, kind in JOBS.items()]


@pytest.fixture(scope="module")
def alone(tiny):
    large, small = jobs(tiny, pack_len=4096), jobs(tiny, pack_len=48)
    out = run_ranks(1, all_gradients, large + small)[0]
    return out[:len(large)], out[len(large):]


def test_gradients_do_not_depend_on_packs(alone):
    """`one`: large packs, which compute a shared prompt once. `many`: small packs, of about one sample."""
    for name, one, many in zip(JOBS, *alone, strict=True):
        assert any(g.norm() > 1e-6 for g in one.values() if isinstance(g, torch.Tensor)), name
        assert many["packs"] > one["packs"] or name == "two samples"
        agree(many, one)


def test_bf16_has_fp32_weights_and_gradients(tiny):
    (gap, fp32), = run_ranks(1, in_bf16, tiny)
    assert fp32 and 1e-5 < gap < 0.1


def test_gradients_on_four_ranks_equal_those_on_one(tiny, alone):
    """`pairs`: with --shard_ranks 2, each pair of ranks holds a whole model."""
    whole, pairs = (jobs(tiny, shard_ranks=n, pack_len=48) for n in (0, 2))

    def in_each_pack(model, packs):
        """Replaces dist.accumulate. The backward pass of each pack all-reduces."""
        return packs

    cases = [(i, whole[i]) for i in range(1, 5)]
    cases += [(0, pairs[0]), (0, (*pairs[0], in_each_pack)), (4, pairs[4])]
    for got in run_ranks(4, all_gradients, [case for _, case in cases]):
        for (i, (cfg, _, *in_each)), many, before in zip(cases, got, [{}, *got[:-1]], strict=True):
            agree(many, alone[0][i])
            if in_each:
                agree(many, before, 1e-6)
            # A model has 3 FSDP groups: 2 layers and the root. A pack gathers 3 in its forward pass, and the
            # layers again in its backward pass. The critic's root was gathered already (estimate_advantages).
            models, (gathers, sums) = 1 + (cfg.algo == "ppo"), many["sent"]
            assert sums == (cfg.shard_ranks > 0) * 3 * models * (many["packs"] if in_each else 1)
            assert gathers == 5 * models * many["packs"] - (cfg.algo == "ppo")


def test_gradients_are_equal_bit_by_bit_whatever_is_recomputed(tiny):
    modes = ("none", "1", "layers")
    made = [(config(tiny, recompute=mode, kl_coef=0.1), make_samples(12)) for mode in modes]
    for none, *others in run_ranks(2, all_gradients, made):
        for other in others:
            agree(none, other, tolerance=0)


@pytest.mark.parametrize("which", ["tiny", "untied"])
def test_one_rank_without_fsdp_computes_what_fsdp_computes(which, request):
    """Bit by bit: log-probs, fp32 gradients summed over three packs, and the engine's bf16 weights."""
    (found,) = run_ranks(1, one_rank_with_and_without_fsdp, request.getfixturevalue(which))
    *ours, fsdp = found
    for one in ours:
        assert one.keys() == fsdp.keys()
        for name, x in one.items():
            assert torch.equal(x, fsdp[name]), name


@pytest.mark.parametrize("which", ["tiny", "untied"])
def test_full_weights_equal_the_files(which, request):
    path = request.getfixturevalue(which)
    files = load_file(f"{path}/model.safetensors")
    for got in run_ranks(2, weights, path):
        assert set(got) == set(files)
        assert all(torch.equal(got[k], files[k]) for k in files)


def test_restarted_ranks_do_not_meet_those_before_them(monkeypatch):
    """Restarted ranks ignore keys that old ones left in torchrun's store. late: the rank that joins last"""
    agent = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for late in (0, 1, 0):
        assert run_ranks(2, meet, agent.port, late) == [(3, False)] * 2


def test_a_run_goes_on_without_a_node_that_is_gone(base, two_ranks, tmp_path):
    program, out = tmp_path / "program.py", tmp_path / "out"
    pickled = pickle.dumps(dataclasses.replace(base, out=str(out), save_every=1))
    program.write_text(f"import pickle, sys\nsys.path[:0] = {[str(ROOT)]}\n"
                       f"import train\ntrain.main(pickle.loads({pickled}))")
    words = (f"--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint localhost:{free_port()} --max-restarts 3 "
             "--monitor-interval 0.2 --rdzv-conf last_call_timeout=2,keep_alive_interval=1,is_host=")
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [forked("-m", "torch.distributed.run", *f"{words}{host}".split(), str(program), environment=env,
                     stdout=None, stderr=None) for host in "10"]
    assert wait_until(lambda: list(out.glob("ckpt/step_000001")), pause=0.002)
    rank = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text()
    for pid in [agents[1].pid, *map(int, rank.split())]:
        os.kill(pid, signal.SIGKILL)
    assert [agent.wait(300) for agent in agents] == [0, -signal.SIGKILL]
    a, b = ([row["reward"] for row in rows[:-1]] for rows in (read_metrics(out), two_ranks[1]))
    assert a == pytest.approx(b, abs=0.02) and len(list(out.glob("ckpt/step_000004/shard*"))) == 1


def stepped():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state(optimizer):
    return [x for of_param in optimizer.state.values() for x in of_param.values()]


def test_each_tensor_moves_in_one_copy():
    """move(model, None, None) copies nothing, because the weights have not changed on the device."""
    kinds = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default

    def copies(move, *args) -> int:
        with Operations(lambda op: op in kinds) as ops:
            move(*args)
        return ops.counts[True]

    model, optimizer = stepped()
    for _ in range(2):  # the second move is counted, because the first one also allocates memory
        both = copies(dist.move, model, optimizer, "cpu"), copies(dist.move, model, optimizer, None)
    alone = copies(dist.move, model, None, "cpu"), copies(dist.move, model, None, None)
    assert (both, alone) == ((19, 19), (7, 0))


def test_weights_and_optimizer_state_rest_where_they_rested_before():
    """A move to the host reuses host memory, because pinning new memory is slow."""
    model, optimizer = stepped()
    dist.move(model, optimizer, "cpu")
    dist.move(model, optimizer, None)
    rested = [x.data_ptr() for x in (*model.state_dict().values(), *state(optimizer))]
    dist.move(model, optimizer, "cpu")
    assert not {x.data_ptr() for x in (*model.state_dict().values(), *state(optimizer))} & {*rested}
    dist.move(model, optimizer, None)
    assert rested == [x.data_ptr() for x in (*model.state_dict().values(), *state(optimizer))]
    dist.move(model, optimizer, "meta")  # moves Adam's step counts too, as fused Adam needs
    assert [x.device.type for x in state(optimizer)] == ["meta"] * 12


@pytest.mark.parametrize("ranks", [1, 3])  # FSDP pads shards, because 3 ranks do not divide the model's sizes
def test_moves_between_host_and_device_change_no_update(tiny, ranks):
    for moved, stayed in run_ranks(ranks, updates_with_moves, tiny):
        assert moved.keys() == stayed.keys() and len(moved) > 50
        for name in moved:
            assert torch.equal(moved[name], stayed[name]), name


def test_sums_have_a_fixed_order_inside_the_block_alone():
    """Engines run outside dist.deterministic. Inside, some of their operations would raise RuntimeError."""
    for on in (True, False):
        with suppress(KeyError), dist.deterministic(on):
            assert torch.are_deterministic_algorithms_enabled() == on
            raise KeyError
        assert not torch.are_deterministic_algorithms_enabled()
