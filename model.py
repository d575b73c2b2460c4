"""Policy, critic and reference: Hugging Face decoders on packs, with chunked fp32 log-probs.

A `Policy` or `Critic` holds the backbone as `.model` and its head beside it under the names that Hugging Face's own
classes use, so state dicts, exports and the engine's loader need no renaming. Attention is one registered function,
which serves packed training (varlen kernel on CUDA, padded rows on a CPU) and the torch engine's cached decoding.

    policy = load_policy("path/to/Qwen2.5-7B")
    logp, entropy = logprobs(policy, pack, temperature=1.0)      # (T,) each, fp32

Temperature divides the logits, as in the engine. Log-probs are fp32 from fp32 logits: in bf16 they are off by 0.012
nats, more than a clipped ratio can bear.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig

from configs import need
from data import Pack
from plan import CHUNK_BYTES

# --- attention


class Segments:
    """Where the segments of a pack lie: what the attention function needs, made once a forward pass. `computed` and `source` as
    in a Pack; without them every token is computed."""

    def __init__(self, cu_seqlens: Tensor, longest: int, computed: Tensor | None = None, source: Tensor | None = None) -> None:
        self.cu_seqlens, self.longest, self.computed, self.source = cu_seqlens, longest, computed, source
        self.rows: list[tuple[int, int]] = []  # CPU: (segments, columns) of blocks of rows, all of a block padded alike
        if cu_seqlens.device.type == "cpu":
            lengths, starts, done = cu_seqlens.diff().long(), cu_seqlens[:-1].long(), 0
            size = torch.tensor([max(int(n) - 1, 15).bit_length() for n in lengths])  # padding at most doubles a row
            places = torch.empty(int(lengths.sum()), dtype=torch.int64)  # of each token in the padded rows, end to end
            for s in size.unique():
                n, first = lengths[size == s], starts[size == s]
                column = torch.arange(int(n.max()))
                real = column < n[:, None]
                place = done + torch.arange(real.numel()).view_as(real)
                places[(first[:, None] + column)[real]] = place[real]
                self.rows.append(tuple(real.shape))
                done += real.numel()
            # What lies in padding is never looked at, and has gradient 0.
            self.source = torch.zeros(done, dtype=torch.int64).index_copy(
                0, places, torch.arange(len(places)) if source is None else source)
            self.computed = places if computed is None else places[computed]


def packed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float,
                     segments: Segments | None = None, cache: Any = None, **_: Any) -> tuple[Tensor, None]:
    """Causal attention within segments. query (1, H, U, d), key and value (1, Hkv, U, d) -> (1, U, H, d). What several
    segments begin with is among the U tokens once; it is laid out before each of them here and nowhere else.

    With `cache` (see rollout.Cache): keys and values go into it, and where `segments` is None, query (B, H, 1, d) looks
    at the cache's rows.
    """
    if cache is not None:
        cache.write(module.layer_idx, key, value)
    if segments is None:
        key, value, allowed = cache.read(module.layer_idx)
        out = F.scaled_dot_product_attention(query, key, value, allowed, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # (U, H, d)
    if segments.source is not None:  # by index_select, not by indexing, whose gradient takes four times as long on a CPU
        query, key, value = (x.index_select(0, segments.source) for x in (query, key, value))
    if query.is_cuda:
        out = varlen(query, key, value, segments, scaling)
    else:
        outs, sizes = [], [n * columns for n, columns in segments.rows]
        parts = zip(*(x.split(sizes) for x in (query, key, value)), strict=True)
        for (n, columns), some in zip(segments.rows, parts, strict=True):
            q, k, v = (x.view(n, columns, *x.shape[1:]).transpose(1, 2) for x in some)  # (N, H, L, d)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            outs.append(o.transpose(1, 2).flatten(0, 1))
        out = torch.cat(outs)
    return (out if segments.computed is None else out.index_select(0, segments.computed))[None], None


def varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float) -> Tensor:
    """(T, H, d) by the in-tree flash kernel, whose signature moved between torch 2.11 and 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        causal["enable_gqa"] = True
    cu, longest = segments.cu_seqlens, segments.longest
    return varlen_attn(query, key, value, cu, cu, longest, longest, scale=scaling, **causal)


AttentionInterface.register("torz", packed_attention)


# --- heads


class ChunkedLogProbs(torch.autograd.Function):
    """log p and entropy of a linear head's softmax, fp32, never more than CHUNK_BYTES of logits at once: forward keeps
    only what came in and backward makes each chunk's logits again (one more product with the head), but for the last."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logp, entropy = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(2))
        every = None
        for c in chunks(len(targets), len(weight)):
            del every  # before the next is made
            every = logits_fp32(hidden[c], weight).div_(temperature).log_softmax(-1)
            logp[c] = every.gather(1, targets[c, None])[:, 0]
            entropy[c] = -torch.linalg.vecdot(every.exp(), every)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature, ctx.last = temperature, every
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, g_logp: Tensor | None, g_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy = ctx.saved_tensors
        g_logp = torch.zeros_like(entropy) if g_logp is None else g_logp
        g_hidden, g_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for c in reversed(chunks(len(targets), len(weight))):
            every, ctx.last = ctx.last, None
            if every is None:
                every = logits_fp32(hidden[c], weight).div_(ctx.temperature).log_softmax(-1)
            # d logp_y / dz = onehot(y) - p;  dH / dz = -p (log p + H)
            g = every.exp()
            if g_entropy is None:
                g *= -g_logp[c, None]
            else:
                g *= every.add_(entropy[c, None]).mul_(g_entropy[c, None]).add_(g_logp[c, None]).neg_()
            g.scatter_add_(1, targets[c, None], g_logp[c, None])
            g = g.div_(ctx.temperature).to(weight.dtype)
            del every
            g_hidden[c] = g @ weight
            g_weight += g.t() @ hidden[c]
            del g
        return g_hidden, g_weight.to(weight.dtype), None, None


def chunks(tokens: int, vocabulary: int) -> list[slice]:
    """Slices of so many tokens that their fp32 logits take CHUNK_BYTES."""
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    return [slice(i, i + size) for i in range(0, tokens, size)]


def logits_fp32(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (c, D) @ weight (V, D).T, accumulated and returned in fp32 whatever the inputs are."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.t().float()


class LMHead(nn.Linear):
    """The language model's head. Its forward makes log-probs, so that FSDP has its weight whole just then."""

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return ChunkedLogProbs.apply(hidden, self.weight, targets, temperature)


class Policy(nn.Module):
    """A causal language model under Hugging Face's names: `model.*` and `lm_head.weight`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.model = AutoModel.from_config(config, attn_implementation="torz", dtype=torch.float32)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Make the head the embedding where the config says so; to be called again after parameters were replaced."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def hidden(self, tokens: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """Last hidden states (…, D) of tokens (…,)."""
        return self.model(input_ids=tokens, position_ids=positions, use_cache=False, **attention).last_hidden_state

    def forward(self, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (T,) fp32 of the pack's sampled tokens; 0 elsewhere. The head sees no other token."""
        at = pack.mask.nonzero()[:, 0]
        logp, entropy = self.lm_head(before(self.model, pack, at), pack.tokens[at], temperature)
        zero = logp.new_zeros(len(pack.tokens))
        return zero.index_put((at,), logp), zero.index_put((at,), entropy)


class Critic(nn.Module):
    """A value model: backbone and bias-free scalar head, under the names of Hugging Face's sequence classifiers."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.model = AutoModel.from_config(config, attn_implementation="torz", dtype=torch.float32)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def tie(self) -> None:
        """Nothing is tied."""

    def forward(self, pack: Pack) -> Tensor:
        """Values (T,) fp32 before each of the pack's sampled tokens; 0 elsewhere."""
        at = pack.mask.nonzero()[:, 0]
        value = self.score(before(self.model, pack, at))[:, 0].float()
        return value.new_zeros(len(pack.tokens)).index_put((at,), value)


def before(backbone: nn.Module, pack: Pack, at: Tensor) -> Tensor:
    """Last hidden states (n, D) before the pack's tokens at `at` (n,)."""
    everything = len(pack.computed) == len(pack.tokens)
    segments = Segments(pack.cu_seqlens, pack.longest, *(() if everything else (pack.computed, pack.source)))
    tokens, positions = (x[pack.computed][None] for x in (pack.tokens, pack.positions))
    hidden = backbone(input_ids=tokens, position_ids=positions, use_cache=False, segments=segments).last_hidden_state[0]
    return hidden.index_select(0, pack.source[at - 1])


def logprobs(policy: nn.Module, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
    """log p(tokens[t]) and entropy there, (T,) fp32 in nats; 0 where mask is false. See Pack for the alignment."""
    return policy(pack, temperature)


def values(critic: nn.Module, pack: Pack) -> Tensor:
    """V before token t, (T,) fp32; 0 where mask is false."""
    return critic(pack)


# --- loading


def load_config(path: str) -> PreTrainedConfig:
    """The folder's model config. Raises UserError for what isn't there or can't be trained here."""
    folder = Path(path)
    need(path != "" and folder.is_dir(), f"no model folder {path!r}", "--model with a Hugging Face folder that exists")
    need((folder / "config.json").is_file(), f"{path} has no config.json", "a Hugging Face model folder")
    need(any(folder.glob("*.safetensors")), f"{path} has no .safetensors files", "weights saved by save_pretrained")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    need(not experts, f"{path} is a mixture of experts ({config.model_type})", "a dense decoder")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or []) or (
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True))
    need(not sliding, f"{path} uses sliding-window attention ({config.model_type})", "a decoder with full attention")
    return config


def load_tokenizer(path: str) -> Any:
    """The folder's tokenizer. Raises UserError where it has none."""
    need(Path(path).is_dir(), f"no model folder {path!r}", "--model with a Hugging Face folder that exists")
    # Without its files transformers makes up a tokenizer from the model's config, silently.
    need(any(Path(path).glob("tokenizer*")), f"{path} has no tokenizer", "tokenizer.json and tokenizer_config.json there")
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def load_policy(path: str, device: torch.device | str = "cpu", place: Callable[[nn.Module], nn.Module] = lambda m: m,
                ) -> Policy:
    """The folder's causal language model, in fp32. `place` (dist.shard) is applied while the parameters are still on the
    meta device: then each rank allocates and reads only its own slices."""
    config = load_config(path)
    with torch.device("meta"):
        policy = Policy(config)
    return _fill(place(policy), path, device)


def load_critic(path: str, device: torch.device | str = "cpu", place: Callable[[nn.Module], nn.Module] = lambda m: m,
                seed: int = 0) -> Critic:
    """A critic whose backbone is the folder's and whose head is drawn from N(0, 1/(D+1)), unless the folder has one."""
    config = load_config(path)
    with torch.device("meta"):
        critic = Critic(config)
    critic = _fill(place(critic), path, device)
    if "score.weight" not in files_keys(path):
        head = torch.randn(critic.score.weight.shape, generator=torch.Generator().manual_seed(seed))
        fill(critic.score.weight, head * (config.hidden_size + 1) ** -0.5)
    return critic


@torch.no_grad()
def fill(param: Tensor, full: Tensor) -> None:
    """Copy a full tensor into a parameter that may be sharded."""
    if isinstance(param, DTensor):
        full = distribute_tensor(full.to(param.device, param.dtype), param.device_mesh, param.placements,
                                 src_data_rank=None)
    param.copy_(full)


def files_keys(path: str) -> set[str]:
    """Names of the tensors in the folder's safetensors files."""
    from safetensors import safe_open

    keys: set[str] = set()
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            keys |= set(f.keys())
    return keys


def files_weights(path: str, device: torch.device | str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of the folder's parameters, one at a time, for an engine that nothing is trained beside. Raises
    UserError as load_config does."""
    from safetensors import safe_open

    tied = load_config(path).tie_word_embeddings
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118  it is no dict
                if not (tied and name == "lm_head.weight"):
                    yield name, f.get_tensor(name).to(device, dtype)


def state_keys(model: nn.Module) -> dict[str, Tensor]:
    """The model's state dict without a head that is the embedding."""
    state = model.state_dict()
    if isinstance(model, Policy) and model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def _fill(model: nn.Module, path: str, device: torch.device | str) -> Any:
    model.to_empty(device=device)
    model.tie()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)  # to_empty left garbage in its buffers
    have = files_keys(path)
    state = {k: v for k, v in state_keys(model).items() if k in have or not k.startswith("score")}
    missing = sorted(set(state) - have)
    need(not missing, f"{path} lacks {len(missing)} tensors, {missing[0] if missing else ''} for one",
         f"weights of a {model.config.model_type} saved by save_pretrained")
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=not torch.distributed.is_initialized())
    return model.train()
