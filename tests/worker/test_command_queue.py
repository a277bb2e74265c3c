"""What waits for rank 0: aborts first, submissions in pieces, and what can be taken back."""

from __future__ import annotations

from protos import engine_pb2, worker_pb2
from services.worker.command_queue import PIECE_BYTES, CommandQueue

LARGE = PIECE_BYTES // 4  # prompt ids of three bytes each, so that two make a piece


def submit(handle: int, num_ids: int = 1) -> worker_pb2.Submit:
    return worker_pb2.Submit(handle=handle, prompt_ids=[40_000] * num_ids)


def handles(command: engine_pb2.EngineCommand | None) -> list[int]:
    assert command is not None
    return [row.handle for row in command.submits]


def test_small_commands_leave_as_one_and_in_order() -> None:
    queue = CommandQueue()
    assert queue.next() is None
    queue.add(engine_pb2.EngineCommand(submits=[submit(3), submit(1)]))
    queue.add(engine_pb2.EngineCommand(submits=[submit(2)], aborts=[9]))
    command = queue.next()
    assert handles(command) == [3, 1, 2]
    assert command is not None
    assert list(command.aborts) == [9]
    assert queue.next() is None


def test_an_abort_overtakes_large_submissions() -> None:
    queue = CommandQueue()
    queue.add(engine_pb2.EngineCommand(submits=[submit(n, LARGE) for n in range(10)]))
    assert handles(queue.next()) == [0, 1]
    queue.add(engine_pb2.EngineCommand(aborts=[1]))
    command = queue.next()
    assert command is not None
    assert list(command.aborts) == [1]
    assert handles(command) == [2, 3]


def test_what_was_not_sent_can_be_taken_back_once() -> None:
    queue = CommandQueue()
    queue.add(engine_pb2.EngineCommand(submits=[submit(n, LARGE) for n in range(5)]))
    queue.next()
    assert [queue.withdraw(n) for n in range(5)] == [False, False, True, True, True]
    assert not queue.withdraw(3)
    assert queue.next() is None


def test_every_flush_is_a_command() -> None:
    queue = CommandQueue()
    for _ in range(2):
        queue.add(engine_pb2.EngineCommand(flush_cache=True))
    commands = [queue.next(), queue.next(), queue.next()]
    assert [command is not None and command.flush_cache for command in commands] == [
        True,
        True,
        False,
    ]


def test_of_settings_the_last_word_counts_and_goes_once() -> None:
    queue = CommandQueue()
    queue.add(engine_pb2.EngineCommand(log_level="debug"))
    queue.add(engine_pb2.EngineCommand(log_level="info", watch_steps=True))
    queue.add(engine_pb2.EngineCommand(watch_steps=False))
    assert queue.next() == engine_pb2.EngineCommand(log_level="info", watch_steps=False)
    assert queue.next() is None


def test_whether_to_watch_is_told_once_and_the_last_word_counts() -> None:
    queue = CommandQueue()
    queue.add(engine_pb2.EngineCommand(watch_steps=True))
    queue.add(engine_pb2.EngineCommand(watch_steps=False))
    command = queue.next()
    assert command is not None
    assert command.HasField("watch_steps")
    assert not command.watch_steps
    assert queue.next() is None
    queue.add(engine_pb2.EngineCommand(aborts=[1]))
    command = queue.next()
    assert command is not None
    assert not command.HasField("watch_steps")
