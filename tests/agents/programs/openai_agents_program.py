"""An agent of OpenAI's SDK with a tool, an agent as a tool, and one that it hands over to."""

import os
import sys

from agents import Agent, Runner, function_tool


@function_tool
def write_file(path: str, text: str) -> str:
    """Writes a file."""
    with open(path, "w") as file:
        file.write(text)
    return f"{path} is written."


model = os.environ["LLAMARL_MODEL"]
helper = Agent(name="helper", instructions="You write files.", tools=[write_file], model=model)
reviewer = Agent(name="reviewer", instructions="You review files.", model=model)
agent = Agent(
    name="writer",
    instructions="You solve tasks.",
    model=model,
    tools=[write_file, helper.as_tool("ask_helper", "Asks a helper.")],
    handoffs=[reviewer],
)
Runner.run_sync(agent, sys.argv[1], max_turns=20)
