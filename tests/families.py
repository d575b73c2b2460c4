"""Tiny random models of every supported family, and comparisons with transformers' models. Each setting in
MODELS has a value that changes the model's output, so a setting that is ignored makes a comparison fail."""

import copy
import importlib.util
import sys
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
from conftest import responses
from ranks import make_samples
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

import ckpt
import data
import dist
import model
import rollout
from configs import PRESETS
from engines import vllm_engine
from layers import attention
from tools.tiny import make_tokenizer

WINDOW = 7  # attention window in tokens; samples have up to 32 tokens
SLIDING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, original_max_position_embeddings=64,
              low_freq_factor=1.0, high_freq_factor=4.0)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=2.0)

# A delta net and attention, as in Qwen3.5. The heads of keys stand for two heads of values.
DELTA = dict(head_dim=64, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
             linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
             rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25,
                                  mrope_section=[3, 3, 2], mrope_interleaved=True))
VISION = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=64, patch_size=4,
              num_position_embeddings=16)

# Name of a test model -> settings of its config.json. The name up to the first `-` is the model_type.
MODELS = {"qwen2": dict(tie_word_embeddings=True, rope_parameters=YARN), "qwen2-untied": dict(),
    "qwen3": dict(tie_word_embeddings=True, head_dim=32),
    "llama": dict(attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
    "mistral": dict(sliding_window=None, head_dim=32, rope_parameters=LINEAR),
    "mistral-sliding": dict(sliding_window=WINDOW, head_dim=32),
    "granite": dict(attention_bias=True, mlp_bias=True, embedding_multiplier=3.0, logits_scaling=5.0,
                    residual_multiplier=0.4, attention_multiplier=0.3),
    "granite-tied": dict(tie_word_embeddings=True, logits_scaling=8.0),
    "olmo2": dict(attention_bias=True, rope_parameters=YARN), "olmo3": dict(SLIDING, rope_parameters=YARN),
    "smollm3": dict(SLIDING, use_sliding_window=True, no_rope_layers=[1, 0], attention_bias=True,
                    mlp_bias=True, tie_word_embeddings=False),
    "phi3": dict(sliding_window=None, resid_pdrop=0.5, embd_pdrop=0.5,
                 rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "phi3-sliding": dict(sliding_window=WINDOW, tie_word_embeddings=True),
    "gemma3_text": dict(SLIDING, head_dim=32, query_pre_attn_scalar=20, attention_bias=True, rope_parameters={
        "sliding_attention": dict(rope_type="default", rope_theta=1e3), "full_attention": LINEAR}),
    "gemma3_text-untied": dict(SLIDING, head_dim=32, tie_word_embeddings=False),
    "glm": dict(head_dim=32, attention_bias=True), "glm4": dict(head_dim=32, attention_bias=True),
    "cohere": dict(logit_scale=0.3, use_qk_norm=True),
    "seed_oss": dict(head_dim=32, attention_bias=True, attention_out_bias=True, mlp_bias=True,
                     residual_dropout=0.5),
    "ernie4_5": dict(head_dim=32, rope_parameters=LINEAR),
    "ernie4_5-untied": dict(head_dim=32, tie_word_embeddings=False),
    "exaone4": dict(SLIDING, head_dim=32),
    "qwen3_5": dict(DELTA, tie_word_embeddings=True), "qwen3_5_text": DELTA}
RECURRENT = [name for name in MODELS if name.startswith("qwen3_5")]  # only vLLM decodes these


KEPT = []  # vLLM engines that must stay alive: freeing one would destroy state that later engines use


def make(folder: Path, name: str) -> str:
    tokenizer = make_tokenizer()
    # vLLM's CPU attention takes no head size below 32 (hidden_size / num_attention_heads).
    common = dict(
        vocab_size=len(tokenizer), hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=128, num_hidden_layers=2, max_position_embeddings=512, attention_dropout=0.5,
        initializer_range=0.1, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None)
    settings = copy.deepcopy(common | MODELS[name])
    kind = AutoModelForCausalLM
    if name == "qwen3_5":  # also reads images
        kind, tied = AutoModelForImageTextToText, settings["tie_word_embeddings"]
        settings = dict(text_config=settings, vision_config=VISION, tie_word_embeddings=tied)
    config = AutoConfig.for_model(name.partition("-")[0], **settings)
    torch.manual_seed(0)
    hf = kind.from_config(config)
    for key, p in hf.named_parameters():
        if p.ndim == 1:  # a bias or a norm: its numbers are all equal, which could hide a mistake
            # With this A_log a state halves in about ten tokens. With the usual one it is gone in one token.
            mean = -3.0 if key.endswith("A_log") else float(p.detach().mean())
            torch.nn.init.normal_(p, mean=mean, std=0.2)
    hf.save_pretrained(folder / name)
    if name == "qwen3_5":
        save_file({"mtp.fc.weight": torch.ones(64, 128)}, folder / name / "mtp.safetensors")
    tokenizer.save_pretrained(folder / name)
    return str(folder / name)


def original(path: str) -> torch.nn.Module:
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return hf.eval()


def original_logp(hf: torch.nn.Module, samples: list[data.Sample], temperature: float) -> Tensor:
    """Returns (T,): each token's log-prob by transformers' model `hf`; 0 at prompt tokens."""
    parts = []
    for s in samples:
        ids, n = torch.tensor([*s.prompt, *s.ids]), len(s.prompt)
        logp = (hf(ids[None]).logits[0] / temperature).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        parts.append(torch.cat([torch.zeros(n), logp[n - 1:]]))
    return torch.cat(parts)


def compare_training(path: str, seed: int = 0) -> dict[str, float]:
    """Returns the largest differences between torz and transformers.

    "logp": over all tokens, the difference of the log-probs, in nats
    "gradient": over the parameters, norm(torz's gradient - g) / (norm(g) + 0.001 * G). g: transformers'
        gradient; G: its norm over the whole model"""
    hf, policy, samples = original(path), model.load_policy(path), make_samples(9, seed)
    p = data.pack(samples)
    assert len(p.unique) < len(p.tokens) and max(s.length for s in samples) > 3 * WINDOW
    logp, want = policy(p, 0.7)[0], original_logp(hf, samples, 0.7)
    g = torch.randn(len(logp), generator=torch.Generator().manual_seed(seed))
    (logp * g).sum().backward()
    (want * g).sum().backward()
    theirs = dict(hf.named_parameters())
    whole = torch.stack([q.grad.norm() for q in theirs.values()]).norm()
    gaps = [(q.grad - theirs[name].grad).norm() / (theirs[name].grad.norm() + 1e-3 * whole)
            for name, q in policy.named_parameters()]
    return {"logp": float((logp - want).detach().abs().max()), "gradient": float(max(gaps))}


def compare_buffers(module: model.PackModel, theirs: dict[str, Tensor]) -> float:
    """Returns the largest difference between the buffers of `module` and those of transformers' model."""
    ours = dict(module.named_buffers())
    assert ours.keys() == theirs.keys()
    return max((float((b.float() - theirs[name]).abs().max()) for name, b in ours.items()), default=0.0)


def paged_attention(query, keys, values, cu_seqlens, longest, scaling, window, seqused_k, block_table):
    """Computes what engines.torch_engine.torch_kernel computes on a GPU, for the torch engine's pages."""
    assert cu_seqlens.tolist() == [*range(len(query) + 1)]
    # (n, Hkv, tokens, d)
    k, v = (x[block_table.long()].flatten(1, 2).transpose(1, 2) for x in (keys, values))
    assert k.shape[2] == longest
    place, used = torch.arange(longest), seqused_k[:, None]
    mask = (place < used) & (place >= used - (window or longest))
    return torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None], k, v, mask[:, None, None], scale=scaling, enable_gqa=True)[:, :, 0]


def compare_engine(path: str, kind: str, pages: tuple[int, ...] = (0,)) -> float:
    """Returns the largest difference in nats between the log-probs of trainer and engine, for two versions of
    the weights. pages: tokens of a page of the torch engine; 0: rows. Only the last one decodes
    the second version."""
    cfg = replace(PRESETS["tiny-ppo"], model=path, max_prompt_len=64, max_response_len=24, max_num_seqs=8,
                  stop=())
    dtype = torch.bfloat16 if Path(path).name == "qwen3_5" else torch.float32  # see delta_rule_in_fp32
    engine = rollout.ENGINES[kind](path, model.load_tokenizer(path), cfg, dtype=dtype)
    engine.kernel, engine._pages = paged_attention, lambda wanted, size: wanted
    if kind == "vllm":
        KEPT.append(engine)
    policy, gap = model.load_policy(path), 0.0
    policy.compute_dtype = dtype
    prompts = {0: [5, 6, 7], 1: [*range(40, 60)], 2: [*range(8, 19)]}
    for version in range(2):
        samples = []
        # The second version shows that the engine has new weights. A few tokens in one cache are enough.
        for i, engine.page in enumerate(pages[-1:] if version else pages):
            with engine.awake(dist.full_weights(policy), version):
                drawn = responses(engine, prompts, 2, 0.7, (12, 4)[version], (i,), version)
                samples += sorted(drawn, key=lambda s: (s.prompt_id, s.sample_id))
        p = data.pack(samples)
        with torch.no_grad():
            logp = policy(p, 0.7)[0]
            for q in policy.parameters():
                q.mul_(1.2)
        found = (logp - p.engine_logp)[p.mask].abs().max()
        assert found.isfinite(), (path, logp.isfinite().all(), p.engine_logp.isfinite().all())
        gap = max(gap, float(found))
    return gap


def stand_in_for_torchvision() -> None:
    """vLLM's module of Qwen3.5 imports torchvision, for images only. The tests' environment lacks its CPU
    build (see Makefile). Call this function after transformers has found out that torchvision is missing."""
    if importlib.util.find_spec("torchvision"):
        return
    names = "torchvision", "torchvision.transforms", "torchvision.transforms.v2"
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[names[2]].functional = None


def delta_rule_in_fp32() -> None:
    """vLLM's CPU kernels of the delta rule take only bf16. This function adds a plain one for fp32, so that
    all other parts of vLLM's model can be compared exactly: weights, states, positions, gates and norms."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as vllm_part

    in_bf16 = vllm_part.cpu_gdn_attention_core

    def gating(A_log, a, b, dt_bias):
        return -A_log.exp() * torch.nn.functional.softplus(a + dt_bias), b.sigmoid()

    def rule(query, key, value, g, beta, initial_state, cu_seqlens, initial_state_indices, **_):
        heads, out = value.shape[-2], []
        g, beta = g.reshape(1, -1, heads), beta.reshape(1, -1, heads)
        query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
        for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            at, index = slice(start, end), initial_state_indices[i]
            part, state = attention._chunked_rule()(
                *(x[:, at] for x in (query, key, value, g, beta)), initial_state=initial_state[index][None],
                output_final_state=True, use_qk_l2norm_in_kernel=True)
            initial_state[index] = state[0]
            out.append(part)
        return torch.cat(out, 1), None

    def update(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, **_):
        q, k, v = (x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v))
        out, _ = rule(q, k, v, *gating(A_log, a, b, dt_bias), initial_state_source, cu_seqlens,
                      initial_state_indices)
        return out.transpose(0, 1)

    exact = types.SimpleNamespace(fused_gdn_gating_cpu=gating, chunk_gated_delta_rule_cpu=rule,
                                  fused_sigmoid_gating_delta_rule_update_cpu=update)

    def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor,
             layer_name: vllm_part.LayerNameType) -> None:
        if mixed_qkv.dtype == torch.bfloat16:
            return in_bf16(mixed_qkv, b, a, core_attn_out, layer_name)
        context = vllm_part.get_forward_context()
        if context.attn_metadata is not None:
            layer = context.no_compile_layers[vllm_part._resolve_layer_name(layer_name)]
            with mock.patch.object(vllm_part, "ops", exact), mock.patch.object(
                    torch.cpu, "_is_avx512_bf16_supported", lambda: False):  # its convolution is in bf16, too
                vllm_part._cpu_gdn_attention_nonspec(layer, context.attn_metadata[layer.prefix], mixed_qkv,
                                                     b, a, core_attn_out)

    vllm_part.cpu_gdn_attention_core = core


def prepare_vllm() -> None:
    dist.init("cpu", "float32")
    stand_in_for_torchvision()
    delta_rule_in_fp32()


def compare_vllm(paths: list[str]) -> list[float]:
    prepare_vllm()
    return [compare_engine(path, "vllm") for path in paths]


def compare_prefix_cache(path: str) -> tuple[float, float, set[int]]:
    """Samples long prompts with vLLM's prefix cache, before and after the weights have changed. Returns the
    largest difference in nats between the log-probs of trainer and engine; the same if the cache is not reset
    after the change; and the numbers of cached tokens of the requests.

    The requests have no seeds: vLLM needs chunked prefill to cache states, and on a CPU generators lack the
    offset that it then sets back."""
    import vllm
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def count(self, request):
        found = lookup(self, request)
        cached.add(found[1])
        return found

    prepare_vllm()
    cached, lookup, start = set(), KVCacheManager.get_computed_blocks, vllm_engine._import_vllm()
    KVCacheManager.get_computed_blocks = count
    options = dict(enable_prefix_caching=True, enable_chunked_prefill=True)
    vllm_engine._import_vllm = lambda: lambda **ours: start(**ours | options)
    cfg = replace(PRESETS["tiny-ppo"], model=path, max_prompt_len=440, max_response_len=24, max_num_seqs=8,
                  stop=())
    engine = vllm_engine.VLLMEngine(path, model.load_tokenizer(path), cfg)
    KEPT.append(engine)
    params, policy = vllm.SamplingParams, model.load_policy(path)
    vllm.SamplingParams = lambda seed, **others: params(**others)

    def gap() -> float:
        prompts = {i: [*range(3 + i, 103 + i)] * 4 for i in range(2)}
        samples = list(responses(engine, prompts, 3, 0.7, 24, (0,), engine.version))
        p = data.pack(sorted(samples, key=lambda s: (s.prompt_id, s.sample_id)))
        with torch.no_grad():
            return float((policy(p, 0.7)[0] - p.engine_logp)[p.mask].abs().max())

    gaps = []
    for version in range(2):
        with engine.awake(dist.full_weights(policy), version):
            gaps += [gap(), gap()]
            with torch.no_grad():
                for q in policy.parameters():
                    q.mul_(1.2)
            if version:
                weights = ((name, x.clone()) for name, x in dist.full_weights(policy))
                engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
                stale = gap()
    vllm.SamplingParams = params
    return max(gaps), stale, cached


def round_to_bf16(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p.to(torch.bfloat16))


def compare_export(path: str, out: Path) -> dict[str, float]:
    """Exports policy and critic to `out`. Returns the largest differences of log-probs and values between the
    models and the loaded exports."""
    tokenizer, samples = model.load_tokenizer(path), make_samples(3)
    policy, critic, p = model.load_policy(path), model.load_critic(path, seed=1), data.pack(samples)
    for name, module in ("policy", policy), ("critic", critic):
        round_to_bf16(module)
        facts = {"prompt": "{problem}", "system_prompt": ""}
        ckpt.export_hf(dist.full_weights(module), module, tokenizer, path, out / name, facts)
    with torch.no_grad():
        logp, value = policy(p, 1.0)[0], critic(p)
        want = original_logp(original(str(out / "policy")), samples, 1.0)
        again = model.load_critic(str(out / "critic"))(p)
        last = torch.stack([value[end - 1] for end in p.cu_seqlens[1:].tolist()])
        scores = original_scores(str(out / "critic"), critic, samples)
    gaps = {"policy": logp - want, "critic": last - scores, "critic, loaded again": value - again}
    return {name: float(gap.abs().max()) for name, gap in gaps.items()}


def original_scores(path: str, critic: model.Critic, samples: list[data.Sample]) -> Tensor:
    """Returns (N,): the values that transformers computes for the samples without their last tokens."""
    options = dict(dtype=torch.float32, attn_implementation="eager")
    inputs = [torch.tensor([[*s.prompt, *s.ids[:-1]]]) for s in samples]
    if ckpt.critic_class(critic.config).__name__.endswith("ForSequenceClassification"):
        classifier = AutoModelForSequenceClassification.from_pretrained(path, **options).eval()
        return torch.cat([classifier(ids).logits[0] for ids in inputs])
    backbone = AutoModel.from_pretrained(path, **options).eval()
    return torch.cat([critic.score(backbone(ids).last_hidden_state[0, -1]) for ids in inputs])
