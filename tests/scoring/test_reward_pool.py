"""The reward pool with real processes."""

import asyncio
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from llamarl.cluster.os_process import is_alive
from llamarl.core.config import RewardConfig
from llamarl.core.records import Prompt, StageStatus
from llamarl.scoring.stages import Stage, as_data
from tests.scoring import reward_pool
from tests.scoring.reward_pool import RewardPool, running

pytestmark = pytest.mark.full

TASK = """
import math, os, sys, time

def inner():
    raise LookupError("no such word")

def reward(prompt, completion):
    if completion == "hang":
        while True:
            time.sleep(0.01)
    if completion == "raise":
        inner()
    if completion == "nan":
        return math.nan
    if completion == "exit":
        sys.exit(3)
    if completion == "crash":
        os.kill(os.getpid(), 11)
    if completion == "leave":
        os._exit(7)
    if completion == "print":
        print("{}")
        os.write(1, b"{}")
    if completion == "read":
        return len(sys.stdin.read())
    if completion == "sleep":
        time.sleep(0.3)
    if completion == "pid":
        return os.getpid()
    if completion == "parent":
        return os.getppid()
    if completion == "torch":
        return "torch" in sys.modules or "transformers" in sys.modules
    return prompt.fields["value"]
"""
LIMIT_S = 4.0  # what hangs waits for it; all else must be done by then on a busy machine
PROMPT = Prompt(prompt_id=1, text="q", token_ids=(1, 2), fields={"value": 2.5})


def config(**fields):
    return RewardConfig(**{"functions": ["task"], "timeout_s": LIMIT_S, **fields})


def completions(*texts, prompt=PROMPT):
    return reward_pool.completions(*texts, prompt=prompt)


def open_pool(**fields):
    return running(config(**fields), TASK)


def wait_until(condition, limit_s=10.0):
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


async def test_every_kind_of_failure_has_its_own_error_and_the_rest_is_scored(caplog):
    caplog.set_level(logging.INFO)
    async with open_pool() as pool:
        texts = ("a", "raise", "nan", "exit", "crash", "leave", "print", "read", "pid", "hang")
        scores = await pool.score(completions(*texts, "pid", "b"))
        (pid,) = pool.pids
    assert [score.row_id for score in scores] == [*range(100, 112)]
    ok, raised, invalid, exited, crashed, left, printed, read, before, hung, after, last = scores
    assert (before.reward != pid, after.reward) == (True, pid), "its process was replaced"
    assert not is_alive(int(before.reward))
    for score in (ok, printed, last):
        assert (score.status, score.reward, score.parts) == (StageStatus.OK, 2.5, {"task": 2.5})
    assert read.reward == 0
    for score, text in (
        (raised, "LookupError: no such word"),
        (exited, "SystemExit: 3"),
        (crashed, "SIGSEGV"),
        (left, "exit code 7"),
    ):
        assert score.status is StageStatus.RAISED
        assert text in score.error
    assert 'File "task.py", line 5, in inner\n    raise LookupError' in raised.error
    assert invalid.status is StageStatus.INVALID
    assert hung.status is StageStatus.HUNG
    assert f"within {LIMIT_S:g} s (reward.timeout_s)" in hung.error
    assert 'File "task.py", line 10 in reward' in hung.error
    assert "llamarl" not in hung.error
    assert "line 10 in reward" not in caplog.text, "it stands in the error alone"
    for score in scores:
        assert math.isnan(score.reward) == (score.status is not StageStatus.OK)


@pytest.mark.long
async def test_a_hung_computation_that_never_returns_to_python_is_stopped_too():
    # The limit is for the first one too, on a machine with other work.
    async with running(RewardConfig(timeout_s=6.0), None) as pool:
        prompt = Prompt(prompt_id=1, text="q", token_ids=(), fields={"answer": "42"})
        first, hung = await pool.score(completions("42", "9**9**9**9", prompt=prompt))
    assert (first.reward, hung.status) == (1.0, StageStatus.HUNG)
    assert "sympy" in hung.error


async def test_slow_rewards_that_each_keep_the_limit_are_not_hung():
    async with open_pool(timeout_s=2.0) as pool:
        found = await pool.score(completions(*["sleep"] * 8))  # 0.3 s each
    assert all(score.status is StageStatus.OK for score in found)


async def test_workers_share_the_work():
    async with open_pool(num_workers=2) as pool:
        scores = await pool.score(completions("sleep", "pid", "sleep", "pid"))
        used, pids = {score.reward for score in scores[1::2]}, set(pool.pids)
    assert used == pids
    assert len(pids) == 2


async def test_many_calls_at_once_each_get_their_own_scores():
    async with open_pool(num_workers=2) as pool:
        prompts = [
            Prompt(prompt_id=i, text="", token_ids=(), fields={"value": i}) for i in range(8)
        ]
        calls = [pool.score(completions(*"abc" * 30, prompt=p)) for p in prompts]
        found = await asyncio.gather(*calls)
    for value, scores in enumerate(found):
        assert [score.reward for score in scores] == [value] * 90


async def test_a_worker_loads_neither_torch_nor_transformers():
    section = config(functions=["task", "math", "exact", "format"], weights=[1.0] * 4)
    prompt = Prompt(prompt_id=1, text="", token_ids=(), fields={"answer": "1"})

    async with running(section, TASK) as pool:
        (score,) = await pool.score(completions("torch", prompt=prompt))
    assert score.parts["task"] == 0


async def test_a_message_larger_than_any_pipe_passes():
    async with open_pool(timeout_s=10.0) as pool:
        found = await pool.score(completions(*["long " * 200_000] * 4))
    assert [score.reward for score in found] == [2.5] * 4


async def test_a_stopped_process_that_does_not_even_read_is_hung_and_replaced():
    async with open_pool(timeout_s=3.0) as pool:
        os.kill(pool.pids[0], signal.SIGSTOP)
        hung, ok = await pool.score(completions("long " * 200_000, "a"))
    assert (hung.status, ok.status) == (StageStatus.HUNG, StageStatus.OK)


def test_a_task_that_does_not_load_ends_the_start_in_one_line():
    pool = RewardPool(config(), "x = 1\nimport nowhere_to_be_found\n")
    words = r"No module named .* \(task\.py, line 2: import nowhere_to_be_found\)"
    with pytest.raises(ValueError, match=words) as error:
        asyncio.run(pool.start())
    assert "\n" not in str(error.value)
    assert pool.pids == []


async def test_close_ends_every_process_even_one_that_hangs_and_its_children():
    source = TASK + (
        "\nimport subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "old = reward\n"
        "def reward(prompt, completion):\n"
        "    return child.pid if completion == 'child' else old(prompt, completion)\n"
    )

    pool = RewardPool(config(num_workers=2, timeout_s=60.0), source)
    await pool.start()
    pids = pool.pids
    (score,) = await pool.score(completions("child"))
    call = asyncio.create_task(pool.score(completions("hang", "hang")))
    await asyncio.sleep(0.2)
    start = time.monotonic()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        await call
    with pytest.raises(RuntimeError, match="not closed"):
        await pool.score(completions("a"))
    pool.close()
    pids, took_s = [*pids, int(score.reward)], time.monotonic() - start
    assert len(pids) == 3
    assert wait_until(lambda: not any(map(is_alive, pids)))
    assert took_s < 5
    assert not [t for t in threading.enumerate() if t.name.startswith("reward-")]


PARENT = """
import asyncio, sys, threading
from llamarl.core.config import RewardConfig
from llamarl.core.records import Prompt
from tests.scoring.reward_pool import RewardPool, completions

async def main():
    pool = RewardPool(RewardConfig(functions=["task"], num_workers=2, timeout_s=100), sys.argv[1])
    await pool.start()
    print(*pool.pids, flush=True)
    prompt = Prompt(prompt_id=1, text="", token_ids=(), fields={"value": 1})
    await pool.score(completions("a", "a", prompt=prompt))

# The loop runs beside the main thread, as in an executor process.
thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
thread.start()
thread.join()
"""


def test_no_worker_outlives_a_parent_that_forgets_to_close():
    """One that is killed is in test_hostile_rewards.py."""
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, TASK], stdout=subprocess.PIPE, text=True, timeout=60
    )
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 2
    assert wait_until(lambda: not any(map(is_alive, pids)))


def start_worker(parent_pid):
    return subprocess.Popen(
        [sys.executable, "-m", "llamarl.scoring.user_code.worker", str(parent_pid), "reward"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    "source",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()\n"
        "judge = float\n",
        "import asyncio\nasync def judge(completion): await asyncio.sleep(100)\n",
    ],
)
def test_a_worker_ends_when_its_input_ends_whatever_user_code_left(source):
    worker = start_worker(os.getpid())
    stage = as_data(Stage("judge", "judge", ["completion"], ["value"]), "judge")
    setup = {"stage": stage, "reward": None, "task_source": {"task.py": source}}
    service = "llamarl.scoring.stage_function"
    lines = (
        {"token": "abc", "service": service, "setup": setup, "timeout_s": 100.0},
        {"prompts": [], "calls": [[None, [["2.5"], [1]], "def", 1000]]},
    )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    out, _ = worker.communicate(text.encode(), timeout=20)
    assert json.loads(out.splitlines()[0])["token"] == "abc"
    assert worker.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_a_worker_whose_parent_is_already_gone_ends_at_once():
    worker = start_worker(1)
    assert worker.wait(20) == 1
    worker.communicate()
