"""Answers that the reward `math` reads, in the spellings of people, and those that are wrong."""

import pytest

from llamarl.core.config import RewardConfig
from llamarl.core.records import Prompt
from llamarl.scoring import math_reward

CONFIG = RewardConfig(functions=["math"])
RIGHT = [
    ("1\u2009000", r"\boxed{1000}"),
    ("1\u00a0000", r"\boxed{1000}"),
    (r"12\,345\,678", r"\boxed{12345678}"),
    ("1000", r"\boxed{1\,000}"),
    ("1000", r"\boxed{1~000}"),
    ("1_000", r"\boxed{1000}"),
    ("1.234.567", r"\boxed{1234567}"),
    ("1.000,50", r"\boxed{1000.5}"),
    ("-1 000", r"\boxed{-1000}"),
    ("1 000 km", r"\boxed{1000}"),
    (r"So it is \boxed{1 000}.", r"\boxed{1000}"),
    ("(100, 200)", r"\boxed{(100,\ 200)}"),
    ("½", r"\boxed{\frac12}"),
    ("-2½", r"\boxed{-2.5}"),
    ("10²", r"\boxed{100}"),
    ("√2", r"\boxed{\sqrt{2}}"),
    ("1/3", r"\boxed{0.\overline{3}}"),
    ("0.(3)", r"\boxed{1/3}"),
    (r"90^\circ", r"\boxed{90°}"),
    ("-5", "\\boxed{\u20135}"),
    ("5", r"\boxed{5.}"),
    ("6.02e23", r"\boxed{6.02\times 10^{23}}"),
    ("3.5", r"\boxed{3~\frac{1}{2}}"),
    ("12:00", r"\boxed{12{:}00}"),
    ("5", r"so \boxed{5}. Answers stand in \boxed{}."),
    ("5", r"\boxed{3}, then \boxed{5} and \boxed{"),
    ("(1, 1e-9)", r"\boxed{(1, 10^{-9})}"),
    ("1\u2019000", r"\boxed{1'000}"),
    ("2**10", r"\boxed{1024}"),
    ("2 ** 3", r"\boxed{8}"),
    ("10^-3", r"\boxed{0.001}"),
    ("1.5\u00b710^3", r"\boxed{1500}"),
    ("1.5x10^3", r"\boxed{1500}"),
    (r"0.\bar{3}", r"\boxed{1/3}"),
    ("2 1/2 x", r"\boxed{\frac{5x}{2}}"),
    ("$1 000$", r"\boxed{1000}"),
    (r"\(1 000\)", r"\boxed{1000}"),
    ("2 3/4%", r"\boxed{2.75\%}"),
    ("12.50%", r"\boxed{12.5%}"),
    ("1,200%", r"\boxed{1200\%}"),
    ("1/2%", r"$\boxed{0.5}\%$"),
    ("€5", r"\boxed{5 €}"),
    ("\u221e", r"\boxed{\infty}"),
    (r"90\degree", r"\boxed{90}"),
    ("5,", r"\boxed{5}"),
    ("5", r"\boxed{\boxed{5}}, for \text{5} = \{5\}."),
    ("3*14 = <<3*14=42>>42\n#### 42", "so 6*7=42. The answer is 42."),
    ("#### 1,234", "It is $1,234$."),
    ("$18", "She makes $18 every day."),
    (r"Since $x=3$ we get \boxed{\frac{1}{2}}.", r"\boxed{0.5}"),
    ("1/2", r"the answer is $\frac12$"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    (r"\{1,2\}", r"$\{2,1\}$"),
    (r"\{1,2\}", r"\boxed{1}, \boxed{2}"),
    (0.5, "1/2"),
    ("1e3", "1000"),
    ("5 3/4", "it is 5.75"),
    ("3.5", "so 3 1/2."),
    (r"\frac{1}{2^{99}}", r"\boxed{2^{-99}}"),
    ("1/3", r"\boxed{0.333333}"),
    ("10:00", "at 10:00"),
    ("1:2", r"\boxed{\frac12}"),
    ("50%", r"\boxed{50\%}"),
    (r"50\%", "so it is 50%."),
]
WRONG = [
    ("1\u2009000", r"\boxed{0}"),
    (r"1\,000", r"\boxed{0}"),
    ("0", r"\boxed{1\,000}"),
    ("1_000", r"\boxed{1}"),
    ("1 000 km", r"\boxed{0}"),
    ("1, 200", r"\boxed{1200}"),
    ("2½", r"\boxed{2}"),
    ("10²", r"\boxed{10}"),
    ("0.(3)", r"\boxed{0}"),
    ("1e15", r"\boxed{1000000000000001}"),
    ("(1, 1e-9)", r"\boxed{(1, 2e-9)}"),
    (r"\begin{pmatrix}1e-9\\1\end{pmatrix}", r"\boxed{\begin{pmatrix}2e-9\\1\end{pmatrix}}"),
    ("5", r"\boxed{5} \boxed{6} \boxed{}"),
    ("5", r"\boxed{}"),
    ("2**10", r"\boxed{2}"),
    ("10^-3", r"\boxed{10}"),
    ("1.5\u00b710^3", r"\boxed{1.5}"),
    ("1\u2019000", r"\boxed{1}"),
    (r"0.\bar{3}", r"\boxed{0}"),
    ("$1 000$", r"\boxed{0}"),
    ("1/2%", r"\boxed{1}"),
    ("5", r"\boxed{no answer##}. There are 5 days left."),
    ("7", r"\boxed{unknown##}, since $7$ is a prime"),
    ("#### 5", "Answer: -5"),
    ("x^2+2x+1", r"\boxed{(x-1)^2}"),
    (r"\text{Evelyn}", r"\boxed{\text{Briana}}"),
    ("42", "no idea"),
    ("42", r"$\frac{1}{$ {{(("),
    ("42", ""),
    ("2", "so 3 1/2"),
    ("6.63e-34", r"\boxed{1.38\times 10^{-23}}"),
    ("1e-7", r"\boxed{2e-7}"),
    ("0", r"\boxed{1e-7}"),
    (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}"),
    ("12:00", r"\boxed{10:00}"),
    ("3", r"first \boxed{3}, so finally \boxed{5}"),
    ("4", r"\boxed{1/0}"),
    ("50%", r"\boxed{0.5}"),
]
UNREADABLE = ["1//2", "5 \u2032", r"\boxed{5//6}", r"As $x=3$ it is \boxed{2 < < 3}.", "1 - - / 2"]
WITH_FUNCTIONS = [
    ("5!", "120"),
    (r"\frac{1}{5!}", r"\frac{1}{120}"),
    (r"\log_2 8", "3"),
    ("|-5|", "5"),
    (r"\lfloor 2.5 \rfloor", "2"),
    (r"\sum_{n=1}^{10} n", "55"),
]
INFINITE = [
    (r"(-\infty, 3)", r"(-\infty,3)", r"(-\infty, 4)"),
    (r"[2,\infty)", r"[2, \infty)", r"(2,\infty)"),
    (r"(-\infty,1) \cup (2,\infty)", r"(-\infty,1) \cup (2,\infty)", r"(-\infty,1)"),
    (r"\infty", r"\infty", r"-\infty"),
]


def grade(answer, completion):
    prompt = Prompt(prompt_id=1, text="q", token_ids=(1,), fields={"answer": answer})
    return math_reward.reward(prompt, completion, CONFIG)


@pytest.mark.parametrize(
    ("expected", "completion", "value"),
    [(*pair, 1.0) for pair in RIGHT] + [(*pair, 0.0) for pair in WRONG],
)
def test_numbers_in_the_spellings_of_people_keep_their_value(expected, completion, value):
    assert grade(expected, completion) == value


@pytest.mark.parametrize(("expected", "value"), WITH_FUNCTIONS)
def test_an_answer_that_has_to_be_worked_out_equals_its_value(expected, value):
    assert grade(expected, rf"\boxed{{{value}}}") == 1.0
    assert grade(value, rf"\boxed{{{expected}}}") == 1.0
    assert grade(expected, rf"\boxed{{{value} + 1}}") == 0.0


@pytest.mark.parametrize(("expected", "same", "other"), INFINITE)
def test_intervals_without_an_end_are_answers(expected, same, other):
    assert grade(expected, rf"\boxed{{{same}}}") == 1.0
    assert grade(expected, rf"\boxed{{{other}}}") == 0.0


@pytest.mark.parametrize("expected", UNREADABLE)
def test_an_answer_is_read_whole_or_refused(expected):
    with pytest.raises(ValueError, match="must be a mathematical expression"):
        grade(expected, r"\boxed{1}")
