"""The chat shell against a scripted server-sent-events server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.client.chat.client import ChatClient, Piece
from services.client.chat.conversation import Conversation
from services.client.chat.lines import Messages, StreamLines, history_path
from services.client.chat.meter import Meter, Stopwatch
from services.client.chat.shell import Shell
from services.client.endpoint import ApiError, Endpoint
from tests.client.terminal import Terminal


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


DONE = b"data: [DONE]\n\n"
HELLO = [
    event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
    piece("Hé"),
    piece("llo"),
    event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
    event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}),
    DONE,
]


def thought(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"reasoning_content": text}}]})


@dataclass
class ScriptedServer:
    """Answers /v1/models and every chat with `answer`; a `hang` leaves the stream open."""

    answer: list[bytes] = field(default_factory=lambda: list(HELLO))
    status: str = "200 OK"
    refused: tuple[int, ...] = ()  # the chats, counted from 0, that get a 503
    hang: bool = False
    bodies: list[Any] = field(default_factory=list)
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        body = await reader.readexactly(int(length or 0))
        parts = [json.dumps({"data": [{"id": "tiny"}, {"id": "other"}]}).encode()]
        status = "200 OK"
        if b"/chat/completions" in head:
            self.bodies.append(json.loads(body))
            parts, status = self.answer, self.status
            if len(self.bodies) - 1 in self.refused:
                parts, status = [b'{"error": {"message": "busy"}}'], "503 Service Unavailable"
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
        for part in parts:
            writer.write(part)
            await writer.drain()
        if self.hang and b"/chat/completions" in head:
            await reader.read()  # until the client closes
            self.client_left.set()
        writer.close()


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncIterator[ScriptedServer]:
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    async with listener:
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
        yield server


class Lines:
    """A LineSource of given lines."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    async def read(self) -> str | None:
        return next(self._lines, None)


class Paper(io.StringIO):
    """Where answers are printed; tells of the first piece."""

    def __init__(self) -> None:
        super().__init__()
        self.touched = asyncio.Event()

    def write(self, text: str) -> int:
        self.touched.set()
        return super().write(text)


async def _talk(
    server: ScriptedServer,
    *lines: str,
    talk: Conversation | None = None,
    out: io.StringIO | None = None,
) -> tuple[str, str]:
    """What a conversation prints: answers and notes."""
    out, notes = out or io.StringIO(), io.StringIO()
    async with ChatClient(Endpoint(server.url)) as client:
        shell = Shell(client, talk or Conversation("tiny"), out=out, notes=notes)
        await shell.run(Lines(*lines))
    return out.getvalue(), notes.getvalue()


async def test_models_lists_what_is_served() -> None:
    async with serving(ScriptedServer()) as server, ChatClient(Endpoint(server.url)) as client:
        assert await client.models() == ["tiny", "other"]


async def test_a_conversation_keeps_its_turns() -> None:
    async with serving(ScriptedServer()) as server:
        out, notes = await _talk(server, "hi", "", "again")
    assert out == "Héllo\nHéllo\n"
    assert notes == ""
    assert server.bodies[0] == {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Héllo"},
        {"role": "user", "content": "again"},
    ]


async def test_settings_go_into_the_request() -> None:
    talk = Conversation("tiny", "be brief", {"temperature": 0.0, "max_tokens": 7})
    async with serving(ScriptedServer()) as server:
        await _talk(server, "hi", talk=talk)
    (body,) = server.bodies
    assert (body["temperature"], body["max_tokens"]) == (0.0, 7)
    assert body["messages"][0] == {"role": "system", "content": "be brief"}


async def test_clear_system_help_exit() -> None:
    lines = ("hi", "/clear", "new", "/system pirate", "ahoy", "/help", "/what", "/exit", "unsaid")
    async with serving(ScriptedServer()) as server:
        _, notes = await _talk(server, *lines)
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "new"}]
    assert server.bodies[2]["messages"] == [
        {"role": "system", "content": "pirate"},
        {"role": "user", "content": "ahoy"},
    ]
    assert len(server.bodies) == 3
    assert "/retry" in notes
    assert "there is no command /what" in notes


async def test_ctrl_c_stops_the_answer_and_closes_the_stream() -> None:
    async with serving(ScriptedServer(answer=[piece("partly")], hang=True)) as server:
        paper = Paper()
        talk = asyncio.create_task(_talk(server, "hi", out=paper))
        await paper.touched.wait()
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(5):
            out, notes = await talk
            await server.client_left.wait()
    assert (out, notes) == ("partly\n", "stopped\n")


async def test_a_refusal_is_shown_and_forgotten() -> None:
    refusal = json.dumps({"error": {"message": "the model 'tiny' does not exist"}}).encode()
    async with serving(ScriptedServer(answer=[refusal], status="404 Not Found")) as server:
        out, notes = await _talk(server, "hi", "again")
    assert out == ""
    assert notes == "the model 'tiny' does not exist\n" * 2
    assert len(server.bodies[1]["messages"]) == 1


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ([piece("a"), event({"error": {"message": "the worker was lost"}})], "the worker was lost"),
        ([piece("a")], "cut off before its end"),
        ([b"data: {oops\n\n"], "no chunk"),
    ],
)
async def test_a_stream_that_fails_says_so(answer: list[bytes], sentence: str) -> None:
    async with (
        serving(ScriptedServer(answer=answer)) as server,
        ChatClient(Endpoint(server.url)) as client,
    ):
        with pytest.raises(ApiError, match=sentence):
            async for _ in client.stream("tiny", [{"role": "user", "content": "hi"}], {}):
                pass


async def _command(*args: str, stdin: bytes = b"") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services", "chat", *args),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_command_answers_once() -> None:
    async with serving(ScriptedServer()) as server:
        assert await _command("--url", server.url, "--prompt", "hi") == (0, "Héllo\n", "")
    assert server.bodies[0]["model"] == "tiny"


async def test_the_command_reads_lines_from_a_pipe() -> None:
    async with serving(ScriptedServer()) as server:
        result = await _command("--url", server.url, "--model", "other", stdin=b"hi\nmore\n")
    assert result == (0, "Héllo\nHéllo\n", "")
    assert [body["model"] for body in server.bodies] == ["other", "other"]


async def test_nothing_there_is_one_sentence() -> None:
    status, out, err = await _command("--url", "http://127.0.0.1:9/v1", "--prompt", "hi")
    assert (status, out) == (1, "")
    assert err == "shoal: nothing answers at http://127.0.0.1:9/v1\n"


async def test_settings_are_set_listed_unset_and_checked() -> None:
    lines = (
        *("/set", "/set temperature 0.2", '/set stop ["a b", "c"]', "/set seed 7", "hi"),
        *("/set seed", "again", "/set heat 3", "/set top_k much"),
    )
    async with serving(ScriptedServer()) as server:
        _, notes = await _talk(server, *lines)
    first, second = server.bodies
    assert (first["temperature"], first["stop"], first["seed"]) == (0.2, ["a b", "c"], 7)
    assert "seed" not in second
    assert notes.startswith("nothing is set: the server's own settings\ntemperature = 0.2\n")
    assert "there is no setting 'heat'; choose from temperature," in notes
    assert "'much' is no value for top_k" in notes


@pytest.mark.parametrize("value", ["nan", "-inf", "1e999"])
async def test_what_json_has_no_number_for_is_not_set(value: str) -> None:
    async with serving(ScriptedServer()) as server:
        out, notes = await _talk(server, f"/set temperature {value}", "hi")
    assert (out, notes) == ("Héllo\n", f"'{value}' is no value for temperature\n")


async def test_another_model_is_asked_if_it_is_served() -> None:
    async with serving(ScriptedServer()) as server:
        _, notes = await _talk(server, "/model", "/model none", "/model other", "hi")
    assert server.bodies[0]["model"] == "other"
    assert notes.startswith("* tiny\n  other\n")
    assert "the model 'none' is not served; there are: tiny, other" in notes


async def test_retry_asks_the_last_question_again() -> None:
    async with serving(ScriptedServer()) as server:
        _, notes = await _talk(server, "/retry", "one", "two", "/retry")
    assert notes == "there is no question to ask again\n"
    assert server.bodies[1]["messages"] == server.bodies[2]["messages"]
    assert len(server.bodies) == 3


async def test_a_retry_that_fails_loses_nothing() -> None:
    async with serving(ScriptedServer(refused=(2, 3))) as server:
        _, notes = await _talk(server, "one", "two", "/retry", "/retry", "/retry", "three")
    assert notes == "busy\n" * 2
    asked = [[turn["content"] for turn in body["messages"]] for body in server.bodies]
    assert asked[1:5] == [["one", "Héllo", "two"]] * 4
    assert asked[5] == ["one", "Héllo", "two", "Héllo", "three"]


async def test_retry_asks_a_question_again_whose_answer_failed() -> None:
    lines = ("one", "two", "/retry", "/retry", "three", "four", "/clear", "/retry")
    async with serving(ScriptedServer(refused=(1, 2, 5))) as server:
        _, notes = await _talk(server, *lines)
    assert notes == (
        "busy\n" * 3 + "the conversation is forgotten\nthere is no question to ask again\n"
    )
    asked = [[turn["content"] for turn in body["messages"]] for body in server.bodies]
    assert asked[1:4] == [["one", "Héllo", "two"]] * 3
    assert asked[4] == ["one", "Héllo", "two", "Héllo", "three"]
    assert len(asked) == 6


async def test_a_saved_conversation_goes_on_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    async with serving(ScriptedServer()) as server:
        await _talk(server, "/system be brief", "/set seed 5", "hi", f"/save {file}")
        _, notes = await _talk(server, f"/load {file}", "more")
    assert notes == f"loaded 1 questions and answers from {file}\n"
    assert server.bodies[1]["seed"] == 5
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Héllo"},
        {"role": "user", "content": "more"},
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot read"),
        ("oops", "is not JSON"),
        ('{"messages": [{"role": "user", "content": "alone"}]}', "is not a saved conversation"),
        ("[]", "is not a saved conversation"),
        ('{"messages": [], "settings": ["seed"]}', "is not a saved conversation"),
        ('{"messages": [], "settings": 7}', "is not a saved conversation"),
        ('{"messages": [], "settings": {"temperature": NaN}}', "no request can carry"),
        ('{"messages": [], "settings": {"temperature": -Infinity}}', "no request can carry"),
        ('{"messages": [], "settings": {"temperature": 1e999}}', "no request can carry"),
    ],
)
async def test_what_cannot_be_loaded_changes_nothing(
    tmp_path: Path, text: str | None, sentence: str
) -> None:
    file = tmp_path / "talk.json"
    if text is not None:
        file.write_text(text)
    async with serving(ScriptedServer()) as server:
        _, notes = await _talk(server, "hi", f"/load {file}", "/load", "more")
    assert sentence in notes
    assert "say /load FILE" in notes
    assert len(server.bodies[1]["messages"]) == 3


async def test_reasoning_is_a_note_and_no_part_of_the_answer() -> None:
    answer = [thought("let me "), thought("see"), *HELLO]
    async with serving(ScriptedServer(answer=answer)) as server:
        out, notes = await _talk(server, "hi", "again")
    assert out == "Héllo\nHéllo\n"
    assert notes == "let me see\n\n" * 2
    assert server.bodies[1]["messages"][1]["content"] == "Héllo"


def test_speed_is_counted_from_the_first_text() -> None:
    times = iter([10.0, 10.5, 11.0, 12.5])
    watch = Stopwatch(clock=lambda: next(times))
    watch.start()
    for piece in (Piece(), Piece(thought="a"), Piece("b"), Piece("c"), Piece(output_tokens=9)):
        watch.take(piece)
    assert str(watch) == "TTFT 500 ms, 4.0 tokens/s, 9 tokens"
    watch.take(Piece(prompt_tokens=5))
    assert str(Meter([watch, Stopwatch()])) == (
        "1 answer, 9 tokens, TTFT median 500 ms, slowest 500 ms, 4.0 tokens/s, prompts 5 tokens"
    )


def test_the_speed_of_several_answers_names_what_is_known() -> None:
    def answer(ttft: float, *pieces: Piece) -> Stopwatch:
        times = iter([0.0, ttft])
        watch = Stopwatch(clock=lambda: next(times))
        watch.start()
        for piece in pieces:
            watch.take(piece)
        return watch

    stopped = answer(1.0, Piece("a"))
    assert str(stopped) == "TTFT 1000 ms, 1 token"
    assert str(Meter([stopped])) == ("1 answer, 1 token, TTFT median 1000 ms, slowest 1000 ms")
    whole = answer(0.2, Piece("a"), Piece(prompt_tokens=7, output_tokens=1))
    assert str(Meter([stopped, whole])) == (
        "2 answers, 2 tokens, TTFT median 600 ms, slowest 1000 ms, prompts 7 tokens in 1 of them"
    )


async def test_lines_between_quotes_are_one_message() -> None:
    messages = Messages(Lines("a", '"""', "b", "", "c", '"""', "d", '"""', "e"))
    found = [await messages.read() for _ in range(5)]
    assert found == ["a", "b\n\nc", "d", "e", None]


async def test_bytes_that_are_no_text_do_not_end_the_lines() -> None:
    lines = StreamLines(io.TextIOWrapper(io.BytesIO(b"a\n\xff\nb\n"), encoding="utf-8"))
    async with asyncio.timeout(5):
        assert [await lines.read() for _ in range(4)] == ["a", "\ufffd", "b", None]


async def test_a_stream_that_cannot_be_read_on_ends_the_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Broken(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object) -> int:
            raise OSError("Input/output error")

    lines = StreamLines(io.TextIOWrapper(io.BufferedReader(Broken())))
    async with asyncio.timeout(5):
        assert await lines.read() is None
    assert capsys.readouterr().err == "shoal: cannot read on: Input/output error\n"


async def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    """Lines, an answer's speed, Ctrl-C, and the history of an earlier run."""
    state = {"XDG_STATE_HOME": str(tmp_path)}
    async with serving(ScriptedServer()) as server:
        await asyncio.to_thread(_first_run, server, state)
        server.answer, server.hang = [piece("partly")], True
        await asyncio.to_thread(_second_run, server, state)
        async with asyncio.timeout(10):
            await server.client_left.wait()
    contents = [body["messages"][-1]["content"] for body in server.bodies]
    assert contents == ["hi\nthere", "hi\nthere"]


def _first_run(server: ScriptedServer, state: dict[str, str]) -> None:
    with Terminal("chat", "--url", server.url, env=state) as terminal:
        terminal.expect(">")
        terminal.send("hi\x1b\rthere\r")
        place = terminal.expect("Héllo")
        terminal.expect("[TTFT ", after=place)
        place = terminal.expect("3 tokens", after=place)
        terminal.expect(">", after=place)  # a Ctrl-D before the prompt would be lost
        terminal.send("\x04")
        assert terminal.end() == 0


def _second_run(server: ScriptedServer, state: dict[str, str]) -> None:
    with Terminal("chat", "--url", server.url, env=state) as terminal:
        terminal.expect(">")
        terminal.send("\x1b[A\r")  # the line of the first run
        place = terminal.expect("partly")
        terminal.send("\x03")
        place = terminal.expect("stopped", after=place)
        place = terminal.expect(">", after=place)
        terminal.send("/stats\r")
        place = terminal.expect("1 answer,", after=place)
        terminal.expect(">", after=place)
        terminal.send("/exit\r")
        assert terminal.end() == 0


def test_history_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_path() == tmp_path / "shoal" / "chat_history"
