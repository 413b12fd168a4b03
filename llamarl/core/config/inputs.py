"""The config of the pretrained checkpoint, the prompts, the environments that rollouts take turns
with, and the rewards."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from llamarl.core.fields import DAY_S, Section, choice, number

ENDING = re.compile(r"\.[a-z]+$")  # of a file; a folder may be called v1.2
NOT_IN_TAGS = re.compile(r"[^\w.-]")  # of metrics
OF_TEMPLATES = {"messages", "tools", "add_generation_prompt"}


@dataclass(kw_only=True)
class ModelConfig(Section):
    """The checkpoint, in the Hugging Face layout."""

    checkpoint: str = ""
    """Folder with config.json and safetensors files; a relative path starts at the recipe's folder,
    also as an argument, unlike `run_dir` | hf:ORG/NAME or hf:ORG/NAME@REVISION, a model of the
    Hugging Face Hub, which is fetched into the cache of huggingface_hub."""
    architecture: str | None = None
    """Folder with a config.json of the same architecture, so that the recipe can be planned without
    the checkpoint; a run refuses a checkpoint that differs from it (except in the ids that end a
    completion)."""
    tokenizer: str | None = None
    """Folder of the tokenizer, if it is not the checkpoint's own."""
    adapter: str = ""
    """Folder of an adapter of this checkpoint to start from, as an export or the peft library
    writes it, or hf:ORG/NAME; `trainer.lora` is then the adapter's, if it is not given. Empty:
    none, or adapters that start without effect."""

    def check(self) -> None:
        self.require(bool(self.checkpoint), "checkpoint", "name a checkpoint folder or hf:ORG/NAME")


@dataclass(kw_only=True)
class DataConfig(Section):
    """The sources of prompts, and the form of their rows."""

    prompts: Any = ""
    """Training prompts, one source or a list of several: each is a .jsonl, .parquet or .arrow file
    or a folder of such, whose relative path starts at the recipe's folder | hf:ORG/NAME, a data set
    of the Hub, with /SPLIT (else train), /CONFIG/SPLIT or /FILE after it, and @REVISION at the
    end | task (what `prompts` in the recipe's own task.py makes)."""
    weights: list[float] = field(default_factory=list, metadata={"above": 0, "most": 1e9})
    """How often prompts come from each source of `prompts`, in its order: any numbers, of which the
    shares count. After every prompt each source has given its share to within one or two. Each is
    walked on its own, so a small one comes round more often. Empty: all sources are walked as one,
    so each prompt comes once per epoch."""
    held_out: str | None = None
    """Evaluation prompts, one source of the same form; null skips evaluation."""
    options: dict[str, Any] = field(default_factory=dict)
    """What `prompts` in the recipe's own task.py gets, by the names of its arguments."""
    prompt_field: str = "question"
    """Field with the question: text, or a list of messages. `a.b` is field b of the object in a.
    Rows without `question` may have it in `prompt`, as those for TRL and verl do."""
    completion_field: str | None = "completion"
    """Field with the answer of a demonstration, for `llamarl sft`: text, or with `chat` a list of
    messages too | null (with `chat`: `prompt_field` has whole conversations, of which the
    assistant's turns are learnt)."""
    chat: bool = False
    """Wrap a question that is text in the tokenizer's chat template; else it is plain text. A list
    of messages always goes through the template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What the chat template gets beside the messages, such as {enable_thinking: false}."""
    chat_template: str | None = None
    """File with a chat template in Jinja, in place of the tokenizer's own; an export has it too."""
    date: str | None = None
    """The day, such as 2026-05-01, that a chat template gets when it asks for today's
    (`strftime_now`); null takes that of the run's first start, which config.yaml then has, so that
    a run that resumes on another day has the same prompts."""
    system: str | None = None
    """System message put first; needs `chat`."""
    shuffle: bool = True
    """Take the prompts of each epoch in an order drawn from the run's seed."""
    max_prompt_tokens: int = number(1024, least=1, most=2**24)
    """Longest prompt, or demonstration with its answer."""
    overlong: str = choice("error", "drop", "truncate")
    """What a prompt of more tokens is, or of more than `sampling.max_tokens` (held-out:
    `evaluation.max_tokens`) leaves of `generator.max_model_len`: error (it names the line) | drop
    (such prompts are left out) | truncate (only their last tokens are kept). A line says how many
    were left out or cut."""
    repeat_share: float = number(1.0, least=0.001, most=1)
    """Curriculum: a prompt whose latest group gave no signal, as all its rewards were equal (all
    right, or all wrong), is asked again with this probability in each later epoch; once a group of
    it gives a signal, in each. 1: every prompt is asked in every epoch."""

    @property
    def sources(self) -> list[str]:
        """The sources that `prompts` names, as a list."""
        return self.prompts if isinstance(self.prompts, list) else [self.prompts]

    @property
    def source_names(self) -> list[str]:
        """The name of each source in metrics: its file's name without its ending, with its place if
        two sources have the same."""
        names = [ENDING.sub("", PurePath(each).name) for each in self.sources]
        stems = [NOT_IN_TAGS.sub("_", name) for name in names]
        if len({*stems}) == len(stems):
            return stems
        return [f"{stem}_{place}" for place, stem in enumerate(stems)]

    def check(self) -> None:
        must = "name a file of prompts, hf:ORG/NAME or task, or be a list of such"
        is_named = all(isinstance(each, str) and each for each in self.sources)
        self.require(bool(self.sources) and is_named, "prompts", must)
        is_once = len({*self.sources}) == len(self.sources)
        self.require(is_once, "prompts", "name each source once")
        is_read = "task" in (*self.sources, self.held_out)
        must = "stay empty unless data.prompts or data.held_out is task"
        self.require(is_read or not self.options, "options", must)
        self.require(self.system is None or self.chat, "system", "stay unset without data.chat")
        num = len(self.sources)
        must = f"have one number for each of the {num} sources of data.prompts, or be empty"
        self.require(len(self.weights) in (0, num), "weights", must)
        own = OF_TEMPLATES.intersection(self.chat_template_kwargs)
        must = f"leave out {', '.join(sorted(OF_TEMPLATES))}, which llamarl sets"
        self.require(not own, "chat_template_kwargs", must)
        self.require(self.date is None or _is_date(self.date), "date", "be such as 2026-05-01")


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


AGENT = "agent"  # in environment.tools: a program that the recipe names


@dataclass(kw_only=True)
class EnvironmentConfig(Section):
    """Episodes: what the model may call, how its calls are read, and their limits."""

    tools: list[str] = field(default_factory=list)
    """What rollouts take turns with, any of: task (the list `tools` of the recipe's own task.py,
    its `environment`, or both) | python (a tool that runs programs which the model writes,
    in a sandbox) | agent, alone (a program that `command` names). []: nothing, a rollout is one
    answer."""
    calls: str = choice("auto", "hermes", "llama", "xml", "tagged", "template")
    """How the model writes a call: hermes (JSON in <tool_call>, as Qwen 2.5 and 3 do) | llama (JSON
    alone, as Llama 3 does) | xml (<function=NAME> in <tool_call>, as Qwen 3.5 does) | tagged
    (<NAME>argument</NAME>) | template (the tokenizer's own response_template) | auto (what the chat
    template shows)."""
    split_special_tokens: bool = True
    """A special token in what an environment or a tool says, such as <|im_end|>, is text: the model
    reads its characters | false: it is that token, so a tool's result may end turns and begin
    others."""
    command: list[str] = field(default_factory=list)
    """The program that plays each episode with `tools: [agent]`, and its arguments, in which
    {field} is that of the prompt's row, and {python} this Python. It runs in a folder of its own,
    in a sandbox, with the model's address and key in the variables that OpenAI's and Anthropic's
    clients read."""
    sandbox: str = choice("local", "docker")
    """Where an agent's programs run: local (with the programs of this machine) | docker (in a
    container of `image`, by the command line of docker or podman)."""
    image: str = ""
    """The image of containers, which must be on the machine; {field} is that of the prompt's row,
    such as {image} of a task."""
    engine: str = "docker"
    """The program that makes containers: docker, podman, or the path of one with their commands."""
    internet: bool = False
    """Containers have the engine's network `bridge`, for tasks that fetch something | false: their
    only network is the model."""
    files: str | None = None
    """Folder of the recipe whose files are in an agent's folder, with tasks in /agent. A row may
    have more in its field `files`: texts by path."""
    check_command: list[str] = field(default_factory=list)
    """The program that gives the episode's reward, which runs in the folder after the agent: the
    number in the last line that it prints, else 1 if it exits with 0 and 0 if it exits with 1. Any
    other end is a failure. The row is in LLAMARL_ROW, as JSON. []: the prompts are tasks, which
    bring their tests."""
    check_files: str | None = None
    """Folder of the recipe whose files are put beside the agent's before the check."""
    max_programs: int = number(32, least=1, most=4096)
    """Agents' programs that run at once, in each of num_workers processes. The episodes of others
    begin later."""
    readable: list[str] = field(default_factory=list)
    """Paths outside the system's folders that agents may read, such as where they are installed."""
    memory_mib: int = number(2048, least=16, most=2**24)
    """Memory of an agent with all that it starts, unless its task says how much."""
    disk_mib: int = number(256, least=1, most=2**24)
    """Size of an agent's folder, or of all that it writes in a container, unless its task says how
    much."""
    max_turns: int = number(8, least=1, most=10_000)
    """Turns of the model in an episode. A call in the last one is not run: the rollout ends as at
    sampling.max_tokens."""
    max_conversations: int = number(32, least=1, most=8192)
    """Conversations that an agent may open in an episode. One more ends it, as at max_turns."""
    max_episode_tokens: int = number(0, least=0, most=10**9)
    """Tokens that the model may write in an episode of an agent, over all its conversations, whose
    responses may have sampling.max_tokens each. A request after that ends it, as at max_turns; 0
    sets no such limit."""
    timeout_s: float = number(30.0, above=0, most=DAY_S)
    """Longest time for an environment's reset, for all calls of one turn, or for its reward. Beyond
    it the episode has failed."""
    episode_timeout_s: float = number(600.0, above=0, most=DAY_S)
    """Longest time that the calls of one episode may take together. Beyond it the episode has
    failed."""
    num_workers: int = number(1, least=1, most=1024)
    """Processes that run environments and tools; each plays many episodes at once."""
    max_restarts: int = number(3, least=0, most=1000)
    """How often an episode begins again because its environment's process was lost. Once more, and
    it has failed. Replicas that are lost do not count."""
    max_failure_rate: float = number(0.1, least=0, most=1)
    """The run stops when more than this share of the last 1000 turns failed (after 50): their
    environment raised, hung or returned what it must not. Such a rollout is not trained on, the
    rest of its group is. A tool that raises is no failure: the model is told the error."""

    def check(self) -> None:
        has_agent = AGENT in self.tools
        self.require(not has_agent or self.tools == [AGENT], "tools", "have agent alone")
        must = "name a program with environment.tools=[agent], and be [] without"
        self.require(bool(self.command) == has_agent, "command", must)
        must = "be [] without environment.tools=[agent]"
        self.require(has_agent or not self.check_command, "check_command", must)
        in_container = self.sandbox == "docker"
        must = "name an image with environment.sandbox=docker, and be empty without"
        self.require(bool(self.image) == in_container, "image", must)
        must = "be false without environment.sandbox=docker"
        self.require(in_container or not self.internet, "internet", must)

    @property
    def is_used(self) -> bool:
        """Whether rollouts take turns."""
        return bool(self.tools)


ENVIRONMENT = "environment"  # the reward that an episode's environment gives
OF_EPISODE = f"{ENVIRONMENT}."  # before the name of a function of episode_rewards
JUDGE_PROMPT = """How good is this answer, from 0 (useless or wrong) to 1 (complete and correct)?

Question: {prompt}

Answer: {completion}

Think briefly, then end with a line of the form "Score: 0.5"."""
LARGEST = 1e9
"""The largest absolute value of a reward: squares of gradients that it scales must not overflow
float32."""


@dataclass(kw_only=True)
class JudgeConfig(Section):
    """The reward `judge`: a model behind an OpenAI-compatible endpoint, which is asked about each
    completion. The run's metrics have the means of its seconds, tokens and retries."""

    key = "reward.judge"

    url: str = ""
    """Address of the endpoint, to which /chat/completions is added."""
    model: str = ""
    """Name of the model there."""
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable with the endpoint's key, which no file of the run has."""
    prompt: str = JUDGE_PROMPT
    """What the judge is asked. {completion} is the completion, {prompt} the whole prompt as text,
    and any other {field} that of the prompt's row; other braces are doubled."""
    pattern: str = r"Score: *([-+]?[0-9]+(?:\.[0-9]+)?)"
    """Regular expression whose last match in the judge's answer has the reward in group 1. An
    answer without one is a failed reward."""
    options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0, "max_tokens": 1024})
    """Further fields of the request; null leaves one out. An answer that reaches `max_tokens` is a
    failed reward."""
    max_requests: int = number(32, least=1, most=4096)
    """Requests at once, from each of reward.num_workers processes."""
    timeout_s: float = number(30.0, above=0, most=DAY_S)
    """Longest time of one request; reward.timeout_s is for all attempts together."""
    max_retries: int = number(4, least=0, most=100)
    """How often a request is repeated that found no server, a busy or a broken one, or ran out of
    time. The waits double from half a second to eight, unless the server says how long."""


@dataclass(kw_only=True)
class RewardConfig(Section):
    """The rewards, and how long each may take."""

    functions: list[str] = field(default_factory=lambda: ["math"])
    """Reward functions: math | exact | format | code (the program in the completion passes tests) |
    judge (what the model of `judge` thinks of it) | task (`reward` of the recipe's own task.py) |
    group (`group_reward` there, which scores all rollouts of a prompt at once) | environment (what
    the episode's environment gives, and `episode_reward` of task.py) | environment.NAME (the
    function NAME of the list `episode_rewards` of task.py, a reward of its own). In an episode the
    others get the model's last turn. Accuracy is the share of completions to which the first one
    gives `correct_at` or more."""
    weights: list[float] = field(
        default_factory=lambda: [1.0], metadata={"least": -1e6, "most": 1e6}
    )
    """One weight per function; the reward is the weighted sum."""
    correct_at: float = number(1.0, least=-LARGEST, most=LARGEST)
    """A completion counts as correct from this reward of the first function on: accuracy counts
    those, and a group whose rewards are all equal and correct is `solved`. Set it for rewards on
    another scale than 0 to 1."""
    answer_field: str = "answer"
    """Field of the data row that holds the expected answer; `a.b` is field b of the object in a.
    Rows without `answer` may have it in `reward_model.ground_truth`, as those for verl do."""
    pattern: str = r"(?s)^.*Answer: *(.+?)\s*$"
    """Regular expression searched in the completion: `exact` compares its group 1 with the
    answer, `format` gives 1 if it matches."""
    require_stop: bool = True
    """`exact` and `format` give 0 to a completion that did not end by itself."""
    num_workers: int = number(1, least=1, most=1024)
    """Processes of the reward pool."""
    timeout_s: float = number(10.0, above=0, most=DAY_S)
    """A reward that runs longer is killed and counted as hung."""
    on_failure: str = choice("drop", "zero")
    """What happens when the reward of a rollout fails (its code raises, exceeds the time limit or
    returns no number from -1e9 to 1e9): drop (its group is not trained on: a baseline over the
    others would favour completions that reward code can process) | zero (its reward is 0, for
    reward code that fails on wrong answers, such as a verifier that runs out of time). Failures are
    counted."""
    max_failure_rate: float = number(0.1, least=0, most=1)
    """The run stops when more than this share of the last 1000 rewards failed (after 50), with
    any `on_failure`; 1 never stops it."""

    sandbox: bool = True
    """Programs that a model wrote (reward `code`, tool `python`) run in a sandbox of the kernel: no
    network, no files but a scratch folder. The run refuses to start where that is not possible, and
    says in one line what a machine lacks; false lets them run with the rights of the run, on
    purpose."""
    program_s: float = number(5.0, above=0, most=DAY_S)
    """Longest time of one program; a reward's `timeout_s` is for all its programs."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    @property
    def episode_rewards(self) -> list[str]:
        """The functions of task.py's list `episode_rewards` that `functions` names, in its
        order."""
        named = [each for each in self.functions if each.startswith(OF_EPISODE)]
        return [each.removeprefix(OF_EPISODE) for each in named]

    @property
    def is_of_episode(self) -> bool:
        """Whether a function reads episodes, which a recipe without environments does not have."""
        return ENVIRONMENT in self.functions or bool(self.episode_rewards)

    def check(self) -> None:
        is_once = len({*self.episode_rewards}) == len(self.episode_rewards)
        self.require(is_once, "functions", "name each function of episode_rewards once")
        self.require(bool(self.functions), "functions", "name at least one function")
        must = f"have one weight per function ({len(self.functions)})"
        self.require(len(self.weights) == len(self.functions), "weights", must)
