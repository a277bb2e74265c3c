"""`shoal doctor`: one line a check; exits 1 if there is a problem."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from services.client.doctor import machine
from services.client.doctor.config import DoctorConfig
from services.client.doctor.finding import Finding
from services.client.doctor.model import check_model
from services.client.doctor.ports import check_ports
from services.common.config import parse

_MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


def main(argv: Sequence[str]) -> NoReturn:
    """Looks at everything and prints what it found, each as soon as it is known."""
    config = parse(
        DoctorConfig,
        argv,
        prog="shoal doctor",
        description="Checks this machine, a model and, where addresses are given, a running fleet;"
        " says what to do. Exits 1 if there is a problem.",
    )
    findings: list[Finding] = []
    for finding in examine(config):
        findings.append(finding)
        if not config.json:
            print(f"{_MARKS[finding.level]}  {finding.check:<14} {finding.text}", flush=True)
    if config.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    sys.exit(1 if any(finding.level == "problem" for finding in findings) else 0)


def examine(config: DoctorConfig) -> Iterable[Finding]:
    """Every finding, in the order of the report."""
    ports = {"--port": config.port, "--grpc-port": config.grpc_port}
    here = itertools.chain(
        [machine.check_python()],
        machine.check_packages(),
        machine.check_torch(),
        [machine.check_compiler()],
        machine.check_resources(),
        check_ports(config.host, ports),
        check_model(config.model),
    )
    yield from here
    if config.url or config.peers:
        yield from asyncio.run(_fleet(config))


async def _fleet(config: DoctorConfig) -> list[Finding]:
    from services.client.doctor.peers import check_fleet

    return [finding async for finding in check_fleet(config)]


if __name__ == "__main__":
    main(sys.argv[1:])
