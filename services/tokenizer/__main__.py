"""`shoal tokenizer` and `shoal detokenizer`, from the first to the last moment.

Both listen before the model's files are loaded, so that probes are answered while a
download runs, and drain when they are told to stop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from prometheus_client import CollectorRegistry

from protos import tokenizer_pb2_grpc
from services.common import logs, process
from services.common.admin import build_app, serve_admin
from services.common.config import parse
from services.common.metrics import process_registry
from services.common.rpc import IDLE_PEER_TIMEOUT_SECONDS, Server
from services.common.text.decoder import TextDecoder
from services.common.text.vocabulary import Vocabulary, build_vocabulary
from services.common.tracing import Tracing, tracing_to
from services.tokenizer.config import DetokenizerConfig, TokenizerConfig
from services.tokenizer.decode_servicer import DetokenizerServicer
from services.tokenizer.encode_servicer import TokenizerServicer
from services.tokenizer.encoder import Encoder
from services.tokenizer.lanes import Lanes
from services.tokenizer.metrics import DetokenizerMetrics, TokenizerMetrics
from services.tokenizer.session import Sessions
from services.tokenizer.to_proto import info_to_proto

log = logging.getLogger(__name__)

Role = Literal["tokenizer", "detokenizer"]

_GOODBYE_SECONDS = 1.0  # for calls that were told to end


async def serve(
    config: TokenizerConfig,
    role: Role,
    stop: asyncio.Event,
    *,
    peer_timeout: float = IDLE_PEER_TIMEOUT_SECONDS,
) -> int:
    """Runs one of the services until `stop` is set and its work is done.

    Raises StartupError if the model cannot be had or its tokenizer is not supported.
    """
    registry = process_registry()
    sessions = Sessions(peer_timeout=peer_timeout)
    server = Server([f"shoal.v1.{role.capitalize()}"])
    run = _tokenizer if role == "tokenizer" else _detokenizer
    ready = asyncio.Event()
    app = build_app(
        registry, ready=lambda: ready.is_set() and not sessions.draining, alive=lambda: True
    )
    try:
        async with (
            tracing_to(role, config.otlp_endpoint) as tracing,
            serve_admin(config.admin_address, app),
            run(config, server, registry, sessions, tracing),
        ):
            ready.set()
            await server.set_serving(True)
            log.info("ready")
            await stop.wait()
            await _drain(server, sessions, config.drain_timeout)
    finally:
        await server.stop(0)  # after a failed start too, while the loop that it needs is there
    return 0


@asynccontextmanager
async def _tokenizer(
    config: TokenizerConfig,
    server: Server,
    registry: CollectorRegistry,
    sessions: Sessions,
    tracing: Tracing,
) -> AsyncIterator[None]:
    """A tokenizer that listens and has loaded."""
    servicer = TokenizerServicer(sessions, TokenizerMetrics(registry, sessions), tracing)
    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(servicer, server.grpc)
    vocabulary = await _listen_and_load(config, server)
    encoder = await asyncio.to_thread(Encoder, vocabulary)
    async with Lanes(encoder, config.num_threads or 1) as lanes:
        servicer.lanes, servicer.info = (
            lanes,
            info_to_proto(config.served_model_name or config.model, vocabulary),
        )
        yield


@asynccontextmanager
async def _detokenizer(
    config: TokenizerConfig,
    server: Server,
    registry: CollectorRegistry,
    sessions: Sessions,
    tracing: Tracing,
) -> AsyncIterator[None]:
    """A detokenizer that listens and has loaded."""
    servicer = DetokenizerServicer(sessions, DetokenizerMetrics(registry, sessions), tracing)
    tokenizer_pb2_grpc.add_DetokenizerServicer_to_server(servicer, server.grpc)
    vocabulary = await _listen_and_load(config, server)
    servicer.info = info_to_proto(config.served_model_name or config.model, vocabulary)
    servicer.decoder = await asyncio.to_thread(TextDecoder.of, vocabulary)
    yield


async def _listen_and_load(config: TokenizerConfig, server: Server) -> Vocabulary:
    log.info("listening", extra={"address": await server.start(config.address, config.tls)})
    return await asyncio.to_thread(
        build_vocabulary, config.model, progress=_DownloadLog().on_progress
    )


class _DownloadLog:
    """A log line each tenth of a download."""

    def __init__(self) -> None:
        self._tenth = -1

    def on_progress(self, phase: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if tenth > self._tenth:
            self._tenth = tenth
            log.info(phase, extra={"done": done, "total": total})


async def _drain(server: Server, sessions: Sessions, timeout: float) -> None:
    """Takes no new work, lets what is in flight finish, and ends the sessions."""
    log.info("draining", extra={"in_flight": sessions.work})
    await server.set_serving(False)
    sessions.drain()
    try:
        async with asyncio.timeout(timeout):
            await sessions.idle()
    except TimeoutError:
        log.warning("gave up on work in flight", extra={"in_flight": sessions.work})
    sessions.end()
    await server.stop(_GOODBYE_SECONDS)


def main(argv: Sequence[str] | None = None, role: Role = "tokenizer") -> None:
    """Entry point of `shoal tokenizer`, `shoal detokenizer` and `python -m services.tokenizer`,
    which takes the role as its first flag: `--role detokenizer`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--role"] and arguments[1:2] in (["tokenizer"], ["detokenizer"]):
        role = "detokenizer" if arguments[1] == "detokenizer" else "tokenizer"
        del arguments[:2]
    what = "Turns prompts into token ids" if role == "tokenizer" else "Turns token ids into text"
    kind = TokenizerConfig if role == "tokenizer" else DetokenizerConfig
    config = parse(kind, arguments, prog=f"shoal {role}", description=f"{what}, over gRPC.")
    logs.setup(role, level=config.log_level, format=config.log_format)
    # Batches are encoded in the thread that asks: a pool shared by all threads would let
    # short prompts wait for long ones.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    process.run(lambda stop: serve(config, role, stop))


if __name__ == "__main__":
    main()
