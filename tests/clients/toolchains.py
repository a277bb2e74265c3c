"""Other languages' toolchains, and the example clients built with them.

Whoever lacks one is told which, and its test is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "grpc"
NODE_MODULES = ROOT / ".clients-node" / "node_modules"
_PROTOS = ("protos/common.proto", "protos/inference.proto")
_GO_SOURCES = Path("/usr/share/gocode")
_GO_PACKAGE = "shoal/shoalv1"


def need(*commands: str) -> None:
    """Skips the test if a command is missing."""
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def grpcurl() -> str:
    """The program that tools/clients.sh installs, or the machine's own. Skips if there is none."""
    installed = ROOT / ".venv-clients" / "bin" / "grpcurl"
    if installed.exists():
        return str(installed)
    need("grpcurl")
    return "grpcurl"


def run(
    *command: str | Path,
    cwd: Path = ROOT,
    timeout: float = 600,
    env: Mapping[str, str] | None = None,
) -> str:
    """What a command prints; a failure shows all of it."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python_client(name: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / "python" / name)]


def node_client(name: str) -> list[str]:
    """Skips if Node or its gRPC packages are missing."""
    need("node")
    if not (NODE_MODULES / "@grpc" / "grpc-js").is_dir():
        pytest.skip("no @grpc/grpc-js: run tools/clients.sh")
    return ["node", str(EXAMPLES / "node" / name)]


def cpp_client(build: Path) -> list[str]:
    """Builds the client. Skips if a tool or gRPC's headers are missing."""
    need("make", "c++", "protoc", "grpc_cpp_plugin", "pkg-config")
    if subprocess.run(["pkg-config", "--exists", "grpc++"]).returncode != 0:
        pytest.skip("not installed: libgrpc++-dev")
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    run("make", "-s", jobs, "-C", EXAMPLES / "cpp", f"OUT={build}", "CXXFLAGS=-O0")
    return [str(build / "chat")]


def ruby_client(build: Path) -> list[str]:
    """Generates the code. Skips if Ruby's gRPC is missing."""
    need("ruby", "protoc", "grpc_ruby_plugin")
    if subprocess.run(["ruby", "-e", 'require "grpc"'], capture_output=True).returncode != 0:
        pytest.skip("not installed: ruby-grpc")
    build.mkdir()
    plugin = shutil.which("grpc_ruby_plugin")
    run(
        *("protoc", "-I.", "--experimental_allow_proto3_optional", f"--ruby_out={build}"),
        *(f"--grpc_out={build}", f"--plugin=protoc-gen-grpc={plugin}", *_PROTOS),
    )
    return ["ruby", "-I", str(build), str(EXAMPLES / "ruby" / "chat.rb")]


def go_client(build: Path) -> list[str]:
    """Builds the client from Debian's sources. Skips if Go or those are missing."""
    need("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    if not (_GO_SOURCES / "src/google.golang.org/grpc").is_dir():
        pytest.skip("not installed: golang-google-grpc-dev")
    source = build / "src" / "shoal"
    source.mkdir(parents=True)
    shutil.copy(EXAMPLES / "go" / "chat.go", source)
    names = ",".join(f"M{proto}={_GO_PACKAGE}" for proto in _PROTOS)
    run(
        *("protoc", "-I.", "--experimental_allow_proto3_optional"),
        *(f"--go_out={names}:{build / 'src'}", f"--go-grpc_out={names}:{build / 'src'}", *_PROTOS),
    )
    env = {"GO111MODULE": "off", "GOPATH": f"{build}:{_GO_SOURCES}", "GOFLAGS": ""}
    run("go", "build", "-o", build / "chat", "shoal", cwd=source, env=env)
    return [str(build / "chat")]
