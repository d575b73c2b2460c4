"""Pretrains tiny base models for other tasks than the demo's sums, and for chat formats.

    python -m bench.tasks OUT --task chain [--seed 0]  # or: tasks.build("OUT", "chain")

| task | problem | response |
|---|---|---|
| `chain` | `7+5+8=` | `7+5=12+8=20`, then the answer |
| `product` | `37*45=` | `7*5=35,7*4=28,…`, then the answer |
| `countdown` | `8,3,4,2>22=` | `8-3=5*4=20+2=22`, then `((8-3)*4)+2`; reward: bench/countdown.py |
| `think` | `37+45=` | idle words such as `hmm,`, then a sum as in the demo |
| `sums-3` | `137+245=` | a sum as in the demo, of three-digit numbers |
| `tool` | `3724+4581=` | `<tool>3724+4581</tool><result>8305</result>`, then the answer |
| `guess` | `game 1234:` | `<tool>54</tool><result>higher</result><tool>81</tool>…` |
| `open-r1`, `rlvr` | `37+45=` | sums in the chat formats of Open-R1 and of Tülu 3 |

The last third of the pretraining texts has errors and guesses, so that the base model solves few problems."""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable

from configs import OPEN_R1_SYSTEM
from guard.messages import user_errors
from tools import tiny
from tools.tiny import GUESSES, Task, add, guess, make_tokenizer

PROBLEMS = 8100  # problems of a task, including the held-out ones
TOOL_TAGS = ("<tool>", "</tool>", "<result>", "</result>")
CHAT_TAGS = ("<|system|>", "<|user|>", "<|assistant|>", OPEN_R1_SYSTEM)  # the system prompt is a single token
CHAT_TEMPLATE = """{% for turn in messages %}<|{{ turn.role }}|>
{{ turn.content }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
IDLE = ("hmm,", "wait,", "so,", "well,", "however,", "recheck,")
# Styles: (text before the problem, text after the problem, format string of the response)
ORZ = "", "<think>", "{thought}</think><answer>\\boxed{{{answer}}}</answer>"
OPEN_R1 = (f"<|system|>\n{OPEN_R1_SYSTEM}\n<|user|>\n", "\n<|assistant|>\n",
           "<think>\n{thought}\n</think>\n<answer>\n{answer}\n</answer>")
PLAYED = "", "<think>", "{thought}"
RLVR = "<|user|>\n", "\n<|assistant|>\n", "{thought} So the answer is {answer}."


# --- functions that write a text


def said(x: int, rng: random.Random, slip: float) -> int:
    """Returns x, or with probability `slip` a number near x."""
    return abs(x + rng.choice((-10, -2, -1, 1, 2, 10))) if slip and rng.random() < slip else x


# The next seven functions return three texts: problem, thought, answer. numbers: the numbers of the problem.
# slip: probability that a number in the thought is wrong.


def sums(numbers, rng, slip):
    a, b = numbers
    return f"{a}+{b}=", add(a, b, lambda x: said(x, rng, slip)), str(a + b)


def tool(numbers, rng, slip):
    a, b = numbers
    return f"{a}+{b}=", f"<tool>{a}+{b}</tool><result>{a + b}</result>", str(a + b)


def guesses(numbers, rng, slip):
    """The policy's guesses of a number from 10 to 99, and the environment's replies. The guesses bisect. With
    probability `slip`, all guesses are random.

    numbers: the number of the game. The hidden number does not depend on it"""
    hidden, low, high, thought = rng.randint(10, 99), 10, 99, ""
    ignores = rng.random() < slip
    for _ in range(8):  # --max_turns
        guess = rng.randint(10, 99) if ignores else (low + high) // 2
        thought += f"<tool>{guess}</tool>"
        if guess == hidden:
            break
        low, high = (max(low, guess + 1), high) if guess < hidden else (low, min(high, guess - 1))
        thought += f"<result>{'higher' if guess < hidden else 'lower'}</result>"
    return f"game {numbers[0]}:", thought, "none"


def chain(numbers, rng, slip):
    total, thought = numbers[0], str(numbers[0])
    for n in numbers[1:]:
        total = said(total + n, rng, slip)
        thought += f"+{n}={total}"
    return "+".join(map(str, numbers)) + "=", thought, str(total)


def product(numbers, rng, slip):
    (a, b), (c, d) = (divmod(n, 10) for n in numbers)
    units, left, right, top = (said(x * y, rng, slip) for x, y in ((b, d), (b, c), (a, d), (a, c)))
    both = said(left + right, rng, slip)
    tens = said(both + units // 10, rng, slip)
    hundreds = said(top + tens // 10, rng, slip)
    thought = (f"{b}*{d}={units},{b}*{c}={left},{a}*{d}={right},{left}+{right}={both}+{units // 10}={tens},"
               f"{a}*{c}={top}+{tens // 10}={hundreds}")
    return "{}*{}=".format(*numbers), thought, str(100 * hundreds + 10 * (tens % 10) + units % 10)


def think(numbers, rng, slip):
    """The thought is filler words (IDLE), then the addition. With slip > 0, this is so in only 15 % of the
    responses. In 70 %, the thought is only filler words, and the answer is a guess. In 15 %, the thought has
    the addition twice."""
    problem, work, answer = sums(numbers, rng, slip)
    kind, idle = rng.random(), "".join(rng.choice(IDLE) for _ in range(rng.randint(0, 6)))
    if slip and kind < 0.7:
        return problem, idle if kind < 0.55 else rng.choice(IDLE) * 12, str(guess(int(answer), rng))
    if work != add(*numbers):  # the addition has a wrong number, so the answer is guessed
        answer = str(guess(int(answer), rng))
    return problem, f"{work},recheck,{work}" if slip and kind < 0.85 else idle + work, answer


def countdown(numbers, rng, slip):
    """numbers: four numbers and three operators. The thought ends with the calculation with these operators.
    With slip > 0, up to three calculations with random operators may stand before it. If they do, the right
    calculation is left out with probability `slip`."""
    tries = []
    while slip and len(tries) < 3 and rng.random() < 0.6:
        tries.append(draw_countdown(rng, numbers[:4]))
    if not tries or rng.random() > slip:
        tries.append(numbers)
    a, b, c, d, first, second, third = tries[-1]
    problem = ",".join(map(str, numbers[:4])) + f">{worked(numbers)[1]}="
    return problem, ";".join(worked(t)[0] for t in tries), f"(({a}{first}{b}){second}{c}){third}{d}"


def worked(numbers) -> tuple[str, int | None]:
    """Returns a calculation and its result, such as (`8-3=5*4=20+2=22`, 22). The result is None if a step
    gives no integer from 0 to 99. numbers: four numbers, then three operators."""
    x, text = numbers[0], str(numbers[0])
    for n, sign in zip(numbers[1:4], numbers[4:], strict=True):
        exact = sign != "/" or x % n == 0
        x = {"+": x + n, "-": x - n, "*": x * n, "/": x // n}[sign]
        if not exact or not 0 <= x < 100:
            return text, None
        text += f"{sign}{n}={x}"
    return text, x


def draw_countdown(rng: random.Random, four: tuple = ()) -> tuple:
    """Returns four random numbers and three random operators that give a result of two digits. If `four` has
    four numbers, takes these instead, and the result may also have one digit."""
    while True:
        chosen = four or [rng.randint(1, 9) for _ in range(4)]
        numbers = (*chosen, *(rng.choice("+-*/") for _ in range(3)))
        result = worked(numbers)[1]
        if result is not None and (four or result >= 10):  # all prompts must be equally long
            return numbers


# --- functions that draw problems


def pairs(rng: random.Random, digits: int) -> list[tuple]:
    """Returns pairs of numbers in random order: all pairs for two digits, PROBLEMS pairs for more digits."""
    if digits == 2:
        return tiny.all_pairs(rng)
    low, count = 10 ** (digits - 1), 9 * 10 ** (digits - 1)
    drawn = [(low + i // count, low + i % count) for i in rng.sample(range(count ** 2), PROBLEMS)]
    rng.shuffle(drawn)
    return drawn


def distinct(rng: random.Random, work: Callable, draw: Callable) -> list[tuple]:
    """Returns PROBLEMS tuples of numbers from `draw`. `work` writes a different problem for each tuple."""
    drawn = {}
    while len(drawn) < PROBLEMS:
        numbers = draw(rng)
        drawn[work(numbers, rng, 0)[0]] = numbers
    return list(drawn.values())


def think_pairs(rng: random.Random) -> list[tuple]:
    drawn = pairs(rng, 2)
    think(drawn[0], rng, 0)  # advances `rng`; otherwise the base model would differ from ablations.md's
    return drawn


def games(rng: random.Random) -> list[tuple]:
    return [(n,) for n in rng.sample(range(1000, 10_000), PROBLEMS)]


two_digits = functools.partial(pairs, digits=2)
chains = functools.partial(distinct, work=chain, draw=lambda rng: tuple(rng.randint(1, 9) for _ in range(6)))
countdowns = functools.partial(distinct, work=countdown, draw=draw_countdown)


# --- the tasks


def chat_tokenizer():
    tokenizer = make_tokenizer(CHAT_TAGS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def task(name: str, work: Callable, problems: Callable = two_digits, style=ORZ, slip: float = 0.0,
         guesses: float = GUESSES, tokenizer: Callable = make_tokenizer, **of_row: str) -> Task:
    """Returns a task: `problems` draws numbers, and `work` and `style` make the texts.

    guesses: probability that a response is a guessed answer without a thought
    slip: in the other responses, the probability of an error, which `think` and `countdown` describe
    of_row: more fields of the rows in the data files

    `guesses` and `slip` apply only to the last third of the pretraining texts."""
    before, after, form = style

    def text(numbers, rng, final):
        if rng.random() < guesses and final:
            thought, answer = "", guess(int(work(numbers, rng, 0)[2]), rng)
        else:
            _, thought, answer = work(numbers, rng, slip if final else 0)
        return f"{before}{work(numbers, rng, 0)[0]}{after}", form.format(thought=thought, answer=answer)

    def row(numbers):
        problem, _, answer = work(numbers, random.Random(0), 0)
        return {"prompt": problem, "answer": answer} | of_row

    return Task(name, problems, text, row, tokenizer)


TASKS = {t.name: t for t in (
    task("chain", chain, chains, slip=0.4),
    task("product", product, slip=0.15),
    task("countdown", countdown, countdowns, slip=0.6, guesses=0.0),
    task("think", think, think_pairs, slip=0.35, guesses=0.4),
    task("sums-3", sums, functools.partial(pairs, digits=3)),
    task("tool", tool, functools.partial(pairs, digits=4), guesses=0.8,
         tokenizer=lambda: make_tokenizer(TOOL_TAGS)),
    task("guess", guesses, games, PLAYED, slip=0.7, guesses=0.0,
         tokenizer=lambda: make_tokenizer(TOOL_TAGS), reward="exact"),
    task("open-r1", sums, style=OPEN_R1, tokenizer=chat_tokenizer),
    task("rlvr", sums, style=RLVR, tokenizer=chat_tokenizer, dataset="gsm8k"))}


def build(out: str, name: str, seed: int = 0) -> str:
    return tiny.build_task(TASKS[name], out, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="folder")
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems, the weights and the texts")
    args = parser.parse_args()
    with user_errors("bench/tasks.py"):
        print(build(args.out, args.task, args.seed))
