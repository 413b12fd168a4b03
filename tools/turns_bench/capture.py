"""OpenEnv's capture proxy, in the environment of `make rivals`.

    python -m turns_bench.capture ENGINE_URL NUM_SESSIONS

TRL's HarnessRolloutWorker trains agents that own their loop on what this proxy has captured, so all
requests of such an agent pass through it. It says in one line where it serves, with a key for each
session, and after the end of its input how many turns of each session can be trained on.
"""

from __future__ import annotations

import json
import socket
import sys

from openenv.core.harness.capture import CaptureServer, to_training_trace
from openenv.core.harness.capture.export import export_session


def main() -> None:
    """Serve."""
    engine, num_sessions = sys.argv[1], int(sys.argv[2])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = CaptureServer(llm_url=engine, model="any", port=port)
    server.start()
    sessions = [
        server.registry.create(purpose="train", sampling={"temperature": 1.0})
        for _ in range(num_sessions)
    ]
    print(json.dumps({"port": port, "keys": [each.session_id for each in sessions]}), flush=True)
    sys.stdin.read()
    traces = [to_training_trace(each.graph, export_session(each)) for each in sessions]
    print(json.dumps([len(trace.turns) for trace in traces]), flush=True)
    server.stop()


if __name__ == "__main__":
    main()
