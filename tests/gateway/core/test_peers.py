"""Sessions, pools, models, and the calls that need no generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import grpc.aio
import pytest

from protos import common_pb2, worker_pb2, worker_pb2_grpc
from services.common import rpc
from services.common.errors import (
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PeerLost,
    ShoalError,
    Unavailable,
)
from services.gateway.domain import ChatPrompt, Message, TextPrompt
from services.gateway.peers import breaker as breaker_module
from services.gateway.peers import catalog
from services.gateway.peers import load as load_module
from services.gateway.peers.pool import PeerPool
from services.gateway.peers.session import SessionTimes, error_from_rpc
from services.gateway.peers.worker import Request, Response, WorkerPeer
from services.gateway.prefix_index import PrefixIndex
from tests.gateway.core.conftest import Rig, collect, joined, make_rig, request
from tests.gateway.core.fakes import Activity, FakeWorker, expected_text, serving


async def test_readiness_names_what_is_missing(tmp_path: Path) -> None:
    async with make_rig(tmp_path) as rig:
        assert rig.core.readiness().ready
        for server, reason in (
            (rig.worker.server, "no worker is ready"),
            (rig.tokenizer.server, "no tokenizer is ready"),
            (rig.detokenizer.server, "no detokenizer is ready"),
        ):
            await server.kill()
            async with asyncio.timeout(1):  # a broken stream is noticed at once
                await rig.until_fleet(lambda fleet: fleet.missing())
            assert rig.core.readiness().reasons == (reason,)
            await server.start()
            await rig.until_fleet(lambda fleet: not fleet.missing())


async def test_a_peer_may_come_late(tmp_path: Path) -> None:
    async with make_rig(tmp_path, ready=False) as rig:
        await rig.until_fleet(lambda fleet: not fleet.missing())
        assert joined(await collect(await rig.core.start(request())))[0]


async def test_heartbeats_keep_an_idle_session(tmp_path: Path) -> None:
    times = SessionTimes(peer_timeout=1.5)
    async with make_rig(tmp_path, times=times) as rig:
        seen = await rig.core.fleet.change(-1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await rig.core.fleet.change(seen)


async def test_models_of_lost_workers_are_still_known(rig: Rig) -> None:
    await rig.worker.server.kill()
    await rig.until_fleet(lambda fleet: not fleet.workers.ready)
    assert [card.id for card in rig.core.models()] == ["fake"]
    with pytest.raises(Unavailable):
        await rig.core.start(request(model="fake"))
    with pytest.raises(ModelNotFound):
        await rig.core.tokenize("nope", TextPrompt("a"))


async def test_several_models_are_told_apart(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2, tokenizers=2, detokenizers=2) as rig:
        for fake in (rig.workers[1], rig.tokenizers[1], rig.detokenizers[1]):
            fake.info.model = "hub/other" if fake is not rig.workers[1] else "other"
            await fake.server.kill()
            await fake.server.start()
        await rig.until_fleet(
            lambda fleet: {peer.model for peer in fleet.detokenizers.ready} == {"fake", "hub/other"}
        )
        await rig.until_fleet(
            lambda fleet: {peer.model for peer in fleet.tokenizers.ready} == {"fake", "hub/other"}
        )
        await rig.until_fleet(lambda fleet: set(fleet.catalog.models()) == {"fake", "other"})
        with pytest.raises(InvalidRequest, match="fake, other"):
            await rig.core.start(request())
        for index, model in enumerate(("fake", "other")):
            chunks = await collect(await rig.core.start(request(model=model)))
            assert joined(chunks)[0] == expected_text("hello", 10)
            assert len(rig.workers[index].submits) == 1
            assert len(rig.tokenizers[index].jobs) == 1
            assert rig.detokenizers[index].frames


async def test_requests_for_an_expected_model_are_held_until_it_has_a_worker(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with make_rig(
        tmp_path, workers=2, tokenizers=2, detokenizers=2, hold_timeout=20, expect_models=("other",)
    ) as rig:

        def num_held(model: str) -> float | None:
            return rig.registry.get_sample_value("shoal_gateway_requests_held", {"model": model})

        with pytest.raises(ModelNotFound, match="served: fake, other") as refused:
            await rig.core.start(request(model="third"))
        with pytest.raises(ModelNotFound) as unlisted:
            rig.core.model("third")
        assert unlisted.value.message == refused.value.message
        with pytest.raises(Unavailable, match="seen"):
            rig.core.model("other")
        (before,) = rig.core.models()
        monkeypatch.setattr(catalog, "time", Mock(time=lambda: before.created + 1000.0))
        rig.core.fleet.catalog.look_again()
        assert rig.core.models() == [before]  # `created` is when it was seen first
        assert rig.core.model("fake") == before
        with pytest.raises(InvalidRequest, match="fake, other"):
            await rig.core.start(request())
        assert (num_held(""), num_held("other")) == (0, 0)
        held = asyncio.create_task(rig.core.start(request(model="other")))
        await asyncio.wait([held], timeout=0.05)
        assert num_held("other") == 1
        for fake in (rig.workers[1], rig.tokenizers[1], rig.detokenizers[1]):
            fake.info.model = "other"
            await fake.server.kill()
            await fake.server.start()
        assert joined(await collect(await held))[0] == expected_text("hello", 10)
        assert num_held("other") == 0

        rig.core.hold_timeout = 0
        rig.core.fleet.workers._apply(frozenset({rig.worker.server.address}))  # scaled to none
        assert [card.id for card in rig.core.models()] == ["fake", "other"]
        with pytest.raises(Unavailable):
            await rig.core.start(request(model="other"))


async def test_tokenize_and_detokenize(rig: Rig) -> None:
    text = await rig.core.tokenize("", TextPrompt("ab"), return_token_strs=True)
    assert (list(text.token_ids), list(text.token_strs or ())) == ([97, 98], ["a", "b"])
    assert text.max_model_len == 1000
    chat = await rig.core.tokenize("fake", ChatPrompt((Message("user", "x"),)))
    assert ("".join(map(chr, chat.token_ids)), chat.token_strs) == ("<user>x", None)
    assert await rig.core.detokenize("", [97, 98]) == "ab"


async def test_token_bytes_are_asked_for_once(rig: Rig) -> None:
    assert list(await rig.core.token_bytes([97, 98, 97])) == [b"a", b"b", b"a"]
    assert list(await rig.core.token_bytes([98, 97])) == [b"b", b"a"]
    assert rig.detokenizer.lookups == 1


async def test_flush_reaches_every_worker(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        await rig.core.flush_cache()
        assert [worker.flushes for worker in rig.workers] == [1, 1]


async def test_fleet_load_is_what_workers_report(rig: Rig) -> None:
    rig.worker.auto = False
    generations = [await rig.core.start(request()) for _ in range(3)]
    rig.worker.step()
    for generation in generations:
        await anext(generation)
    sample = rig.registry.get_sample_value
    assert sample("shoal_fleet_requests_running") == 3
    assert sample("shoal_fleet_requests_waiting") == 2
    assert sample("shoal_gateway_requests_in_flight", {"kind": "completion"}) == 3
    assert sample("shoal_gateway_handles", {"peer": "worker"}) == 3
    assert sample("shoal_gateway_peers_ready", {"peer": "worker"}) == 1
    for generation in generations:
        await generation.aclose()
    assert sample("shoal_gateway_output_tokens_total") == 3


class _Scripted:
    """An address source that a test drives."""

    def __init__(self) -> None:
        self.sets: asyncio.Queue[frozenset[str]] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        while True:
            yield await self.sets.get()
            self.sets.task_done()  # whoever follows has applied it


async def test_a_pool_follows_its_source(tmp_path: Path) -> None:
    activity = Activity()
    workers = [FakeWorker(tmp_path / name, activity) for name in "ab"]
    changed = asyncio.Event()
    source = _Scripted()
    index = PrefixIndex()
    pool = PeerPool(source, lambda address: WorkerPeer(address, SessionTimes(), changed.set, index))
    task = asyncio.create_task(pool.run())
    async with serving(*workers), asyncio.timeout(10):
        source.sets.put_nowait(frozenset(worker.server.address for worker in workers))
        while len(pool.ready) < 2:
            changed.clear()
            await changed.wait()
        source.sets.put_nowait(frozenset({workers[1].server.address}))
        while len(pool.ready) > 1:
            changed.clear()
            await changed.wait()
        assert [peer.address for peer in pool] == [workers[1].server.address]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class _Watched(WorkerPeer):
    """A worker's session whose end and channels can be seen."""

    def __init__(self, address: str, changed: asyncio.Event) -> None:
        super().__init__(address, SessionTimes(), changed.set, PrefixIndex())
        self.channels: list[grpc.aio.Channel] = []
        self.ended = asyncio.Event()

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self.ended.set()

    def _open(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Request, Response]:
        self.channels.append(channel)
        return super()._open(channel)


@pytest.mark.parametrize("end", ["aborted", "finished", "lost"])
async def test_a_busy_session_to_a_gone_address_is_released_with_its_last_handle(
    tmp_path: Path, end: str
) -> None:
    worker = FakeWorker(tmp_path / "a", Activity())
    worker.auto = False
    changed = asyncio.Event()
    source = _Scripted()
    pool = PeerPool(source, lambda address: _Watched(address, changed))
    task = asyncio.create_task(pool.run())
    async with serving(worker), asyncio.timeout(10):
        source.sets.put_nowait(frozenset({worker.server.address}))
        await changed.wait()
        (peer,) = pool.ready
        submit = worker_pb2.Submit(sampling=common_pb2.SamplingParams(max_tokens=1))
        submission = peer.submit(submit, Mock())
        await worker.activity.until(lambda: worker.running)
        source.sets.put_nowait(frozenset())
        await source.sets.join()
        assert pool.num_handles == 1
        assert not peer.ended.is_set()
        if end == "aborted":
            submission.abort()
        elif end == "finished":
            worker.step()
        else:
            await worker.server.kill()
        await peer.ended.wait()
        (channel,) = peer.channels
        assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        assert pool.num_handles == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_restarted_worker_is_not_believed_to_hold_what_it_held() -> None:
    index = PrefixIndex()
    peer = WorkerPeer("a:1", SessionTimes(), lambda: None, index)
    load = worker_pb2.Load(prefix_digest=[7], has_digest=True)
    digest = worker_pb2.StepFrame(epoch=1, load=load)
    peer._on_frame(Response(info=worker_pb2.WorkerInfo(epoch=1), step=digest))
    peer._on_frame(Response(info=worker_pb2.WorkerInfo(epoch=1)))
    assert index.held_by("a:1") == {7}
    peer._on_frame(Response(info=worker_pb2.WorkerInfo(epoch=2)))
    assert index.held_by("a:1") == set()


async def test_an_empty_digest_forgets_the_prefixes_and_an_absent_one_does_not() -> None:
    index = PrefixIndex()
    peer = WorkerPeer("a:1", SessionTimes(), lambda: None, index)
    for load, prefixes in (
        (worker_pb2.Load(prefix_digest=[7], has_digest=True), {7}),
        (worker_pb2.Load(num_running=1), {7}),
        (worker_pb2.Load(has_digest=True), set()),
    ):
        peer._on_frame(Response(step=worker_pb2.StepFrame(load=load)))
        assert index.held_by("a:1") == prefixes


async def test_a_new_session_has_nothing_unreported() -> None:
    index = PrefixIndex()
    peer = WorkerPeer("a:1", SessionTimes(), lambda: None, index)
    peer._on_frame(Response(info=worker_pb2.WorkerInfo(epoch=1)))
    peer.submit(worker_pb2.Submit(), Mock())
    assert peer.load == 1
    peer._lose(PeerLost("gone"))
    assert peer.load == 0


async def test_a_load_told_before_a_request_arrived_leaves_no_room_for_another() -> None:
    peer = WorkerPeer("a:1", SessionTimes(), lambda: None, PrefixIndex())
    info = worker_pb2.WorkerInfo(epoch=1, max_running_requests=2)
    peer._on_frame(Response(info=info))  # two run and one waits
    handles = []
    for room in (2, 1, 0):
        submit = worker_pb2.Submit()
        peer.submit(submit, Mock())
        handles.append(submit.handle)
        assert peer.room == room
    for told, accepted, room, load in (
        (worker_pb2.Load(), [], 0, 3),  # on their way to it
        (worker_pb2.Load(num_running=1), handles[:1], 0, 3),
        (worker_pb2.Load(num_running=2), handles[1:2], 0, 3),
        (worker_pb2.Load(num_running=2, num_waiting=1), handles[2:], 0, 3),
        (worker_pb2.Load(num_running=2, num_waiting=2), [], -1, 4),  # another gateway's
    ):
        step = worker_pb2.StepFrame(epoch=1, load=told, accepted=accepted)
        peer._on_frame(Response(step=step))
        assert (peer.room, peer.load) == (room, load)
    step = worker_pb2.StepFrame(epoch=1, load=worker_pb2.Load())
    step.finished.extend(worker_pb2.Finished(handle=handle) for handle in handles)
    peer._on_frame(Response(step=step))
    assert (peer.room, peer.load) == (3, 0)
    submit, sink = worker_pb2.Submit(), Mock()
    peer.submit(submit, sink).abort()
    assert (peer.room, peer.load) == (3, 0)


async def test_those_that_wait_for_a_grammar_leave_room_until_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_module, "_MAX_COMPILING", 4)
    peer = WorkerPeer("a:1", SessionTimes(), lambda: None, PrefixIndex())
    peer._on_frame(Response(info=worker_pb2.WorkerInfo(epoch=1, max_running_requests=2)))

    def submit() -> int:
        message = worker_pb2.Submit()
        peer.submit(message, Mock())
        return message.handle

    def hear(**fields: Any) -> None:
        step = worker_pb2.StepFrame(epoch=1, load=worker_pb2.Load(), **fields)
        peer._on_frame(Response(step=step))

    first = [submit() for _ in range(3)]
    assert (peer.room, peer.load) == (0, 3)
    hear(compiling=[*first, 99])  # 99 was given up meanwhile
    assert (peer.room, peer.load) == (3, 3)
    more = [submit() for _ in range(3)]
    hear(compiling=more)
    assert (peer.room, peer.load) == (1, 6)  # two more than may wait so
    running = worker_pb2.Load(num_running=1)
    step = worker_pb2.StepFrame(epoch=1, load=running, accepted=first[:1])
    peer._on_frame(Response(step=step))
    assert (peer.room, peer.load) == (1, 6)
    refused = [worker_pb2.Rejected(handle=handle) for handle in more]
    hear(compiling=more[:1], rejected=refused, accepted=first[1:2])  # merged: it came before
    assert (peer.room, peer.load) == (3, 3)
    assert peer._load._compiling == {first[2]}
    peer._lose(PeerLost("gone"))
    assert peer.load == 0


async def test_a_probe_that_fails_tells_when_the_next_may_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(breaker_module, "FIRST_PAUSE_SECONDS", 0.01)
    changed = asyncio.Event()
    peer = WorkerPeer("a:1", SessionTimes(), changed.set, PrefixIndex())
    peer._on_frame(Response(info=worker_pb2.WorkerInfo(epoch=1)))
    refusal = common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE)
    for _ in range(breaker_module.THRESHOLD + 1):  # the last one is the probe
        async with asyncio.timeout(5):
            while not peer.ready:
                await changed.wait()
                changed.clear()
        submit = worker_pb2.Submit()
        peer.submit(submit, Mock())
        step = worker_pb2.StepFrame()
        step.rejected.add(handle=submit.handle, error=refusal)
        peer._on_frame(Response(step=step))
    assert peer.breaker.num_openings == 2
    changed.clear()
    async with asyncio.timeout(5):  # by itself it would be told of after PROBE_SECONDS
        while not peer.ready:
            await changed.wait()
            changed.clear()


@pytest.mark.parametrize("error", [Overloaded("full", retry_after=1.2), Unavailable("loading")])
async def test_a_unary_calls_error_is_the_one_that_was_raised(
    tmp_path: Path, error: ShoalError
) -> None:
    class Refusing(worker_pb2_grpc.WorkerServicer):
        async def FlushCache(
            self, request: worker_pb2.FlushCacheRequest, context: object
        ) -> worker_pb2.FlushCacheResponse:
            raise error

    server = rpc.Server([])
    worker_pb2_grpc.add_WorkerServicer_to_server(Refusing(), server.grpc)  # type: ignore[abstract]
    address = await server.start(f"unix:{tmp_path}/w")
    async with rpc.open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).FlushCache(worker_pb2.FlushCacheRequest())
    await server.stop(0)
    again = error_from_rpc(caught.value)
    assert isinstance(again, type(error))
    assert again.message == error.message
    assert again.retry_after == (None if error.retry_after is None else 2)


async def test_a_lost_peers_address_is_for_the_log_alone(tmp_path: Path) -> None:
    async with rpc.open_channel(f"unix:{tmp_path}/nobody") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).FlushCache(worker_pb2.FlushCacheRequest())
    unreachable = error_from_rpc(caught.value)
    lost = WorkerPeer._lost(FakePeer(), "was lost")  # type: ignore[arg-type]
    for error, address in ((unreachable, "nobody"), (lost, "10.0.0.7:50051")):
        assert isinstance(error, PeerLost)
        assert address in error.reason
        assert address not in error.message


class FakePeer:
    """What a session's loss is told of."""

    kind = "worker"
    _name = "worker 10.0.0.7:50051"
