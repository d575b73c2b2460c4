"""Builds the demo's base model in about half a minute on a laptop: a tiny model, its tokenizer, its problems.

    python -m tools.tiny [OUT=runs/tiny-base] [--seed 0] [--digits 2] [--style orz]  # or: tiny.build("OUT")

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

`--task` makes harder problems: many numbers added (`chain`), digits multiplied (`product`), a number reached
from four others (`countdown`), and sums among words without use (`think`). Many of the final texts guess, and
the others have a wrong number in a share of their steps, so few are solved. Countdown's reward comes with the
data: `--reward OUT/countdown.py:reaches`.

The output is an ordinary Hugging Face folder with `train.jsonl` and `heldout.jsonl` (held out: not in the
training texts).
"""

import inspect
import itertools
import json
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

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
IDLE = ("hmm,", "wait,", "so,", "well,", "however,", "recheck,")  # words that do no work, in `think`
Style = Literal["orz", "open-r1", "rlvr", "tool"]
TaskName = Literal["sums", "chain", "product", "countdown", "think"]
# What comes before a problem and after it, and the response: a thought and an answer.
ORZ = "", "<think>", "{thought}</think><answer>\\boxed{{{answer}}}</answer>"
STYLES = {
    "orz": ORZ,
    "tool": ORZ,
    "open-r1": (f"<|system|>\n{OPEN_R1_SYSTEM}\n<|user|>\n", "\n<|assistant|>\n",
                "<think>\n{thought}\n</think>\n<answer>\n{answer}\n</answer>"),
    "rlvr": ("<|user|>\n", "\n<|assistant|>\n", "{thought} So the answer is {answer}."),
}


# --- tasks: the numbers of a problem, and what a response writes


def said(x, rng, slip) -> int:
    """The number that a text says for x: with probability `slip` a wrong one near it."""
    return abs(x + rng.choice((-10, -2, -1, 1, 2, 10))) if slip and rng.random() < slip else x


def guess(answer, rng) -> int:
    """A number within OFF of the answer."""
    return max(0, answer + rng.randint(-OFF, OFF))


def sums(numbers, rng, slip):
    """Two numbers, added by columns: `37+45=`, `7+5=12,1+3+4=8`, `82`."""
    (a, b), columns, carry = numbers, [], 0
    problem, answer = f"{a}+{b}=", a + b
    while a or b:
        total = carry + a % 10 + b % 10
        columns.append(f"{'1+' * carry}{a % 10}+{b % 10}={said(total, rng, slip)}")
        a, b, carry = a // 10, b // 10, total // 10
    return problem, ",".join(columns), str(answer)


def chain(numbers, rng, slip):
    """Many numbers, added one after the other: `7+5+8=`, `7+5=12+8=20`, `20`."""
    total, thought = numbers[0], str(numbers[0])
    for n in numbers[1:]:
        total = said(total + n, rng, slip)
        thought += f"+{n}={total}"
    return "+".join(map(str, numbers)) + "=", thought, str(total)


def product(numbers, rng, slip):
    """Two numbers, multiplied by columns: `37*45=`, `7*5=35,7*4=28,3*5=15,28+15=43+3=46,…`, `1665`."""
    (a, b), (c, d) = (divmod(n, 10) for n in numbers)
    units, left, right, top = (said(x * y, rng, slip) for x, y in ((b, d), (b, c), (a, d), (a, c)))
    both = said(left + right, rng, slip)
    tens = said(both + units // 10, rng, slip)
    hundreds = said(top + tens // 10, rng, slip)
    thought = (f"{b}*{d}={units},{b}*{c}={left},{a}*{d}={right},{left}+{right}={both}+{units // 10}={tens},"
               f"{a}*{c}={top}+{tens // 10}={hundreds}")
    return "{}*{}=".format(*numbers), thought, str(100 * hundreds + 10 * (tens % 10) + units % 10)


def think(numbers, rng, slip):
    """A sum after words that do no work. With `slip` also such words instead of it, or again and again."""
    problem, work, answer = sums(numbers, rng, slip)
    kind, idle = rng.random(), "".join(rng.choice(IDLE) for _ in range(rng.randint(0, 6)))
    if slip and kind < 0.7:
        return problem, idle if kind < 0.55 else rng.choice(IDLE) * 12, str(guess(int(answer), rng))
    if work != sums(numbers, rng, 0)[1]:  # the answer has the slip in it
        answer = str(guess(int(answer), rng))
    return problem, f"{work},recheck,{work}" if slip and kind < 0.85 else idle + work, answer


def countdown(numbers, rng, slip):
    """A number from four others: `8,3,4,2>22=`, tries, and `((8-3)*4)+2`. numbers: a solution's four numbers
    and three signs, from left to right. With `slip` other tries come first; the last may be the answer."""
    tries = []
    while slip and len(tries) < 3 and rng.random() < 0.6:
        tries.append(draw_countdown(rng, numbers[:4]))
    if not tries or rng.random() > slip:
        tries.append(numbers)
    a, b, c, d, first, second, third = tries[-1]
    problem = ",".join(map(str, numbers[:4])) + f">{worked(numbers)[1]}="
    return problem, ";".join(worked(t)[0] for t in tries), f"(({a}{first}{b}){second}{c}){third}{d}"


def worked(numbers) -> tuple[str, int | None]:
    """`8-3=5*4=20+2=22` and its result; None where one is no whole number from 0 to 99."""
    x, text = numbers[0], str(numbers[0])
    for n, sign in zip(numbers[1:4], numbers[4:], strict=True):
        exact = sign != "/" or x % n == 0
        x = {"+": x + n, "-": x - n, "*": x * n, "/": x // n}[sign]
        if not exact or not 0 <= x < 100:
            return text, None
        text += f"{sign}{n}={x}"
    return text, x


def draw_countdown(rng, four=()) -> tuple:
    """Four numbers and three signs with a result; `four`: which numbers."""
    while True:
        chosen = four or [rng.randint(1, 9) for _ in range(4)]
        numbers = (*chosen, *(rng.choice("+-*/") for _ in range(3)))
        result = worked(numbers)[1]
        if result is not None and (four or result >= 10):  # all targets have two digits
            return numbers


def reaches(response: str, answer: str, kind: str) -> float:
    """1.0 if the last box of `response` reaches the same number as `answer`, with the same four numbers."""
    import re
    from fractions import Fraction

    def read(text):
        """The digits, sorted, and what they reach from left to right; None for another form."""
        if not re.fullmatch(r"\(\(\d[-+*/]\d\)[-+*/]\d\)[-+*/]\d", text, re.ASCII):
            return None
        digits, signs = re.findall(r"\d", text), re.findall(r"[-+*/]", text)
        x = Fraction(digits[0])
        for sign, n in zip(signs, map(int, digits[1:]), strict=True):  # no problem has the digit 0
            x = {"+": x + n, "-": x - n, "*": x * n, "/": x / (n or 1)}[sign]
        return sorted(digits), x

    boxes = re.findall(r"<answer>\\boxed{([^{}]*)}</answer>", response)
    return float(bool(boxes) and read(boxes[-1]) == read(answer))


class Task(NamedTuple):
    """A kind of problems. The first pretraining texts have no guesses and no slips."""

    work: Callable  # (numbers, rng, slip) -> problem, thought, answer
    draw: Callable | None = None  # rng -> numbers; None: two numbers
    slip: float = 0.0  # probability of a wrong number in a step
    guesses: float | None = None  # share of texts that answer at once; None: GUESSES


TASKS = {
    "sums": Task(sums),
    "chain": Task(chain, lambda rng: tuple(rng.randint(1, 9) for _ in range(6)), slip=0.4),
    "product": Task(product, slip=0.15),
    "countdown": Task(countdown, draw_countdown, slip=0.6, guesses=0.0),
    "think": Task(think, slip=0.35, guesses=0.4),
}


# --- the base model


def build(out: str = "runs/tiny-base", /, seed: int = 0, digits: Literal[2, 3, 4, 5, 6] = 2,
          style: Style = "orz", task: TaskName = "sums") -> str:
    """Build the demo's base model and its problems in a folder, unless it holds them; returns its path.

    The folder appears at the end, complete. Another build that is there is renamed. Raises UserError if the
    folder holds anything but such a build.

    Args:
        out: the folder
        seed: of the problems, the weights and the texts
        digits: of both numbers
        style: of prompts and responses
        task: kind of problems
    """
    require(task == "sums" or (style, digits) == ("orz", 2), f"--task {task} with --digits {digits} and "
            f"--style {style}", "--task sums, or neither --digits nor --style")
    path = Path(out).absolute()
    file = path / "tiny.json"
    config = {"version": VERSION, "seed": seed, "digits": digits, "style": style, "task": task}
    if file.is_file():
        if config.items() <= ({"task": "sums"} | json.loads(file.read_text())).items():
            return str(path)
    elif path.exists():
        require(path.is_dir() and not any(path.iterdir()), f"{path} is not a tiny base model",
                "another folder, or remove this one")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        new = Path(scratch) / "new"  # other users can't read the temporary folder itself
        new.mkdir()
        _build(new, seed, digits, style, task)
        (new / "tiny.json").write_text(json.dumps(config) + "\n")
        if file.is_file():  # an older build; somebody may have added to it
            names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
            aside = path.rename(next(name for name in names if not name.exists()))
            print(f"{path} was another build; it is {aside} now")
        new.rename(path)  # also onto an empty folder
    return str(path)


def _build(folder, seed, digits, style, task):
    """Write model, tokenizer and problems to `folder`."""
    rng = random.Random(seed)
    problems = _problems(rng, digits, task)
    held_out, train = problems[:HELD_OUT], problems[HELD_OUT:]
    tokenizer = make_tokenizer(style in ("open-r1", "rlvr"), TOOL_TAGS if style == "tool" else ())
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            tie_word_embeddings=True, initializer_range=0.05, dtype="float32", bos_token_id=None, **special))
    _pretrain(model, tokenizer, train, rng, style, task)
    tokenizer.backend_tokenizer.no_padding()  # _pretrain's padding must not be saved
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    dataset = {"dataset": "gsm8k"} if style == "rlvr" else {}
    for name, part in ("train", train), ("heldout", held_out):
        texts = (TASKS[task].work(numbers, rng, 0) for numbers in part)
        rows = (json.dumps({"prompt": text, "answer": answer} | dataset) + "\n" for text, _, answer in texts)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    if task == "countdown":
        (folder / "countdown.py").write_text(inspect.getsource(reaches))


def _problems(rng, digits, task):
    """The numbers of the problems, in random order; all problems differ."""
    if TASKS[task].draw:
        drawn = {}
        while len(drawn) < PROBLEMS:
            problem = TASKS[task].draw(rng)
            drawn[TASKS[task].work(problem, rng, 0)[0]] = problem
        return list(drawn.values())
    low = 10 ** (digits - 1)
    numbers = 9 * low  # with so many digits: from `low` to 10 * low - 1
    pairs = range(numbers ** 2)
    if len(pairs) > PROBLEMS:
        pairs = rng.sample(pairs, PROBLEMS)
    problems = [(low + i // numbers, low + i % numbers) for i in pairs]
    rng.shuffle(problems)
    return problems


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


def _response(numbers, rng, slip, guesses, style, task):
    """The response to a problem: it is worked out or, with probability `guesses`, guessed."""
    if rng.random() < guesses:
        thought, answer = "", guess(int(TASKS[task].work(numbers, rng, 0)[2]), rng)
    elif style == "tool":
        a, b = numbers
        thought, answer = f"<tool>{a}+{b}</tool><result>{a + b}</result>", a + b
    else:
        _, thought, answer = TASKS[task].work(numbers, rng, slip)
    return STYLES[style][2].format(thought=thought, answer=answer)


def _pretrain(model, tokenizer, problems, rng, style, task="sums"):
    """Train `model` to predict the responses' next tokens. All prompts have equally many tokens.

    In the first two thirds of the batches all texts work the problem out, since that takes longest to learn.
    Afterwards a share of the texts, TOOL_GUESSES or the task's, are guesses, and the others may slip. A
    problem that is repeated gets a new response.
    """
    work, _, slip, guesses = TASKS[task]
    texts, count, (before, after, _) = [], BATCHES * BATCH, STYLES[style]
    guesses = TOOL_GUESSES if style == "tool" else GUESSES if guesses is None else guesses
    prompt = len(tokenizer(f"{before}{work(problems[0], rng, 0)[0]}{after}").input_ids)
    while len(texts) < count:
        rng.shuffle(problems)
        for i, numbers in enumerate(problems, len(texts)):
            final = i > count * 2 / 3
            text = _response(numbers, rng, slip * final, guesses * final, style, task)
            texts.append(f"{before}{work(numbers, rng, 0)[0]}{after}{text}{tokenizer.eos_token}")
    tokens = tokenizer(texts[:count], padding=True, return_tensors="pt").input_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for i, batch in enumerate(tqdm(tokens.split(BATCH), "pretraining the base model", mininterval=2)):
        cosine = 0.5 + 0.5 * math.cos(math.pi * i / BATCHES)
        optimizer.param_groups[0]["lr"] = LR * (min(1, (i + 1) / WARMUP) * cosine)
        batch = batch[:, :(batch != tokenizer.pad_token_id).sum(1).max()]
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

    with user_errors("tools.tiny"):
        print(tyro.cli(build))
