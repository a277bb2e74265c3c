"""Names that resolve to more, to less, to nothing, and not at all."""

from __future__ import annotations

import asyncio
import socket

from services.gateway.discovery.dns import DnsAddresses


class FakeResolver:
    """Answers from a script, the last answer for ever; `asked` counts."""

    def __init__(self, *answers: list[str] | OSError) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def __call__(self, name: str) -> list[str]:
        assert name == "worker.svc"
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer


def source(resolver: FakeResolver) -> DnsAddresses:
    return DnsAddresses("worker.svc", 50051, refresh=0, resolve=resolver)


async def test_every_address_is_used_and_changes_are_told_once() -> None:
    resolver = FakeResolver(
        ["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.1"], ["10.0.0.2", "10.0.0.3"]
    )
    watch = source(resolver).watch()
    assert await anext(watch) == {"10.0.0.1:50051", "10.0.0.2:50051"}
    assert await anext(watch) == {"10.0.0.2:50051", "10.0.0.3:50051"}
    assert resolver.asked == 3


async def test_a_failing_resolver_keeps_the_last_known_set() -> None:
    down = socket.gaierror(socket.EAI_AGAIN, "try again")
    watch = source(FakeResolver(["10.0.0.1"], down, down, ["10.0.0.1"], ["10.0.0.9"])).watch()
    assert await anext(watch) == {"10.0.0.1:50051"}
    assert await anext(watch) == {"10.0.0.9:50051"}


async def test_a_name_without_pods_is_an_empty_set() -> None:
    none = socket.gaierror(socket.EAI_NONAME, "no such name")
    watch = source(FakeResolver(none, ["10.0.0.1"], none)).watch()
    assert [await anext(watch) for _ in range(3)] == [frozenset(), {"10.0.0.1:50051"}, frozenset()]


async def test_dual_stack_counts_once_and_ipv6_alone_is_bracketed() -> None:
    watch = source(FakeResolver(["10.0.0.1", "fd00::1"], ["fd00::1"])).watch()
    assert await anext(watch) == {"10.0.0.1:50051"}
    assert await anext(watch) == {"[fd00::1]:50051"}


async def test_the_system_resolver_and_cancellation() -> None:
    watch = DnsAddresses("localhost", 7).watch()
    assert await anext(watch) & {"127.0.0.1:7", "[::1]:7"}
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.wait([waiting], timeout=0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
