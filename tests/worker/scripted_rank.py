"""A rank without an engine, for the agent's tests: it does what its script says.

The script is the config's `model`: words that change what an obedient rank does. A
request gets the tokens prompt[0] + 0, + 1, + 2, ... one a step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass

from protos import common_pb2, engine_pb2, worker_pb2
from services.common.process import die_with_parent
from services.worker.framing import CONFIG_ENV, SOCKET_ENV, FrameSocket
from services.worker.last_words import leave_reason

EPOCH = 7
NUM_PAGES = 100


@dataclass
class Request:
    """A running request: its next token, and how many remain."""

    next_token: int
    remaining: int


class ScriptedRank:
    """Serves commands until the agent goes."""

    def __init__(self, link: FrameSocket, script: set[str], step_seconds: float) -> None:
        self.link = link
        self.script = script
        self.step_seconds = step_seconds
        self.step = 0
        self.num_output_tokens = 0
        self.requests: dict[int, Request] = {}

    def load(self) -> None:
        """Reports progress, then readiness, unless the script says otherwise."""
        progress = worker_pb2.LoadProgress(phase="loading weights", done=1, total=2)
        self.link.send(engine_pb2.EngineEvent(progress=progress))
        if "refuse-model" in self.script:
            error = common_pb2.Error(message="the architecture Foo is not known")
            self.link.send(engine_pb2.EngineEvent(fatal=error))
            sys.exit(1)
        if "load-for-ever" in self.script:
            self.link.wait(None)
            sys.exit(0)
        info = worker_pb2.WorkerInfo(epoch=EPOCH, model="scripted", max_model_len=64)
        self.link.send(engine_pb2.EngineEvent(ready=info))

    def run(self) -> None:
        """One command batch, one step, and so on."""
        while True:
            self.link.wait(self.step_seconds if self.requests else 0.1)
            frame = worker_pb2.StepFrame(epoch=EPOCH)
            for command in self.link.receive(engine_pb2.EngineCommand):
                self.obey(command, frame)
            self.make_step(frame)

    def obey(self, command: engine_pb2.EngineCommand, frame: worker_pb2.StepFrame) -> None:
        for submit in command.submits:
            if not submit.prompt_ids:
                error = common_pb2.Error(
                    code=common_pb2.ERROR_CODE_INVALID_ARGUMENT, message="the prompt is empty"
                )
                frame.rejected.add(handle=submit.handle, error=error)
                continue
            if submit.prompt_ids[0] == 666:
                os.abort()
            frame.accepted.append(submit.handle)
            self.requests[submit.handle] = Request(
                submit.prompt_ids[0], submit.sampling.max_tokens or 1 << 30
            )
        for handle in command.aborts:
            if self.requests.pop(handle, None) is not None:
                frame.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_ABORT)
        if command.flush_cache:
            self.link.send(engine_pb2.EngineEvent(flushed_pages=11, num_flushes=1))

    def make_step(self, frame: worker_pb2.StepFrame) -> None:
        self.step += bool(self.requests)
        frame.step = self.step
        for handle, request in list(self.requests.items()):
            frame.handles.append(handle)
            frame.counts.append(1)
            frame.token_ids.append(request.next_token)
            request.next_token += 1
            request.remaining -= 1
            self.num_output_tokens += 1
            if request.remaining == 0:
                del self.requests[handle]
                frame.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_LENGTH)
        frame.load.num_running = len(self.requests)
        frame.load.num_pages = NUM_PAGES
        frame.load.num_free_pages = NUM_PAGES - len(self.requests)
        stats = engine_pb2.EngineStats(
            num_output_tokens=self.num_output_tokens,
            num_inflight_pages=len(self.requests),
            num_requests=len(self.requests),
            step_us=int(self.step_seconds * 1e6),
        )
        self.link.send(engine_pb2.EngineEvent(step=frame, stats=stats))


def main() -> None:
    """Obeys its two environment variables, as the real rank does."""
    die_with_parent()
    config = json.loads(os.environ[CONFIG_ENV])
    script = set(config["model"].split())
    if "leave-a-reason" in script:
        leave_reason(os.environ[SOCKET_ENV], "this rank has no GPU")
        sys.exit(1)
    if "exit-at-once" in script:
        sys.exit(3)
    if "never-connect" in script:
        time.sleep(3600)
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3600)  # a follower that only its parent's death can end
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(os.environ[SOCKET_ENV])
    rank = ScriptedRank(FrameSocket(sock), script, config["fake_step_ms"] / 1000)
    try:
        rank.load()
        rank.run()
    except EOFError:
        sys.exit(0)


if __name__ == "__main__":
    main()
