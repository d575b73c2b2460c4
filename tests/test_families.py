"""Tests that models of every supported family equal transformers' models."""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path

import families
import huggingface_hub
import mistral_common
import pytest
import ranks
import torch
from conftest import ROOT, run_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import ckpt
import data
import model
import rollout
from configs import PRESETS
from engines import vllm_engine
from engines.torch_engine import TorchEngine
from guard.checks import check_vocabularies
from guard.identity import model_facts
from guard.messages import UserError
from tools import plan

ONE_OF_EACH = [name for name in families.MODELS if "-" not in name]  # one model of each family
NEAR = 1e-5  # largest allowed difference of log-probs (nats) and of gradients (relative to their norm)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Returns a function: name in families.MODELS -> folder of the model."""
    root = tmp_path_factory.mktemp("families")
    return lambda name: str(root / name) if (root / name).exists() else families.make(root, name)


@pytest.fixture(params=families.MODELS)
def folder(request, folder_of):
    return folder_of(request.param)


def test_every_supported_family_has_a_model():
    assert {name.partition("-")[0] for name in families.MODELS} == {*model.FAMILIES}


@pytest.mark.parametrize("model_type", model.FAMILIES)
def test_the_default_settings_of_a_family_are_accepted(model_type):
    model.check_settings(AutoConfig.for_model(model_type).get_text_config(), model_type)


def test_log_probs_and_gradients_are_those_of_transformers(folder):
    """The config asks for a dropout of 0.5. torz must not apply dropout."""
    assert model.load_config(folder).attention_dropout == 0.5
    gaps = families.compare_training(folder)
    assert gaps["logp"] < NEAR and gaps["gradient"] < NEAR, gaps


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_is_recomputed_changes_no_bit_of_a_gradient(folder_of, name):
    policy, pack = model.load_policy(folder_of(name)).bfloat16(), data.pack(ranks.make_samples(8))
    gradients = []
    for layers in (0, 2):
        policy.recompute(layers)
        policy(pack, 1.0)[0].sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
        policy.zero_grad()
    assert gradients[0][0].any() and all(map(torch.equal, *gradients))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_buffers_are_those_of_transformers(folder_of, name, base):
    """torz creates a model on the meta device, so it must compute the buffers itself."""
    folder = folder_of(name)
    engine = TorchEngine(folder, model.load_tokenizer(folder), base, dtype=torch.bfloat16)
    assert {p.dtype for p in engine.policy.parameters()} == {torch.bfloat16}
    theirs = dict(families.original(folder).named_buffers())
    for module in (model.load_policy(folder), model.load_critic(folder), engine.policy):
        assert families.compare_buffers(module, theirs) == 0


@pytest.mark.parametrize("name", [name for name in families.MODELS if name not in families.RECURRENT])
def test_the_torch_engine_agrees_with_the_trainer(folder_of, name):
    """With a cache of rows, and with one of pages of 4 tokens."""
    assert families.compare_engine(folder_of(name), "torch", pages=(0, 4)) < 2 * NEAR


@pytest.mark.parametrize("stop", ["é", "答案：", "ends here, and only here, after forty-one b", "\n\n"])
def test_stop_strings_of_any_length_and_alphabet_end_a_response(stop, tiny, base):
    tokenizer = model.load_tokenizer(tiny)
    engine = TorchEngine(tiny, tokenizer, families.replace(base, stop=(stop,)))
    ids = torch.tensor([tokenizer(f"a b ü {stop[:-1]} x {stop}").input_ids])
    stops = [engine.at_stop(ids[0, :t + 1].tolist()) for t in range(ids.shape[1])]
    naive = [stop in tokenizer.decode(ids[0, :t + 1]) for t in range(ids.shape[1])]
    assert stops == naive and sum(stops) == 1


@pytest.mark.parametrize("rope,known", [
    (dict(rope_type="default"), 32768), (dict(rope_type="linear", factor=2.0), 65536),
    (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768), 131072)])
def test_rope_scaling_counts_in_the_longest_sequence(rope, known):
    rope = dict(rope_theta=1e6) | rope
    config = AutoConfig.for_model("qwen2", max_position_embeddings=32768, rope_parameters=rope)
    assert rollout.max_positions(config) == known


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_exports_are_read_by_transformers(folder_of, name, tmp_path):
    folder = folder_of(name)
    gaps = families.compare_export(folder, tmp_path)
    assert max(gaps.values()) < NEAR, gaps
    model.load_policy(str(tmp_path / "policy"))  # raises an error if a tensor is missing or unknown
    exported, original = (json.loads(Path(path, "config.json").read_text())
                          for path in (tmp_path / "policy", folder))
    if original["model_type"] == "qwen3_5":  # see test_recurrent.py
        return
    assert exported.pop("dtype") == "bfloat16" and original.pop("dtype") == "float32"
    assert exported == original  # the export keeps dropout settings, which torz ignores


def test_the_plan_counts_the_parameters(folder):
    """tools/plan.py ignores some norms and biases, so its counts may differ by 1 %."""
    config = model.load_config(folder)
    with torch.device("meta"):
        counts = [sum(p.numel() for p in kind(config).parameters()) for kind in (model.Policy, model.Critic)]
    for shape in (plan.shape_of(config.to_dict(), ""), plan.read_shape(folder)):
        assert [shape.policy_params, shape.critic_params] == pytest.approx(counts, rel=0.01)


def test_shards_of_two_ranks_compute_the_same(folder_of):
    paths = [folder_of(name) for name in ("gemma3_text", "cohere")]
    for of_rank in run_ranks(2, ranks.sharded_logp, paths):
        for path, logp in zip(paths, of_rank, strict=True):
            with torch.no_grad():
                want = model.load_policy(path)(data.pack(ranks.make_samples(5)), 0.7)[0]
            assert (logp - want).abs().max() < NEAR


def test_vllm_agrees_with_the_trainer(folder_of):
    """The last model runs in bf16, with vLLM's kernels of the delta rule."""
    paths = [folder_of(name) for name in ("llama", "mistral", "qwen3", "gemma3_text", "cohere", "olmo3",
                                          "exaone4", "qwen3_5_text", "qwen3_5")]
    vllm_engine._import_vllm()
    (gaps,) = run_ranks(1, families.compare_vllm, paths)
    assert max(gaps[:-1]) < 1e-4 and gaps[-1] < 0.2, gaps


def test_vllms_prefix_cache_has_states_of_the_present_weights(folder_of):
    """256 tokens of each prompt come from the cache."""
    vllm_engine._import_vllm()
    ((right, stale, cached),) = run_ranks(1, families.compare_prefix_cache, folder_of("qwen3_5_text"))
    assert right < 1e-4 and stale > 1e-2 and cached == {0, 256}


def changed_folder(source: str, out: Path, **changes) -> str:
    out.mkdir()
    for file in Path(source).iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((out / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps(config))
    return str(out)


LONGROPE = dict(rope_type="longrope", rope_theta=1e4, factor=2.0, original_max_position_embeddings=256,
                short_factor=[1.0] * 8, long_factor=[2.0] * 8, partial_rotary_factor=0.5)


@pytest.mark.parametrize("name,changes,words", [
    ("gemma3_text", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    ("gemma3_text", dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
    ("gemma3_text", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("qwen2", dict(use_sliding_window=True, sliding_window=7), "use_sliding_window"),
    ("qwen3", dict(use_sliding_window=True, sliding_window=7), "use_sliding_window"),
    ("qwen3", dict(attention_bias=True), "attention_bias"), ("cohere", dict(attention_bias=True), "bias"),
    ("ernie4_5", dict(use_bias=True), "use_bias"), ("cohere", dict(tie_word_embeddings=False), "untied head"),
    ("llama", dict(quantization_config=dict(quant_method="fp8")), "quantization_config"),
    ("olmo3", dict(layer_types=["chunked_attention", "full_attention"]), "chunked_attention"),
    ("qwen2", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "dynamic"),
    ("phi3", dict(rope_parameters=LONGROPE), "longrope"),
    *((name, dict(sliding_window=7), "sliding_window") for name in (
        "llama", "granite", "olmo2", "glm", "glm4", "cohere", "seed_oss", "ernie4_5")),
    ("llama", dict(model_type="gemma2"), "has model_type 'gemma2', which"),
    ("llama", dict(model_type="qwen3_moe"), "has model_type 'qwen3_moe', which"),
    ("llama", dict(model_type=""), "has model_type '', which")])
def test_what_is_not_computed_is_refused(name, changes, words, folder_of, tmp_path):
    """The error names the family. For an unknown family it lists the known ones."""
    path = changed_folder(folder_of(name), tmp_path / "model", **changes)
    with pytest.raises(UserError, match=words) as e:
        model.load_config(path)
    families = model.FAMILIES if "model_type" in changes else [name]
    assert all(family in str(e.value) for family in families) and "\n" not in str(e.value)


def test_a_mistral_model_with_windows_in_some_layers_is_refused(folder_of, tmp_path):
    """transformers reads its config as one of the family ministral."""
    path = changed_folder(folder_of("mistral"), tmp_path / "model", **families.SLIDING)
    with pytest.raises(UserError, match=r"model \(ministral\) has settings .* wrong: layer_types; needed: "):
        model.load_config(path)


def test_a_mistral_model_with_a_tekken_file_has_the_tokenizer_of_transformers(folder_of, tmp_path):
    path = changed_folder(folder_of("mistral"), tmp_path / "model")
    expected = model_facts(path, model.load_tokenizer(path))
    shutil.copy(Path(mistral_common.__file__).with_name("data") / "tekken_240718.json", f"{path}/tekken.json")
    assert model_facts(path, model.load_tokenizer(path)) == expected


def test_weights_that_the_model_lacks_are_refused(folder_of, tmp_path):
    path = changed_folder(folder_of("llama"), tmp_path / "model")
    file = Path(path, "model.safetensors")
    save_file(load_file(file) | {"lm_head.bias": torch.ones(5)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"differ in lm_head.bias \[5\]; needed: "):
        model.load_policy(path)
    shutil.copy(file, Path(path, "backup.safetensors"))
    with pytest.raises(UserError, match="two .safetensors files in .* have the same tensors"):
        model.load_policy(path)


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "qwen3_5"])
@pytest.mark.parametrize("other", [False, True])
def test_a_tied_head_that_differs_from_the_embedding_is_refused(name, other, folder_of, tmp_path):
    """transformers would not tie it. A copy of the embedding is read, and a critic has no such head."""
    path = changed_folder(folder_of(name), tmp_path / "model", tie_word_embeddings=True)
    file = Path(path, "model.safetensors")
    weights = load_file(file)
    (embedding,) = (x for name, x in weights.items() if name.endswith("embed_tokens.weight"))
    weights["lm_head.weight"] = embedding + float(other)
    save_file(weights, file, {"format": "pt"})
    assert model.load_critic(path)
    error = pytest.raises(UserError, match="has an output layer that differs from the embedding, and")
    with error if other else contextlib.nullcontext():
        assert model.load_policy(path)


def test_a_critic_of_another_family_is_exported_with_its_own_config(folder_of, base, tmp_path):
    critic = folder_of("gemma3_text")
    cfg = {"model": folder_of("granite"), "critic_model": critic}
    run = tmp_path / "run"
    (message,) = run_ranks(1, ranks.main, families.replace(base, **cfg, out=str(run), steps=1, eval_data=(),
                                                           save_every=1))
    assert message == ""
    ckpt.export(run, "1", tmp_path / "hf", "critic")
    p, values = data.pack(ranks.make_samples(3)), []
    for folder in (run / "export" / "critic", tmp_path / "hf"):
        assert model.load_config(str(folder)).model_type == "gemma3_text"
        with torch.no_grad():
            values.append(model.load_critic(str(folder))(p))
    assert torch.equal(*values)
    assert model.load_config(str(run / "export" / "policy")).model_type == "granite"


@pytest.mark.parametrize("flag", ["critic_model", "ref_model"])
def test_a_critic_or_a_teacher_with_another_tokenizer_is_refused(folder_of, tmp_path, flag):
    path = changed_folder(folder_of("llama"), tmp_path / "model")
    file = Path(path, "tokenizer.json")
    file.write_text(file.read_text().replace('"<think>"', '"<other>"'))
    tokenizer = model.load_tokenizer(folder_of("qwen2"))
    cfg = families.replace(PRESETS["tiny-ppo"], model=folder_of("qwen2"), **{flag: path})
    with pytest.raises(UserError, match=f"--{flag} .* has another vocabulary than"):
        check_vocabularies(cfg, tokenizer)
    check_vocabularies(families.replace(cfg, **{flag: folder_of("granite")}), tokenizer)
    size = model.load_config(cfg.model).vocab_size - 1
    smaller = changed_folder(folder_of("granite"), tmp_path / "smaller", vocab_size=size)
    with pytest.raises(UserError, match=f"--{flag} .*smaller has another .* or a smaller embedding"):
        check_vocabularies(families.replace(cfg, **{flag: smaller}), tokenizer)
    short = changed_folder(folder_of("granite"), tmp_path / "short", max_position_embeddings=63)
    with pytest.raises(UserError, match=f"short has fewer positions than the 64 tokens .*another --{flag}"):
        check_vocabularies(families.replace(cfg, **{flag: short}), tokenizer)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Returns an empty folder in place of the Hugging Face cache. The network is off."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put_into_cache(hub: Path, source: str) -> Path:
    snapshot = hub / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    changed_folder(source, snapshot)
    (hub / "models--org--tiny" / "refs").mkdir()
    (hub / "models--org--tiny" / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_an_id_of_the_hub_is_a_folder_of_its_cache(hub, folder_of):
    snapshot = put_into_cache(hub, folder_of("qwen2"))
    path = model.resolve("org/tiny")
    assert path == str(snapshot) and model.load_policy(path) and model.load_tokenizer(path)
    for same in (str(ROOT), "tests/absent/model", ""):
        assert model.resolve(same) == same


@pytest.mark.parametrize("missing",
                         ["", "config.json", "tokenizer.json", "model.safetensors", "2.safetensors"])
def test_a_model_partly_in_the_cache_is_downloaded(hub, folder_of, tmp_path, monkeypatch, missing):
    """Instead of downloading, the test puts the missing file back."""
    snapshot = put_into_cache(hub, folder_of("qwen2"))
    if missing == "2.safetensors":  # one of two files of weights
        weights = load_file(snapshot / "model.safetensors")
        (snapshot / "model.safetensors").unlink()
        files = {key: f"{i % 2 + 1}.safetensors" for i, key in enumerate(weights)}
        for file in ("1.safetensors", "2.safetensors"):
            save_file({key: weights[key] for key in weights if files[key] == file}, snapshot / file)
        (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    if missing:
        (snapshot / missing).rename(tmp_path / missing)
    from_hub = model.snapshot_download

    def snapshot_download(name, local_files_only=False, **options):
        if not local_files_only:
            (tmp_path / missing).rename(snapshot / missing)
        return from_hub(name, local_files_only=True, **options)

    monkeypatch.setattr(model, "snapshot_download", snapshot_download)
    for _ in range(2):  # a second download would fail, because the file is no longer in tmp_path
        path = model.resolve("org/tiny")
        assert model.load_policy(path) and model.load_tokenizer(path)


def test_the_first_rank_of_a_machine_downloads_and_the_others_wait(hub, folder_of, monkeypatch):
    """Instead of downloading, the test copies a model into the cache."""
    from_hub = model.snapshot_download

    def snapshot_download(name, local_files_only=False, **options):
        if not local_files_only:
            assert os.environ["LOCAL_RANK"] == "0"
            time.sleep(0.5)
            put_into_cache(hub, folder_of("qwen2"))
        return from_hub(name, local_files_only=True, **options)

    folder_of("qwen2")
    monkeypatch.setattr(model, "snapshot_download", snapshot_download)
    first, second = run_ranks(2, ranks.resolved, "org/tiny")
    assert first == second == str(hub / "models--org--tiny" / "snapshots" / ("0" * 40))
    first, second = run_ranks(2, ranks.resolved, "org/absent")
    assert first == second and "hf download org/absent" in first
