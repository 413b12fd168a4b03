"""Environments that are wrong in one way each, by the name under which the report must have it."""

from __future__ import annotations

RIGHT = """
import os, pathlib, random, threading, time

class Search:
    def __init__(self):
        self.seen = 0

    def reset(self, answer, **row):
        self.answer, self.seen = answer, 0

    def look(self, place: int) -> str:
        '''Looks into a place.

        Args:
            place: its number
        '''
        self.seen += 1
        return f'look {self.seen} at {place}'

environment = Search

def reward(prompt, completion):
    return float(f"Answer: {prompt.fields['answer']}" in completion)
"""
LOOK = "return f'look {self.seen} at {place}'"
REWARD = "return float(f\"Answer: {prompt.fields['answer']}\" in completion)"
SEEDED: dict[str, list[tuple[str, str]]] = {
    "an exception looks like an answer": [
        (LOOK, "return 'KeyError: no place'"),
    ],
    "a time-out looks like an answer": [
        (LOOK, "return 'The request timed out after 10 s.'"),
    ],
    "episodes share state": [
        ("self.seen = 0\n\n    def reset", "self.seen = 0\n    all = []\n\n    def reset"),
        (LOOK, "self.all.append(place)\n        return f'{len(self.all)} looks'"),
    ],
    "a reward depends on the order of episodes": [
        ("def reward(", "scored = []\n\ndef reward("),
        (REWARD, f"scored.append(completion)\n    {REWARD} * len(scored)"),
    ],
    "episodes are not repeatable": [
        (LOOK, "return f'{random.SystemRandom().random()}'"),
    ],
    "a call returns what it must not": [
        (REWARD, "return float('nan')"),
    ],
    "a failure becomes a reward": [
        (
            REWARD,
            "try:\n        return float(prompt.fields['none'])\n"
            "    except KeyError:\n        if not completion:\n            return 0.0\n"
            f"    {REWARD}",
        ),
    ],
    "the reward never differs": [
        (REWARD, "return 1.0"),
    ],
    "saying nothing is rewarded": [
        (REWARD, f"if not completion.strip():\n        return 1.0\n    {REWARD}"),
    ],
    "the answer is given away": [
        (LOOK, "raise ValueError(f'not there, but the answer is {self.answer}')"),
    ],
    "an observation leaves no room": [
        (LOOK, "return 'all that was seen ' * 200"),
    ],
    "episodes never end by themselves": [
        ("    def look(self, place: int) -> str:", "    def step(self, messages):"),
        ("        '''Looks into a place.\n\n        Args:\n            place: its number\n", ""),
        ("        '''\n        self.seen", "        self.seen"),
        (LOOK, "return 'go on'"),
    ],
    "calls wait for each other": [
        ("environment = Search", "environment = Search\none = threading.Lock()"),
        (LOOK, f"with one:\n            time.sleep(0.1)\n        {LOOK}"),
    ],
    "a coroutine blocks its process": [
        ("    def look(self", "    async def look(self"),
        (LOOK, f"time.sleep(0.001)\n        {LOOK}"),
    ],
    "episodes leave something behind": [
        (
            "self.answer, self.seen =",
            "self.file = open('/dev/null')\n        kept.append("
            "self.file)\n        self.answer, self.seen =",
        ),
        ("environment = Search", "environment = Search\nkept = []"),
    ],
    "episodes disturb each other": [
        ("environment = Search", "environment = Search\nnow = []"),
        ("self.answer, self.seen =", "now[:] = [answer]\n        self.answer, self.seen ="),
        (LOOK, "return f'{now}'"),
    ],
    "an episode does not begin anew": [
        (
            "self.answer, self.seen = answer, 0",
            "self.mark = pathlib.Path(row['folder'], f'{answer}-{os.getpid()}')\n"
            "        others = {*self.mark.parent.glob(f'{answer}-*')} - {self.mark}\n"
            "        self.answer, self.seen, self.was = answer, 0, bool(others)\n"
            "        self.mark.touch()",
        ),
        (
            "    def look(",
            "    def get_reward(self):\n        self.mark.unlink(missing_ok=True)\n"
            "        return 0.0\n\n    def look(",
        ),
        (LOOK, "return f'already open: {self.was}'"),
    ],
    "a call ends its process": [
        (LOOK, "os._exit(3)"),
    ],
    "the environment raises": [
        ("self.answer, self.seen =", "1 / 0\n        self.answer, self.seen ="),
    ],
}
"""Changes of RIGHT: (a text in it, what takes its place)."""
SEVERAL = [
    "a coroutine blocks its process",
    "an exception looks like an answer",
    "a failure becomes a reward",
    "episodes leave something behind",
]
"""Those that one environment has at once."""


def seeded(*names: str) -> str:
    """The text of an environment with these faults."""
    text = RIGHT
    for name in names:
        for old, new in SEEDED[name]:
            text = text.replace(old, new, 1)
    return text
