"""Policy, critic and reference: Hugging Face decoders that run on packs.

A pack (data.Pack) is N segments end to end. A segment is one prompt with one response. If several segments
begin with the same tokens, these tokens are computed once.

Logits and log-probs are fp32: bf16 is too imprecise for a clipped ratio.

Letters in the shapes of tensors:

    N           segments of a pack
    T           tokens of a pack
    U           tokens of a pack that are computed
    V, D        sizes of the vocabulary and of the hidden states"""

import contextlib
import operator
import os
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import MODEL_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig

import dist
from configs import LLAMA_LIKE, from_hub, model_folder
from data import Pack
from dist import Device, Weights
from guard.files import read_json
from guard.messages import explained, require
from layers.attention import Segments, TakeRows, attention_forward, delta_net, fused_rule
from layers.head import LMHead
from layers.mlp import FrozenLinear, gated_mlp, rms_norm

# --- families

# The supported model types -> names of the settings that must be off, because vLLM ignores them. In families
# with "sliding_window", only vLLM uses that setting. The names "untied head" and "gates" are no settings:
# `check_settings` computes them. docs/models.md says why other model types are refused.
FAMILIES = {
    "qwen2": ["use_sliding_window"],
    "qwen3": ["use_sliding_window", "attention_bias"],
    "llama": ["sliding_window"],
    "mistral": [],
    "granite": ["sliding_window"],
    "olmo2": ["sliding_window"],
    "olmo3": [],
    "smollm3": [],
    "phi3": [],
    "gemma3_text": [],
    "glm": ["sliding_window"],
    "glm4": ["sliding_window"],
    "cohere": ["attention_bias", "untied head", "sliding_window"],
    "seed_oss": ["sliding_window"],
    "ernie4_5": ["use_bias", "sliding_window"],
    "exaone4": [],
    "qwen3_5": ["attention_bias", "gates"],
    "qwen3_5_text": ["attention_bias", "gates"],
}

# Settings that must be off, because this file does not implement them.
MUST_BE_OFF = [
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "quantization_config",
]
# The supported types of rotary embeddings. The frequencies of "dynamic" and "longrope" depend on the longest
# sequence of the batch, so log-probs would depend on the pack.
ROPES = {"default", "linear", "llama3", "yarn"}
LAYERS = {"full_attention", "sliding_attention"}  # the supported types of layers


def check_settings(config: PreTrainedConfig, path: str) -> None:
    """Raises UserError for a setting that the trainer or vLLM would compute wrong."""
    family = config.model_type
    settings = config.to_dict() | {"untied head": not config.tie_word_embeddings}
    # For Qwen3.5. transformers ignores attn_output_gate and output_gate_type, and the kernels know only silu.
    # None: the config lacks the setting.
    gates = [settings.get(name) for name in ("attn_output_gate", "output_gate_type", "hidden_act")]
    settings["gates"] = not set(gates) <= {None, True, "silu", "swish"}
    # transformers makes the family ministral of a mistral config with layer_types.
    must_be_off = MUST_BE_OFF + FAMILIES.get(family, ["layer_types"])
    wrong = [name for name in must_be_off if settings.get(name)]
    for rope in ropes(config):
        kind = rope.get("rope_type") or "default"  # a config without a type means the default
        if kind not in ROPES:
            wrong.append(kind)
    layers = set(settings.get("layer_types") or ()) - LAYERS
    if family == "qwen3_5_text":  # see `delta_net`
        layers -= {"linear_attention"}
    wrong += layers
    require(
        not wrong,
        f"{path} ({family}) has settings that the trainer or vLLM would compute wrong: "
        f"{', '.join(wrong)}",
        "a model without them (docs/models.md)",
    )


def ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Returns a list of dicts with the parameters of the rotary embeddings. The list has one dict for the
    whole model, or one for each type of layer."""
    # the parameters, or type of layer -> parameters
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [r for r in rope.values() if isinstance(r, dict)]
    return by_layer_type or [rope]


# --- models


@cache
def backbone_class(config_class: type) -> type:
    """Returns a subclass of transformers' backbone class (the model without a head) that keeps the original
    `__init__` and `__call__`. Must be called before vLLM starts, because vLLM replaces both methods in some
    backbone classes."""
    kind = MODEL_MAPPING[config_class]
    kept = {name: getattr(kind, name) for name in ("__init__", "__call__", "__module__")}
    return type(kind.__name__, (kind,), kept)


class PackModel(nn.Module):
    """A Hugging Face backbone that runs on packs. Subclasses add a head."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32  # dist.shard may choose another
        backbone = backbone_class(type(config))
        self.model = backbone._from_config(
            config,
            attn_implementation="torz",
            dtype=torch.float32,
        )
        # eval() turns off dropout. With dropout, the log-probs of two forward passes would differ.
        self.model.eval()
        for module in self.model.modules():
            name = type(module).__name__
            if name.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
                module.forward = partial(rms_norm, module)  # one kernel instead of six
            if hasattr(module, "down_proj"):  # an MLP
                module.forward = partial(gated_mlp, module)
            if hasattr(module, "A_log"):  # a Qwen3_5GatedDeltaNet
                module.forward = partial(delta_net, module)
            if config.model_type in LLAMA_LIKE and name.endswith("Attention"):
                module.forward = partial(attention_forward, module)

    @property
    def base(self) -> "PackModel":
        """The model that FSDP shards: this model. With --lora, a role is an Adapted, whose `base` is a
        PackModel."""
        return self

    def tie(self) -> None:
        """Make the weights of output layer and embedding the same tensor, if the config says so. Call this
        method again after parameters were replaced. Here and in Critic, this method does nothing."""

    def recompute(self, layers: int) -> None:
        """Make the first `layers` layers store only their input for the backward pass, which then runs the
        layer's forward pass again."""
        for layer in self.model.layers[:layers]:
            # FSDP's hooks run around `forward`. `checkpoint` wraps only `forward`, so that the recomputation
            # does not gather and free the weights once more.
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )

    def hidden(self, tokens: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """Returns the last hidden states (…, D) of tokens (…,) at positions (…,).

        attention: `segments` or `engine_cache` or both, for packed_attention"""
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            **attention,
        )
        return out.last_hidden_state

    def hidden_before(self, pack: Pack) -> Tensor:
        """Returns (n, D): for each index i in pack.loss_tokens (n,), the last layer's hidden state at the
        token before i. A head computes the log-prob of token i, or a value, from this hidden state."""
        dist.progress()
        segments = Segments(
            pack.cu_seqlens,
            pack.longest,
            pack.unique,
            pack.inverse,
        )
        tokens = pack.tokens[pack.unique]
        positions = pack.positions[pack.unique]
        hidden = self.hidden(tokens[None], positions[None], segments=segments)
        return TakeRows.apply(hidden[0], pack.inverse[pack.loss_tokens - 1])

    def allocate(self, device: Device) -> None:
        """Allocate memory for this model, which is on the meta device (without memory) until then. Compute
        its buffers in fp32. The caller must then fill the parameters.

        A buffer that transformers does not compute stays NaN, and makes the outputs NaN instead of wrong."""
        self.to_empty(device=device)
        self.tie()
        for p in self.parameters():
            p._is_hf_initialized = True  # _init_weights must not change it
        for module in self.model.modules():
            buffers = dict(module.named_buffers(recurse=False))
            for name, buffer in buffers.items():
                unset = torch.full_like(buffer, torch.nan, dtype=torch.float32)
                setattr(module, name, unset)
            if buffers:
                self.model._init_weights(module)  # computes the module's buffers


class Policy(PackModel):
    """A causal language model. Its parameters are `model.*` and `lm_head.weight`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.lm_head = LMHead(config)
        self.tie()

    def tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns two fp32 tensors (T,) in nats: each token's log-prob, and the entropy of the distribution
        that predicts the token. Both are 0 where pack.mask is false, because the head does not run there."""
        at = pack.loss_tokens  # indices where pack.mask is true
        hidden = self.hidden_before(pack)
        of_tokens = self.lm_head(hidden, pack.tokens[at], temperature)  # log-probs, entropies
        zero = hidden.new_zeros(len(pack.tokens), dtype=torch.float32)
        logp, entropy = [zero.index_put((at,), x) for x in of_tokens]
        return logp, entropy


class Critic(PackModel):
    """A value model. Its parameters are `model.*` and `score.weight`, a scalar head."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, pack: Pack) -> Tensor:
        return critic_values(self, self.score, pack)


def critic_values(model: PackModel, head: nn.Linear, pack: Pack) -> Tensor:
    """Returns fp32 (T,): the value of the text before each token; 0 where pack.mask is false. head: computes
    the value from a hidden state of `model`"""
    hidden = model.hidden_before(pack)
    # With --lora, the head is in fp32, and the hidden states may be in bf16.
    hidden = hidden.to(head.weight.dtype)
    value = head(hidden)[:, 0].float()
    zero = value.new_zeros(len(pack.tokens))
    return zero.index_put((pack.loss_tokens,), value)


# --- adapters (--lora)


def freeze(
    shard_fn: Callable,
    rank: int,
    alpha: float,
    dtype: torch.dtype,
    model: PackModel,
) -> PackModel:
    """Turns a model without memory into a frozen base for adapters, with weights in `dtype`. Returns
    shard_fn(model). Raises UserError if the rank is above the smaller side of a matrix.

    shard_fn: see `load_policy`. rank, alpha: of the adapters (--lora, --lora_alpha)

    After this, base(function, *args) returns function(*args), because the forward method is operator.call.
    FSDP gathers the base's weights only inside such a call, so each role passes its own forward function to
    the base (see Adapted)."""
    # linears: name such as "model/layers/0/mlp/up_proj" -> layer. Adapted uses them in an nn.ModuleDict,
    # which accepts no "." in a name. vars: so that nn.Module does not register the layers once more.
    vars(model).update(rank=rank, alpha=alpha, linears={})
    for name, module in model.named_modules():
        if name.startswith("model.layers.") and isinstance(module, nn.Linear):  # (out, in)
            most = min(module.weight.shape)
            require(
                rank <= most,
                f"--lora {rank} is above {most}, the smaller side of {name}",
                f"--lora {most} or less",
            )
            module.__class__ = FrozenLinear  # keeps the module, and so its place in the model
            module.scale = alpha / rank
            model.linears[name.replace(".", "/")] = module
    model.forward = operator.call
    return shard_fn(dist.cast(model.requires_grad_(False), dtype))


class Adapted(nn.Module):
    """The model of a role with --lora: adapters over a frozen base, which several roles may share.

    Its parameters are in fp32, and every rank holds all of them: A (rank, in) and B (out, rank) for every
    linear layer (out, in) of the decoder layers, and a critic's head. At the start, A is Kaiming-uniform, as
    in PEFT, and B is 0. The base is no submodule. Only the base is sharded.

    base: see `freeze`
    critic: whether the role is a critic. Its head begins with the weight of the base's head, if the base is a
        critic, or else at random, as in `load_critic`"""

    def __init__(self, base: PackModel, seed: int = 0, critic: bool = False) -> None:
        super().__init__()
        vars(self).update(base=base, config=base.config)  # vars: so that the base is no submodule
        random = torch.Generator().manual_seed(seed)
        self.adapters = nn.ModuleDict()
        for name, linear in base.linears.items():
            a = torch.empty(base.rank, linear.in_features)
            nn.init.kaiming_uniform_(a, 5**0.5, generator=random)  # a slope of √5, as nn.Linear has
            b = torch.zeros(linear.out_features, base.rank)
            self.adapters[name] = nn.ParameterList([a, b])
        self.score = None  # the critic's head
        if critic:
            width = base.config.hidden_size
            self.score = nn.Linear(width, 1, bias=False)
            head = self.score.weight
            nn.init.normal_(head, 0, 1 / (width + 1), generator=random)
            if hasattr(base, "score"):
                head.data.copy_(dist.whole(base.score.weight))

    def forward(self, pack: Pack, *temperature: float) -> Any:
        """Returns what Policy.forward or Critic.forward returns. A role puts its adapters into the base only
        here. They stay there, because recomputation in the backward pass needs them.

        temperature: one number for a policy; none for a critic"""
        adapters = dict(self.adapters.items())
        for name, linear in self.base.linears.items():
            vars(linear)["adapter"] = adapters.get(name)
        # base(function, *args) returns function(*args), see `freeze`.
        if self.score:
            return self.base(critic_values, self.base, self.score, pack)
        return self.base(Policy.forward, self.base, pack, *temperature)

    @torch.no_grad()
    def merge(self, weights: Weights) -> Weights:
        """Yields the role's weights (name, whole tensor): the base's, with W + scale B A in place of each W
        that has an adapter. This sum is computed in fp32, and rounded once.

        weights: the base's weights (name, whole tensor)"""
        for name, weight in weights:
            key = name.removesuffix(".weight").replace(".", "/")  # as `freeze` names its layers
            if key in self.adapters:
                a, b = self.adapters[key]
                merged = weight.float().addmm(b, a, alpha=self.base.linears[key].scale)
                weight = merged.to(weight.dtype)
            if name.startswith("model.") or not self.score:  # a critic has no LM head
                yield name, weight
        if self.score:
            yield "score.weight", self.score.weight


# --- loading


# The files to download. Subfolders and consolidated.* are left out, because they repeat the same weights.
MODEL_FILES = dict(
    allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
    ignore_patterns=["*/*", "consolidated*"],
)


def resolve(name: str) -> str:
    """Returns the path of a model's folder. `name`: a path, or a model of the Hugging Face Hub. The model is
    downloaded unless the Hub's local cache has all of its files.

    A collective: all ranks must call it. If the download fails, all ranks raise the same UserError."""
    hub = from_hub(name)  # may differ between machines, because it depends on their folders
    dist.together(lambda: hub and _download(name))
    return snapshot_download(name, local_files_only=True, **MODEL_FILES) if hub else name


def _download(name):
    """Downloads a model of the Hub into the local cache, unless the cache has all of its files."""
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank of each machine downloads
        return
    with contextlib.suppress(OSError):  # raised if the cache does not have the model
        # local_files_only: returns the folder in the cache, even if files are missing there
        if _is_whole(Path(snapshot_download(name, local_files_only=True, **MODEL_FILES))):
            return
    with explained(
        f"no folder {name}, and the model can't be downloaded from the Hub",
        f"hf download {name} --local-dir DIR where there is a network, then --model DIR",
    ):
        # If the cache has a folder and there is no network, returns the folder, which may lack files.
        snapshot_download(name, **MODEL_FILES)


def _is_whole(folder):
    """Returns whether a folder of the Hub's cache has all files of a model. After an interrupted download, or
    after AutoTokenizer.from_pretrained, it has only some."""
    index = read_json(folder / "model.safetensors.index.json", {"weight_map": dict})
    # weight_map: tensor -> its file. A model without an index has only one file of weights.
    weights = index.get("weight_map", {"": "model.safetensors"}).values()
    names = ["config.json", "tokenizer_config.json", *weights]
    return any(folder.glob("tokenizer.*")) and all((folder / name).is_file() for name in names)


def load_config(path: str) -> PreTrainedConfig:
    """Returns the config of the model in a folder. Raises UserError if the folder has no model, or a model
    that torz does not support."""
    folder = model_folder(path)
    require(
        (folder / "config.json").is_file(),
        f"{path} has no config.json",
        "a Hugging Face model folder",
    )
    require(
        bool(dist.weight_files(folder)),
        f"{path} has no .safetensors files",
        "weights saved by save_pretrained",
    )
    family = str(read_json(folder / "config.json").get("model_type", ""))
    require(
        family in FAMILIES,
        f"{path} has model_type {family!r}, which is not supported (docs/models.md)",
        f"one of {', '.join(FAMILIES)}",
    )
    with explained(
        f"{folder}/config.json can't be used", "the config.json that belongs to the weights"
    ):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    if family == "qwen3_5":
        config = text_config(config)
    check_settings(config, path)
    if config.model_type == "qwen3_5_text" and torch.cuda.is_available():
        fused_rule()  # only for its UserError
    return config


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of the language model in a Qwen3.5 model that also reads images."""
    text = config.get_text_config()
    for name in ("tie_word_embeddings", "quantization_config"):
        if hasattr(config, name):
            setattr(text, name, getattr(config, name))
    text.architectures = ["Qwen3_5ForCausalLM"]
    return text


def load_tokenizer(path: str) -> Any:
    """Returns the folder's tokenizer. Raises UserError if the folder has no usable tokenizer or no model, or
    a model that torz does not support."""
    # Without these files, AutoTokenizer would invent a tokenizer from the model's config.
    require(
        any(model_folder(path).glob("tokenizer*")),
        f"{path} has no tokenizer",
        "tokenizer.json and tokenizer_config.json there",
    )
    load_config(path)  # only for its UserError
    with explained(f"the tokenizer in {path} can't be read", "an intact copy of it"):
        # If the folder has tekken.json, the default is mistral_common's tokenizer (a package that comes with
        # vLLM), which has no chat template and can't be exported.
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, mistral_format=False)
    # Without tokenizer.json, AutoTokenizer may make a tokenizer that has no words and drops all text.
    require(
        "1+1" in tokenizer.decode(tokenizer("1+1").input_ids),
        f"the tokenizer in {path} can't encode 1+1",
        "its tokenizer.json or tokenizer.model there",
    )
    return tokenizer


def load_policy(
    path: str,
    device: Device = "cpu",
    shard_fn: Callable = lambda model: model,
) -> Policy:
    """Returns the causal language model of the folder `path` in fp32. Raises UserError if torz does not
    support the model, or if the files do not fit config.json.

    shard_fn: takes the model before memory is allocated, and returns it sharded, so that each rank reads
        only its own shards"""
    return _load(Policy, path, device, shard_fn)


def load_critic(
    path: str,
    device: Device = "cpu",
    shard_fn: Callable = lambda model: model,
    seed: int = 0,
) -> Critic:
    """Returns a critic with the folder's backbone. Raises UserError as `load_policy` does.

    If the folder has no critic head, the head's weights are random, drawn with `seed`: normal with standard
    deviation 1 / (D + 1), as in Open-Reasoner-Zero's code."""
    return _load(Critic, path, device, shard_fn, seed)


# Ends of the names of tensors that are ignored if the Policy or Critic has no such parameter.
NOT_OURS = ("lm_head.weight", "rotary_emb.inv_freq")
# Tensors of Qwen3.5 that are not loaded, by the starts of their names: the vision tower, and the heads that
# predict several tokens.
LEFT_OUT = ("model.visual.", "mtp.")


def names_in_files(names: Iterable[str], config: PreTrainedConfig) -> dict[str, str]:
    """Returns a dict: a tensor's name in the model -> its name in the files. Without Qwen3.5's tensors that
    LEFT_OUT names. names: of all tensors in the files"""
    found = {}
    for stored in names:
        if config.model_type != "qwen3_5_text":
            found[stored] = stored
        elif not stored.startswith(LEFT_OUT):
            name = stored.replace("model.language_model.", "model.")
            found[name] = stored
    return found


def left_out(path: str) -> str:
    """Returns a line that says which of the folder's weights are not loaded; "" if all are."""
    names = dist.tensors_in(path)
    count = len(names) - len(names_in_files(names, load_config(path)))
    parts = f"{count} tensors of {' and '.join(LEFT_OUT)}"
    return f"{path}: {parts} are left out, also in exports" if count else ""


def on_meta(kind: type, path: str) -> PackModel:
    """Returns a Policy or Critic without memory for its weights. Raises UserError if the tensors in the files
    differ from the model's in names or shapes. A critic's files may lack score.weight; a policy's files must
    not have it. Other extra tensors are ignored if their names end in a name of NOT_OURS, such as
    lm_head.weight. But if the config ties the output layer to the embedding and the files have both, they
    must be equal: transformers would keep two different tensors apart, and this model has only one."""
    config = load_config(path)
    with explained(
        f"{path}/config.json describes no model", "the config.json that belongs to the weights"
    ):
        with torch.device("meta"):
            model = kind(config)
    files = dist.tensors_in(path)  # name in the files -> DCP's metadata (dtype, shape)
    require(
        all(len(tensor.chunks) == 1 for tensor in files.values()),
        f"two .safetensors files in {path} have the same tensors",
        "a folder with the files of one model",
    )
    model.names = names_in_files(files, config)
    # name in the model -> shape: of the tensors in the files, and of the model's parameters
    theirs = {name: files[stored].size for name, stored in model.names.items()}
    # named_parameters() lists a tied weight once; state_dict() would list it twice.
    ours = {name: p.shape for name, p in model.named_parameters()}
    for name in ours.keys() ^ theirs.keys():
        if name == "score.weight" and kind is Critic:
            del ours[name]  # `_load` draws a random head
        elif name.endswith(NOT_OURS):
            theirs.pop(name, None)
    wrong = sorted(f"{name} {list(shape)}" for name, shape in ours.items() ^ theirs.items())
    require(
        not wrong,
        f"config.json and weights of {path} differ in {', '.join(wrong[:2])}",
        "a folder that save_pretrained has written, and a critic only as --critic_model",
    )
    tied = "lm_head.weight", "model.embed_tokens.weight"
    if kind is Policy and config.tie_word_embeddings and tied[0] in model.names:
        stored = [model.names[name] for name in tied]
        pair = {name: torch.empty(files[name].size) for name in stored}
        dist.load_files(pair, path)
        require(
            torch.equal(*pair.values()),
            f"{path} has an output layer that differs from the embedding, "
            "and config.json ties them",
            '"tie_word_embeddings": false in config.json',
        )
    return model


def _load(kind, path, device, shard_fn, seed=0):
    """Returns a Policy or Critic with the folder's weights. If the folder has no critic head, the head is
    random (see `load_critic`). Raises UserError as `on_meta` does."""
    model = shard_fn(on_meta(kind, path))
    model.allocate(device)
    state = dict(model.named_parameters())
    if kind is Critic and "score.weight" not in model.names:
        head = state.pop("score.weight")  # no file has it
        random = torch.Generator().manual_seed(seed)
        drawn = torch.randn(head.shape, generator=random)
        drawn /= model.config.hidden_size + 1
        part = dist.local(head.detach())  # this rank's shard: the head's only row, or no row
        part.copy_(drawn[: len(part)])
    in_files = {model.names[name]: p for name, p in state.items()}  # name in the files -> parameter
    dist.load_files(in_files, path)
    dist.together(check_finite, model.named_parameters(), path)
    return model


def check_finite(weights: Weights, path: str) -> None:
    """Raises UserError if this rank's shard of a weight has NaN or infinity."""
    for name, weight in weights:
        total = dist.local(weight).sum(dtype=torch.float32)
        require(bool(total.isfinite()), f"{path} has NaN or infinity in {name}", "intact weights")


def files_weights(
    path: str,
    device: Device,
    dtype: torch.dtype,
) -> Weights:
    """Yields (name, whole tensor) for each parameter in the folder's files, for Engine.awake. Raises
    UserError as `on_meta` does."""
    model = on_meta(Policy, path)
    # name in the files -> name in the model
    name_of = {model.names[name]: name for name, _ in model.named_parameters()}
    for file in dist.weight_files(path):
        with safe_open(file, "pt") as f:
            for stored in sorted(name_of.keys() & f.keys()):
                name = name_of[stored]
                tensor = f.get_tensor(stored)
                check_finite([(name, tensor)], path)
                yield name, tensor.to(device, dist.pushed_dtype(name, dtype))
