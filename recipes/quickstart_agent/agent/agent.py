"""An agent that knows nothing of training: it solves a task with a model and a tool, and leaves the
result in a file."""

import http.client
import json
import os
import sys
from urllib.parse import urlsplit

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


def ask(messages: list[dict]) -> dict:
    """Return the model's next message."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [CALCULATOR]}).encode()
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port)
    connection.request("POST", f"{url.path}/chat/completions", body)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    return json.load(response)["choices"][0]["message"]


def multiply(expression: str) -> str:
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
