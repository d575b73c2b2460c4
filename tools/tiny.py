"""Makes the demo's base model, tokenizer and problems. Takes half a minute on a laptop.

    python -m tools.tiny OUT --seed 0    # writes the folder OUT; in Python: tools.tiny.build("OUT", seed=0)

Both arguments may be left out: OUT is then runs/tiny-base-0, and the seed is 0.

The model has 0.4M parameters and solves half of all two-digit sums. Its pretraining texts add the units
first, then the tens:

    37+45=<think>7+5=12,1+3+4=8</think><answer>\\boxed{82}</answer>

But in the last third of the texts, half of the responses guess:

    37+45=<think></think><answer>\\boxed{79}</answer>

So the model can reason, but reasons in only half of its responses. RL teaches the model to reason more often.

The output is a Hugging Face model folder with `train.jsonl` and `heldout.jsonl`. The held-out problems are
not in the pretraining texts.
"""

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from configs import run_command
from guard.files import read_json, write_jsonl
from guard.messages import explained, require

VERSION = 3  # raise this number when a change of this file changes the model
GUESSES = 0.5  # fraction of guesses in the last third of the texts
OFF = 12  # largest error of a guess
BATCHES = 400  # number of updates
BATCH = 64  # texts per update
LR = 3e-3  # peak learning rate
WARMUP = 20  # number of updates until the peak
HELD_OUT = 512  # number of problems in heldout.jsonl
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{")


def make_tokenizer(tags: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each byte, for each of TAGS and for each of `tags`. The tags are
    not special tokens, because decoding with skip_special_tokens=True must keep them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    added = [AddedToken(tag, normalized=False) for tag in TAGS + tags]
    backend.add_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


# --- the task


class Task(NamedTuple):
    """A kind of problem, as functions that make problems and pretraining texts."""

    name: str
    problems: Callable[[random.Random], list]  # returns all problems, in random order
    # (problem, rng, whether the text is in the last third of the texts) -> (prompt, response)
    text: Callable
    row: Callable[..., dict]  # problem -> its row in the data files
    tokenizer: Callable[[], PreTrainedTokenizerFast] = make_tokenizer


def add(a: int, b: int, said: Callable[[int], int] = int) -> str:
    """Returns the addition of a and b by columns as a text: `7+5=12,1+3+4=8` for 37 + 45.

    said: total of a column -> the number to write for it (bench/tasks.py writes wrong numbers on purpose)"""
    columns = []  # texts such as 7+5=12, the units first
    carry = []  # [1] if the last column's total was 10 or more
    while a or b:
        terms = [*carry, a % 10, b % 10]
        total = sum(terms)
        column = "+".join(map(str, terms))
        columns.append(f"{column}={said(total)}")
        carry = [1] if total >= 10 else []
        a //= 10
        b //= 10
    return ",".join(columns)


def guess(answer: int, rng: random.Random) -> int:
    """Returns a random number of at least 0 that differs from the answer by at most OFF. It may be right."""
    return max(0, answer + rng.randint(-OFF, OFF))


def all_pairs(rng: random.Random) -> list[tuple[int, int]]:
    """Returns all pairs of two-digit numbers in random order."""
    numbers = range(10, 100)
    pairs = list(itertools.product(numbers, repeat=2))
    rng.shuffle(pairs)
    return pairs


def sum_text(pair: tuple[int, int], rng: random.Random, final: bool) -> tuple[str, str]:
    """Returns the prompt and the response of a pretraining text. final: whether the text is in the last third
    of the texts, where a share GUESSES of the responses guess"""
    a, b = pair
    guesses = rng.random() < GUESSES and final
    thought = "" if guesses else add(a, b)
    answer = guess(a + b, rng) if guesses else a + b
    return f"{a}+{b}=<think>", f"{thought}</think><answer>\\boxed{{{answer}}}</answer>"


def sum_row(pair: tuple[int, int]) -> dict[str, str]:
    """Returns the row of a problem in the data files."""
    a, b = pair
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


SUMS = Task("sums", all_pairs, sum_text, sum_row)


# --- the base model


def build(out: str = "runs/tiny-base-0", /, seed: int = 0) -> str:
    """Build the demo's base model and problems in a folder, unless they are there. Returns the absolute path.

    Args:
        out: the folder to write
        seed: seed for the order of the problems, the initial weights and the pretraining texts
    """
    needed = "a folder that no other process makes, with space and permission"
    with explained(f"can't write to {out}", needed, (OSError, SafetensorError)):
        return build_task(SUMS, out, seed)


def build_task(task: Task, out: str, seed: int = 0) -> str:
    """Build the base model and the problems of `task` in the folder `out`, unless they are there. Returns the
    absolute path. Raises UserError if `out` exists with other content, such as another seed or VERSION."""
    path = Path(out).absolute()
    recipe = {"version": VERSION, "seed": seed, "task": task.name}
    if recipe.items() <= read_json(path / "tiny.json").items():  # the folder has this model already
        return str(path)
    require(
        not path.exists(),
        f"{path} is not the base model of {task.name!r}, seed {seed}",
        "another folder",
    )
    # Renamed to `path` at the end. An interrupted build may have left this folder.
    new = Path(f"{path}.new")
    new.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    tokenizer = task.tokenizer()
    problems = task.problems(rng)
    parts = {"train": problems[HELD_OUT:], "heldout": problems[:HELD_OUT]}
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        dtype="float32",
        bos_token_id=None,
        **special,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    pretrain(model, tokenizer, parts["train"], rng, task)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)
    for name, part in parts.items():
        write_jsonl(new / f"{name}.jsonl", map(task.row, part))
    (new / "tiny.json").write_text(json.dumps(recipe) + "\n")
    new.rename(path)
    return str(path)


def pretrain(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list,
    rng: random.Random,
    task: Task,
) -> None:
    """Train `model` to predict the tokens of the responses. All prompts must have the same number of tokens.
    Reasoning takes longer to learn than guessing, so only the last third of the texts has guessed answers."""
    count = BATCHES * BATCH  # number of texts
    texts = []
    while len(texts) < count:
        rng.shuffle(problems)
        for problem in problems:
            final = len(texts) > count * 2 / 3
            prompt, response = task.text(problem, rng, final)
            texts.append(prompt + response + tokenizer.eos_token)
    prompt_len = len(tokenizer(prompt).input_ids)  # of the last prompt, but all are equally long
    # (count, tokens of the longest text)
    tokens = tokenizer(texts[:count], padding=True, return_tensors="pt").input_ids
    tokenizer.backend_tokenizer.no_padding()  # otherwise save_pretrained would save the padding as a setting
    pad = tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LR,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        fused=True,
    )
    batches = tqdm(tokens.split(BATCH), "pretraining the base model", mininterval=2)
    for i, batch in enumerate(batches):
        warmup = min(1, (i + 1) / WARMUP)
        cosine = 0.5 + 0.5 * math.cos(math.pi * i / BATCHES)
        optimizer.param_groups[0]["lr"] = LR * (warmup * cosine)
        longest = (batch != pad).sum(1).max()  # tokens of the longest text in this batch
        batch = batch[:, :longest]
        logits = model(batch[:, :-1], use_cache=False).logits
        # The logits at a position predict the token at the next position.
        logits = logits[:, prompt_len - 1 :]
        targets = batch[:, prompt_len:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=pad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    print(run_command(build, "python -m tools.tiny"))
