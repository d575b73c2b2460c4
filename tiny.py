"""Builds the demo's base model in about half a minute on a laptop: a tiny model, its tokenizer, its problems.

    python tiny.py [OUT=runs/tiny-base] [--seed 0] [--digits 2]  # or: from tiny import build; build("OUT")

It pretrains a 0.4M-parameter model that solves half of all two-digit sums. A problem is `37+45=`. Half of
the final training texts work the sum out, in units, tens and the answer:

    37+45=<think>7+5=12,1+3+4=8</think><answer>\\boxed{82}</answer>

The other half answer at once, with a guess that is off by at most `OFF`:

    37+45=<think></think><answer>\\boxed{79}</answer>

So the model can reason, and at temperature 1 it does so half of the time. RL from the verified answer raises
that share, as it does in a pretrained model, and responses grow longer. `--digits 3` makes longer sums, which
need longer responses. The output is an ordinary Hugging Face folder with `train.jsonl` and `eval.jsonl` (held
out: not in the training texts).
"""

import json
import math
import random
import shutil
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

from configs import require, user_errors

VERSION = 2  # of the output: a folder of another version is built again
GUESSES, OFF = 0.5, 12  # share of guesses among the final texts; a guess is uniform within OFF of the answer
BATCHES, BATCH, LR, WARMUP = 400, 64, 3e-3, 20
HELD_OUT = 512  # problems in eval.jsonl
PROBLEMS = 8100  # problems in all: every sum of two 2-digit numbers, or a sample of the longer sums
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{")


def prompt_len(digits: int) -> int:
    """Tokens of every prompt: the digits, `+`, `=` and <think>."""
    return 2 * digits + 3


def build(out: str = "runs/tiny-base", /, seed: int = 0, digits: Literal[2, 3, 4, 5, 6] = 2) -> str:
    """Build the demo's base model and its problems in a folder, unless it holds them; returns its path.

    The folder appears at the end, complete. Raises UserError if it holds anything but such a build.

    Args:
        out: the folder
        seed: of the problems, the weights and the texts
        digits: of both numbers
    """
    path = Path(out).absolute()
    file, config = path / "tiny.json", {"version": VERSION, "seed": seed, "digits": digits}
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
        _build(new, seed, digits)
        (new / "tiny.json").write_text(json.dumps(config) + "\n")
        shutil.rmtree(path, ignore_errors=True)  # an empty folder or an older build
        new.rename(path)
    return str(path)


def _build(folder, seed, digits):
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
    tokenizer = make_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            tie_word_embeddings=True, initializer_range=0.05, dtype="float32", bos_token_id=None, **special))
    _pretrain(model, tokenizer, train, rng, prompt_len(digits))
    tokenizer.backend_tokenizer.no_padding()  # _pretrain's padding must not be saved
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, part in ("train", train), ("eval", held_out):
        rows = (json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in part)
        (folder / f"{name}.jsonl").write_text("".join(rows))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, so that every text survives encoding, and one for each of `TAGS`.

    The tags are ordinary tokens because the reward reads them: skipping special tokens when decoding removes
    only <eos> and <pad>.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>",
                                   clean_up_tokenization_spaces=False)


def _response(a, b, rng, guesses):
    """Text after `a+b=<think>`: the sum worked out or, with probability `guesses`, a guess."""
    if rng.random() < guesses:
        thought, answer = "", max(0, a + b + rng.randint(-OFF, OFF))
    else:
        columns, carry, answer = [], 0, a + b
        while a or b:
            total = carry + a % 10 + b % 10
            columns.append(f"{'1+' * carry}{a % 10}+{b % 10}={total}")
            a, b, carry = a // 10, b // 10, total // 10
        thought = ",".join(columns)
    return f"{thought}</think><answer>\\boxed{{{answer}}}</answer>"


def _pretrain(model, tokenizer, problems, rng, prompt):
    """Train `model` to predict the responses' next tokens. Every prompt has `prompt` tokens.

    In the first two thirds of the batches all texts work the sum out, since that takes longest to learn.
    Afterwards a share GUESSES of the texts are guesses. A problem that is repeated gets a new response.
    """
    texts, count = [], BATCHES * BATCH
    while len(texts) < count:
        rng.shuffle(problems)
        for i, (a, b) in enumerate(problems, len(texts)):
            text = _response(a, b, rng, GUESSES if i > count * 2 / 3 else 0.0)
            texts.append(f"{a}+{b}=<think>{text}{tokenizer.eos_token}")
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
