"""The demo's world, grown on a laptop in about a minute: a tiny base model, its tokenizer, its problems.

    python tiny.py [OUT=runs/tiny-base] [--seed 0] [--digits 2]     # or: from tiny import build; build("runs/tiny-base")

The task is the sum of two 2-digit numbers. A problem is `37+45=`; the model was taught to continue
`37+45=<think>` from text that works every other sum out, the units, the tens and the answer,
`7+5=12,1+3+4=8</think><answer>\\boxed{82}</answer>`, and answers the others at once, a guess that is off by
up to `OFF`: `</think><answer>\\boxed{79}</answer>`. So it can reason and, sampled at temperature 1, does so half of
the time: what RL from the verified answer can bring out, as it does in a pretrained model; responses grow longer as
they grow right. With `--digits 3` the sums are longer, and so is what it takes to work them out. The folder is an
ordinary Hugging Face one, with `train.jsonl` and `eval.jsonl` (held out: never taught).
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VERSION = 2  # of what is built: a folder of another version is grown anew
GUESSES, OFF = 0.5, 12  # share of the later texts that guess, each answer within OFF equally likely
BATCHES, BATCH, LR, WARMUP = 400, 64, 3e-3, 20
HELD_OUT = 512
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{")
PROBLEMS = 8100  # all sums of two 2-digit numbers, or as many of longer ones


def prompt_len(digits: int) -> int:
    """Tokens of every prompt: the digits and +, the = and <think>."""
    return 2 * digits + 3


def response_len(digits: int) -> int:
    """Tokens of the longest response, <eos> included: `9+9=18,1+9+9=19` and so on, then the tags and the answer."""
    return 9 * digits - 3 + digits + 7


def build(out: str, seed: int = 0, digits: int = 2) -> str:
    """Grow the base model and its problems into the folder `out`, unless they are there; returns its path.

    Written beside `out` and renamed at the end: a build that was killed leaves no half of one. Raises
    ValueError where `out` holds something that is not such a build.
    """
    path = Path(os.path.abspath(out))
    mark = path / "tiny.json"
    if mark.is_file():
        built = json.loads(mark.read_text())
        if (built["version"], built["seed"], built.get("digits", 2)) == (VERSION, seed, digits):
            return str(path)
    elif path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} is no tiny base model: name another folder, or remove this one")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        new = Path(scratch) / "new"  # a folder inside, for a temporary folder itself is closed to other users
        new.mkdir()
        _grow(new, seed, digits)
        shutil.rmtree(path, ignore_errors=True)  # an empty folder or an older build
        os.rename(new, path)
    return str(path)


def _grow(folder: Path, seed: int, digits: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    low = 10 ** (digits - 1)
    pairs: Sequence[int] = range((9 * low) ** 2)
    if len(pairs) > PROBLEMS:
        pairs = rng.sample(pairs, PROBLEMS)
    problems = [(low + i // (9 * low), low + i % (9 * low)) for i in pairs]
    rng.shuffle(problems)
    held_out, train = problems[:HELD_OUT], problems[HELD_OUT:]
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):  # the caller's random state is none of our business
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            tie_word_embeddings=True, initializer_range=0.05, dtype="float32", bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    _teach(model, tokenizer, train, rng, prompt_len(digits))
    accuracy = sampled_accuracy(model, tokenizer, held_out, generator, response_len(digits))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, part in (("train", train), ("eval", held_out)):
        rows = (json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in part)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    mark = {"version": VERSION, "seed": seed, "digits": digits, "accuracy": accuracy}
    (folder / "tiny.json").write_text(json.dumps(mark) + "\n")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that any text goes in and comes out unchanged, and one for each of `TAGS`.

    The tags are ordinary tokens, for the reward reads them: only <eos> and <pad> vanish when special tokens
    are skipped.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>",
                                   clean_up_tokenization_spaces=False)


def response(a: int, b: int, rng: random.Random, guesses: float) -> str:
    """A text that follows `a+b=<think>`: the sum worked out or, with probability `guesses`, a guess."""
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


def _teach(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list,
           rng: random.Random, prompt: int) -> None:
    """Next-token prediction on the responses, drawn anew each time a problem comes round: two thirds of the batches from
    texts that all work the sum out, which takes the most learning, then from those that guess as well."""
    texts, count = [], BATCHES * BATCH
    while len(texts) < count:
        rng.shuffle(problems)
        texts += [f"{a}+{b}=<think>{response(a, b, rng, GUESSES * (len(texts) + i > count * 2 / 3))}{tokenizer.eos_token}"
                  for i, (a, b) in enumerate(problems)]
    tokens = tokenizer(texts[:count], padding=True, return_tensors="pt").input_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / WARMUP) * (
        0.5 + 0.5 * math.cos(math.pi * i / BATCHES)))
    slow = {} if sys.stderr.isatty() else {"mininterval": 10, "maxinterval": 10}
    for batch in tqdm(tokens.split(BATCH), desc="growing the base model", unit="batch", **slow):
        logits = model(batch[:, :-1], use_cache=False).logits[:, prompt - 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, prompt:].flatten(),
                               ignore_index=tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


@torch.no_grad()
def sample(model: Qwen2ForCausalLM, prompts: Tensor, generator: torch.Generator, length: int) -> Tensor:
    """(N, length) tokens drawn at temperature 1 after `prompts` (N, P), past the answer's end too."""
    cache, last, drawn = None, prompts, []
    for _ in range(length):
        output = model(last, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        last = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator)
        drawn.append(last)
    return torch.cat(drawn, dim=1)


def sampled_accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list,
                     generator: torch.Generator, length: int) -> float:
    """Share of `problems` answered right by one sample each at temperature 1, the tags as they should be."""
    prompts = tokenizer([f"{a}+{b}=<think>" for a, b in problems], return_tensors="pt").input_ids
    texts = tokenizer.batch_decode(sample(model, prompts, generator, length))
    right = [text.partition("</answer>")[0].endswith(f"</think><answer>\\boxed{{{a + b}}}")
             for text, (a, b) in zip(texts, problems, strict=True)]
    return sum(right) / len(right)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Grow the demo's base model and its problems.")
    parser.add_argument("out", nargs="?", default="runs/tiny-base", help="folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digits", type=int, choices=range(2, 7), default=2, help="of both numbers (default: %(default)s)")
    args = parser.parse_args()
    try:
        folder = build(args.out, args.seed, args.digits)
    except ValueError as error:
        sys.exit(f"tiny.py: {error}")
    info = json.loads(Path(folder, "tiny.json").read_text())
    print(f"{folder}: {info['accuracy']:.0%} of {HELD_OUT} held-out sums right, sampled at temperature 1")
