"""A fleet started the way a person starts one: `shoal serve`, as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

READY = re.compile(r"Shoal is ready: (https?://\S+)/v1 ")


class ServedFleet:
    """One `shoal serve` with its own run directory, on free ports.

    `log` collects everything it prints; `url` is the REST root.
    """

    def __init__(self, *args: str, timeout: float = 180.0) -> None:
        self._dir = tempfile.TemporaryDirectory(prefix="shoal-test-")
        self.run_dir = Path(self._dir.name)
        self.log: list[str] = []
        self.url = ""
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "services", "serve"),
                *("--port", "0", "--grpc-port", "0", "--run-dir", str(self.run_dir)),
                *args,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            line = self.wait_for_line(READY, timeout=timeout)
        except BaseException:
            self.stop()
            raise
        match = READY.search(line)
        assert match is not None
        self.url = match.group(1)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.log.append(line.rstrip("\n"))
                self._changed.notify_all()
        self.process.stdout.close()

    def wait_for_line(self, pattern: re.Pattern[str], *, timeout: float, after: int = 0) -> str:
        """The first printed line from index `after` on that matches."""
        deadline = time.monotonic() + timeout
        seen = after
        with self._changed:
            while True:
                for line in self.log[seen:]:
                    if pattern.search(line):
                        return line
                seen = len(self.log)
                left = deadline - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not self._reader.is_alive()):
                    raise AssertionError(
                        f"no line matching {pattern.pattern!r}; the fleet printed:\n"
                        + "\n".join(self.log[-60:])
                    )
                self._changed.wait(min(left, 0.5))

    def processes(self, role: str | None = None) -> list[dict[str, Any]]:
        """The services as `fleet.json` lists them: name, role, pid, address, admin_address."""
        listed = json.loads((self.run_dir / "fleet.json").read_text())["processes"]
        return [entry for entry in listed if role is None or entry["role"] == role]

    def tree(self) -> list[psutil.Process]:
        """Every live process of the fleet, the supervisor first."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def metrics(self, role: str) -> dict[str, float]:
        """The metrics of a role's instances, summed by sample name with its labels."""
        sums: dict[str, float] = {}
        for text in self._metric_pages(role):
            for line in text.splitlines():
                if line and not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def total(self, role: str, name: str, **labels: str) -> float:
        """One metric summed over a role's instances and over the labels not given."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        metrics = self.metrics(role)
        values = [
            value
            for key, value in metrics.items()
            if key.partition("{")[0] == name and all(label in key for label in wanted)
        ]
        assert values, f"{role} has no metric {name} {labels}: {sorted(metrics)}"
        return sum(values)

    def _metric_pages(self, role: str) -> Iterable[str]:
        for entry in self.processes(role):
            socket = entry["admin_address"].removeprefix("unix:")
            with httpx.Client(transport=httpx.HTTPTransport(uds=socket), timeout=10) as client:
                yield client.get("http://admin/metrics").text

    def stop(self, *, timeout: float = 60.0) -> int:
        """Ends the fleet as Ctrl-C would, and returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(10)
        self._dir.cleanup()
        return self.process.returncode

    def __enter__(self) -> ServedFleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def eventually(
    check: Callable[[], bool], *, timeout: float, what: Callable[[], object] | str = "condition"
) -> float:
    """Waits until `check` holds and returns the seconds it took.

    Another process's state can only be asked for, not awaited, so this polls.
    """
    start = time.monotonic()
    pause = threading.Event()
    while not check():
        if time.monotonic() - start > timeout:
            detail = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {timeout} s: {detail}")
        pause.wait(0.02)
    return time.monotonic() - start
