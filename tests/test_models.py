"""Dense decoders of every family: a step of PPO with each engine, and an export that transformers loads."""

import dataclasses

import pytest
import ranks
import torch
from conftest import make_model, responses, run_ranks
from transformers import Qwen2Config

import dist
import model
import rollout
from engines import torch_engine

FAMILIES = {"qwen2": dict(tied=True), "qwen2-untied": dict(tied=False), "qwen3": dict(),
            "llama": dict(tied=False), "mistral": dict(tied=False)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny random model of each family."""
    root = tmp_path_factory.mktemp("family")
    return {name: make_model(root / name, family=name.partition("-")[0], **options)
            for name, options in FAMILIES.items()}


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_one_step_of_ppo_and_an_export_of_every_family(engine, folders, base, tmp_path):
    """Engine and trainer agree within 1e-4 nats on every token. The step changes the weights. The exported
    model has the same logits in transformers' own classes and in ours."""
    cfgs = [dataclasses.replace(base, model=path, out=str(tmp_path / name), engine=engine, steps=1,
                                eval_data=(), save_every=0, recompute="layers")
            for name, path in folders.items()]
    for name, rows in run_ranks(1, ranks.trained_in_turn, cfgs)[0].items():
        assert rows[0]["logp_gap/max"] < 1e-4 and rows[0]["grad_norm/policy"] > 0, name
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    tokens = torch.arange(40, 60)[None]
    for name, path in folders.items():
        out = f"{tmp_path / name}/export"
        theirs = AutoModelForCausalLM.from_pretrained(f"{out}/policy", dtype=torch.float32)
        ours = model.load_policy(f"{out}/policy")
        assert {p.dtype for p in ours.parameters()} == {torch.float32}, name  # although the files are bf16
        with torch.no_grad():
            want = theirs(tokens).logits[0]
            segments = model.Segments(torch.tensor([0, 20], dtype=torch.int32), 20)
            hidden = ours.hidden(tokens, torch.arange(20)[None], segments=segments)[0]
            got = hidden @ ours.lm_head.weight.T
        assert (got - want).abs().max() < 1e-4, name
        before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert any(not torch.equal(a.to(torch.bfloat16), b.to(torch.bfloat16))
                   for a, b in zip(before.parameters(), theirs.parameters(), strict=True)), name
        critic = AutoModelForSequenceClassification.from_pretrained(f"{out}/critic")
        assert critic.score.weight.shape == (1, 64) and critic.score.weight.abs().sum() > 0


@pytest.mark.parametrize("rope,known", [
    (dict(rope_type="default"), 32768),
    (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768), 131072),
    (dict(rope_type="linear", factor=2.0), 65536)])
def test_rope_scaling_counts_in_the_longest_sequence(rope, known):
    config = Qwen2Config(max_position_embeddings=32768, rope_parameters=dict(rope_theta=1e6) | rope)
    assert rollout.max_positions(config) == known


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_decoder_equals_the_modules(family, folders, base, monkeypatch):
    """Prompts of different lengths give the same tokens and log-probs with it and through the modules."""
    path = folders[family]
    tokenizer, policy = model.load_tokenizer(path), model.load_policy(path)

    def sampled() -> tuple[bool, dict]:
        engine = torch_engine.TorchEngine(path, tokenizer, base)
        with engine.awake(dist.full_weights(policy), version=0):
            samples = list(responses(engine, {0: [5, 6, 7], 1: [8] * 9}, 3, 1.0, 12, (0,), 0))
        found = {(s.prompt_id, s.sample_id): (s.ids.tolist(), torch.tensor(s.logp)) for s in samples}
        return engine.decoder.fused, found

    fused, ours = sampled()
    monkeypatch.setattr(torch_engine, "LLAMA_LIKE", ())
    still_fused, theirs = sampled()
    assert fused and not still_fused and len(ours) == 6
    for key, (ids, logp) in theirs.items():
        assert ours[key][0] == ids and (ours[key][1] - logp).abs().max() < 1e-5


@pytest.mark.parametrize("stop", ["é", "答案：", "ends here, and only here, after forty-one b", "\n\n"])
def test_stop_strings_of_any_length_and_alphabet_end_a_response(stop, tiny, base):
    """The engine stops at the token that completes the string, as looking for it in the whole text says."""
    cfg, tokenizer = dataclasses.replace(base, stop=(stop,)), model.load_tokenizer(tiny)
    engine = torch_engine.TorchEngine(tiny, tokenizer, cfg)
    text = f"a b ü {stop[:-1]} x {stop}"
    ids = torch.tensor([tokenizer(text).input_ids])
    stops = [bool(engine._stopped(ids[:, t], ids, t)[0]) for t in range(ids.shape[1])]
    naive = [stop in tokenizer.decode(ids[0, :t + 1]) for t in range(ids.shape[1])]
    assert stops == naive and sum(stops) == 1
