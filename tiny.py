"""Builds the demo's base model in about half a minute on a laptop: a tiny model, its tokenizer, its problems.

    python tiny.py [OUT=runs/tiny-base] [--seed 0] [--digits 2] [--style orz]  # or: tiny.build("OUT")

It pretrains a 0.4M-parameter model that solves half of all two-digit sums. A problem is `37+45=`. Half of
the final training texts work the sum out, in units, tens and the answer:

    37+45=<think>7+5=12,1+3+4=8</think><answer>\\boxed{82}</answer>

The other half answer at once, with a guess that is off by at most `OFF`:

    37+45=<think></think><answer>\\boxed{79}</answer>

So the model can reason, and at temperature 1 it does so half of the time. RL from the verified answer raises
that share, as it does in a pretrained model, and responses grow longer. `--digits 3` makes longer sums, which
need longer responses. `--style open-r1` and `--style rlvr` make chat models that answer as models do which
Open-R1's and Tülu 3's recipes start from:

    <|system|> … <|user|> 37+45= <|assistant|> <think> 7+5=12,1+3+4=8 </think> <answer> 82 </answer>
    <|user|> 37+45= <|assistant|> 7+5=12,1+3+4=8 So the answer is 82.

`--style tool --digits 4` makes a model that guesses four sums of five and asks a calculator for the rest:

    3724+4581=<think><tool>3724+4581</tool><result>8305</result></think><answer>\\boxed{8305}</answer>

The output is an ordinary Hugging Face folder with `train.jsonl` and `heldout.jsonl` (held out: not in the
training texts).
"""

import itertools
import json
import math
import random
import tempfile
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from configs import OPEN_R1_SYSTEM, require, user_errors

VERSION = 3  # of the output: a folder of another version is built again
GUESSES, OFF = 0.5, 12  # share of guesses among the final texts; a guess is uniform within OFF of the answer
TOOL_GUESSES = 0.8  # the share with --style tool
BATCHES, BATCH, LR, WARMUP = 400, 64, 3e-3, 20
HELD_OUT = 512  # problems in heldout.jsonl
PROBLEMS = 8100  # problems in all: every sum of two 2-digit numbers, or a sample of the longer sums
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{")
TOOL_TAGS = ("<tool>", "</tool>", "<result>", "</result>")
CHAT_TAGS = ("<|system|>", "<|user|>", "<|assistant|>", OPEN_R1_SYSTEM)  # the system prompt is one token
CHAT_TEMPLATE = """{% for turn in messages %}<|{{ turn.role }}|>
{{ turn.content }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
Style = Literal["orz", "open-r1", "rlvr", "tool"]
# What comes before a problem and after it, and the response: a thought and an answer.
ORZ = "", "<think>", "{thought}</think><answer>\\boxed{{{answer}}}</answer>"
STYLES = {
    "orz": ORZ,
    "tool": ORZ,
    "open-r1": (f"<|system|>\n{OPEN_R1_SYSTEM}\n<|user|>\n", "\n<|assistant|>\n",
                "<think>\n{thought}\n</think>\n<answer>\n{answer}\n</answer>"),
    "rlvr": ("<|user|>\n", "\n<|assistant|>\n", "{thought} So the answer is {answer}."),
}


def build(out: str = "runs/tiny-base", /, seed: int = 0, digits: Literal[2, 3, 4, 5, 6] = 2,
          style: Style = "orz") -> str:
    """Build the demo's base model and its problems in a folder, unless it holds them; returns its path.

    The folder appears at the end, complete. Another build that is there is renamed. Raises UserError if the
    folder holds anything but such a build.

    Args:
        out: the folder
        seed: of the problems, the weights and the texts
        digits: of both numbers
        style: of prompts and responses
    """
    path = Path(out).absolute()
    file = path / "tiny.json"
    config = {"version": VERSION, "seed": seed, "digits": digits, "style": style}
    if file.is_file():
        if config.items() <= json.loads(file.read_text()).items():
            return str(path)
    elif path.exists():
        require(path.is_dir() and not any(path.iterdir()), f"{path} is not a tiny base model",
                "another folder, or remove this one")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        new = Path(scratch) / "new"  # other users can't read the temporary folder itself
        new.mkdir()
        _build(new, seed, digits, style)
        (new / "tiny.json").write_text(json.dumps(config) + "\n")
        if file.is_file():  # an older build; somebody may have added to it
            names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
            aside = path.rename(next(name for name in names if not name.exists()))
            print(f"{path} was another build; it is {aside} now")
        new.rename(path)  # also onto an empty folder
    return str(path)


def _build(folder, seed, digits, style):
    """Write model, tokenizer and problems to `folder`."""
    rng = random.Random(seed)
    low = 10 ** (digits - 1)
    numbers = 9 * low  # with so many digits: from `low` to 10 * low - 1
    pairs = range(numbers ** 2)
    if len(pairs) > PROBLEMS:
        pairs = rng.sample(pairs, PROBLEMS)
    problems = [(low + i // numbers, low + i % numbers) for i in pairs]
    rng.shuffle(problems)
    held_out, train = problems[:HELD_OUT], problems[HELD_OUT:]
    tags = TOOL_TAGS if style == "tool" else ()
    tokenizer = make_tokenizer(style in ("open-r1", "rlvr"), tags)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            tie_word_embeddings=True, initializer_range=0.05, dtype="float32", bos_token_id=None, **special))
    _pretrain(model, tokenizer, train, rng, style)
    tokenizer.backend_tokenizer.no_padding()  # _pretrain's padding must not be saved
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, part in ("train", train), ("heldout", held_out):
        dataset = {"dataset": "gsm8k"} if style == "rlvr" else {}
        rows = (json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)} | dataset) + "\n" for a, b in part)
        (folder / f"{name}.jsonl").write_text("".join(rows))


def make_tokenizer(chat: bool = False, tags: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, so that every text survives encoding, and one for each of `TAGS`
    and `tags`; with `chat`, also for CHAT_TAGS, and a chat template.

    The tags are ordinary tokens because the reward reads them: skipping special tokens when decoding removes
    only <eos> and <pad>.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tags = (*TAGS, *tags, *(CHAT_TAGS if chat else ()))
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>",
                                   clean_up_tokenization_spaces=False,
                                   **({"chat_template": CHAT_TEMPLATE} if chat else {}))


def _response(a, b, rng, guesses, style):
    """The response to `a+b=`: the sum worked out or, with probability `guesses`, a guess."""
    if rng.random() < guesses:
        thought, answer = "", max(0, a + b + rng.randint(-OFF, OFF))
    elif style == "tool":
        thought, answer = f"<tool>{a}+{b}</tool><result>{a + b}</result>", a + b
    else:
        columns, carry, answer = [], 0, a + b
        while a or b:
            total = carry + a % 10 + b % 10
            columns.append(f"{'1+' * carry}{a % 10}+{b % 10}={total}")
            a, b, carry = a // 10, b // 10, total // 10
        thought = ",".join(columns)
    return STYLES[style][2].format(thought=thought, answer=answer)


def _pretrain(model, tokenizer, problems, rng, style):
    """Train `model` to predict the responses' next tokens. All prompts have equally many tokens.

    In the first two thirds of the batches all texts work the sum out, since that takes longest to learn.
    Afterwards a share of the texts, GUESSES or TOOL_GUESSES, are guesses. A problem that is repeated gets a
    new response.
    """
    texts, count, (before, after, _) = [], BATCHES * BATCH, STYLES[style]
    guesses = TOOL_GUESSES if style == "tool" else GUESSES
    a, b = problems[0]
    prompt = len(tokenizer(f"{before}{a}+{b}={after}").input_ids)
    while len(texts) < count:
        rng.shuffle(problems)
        for i, (a, b) in enumerate(problems, len(texts)):
            text = _response(a, b, rng, guesses if i > count * 2 / 3 else 0.0, style)
            texts.append(f"{before}{a}+{b}={after}{text}{tokenizer.eos_token}")
    tokens = tokenizer(texts[:count], padding=True, return_tensors="pt").input_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for i, batch in enumerate(tqdm(tokens.split(BATCH), "pretraining the base model", mininterval=2)):
        cosine = 0.5 + 0.5 * math.cos(math.pi * i / BATCHES)
        optimizer.param_groups[0]["lr"] = LR * (min(1, (i + 1) / WARMUP) * cosine)
        logits = model(batch[:, :-1], use_cache=False).logits[:, prompt - 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, prompt:].flatten(),
                               ignore_index=tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


if __name__ == "__main__":
    import tyro

    with user_errors("tiny.py"):
        print(tyro.cli(build))
