r"""Tests of answers: which text of a response is the answer, and which answers are equal."""

import re

import pytest
from steps import Steps

from grading import answers, statements, tokens, trees, values
from grading import extract as extraction
from grading.answers import grade, quick_grade, repeats
from grading.extract import EXTRACTORS, extract, readers
from grading.statements import read
from guard.messages import UserError

ALL = "orz boxed answer_tag gsm8k dapo letter last_number whole".split()
BLOCK = r"so </think> <answer> The answer is \boxed{42}. </answer>"
# (response, extractor -> answer). Extractors that are not listed, other than `whole`, find no answer.
FORMATS = [
    (BLOCK, dict(orz="42", boxed="42", answer_tag="42", dapo="42", last_number="42")),
    (r"</think><answer>\boxed{4}</answer> <answer>42</answer>",
     dict(orz="4", boxed="4", answer_tag="42", last_number="42")),
    ("</think><answer> 42 </answer>", dict(answer_tag="42", last_number="42")),
    ("</think><answer>The answer is: 42</answer>", dict(answer_tag="42", dapo="42", last_number="42")),
    ("<answer>$\\frac{1}{2}$</answer>", dict(answer_tag=r"$\frac{1}{2}$", last_number="2")),
    ("<answer></answer>", {}), (r"so $\boxed{42}$.", dict(boxed="42", last_number="42")),
    (r"The final answer is $\boxed{42}$.", dict(boxed="42", dapo="42", last_number="42")),
    (r"\[ \boxed{\frac{1}{2}} \]", dict(boxed=r"\frac{1}{2}", last_number="2")),
    *((text, dict(boxed="41; 42", last_number="42")) for text in (
        r"\boxed{41}, \boxed{42}", r"$\boxed{41}$ and $\boxed{42}$", r"\boxed{41}\boxed{42}",
        r"$\boxed{41} \quad \text{or} \quad \boxed{42}$", r"\(\boxed{41}\) and \(\boxed{42}\)",
        r"$x=\boxed{41}$ and $y = \boxed{42}$", r"x_1=\boxed{41}, x_2=\boxed{42}",
        r"\boxed{41} as well as \boxed{42}", r"\boxed{41} 和 \boxed{42}",
        r"$\boxed{41}$、$\boxed{42}$", r"$\boxed{41}$，$y=\boxed{42}$")),
    (r"first \boxed{41}. After a check it is \boxed{42}", dict(boxed="42", last_number="42")),
    (r"\boxed 5", dict(boxed="5", last_number="5")), (r"\boxed5", dict(boxed="5")),
    (r"\fbox{42}", dict(boxed="42", last_number="42")),
    (r"\boxed{7 \boxed{5}}", dict(boxed="5", last_number="5")), (r"\boxed{1", dict(last_number="1")),
    (r"it may be \boxed{5}</think> or not", {}), (r"<think> \boxed{5}", {}),
    ("</think> 6 * 7 = 42", dict(last_number="42")), ("#### 42", dict(gsm8k="42", last_number="42")),
    ("12 + 30 = 42\n#### 1,042", dict(gsm8k="1,042", last_number="1,042")),
    ("#### 1\n#### $2", dict(gsm8k="$2", last_number="2")),
    *((text, dict(dapo="42", last_number="42")) for text in (
        "work\n\nAnswer: 42", "Answer: 42\n\n", "**Final Answer**: 42", "The answer is: 42",
        "The final answer is 42. I hope it is correct.")),
    ("**Answer:** $x+1$", dict(dapo="$x+1$", last_number="1")),
    (r"Answer: \boxed{42}", dict(boxed="42", dapo="42", last_number="42")),
    ("Answer: 1\na\nb\nc", dict(last_number="1")),
    ("The answer is (C).", dict(dapo="(C).", letter="C")), ("Answer: C", dict(dapo="C", letter="C")),
    ("**Answer: C**", dict(dapo="C", letter="C")), ("The correct option is **B**.", dict(letter="B")),
    ("The correct answer is B) 12 m", dict(dapo="B) 12 m", letter="B", last_number="12")),
    ("Option A is wrong.\nD", dict(letter="D")), (r"\boxed{C}", dict(boxed="C", letter="C")),
    (r"\boxed{\text{(B)}}", dict(boxed=r"\text{(B)}", letter="B")),
    ("A cat has the answer", {}), ("-3.5 or 1,234.5", dict(last_number="1,234.5")),
    ("x = -3/4", dict(last_number="-3/4")), ("x = −５\u200b", dict(last_number="-5")),
    ("Answer: Q", dict(dapo="Q", letter="Q"))]


@pytest.mark.parametrize(("text", "found"), FORMATS)
def test_what_each_extractor_reads(text, found):
    whole = "" if "<think>" in text else text.rpartition("</think>")[2].strip()
    wanted = {name: found.get(name) for name in ALL} | {"whole": whole or None}
    assert {name: extract(text, name) for name in ALL} == wanted
    assert readers(text) == [name for name in EXTRACTORS if name in found or name == "whole" and whole]


def test_extractors_have_names_and_others_are_refused():
    assert list(EXTRACTORS) == ALL
    assert extract("", "whole") is None and extract(BLOCK) == "42"
    with pytest.raises(UserError, match="extractor 'box' is unknown; needed: one of orz, boxed"):
        extract("", "box")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("unit", [
    "{", "}", r"\boxed{", r"\boxed ", r"\boxed1", r"\boxed{}", r"\boxed{1},", "<answer>", "</answer>",
    "answer is ", "answer:", "####", "#### 1", "Answer: A", "answer **", "\n", " \n", "A\n", " ",
    "1,", "1,234", "-", "*", "(", "1.", "$", "{}", r"\boxed", "<answer></answer>", r"<answer>\boxed{",
    r"<answer>\boxed{1}</answer>", "\\", r"\boxed{1}" + "    or" * 20 + "!"])
def test_every_extractor_takes_linear_time(name, unit):
    """A text that is 4 times as long needs about 4 times as many steps of regular expressions, not 16."""
    def count(length):
        with Steps(extraction, tokens) as steps:
            EXTRACTORS[name](f"<answer>{unit * max(length // len(unit), length // 50)}</answer>")
        return steps.count

    assert count(200) <= 6 * count(50) + 200


# --- equality. Each line: gold ~ right answer ~ right answer ~~ wrong answer ~ wrong answer


def lines(text: str) -> list[list[list[str]]]:
    """Returns each line's right answers (the first is the gold answer) and wrong answers."""
    rows = text.replace("\\u200b", "\u200b").strip().splitlines()
    return [[part.split(" ~ ") for part in f"{row} ~~ ".split(" ~~ ")[:2]] for row in rows]


REWRITES = lines(r"""
\frac{14}{3} ~ 4\frac{2}{3} ~ 4 2/3 ~ 4\dfrac23 ~~ 3\frac53 ~ \frac{42}{3} ~ 4-\frac{2}{3} ~ 4+\frac23
12 ~ 12. ~ 012 ~ +12 ~ 12.0 ~~ 1 2 ~ 12_5 ~ 1,2 ~ \ne 12 ~ < 12 ~ x>12 ~ 12x ~ 12! ~ 12.5 ~ -12 ~ 11+1 ~ 7 {5}
12 ~~ \sqrt{144} ~ \binom{12}{1} ~ \boxed{1}\boxed{2} ~ 7\boxed{5} ~ 7{5} ~ 12+1i ~ 12+0.5i
(-1,6) ~ (-1,6).
120^\circ ~ 120^\circ. ~ 120^o ~ 120^{o} ~ \boldsymbol{120°} ~ 120 ~ 120\text{ degrees} ~ 120° ~ 120^{\circ}
10\text{ meters} ~ 10\,\text{m} ~ 10 meters ~ 10 ~ x=10\text{ meters}
10080 ~ 10\,080 ~ 10{,}080 ~ 10,\!080 ~ 10,\! 080 ~ 10,080
(2,\infty) ~ x>2 ~ 2<x ~ x\in(2,\infty) ~ \{x \mid x > 2\} ~ (2,+\infty) ~~ [2,\infty) ~ x\ge2 ~ x<2 ~ x=2 ~ 2
(2,\infty) ~ \{x\in\mathbb{R} \mid x > 2\} ~~ (-\infty,2) ~ \{x\in\mathbb{N} \mid x > 2\}
x\le3 ~ (-\infty,3] ~ x \leq 3 ~ x ≤ 3 ~ 3\ge x
[1,4) ~ 1\le x<4 ~ \left[1,\,4\right) ~ 4>x\ge1 ~~ (1,4) ~ [1,4] ~ 1<x<4 ~ 1,4 ~ [4,1)
(-\infty,1)\cup(2,\infty) ~ x<1\text{ or }x>2 ~ (2,\infty)\cup(-\infty,1) ~~ (-\infty,1]\cup(2,\infty) ~ 1<x<2
x\ne1 ~ x\in\mathbb{R},x\ne1 ~ (-\infty,1)\cup(1,\infty) ~ \mathbb{R}\setminus\{1\}
52_9 ~ 52_{9} ~ 52_\text{nine} ~ (52)_9 ~~ 52_8 ~ 52 ~ 47 ~ 529
7\text{ or }8 ~ 7, 8 ~ 8 or 7 ~ \{7,8\} ~ x=7, x=8
3\sqrt{13} ~ 3√13 ~ 3*sqrt(13) ~ \sqrt{117} ~ \sqrt{13}\times3
-\frac{5}{2} ~ −5/2 ~ -2½ ~ \frac{-5}{2} ~ -2.50 ~ -\left(\frac52\right) ~ -(5/2)
30000 ~ 3×10^4 ~ 3\cdot 10^{4} ~ 3e4 ~ 30,000
a=1, b=2 ~ b=2, a=1 ~ (a,b)=(1,2) ~ (1,2) ~ 1, 2 ~~ a=2, b=1 ~ 2, 1 ~ [1,2] ~ [1,2) ~ 1<x<2 ~ (2,1) ~ a=1, a=2
a=1, b=2 ~~ (b,a)=(1,2)
(1,2) ~ \big(1,2\big) ~ (x,y)=(1,2) ~ x=1, y=2 ~ y=2, x=1 ~~ \{1,2\} ~ (2,1) ~ 1,2 ~ [1,2] ~ (12) ~ x=2, y=1
\frac{1}{3} ~ 0.\overline{3} ~ 0.\bar{3} ~ 0.(3) ~ 0.3(3) ~ 0.333333333 ~~ 0.3 ~ 0.333 ~ 0.3333 ~ 0.(4)
\frac{1}{3} ~~ 0.0\overline{3}
2(x+3)(x-1) ~ (x+3)(2)(x-1) ~ (x+3)2(x-1) ~ 2x^2+4x-6
6-5i ~ 6-5\,i ~ -5i+6 ~ 6-5\cdot i ~~ 6+5i ~ 6-5 ~ (6,-5)
81 ~ \boldsymbol{81} ~ \mathbf{81} ~ \displaystyle 81 ~ The value of $x$ is 81 ~~ half: 81 ~ negative: 81
8\sqrt2 ~ \sqrt{128} ~ \frac{16}{\sqrt2} ~~ \sqrt{50}+\sqrt{18} ~ \sqrt{16}\sqrt{8} ~ \sqrt{128.0001}
\sqrt{\frac23} ~ \frac{\sqrt2}{\sqrt3} ~ \frac{\sqrt6}{3} ~~ \sqrt{\frac43}-\sqrt{\frac{2}{3}}
-2<x<2 ~ |x|<2 ~~ |x|\le2 ~ |x|>2 ~ |x|<3
5x ~~ x/0.2 ~ \frac{x}{0.2}
8x^2 ~~ 2^3x^2 ~ 2^{3}x^{2}
3x^2 ~~ \sqrt[3]{27}x^2 ~ 3!\frac{x^2}{2}
82x ~~ 37x+\frac{45x^2}{x} ~ 82x+0
6x+2^x ~~ 2\cdot3x+2^x
\sqrt{13} ~~ |2+3i| ~ \sqrt{26/2}
\ln3 ~ \frac12\ln9 ~ \ln3\approx1.1 ~~ \ln3\approx1.2 ~ \ln12-\ln4 ~ \ln6-\ln 2 ~ \ln(6/2)
\ln\frac32 ~ \ln3-\ln2 ~ \ln 1.5 ~~ \ln6-\ln2-\ln2
\log_2 3 ~ \frac{\ln3}{\ln2}
5 ~ \sigma^2=5 ~ E[X]=5 ~ A^{-1}=5 ~~ not=5 ~ x^{-1}=5 ~ x^2=5
k\pi ~ k\pi, k\text{ an integer} ~ k\pi\ (k\text{ is an integer})
28 ~ 28 pizzas ~ 28\text{ pizzas} ~ 28\text{ cm}^2 ~~ 28 dozen pizzas ~ 28 or more pizzas ~ 12abc
\frac{1000001}{7} ~ 142857.285714 ~ 142857.3
5\text{ cm}^2 ~ 5 square centimeters ~ 5 ~ 5\text{ sq cm}
60\text{ km/h} ~ 60\text{ km per hour} ~ 60
\$18.90 ~ 18.90 ~ 18.9 dollars ~ $18.90
5000000 ~ 5 million
ABC ~ \text{ABC} ~~ CBA ~ AB
\text{(C)} ~ C ~ (C) ~ C.
\text{Evelyn} ~ evelyn ~ Evelyn. ~~ Evelin ~ not Evelyn ~ Evelyn and Bob
5\% ~ 0.05 ~ 5 percent ~ \frac{1}{20} ~~ 5 ~ 0.5
0.5\% ~ 1/2\% ~ 1/2% ~ \frac12\% ~~ 1/2 ~ 50 ~ \frac{1}{2\%}
3:4 ~ 3 : 4 ~ \frac34 ~ 3 to 4 ~~ 4:3 ~ 3,4
2:30\text{ p.m.} ~ 2:30 PM ~ 2:30\text{ P.M.} ~ 2:30 ~~ 2:30 AM
1\pm\sqrt2 ~ 1+\sqrt2, 1-\sqrt2 ~ \{1\pm\sqrt2\} ~~ 1+\sqrt2
\{1\pm\sqrt5,-2\} ~ -2,1\pm\sqrt5 ~ \{1+\sqrt5,-2,1-\sqrt5\} ~~ \{1\pm\sqrt5,2\}
\text{(C)} ~ (C) 15 ~ \textbf{(C)}\ 15 ~ \text{C. 15} ~ C. x^2+1 ~~ (B) 15 ~ \text{(C)}+1 ~ (C), 3 ~ (C) or 3
\begin{pmatrix}1\\2\end{pmatrix} ~ \begin{bmatrix} 1 \\ 2 \end{bmatrix} ~~ \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} ~~ \begin{pmatrix}2\\1\end{pmatrix}
y=2x+1 ~ 2x+1 ~ 2x-y+1=0 ~~ y=2x-1 ~ y>2x+1 ~ z=2x+1
\emptyset ~ \varnothing ~ \{\} ~ \text{empty set} ~ the empty set
809 ~ m+n = 809 ~ mn=809 ~ |AB| = 809 ~ [ABC]=809 ~ S_{ABC}=809 ~ m + n = 800 + 9 = 809 ~~ m+n=808 ~ 2x=809
809 ~~ -x=809 ~ m+n=809+1 ~ 809=m+n+1 ~ |AB|<809 ~ [x]=808 ~ f(809)=3
90^\circ ~ \angle ABC = 90^\circ ~ m\angle B = 90 ~~ 90\text{ radians}
(3,\frac{\pi}{2}) ~ (r,\theta)=(3,\frac{\pi}{2}) ~ (\rho, \theta) = (3, \pi/2)
\frac56 ~ \frac56\approx0.833 ~ x=\frac56\approx0.83 ~ $\frac56$. ~ \boxed{\frac56} ~ \mathbf{\frac{5}{6}}
\frac56 ~~ \frac65\approx0.833 ~ \frac56\approx95\% ~ \frac65\approx\frac56 ~ 0.833\approx\frac56 ~ 5\boxed{6}
\frac56 ~~ \boxed{\frac56}\boxed{1} ~ 5\mathbf{6}
13 ~ \text{The answer is } 13 ~ The answer is 13. ~ \text{Final answer: }13 ~ \text{The area is }13 ~~ July 13
13 ~ **13** ~ \color{red}{13} ~ \textcolor{blue}{13} ~ 13 \checkmark ~ $\boxed{13}$. ~ 13+0i ~~ wrong: 13
13 ~~ The answer is not 13 ~ The answer is at least 13 ~ The wrong answer is 13 ~ The answer is 13 or 14
13 ~~ \color{red}{1}3+1 ~ The answer is 31 ~ \text{no answer: }13 ~ sum is 12+1
\text{Tuesday} ~ The answer is Tuesday. ~ Answer: Tuesday ~~ The answer is not Tuesday ~ It is not Tuesday
\text{Tuesday} ~~ The answer is Thursday
3\pmod7 ~ 3\bmod 7 ~ 3 \pmod{7} ~ 3 (mod 7) ~ 3\ (\bmod\ 7) ~~ 3 ~ 7\pmod3 ~ 3\pmod8 ~ 4\pmod7 ~ \pm3
x\equiv3\pmod7 ~ x \equiv 3 \mod 7 ~ x\equiv 3\ (\text{mod }7) ~~ x=3 ~ x\equiv4\pmod7 ~ x\equiv3\pmod8
x\equiv3\pmod7 ~~ y\equiv3\pmod7
[-1,0)\cup(0,1] ~ [-1,0)\bigcup(0,1] ~ [-1,1]\setminus\{0\} ~~ [-1,1] ~ (-1,1)\setminus\{0\}
[-1,0)\cup(0,1] ~~ [-1,1]\setminus\{1\} ~ [-1,1]\setminus\{0.5\} ~ [-1,1]\setminus\{5\}
(-\infty,0)\cup(0,1)\cup(1,\infty) ~ \mathbb{R}\setminus\{0,1\} ~ \mathbb{R} \backslash \{1, 0\}
(-\infty,0)\cup(0,1)\cup(1,\infty) ~~ \mathbb{R}\setminus(0,1) ~ \mathbb{R}\setminus\{0,2\}
r=3,\theta=\frac{\pi}{4} ~ (3,\frac{\pi}{4}) ~ \theta=\frac{\pi}{4},r=3 ~~ (\frac{\pi}{4},3)
\begin{pmatrix}\frac12&0\\0&-1\end{pmatrix} ~ \frac12\begin{pmatrix}1&0\\0&-2\end{pmatrix}
\begin{pmatrix}1\\-3\end{pmatrix} ~ \left[\begin{array}{r}1\\[4pt]-3\end{array}\right]
\begin{pmatrix}1\\-3\end{pmatrix} ~ -\begin{bmatrix}-1\\3\end{bmatrix} ~~ 2\begin{pmatrix}1\\-3\end{pmatrix}
\begin{pmatrix}1\\-3\end{pmatrix} ~~ -\begin{pmatrix}1\\-3\end{pmatrix}
\begin{pmatrix}1\\-3\end{pmatrix} ~~ \det\begin{pmatrix}1\\-3\end{pmatrix}
\begin{pmatrix}1\\-3\end{pmatrix} ~~ \begin{pmatrix}1\\0\end{pmatrix}-\begin{pmatrix}0\\3\end{pmatrix}
2^{1007} ~ 2^{1,007} ~~ 2^{1,008} ~ 2^{1,07}
\frac{1234}{5} ~ \frac{1,234}{5}
7{:}45 ~ 7:45
3\sqrt[3]{4} ~ 3\sqrt[3]4 ~~ 3\sqrt[4]3 ~ 3\sqrt4
\binom{10}{3} ~ {10 \choose 3} ~ \binom{10}3 ~~ {3 \choose 10} ~ \frac{10}{3}
2\mathbf{i}-3\mathbf{j} ~ 2\hat{i}-3\hat{j} ~ 2\hat{\mathbf{i}}-3\hat{\mathbf{j}} ~ 2i-3j ~ 2\vec i-3\vec j
2\mathbf{i}-3\mathbf{j} ~~ 2i-3 ~ 2-3\mathbf{j} ~ 3\mathbf{i}-2\mathbf{j} ~ 2\mathbf{i}
\sin 50^\circ ~ \sin(50^\circ) ~ \sin 50° ~ \cos 40^\circ ~~ \sin 50 ~ \sin 40^\circ ~ 50^\circ
\sin 50^\circ ~~ \cos 50^\circ
€45 ~ 45 ~ 45 euros ~~ \$45 ~ £45 ~ 45 cents ~ €54
£1,250 ~ 1250 ~ 1250 pounds
9.8\text{ m/s}^2 ~ 9.8\ \mathrm{m\,s^{-2}} ~ 9.8\text{ m}\cdot\text{s}^{-2} ~ 9.8 ~~ 9.8\text{ m/s}
9.8\text{ m/s}^2 ~~ 9.8\ \mathrm{m\,s^{-1}} ~ 9.8\ \mathrm{m\,s^{2}}
400\text{ ohms} ~ 400\ \Omega ~ 400
\text{ellipse} ~ an ellipse ~ the ellipse ~ \text{an ellipse} ~~ not an ellipse ~ a circle
\text{no solution} ~ no solutions ~ There is no solution ~ There are no solutions ~~ There is one solution
\text{July }4 ~ July 4th ~~ 4 ~ June 4 ~ July 14
0.5 ~ \frac{1}{2} ~ \frac12 ~ \tfrac{1}{2} ~ \dfrac{3}{6} ~ 1/2 ~ 50\%
0.333333 ~ 1/3
10^{-7} ~ 0.0000001 ~~ 0 ~ 2\cdot10^{-7} ~ 0.0000002 ~ 0.0
10 ~ 10\text{ cm} ~ \$10 ~ 10^\circ ~ x=10 ~ $10$
0.75\pi ~ \frac{3\pi}{4}
4\frac{2}{3} ~~ \frac{8}{3} ~ 42/3
47 ~~ 46 1 ~ 46+1
31 ~~ 1\,030
7 ~~ 7_8 ~ 7\text{ or 8} ~ 7\text{ is wrong, it is 8} ~ 6=7 ~ not 7 ~ 7\equiv 0 ~ 7 \pmod 3 ~ 7 or more
7 ~~ 5$ $7 ~ 6 1/2 1/2 ~ 6.5\frac12
\pi ~ 1.0000000000000001\pi ~~ 3.14 ~ 3.1416 ~ 1.0000001\pi ~ \frac{22}{7} ~ \pi\approx4x ~ 3.14\approx\pi
0.00001234 ~~ 0.000012
10\text{ cm} ~~ 10\text{ m} ~ 10 inches ~ 10\text{ cm}^2 ~ 10\% ~ \$10
\$5 ~~ 5 cents ~ €5 ~ 5 million
(34) ~~ (3,4)
(3,4) ~~ (34)
D ~~ D)
5\text{ or }7 ~~ 5
x ~~ X ~ x' ~ 2x
C ~ (C) 15 ~ C. 15 ~ \text{Option C} ~ \text{Choice (C)} ~ \{C\} ~~ c ~ B ~ CC ~ (B) 15 ~ (c) 15
\text{even} ~~ uneven ~ odd
\text{isosceles} ~~ isoscele ~ not isosceles
5 ~~ 5\% ~ 2(3) ~ 4(1) ~ (2)(3) ~ (2)3 ~ 5{,}5 ~ 5\text{ or }7 ~ 7 $5$ ~ 7} \boxed{5
\frac73 ~~ 2(\frac13) ~ (2)(\frac13)
101_2 ~~ 101 ~ 5
101 ~ 101 cars ~~ 101_2 ~ 101 in binary ~ 101 base two
\{1,2\} ~~ (1,2) ~ \{1\} ~ \{1,2,3\} ~ \{12\}
1, 2, 3 ~~ 1, 2 ~ 1, 2, 4 ~ 6 ~ (1,2,3) ~ 1 2 3
x=1, x=2 ~~ x=1, y=2 ~ y=1, y=2 ~ (1,2)
1<x<2 ~~ x=1, y=2
x=5 ~~ y=5 ~ x\ne5 ~ x>5 ~ x-5=0 ~ 2x+3=13 ~ x=6
2t ~~ 2 ~ 2T
f(x)=x ~~ f(x)=-x
x+y=5 ~~ 5 ~ x-y=5 ~ x+z=5
\sin 50 ~~ \sin 50^\circ
1\frac45 ~~ 1-\frac45 ~ \frac{4}{5} ~ 1+\frac54+1
\frac95 ~~ 1+\frac45
x^2+2x+2 ~~ (x+1)^2
1.2 ~~ 1,2
\frac{1}{2} ~~ -\frac{1}{2} ~ 1/0 ~ 3/4 ~ x=5
0.33 ~~ 1/3
2.8 ~~ \sqrt{8}
3.14 ~~ \pi
seat ~~ east
""")
GOLDS = lines(r"""
1665 ~ 1665.0 ~ 37\cdot45=1665 ~ 1665^\circ C ~ \Large1665 ~~ 37*45 ~ (37)(45) ~ x=37\cdot45 ~ 37\cdot44=1665
12 ~ 12\approx12.0 ~~ x=13=12 ~ 12\approx13 ~ 13\approx12 ~ 12=13=12
\{2,3\} ~ \{2,2,3\} ~ 3,2 ~~ 2,2,3 ~ 2,3,3
\text{hours: }3 ~ 3 ~ 3 hours ~~ 3 minutes
25^\circ C ~ 25 degrees Celsius ~ 25^\circ\text{C} ~ 25 ~~ 25^\circ F ~ 25^\circ
\frac12 ~ P(X=1)=\frac12 ~ (1)/(2) ~ 1/(2) ~ 1/2 pizza ~~ P(X=1)=\frac13 ~ (1)/(3) ~ 1/2 halved
(-\infty,0)\cup(1,\infty) ~ \mathbb{R}\setminus[0,1] ~~ \mathbb{R}\setminus(0,1)
k\ge4\text{ or }k\le-4 ~ |k|\ge4 ~~ |k|>4 ~ |k|\le4 ~ k\ge4
\text{(B) }15 ~ 15 ~ B ~ (B) 15 ~~ 16 ~ C ~ (C) 15
15 ~ (B) 15 ~~ (B) 16
42 ~ 4.2\cdot10^1 ~~ 84/2 ~ \frac{84}{2} ~ 84:2 ~ 84\div 2 ~ (\frac{84}{2}) ~ \frac{84}{2}\text{ cm}
\frac38 ~ 6/16 ~ 37.5\% ~~ \frac12\cdot\frac34 ~ \frac{\frac34}{2} ~ \frac{1+2}{8}
1024 ~ 1.024\cdot10^3 ~~ 2^{10} ~ 32^2
2^{10} ~ 1024 ~ 4^5 ~~ 2^9 ~ 20
1000000 ~ 10^6 ~~ 1000^2
120 ~ 120. ~~ 5! ~ \binom{10}{3} ~ C_{10}^{3}
\binom{10}{3} ~ 120 ~ C_{10}^{3} ~~ \binom{9}{3}
\frac{\sqrt3}{2} ~ \sqrt{\frac34} ~~ \sin60^\circ ~ \cos\frac{\pi}{6}
\frac{\pi}{4} ~ 0.25\pi ~ \frac\pi4 ~~ \arctan1 ~ \int_0^1\frac{1}{1+x^2}dx ~ \lim_{x\to0}\frac{\pi}{4}
(2,50) ~ (2.0,50) ~~ (\frac42,50) ~ (2,5\cdot10)
\frac34 ~ 0.75 ~~ 5\lor7\lor\frac34 ~ 3@\frac34 ~ 3\&\frac34 ~ 1\mid\frac34
x=\frac12\lor x=\frac34 ~ \frac12,\frac34 ~ \frac34\text{ or }\frac12 ~~ \frac12 ~ x=\frac34
\{1\}\cup\{3\} ~ 1\text{ or }3 ~ \{1,3\} ~~ 1 ~ \{3\}
[3,\infty)\cup\{0\} ~ x=0\lor x\ge3 ~~ x\ge3 ~ x\ge0
2 ~ 2 cases ~~ 2 thirds ~ 2 tenths ~ 2 score ~ 2 gross ~ 2 lakh ~ 2 millions ~ 2 pct ~ 2 squared
3\pi ~ 3\pi\text{ cm} ~~ 3\pi\text{ thousand}
42\% ~ 42 per cent ~ 0.42 ~~ 42 ~ 42 permille
-5 ~ −5 ~ ‐5 ~ －𝟓 ~ -５ ~ -5\u200b ~~ 5 ~ ５
3\log 2 ~ \log 8 ~~ \log 6
2\log 2-1 ~ 2\ln 2-1 ~ \log 4-1 ~~ 2\ln 3-1
2\ln 2-1 ~ 2\log 2-1 ~~ 2\lg 2-1 ~ 2\log 3-1
\frac{\ln 3}{\ln 2} ~ \log_2 3 ~ \frac{\log 3}{\log 2} ~~ \log 3
\arccos\frac{1}{3} ~ \arctan 2\sqrt{2} ~~ \sqrt{2}\arctan 2 ~ \arctan 3\sqrt{2}
\sqrt{\frac{a}{b}} ~ \frac{\sqrt{ab}}{b} ~ \frac{\sqrt{a}}{\sqrt{b}} ~~ \frac{\sqrt{b}}{\sqrt{a}}
x^{2/3} ~ \sqrt[3]{x^2} ~~ \sqrt{x^3} ~ x^{3/2}
|x|\sqrt{3} ~ \sqrt{3x^2} ~~ x\sqrt{3} ~ -x\sqrt{3}
\sqrt{x^2} ~ |x| ~~ x ~ -x
-286 ~ \Delta H=-286\text{ kJ/mol} ~~ \Delta H=286
5 ~ 5\text{ atm} ~ 5\,\mathrm{eV} ~ 5.0\text{ kJ/mol} ~~ 5\text{k} ~ 5\text{ MeV} ~ \text{5 docenas}
P'(-3,4) ~ (-3,4) ~ P'(-3, 4) ~~ (3,4)
1 ~ one ~~ no one ~ one third
20 ~ twenty ~~ 20 twenty ~ twenty percent
\lg 5 ~ \log_{10}5 ~~ \lg 2 ~ \lg 50
p=5,q=2 ~ (5,2) ~ q=2, p=5 ~~ (2,5) ~ p=2,q=5
v_1=10,v_2=20 ~ v_2=20,v_1=10 ~~ v_1=20,v_2=10 ~ 10
x_{1}=-1,\quad x_{2}=4 ~ -1, 4 ~ x=4\text{ or }x=-1 ~ x_1=4, x_2=-1 ~~ -1 ~ x_1=1, x_2=4
AB:CD=3:2 ~ 3:2 ~ 1.5 ~~ 2:3 ~ CD:AB=3:2
\frac{AM}{MC}=\frac13 ~ \frac13 ~ AM:MC=1:3 ~~ 3 ~ \frac{MC}{AM}=\frac13
x=y=2 ~ (2,2) ~ x=2,y=2 ~~ x=y=3 ~ 2,3
x=1,y=2;x=3,y=4 ~ (1,2),(3,4) ~ (x,y)=(3,4)\text{ or }(1,2) ~~ (1,4),(3,2) ~ 1,2,3,4 ~ (1,2)
(1;2) ~ (1,2) ~~ (2,1)
\frac32\text{ or }1.5 ~ 1.5 ~ 1\frac12 ~ \frac32 ~~ 3 ~ \frac32,2
x_1=x_2=3 ~ 3 ~ x=3 ~~ 6 ~ 3,4
1\le|z|\le3 ~ |z|\in[1,3] ~~ |z|\le3 ~ 1\le z\le3
m>-1\text{ and }m\ne2 ~ (-1,2)\cup(2,\infty) ~~ m>-1 ~ m\ne2
S=\frac12\cdot3\cdot4=6 ~ 6 ~ S=6 ~~ 12 ~ \frac12\cdot3\cdot4
\frac12+\frac13=\frac56 ~ \frac56 ~~ \frac25 ~ \frac12+\frac13
The smallest such number is $12$. ~ 12 ~~ 21
x=3\text{ is the only solution} ~ 3 ~~ -3
n=3k+1(k\in\mathbb{N}) ~ 3k+1 ~~ 3k-1
$(4,1)$, $(1,4)$ ~ (1,4),(4,1) ~~ (1,4)
1665\pi ~ 1665.0\pi ~~ 37*45\pi ~ (37)(45)\pi ~ \frac{3330}{2}\pi ~ (1600+65)\pi ~ |37\cdot45|\pi
5\pi ~ 5.0\pi ~~ 2\pi+3\pi ~ |3+4i|\pi ~ \sqrt{9+16}\pi ~ \frac{10\pi}{2}
2i ~ i\cdot2 ~~ (1+i)^2 ~ \frac{2}{-i} ~ (1+i)(1+i) ~ (1-i)+(3i-1)
2x ~ x\cdot2 ~~ \gcd(6,4)x ~ \frac{\partial}{\partial x}x^2 ~ \frac{6x}{3} ~ x+x ~ 2x\sin^2x+2x\cos^2x
120x ~ x\cdot120 ~~ 1.2\cdot10^2x ~ 5!x ~ \binom{16}{2}x ~ 37\cdot45x-1545x ~ \max(120,5)x
6\sqrt2 ~ \sqrt{72} ~~ |6|\sqrt2 ~ \sqrt{36\cdot2} ~ \sqrt{6^2+6^2}
2^{2024} ~ 4^{1012} ~ 2\cdot2^{2023} ~~ 2^{2025}-2^{2024} ~ 2^{2024}+0.5 ~ 1.0000000001\cdot2^{2024}
1665 ~ 1665\text{ such numbers} ~ 1665 people ~~ 1665\frac01 ~ 1665 M ~ 1665 onwards ~ unequal to 1665
5 ~ 5 kg ~ 5 ways to win ~ equal to 5 ~ 5\text{ N} ~~ 5 halved ~ 5 twentieths ~ 5 \text{ G} ~ 5 quintillion
5 ~ 5 square units ~ 5 km per hour ~~ 5 nearly ~ 5 divided ~ 5 googol ~ close to 5 ~ 5 K
(1,2)\cup(3,4) ~ 3<x<4\lor1<x<2 ~~ (1,4)\cup(3,2) ~ 1<x<4\lor3<x<2
\frac{\sqrt3}{2} ~ \sqrt\frac34 ~ \sqrt{\tfrac34} ~~ \sqrt\frac32
\arctan\frac12 ~ \operatorname{arctan}\frac12 ~ arctan(1/2) ~~ \operatorname{arcsin}\frac12
x^2+C ~ x^2+c ~ x^{2}+K ~ x^2+C,C\in\mathbb{R} ~~ X^2+C ~ x^2+1
[0,1)\cup(2,3] ~ [0,1[\cup]2,3] ~~ ]0,1]\cup]2,3]
2\pi x^{-12} ~ 2𝜋x⁻¹² ~ ２πx^{-12} ~~ 2𝜋x¹²
\frac{\sqrt3}{4} ~ \sqrt3/4 ~ 0.25\sqrt3 ~~ \frac12\cdot\frac{\sqrt3}{2} ~ \frac{\sqrt{15}}{4\sqrt5}\cdot1
\frac{10\pi}{3} ~ \frac{20\pi}{6} ~ \frac{10}{3}\pi ~~ \frac23\cdot5\pi ~ \frac16(20\pi)
\sqrt{10} ~ \frac{10}{\sqrt{10}}
x+1 ~ x+1,x\ne1 ~ x+1\quad(x\neq-1) ~ x+1\text{ for }x>0 ~~ x-1,x\ne1 ~ x,x\ge1
x^2+y=1 ~ x^2+y=1(y\ne0) ~~ x^2+y=2(y\ne0)
2\sqrt2 ~ \frac{4}{\sqrt2} ~~ \frac{4\sqrt6}{2\sqrt3} ~ \max(2\sqrt2,1) ~ \min(2\sqrt2,3)
\log_25 ~ \ln5/\ln2 ~ \log_25\approx2.32 ~~ \ln2/\ln5 ~ \log_25\approx2.4
n(2n+1) ~ n(2 n+1) ~ 2 n^2+n ~~ n(2n-1)
\frac12gt^2 ~ \frac{1}{2} g t^2 ~ 0.5 g t^2 ~~ \frac12gt
2s+t ~ 2 s + t ~ t+2s ~~ 2s
2k\pi ~ 2k\pi, k\in\mathbb Z ~ 2k\pi, k\in Z ~ 2k\pi\quad k\in\mathbb{Z} ~ 2k\pi, k\text{ an integer} ~~ k\pi
13 ~ f''(1)=13 ~ f(f(2))=13 ~ |z_1|=13 ~ |a+b|=13 ~ a^2+b^2=13 ~ x_1+x_2=13 ~ \cos2\theta=13 ~~ x^2=13 ~ x+3
x^2+y^2=25 ~ y^2+x^2=25 ~ x^2+y^2-25=0 ~~ 25 ~ x^2+y^2=5 ~ x=25
(-\sqrt2,\sqrt2) ~ |x|<\sqrt2 ~~ |x|\le\sqrt2
3:4:5 ~ a:b:c=3:4:5 ~~ a:b:c=4:3:5
-i ~ 0-i ~~ 0+i
8\% ~ 8 percents ~~ 8
300 ~ 300 yuan ~ 310^\circ-10^\circ=300^\circ ~~ 310^\circ-9^\circ=300^\circ ~ 300\text{ million yuan}
(-\infty,\infty) ~ \text{All real numbers} ~ all real x ~ \mathbb R ~~ \text{All positive numbers}
x>0 ~ all positive real numbers ~ \mathbb{R}^+ ~ \mathbb{R}_{>0} ~~ \mathbb{R} ~ x\ge0 ~ \mathbb{R}^2
x_1=x_2=2,x_3=3 ~ 2,2,3 ~~ (2,3,3) ~ 2,3,3 ~ 3
\pi(R^2-r^2) ~ \pi(R-r)(R+r) ~~ 0 ~ 2R-2r ~ \pi(r^2-R^2)
\frac{R}{r} ~ R/r ~~ 1 ~ \frac rR ~ \frac RR
\gamma+I ~ I+\gamma ~~ \gamma+i ~ i ~ I+1
x^2+1=0 ~ 2x^2+2=0 ~ x^2=-1 ~~ x=x+1 ~ x^2+5=0 ~ 0=1 ~ (x^2+1)^2=0
y^2=4x ~ x=\frac{y^2}{4} ~~ \sqrt{(x-1)^2+y^2}=x+1 ~ |y|=2\sqrt{x}
\frac{4000\pi}{3} ~ \frac{4000}{3}\pi ~~ \frac43\pi\cdot10^3 ~ \frac43\cdot1000\pi
\sqrt3 ~ \frac{3}{\sqrt3} ~~ \frac{12}{4\sqrt3} ~ \frac{\sqrt3^3}{3} ~ 6/(2\sqrt3)
97+56\sqrt3 ~ 56\sqrt3+97 ~~ (2+\sqrt3)^4 ~ (7+4\sqrt3)^2
3\pi+1 ~ 1+3\pi ~~ 5\pi-(2\pi-1) ~ 5\pi-2(\pi-\frac12) ~ 1-(-3\pi)
3+2\sqrt2 ~ 2\sqrt2+3 ~~ \frac{1+\sqrt2}{\sqrt2-1} ~ -(-3-2\sqrt2)
x^{3/2} ~ x\sqrt x ~~ x^2\sqrt x
xy=6 ~ y=\frac6x ~~ \frac{y}{2}\cdot\frac{x}{3}=2
x^2+y^2-4x=0 ~ (x-2)^2+y^2=4 ~~ \frac{y}{x}\cdot\frac{y}{x-4}=-1
\frac{2x+3}{6} ~ \frac16(2x+3) ~~ \frac16(3)
\frac{1}{2^{100}} ~ 2^{-100} ~~ -\frac{1}{2^{100}} ~ \frac{1}{2^{99}} ~ \frac{1}{3^{100}} ~ \frac{1}{20!}
2-\frac{1}{2^{99}} ~ 2-2^{-99} ~~ 2+\frac{1}{2^{99}} ~ 2-\frac{1}{2^{100}} ~ 2
f(1)=3,f(2)=5 ~ f(2)=5,f(1)=3 ~ 3,5 ~~ f(1)=5,f(2)=3 ~ f(3)=3,f(4)=5 ~ 5,3
h=\frac{3V}{\pi r^2} ~ \frac{3V}{\pi r^2} ~~ V=\frac13\pi r^2h ~ V
x^6 ~ 1\cdot x^6 ~~ (x^2)^3 ~ (x^3)^2 ~ \frac{(x^4)^2}{x^2}
y=x ~ x-y=0 ~ x=y ~~ y=-x
25\text{ sec} ~ 25 ~ 25\text{ seconds} ~ 5\cdot5=25\text{ s} ~~ 52 ~ 5\cdot4=25\text{ s}
7 ~ the value of $x$ is 7 ~~ the reciprocal is 7 ~ its opposite is 7 ~ lower bound: 7 ~ the false answer is 7
a_n ~~ A_n
mgh ~~ mgH
a+b+c ~ c+b+a ~~ a+b+C ~ a+b+K
e^5 ~ e^{5} ~ e^5\approx148.4 ~~ e^5\approx150.9 ~ e^2e^3 ~ \frac{e^7}{e^2}
6x^2 ~ x^2\cdot6 ~ 6x\cdot x ~~ \sqrt{36x^4} ~ \frac{12x^6}{2x^4} ~ (\sqrt6x)^2 ~ \frac{(6x)^2}{6}
\sqrt2-1 ~ -1+\sqrt2 ~~ |1-\sqrt2|
\frac{5\pi}{6} ~ \frac56\pi ~~ 150\cdot\frac{\pi}{180}
\{k\pi\mid k\in\mathbb Z\} ~ k\pi,k\in\mathbb{Z} ~ \{k\pi:k\in\mathbb Z\} ~~ \{k\mid k\in\mathbb Z\}
\left[\frac n2\right]+1 ~ \lfloor n/2\rfloor+1 ~~ \frac n2+1 ~ \{\frac n2\}+1
\frac{1}{23} ~ 1/23 ~~ \frac{1}{2}3 ~ \frac123
1:15 ~ 1 : 15 ~~ 2:30
\textbf{(C) } 15 ~ 15 ~ C ~ (C) 15 ~~ 16 ~ D
12\text{ cm} ~ $12$ cm ~ 12 ~~ \$12
\angle A B C=60^\circ ~ 60^\circ ~ \angle ABC=60^\circ ~~ 30^\circ
\begin{cases}x=1\\y=2\end{cases} ~ x=1,y=2 ~ (1,2) ~~ (2,1) ~ x=2,y=1
A(1,2) ~ (1,2) ~ A=(1,2) ~~ (2,1) ~ B(1,2)
AC=5 ~ 5 ~ A C=5 ~~ AB=5
k\pi,k\in\mathbb{Z} ~ n\pi,\ n\in\mathbb Z ~ k\pi ~~ 2n\pi,n\in\mathbb{Z}
2^n,n\in\mathbb{N} ~ 2^n ~ 2^k,k\in\mathbb{N} ~~ 2^k,n\in\mathbb{N}
15.56 ~ 11\sqrt2\approx15.56 ~~ 11\sqrt2 ~ 11\sqrt2\approx15.6 ~ 12\sqrt2\approx15.56
x\ne2 ~ \mathbb{R}-\{2\} ~ ⟨-\infty,2⟩\cup(2,\infty) ~~ \mathbb{R}-\{3\}
\operatorname{tg}2+\operatorname{ctg}\varphi ~ \tan2+\cot\phi ~~ \tan2+\tan\phi
3\cdot2^{n-1} ~ \frac32\cdot2^n ~~ \frac32\cdot2^{n-1}
\frac{x+1}{x-1} ~ \frac{x+1}{x-1},x\ne\pm1 ~~ \frac{x+1}{x-2}
42 ~ 42\text{ sheep} ~~ 42\text{ perhaps} ~ \sqrt x=42 ~ \text{twice }x=42
\frac{n(n+1)}{2} ~ C_{n+1}^2 ~~ C_{n}^2
2\text{ hours }30\text{ minutes} ~ 2\text{ hours and }30\text{ minutes} ~~ 2\text{ hours }
\text{Yes, it is possible} ~ Yes ~ yes. ~ \text{Yes, such a set exists.} ~~ No ~ Yes or no ~ Yes, but not 3
\max=5,\min=-3 ~ \text{maximum } 5, \text{minimum } -3 ~ minimum value -3; maximum value 5 ~~ \max=-3,\min=5
(1) $a=2$; (2) $b=5$ ~ a=2, b=5 ~ (1) a=2 (2) b=5 ~~ a=5,b=2 ~ a=2 ~ (1)(2)
1, 2, \ldots, 6 ~ 1,2,3,4,5,6 ~ 1,2,3,...,6 ~~ 1,2,6 ~ 1,2,\ldots,7 ~ 1,2,\ldots,10^9
a=b=c=1 ~ (a,b,c)=(1,1,1) ~ a=1,b=1,c=1 ~~ a=b=1 ~ a=b=c=2
A\cap B=\{2,4\} ~ \{2,4\} ~~ \{2\}
(a,b)=(3,5) ~ (3,5) ~ a=3,b=5 ~~ \{3,5\} ~ (5,3)
f(x)=x ~ f(x)=x \text{ for all } x ~ f(x)=x,\text{ for all real } x ~~ f(x)=x+1 \text{ for all } x
f(x)=x+c ~ f(x)=x+c, \text{ where } c \text{ is a constant} ~~ f(x)=x
\frac{2mg\sin\theta}{3} ~ \frac23mg\sin\theta ~~ \frac23mg\cos\theta
2.50\times10^3 J ~ 2500 ~ 2500\text{ J} ~~ 2.50\times10^2 J ~ 2500 m
a_n=\{\begin{array}{ll}3,&n=1\\2^n,&n\ge2\end{array} ~ \begin{cases}3&n=1\\2^n&n\ge2\end{cases}
77 ~ \text{Therefore, the answer is } 77. ~~ \text{Therefore, the answer is not } 77
BCD ~ B, C, D ~ D,B,C. ~ \text{B, C and D} ~ B、C、D ~~ BC ~ B, C ~ A, B, C, D ~ B
A,C ~ AC ~ A and C ~~ A ~ C ~ A,B,C ~ (A,C)
2{,}5 ~ 2.5 ~ \frac52 ~~ 25 ~ 2,5 ~ 2
0{,}125 ~ \frac18 ~~ 125 ~ 0.0125
1{,}250 ~ 1250 ~~ 1.25
\frac13 ~ 0.333\ldots ~ 0.\dot{3} ~~ 0.33 ~ 0.\dot{3}\dot{4}
\frac{2}{11} ~ 0.\dot1\dot8 ~ 0.1818\ldots ~~ 0.18 ~ 0.\dot{8}\dot{1}
5\text{ m/s} ~ 5 m/s ~ 5 \frac{\text{m}}{\text{s}} ~ 5\text{ m s}^{-1} ~ 5 ~~ 5 m ~ 5 s/m ~ 5 m/h
3.0\times10^8 m/s ~ 3\times10^8 m/s ~ 3\times10^8 ~~ 3\times10^8 m
\max(a,b) ~ \max\{a,b\} ~~ \min\{a,b\}
11001_2 ~ 11001_{(2)} ~~ 11001_{(3)} ~ 11001
\text{DNE} ~ does not exist ~ \text{does not exist} ~~ exists
\tan\frac{\pi}{8} ~ \sqrt2-1 ~~ \sqrt2+1
a<b ~ b>a ~~ a>b ~ b<a ~ a\le b
y=x^2 ~ f(x)=x^2 ~ x^2 ~~ f(x)=x^3 ~ g=x^2
AB=5 ~ |AB|=5 ~~ |AB|=6
2 ~ \therefore x=2 ~~ \therefore x=3
\begin{cases}x+1&x>0\\1-x&x\le0\end{cases} ~ \begin{cases}1-x,&\text{if }x\leq0\\x+1,&x>0\end{cases}
\begin{cases}x+1&x>0\\1-x&x\le0\end{cases} ~~ \begin{cases}1-x&x>0\\x+1&x\le0\end{cases} ~ x+1 ~ x+1,1-x
\begin{cases}x+1&x>0\\1-x&x\le0\end{cases} ~~ \begin{cases}x+1&x>0\end{cases}
""")
# Parameters, families of values, words around answers
FAMILIES_OF_ANSWERS = lines(r"""
f(x)=cx \text{ for any constant } c ~ f(x)=kx, k\in\mathbb{R} ~ f(t)=at,\ a\in\mathbb{R} ~ f(x)=kx ~~ f(x)=c
f(x)=cx \text{ for any constant } c ~~ f(x)=x ~ f(x)=cx^2 ~ f(x)=xc+1 ~ f(t)=ct^2
f(x)=ax+b \text{ with arbitrary reals } a \text{ and } b ~ f(x)=mx+c,\ m,c\in\mathbb{R} ~~ f(x)=mx ~ f(x)=ax+a
f(x,y)=xy^2 ~ f(a,b)=ab^2 ~~ f(a,b)=ba^3 ~ f(a,b)=a^2b ~ f(x)=xy^2
f(x)=x^2 ~ f(t)=t^2 ~~ f(t)=xt ~ f(x)=t^2 ~ f(x)=c^2 \text{ for any constant } c ~ f
(t^2,t),\ t\in\mathbb{N} ~ (k^2,k) \text{ for any natural number } k ~ (k^2,k),k\in\mathbb{N}
(t^2,t),\ t\in\mathbb{N} ~~ (k,k^2),\ k\in\mathbb{N} ~ (k^2,k),\ k\in\mathbb{Z}
n(n+1) ~~ k(k+1),\ k\in\mathbb{Z} ~ n(n-1),\ n\in\mathbb{Z}
2n+1,\ n\in\mathbb{Z} ~ 2k+1, k\in\mathbb{Z} ~~ 2k+1,\ k\in\mathbb{N}
n\equiv1,2\pmod3 ~ 3\nmid n ~ n \text{ is not divisible by }3
n\equiv1,2\pmod3 ~~ 3\mid n ~ n\equiv1\pmod3 ~ n is divisible by 3 ~ mn is not divisible by 3
\text{all even integers} ~ 2k,k\in\mathbb{Z} ~ n\equiv0\pmod2 ~ 2\mid n ~~ n is odd ~ n is not even ~ 2k+1 ~ 2
\text{impossible} ~ No ~ it is not possible ~~ possible ~ yes ~ it is not impossible
x+y-3=0 \text{ or } x-y+1=0 ~ y=x+1 \text{ or } y=3-x ~~ y=x-1 \text{ or } y=3-x ~ y=x+1 ~ y=x+1,y=1+x
x^{3/2} ~ \sqrt{x^3} ~ x\sqrt x ~~ \sqrt{-x^3} ~ \sqrt{x^2} ~ x^{2/3}
x ~~ \sqrt{x^2} ~ |x|
1+\sqrt3i ~ 2e^{i\pi/3} ~~ e^{i\pi/3} ~ 2e^{-i\pi/3} ~ 2e^{\pi/3}
\{-1,0,1\} ~ \{0,1,-1\} ~~ -1\le k\le1 ~ \{x\in\mathbb{Z}:-1<x<1\} ~ [-1,1]
(2,0,-5) ~ 2\mathbf{i}-5\mathbf{k} ~ -5\hat k+2\hat i ~~ 2\mathbf{i}-5\mathbf{j} ~ 2i+5k ~ 2-5k
3 ~ 3\pmod7 ~ x\equiv3\pmod{7} ~~ 10\pmod7 ~ 3\pmod2 ~ x\equiv4\pmod7
n\ge3 ~ \text{all }n\ge3 ~ \text{all positive integers }n\ge3 ~~ \text{all odd }n\ge3 ~ \text{not all }n\ge3
①②③ ~ (1)(2)(3) ~ (1), (2), (3) ~ (1),(3),(2) ~~ (1)(2) ~ (1),(2) ~ 123
①③ ~ (1)(3) ~ (3)(1) ~ (1),(3) ~~ (1)(2) ~ 3 ~ 13 ~ (1)(2)(3)
\text{converges} ~ \text{The series converges} ~ \text{It is convergent}
\text{converges} ~~ The series diverges ~ It is not convergent
\text{Bob} ~ \text{Bob is the winner} ~ The winner is Bob ~ Bob can guarantee a win ~~ The winner is not Bob
\text{Bob} ~~ \text{the loser is Bob} ~ the opposite is Bob
(4+7k,1-3k),k\in\mathbb{Z} ~ x=11+7t, y=-2-3t, t\in\mathbb{Z}
(4+7k,1-3k),k\in\mathbb{Z} ~~ (4+7k,1+3k),k\in\mathbb{Z} ~ (4+7k,1-3k),k\in\mathbb{N}
f(x)=0,f(x)=x ~ f\equiv0 \text{ or } f(x)=x ~~ f\equiv1 \text{ or } f(x)=x ~ f\equiv0 ~ f(0)=0,f(x)=x
\max\{a,b\} ~ \operatorname{max}\{b,a\} ~ \frac{a+b+|a-b|}2 ~~ \min\{a,b\} ~ \frac{a+b-|a-b|}2
e^{2\pi i/5} ~ \cos\frac{2\pi}5+i\sin\frac{2\pi}5
e^{2\pi i/5} ~~ \cos\frac{2\pi}5-i\sin\frac{2\pi}5 ~ \sin\frac{2\pi}5+i\cos\frac{2\pi}5
\binom{2n}n ~ \frac{(2n)!}{n!n!} ~~ \frac{(2n)!}{n!} ~ \frac{(2n)!}{2n!}
|x| ~ \begin{cases}x&x\ge0\\-x&x<0\end{cases} ~ x \text{ if } x\ge0, -x \text{ if } x<0
|x| ~~ \begin{cases}x&x>0\\-x&x<0\end{cases}
|x| ~~ \begin{cases}x&x\ge0\\x&x<0\end{cases} ~ x \text{ if } x\ge0
|x| ~~ \begin{cases}x&x\ge0\\-x&\text{if not}\end{cases}
\begin{cases}n&n\text{ even}\\0&n\text{ odd}\end{cases} ~ 0 for odd n, and n for even n ~ \frac{n+n(-1)^n}2
\begin{cases}n&n\text{ even}\\0&n\text{ odd}\end{cases} ~~ n ~ \frac{n-n(-1)^n}2
\begin{cases}n&n\text{ even}\\0&n\text{ odd}\end{cases} ~~ n for odd n, 0 for even n ~ n,0 ~ 0
5 ~~ \begin{cases}5&n\ge1\\7&n\le0\end{cases} ~ 5 if x>-20, 7 if x<=-20
\{\frac{n\pi}3:n\in\mathbb{Z}\} ~ \{\frac{k\pi}3\mid k\in\mathbb{Z}\} ~~ \frac13 ~ \{\frac\pi3:n\}
2n+1,\ n\in\mathbb{Z} ~~ 2n-1 \text{ for all positive integers } n ~ 2i+1
y=Ce^{2x} ~ y=Ae^{2x} ~ y=Ke^{2x} ~~ y=e^{2x} ~ y=Ce^{x} ~ y=xe^{2x}
y=C_1e^x+C_2e^{-x} ~ y=Ae^x+Be^{-x} ~ y=c_1e^x+c_2e^{-x} ~~ y=Ae^x+Ae^{-x} ~ y=Ae^x
A=2B ~~ A=2C ~ B=2A
x=\frac c2 ~~ x=\frac k2
x=\frac{\pi}{4}+\frac{k\pi}{2},\ k\in\mathbb{Z} ~ x=\frac{(2n+1)\pi}{4},\ n\in\mathbb{Z}
x=\frac{\pi}{4}+\frac{k\pi}{2},\ k\in\mathbb{Z} ~ x=-\frac{\pi}{4}+\frac{n\pi}{2}, n\in\mathbb{Z}
x=\frac{\pi}{4}+\frac{k\pi}{2},\ k\in\mathbb{Z} ~~ x=\frac{\pi}{4}+k\pi, k\in\mathbb{Z}
x=\frac{\pi}{4}+\frac{k\pi}{2},\ k\in\mathbb{Z} ~~ x=\frac{\pi}{4}+\frac{k\pi}{2},\ k\in\mathbb{N}
x=\frac{\pi}{4}+\frac{k\pi}{2},\ k\in\mathbb{Z} ~~ x=\frac{\pi}{4} ~ y=\frac{(2n+1)\pi}{4},\ n\in\mathbb{Z}
x=(-1)^k\frac{\pi}{6}+k\pi, k\in\mathbb{Z} ~ x=\frac{\pi}{6}+2n\pi or x=\frac{5\pi}{6}+2n\pi, n\in\mathbb{Z}
x=(-1)^k\frac{\pi}{6}+k\pi, k\in\mathbb{Z} ~~ x=\frac{\pi}{6}+2n\pi, n\in\mathbb{Z}
x=(-1)^k\frac{\pi}{6}+k\pi, k\in\mathbb{Z} ~~ x=\arcsin\frac12+2n\pi, x=\frac{5\pi}{6}+2n\pi, n\in\mathbb{Z}
2023\pi+5k\pi, k\in\mathbb{Z} ~ 2023\pi+5n\pi, n\in\mathbb{Z} ~~ 2024\pi+5k\pi, k\in\mathbb{Z}
n=3k+1 ~ n\equiv1\pmod3 ~~ n\equiv2\pmod3 ~ even or odd
n+1 ~~ even or odd ~ 0\pmod1 ~ n\equiv0,1\pmod2 ~ k, even
B ~~ even or odd ~ 0\pmod1 ~ n\equiv0,1\pmod2 ~ k, even
k\pi,\ k\in\mathbb{Z} ~ n\pi, n\in\mathbb{Z} ~~ -\pi,0,\pi ~ 2k\pi,\ k\in\mathbb{Z} ~ k^3\pi,\ k\in\mathbb{Z}
x=\frac{\pi}{4}+\pi n ~ x=\frac{5\pi}{4}+\pi k,\ k\in\mathbb{Z} ~~ x=\frac{5\pi}{4}+2\pi k,\ k\in\mathbb{Z}
x\equiv 3\pmod 7 ~ x\equiv -4\pmod{7} ~ x=7k+3, k\in\mathbb{Z} ~ x=7k-4 ~ x=3+7k ~~ x\equiv 4\pmod 7
x\equiv 3\pmod 7 ~~ x\equiv 3\pmod 8 ~ x=7k+4 ~ x=3k+7
x\equiv 23\pmod{105} ~ 128+105k ~~ x\equiv 23\pmod{106} ~ x\equiv 23\pmod{210}
x\equiv -1\pmod{97} ~ 96\pmod{97} ~ 97k+290 ~~ -1\pmod{194} ~ 96\pmod{98} ~ 1\pmod{97}
n\equiv 1,5\pmod 6 ~ n\equiv\pm1\pmod 6 ~ n=6k+1 \text{ or } n=6k+5 ~~ n\equiv 1\pmod 6 ~ n\equiv 1,4\pmod 6
60^\circ ~ \frac{\pi}{3} ~ 60 ~~ \frac{\pi}{6} ~ \frac{\pi}{3}^\circ ~ \pi
22.5^\circ ~ 22^\circ 30' ~~ 22^\circ 3' ~ 30^\circ 22'
\frac{x^2}{2}+C ~ \frac12(x-1)(x+1)+C ~~ \frac{x^2}{2}+3+C ~ \frac{x^2}{2}+x+C
\frac{\sin^2x}{2}+C ~ -\frac{\cos^2x}{2}+C ~~ \frac{\cos^2x}{2}+C ~ \frac{\sin^2x}{2}
\left\lfloor\frac n2\right\rfloor+1 ~ \left\lceil\frac{n+1}{2}\right\rceil ~~ \left\lceil\frac n2\right\rceil
\left\lfloor\frac n2\right\rfloor+1 ~~ \lfloor\frac{n}{2}+2\rfloor ~ \lfloor\frac x2\rfloor+1
\lfloor\frac{n}{1000}\rfloor ~~ \lfloor\frac{n}{100}\rfloor
(1,2,3) \text{ and its permutations} ~ (1,2,3),(1,3,2),(2,1,3),(2,3,1),(3,1,2),(3,2,1)
(1,2,3) \text{ and its permutations} ~ \text{permutations of } (3,2,1) ~~ (1,2,3)
(1,2,3) \text{ and its permutations} ~~ (1,2,3) \text{ and its cyclic permutations}
(1,2,3) \text{ and its permutations} ~~ (1,2,3),\text{ but not its permutations}
(0,0,1) \text{ and cyclic permutations} ~ (1,0,0),(0,1,0),(0,0,1) ~~ (0,0,1)
7 ~ 7, since x>0 ~ 7, attained at x=1 ~ 7 \text{ because } x>0 ~~ 8, since 7 is too small ~ 5, since 7
7 ~~ 5; or 7, since 7
7 ~ 7, \text{ attained when } a=b ~~ 5, since 5; or 6, since 6; or 7 ~ 7, because n=7, and 8, because n=8
7 ~~ \text{for example } 5
\text{Bob} ~ Bob wins ~ \text{Bob has a winning strategy} ~ \text{Bob can always win} ~~ Alice wins
\text{Bob} ~~ \text{Bob loses}
\text{no such } n ~ \text{There is no such } n ~ \text{no solution} ~ \emptyset
\text{no such } n ~ \text{No such integer exists} ~~ no ~ No idea ~ no more than 5 ~ \text{no maximum} ~ 0
\text{Yes} ~ True ~ Yes, such a set exists ~ да ~~ No ~ yes, but only if n>1 ~ Yes, not always
\text{Yes} ~~ False ~ Yes. No. ~ Yes, false ~ Yes, it isn't
\infty ~ \text{infinitely many} ~ \text{infinitely many solutions} ~~ -\infty ~ \text{finitely many}
x\ne2 ~ \text{all real numbers except } 2 ~ \mathbb{R}\setminus\{2\} ~~ \text{all real numbers}
x\ne2 ~~ \text{all real numbers except } 3
x^2+\frac12x ~ x²+½x ~~ x²+2x
\frac{3\pi}{4} ~ ¾π ~ 3⁄4π ~~ 3½π ~ \frac{3}{4\pi}
\frac{\sqrt3}{2} ~ ½√3 ~~ \frac{1}{2\sqrt3}
x^{2/3}y ~~ x^2/3 y
A(r)=\pi r^2 ~ A(t)=\pi t^2 ~ \pi r^2 ~ A\left(t\right)=\pi t^2 ~~ \pi d^2 ~ A=\pi d^2
2^n,\ n\ge2 ~ 2^k, k\ge2 ~ 2^n, n>1 ~ 2^n \text{ for all integers } n\ge2 ~~ 2^n, n\ge3 ~ 2^n, n\ge12
2^n,\ n\ge2 ~~ 2^n, n\in\mathbb{N} ~ 2^n, n\ge-2 ~ 2^n, n>-1
2^n,\ n\ge-2 ~ 2^n ~ 2^k, k>-3 ~~ 2^n, n\ge2 ~ 2^n,n\in\mathbb{N}
2k\pi,\ k\in\mathbb{Z} ~ 2k\pi ~~ 2k\pi, k\in\mathbb{Z}, k\ge0 ~ 2k\pi, k\ne0
\gcd(m,n) ~ \operatorname{gcd}(m,n) ~ \text{gcd}(m,n) ~~ (m,n)
\text{sufficient but not necessary} ~ \text{sufficient but not necessary condition}
必要不充分 ~ 必要不充分条件 ~~ 充分不必要条件
No ~~ \text{no condition}
15 ~ 15本 ~ 15\text{本} ~~ 15万
\frac{\sqrt3}{2} ~ √3⁄2 ~~ √(3⁄2)
12 ~ १२ ~ 12. ~~ २१
0.000012 ~ 0.000\,012 ~ 0.0000120 ~~ 0.000\,12
-\ln2 ~ \ln\frac12 ~~ \ln2
\frac{2^n+(-1)^{n+1}}{3} ~ \frac{2^n-(-1)^n}{3} ~~ \frac{2^n+(-1)^n}{3}
\text{ellipse} ~ An ellipse ~ \text{the ellipse} ~~ \text{no ellipse}
""")
# Notations of other scripts and of programmers
REACH = lines(r"""
\frac14 ~ P(A|B)=\frac14 ~ \mathbb{P}(A)=\frac14 ~ \mathbb{E}[X]=0.25 ~~ P(A|B)=\frac13 ~ P(A|B)
P(A|B)=0.5 ~~ P(B|A)=0.5
6 ~ (f\circ g)(2)=6 ~ \phi(100)=6 ~ A(1,2)=6 ~ \text{Tom's age}=6 ~~ a_1+a_1=6
6 ~~ x+x=6 ~ x(2)=6
6 ~ |PQ|_{\min}=6 ~ 6\text{ erg/s} ~~ \text{lcm}(2,4)=6 ~ \gcd(12,18) ~ 6_9 ~ \$6_9
\sum_{k=1}^{n}\frac1k ~ \sum_{i=1}^n\frac1i ~~ \sum_{k=0}^{n}\frac1k
\sum_{k=1}^{n}\frac1k ~~ \sum_{k=1}^{m}\frac1k ~ \sum_{n=1}^{k}\frac1n
\{x\mid x=2k,\ k\in\mathbb{Z}\} ~ \{2k : k\in\mathbb{Z}\} ~ 2n, n\in\mathbb{Z} ~~ \{2k\mid k\in\mathbb{N}\}
\{x\mid x=2k,\ k\in\mathbb{Z}\} ~~ \{3k\mid k\in\mathbb{Z}\}
\{(t,2t)\mid t\in\mathbb{R}\} ~ (x,2x), x\in\mathbb{R} ~~ \{(t,3t)\mid t\in\mathbb{R}\} ~ t\in\mathbb{R}
f(x)=cx,\ c\in\mathbb{R} ~ f(x)=kx ~~ f(x)=cx,\ c\in\mathbb{Z} ~ f(x)=cx,\ c\ge0
f^{-1}(x)=2x ~ f^{-1}(y)=2y ~~ f'(x)=2x ~ f(x)=2x ~ f^{-1}(y)=2x
y=c_1+c_2x+c_3x^2 ~ y=C_1+C_2x+C_3x^2 ~~ y=C_1+C_1x+C_3x^2 ~ y=C_1+C_2x+C_3x^3
f(x)=ax+b,\text{ where a and b are constants} ~ f(x)=cx+d ~~ f(x)=cx+c
(2,3) ~~ x_1=3,x_2=2 ~ x=2,x=3
\frac{IR}{2} ~ \frac{RI}{2} ~ \frac{R\cdot I}{2} ~~ \frac{IR}{3} ~ \frac{I}{2R}
10-15i ~ 10-i15 ~ 10{-}15i ~~ 10{+}15i ~ 15-i10
3.02 ~ 3.0159\approx3.02 ~~ 3.00\approx3.02 ~ 3.00, \approx3.02
\cosh1 ~ \frac{e+e^{-1}}{2} ~~ \sinh1 ~ \frac{e-e^{-1}}{2}
\ln x ~ \log x ~~ \log_{10}x ~ \lg x
5!!=15 ~ 15 ~~ (5!)!=15
n!! ~~ (n!)! ~ n!
f(x)=x, f(x)=-x ~ f(x)=x for all x, and f(x)=-x ~~ f(x)=x for all x
5 ~ 5元 ~ 5\text{元} ~ 5 元 ~ x=5元 ~ 5 долларов ~ 5个 ~~ 5万 ~ 5倍 ~ 5万元 ~ 5 тысяч ~ 5 тысяч рублей ~ -5元
3\text{小时} ~ 3 ~ 3小时 ~ 3 hours ~ 3 часа ~~ 3\text{分钟} ~ 4小时
17 ~ 17个 ~ 共有17个 ~ Ответ: 17 ~ 17\text{ км} ~~ 71个 ~ 17倍 ~ не 17 ~ 答案不是17
\text{Да} ~ да ~ \text{да}. ~~ Нет ~ нет ~ не да
C ~ 故选：C ~ 答案：C ~ 故选C ~ 选项C ~ \text{答案：C} ~~ 故选：B ~ 答案：D ~ 不选C
①③④ ~ ①, ③, ④ ~ ①③和④ ~ \textcircled{1}\textcircled{3}\textcircled{4} ~ (1), (3), (4) ~~ ①③ ~ ①②④ ~ 134
2e_1+e_2 ~ e_2+2e_1 ~ 2e_{1}+e_{2} ~~ 2e+e ~ e_1+2e_2 ~ 2e_1e_2 ~ 3e
e_1 ~ e_{1} ~~ e_2 ~ e ~ e^1
E_{0} ~ E_0 ~~ E_1 ~ E ~ E^0
-\frac32 ~ -3./2 ~ \frac{-3.}{2} ~~ -3/4 ~ 3./2 ~ -3.2
14\text{ élèves} ~ 14 ~ 14 élèves ~~ 41 élèves
7,2 см ~ 7.2 ~ 7.2 см ~~ 72 ~ 7 см
(1,3] ~ x>1 \text{ and } x\le3 ~ 1<x,x\le3 ~~ x>1 \text{ or } x\le3 ~ x>3 \text{ and } x\le1 ~ x\le3
(-\infty,1)\cup(3,\infty) ~ x<1 \text{ and } x>3 ~ x<1 \text{ or } x>3 ~~ 1<x<3 ~ x<1
(0,3)\cup(3,5) ~ x>0, x<5, x\ne3 ~~ 0<x<5 ~ x\ne3
7 ~ f(1)+f(2)=7 ~ 2a+b=7 ~ \alpha+\beta=7 ~ k:=7 ~ \|v\|=7 ~~ x+1=7 ~ 2\alpha=7 ~ \sqrt{x}=7 ~ x\not=7
7 ~ x=7 ~~ 2(x+1)=7 ~ \ln x=7 ~ (x-3)^2=7 ~ 2x\approx7 ~ x\not\approx7 ~ \neg x=7 ~ \binom52=7
x+y=7 ~ y=7-x ~ 2x+2y=14 ~~ 7 ~ x+y=8 ~ x-y=7
x+y-2=0 \text{ or } x-y+4=0 ~ 2x+2y-4=0 \text{ or } x-y+4=0 ~~ 0,0 ~ (0,0) ~ x+y-2=0
(x-1)(y-2)=6 ~ (y-2)(x-1)=6 ~ xy-2x-y-4=0 ~~ 6
\frac43\pi ~ \frac{4}{3}\pi\approx4.19 ~~ \frac43\pi\approx4.9
(-\infty,5) ~ x<5 ~~ (x-1)<5 ~ \sin x<5 ~ \frac x5<5
5 ~ 5\text{ when } x=2 ~ 5 \text{ (at } x=2) ~ 5, \text{where }n=2 ~~ 2\text{ when }x=5
5 ~ 5\text{ (double root)} ~ 5\text{ is the minimum value} ~~ 5\text{ is the wrong value}
5 ~ \text{The value of } a+b \text{ is } 5 ~~ \text{the value of } -x \text{ is } 5
2^n ~ 2^n, n\in\mathbb{N} ~~ 2^n \text{ for } n=10
\sqrt5 ~ \sqrt5\ (\approx 2.236) ~ \sqrt5 \text{ or approximately } 2.236 ~~ \sqrt5 \text{ or } 2.236
1,2 ~ \text{either }1\text{ or }2 ~ \text{both }1\text{ and }2 ~ 1\text{ as well as }2 ~~ \text{neither }1,2
\text{both} ~ Both ~~ . ~ only ~ either ~ 5
(3,-1) ~ \begin{align*}x&=3\\ y&=-1\end{align*} ~ x = 3\\ y = -1 ~ (3,-1)^T ~~ x = -1\\ y = 3
(0,1),(2,3) ~ A(0,1), B(2,3) ~ (0,1),\\(2,3) ~~ A(1,0), B(2,3) ~ (0,1,2,3)
\text{I and III} ~ \text{I, III} ~ \text{I and III only} ~~ \text{I only} ~ \text{I and II only}
A,C ~ (A), (C) ~~ (A), (B) ~ (A),(C),(D)
\{1,2\} ~ \text{The set } \{1,2\} ~~ \text{excluding } \{1,2\} ~ \text{anything besides } \{1,2\}
12 ~ \text{least common multiple}=12 ~ 12 \text{ cm only} ~~ \text{wrong}=12 ~ \text{the opposite}=12
24 ~ 24\text{ eggs} ~~ 24\text{ Dozens} ~ 24\text{ dozen}
450 ~ Rs. 450 ~ \$450 ~~ -\$450 ~ Rs. 45
¥88 ~ 88 ~ 88元 ~~ ¥89
f(x)=\pm x ~ f(x)=x, f(x)=-x ~ f(x)=-x\text{ or }f(x)=x ~~ f(x)=x ~ f(x)=\pm 2x
f(x)=2x-1 ~ f(t)=2t-1 ~ 2x-1 ~~ f(t)=2x-1 ~ f(t)=2t+1 ~ g(x)=2x-1
7 ~ x+y=7 ~ \alpha+\beta=7 ~~ x+1=7 ~ -x=7 ~ \alpha+\beta=8
\text{(C) }15 ~ (C)15 ~ C: 15 ~ C.15 ~ \textbf{(C)}\,15 ~~ (B)15 ~ (C)16 ~ C+15
12 ~ (B)12 ~ B: 12 ~ (B)\frac{24}{2}=12 ~~ (B)13 ~ B. 13
42 ~ `42` ~ ```42``` ~ `x = 42` ~~ `43` ~ `4`2
x\le3 ~ x <= 3 ~ x=<3 ~ -x>=-3 ~~ x<3 ~ -x<=-3 ~ -x\ge3
x\ne3 ~ x!=3 ~ x<>3 ~~ x=3 ~ x! ~ x<3
x>3 ~ -x<-3 ~~ -x>-3 ~ x>-3 ~ x⩾3
n\ge3 ~ n=>3 ~ 3<=n ~~ n=3 ~ n>3 ~ n=<3
a>b ~~ a<b ~ a\ge b ~ b>a
36\text{ cm}^2 ~ 36平方厘米 ~ 36 ~~ 36平方米 ~ 36厘米
k=2,b=-1 ~ b=-1,k=2 ~ (k,b)=(2,-1) ~~ (k,b)=(-1,2) ~ b=2,k=-1
12^\circ30' ~ 12°30′ ~ 12^{\circ}30^{\prime} ~~ 12^\circ ~ 12^\circ3' ~ 30'
[\frac n2] ~ \lfloor\frac n2\rfloor ~ \left[\frac{n}{2}\right] ~~ \frac n2 ~ \lceil\frac n2\rceil
There are $8$ such triangles. ~ 8 ~ 8 triangles ~~ 9 triangles
(5,-3) ~ \text{center }(5,-3) ~~ \text{not }(5,-3) ~ outside (5,-3) ~ \text{the opposite of }(5,-3)
110 ~ \boxed{110 ~ \boxed{110} ~~ \boxed{11 ~ \boxed{11}0
60^\circ ~ \overarc{AB}=60^\circ ~ \widehat{AB}=60^{\circ} ~~ \overarc{AB}=61^\circ
\overarc{AB}=60^\circ ~ \widehat{AB}=60^\circ ~ 60 ~~ \overarc{CD}=60^\circ ~ 6
5 ~ 5 zentner ~~ 5 couples ~ 5 couple ~ 5 tenfold
x>3 ~ \{x>3\} ~ (3,\infty) ~~ x-3>0 ~ 2x+1>7 ~ 3>x (x\ne 1) ~ x_2<3
2xyz ~ 2x y z ~~ 2 ~ 2xy
x^2-1 ~ x^2-1,\text{ where }k\text{ is an integer}, k\in\mathbb{Z} ~~ x^2-1;cm ~ x^2-1,x\pm1
\{(x,y)\mid x+y=1\} ~ x+y=1 ~ \{(x,y):y=1-x\} ~~ \{(x,y)\mid x+y=2\}
3rd ~ 3^{\text{rd}} ~ 3\text{rd} ~~ 4th
Alice: 3, Bob: 5 ~ \text{Bob: 5, Alice: 3} ~~ Alice: 5, Bob: 3
5\text{ remainder }3 ~ 5 R 3 ~~ 5 ~ 3 R 5
y'=2x ~ \frac{dy}{dx}=2x ~ dy/dx=2x ~ 2x ~~ \frac{dx}{dy}=2x ~ y=2x ~ \frac{dy}{dx}=x
2 hours 30 minutes ~ 2\text{ h }30\text{ min} ~~ 2\text{ h }20\text{ min} ~ 2
15\text{ €} ~ 15 ~ €15 ~~ 15\text{ cents}
\text{Rs. }500 ~ 500 ~ ₹500
25\% ~ 25\text{ процентов} ~ \frac14 ~~ 25
80 км/ч ~ 80 km/h ~ 80 ~~ 80 km
x=5 ~ 5=x ~ 5 ~~ 5=y
\frac{\pi^2}{6} ~ \sum_{n=1}^\infty\frac1{n^2}=\frac{\pi^2}{6} ~ \Rightarrow\frac{\pi^2}6
x=45^\circ+180^\circ n ~ x=45^\circ+n\cdot180^\circ ~~ x=45^\circ+90^\circ n
n\pi,n\in\mathbb{Z} ~ kπ, k ∈ ℤ ~~ n\pi+k,k\in\mathbb{Z}
k^2,k\in\mathbb{Z} ~ n^2,n\in\mathbb{Z} ~~ kn,n\in\mathbb{Z}
(a) 5 (b) 7 ~ 5, 7 ~ \text{(a) }5\text{ (b) }7 ~~ (a) 7 (b) 5 ~ (a) 1 (b) 35
(-\infty,3)\cup(5,\infty) ~ (-∞, 3) U (5, ∞) ~ \{x|x<3\}\cup\{x|x>5\} ~~ (-\infty,5)
\begin{pmatrix}1\\-2\end{pmatrix} ~ (1,-2) ~ \langle1,-2\rangle ~~ (-2,1) ~ \begin{pmatrix}1&-2\end{pmatrix}
\text{no solution} ~ \varnothing ~ None ~ There are no real roots. ~~ 0 ~ \{0\}
\text{does not exist} ~ DNE ~ \text{The limit does not exist} ~~ exists
\frac{xyz}{6} ~ \frac{1}{6}zyx ~ xyz/6 ~~ \frac{xy}{6}
\frac x2 ~ 1/2 x ~ \nicefrac{x}{2} ~~ \frac{1}{2x}
2\sin x ~ \sin x\cdot2 ~~ \sin2x ~ \sin(2x)
\sin(x^2) ~~ \sin x\cdot x ~ x\sin x
x\ln x ~ \ln x\cdot x ~~ \ln(x^2)
(0,1)\cup(\sqrt2,2) ~ (\sqrt2,2)\cup(0,1) ~~ (0,2)\cup(\sqrt2,1)
I(0)e^{-t} ~ e^{-t}I(0) ~~ 0 ~ e^{-t}
\frac{2021!-1}{2021!} ~ 1-\frac1{2021!} ~~ 1-\frac1{2022!} ~ 1
\frac{x^{2023}}2 ~ x^{2023}/2 ~~ \frac{x^{2023}+1}2
5 ~ \text{five} ~ \text{exactly }5 ~ 面积为5 ~~ 面积不是5 ~ 5 or so ~ 5 feet six inches ~ \text{5 point five}
x=e^2 ~ e^2 ~~ x-e^2=0 ~ 2x=2e^2
3.14... ~~ 3.99... ~ 3
\log_25 ~ \frac{\ln5}{\ln2} ~~ \sin_25 ~ \log_52
\{x\mid x>2\} ~ x>2 ~~ \{x^2\mid x>2\} ~ \{x!\mid x>2\}
1<3 ~~ 1<2 ~ 2<1
8 \text{cis} 60^\circ ~ 8\operatorname{cis}\frac\pi3 ~~ 480^\circ ~ 8\operatorname{cis} 61^\circ
2 hours + 30 minutes ~~ 32 minutes
k\pi, k\in\mathbb{Z} ~~ k\pi, k\in\mathbb{Q}
[k\pi,k\pi+1], k\in\mathbb{Z} ~ [n\pi+\pi,n\pi+\pi+1], n\in\mathbb{Z} ~~ (n\pi,n\pi+1), n\in\mathbb{Z}
(B) 15 ~ 15 ~ B ~~ (B) (C) 15 ~ (B) B. 15
x+a \text{ for any integer } a ~ x+a, a\in\mathbb{Z} ~~ x \text{ for any integer } a
123 ~ 0123 ~~ 0,123 ~ 123... ~ .8123...
\frac52 ~ 2 125/250 ~~ \frac{2125}{250}
\frac13 ~ 0.333...
1,2,3 ~ 3,2,1 ~~ 1,2,3,...
ABC ~ \text{A, B, and C} ~ 选择A,B,C ~~ AB
A ~ A: the first ~~ A: BC
1+2i ~~ i(2-i)
9.8\text{ m/s}^2 ~ 9.8\,\mathrm{m\cdot s^{-2}} ~~ 9.8\text{ m/s}
2.24 ~ \text{approximately }2.24 ~ \simeq2.24 ~~ 2.25
""")


@pytest.mark.parametrize("line", REWRITES + GOLDS + REACH + FAMILIES_OF_ANSWERS, ids=lambda line: line[0][0])
def test_rewritten_right_answers_are_right_and_near_misses_are_wrong(line):
    right, wrong = line
    assert [answer for answer in right if not grade(answer, right[0])] == []
    assert [answer for answer in wrong if grade(answer, right[0])] == []


# Pairs for the sentences of "What counts as equal" in answers.py. Each line: the first words of a sentence
# (none: of the one above), perhaps a problem, as in `A formula that :: Factor $x^2-1$. ?? `, and the pairs
SENTENCE_PAIRS = r"""
Expressions :: \sqrt{242} ~ 11\sqrt{2} ~ \sqrt2\cdot11 ~~ 11\sqrt{3} ~ 12\sqrt{2} ~ \sqrt{240} ~ 11+\sqrt2
But an unfinished :: 7 ~ 7.0 ~ x=7 ~~ 3+4 ~ 10-3 ~ \frac{14}{2} ~ 2^3-1 ~ |-7|
:: 2x+3 ~ 3+2x ~~ 2x+1+2 ~ x+x+3 ~ 2(x+1)+1
An answer that :: \frac12 ~ (\frac12) ~ $\frac{1}{2}$ ~~ \frac12) ~ (\frac12 ~ \frac12+ ~ \frac12]
:: 3 ~~ 3@\frac{1}{2} ~ 3# ~ 3 4 ~ 3^ ~ 3\sqrt
A decimal may be rounded if :: 1/3 ~ 0.3333333 ~ 0.333333 ~ .33333333 ~~ 0.33 ~ 0.33333 ~ 0.333334
:: \pi ~ 3.141593 ~ 3.14159 ~~ 3.1416 ~ 3.141597 ~ 3
Two decimals :: 1234567.8 ~ 1234567.80 ~ 1234567.800 ~~ 1234567.9 ~ 1234567.7
Integers :: 1000000 ~ 1000000.0 ~ 10^6 ~~ 1000001 ~ 999999 ~ 1000000.1 ~ 999999.9999999
:: 12345678x ~ x\cdot12345678 ~~ 12345679x ~ 12345678.1x
In an expression :: \frac{11}{6}\pi ~ 1.8333333333333\pi ~ 1.833333333333\pi ~~ 1.83\pi ~ 1.83333333\pi
:: 1.833333\pi ~ \frac{11}{6}\pi ~ 1.8333333\pi ~~ 1.83\pi ~ 1.8334\pi
If the gold answer is a number :: 3.1415927 ~ 3.14159265 ~ \pi\approx3.1415927 ~~ \pi ~ 3.1415928
A percent :: 5\% ~ 0.05 ~ \frac{1}{20} ~~ 5 ~ 0.5\%
Numbers with :: 101_2 ~ (101)_2 ~ 101_{\text{two}} ~~ 5 ~ 101 ~ 5_{10} ~ 12_3
:: 5 ~~ 101_2 ~ 5_{10} ~ 5_6
Units are :: 1\text{ m} ~ 1 meter ~ 1 metre ~~ 100\text{ cm} ~ 0.001 km ~ 100
:: 180^\circ ~ \pi ~ 180 degrees ~~ 2\pi ~ \pi^\circ
If only the gold :: 10 cm ~ 10 ~ 10.0 ~ x=10 ~~ 100 ~ 10 m ~ 0.1
:: 3\pi\text{ cm} ~ 3\pi ~ 3\pi cm ~ 3π cm ~~ 3\pi cm^2 ~ 3\pi m ~ 3\pi mc
:: 3\pi\text{ m} ~ 3\pi ~ 3\pi\text{ meters} ~~ 3 ~ 3\pi\text{ s}
If only the answer :: 28 ~ 28 pizzas ~ 28元 ~ 28 people ~ 28 left ~~ 28 halved ~ 28万 ~ 28 pizza ~ 28 dozen
After -1 to 1 :: 1 ~ 1 pizza ~ 1\text{ red ball} ~~ 1 halved ~ 1 nearly ~ 1 third
If only one :: 15 ~ (B) 15 ~ \text{B. }15 ~~ (B) 16 ~ (B) 1 ~ B
:: (B) 15 ~ 15 ~ 15.0 ~~ 16 ~ (C) 15 ~ C
Several letters :: BD ~ B, D ~ (B), (D) ~ \{B,D\} ~~ B ~ B, C ~ B, C, D ~ \{B\}
The order counts :: (1,2,3) ~ (1.0,2,3) ~~ (1,3,2) ~ 1,2,3
:: Write $2$, $\frac12$, $-1$ in ascending order. ?? -1,\frac12,2 ~ -1,0.5,2 ~~ 0.5,-1,2 ~ \{2,\frac12,-1\}
:: Find the three roots. ?? -1,\frac12,2 ~ 0.5,-1,2 ~ \{2,\frac12,-1\} ~~ (2,-1,\frac12) ~ -1,2,2
`\{2,2,3\}` equals :: \{2,3\} ~ \{2,2,3\} ~ \{3,2,3\} ~~ \{2,2\} ~ 2,2,3 ~ (2,2,3) ~ \{2,2,4\}
A column :: (1,2) ~ \begin{pmatrix}1\\2\end{pmatrix} ~~ \begin{pmatrix}2\\1\end{pmatrix}
:: \begin{pmatrix}3\\-1\\0\end{pmatrix} ~ (3,-1,0) ~ \langle3,-1,0\rangle ~~ (3,-1) ~ \{3,-1,0\} ~ (3,0,-1)
A solved inequality :: 1<x<2 ~ (1,2) ~ ]1,2[ ~~ [1,2] ~ [1,2) ~ (1,3) ~ 1,2 ~ 1<y<2
:: (1,\infty) ~ x>1 ~ 1<t ~~ x\ge1 ~ 2x>2 ~ x-1>0 ~ x+y>1
`x>1 and x<2` (or :: (1,2) ~ x>1 and x<2 ~ x>1, x<2 ~ x<2, 1<x ~~ x>1 or x<2 ~ x<1 and x>2 ~ x<1, x>2
:: (-\infty,1)\cup(2,\infty) ~ x<1 and x>2 ~ x<1 or x>2 ~ x<1, x>2 ~~ x>1 and x<2 ~ x>1 or x<2 ~ x<1
`x\ne3` removes :: \mathbb{R}\setminus\{3\} ~ x\ne3 ~ x<3 or x>3 ~~ x=3 ~ x<3 ~ \mathbb{R} ~ x\ne2
:: [0,3)\cup(3,5] ~ 0\le x\le5, x\ne3 ~ x\ne3 and 0\le x\le5 ~~ 0\le x\le5 ~ x\ne3 ~ [0,5]
Upper and lower :: \text{Yes} ~ yes ~ YES ~~ No ~ y
:: r^2R ~ Rr^2 ~~ R^2r ~ r^3
An identity :: x^2+2x+1 ~ (x+1)^2=x^2+2x+1 ~ x(x+2)+1=x^2+2x+1 ~~ (x+2)^2=x^2+2x+1 ~ (x+1)^2=x^2+2x
:: x^2-y^2 ~ (x-y)(x+y)=x^2-y^2 ~~ x+y=x^2-y^2 ~ (x-y)^2=x^2-y^2
`x=5` and :: 5 ~ x=5 ~ f(1)+f(2)=5 ~ AB+BC=5 ~~ x+1=5 ~ 2x=5 ~ f(1)+1=5 ~ x-1=4 ~ f(1)+f(2)=4
If the gold answer is `x=5` :: x=5 ~ 5=x ~ x_1=5.0 ~~ y=5 ~ x-5=0 ~ 5-x=0 ~ 2x=10 ~ f(x)=5
If the gold answer is an :: x+y=5 ~ y=5-x ~ 2x+2y=10 ~~ 5 ~ x+y ~ x+y=6 ~ x=5 ~ (2,3)
:: ab=6 ~ ba=6 ~~ 6 ~ a+b=6
:: PA\cdot PB=6 ~ 6 ~ PB\cdot PA=6 ~~ PA+PB=6 ~ 5
`x=2, y=3` equals :: (2,3) ~ x=2, y=3 ~ y=3, x=2 ~~ x=3, y=2 ~ y=2, x=3 ~ x=2, x=3 ~ 2, 3
`f(t)=2t` and :: f(x)=2x ~ f(t)=2t ~ y=2x ~ f(a)=2a ~~ f(t)=2x ~ g(x)=2x ~ y=2t ~ x=2y ~ f(2)=2x
`e_1` is :: e_1 ~ e_{1} ~ 1e_1 ~~ e ~ 2.7182818 ~ e_2 ~ 1 ~ e^1
`[x]` is :: [x]+1 ~ \lfloor x\rfloor+1 ~ [x+1] ~~ \lceil x\rceil ~ x+1 ~ \{x\}+1
A condition :: k\pi,k\in\mathbb{Z} ~ k\pi ~ k\pi (k\in\mathbb{Z}) ~~ k\pi,k\in\mathbb{N} ~ k\pi, k>0
If the gold answer has :: k\pi, k\in\mathbb{Z} ~ n\pi, n\in\mathbb{Z} ~ m\pi, m\in\mathbb{Z} ~~ 2n\pi ~ x\pi
:: f(x)=cx for any constant c ~ f(x)=kx ~ f(x)=ax ~~ f(x)=x ~ f(x)=kx^2 ~ f(x)=xx
:: n^3 ~ n^3,n\in\mathbb{Z} ~~ k^3 ~ k^3,k\in\mathbb{Z}
Also the CONSTANT_NAMES :: y=Ce^x ~ y=Ae^x ~ y=Ke^x ~~ y=e^x ~ y=Ae^{2x} ~ y=xe^x ~ y=be^x ~ y=2e^x
:: y=A\cos x+B\sin x ~ y=C_1\cos x+C_2\sin x ~~ y=A\cos x+A\sin x ~ y=A\cos x
:: V=Kr ~~ V=Cr ~ V=r
If one of two :: \frac{3\pi}4+k\pi, k\in\mathbb{Z} ~ -\frac\pi4+k\pi ~ -\frac\pi4-n\pi ~~ \frac\pi4+k\pi
:: \frac{3\pi}4+k\pi ~ -\frac\pi4+k\pi,k\in\mathbb{Z} ~~ -\frac\pi4+k\pi ~ \frac{3\pi}4+2k\pi,k\in\mathbb{Z}
`7k+3` and :: 3 \pmod 7 ~ 7k+3 ~ -4 \pmod 7 ~ 7n-4 ~ 10\pmod7 ~~ 7k+4 ~ 3k+7 ~ 14k+3 ~ 3\pmod{14}
`\log` has :: \log x ~ \log_{10}x ~ \lg x ~~ \log_2x ~ \log_ex
But if one :: \ln2 ~ \log2 ~ -\log\frac12 ~~ \log_{10}2 ~ \lg2 ~ \log_22
If both :: \sqrt[3]{x^2} ~ x^{2/3} ~~ x^{3/2} ~ -x^{2/3}
:: \sqrt{a^2b} ~ a\sqrt b ~ |a|\sqrt b ~~ b\sqrt a ~ ab
:: |x|\sqrt2 ~ \sqrt{2x^2} ~~ x\sqrt2 ~ 2|x|
But `x` :: x ~ 1x ~~ \sqrt{x^2} ~ (x^2)^{1/2} ~ |x|
:: \sqrt{4x^2} ~ 2|x| ~ 2\sqrt{x^2} ~~ 2x ~ -2x
`60^\circ` equals :: \frac\pi3 ~ 60^\circ ~ 60° ~~ 30^\circ ~ 60 ~ 3^\circ
`22^\circ30'` equals :: 22.5^\circ ~ 22^\circ30' ~ 22°30′ ~~ 22^\circ5' ~ 22.3^\circ ~ 22^\circ
Cases are :: \frac{n+n(-1)^n}2 ~ 0 if n is odd, n if n is even ~~ 0 if n is even, n if n is odd ~ n ~ 0, n
:: n for even n, 0 for odd n ~ \begin{cases}0&n\text{ is odd}\\n&n\text{ is even}\end{cases} ~~ n if n is even
`3\nmid n` and :: n\equiv1,2\pmod3 ~ 3\nmid n ~ n is not divisible by 3 ~~ 3\mid n ~ n\equiv0\pmod3 ~ 2\nmid n
`(4-7k,1+3k)` equals :: (4+7k,1-3k),k\in\mathbb{Z} ~ (4-7k,1+3k) ~ (11+7n,-2-3n) ~~ (4-7k,1-3k) ~ (1+3k,4-7k)
:: (4+7k,1-3k) ~ (4-7k,1+3k) for integers k ~~ (4-7k,1+3k) ~ (4-7k,1-3k) for integers k
`2i-3j` equals :: (2,-3) ~ 2i-3j ~ -3j+2i ~~ 2i+3j ~ 3i-2j ~ 2j-3i ~ 2-3j ~ 2i-3
`\cos x+i\sin x` :: e^{ix} ~ \cos x+i\sin x ~ i\sin x+\cos x ~~ \cos x-i\sin x ~ \sin x+i\cos x
:: e^{i\pi/3} ~ \frac12+\frac{\sqrt3}2i ~ \frac{1+\sqrt3i}2 ~~ \frac12-\frac{\sqrt3}2i ~ \frac{\sqrt3}2i
`3 \pmod 7` equals :: 3 ~ 3 \pmod 7 ~ x\equiv3\pmod7 ~~ 10\pmod7 ~ 4\pmod7 ~ 3\pmod2 ~ -4\pmod7
:: 3\pmod7 ~~ 3
Antiderivatives :: \frac12\sin^2x+C ~ -\frac12\cos^2x+C ~ -\frac14\cos2x+C ~~ \frac12\cos^2x+C
:: \frac{(x+1)^2}2+C ~ \frac{x^2}2+x+C ~~ \frac{x^2}2+C ~ \frac{x^2}2+x
But `x+2+C` :: x+C ~ C+x ~ x+K ~~ x+2+C ~ x-2+C ~ 2x+C
Formulas with :: \lceil\frac n3\rceil ~ \lfloor\frac{n+2}3\rfloor ~~ \lfloor\frac{n+1}3\rfloor ~ [\frac n3]+1
:: \lfloor\frac n{100}\rfloor ~ [\frac n{100}] ~~ 0 ~ \lfloor\frac n{200}\rfloor
:: \lfloor\frac{x+1}2\rfloor ~~ \lceil\frac x2\rceil
`(1,2,3) and :: (1,2,3),(1,3,2),(2,1,3),(2,3,1),(3,1,2),(3,2,1) ~ (1,2,3) and its permutations ~~ (1,2,3)
:: (1,1,4) and its permutations ~ (1,1,4),(1,4,1),(4,1,1) ~~ (1,1,4),(1,4,1) ~ (1,1,5) and its permutations
A reason :: 5 ~ 5, since x>0 ~ 5 because 2+3=5 ~~ 6, since x>0 ~ 6, since 5 is too small ~ since 5
`Bob wins` equals :: Bob ~ Bob wins ~ Bob can always win ~~ Alice wins ~ Bob loses ~ Bob does not win
A formula that :: Factor $x^2-1$. ?? (x-1)(x+1) ~ (x+1)(x-1) ~~ x^2-1 ~ -1+x^2
:: Is $\sqrt2$ or $\sqrt3$ larger? ?? \sqrt3 ~ \sqrt3 ~~ \sqrt2
In `3+4=7` :: 7 ~ 3+4=7 ~ 3+4=2+5=7 ~~ 3+4=8 ~ 7=3+4 ~ 3+5=7 ~ 3+4=7=8 ~ 2+5=3+5=7 ~ 3+4=7+1
So `6=7` :: 7 ~ 6+1=7 ~ 7.0=7 ~~ 6=7 ~ 7=6 ~ 7=7+1 ~ 8=7
After `\approx` :: \frac56 ~ \frac56\approx0.83 ~ \frac56\approx0.84 ~~ \frac56\approx0.9 ~ \frac67\approx0.83
:: 100 ~ 99+1=100 ~~ 100\approx100.5 ~ 100\approx101
A decimal may be rounded to :: 3.02 ~ 3.0159\approx3.02 ~ 3.02\approx3.0 ~~ 3.00\approx3.02 ~ 3.0\approx3.02
A gold answer with :: 0.83 ~ \frac56\approx0.83 ~ x=\frac56\approx0.83 ~~ \frac56 ~ \frac56\approx0.84
:: 3 ~~ \pi\approx3 ~ 2.99\approx3
"""
SPECIFICATION = {}  # first words -> tuples of a problem, a gold answer, an answer, and whether it is right
for row in SENTENCE_PAIRS.strip().splitlines():
    start, pairs = row.split(":: ")
    if start:
        SPECIFICATION[start.strip()] = examples = []
    problem, _, pairs = pairs.rpartition(" ?? ")
    [(right, wrong)] = lines(pairs)
    examples += [(problem, right[0], answer, answer in right) for answer in right[1:] + wrong]
# These have no pairs. The second is test_a_gold_answer_that_is_not_read_as_a_whole_is_an_error.
SPECIFICATION |= {"The rules are in values.py": [], "`grade` may raise ValueError": []}
_, _, SENTENCES = " ".join(answers.__doc__.split()).partition("What counts as equal: - ")
SENTENCES = re.split(r"\. (?:- )?", SENTENCES)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_each_sentence_about_equality_has_two_right_and_two_wrong_answers(sentence):
    assert len(SPECIFICATION) == len(SENTENCES)
    [start] = filter(sentence.startswith, SPECIFICATION)
    found = [0, 0]
    for problem, gold, answer, is_right in SPECIFICATION[start]:
        is_copied = problem and repeats(answer, gold, problem)
        assert (grade(answer, gold) and not is_copied) == is_right, (gold, answer)
        found[is_right] += 1
    assert min(found) >= 2 or not SPECIFICATION[start]
    own = sentence.replace("(see `repeats`)", "") if any(found) else ""
    assert [example for example in re.findall("`(.+?)`", own) if example not in SENTENCE_PAIRS] == []


def test_a_formula_of_the_problem_is_no_answer():
    for (problem, gold, *own), copied in lines(r"""
$\sqrt{242}$ ~ 11\sqrt2 ~ \sqrt{242}=11\sqrt2 ~~ x=(\sqrt{242})\approx15.6 ~ \{\sqrt{242}\}
$\sqrt{242}$ ~ 11\sqrt2 ~ 11\sqrt2\text{ units} ~~ \sqrt{242}\text{ units} ~ \frac{\sqrt{242}}1
Factor $x^2-9$ ~ (x-3)(x+3) ~ x^2-9=(x+3)(x-3) ~~ x^2-9=x^2-9 ~ x^2-9\text{ units} ~ (x-3)(x+3)=x^2-9
Write $y=\frac92.$ ~ 4.5 ~ 4.50 ~~ \frac{9}2
Factor \begin{align*}x^2+2x\end{align*} ~ x(x+2) ~ (x+2)x ~~ 2x+x^2 ~ 1\cdot(x^2+2x)^1
Is $y=x^2+2x$ true? ~ y=x^2 + 2x ~ x^2+2x ~ x(x+2)
Is $y=x^2+2x$ true? ~ (x+1)^2=y+1 ~ (1+x)^2=1+y ~~ y=x^2+2x ~ 2x+x^2=y
The line $y-2x+1=0$ ~ y=2x+1 ~ 2x-y+1=0
For $x\in\mathbb{R}$ or $-5$. ~ \mathbb{R} ~ x\in\mathbb{R}
For $x\in\mathbb{R}$ or $-5$. ~ -5.0 ~ -5
Simplify $(1)\ \sqrt{12}$, $a=\sqrt{12}, b=2$ ~ 2\sqrt3 ~ 2\sqrt3 ~~ \sqrt{12} ~ 1\sqrt{12} ~ \sqrt[2]{12}
Simplify \[\frac{x^2-9}{x-3}\] ~ x+3 ~ 3+x ~~ (x^2-9)/(x-3) ~ \frac{x^2-9}{x-3}
Is it (A) $\frac12$ or (B) $\frac13$? ~ A ~ (A) \frac12 ~ A
Which of $\sqrt2$, $\sqrt4$, $\sqrt7$ are irrational? ~ \sqrt2,\sqrt7 ~ \sqrt7,\sqrt2
Sort $2$, $-1$, $0.5$ in increasing order ~ -1,0.5,2 ~ -1,0.5,2 ~~ 2,-1,0.5
From least to greatest: $b$, $a$ ~ a,b ~ a,b ~~ b,a
"""):
        both = [answer for answer in own + copied if answer]
        assert all(grade(answer, gold) for answer in both)
        assert [answer for answer in both if repeats(answer, gold, problem)] == list(filter(None, copied))


@pytest.mark.parametrize("empty", [
    r"\begin{cases}\end{cases}", r"\begin{cases}\\\end{cases}", r"\{\begin{cases}\end{cases}\}",
    r"\begin{matrix}\end{matrix}", r"\{\begin{matrix}\end{matrix}", r"\{\}", "()", "[]", "", ",", ";",
    "x={}", "f(x)={}", r"{}\text{ cm}", "x={},y={}", "x>{}", r"x=\begin{cases}\end{cases}",
    r"\{\text{permutations}\}", r"\{\{\text{its permutations}\}\}"])
def test_an_answer_without_parts_equals_no_gold_answer(empty):
    golds = ("5", r"\frac12", "x+1", "(1,2)", "A", "x=5", "[0,1]", r"5\text{ cm}", r"\{1\}", "1,2", "yes")
    golds += ("y=2x+1", r"\pi", "2:3", r"k\pi, k\in\mathbb{Z}", r"3\pmod7", "x>2", r"5\%", "(A) 5")
    assert not any(grade(empty, gold) for gold in golds)


@pytest.mark.parametrize("identity", [
    "(x+1)^2=x^2+2x+1", "(x-y)(x+y)=x^2-y^2", r"\frac{x^2-1}{x-1}=x+1", r"\frac{0x}{0}=1", r"\frac{0x}{0}=y"])
def test_an_identity_equals_no_equation(identity):
    golds = ("x^2+y^2=4", "x+y=8", "y=2x+1", "y^2=4x", r"\frac{x^2}{9}+y^2=1", "3x-4y+5=0")
    assert not any(grade(identity, gold) for gold in golds)


@pytest.mark.parametrize("answer", [
    r"2\infty", r"\frac{\infty}{2}", r"\infty\cdot\pi", r"0\infty", r"\infty-\infty", r"2^{\infty}"])
def test_a_calculation_with_infinity_equals_nothing(answer):
    """math-verify calls some of them equal to some numbers, but not each time."""
    golds = (r"\ln 2", r"\frac{\pi}{4}", "e^5", r"2\pi", r"\infty", "0", "x+1")
    assert not any(grade(answer, gold) for gold in golds * 2)


def test_only_one_rounding_may_follow_an_answer():
    assert grade(r"\frac56\approx0.83", "0.83")
    assert not grade(r"\frac56\approx0.82\approx0.83\approx0.84", "0.83")


@pytest.mark.parametrize(("answer", "gold"), [
    (r"\text{not divisible by }1", "n"), ("ln", r"(k,k+1), k\in\mathbb{Z}"),
    (r"\begin{cases}\end{cases}", r"\begin{cases}1&x>0\\2&x<0\end{cases}"),
    ("(10/3)!", r"\pi"), ("6=110_2", "110_2"), (r"3=\text{no}", "no"), (r"\frac{0\pi}{0}", r"\pi"),
    (r"\lfloor\frac{0\pi}0\rfloor", r"2\pi"), (r"x\det\begin{pmatrix}\text{no}\end{pmatrix}", "x+1"),
    (r"\text{permutations of }1,2", r"k\pi, k\in\mathbb{Z}"), (r"y=C_1x,2\approx2", "y=Cx"),
    (r"\begin{pmatrix}x+y\end{pmatrix}", "(x,y)"), (r"\begin{pmatrix}i=\text{no}\end{pmatrix}", r"k\pi"),
    ("(1,{})", r"(1,\{2,3\})"), (r"\{\text{permutations}\}", "1,2"),
    (r"\inftyBk\in\mathbb{Z}", r"n\pi, n\in\mathbb{Z}"),
    (r"y=4+\left[\begin{array}{c}1\\-3\end{array}\right]", "x^2+y^2=25")])
def test_no_answer_raises(answer, gold):
    assert not grade(answer, gold)


@pytest.mark.parametrize("gold", ["D)", r"3@\frac{1}{2}", r"\frac34 @ 2", r"5 \& 7", r"x \Rightarrow y"])
def test_a_gold_answer_that_is_not_read_as_a_whole_is_an_error(gold):
    with pytest.raises(ValueError, match="cannot be parsed"):
        grade("z+1", gold)


@pytest.mark.parametrize("right", [right for right, _ in REWRITES], ids=lambda right: right[0])
def test_rewrites_equal_one_another(right):
    """Skips lines with units or names: `10 cm` and `10 m` both equal `10`, but do not equal each other."""
    if not any(mark in " ".join(right) for mark in ("text", "=", "pizzas", "dollars", "degrees", "million")):
        assert all(grade(a, b) for a in right for b in right)


@pytest.mark.parametrize("unit", [
    "(", ")", "[", "{", r"\{", "(1,", "1,", "1 ", "1,234", "x<", "x=", r"\pm", r"\cup", r"\text{a}",
    r"\text{", '"', "a ", "5 cm ", r"\sin" * 10 + "1" * 60,
    r"\frac{", r"\frac1", r"\over", "{\\over", "_", "^", "9" * 50, r"\begin{pmatrix}", "&", r"\\", "½",
    "√(", "^(", ":1", "|", "**", r"\boxed{", r"\sin 1°", r"\sin ", r"\pmod", r"1\pmod7", r"\{1\}\setminus",
    "the answer is ", "the ", "m+", r"\angle A", r"1\approx 1", r"\begin{matrix}1\end{matrix}", "2(", "1th",
    r"\sqrt(", "0.\\overline{", "$", "1e9", "\u0663", "\ud800", "\0", "%", r"\$", "(1) a 2", "A,", "a=",
    "max ", r"1,2,\ldots,", r"33\ldots", "0{,}", r"\text{yes, }", r"\{\begin{matrix}", r"\begin{cases}a,b\\",
    "5 m/s", "x>0,", r"x,k\in Z", "for all x,", "if k is an ", "5 square m per ", r"\mathrm{s}^{-1}", "1/2=",
    "an ", "x_1,", "e,", ",if ", r"m\max", r"\betaa", "(a) 5 (b) ", '"A":1,', "degrees+", "...", r"\sin x*",
    "U(", "x)", "n:", ": m", "x" + "°" * 400, " m_"])
def test_the_trainer_spends_little_on_any_answer(unit):
    """Nothing limits quick_grade's time in the trainer. The steps of regular expressions grow at most with
    the square of the length. So 2,000 characters, the longest answer, need less than 3 * 10^8 steps."""
    def count(length):
        text = (unit * length)[:length]
        read.cache_clear()
        with Steps(tokens, trees, statements, answers, values) as steps:
            assert not any(quick_grade(text, gold) for gold in ("7", "(1,2)", "x>2"))
        return steps.count

    text = (unit * 2000)[:2000]
    for gold in ("7", "7+x", "(1,2)", r"\{1,2,3\}", r"5\text{ cm}", "x>2"):
        assert not quick_grade(text, gold)
    few, many = count(20), count(80)
    assert many <= 16 * few and many * (2000 / 80) ** 2 < 3e8


@pytest.mark.parametrize(("answer", "gold"), [
    ("f(2)", "g(1)"), ("f(1,2)", "f(3,1)"), ("f(1)+g(2)", "f(2)+g(1)"), ("f(0)", r"f(2\pi)"),
    ("f_1(1,2)", "f_1(2,1)"),
    (r"x\gcd(3,5)", r"x\gcd(4,4)"), (r"x\det M", r"x\det N")])
def test_unknown_functions_are_equal_only_with_equal_names_and_arguments(answer, gold):
    assert not grade(answer, gold) and grade(f"2({answer})", f"{answer}+{answer}")
    assert grade(f"x+{gold}", f"{gold}+x")


def test_values_are_computed_of_expressions_only():
    pairs = [(x, right[0]) for right, wrong in REWRITES for x in right[1:] + wrong if x]
    sure = [pair for pair in pairs if not set("".join(pair)) & set("\\=√")]
    asked = [pair for pair in sure if quick_grade(*pair) is None]
    assert len(sure) > 60 and len(asked) < 0.2 * len(sure), asked
    assert quick_grade("2x+2", "2(x+1)") is None and grade("2x+2", "2(x+1)")
