"""The reward `judge`, against an endpoint on loopback that behaves as the completion says."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llamarl.core.config import JudgeConfig, RewardConfig
from llamarl.core.records import Prompt, StageResult, StageStatus
from llamarl.scoring.judge import question, read_score
from llamarl.scoring.rewards import check_answer, check_rewards
from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import ROOT
from tests.scoring.reward_pool import RewardPool, completions

PROMPT = Prompt(prompt_id=1, text="What is 2 + 2?", token_ids=(1,), fields={"rubric": {"key": "4"}})
TEMPLATE = "Q: {prompt}\nA: {completion}\nRubric: {rubric.key}\nAnswer as {{score}}."


@dataclass
class Endpoint:
    """A server of chat completions, what it was asked, and how many requests it had at once."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    times: Counter[str] = field(default_factory=Counter)
    num_open: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def said(self, text: str, finish: str = "stop") -> bytes:
        """The body of a response."""
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        return json.dumps({"choices": [{"index": 0, **choice}], "usage": usage}).encode()

    def answer(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        """The status and body for a request, by what its completion begins with."""
        content = asked["messages"][0]["content"]
        completion = content.partition("A: ")[2].partition("\n")[0]
        with self.lock:
            self.asked.append(asked)
            self.times[completion] += 1
            time_of = self.times[completion]
        match completion.partition(" ")[0]:
            case "busy" if time_of < 3:
                return 503, b"{}"
            case "refused":
                return 401, b'{"error": {"message": "no such key"}}'
            case "down":
                return 500, b"<html>"
            case "garbage":
                return 200, b"{"
            case "none":
                return 200, b'{"choices": []}'
            case "silent":
                return 200, self.said("I would rather not say.")
            case "cut":
                return 200, self.said("Score: 1 would be", "length")
            case "huge":
                return 200, self.said("Score: 99999999999")
            case "slow":
                time.sleep(0.3)
            case "hung":
                time.sleep(5)
        return 200, self.said(f"It says {completion!r}. Score: 0.1, no: Score: 0.75")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                served.keys.add(self.headers["Authorization"])
                served.num_open += 1
                served.most_open = max(served.most_open, served.num_open)
            try:
                status, body = served.answer(asked)
            finally:
                with served.lock:
                    served.num_open -= 1
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                if status == 503:
                    self.send_header("Retry-After-Ms", "1")
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # the client has gone

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield served
    server.shutdown()
    server.server_close()


def judged_by(url: str, **values: Any) -> RewardConfig:
    judge = JudgeConfig(url=url, model="m", prompt=TEMPLATE, **{"timeout_s": 20.0} | values)
    return RewardConfig(functions=["judge"], timeout_s=60.0, judge=judge)


def score(config: RewardConfig, *texts: str) -> list[StageResult]:
    async def run() -> list[StageResult]:
        pool = RewardPool(config)
        await pool.start()
        try:
            return await pool.score(completions(*texts, prompt=PROMPT))
        finally:
            pool.close()

    return asyncio.run(run())


def test_a_judge_scores_what_it_is_shown(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    config = judged_by(endpoint.url, key_variable="JUDGE_KEY", options={"seed": 3, "top_p": None})
    (result,) = score(config, "four {prompt} Score: 1")
    assert result.numbers == {"reward": 0.75}
    tokens = {"judge_prompt_tokens": 7, "judge_completion_tokens": 3, "judge_retries": 0}
    assert tokens.items() <= result.extra.items()
    (asked,) = endpoint.asked
    content = "Q: What is 2 + 2?\nA: four {prompt} Score: 1\nRubric: 4\nAnswer as {score}."
    messages = [{"role": "user", "content": content}]
    assert asked == {"model": "m", "seed": 3, "messages": messages}
    assert endpoint.keys == {"Bearer secret"}


def test_an_answer_without_a_score_is_a_failure_and_never_a_zero(endpoint: Endpoint) -> None:
    config = judged_by(endpoint.url, max_retries=1)
    wrong = {
        "silent": (StageStatus.INVALID, "the judge must give a number where"),
        "cut": (StageStatus.INVALID, "the judge must end its answer itself"),
        "huge": (StageStatus.INVALID, "must return a finite number"),
        "garbage": (StageStatus.RAISED, "reward.judge.url must answer as OpenAI's"),
        "none": (StageStatus.RAISED, "reward.judge.url must answer as OpenAI's"),
        "down": (StageStatus.RAISED, "must answer within 1 retries"),
        "refused": (StageStatus.RAISED, "no such key"),
    }
    results = score(config, *wrong, "good")
    for result, (status, words) in zip(results, wrong.values(), strict=False):
        assert result.status == status, result
        assert words in result.error
        assert not result.numbers
    assert results[-1].numbers == {"reward": 0.75}
    assert endpoint.times["down"] == 2
    assert endpoint.times["refused"] == 1


def test_a_busy_judge_is_asked_again_and_a_hung_one_not_for_ever(endpoint: Endpoint) -> None:
    config = judged_by(endpoint.url, timeout_s=1.0, max_retries=2)
    busy, hung = score(replace(config, timeout_s=30.0), "busy", "hung")
    assert busy.numbers == {"reward": 0.75}
    assert (endpoint.times["busy"], busy.extra["judge_retries"]) == (3, 2)
    assert hung.status == StageStatus.RAISED
    assert "APITimeoutError" in hung.error
    (over,) = score(replace(config, timeout_s=1.5), "hung")
    assert over.status == StageStatus.HUNG
    assert "reward.timeout_s" in over.error


def test_nobody_at_the_address_is_a_failure() -> None:
    (result,) = score(judged_by("http://127.0.0.1:1/v1", max_retries=0), "good")
    assert result.status == StageStatus.RAISED
    assert "APIConnectionError" in result.error


def test_as_many_requests_run_at_once_as_the_recipe_says(endpoint: Endpoint) -> None:
    config = judged_by(endpoint.url, max_requests=3)
    results = score(config, *(f"slow {n}" for n in range(12)))
    assert [result.numbers for result in results] == [{"reward": 0.75}] * 12
    assert 2 <= endpoint.most_open <= 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"url": ""}, "reward.judge.url must be the address"),
        ({"url": "localhost:8000"}, "reward.judge.url must be the address"),
        ({"model": ""}, "reward.judge.model must name"),
        ({"pattern": "("}, "reward.judge.pattern must be a regular expression"),
        ({"pattern": "Score"}, "reward.judge.pattern must have a group"),
        ({"timeout_s": 61.0}, "reward.timeout_s must be at least reward.judge.timeout_s (61)"),
    ],
)
def test_what_a_judge_cannot_be_asked_with_is_refused(values: dict[str, Any], words: str) -> None:
    config = judged_by("http://127.0.0.1:1/v1")
    with pytest.raises(ValueError, match=r"^reward") as caught:
        check_rewards(replace(config, judge=replace(config.judge, **values)))
    assert words in str(caught.value)


def test_failures_of_a_judge_cannot_be_made_zeros() -> None:
    with pytest.raises(ValueError, match=r"reward\.on_failure must be drop with the reward judge"):
        check_rewards(replace(judged_by("http://127.0.0.1:1/v1"), on_failure="zero"))


@pytest.mark.parametrize("template", ["{nothing}", "{rubric.other}", "{", "{}"])
def test_a_template_that_a_row_cannot_fill_is_refused_with_its_line(template: str) -> None:
    config = judged_by("http://127.0.0.1:1/v1")
    config = replace(config, judge=replace(config.judge, prompt=template))
    with pytest.raises(ValueError, match=r"reward\.judge\.prompt must name fields"):
        check_answer(config, PROMPT)
    with pytest.raises(ValueError, match=r"^line 1: "):
        question(config, PROMPT, "x")


def test_the_last_score_counts_as_a_judge_quotes_what_it_judges() -> None:
    config = RewardConfig(functions=["judge"])
    assert read_score(config, 'It claims "Score: 1". Score: -0.5') == -0.5


@pytest.mark.full
def test_a_run_trains_on_what_a_judge_says(
    endpoint: Endpoint, forks: Forks, tmp_path: Path
) -> None:
    options = [
        *("reward=judge", f"reward.judge.url={endpoint.url}", "reward.judge.model=m"),
        *("cluster=inline", "num_steps=1", "trainer.groups_per_step=2", "evaluation.max_prompts=2"),
        *(
            "sampling.rollouts_per_prompt=4",
            "experience.keep_rollouts=1",
            "checkpoint.export=false",
        ),
    ]
    recipe = f"--config-dir={ROOT / 'recipes' / 'quickstart'}"
    done = forks.run("train", recipe, f"run_dir={tmp_path}", *options)
    assert done.returncode == 0, done.stderr
    trained = [line for line in read_rollouts(tmp_path) if line["outcome"] == "trained"]
    assert [line["reward"] for line in trained] == [0.75] * 8
    (step,) = [line for line in read_lines(tmp_path / "metrics.jsonl") if "reward/mean" in line]
    assert step["reward_extra/judge_prompt_tokens"] == 7
    assert step["reward_extra/judge_completion_tokens"] == 3
    assert step["reward_extra/judge_s"] > 0
    for line in trained:
        shown = [each["messages"][0]["content"] for each in endpoint.asked]
        assert any(line["turns"][-1]["content"] in each for each in shown)
