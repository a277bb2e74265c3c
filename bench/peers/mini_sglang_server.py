"""Mini-SGLang's own frontend and tokenizer processes, with a stub for its scheduler.

    PYTHONPATH=MINI_SGLANG/python:. python -m bench.peers.mini_sglang_server \
        --port 9000 --model DIR --tokens 1,2,3 --report /tmp/sent.json

Runs in the peer's interpreter, with uvloop and httptools beside what it needs. The stub speaks
the messages of its scheduler over the same ZMQ sockets, one batch a step. Everything else is the
peer's code from the path that is given; nothing of it is copied.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import time
from pathlib import Path
from typing import Any

from bench.peers.steps import Steps


def run_scheduler(args: Any, token_ids: list[int], report: str, ready: Any) -> None:
    """The stub: user messages in, a token for each request out, until the process ends."""
    from minisgl.message import (
        AbortBackendMsg,
        BaseBackendMsg,
        BaseTokenizerMsg,
        BatchBackendMsg,
        BatchTokenizerMsg,
        DetokenizeMsg,
    )
    from minisgl.utils import ZmqPullQueue, ZmqPushQueue

    incoming = ZmqPullQueue(args.zmq_backend_addr, create=True, decoder=BaseBackendMsg.decoder)
    outgoing = ZmqPushQueue(
        args.zmq_detokenizer_addr,
        create=args.backend_create_detokenizer_link,
        encoder=BaseTokenizerMsg.encoder,
    )
    steps = Steps(token_ids, Path(report))

    def receive(message: Any) -> None:
        for one in message.data if isinstance(message, BatchBackendMsg) else [message]:
            if isinstance(one, AbortBackendMsg):
                steps.drop(one.uid)
            else:
                sampling = one.sampling_params
                steps.add(one.uid, sampling.max_tokens, sampling.top_p)

    ready.put("the stub scheduler is ready")
    while True:
        if not steps:
            receive(incoming.get())
        while not incoming.empty():
            receive(incoming.get())
        if pause := steps.pause():
            time.sleep(pause)  # the device at work
        rows = [
            DetokenizeMsg(uid=uid, next_token=token_id, finished=last)
            for uid, token_id, last in steps.take()
        ]
        if len(rows) == 1:
            outgoing.put(rows[0])
        elif rows:
            outgoing.put(BatchTokenizerMsg(data=rows))


def main() -> None:
    """Starts the processes as the peer's own launcher does, but for the scheduler."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--report", required=True)
    options = parser.parse_args()

    import torch
    from minisgl.distributed import DistributedInfo
    from minisgl.server.api_server import run_api_server
    from minisgl.server.args import ServerArgs
    from minisgl.tokenizer import tokenize_worker

    args = ServerArgs(
        model_path=options.model,
        tp_info=DistributedInfo(0, 1),
        dtype=torch.float32,
        server_port=options.port,
    )
    token_ids = [int(token) for token in options.tokens.split(",")]

    def start_backend() -> None:
        context = mp.get_context("spawn")
        ready = context.Queue()
        scheduler = (args, token_ids, options.report, ready)
        context.Process(target=run_scheduler, args=scheduler, daemon=True).start()
        tokenizer = {
            "tokenizer_path": args.model_path,
            "addr": args.zmq_detokenizer_addr,
            "backend_addr": args.zmq_backend_addr,
            "frontend_addr": args.zmq_frontend_addr,
            "local_bs": 1,
            "create": args.tokenizer_create_addr,
            "tokenizer_id": 0,
            "ack_queue": ready,
        }
        context.Process(target=tokenize_worker, kwargs=tokenizer, daemon=True).start()
        for _ in range(2):
            ready.get()

    run_api_server(args, start_backend, run_shell=False)


if __name__ == "__main__":
    main()
