"""The calculator of recipes/quickstart_tools, run by a program that asks for each turn."""

import json
import urllib.request

from llamarl.scoring.agent import AgentEnvironment

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Multiplies two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "two numbers"}},
            "required": ["expression"],
        },
    },
}


def calculator(expression):
    left, right = expression.split("*")
    return int(left) * int(right)


def ask(url, messages):
    body = json.dumps({"model": "any", "messages": messages, "tools": [CALCULATOR]}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]


class Agent(AgentEnvironment):
    def play(self, url, question, answer, **row):
        messages = [{"role": "user", "content": question}]
        while True:
            message = ask(url, messages)
            messages.append(message)
            if not message.get("tool_calls"):
                return float(message["content"] == f"Answer: {answer}")
            for call in message["tool_calls"]:
                try:
                    content = str(calculator(**json.loads(call["function"]["arguments"])))
                except Exception as error:
                    content = str({"error": str(error)})
                told = {"role": "tool", "tool_call_id": call["id"], "content": content}
                messages.append(told)


environment = Agent
