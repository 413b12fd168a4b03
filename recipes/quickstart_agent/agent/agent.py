"""An agent that knows nothing of training: it solves a task with a model and a tool, and leaves the
result in a file."""

import json
import os
import sys
import urllib.request

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


def ask(messages):
    """Return the model's next message."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [CALCULATOR]}).encode()
    headers = {"Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        return json.load(response)["choices"][0]["message"]


def multiply(expression):
    """Return the product, or what is wrong with the expression."""
    try:
        left, right = expression.split("*")
        return str(int(left) * int(right))
    except ValueError as error:
        return str({"error": str(error)})


messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    message = ask(messages)
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        told = multiply(**json.loads(call["function"]["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
with open("answer.txt", "w") as file:
    file.write(message["content"].removeprefix("Answer: "))
