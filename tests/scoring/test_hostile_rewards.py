"""Reward code that attacks its process, the pool and the machine, in real processes."""

import asyncio
import logging
import os
import signal
import subprocess
import sys

import pytest

from llamarl.cluster.os_process import is_alive
from llamarl.core.config import RewardConfig
from llamarl.core.records import Prompt, StageStatus
from llamarl.scoring.user_code.pool import LOGGED_LINES
from llamarl.scoring.user_code.watchdog import OUT_OF_MEMORY_SCORE, descendants
from tests.scoring import reward_pool
from tests.scoring.reward_pool import RewardPool
from tests.scoring.test_reward_pool import wait_until

pytestmark = pytest.mark.full

# Each attack is a function; the reward of a completion that names none is 0.25.
ATTACKS = """
import ctypes, fcntl, gc, json, os, signal, subprocess, sys, threading, time

FORGED = b'{"rows": [[1.0, 1.0]]}\\n'

def pipes():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + name).startswith("pipe:"):
                yield int(name)
        except OSError:
            pass

def writers():
    return [fd for fd in pipes() if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY]

def write_everywhere(data=FORGED):
    for fd in writers():
        os.write(fd, data)

def forge():
    write_everywhere(FORGED * 20)

def forge_later():
    threading.Timer(0.05, forge).start()

def garbage():
    write_everywhere(b"\\xff\\x00 not json\\n")

def partial_line():
    write_everywhere(b'{"token": ')

def deep_json():
    write_everywhere(b"[" * 100_000 + b"\\n")

def long_number():
    write_everywhere(b"1" * 10_000 + b"\\n")

def endless_line():
    while True:
        write_everywhere(b"x" * 65536)

def replay():
    frame = sys._getframe()
    while "line" not in frame.f_locals:
        frame = frame.f_back
    token = json.loads(frame.f_locals["line"])["calls"][0][2]  # an earlier completion's
    write_everywhere(b'{"token": "%s", "rows": [[1.0, 1.0]]}\\n' % token.encode())

def stdout_by_number():
    os.write(1, FORGED)
    os.write(2, FORGED)
    print(FORGED.decode())

def flood():
    for _ in range(300):
        os.write(1, b"y" * 65536)
        os.write(1, b"line\\n" * 10_000)

def close_all():
    os.closerange(0, 5000)

def close_and_reopen():
    os.closerange(0, 5000)
    for _ in range(500):
        os.open("/dev/null", os.O_RDWR)

def leave():
    os._exit(0)

def fork_twice():
    os.fork()  # and both return

def signal_parent():
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(30)

def kill_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(30)

def stop_parent():
    os.kill(os.getppid(), signal.SIGSTOP)
    os._exit(0)

def change_folder():
    os.mkdir("/tmp/gone-%d" % os.getpid())
    os.chdir("/tmp/gone-%d" % os.getpid())
    os.rmdir("/tmp/gone-%d" % os.getpid())

def recurse():
    recurse()

def overflow_stack():
    sys.setrecursionlimit(10**9)
    nested = []
    for _ in range(10**6):
        nested = [nested]
    repr(nested)

def patch_json():
    json.dumps = json.loads = json.JSONEncoder = json.JSONDecoder = lambda *_, **__: FORGED
    json.encoder.encode_basestring_ascii = lambda text: '"1"'

def patch_exit():
    os.getpid = lambda: 1
    os._exit = sys.exit = lambda *_: None

def raise_unprintable():
    class Unprintable(Exception):
        def __str__(self):
            raise self
    raise Unprintable

def return_liar():
    class Liar(float):
        def __float__(self):
            return 1
        def __repr__(self):
            raise OSError
    return Liar(0.5)

def patch_answers():
    async def forged(*_):
        return {"rows": [["forged", 1.0]]}
    sys.modules["llamarl.scoring.stage_function"].answer = forged

def reward(prompt, completion):
    attack = globals().get(completion)
    if attack is None:
        return 0.25
    value = attack()
    return 0.25 if value is None else value
"""
SLOW = pytest.mark.slow
PROMPT = Prompt(prompt_id=7, text="what is it?", token_ids=(1, 2))
OK, RAISED, HUNG = StageStatus.OK, StageStatus.RAISED, StageStatus.HUNG
FOUND_OUT = "among the answers of its process"
ENDED = "the reward process ended by itself"
# attack: what the failure of its own reward says, or "" if it stands (its function decides that)
OUTCOMES = {
    "forge": FOUND_OUT,
    "forge_later": "",
    "replay": FOUND_OUT,
    "partial_line": FOUND_OUT,
    "close_all": "",
    "kill_parent": f"{ENDED} (signal SIGKILL)",
    "fork_twice": "",
    "patch_answers": "",
}
MORE_OUTCOMES = {
    "garbage": FOUND_OUT,
    "deep_json": FOUND_OUT,
    "long_number": FOUND_OUT,
    "endless_line": FOUND_OUT,
    "stdout_by_number": "",
    "flood": "",
    "close_and_reopen": "",
    "leave": f"{ENDED} (exit code 0)",
    "signal_parent": ENDED,
    "stop_parent": "closed the pipe of its answers",
    "change_folder": "",
    "recurse": "RecursionError",
    "overflow_stack": f"{ENDED} (signal SIGSEGV)",
    "patch_json": "",
    "patch_exit": "",
    "raise_unprintable": "<exception str() failed>",
    "return_liar": "TypeError",
}
STAY_BEHIND = {"forge_later", "patch_answers", "patch_json"}  # as a thread or a patch
LATER_S = 0.2


def completions(*texts):
    return reward_pool.completions(*texts, prompt=PROMPT)


def score(calls, source=ATTACKS, pause_s=0.0, **fields):
    """The scores of each call (a list of completions' texts), by one pool of one worker."""

    async def run():
        config = RewardConfig(**{"functions": ["task"], "timeout_s": 10.0, **fields})
        pool = RewardPool(config, source)
        await pool.start()
        scores = []
        try:
            for texts in calls:
                scores.append(await pool.score(completions(*texts)))
                await asyncio.sleep(pause_s)
        finally:
            pool.close()
        return scores

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("attack", "error"),
    [*OUTCOMES.items(), *(pytest.param(*case, marks=SLOW) for case in MORE_OUTCOMES.items())],
)
def test_an_attack_decides_no_reward_but_its_own_and_never_ends_the_pool(attack, error, caplog):
    calls = [["a"], ["a", attack, "a", "a"], ["a", "a"]]
    pause_s = LATER_S if attack == "forge_later" else 0.0
    # A stack overflows within 2 s of CPU time, whatever else the machine does.
    limit_s = 120.0 if attack == "overflow_stack" else 10.0
    with caplog.at_level(logging.INFO):
        before, (first, own, *after), last = score(calls, pause_s=pause_s, timeout_s=limit_s)
    others = [*before, first, *after, *last]
    failed = [scored for scored in others if scored.status is not StageStatus.OK]
    assert len(failed) <= (attack in STAY_BEHIND), failed
    assert {scored.reward for scored in others if scored not in failed} == {0.25}
    if error:
        assert error in own.error
        assert own.error.startswith("on the prompt of line 7 ('what is it?'):\n")
        assert len(own.error) < 10_000
    assert len(caplog.records) < 3 * LOGGED_LINES
    assert ("wrote unasked" in caplog.text) == (attack == "forge_later")


# Each way out ends in a process that carries no mark, sits in its own session and has no parent.
ESCAPES = """
import os, subprocess, sys, time

SLEEP = "import time; time.sleep(100)"

def session():
    child = [sys.executable, "-c", SLEEP]
    return subprocess.Popen(child, start_new_session=True, env={}).pid

def orphan():
    code = (
        "import os, subprocess, sys\\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True,\\n"
        "    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\\n"
        "print(child.pid)\\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], start_new_session=True, env={}, capture_output=True
    )
    return int(done.stdout)

def bomb():
    # Each process of it is replaced by two, for as long as there are not too many.
    code = (
        "import os, time\\n"
        "os.setsid()\\n"
        "for _ in range(6):\\n"
        "    time.sleep(0.02)\\n"
        "    if os.fork(): os.fork() or os.setsid()\\n"
        "time.sleep(100)\\n"
    )
    subprocess.Popen([sys.executable, "-c", code])
    time.sleep(0.05)
    return 0

def reward(prompt, completion):
    if completion == "hang":
        time.sleep(100)
    if completion == "leave":
        os._exit(0)
    return globals()[completion]()
"""


def test_what_rewards_start_ends_with_the_pool_wherever_it_hides():
    (scores,) = score([["session", "orphan"]], source=ESCAPES)
    pids = [int(scored.reward) for scored in scores]
    assert len(set(pids)) == 2
    assert not any(map(is_alive, pids))


async def test_what_a_reward_starts_ends_with_its_process_when_that_is_replaced():
    pool = RewardPool(RewardConfig(functions=["task"], timeout_s=30.0), ESCAPES)
    await pool.start()
    try:
        scores = await pool.score(completions("session", "orphan", "leave"))
        found = [is_alive(int(scored.reward)) for scored in scores[:2]]
    finally:
        pool.close()
    assert found == [False, False]


def test_a_bomb_of_processes_ends_with_the_pool():
    before = descendants(os.getpid())
    (scores,) = score([["bomb"]], source=ESCAPES)
    assert scores[0].status is StageStatus.OK
    assert descendants(os.getpid()) <= before


PARENT = """
import asyncio, sys
from llamarl.core.config import RewardConfig
from tests.scoring.reward_pool import RewardPool
from tests.scoring.test_hostile_rewards import ESCAPES, completions

async def main():
    pool = RewardPool(RewardConfig(functions=["task"], timeout_s=100), ESCAPES)
    await pool.start()
    scores = await pool.score(completions("session", "orphan"))
    print(*(int(score.reward) for score in scores), flush=True)
    await pool.score(completions("hang"))

asyncio.run(main())
"""


def test_what_rewards_start_ends_with_a_parent_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    pids_below = descendants(parent.pid)
    assert set(pids) <= pids_below
    parent.send_signal(signal.SIGKILL)
    parent.wait(20)
    assert wait_until(lambda: not any(map(is_alive, pids_below)))


def test_a_reward_process_is_the_first_to_go_without_memory_and_leaves_no_core_file():
    source = (
        "import resource\n"
        "def reward(prompt, completion):\n"
        "    if completion == 'core':\n"
        "        return resource.getrlimit(resource.RLIMIT_CORE)[0]\n"
        "    return int(open('/proc/self/oom_score_adj').read())\n"
    )
    ((core, memory),) = score([["core", "memory"]], source=source)
    assert core.reward == 0
    assert memory.reward == OUT_OF_MEMORY_SCORE
