"""Policy, critic and reference: Hugging Face decoders on packs, with chunked fp32 log-probs.

A Policy or Critic holds the backbone as `.model` and its head beside it, under the names of Hugging Face's
own classes. So state dicts, exports and vLLM's loader need no renaming. Attention is one registered function.
It serves packed training (varlen kernel on CUDA, padded rows on a CPU and in fp32) and the torch engine's
cached decoding.

    policy = load_policy("path/to/Qwen2.5-7B")
    logp, entropy = logprobs(policy, pack, temperature=1.0)      # (T,) each, fp32

The temperature divides the logits, as in the engine. Log-probs are fp32 and come from fp32 logits. In bf16
they are off by 0.012 nats, which is too much for a clipped ratio.

Shapes: T tokens of a pack, U unique tokens, N segments, V vocabulary, D hidden size, H heads, d head size.
"""

import hashlib
import inspect
import json
import os
from collections.abc import Callable
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import MODEL_MAPPING, AttentionInterface, AutoConfig, AutoTokenizer, PreTrainedConfig

import dist
from configs import CHUNK_BYTES, HUB_ID, model_folder, neighbour, require
from data import Pack
from dist import Device, Weights

ShardFn = Callable[[nn.Module], nn.Module]  # shards a model in place and returns it: dist.shard

# --- families

# Model types that are computed right, and what multiplies the logits of their heads. tests/test_families.py
# compares each with transformers' own classes.
FAMILIES: dict[str, Callable[[Any], float]] = {
    **dict.fromkeys(("qwen2", "qwen3", "llama", "mistral", "olmo2", "olmo3", "smollm3", "phi3", "gemma3_text",
                     "glm", "glm4", "seed_oss", "ernie4_5"), lambda config: 1.0),
    "granite": lambda config: 1 / config.logits_scaling,
    "cohere": lambda config: config.logit_scale}

# Model types that users may try, and why they are refused.
RECURRENT = set("""
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax
    nemotron_h olmo_hybrid plamo2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
    recurrent_gemma rwkv xlstm zamba zamba2
""".split())
LEAKS = "has a recurrent state that would leak between the segments of a pack"
REFUSED = {**dict.fromkeys(RECURRENT, LEAKS),
           "gemma2": "caps its attention scores, which no kernel here does",
           "cohere2": "has sliding windows that count one token more in vLLM than in transformers",
           "hunyuan_v1_dense": "has rotary frequencies that depend on the length of the batch"}
# Settings that vLLM leaves out, found by bench/families.py. The makers' own models do not use them.
LEFT_OUT = {"qwen2": ["use_sliding_window"], "qwen3": ["use_sliding_window", "attention_bias"],
            "cohere": ["attention_bias"], "ernie4_5": ["use_bias"]}
ROPES = ("default", "linear", "llama3", "yarn")  # the others depend on the longest sequence of the batch
UNUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention",
          "quantization_config")  # settings that must be off


def check_family(model_type: str, path: str) -> None:
    """Raises UserError for a model type that isn't in FAMILIES."""
    moe = "moe" in model_type or model_type in ("mixtral", "gpt_oss", "deepseek_v3", "dbrx")
    unknown = "is a mixture of experts" if moe else "was never compared with its original"
    why = REFUSED.get(model_type, unknown)
    require(model_type in FAMILIES, f"{path} is a {model_type or 'model without a type'}, which {why}",
            f"one of {', '.join(FAMILIES)}")


def check_settings(config: PreTrainedConfig, path: str) -> None:
    """Raises UserError where the config asks for what is not computed here."""
    family = config.model_type
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    require(not experts, f"{path} is a mixture of experts ({family})", "a dense decoder")
    used = [name for name in (*UNUSED, *LEFT_OUT.get(family, ())) if getattr(config, name, None)]
    require(not used, f"{path} ({family}) sets {', '.join(used)}, which trainer or vLLM don't compute",
            "a model without it")
    require(config.tie_word_embeddings or family != "cohere",
            f"{path} ({family}) has a head of its own, which vLLM ignores", "tied embeddings")
    types = {rope.get("rope_type", "default") for rope in ropes(config)} - {*ROPES}
    require(not types, f"{path} ({family}) has rotary embeddings of type {', '.join(sorted(types))}, whose "
            "frequencies depend on the longest sequence of a batch", f"one of the types {', '.join(ROPES)}")
    layers = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    require(not layers, f"{path} ({family}) has layers of type {', '.join(sorted(layers))}",
            "full_attention and sliding_attention alone")
    no_kernel = torch.cuda.is_available() and "window_size" not in _varlen_options()
    require(not (has_window(config) and no_kernel),
            f"{path} ({family}) has sliding windows, which varlen_attn of torch {torch.__version__} lacks",
            "torch 2.13")


def ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The parameters of the config's rotary embeddings: one dict, or one for each type of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [r for r in rope.values() if isinstance(r, dict)]
    return by_layer_type or [rope]


def has_window(config: PreTrainedConfig) -> bool:
    """Whether some layers attend to the last config.sliding_window tokens only."""
    types = getattr(config, "layer_types", None)
    return bool(getattr(config, "sliding_window", None)) and (not types or "sliding_attention" in types)


# --- rows that are used several times


class CopyRows(torch.autograd.Function):
    """The rows `index` (S,) of x (U, …). A row's gradient is the sum of its copies' gradients, in fp32 and in
    the order of `index`. On CUDA index_select would add them in x's dtype, in any order.

    `groups()` is called in backward. It returns order and offsets as `grouped` does; without offsets (None)
    the copy order[u] of row u is the only one with a gradient."""

    @staticmethod
    def forward(ctx, x, index, groups):
        ctx.groups = groups
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, g):
        order, offsets = ctx.groups()
        g = g.index_select(0, order)
        if offsets is None:
            return g, None, None
        total = torch.segment_reduce(g.float().flatten(1), "sum", offsets=offsets)
        return total.to(g.dtype).unflatten(1, g.shape[1:]), None, None


def grouped(index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions (S,) in `index` sorted by value, and offsets (count + 1,): those of the value u are
    order[offsets[u]:offsets[u + 1]]."""
    order = index.argsort(stable=True)
    return order, torch.searchsorted(index[order], torch.arange(count + 1, device=index.device))


def copy_rows(x: Tensor, index: Tensor, groups: Callable[[], tuple[Tensor, Tensor | None]]) -> Tensor:
    """See CopyRows. In fp32 a CPU adds in a fixed order by itself, and faster."""
    if x.device.type == "cpu" and x.dtype != torch.bfloat16:
        return x.index_select(0, index)
    return CopyRows.apply(x, index, groups)


# --- attention


class Segments:
    """How attention lays out the segments of a pack. Made once per forward pass.

    The model computes U unique tokens: a prefix that segments share is computed once. Attention copies its
    keys and values in front of each of them. `slots` (S,) says which of the U tokens stands in each slot of
    the layout, `outputs` (U,) from which slot each token's output is read. None means that layout and unique
    tokens are the same.

    On CUDA the slots are the pack's T tokens and `cu_seqlens` separates the segments. On a CPU, and in fp32,
    they are padded rows, in blocks of (segments, columns) whose segments have similar lengths:

        segments    p q a | p q b c | p q r s t u        U = 9: p q a b c r s t u
        block 1     p q a .
                    p q b c
        block 2     p q r s t u

    A dot is padding. Nothing attends to it, and its gradient is 0.
    """

    def __init__(self, cu_seqlens: Tensor, longest: int, unique: Tensor | None = None,
                 inverse: Tensor | None = None) -> None:
        """cu_seqlens (N+1,), longest, unique (U,) and inverse (T,) as in Pack; without `unique` U = T."""
        if unique is not None and len(unique) == len(inverse):  # nothing is shared, so nothing is copied
            unique = inverse = None
        # Until `pad` is called, slot t is token t of the pack.
        self.cu_seqlens, self.longest, self.slots, self.outputs = cu_seqlens, longest, inverse, unique
        self.unique, self.inverse, self.blocks = unique, inverse, []
        self.slot = None  # (T,) of each token, once there are padded rows

    def pad(self) -> None:
        """Change the layout to padded rows. Their sizes depend on the lengths, so they are made on the
        host."""
        device, ends = self.cu_seqlens.device, self.cu_seqlens.cpu()
        lengths, starts, used = ends.diff().long(), ends[:-1].long(), 0
        # Segments between two powers of 2 share a block, so padding at most doubles a row.
        size = lengths.clamp(min=16).double().log2().ceil()
        slot = torch.empty(int(lengths.sum()), dtype=torch.int64)  # of each of the T tokens
        for s in size.unique():
            length, start = lengths[size == s], starts[size == s]
            column = torch.arange(int(length.max()))
            is_token = column < length[:, None]
            slot[(start[:, None] + column)[is_token]] = used + is_token.flatten().nonzero()[:, 0]
            self.blocks.append(tuple(is_token.shape))
            used += is_token.numel()
        self.slot = slot = slot.to(device)
        token = torch.arange(len(slot), device=device) if self.inverse is None else self.inverse
        self.slots = torch.zeros(used, dtype=torch.int64, device=device).index_copy(0, slot, token)
        self.outputs = slot if self.unique is None else slot[self.unique]

    @cached_property
    def copies(self) -> tuple[Tensor, Tensor]:
        """The slots of each unique token, as `grouped` returns them. Needs `unique`."""
        order, offsets = grouped(self.inverse, len(self.unique))
        return (order if self.slot is None else self.slot[order]), offsets

    def lay_out(self, x: Tensor, is_query: bool = False) -> Tensor:
        """x (U, heads, d) in the layout, (S, heads, d)."""
        if self.slots is None:
            return x
        # Only one output of each unique token is read, so only one copy of its query has a gradient.
        once = is_query or self.unique is None
        return copy_rows(x, self.slots, lambda: (self.outputs, None) if once else self.copies)


def packed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                     scaling: float, segments: Segments | None = None, cache: Any = None,
                     sliding_window: int | None = None, **_: Any) -> tuple[Tensor, None]:
    """Causal attention within segments: query (1, H, U, d), key and value (1, Hkv, U, d) -> (1, U, H, d).

    With `sliding_window` a token attends to so many tokens, itself included. With `cache`
    (engines.torch_engine.Cache) keys and values are stored in it. Without `segments` it is a decoding step:
    query (R, H, 1, d) attends to the cache's R rows."""
    if cache is not None:
        cache.write(module.layer_idx, key, value)
    if segments is None:
        key, value, allowed = cache.read(module.layer_idx, sliding_window)
        out = F.scaled_dot_product_attention(query, key, value, allowed, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    flash = query.is_cuda and query.dtype != torch.float32  # varlen_attn takes bf16 and fp16 alone
    if not (flash or segments.blocks):
        segments.pad()
    # Not x[0], whose gradient would be copied twice.
    qkv = [segments.lay_out(x.squeeze(0).transpose(0, 1), x is query) for x in (query, key, value)]
    attend = _varlen if flash else _padded
    out = attend(*qkv, segments, scaling, sliding_window)
    return (out if segments.outputs is None else out.index_select(0, segments.outputs))[None], None


def _varlen_options():
    """The names of varlen_attn's parameters, which differ between torch 2.11 and 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    return inspect.signature(varlen_attn).parameters


def _varlen(query, key, value, segments, scaling, window):
    """(T, H, d) by torch's flash kernel. check_settings refuses a window where the kernel has none."""
    from torch.nn.attention.varlen import varlen_attn

    known = _varlen_options()
    before = window - 1 if window else -1  # tokens before its own that a token attends to; -1: all
    options = {"window_size": (before, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    cu, longest = segments.cu_seqlens, segments.longest
    return varlen_attn(query, key, value, cu, cu, longest, longest, scale=scaling, **options)


def _padded(query, key, value, segments, scaling, window):
    """(S, H, d) by scaled_dot_product_attention, one call a block of rows."""
    sizes, outs = [rows * columns for rows, columns in segments.blocks], []
    for shape, *block in zip(segments.blocks, *(x.split(sizes) for x in (query, key, value)), strict=True):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in block)  # (rows, heads, columns, d)
        if q.is_cuda:  # with fewer heads of keys it would keep all scores of a row: memory by its square
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        mask = _window_mask(shape[1], window, q.device) if window and window < shape[1] else None
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling,
                                             enable_gqa=True)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


def _window_mask(columns, window, device):
    """(columns, columns): whether the row's token attends to the column's."""
    column = torch.arange(columns, device=device)
    distance = column[:, None] - column
    return (distance >= 0) & (distance < window)


AttentionInterface.register("torz", packed_attention)


# --- heads


class ChunkedLogProbs(torch.autograd.Function):
    """log p and entropy of a linear head's softmax, in fp32, with at most CHUNK_BYTES of logits at once.

    Forward keeps its inputs. Backward computes each chunk's logits again, which costs one more product with
    the head; only the last chunk's are kept from forward.

    Inputs: hidden (n, D), weight (V, D), targets (n,), temperature. Outputs: log-probs and entropies (n,).
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        logp, entropy = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(2))
        log_softmax = None
        for c in chunks(len(targets), len(weight)):
            del log_softmax  # frees the memory before the next chunk needs it
            log_softmax = logits_fp32(hidden[c], weight).div_(temperature).log_softmax(-1)
            logp[c] = log_softmax.gather(1, targets[c, None])[:, 0]
            entropy[c] = -torch.linalg.vecdot(log_softmax.exp(), log_softmax)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature, ctx.last = temperature, log_softmax
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, g_logp, g_entropy):
        hidden, weight, targets, entropy = ctx.saved_tensors
        g_logp = torch.zeros_like(entropy) if g_logp is None else g_logp
        g_hidden, g_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for c in reversed(chunks(len(targets), len(weight))):
            log_softmax, ctx.last = ctx.last, None
            if log_softmax is None:
                log_softmax = logits_fp32(hidden[c], weight).div_(ctx.temperature).log_softmax(-1)
            # z: logits, p: softmax, y: target, H: entropy.
            # d log p_y / dz = onehot(y) - p;  dH / dz = -p (log p + H)
            g = log_softmax.exp()
            if g_entropy is None:
                g *= -g_logp[c, None]
            else:
                g *= log_softmax.add_(entropy[c, None]).mul_(g_entropy[c, None]).add_(g_logp[c, None]).neg_()
            g.scatter_add_(1, targets[c, None], g_logp[c, None])
            g = g.div_(ctx.temperature).to(weight.dtype)
            del log_softmax
            g_hidden[c] = g @ weight
            g_weight += g.t() @ hidden[c]
            del g
        return g_hidden, g_weight.to(weight.dtype), None, None


def chunks(tokens: int, vocabulary: int) -> list[slice]:
    """Slices over `tokens`, each of which has CHUNK_BYTES of fp32 logits at most."""
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    return [slice(i, i + size) for i in range(0, tokens, size)]


def logits_fp32(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (c, D) @ weight (V, D).T -> (c, V), accumulated and returned in fp32 for inputs of any dtype."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.t().float()


class LMHead(nn.Linear):
    """A language model's head. Its forward computes log-probs, because FSDP gathers its weight only for
    forward. Some families multiply their logits by a constant, which divides the temperature."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        self.scale = FAMILIES[config.model_type](config)

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return ChunkedLogProbs.apply(hidden, self.weight, targets, temperature / self.scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (n, V) in fp32 of hidden states (n, D), for an engine."""
        logits = logits_fp32(hidden, self.weight)
        return logits if self.scale == 1 else logits.mul_(self.scale)


# --- models


@cache
def backbone_class(config_class: type) -> type:
    """transformers' backbone for a config, as a subclass that keeps its __init__ and __call__. vLLM changes
    these in transformers' own class if it runs the family through transformers; a trainer's model beside it
    would then be vLLM's. Engine makes a Policy before vLLM starts, so what is kept is transformers'."""
    kind = MODEL_MAPPING[config_class]
    kept = {name: getattr(kind, name) for name in ("__init__", "__call__", "__module__")}
    return type(kind.__name__, (kind,), kept)


class PackModel(nn.Module):
    """A Hugging Face backbone that runs on packs. Subclasses add a head."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = without_dropout(config)
        backbone = backbone_class(type(config))
        self.model = backbone._from_config(self.config, attn_implementation="torz", dtype=torch.float32)
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
                module.forward = partial(rms_norm, module)  # one kernel instead of six

    def tie(self) -> None:
        """Share tied parameters. Call it again after parameters were replaced."""

    def recompute(self, whole: int | None) -> None:
        """Let the first `whole` layers keep their input alone for the backward pass, and the others also
        their products and attention. The backward pass makes the rest again. None: layers keep all."""
        for i, layer in enumerate(self.model.layers if whole is not None else ()):
            keep = {} if i < whole else {"context_fn": keep_products}
            # Inside FSDP's hooks, which gather the weights once for both. Nothing in a layer is random.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False,
                                    preserve_rng_state=False, **keep)

    def hidden(self, tokens: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """Last hidden states (…, D) of tokens (…,) at positions (…,). `attention`: packed_attention's
        arguments."""
        out = self.model(input_ids=tokens, position_ids=positions, use_cache=False, **attention)
        return out.last_hidden_state

    def hidden_before(self, pack: Pack, at: Tensor) -> Tensor:
        """Last hidden states (n, D) of the tokens before those at indices `at` (n,) of the pack."""
        segments = Segments(pack.cu_seqlens, pack.longest, pack.unique, pack.inverse)
        tokens, positions = pack.tokens[pack.unique], pack.positions[pack.unique]
        hidden = self.hidden(tokens[None], positions[None], segments=segments)[0]
        before = pack.inverse[at - 1]
        return copy_rows(hidden, before, lambda: grouped(before, len(hidden)))

    def allocate(self, device: Device) -> None:
        """Memory on `device` for a model on the meta device. Tied parameters are shared and buffers have
        their values; all other values are left to the caller."""
        self.to_empty(device=device)
        self.tie()
        self.rebuild_buffers()

    def rebuild_buffers(self) -> None:
        """Compute all buffers again, in fp32, as transformers does for buffers that no file has. Rotary
        frequencies and the like are not parameters, and to_empty leaves garbage in them."""
        for p in self.parameters():
            p._is_hf_initialized = True  # so that _init_weights leaves it alone
        for module in self.model.modules():
            buffers = dict(module.named_buffers(recurse=False))
            for name, buffer in buffers.items():
                setattr(module, name, torch.full_like(buffer, torch.nan, dtype=torch.float32))
            if buffers:
                self.model._init_weights(module)
        wrong = [name for name, buffer in self.named_buffers() if not buffer.isfinite().all()]
        assert not wrong, f"{self.config.model_type} leaves buffers without values: {wrong}"


def keep_products() -> tuple[Any, Any]:
    """The contexts of `checkpoint` in which results of products and of attention are kept: they take nearly
    all the FLOP of a layer, and half of the memory."""
    import torch.nn.attention.varlen  # noqa: F401  registers its operator

    aten, names = torch.ops.aten, ("flash_attention", "efficient_attention", "flash_attention_for_cpu")
    attention = [getattr(aten, f"_scaled_dot_product_{name}").default for name in names]
    return create_selective_checkpoint_contexts(
        [aten.mm.default, aten.addmm.default, *attention, torch.ops.torch_attn._varlen_attn.default])


def rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """x by one of Hugging Face's modules that norm as Llama's does."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config, changed in place: every dropout is 0. A ratio compares log-probs of two passes, so they
    must not be random."""
    for name, value in vars(config).items():
        if value and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    return config


class Policy(PackModel):
    """A causal language model: `model.*` and `lm_head.weight`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.lm_head = LMHead(config)
        self.tie()

    def tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
        """See `logprobs`. The head computes no other tokens than those in pack.mask."""
        at = pack.loss_tokens
        logp, entropy = self.lm_head(self.hidden_before(pack, at), pack.tokens[at], temperature)
        zero = logp.new_zeros(len(pack.tokens))
        return zero.index_put((at,), logp), zero.index_put((at,), entropy)


class Critic(PackModel):
    """A value model: `model.*` and a scalar head `score.weight`, as in Hugging Face's sequence
    classifiers."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, pack: Pack) -> Tensor:
        """See `values`."""
        at = pack.loss_tokens
        value = self.score(self.hidden_before(pack, at))[:, 0].float()
        return value.new_zeros(len(pack.tokens)).index_put((at,), value)


def logprobs(policy: nn.Module, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
    """log p(tokens[t]) and the entropy there, (T,) fp32 in nats; 0 where pack.mask is false."""
    return policy(pack, temperature)


def values(critic: nn.Module, pack: Pack) -> Tensor:
    """The critic's value before token t, (T,) fp32; 0 where pack.mask is false."""
    return critic(pack)


# --- loading


MODEL_FILES = dict(allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
                   ignore_patterns=["*/*", "consolidated*"])  # the same weights in other formats


def resolve(name: str, repo_type: str = "model") -> str:
    """The folder of a model or, with repo_type "dataset", of a data set. `name`: the folder itself, or an id
    of the Hugging Face Hub such as Qwen/Qwen2.5-0.5B.

    The first rank of each machine downloads to huggingface_hub's cache. A model that is there already is
    taken as it is. All ranks must call this together. Raises UserError, the same on every rank, where the
    id is neither in the cache nor to be had."""
    if not HUB_ID.fullmatch(name):
        return name
    here, error = Path(name).exists(), ""
    if not here and os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            _download(name, repo_type)
        except (OSError, ValueError) as e:
            error = str(e).strip().partition("\n")[0][:150] or type(e).__name__
    error = max(dist.gather(error))  # the other ranks wait here
    kind, flag = ("", "--model") if repo_type == "model" else (f" --repo-type {repo_type}", "--data")
    require(not error,
            f"no folder {name}{neighbour(name)}, and the Hub's {repo_type} {name} can't be had ({error})",
            f"hf download {name}{kind} --local-dir DIR where there is a network, and then {flag} DIR")
    return name if here else _snapshot(name, repo_type, local_files_only=True)


def _download(name, repo_type):
    """Bring what the cache lacks of a repository. Raises OSError or ValueError."""
    try:
        if repo_type == "model" and _is_whole(Path(_snapshot(name, repo_type, local_files_only=True))):
            return
    except OSError:  # nothing in the cache
        pass
    _snapshot(name, repo_type)


def _snapshot(name, repo_type, **options):
    files = MODEL_FILES if repo_type == "model" else {}
    return snapshot_download(name, repo_type=repo_type, **files, **options)


def _is_whole(folder):
    """Whether a model's folder has all its weights. A download that was cut short leaves some out."""
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
    return all((folder / file).exists() for file in files)


def load_config(path: str) -> PreTrainedConfig:
    """The folder's model config. Raises UserError for a folder that lacks a model, or has one that isn't
    computed right here."""
    folder = model_folder(path)
    require((folder / "config.json").is_file(), f"{path} has no config.json", "a Hugging Face model folder")
    require(any(folder.glob("*.safetensors")), f"{path} has no .safetensors files",
            "weights saved by save_pretrained")
    check_family(json.loads((folder / "config.json").read_text()).get("model_type", ""), path)
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    check_settings(config, path)
    return config


def folder_fingerprint(path: str) -> str:
    """Hash of what is read of a model folder, which tells two models apart in milliseconds: names and sizes,
    and of weights 64 blocks of 4 KiB in each file, at equal distances. Other files are read whole."""
    digest = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        if file.suffix in (".json", ".jinja", ".model", ".txt", ".safetensors"):
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as f:
                weights = file.suffix == ".safetensors"
                for at in range(0, size, max(size // 64 * weights, 4096)):
                    f.seek(at)
                    digest.update(f.read(4096))
    return digest.hexdigest()[:8]


def load_tokenizer(path: str) -> Any:
    """The folder's tokenizer. Raises UserError where there is none."""
    # Without tokenizer files transformers silently makes up a tokenizer from the model's config.
    require(any(model_folder(path).glob("tokenizer*")), f"{path} has no tokenizer",
            "tokenizer.json and tokenizer_config.json there")
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def vocabulary_hash(tokenizer: Any) -> str:
    """Hash of a tokenizer's tokens and their ids."""
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:8]


def load_policy(path: str, device: Device = "cpu",
                shard_fn: ShardFn = lambda model: model) -> Policy:
    """The folder's causal language model in fp32. Raises UserError as load_config does.

    `shard_fn` (dist.shard) is applied while parameters are on the meta device. So each rank allocates and
    reads only its own shards."""
    return _load(Policy, path, device, shard_fn)


def load_critic(path: str, device: Device = "cpu",
                shard_fn: ShardFn = lambda model: model, seed: int = 0) -> Critic:
    """A critic with the folder's backbone. Its head is the folder's, or else drawn by `seed` from a normal
    distribution with standard deviation 1/(D+1), as in Open-Reasoner-Zero's code. The final norm gives states
    of length √D, so first values have a standard deviation of about 1/√D. Raises UserError as load_config
    does."""
    critic = _load(Critic, path, device, shard_fn)
    if "score.weight" not in files_keys(path):
        head = torch.randn(critic.score.weight.shape, generator=torch.Generator().manual_seed(seed))
        dist.fill(critic.score.weight, head / (critic.config.hidden_size + 1))
    return critic


# Tensors that a folder may have and a model may not: the head of the other kind of model, a tied head,
# buffers that old files keep.
NOT_OURS = ("lm_head.weight", "score.weight", "rotary_emb.inv_freq")


def _load(kind, path, device, shard_fn):
    with torch.device("meta"):
        model = kind(load_config(path))
    model = shard_fn(model)
    model.allocate(device)
    # Parameters, not the state dict: a tied head comes once, as the embedding.
    in_files, state = files_keys(path), dict(model.named_parameters())
    if "score.weight" not in in_files:  # a new critic
        state.pop("score.weight", None)
    missing = sorted(set(state) - in_files)
    require(not missing, f"{path} lacks {len(missing)} tensors, for example {missing[:1]}",
            f"weights of a {model.config.model_type} saved by save_pretrained")
    extra = sorted(name for name in in_files - set(state) if not name.endswith(NOT_OURS))
    require(not extra, f"{path} has {len(extra)} tensors that a {model.config.model_type} doesn't have, for "
            f"example {extra[:1]}", "weights and a config.json of one model")
    dist.load_files(state, path)
    return model.train()


def files_keys(path: str) -> set[str]:
    """Names of the tensors in the folder's safetensors files."""
    return {name for name, _ in _tensors(path)}


def files_weights(path: str, device: Device, dtype: torch.dtype) -> Weights:
    """(name, whole tensor) of the folder's parameters, one at a time: what an engine's `awake` takes where
    nothing is trained. Raises UserError as load_config does."""
    tied = load_config(path).tie_word_embeddings
    left_out = tuple(name for name in NOT_OURS if tied or name != "lm_head.weight")
    for name, read in _tensors(path):
        if not name.endswith(left_out):
            yield name, read().to(device, dtype)


def _tensors(path):
    """Name and reader of each tensor in the folder's safetensors files."""
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118  safe_open is no dict
                yield name, partial(f.get_tensor, name)
