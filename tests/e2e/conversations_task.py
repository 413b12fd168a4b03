"""A program that talks to the model in a random tree of conversations, and writes down what it
asked and what it was told."""

import fcntl
import itertools
import json
import os
import random
import threading
import urllib.error
import urllib.request
from pathlib import Path

from llamarl.scoring.agent import AgentEnvironment
from tests.e2e.agent_task import CALCULATOR, calculator

LOG = "LLAMARL_TEST_LOG"  # the file to write to
SEED = "LLAMARL_TEST_SEED"
COUNT = itertools.count()


def ask(url, messages, tools, **options):
    """The message, its usage, its id and its log-probs; None if the request is refused, with the
    code."""
    given = {"model": "any", "messages": messages, "tools": tools, "logprobs": True, **options}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(given).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            if options.get("stream"):
                return joined([line for line in response if line.startswith(b"data: {")])
            found = json.load(response)
    except urllib.error.HTTPError as error:
        return None, json.load(error)["error"]["code"], "", []
    (choice,) = found["choices"]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    return choice["message"], found["usage"], found["id"], logprobs


def joined(lines):
    """What `ask` returns, of the events of a stream."""
    message, logprobs, pieces = {"role": "assistant", "content": ""}, [], 0
    for line in lines:
        event = json.loads(line.removeprefix(b"data: "))
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            pieces += bool(delta.get("content"))
            if "tool_calls" in delta:
                message.setdefault("tool_calls", []).extend(delta["tool_calls"])
            if choice["logprobs"]:
                logprobs += [each["logprob"] for each in choice["logprobs"]["content"]]
    for call in message.get("tool_calls", ()):
        del call["index"]
    return message, {**event["usage"], "pieces": pieces}, event["id"], logprobs


class Agent(AgentEnvironment):
    def play(self, url, question, answer, **row):
        self.rng = random.Random(f"{os.environ[SEED]} {question} {next(COUNT)}")
        self.url, self.question = url, question
        self.exchanges, self.lock = [], threading.Lock()
        self.is_parallel = self.ends_early = False
        for _ in range(self.rng.randint(2, 7)):
            act = self.rng.choice(
                (self.go_on, self.go_on, self.retry, self.edit, self.forge, self.compact, self.sub)
                + (self.several,)
            )
            if not act():
                break
        if self.rng.random() < 0.2:  # nobody waits for what is asked now
            self.ends_early = True
            threading.Thread(target=self.exchange, args=(self.first(), ())).start()
            self.rng.random()
        reward = random.SystemRandom().random()  # no other episode has it
        own = {}
        if self.rng.random() < 0.5 and self.exchanges:
            own[self.rng.choice(self.exchanges)["id"]] = self.rng.random()
        found = {"reward": reward, "own": own, "exchanges": self.exchanges}
        found |= {"is_parallel": self.is_parallel, "ends_early": self.ends_early}
        with Path(os.environ[LOG]).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(found) + "\n")
        return reward, own

    def number(self):
        return str(self.rng.randint(1, 99))

    def first(self):
        return [{"role": "user", "content": self.question}]

    def exchange(self, messages, tools=(CALCULATOR,)):
        """Ask once; False if no more can be asked."""
        options = {}
        if self.rng.random() < 0.5:
            options = {"stream": True, "stream_options": {"include_usage": True}}
        if self.rng.random() < 0.2:
            options["max_tokens"] = self.rng.randint(1, 6)
        if self.rng.random() < 0.2:
            options["stop"] = [str(self.rng.randint(0, 9))]
        reply, usage, found, logprobs = ask(self.url, messages, [*tools], **options)
        if reply is None:
            return False
        each = {"messages": messages, "tools": len(tools), "reply": reply, "id": found}
        with self.lock:
            own = {"usage": usage, "logprobs": logprobs, "options": options}
            self.exchanges.append(each | own)
        return True

    def told(self, reply):
        """What follows a message of the model."""
        calls = reply.get("tool_calls", ())
        if not calls:
            return [{"role": "user", "content": self.number()}]
        try:
            content = str(calculator(**json.loads(calls[0]["function"]["arguments"])))
        except Exception:
            content = "0"
        return [{"role": "tool", "tool_call_id": call["id"], "content": content} for call in calls]

    def pick(self):
        return self.rng.choice(self.exchanges) if self.exchanges else None

    def go_on(self):
        """After the last exchange, or another one that may have been followed already."""
        if not self.exchanges:
            return self.exchange(self.first())
        last = self.exchanges[-1] if self.rng.random() < 0.7 else self.pick()
        more = [*last["messages"], last["reply"], *self.told(last["reply"])]
        return self.exchange(more, (CALCULATOR,) * last["tools"])

    def retry(self):
        """The same request once more, as one that samples several answers."""
        if (each := self.pick()) is None:
            return self.go_on()
        return self.exchange(each["messages"], (CALCULATOR,) * each["tools"])

    def edit(self):
        """What the model was told last is something else."""
        if (each := self.pick()) is None:
            return self.go_on()
        changed = {"role": "user", "content": self.number()}
        return self.exchange([*each["messages"][:-1], changed], (CALCULATOR,) * each["tools"])

    def forge(self):
        """The model is said to have written what it has not."""
        if (each := self.pick()) is None:
            return self.go_on()
        forged = {"role": "assistant", "content": self.number()}
        more = [*each["messages"], forged, {"role": "user", "content": self.number()}]
        return self.exchange(more, (CALCULATOR,) * each["tools"])

    def compact(self):
        """The conversation in short."""
        return self.exchange([{"role": "user", "content": f"{self.question} {self.number()}"}])

    def sub(self):
        """Another agent, with other tools."""
        return self.exchange([{"role": "user", "content": self.number()}], ())

    def several(self):
        """Requests at the same time, some of them equal."""
        self.is_parallel = True
        requests = [self.first(), self.first(), [{"role": "user", "content": self.number()}]]
        if (each := self.pick()) is not None:
            more = [*each["messages"], each["reply"], *self.told(each["reply"])]
            requests += [more, more] if each["tools"] else []
        threads = [threading.Thread(target=self.exchange, args=(r,)) for r in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return True


environment = Agent
