"""An agent of smolagents that writes code, with another one that calls tools."""

import os
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def write_file(path: str, text: str) -> str:
    """Writes a file.

    Args:
        path: Where it is to be.
        text: What it is to hold.
    """
    with open(path, "w") as file:
        file.write(text)
    return f"{path} is written."


name, url = os.environ["LLAMARL_MODEL"], os.environ["OPENAI_BASE_URL"]
model = OpenAIModel(name, url, api_key="none", tool_choice="auto")
helper = ToolCallingAgent(
    [write_file], model, name="helper", description="Writes files.", max_steps=3
)
agent = CodeAgent([], model, managed_agents=[helper], max_steps=4)
agent.run(sys.argv[1])
