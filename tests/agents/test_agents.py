"""Agents of others, unmodified, play the episodes of whole runs: their turns, calls of tools,
sub-agents and shortened histories become exact sequences, by the oracle of `play`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.agents.playing import AGENTS, HERE, Episode, play
from tests.agents.writing_checkpoint import START, TOOL, TOOLS, call
from tests.e2e.forks import Forks

pytestmark = pytest.mark.agents

PYTHON, NODE = str(AGENTS / "bin" / "python"), AGENTS / "node" / "node_modules" / ".bin"
WRITE = "echo yes > done.txt"
SAID = "I have written it."
CODEX_CONFIG = """
model = "policy"
model_provider = "llamarl"

[model_providers.llamarl]
name = "llamarl"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
CODEX_FILES = {".codex/config.toml": CODEX_CONFIG}
RUN_CODEX = (
    f"exec {NODE / 'codex'} exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "
    '-c model_providers.llamarl.base_url="$OPENAI_BASE_URL" "$@"'
)
CODEX = ["sh", "-c", RUN_CODEX, "codex", "{question}"]
CLAUDE = [
    *("env", "IS_SANDBOX=1", "ANTHROPIC_MODEL=policy", "ANTHROPIC_DEFAULT_HAIKU_MODEL=policy"),
    *("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", str(NODE / "claude")),
    *("-p", "{question}", "--dangerously-skip-permissions"),
]
MINI = [
    *("env", "MSWEA_CONFIGURED=true", "MSWEA_COST_TRACKING=ignore_errors"),
    *("MSWEA_GLOBAL_CONFIG_DIR=.mini", "LITELLM_LOCAL_MODEL_COST_MAP=True"),
    *(str(AGENTS / "bin" / "mini"), "-m", "openai/policy", "-y", "--exit-immediately"),
    *("-t", "{question}"),
]


def report(episodes: Sequence[Episode]) -> None:
    """Log what they did: `make test-agents ARGS='-rP --log-level=INFO'` shows it."""
    for each in episodes:
        logging.info(
            "%d conversations, %d turns, calls of %s, exit code %d after %.0f s",
            len(each.lines),
            len(each.exchanges),
            each.calls,
            each.done["exit"],
            each.done["took_s"],
        )


def check_ends(episodes: Sequence[Episode]) -> None:
    """Each agent has ended by itself, after at least one turn, and nothing was refused to it."""
    report(episodes)
    for each in episodes:
        assert each.exchanges
        assert each.done["exit"] == 0, each.shown
        assert not each.refused, each.shown


def test_mini_swe_agent_runs_commands_until_it_submits(forks: Forks, tmp_path: Path) -> None:
    write = call("bash", command=WRITE)
    submit = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    table = {START: [write, "First "], "First ": [write], TOOL: [write, submit, SAID]}
    episodes = play(forks, tmp_path, MINI, table)
    check_ends(episodes)
    for each in episodes:
        assert {*each.calls} == {"bash"}
        assert each.has_file


def test_mini_swe_agent_plays_with_the_quickstart_s_model(forks: Forks, tmp_path: Path) -> None:
    changes = "environment.calls=tagged", "generator.max_model_len=8192", "sampling.max_tokens=48"
    episodes = play(forks, tmp_path, MINI, None, *changes, "trainer.lr=2e-4")
    check_ends(episodes)


def test_an_agent_of_smolagents_writes_code_that_asks_another_one(
    forks: Forks, tmp_path: Path
) -> None:
    ask = "<code>\nprint(helper(task='Write it.'))\n</code>"
    write = call("write_file", path="done.txt", text="yes")
    end = call("final_answer", answer="written")
    table = {START: [ask, "<code>\nprint(2 * 3)\n</code>"], TOOLS: [write], TOOL: [write, end]}
    source = (HERE / "programs" / "smolagents_program.py").read_text()
    command = [PYTHON, "program.py", "{question}"]
    episodes = play(forks, tmp_path, command, table, files={"program.py": source})
    check_ends(episodes)
    for each in episodes:
        texts = [one["reply"]["content"] for one in each.exchanges]
        assert any(text + "</code>" == ask for text in texts) == each.has_file
        assert ("write_file" in each.calls) == each.has_file
        num_main = sum("tool_calls" not in one["reply"] for one in each.exchanges)
        assert num_main > 1
    assert any(each.has_file for each in episodes)


def test_an_agent_of_openai_s_sdk_calls_tools_another_agent_and_hands_over(
    forks: Forks, tmp_path: Path
) -> None:
    write = call("write_file", path="done.txt", text="yes")
    ask = call("ask_helper", input="Write a file.")
    over = call("transfer_to_reviewer")
    table = {START: [SAID], TOOLS: [ask, write], TOOL: [ask, write, over, SAID, SAID]}
    source = (HERE / "programs" / "openai_agents_program.py").read_text()
    command = ["env", "OPENAI_AGENTS_DISABLE_TRACING=1", PYTHON, "program.py", "{question}"]
    episodes = play(forks, tmp_path, command, table, files={"program.py": source})
    report(episodes)
    for each in episodes:
        assert each.calls
        assert each.results


def test_codex_runs_commands_and_spawns_agents(forks: Forks, tmp_path: Path) -> None:
    write = call("exec_command", cmd=WRITE)
    spawn = call("multi_agent_v1__spawn_agent", message="Write a file.")
    table = {START: [SAID], TOOLS: [write, spawn], TOOL: [write, SAID]}
    episodes = play(forks, tmp_path, CODEX, table, files=CODEX_FILES)
    check_ends(episodes)
    for each in episodes:
        assert each.calls
        assert each.results


def test_codex_compacts_its_history_until_a_limit_ends_it(forks: Forks, tmp_path: Path) -> None:
    table = {START: [SAID], TOOLS: [call("exec_command", cmd=WRITE)], TOOL: [SAID]}
    command = [*CODEX[:-1], "-c", "model_auto_compact_token_limit=1000", CODEX[-1]]
    changes = "environment.max_turns=3", "sampling.rollouts_per_prompt=2"
    episodes = play(forks, tmp_path, command, table, *changes, files=CODEX_FILES)
    report(episodes)
    for each in episodes:
        assert each.calls == ["exec_command"] * 2
        assert [len(one["tools"]) > 0 for one in each.exchanges] == [True, False, True]
        assert SAID in each.exchanges[2]["messages"][-1]["content"], "its summary"
        assert each.has_file
        (refused, *_) = each.refused
        assert "context_length_exceeded" in refused["response"]


def test_claude_code_runs_commands_and_agents_at_the_same_time(
    forks: Forks, tmp_path: Path
) -> None:
    write = call("Bash", command=WRITE, description="Write it.")
    agent = {"description": "Write", "prompt": "Write a file.", "run_in_background": False}
    task = call("Agent", subagent_type="general-purpose", **agent)
    table = {START: [SAID], TOOLS: [write, task], TOOL: [write, SAID]}
    episodes = play(forks, tmp_path, CLAUDE, table)
    check_ends(episodes)
    for each in episodes:
        assert each.calls
        assert each.results


def test_a_limit_ends_an_agent_that_would_go_on(forks: Forks, tmp_path: Path) -> None:
    table = {START: [call("Bash", command=WRITE, description="Write it.")]}
    episodes = play(forks, tmp_path, CLAUDE, table, "environment.max_turns=3")
    report(episodes)
    for each in episodes:
        assert len(each.exchanges) == 3
        assert each.has_file
        (refused, *_) = each.refused
        assert "prompt is too long" in refused["response"]
