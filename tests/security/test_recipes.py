"""The recipes of docs/security.md, run as they stand but for ports and the model."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.served import READY, ServedFleet
from tests.programs import eventually
from tests.security.services import ServiceProcess

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not (shutil.which("openssl") and shutil.which("curl")), reason="needs openssl and curl"
    ),
]

TEXT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
FAKE = {
    "tokenizer": ["--model=byte"],
    "detokenizer": ["--model=byte"],
    "worker": ["--model=byte", "--engine=fake"],
    "gateway": ["--port=0", "--grpc-port=-1"],
}


def _recipe(name: str) -> list[str]:
    """The commands of a recipe, each on one line."""
    match = re.search(rf"<!-- recipe: {name} -->\n```sh(?: serves)?\n(.*?)```", TEXT, re.DOTALL)
    assert match, name
    return match.group(1).replace("\\\n", " ").strip().splitlines()


def _run(command: str, directory: Path) -> str:
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the certificates were made."""
    directory = tmp_path_factory.mktemp("recipes")
    for command in _recipe("certificates"):
        _run(command, directory)
    return directory


def test_keys(tmp_path: Path) -> None:
    *before, serve, ask = _recipe("keys")
    for command in before:
        _run(command, tmp_path)
    flags = [str(tmp_path / "keys.txt") if word == "keys.txt" else word for word in serve.split()]
    with ServedFleet(*flags[2:], "--engine=fake", "--model=byte") as fleet:
        assert READY.search("\n".join(fleet.log))
        ask = ask.replace("http://127.0.0.1:8000", fleet.url)
        assert "byte" in _run(ask, tmp_path)
        keyless = re.sub(r" -H .*", "", ask)
        with pytest.raises(AssertionError):
            _run(keyless, tmp_path)


def _start(command: str, ports: dict[str, str], directory: Path) -> ServiceProcess:
    """Starts `shoal ROLE ...` on a free port, and notes which one."""
    _, role, *flags = shlex.split(command)
    for index, word in enumerate(flags):
        if (directory / word).is_file():
            flags[index] = str(directory / word)
        elif word in ports:
            flags[index] = ports[word]
        elif flags[index - 1] == "--address":
            flags[index] = "127.0.0.1:0"
    service = ServiceProcess(role, *flags, *FAKE[role])
    if role != "gateway":
        ports[shlex.split(command)[3]] = service.address
    return service


@pytest.fixture
def services(certified: Path) -> Iterator[tuple[ServiceProcess, str]]:
    """The gateway of the recipe's fleet, and the recipe's last command."""
    *commands, ask = _recipe("fleet")
    ports: dict[str, str] = {}
    with ExitStack() as stack:
        for command in commands:
            service = stack.enter_context(_start(command, ports, certified))
        yield service, ask


def test_a_fleet_with_certificates(certified: Path, services: tuple[ServiceProcess, str]) -> None:
    gateway, ask = services
    port = gateway.endpoints["http"].rpartition(":")[2]
    ask = ask.replace(":8000", f":{port}")

    def ready() -> bool:
        probe = ask.replace("/v1/models", "/readyz")
        return (
            subprocess.run(["sh", "-c", probe], cwd=certified, capture_output=True).returncode == 0
        )

    eventually(ready, timeout=60, what=lambda: gateway.log[-10:])
    assert "byte" in _run(ask, certified)
    with pytest.raises(AssertionError):  # an unknown authority
        _run(ask.replace("--cacert ca.crt", ""), certified)
