"""Policy, critic and reference: Hugging Face decoders on packs, with chunked fp32 log-probs.

A Policy or Critic holds the backbone as `.model` and its head beside it, under the names of Hugging Face's
own classes. So state dicts, exports and vLLM's loader need no renaming. Attention is one registered function.
It serves packed training (varlen kernel on CUDA, padded rows on a CPU) and the torch engine's cached
decoding.

    policy = load_policy("path/to/Qwen2.5-7B")
    logp, entropy = logprobs(policy, pack, temperature=1.0)      # (T,) each, fp32

The temperature divides the logits, as in the engine. Log-probs are fp32 and come from fp32 logits. In bf16
they are off by 0.012 nats, which is too much for a clipped ratio.

Shapes: T tokens of a pack, U unique tokens, N segments, V vocabulary, D hidden size, H heads, d head size.
"""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig

import dist
from configs import CHUNK_BYTES, require
from data import Pack
from dist import Device, Weights

ShardFn = Callable[[nn.Module], nn.Module]  # shards a model in place and returns it: dist.shard

# --- attention


class Segments:
    """How attention lays out the segments of a pack. Made once per forward pass.

    The model computes U unique tokens: a prefix that segments share is computed once. Attention copies its
    keys and values in front of each of them. `slots` (S,) says which of the U tokens stands in each slot of
    the layout, `outputs` (U,) from which slot each token's output is read. None means that layout and unique
    tokens are the same.

    On CUDA the slots are the pack's T tokens and `cu_seqlens` separates the segments. On a CPU they are
    padded rows, in blocks of (segments, columns) whose segments have similar lengths:

        segments    p q a | p q b c | p q r s t u        U = 9: p q a b c r s t u
        block 1     p q a .
                    p q b c
        block 2     p q r s t u

    A dot is padding. Nothing attends to it, and its gradient is 0.
    """

    def __init__(self, cu_seqlens: Tensor, longest: int, unique: Tensor | None = None,
                 inverse: Tensor | None = None) -> None:
        """cu_seqlens (N+1,), longest, unique (U,) and inverse (T,) as in Pack; without `unique` U = T."""
        # On CUDA slot t is token t of the pack.
        self.cu_seqlens, self.longest, self.slots, self.outputs = cu_seqlens, longest, inverse, unique
        self.blocks = []
        if cu_seqlens.device.type != "cpu":
            return
        lengths, starts, used = cu_seqlens.diff().long(), cu_seqlens[:-1].long(), 0
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
        token = torch.arange(len(slot)) if inverse is None else inverse
        self.slots = torch.zeros(used, dtype=torch.int64).index_copy(0, slot, token)
        self.outputs = slot if unique is None else slot[unique]


def packed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                     scaling: float, segments: Segments | None = None, cache: Any = None,
                     **_: Any) -> tuple[Tensor, None]:
    """Causal attention within segments: query (1, H, U, d), key and value (1, Hkv, U, d) -> (1, U, H, d).

    With `cache` (engine_torch.Cache) keys and values are stored in it. Without `segments` it is a decoding
    step: query (R, H, 1, d) attends to the cache's R rows."""
    if cache is not None:
        cache.write(module.layer_idx, key, value)
    if segments is None:
        key, value, allowed = cache.read(module.layer_idx)
        out = F.scaled_dot_product_attention(query, key, value, allowed, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    qkv = [x[0].transpose(0, 1) for x in (query, key, value)]  # (U, heads, d)
    if segments.slots is not None:  # index_select: on a CPU the gradient of indexing takes four times as long
        qkv = [x.index_select(0, segments.slots) for x in qkv]
    out = _varlen(*qkv, segments, scaling) if query.is_cuda else _padded(*qkv, segments, scaling)
    return (out if segments.outputs is None else out.index_select(0, segments.outputs))[None], None


def _varlen(query, key, value, segments, scaling):
    """(T, H, d) by torch's flash kernel. Its signature differs between torch 2.11 and 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    cu, longest = segments.cu_seqlens, segments.longest
    return varlen_attn(query, key, value, cu, cu, longest, longest, scale=scaling, **options)


def _padded(query, key, value, segments, scaling):
    """(S, H, d) by scaled_dot_product_attention, one call a block of rows."""
    sizes, outs = [rows * columns for rows, columns in segments.blocks], []
    for shape, *block in zip(segments.blocks, *(x.split(sizes) for x in (query, key, value)), strict=True):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in block)  # (rows, heads, columns, d)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


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
    forward."""

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return ChunkedLogProbs.apply(hidden, self.weight, targets, temperature)


# --- models


class PackModel(nn.Module):
    """A Hugging Face backbone that runs on packs. Subclasses add a head."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.model = AutoModel.from_config(config, attn_implementation="torz", dtype=torch.float32)

    def tie(self) -> None:
        """Share tied parameters. Call it again after parameters were replaced."""

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
        return hidden.index_select(0, pack.inverse[at - 1])

    def rebuild_buffers(self) -> None:
        """Compute the rotary frequencies again. nn.Module.to_empty leaves garbage in buffers."""
        rotary = self.model.rotary_emb
        self.model.rotary_emb = type(rotary)(self.config).to(next(self.parameters()).device)


class Policy(PackModel):
    """A causal language model: `model.*` and `lm_head.weight`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
        """See `logprobs`. The head computes no other tokens than those in pack.mask."""
        at = pack.mask.nonzero()[:, 0]
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
        at = pack.mask.nonzero()[:, 0]
        value = self.score(self.hidden_before(pack, at))[:, 0].float()
        return value.new_zeros(len(pack.tokens)).index_put((at,), value)


def logprobs(policy: nn.Module, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
    """log p(tokens[t]) and the entropy there, (T,) fp32 in nats; 0 where pack.mask is false."""
    return policy(pack, temperature)


def values(critic: nn.Module, pack: Pack) -> Tensor:
    """The critic's value before token t, (T,) fp32; 0 where pack.mask is false."""
    return critic(pack)


# --- loading


def load_config(path: str) -> PreTrainedConfig:
    """The folder's model config. Raises UserError for a folder that lacks a model, or has one that can't be
    trained."""
    folder = Path(path)
    require(path != "" and folder.is_dir(), f"no model folder {path!r}",
            "--model with a Hugging Face model folder")
    require((folder / "config.json").is_file(), f"{path} has no config.json", "a Hugging Face model folder")
    require(any(folder.glob("*.safetensors")), f"{path} has no .safetensors files",
            "weights saved by save_pretrained")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    require(not experts, f"{path} is a mixture of experts ({config.model_type})", "a dense decoder")
    layer_types = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    require(not window and "sliding_attention" not in layer_types,
            f"{path} uses sliding-window attention ({config.model_type})", "a decoder with full attention")
    return config


def load_tokenizer(path: str) -> Any:
    """The folder's tokenizer. Raises UserError where there is none."""
    require(Path(path).is_dir(), f"no model folder {path!r}", "--model with a Hugging Face model folder")
    # Without tokenizer files transformers silently makes up a tokenizer from the model's config.
    require(any(Path(path).glob("tokenizer*")), f"{path} has no tokenizer",
            "tokenizer.json and tokenizer_config.json there")
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def load_policy(path: str, device: Device = "cpu",
                shard_fn: ShardFn = lambda model: model) -> Policy:
    """The folder's causal language model in fp32. Raises UserError as load_config does.

    `shard_fn` (dist.shard) is applied while parameters are on the meta device. So each rank allocates and
    reads only its own shards."""
    return _load(Policy, path, device, shard_fn)


def load_critic(path: str, device: Device = "cpu",
                shard_fn: ShardFn = lambda model: model, seed: int = 0) -> Critic:
    """A critic with the folder's backbone. Its head is the folder's, or else drawn from N(0, 1/(D+1)) by
    `seed`. Raises UserError as load_config does."""
    critic = _load(Critic, path, device, shard_fn)
    if "score.weight" not in files_keys(path):
        head = torch.randn(critic.score.weight.shape, generator=torch.Generator().manual_seed(seed))
        dist.fill(critic.score.weight, head * (critic.config.hidden_size + 1) ** -0.5)
    return critic


def _load(kind, path, device,
          shard_fn):
    with torch.device("meta"):
        model = kind(load_config(path))
    model = shard_fn(model)
    model.to_empty(device=device)
    model.tie()
    model.rebuild_buffers()
    # Parameters, not the state dict: a tied head comes once, as the embedding.
    in_files, state = files_keys(path), dict(model.named_parameters())
    if "score.weight" not in in_files:  # a new critic
        state.pop("score.weight", None)
    missing = sorted(set(state) - in_files)
    require(not missing, f"{path} lacks {len(missing)} tensors, for example {missing[:1]}",
            f"weights of a {model.config.model_type} saved by save_pretrained")
    dist.load_files(state, path)
    return model.train()


def files_keys(path: str) -> set[str]:
    """Names of the tensors in the folder's safetensors files."""
    return {name for name, _ in _tensors(path)}


def files_weights(path: str, device: Device, dtype: torch.dtype) -> Weights:
    """(name, whole tensor) of the folder's parameters, one at a time: what an engine's `awake` takes where
    nothing is trained. Raises UserError as load_config does."""
    tied = load_config(path).tie_word_embeddings
    for name, read in _tensors(path):
        if not (tied and name == "lm_head.weight"):
            yield name, read().to(device, dtype)


def _tensors(path):
    """Name and reader of each tensor in the folder's safetensors files."""
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118  safe_open is no dict
                yield name, partial(f.get_tensor, name)
