"""What a killed worker leaves behind is gone with the next one's start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from services.common.run_directory import RunDirectory
from tests.worker.agent_client import agent

OWNER = """
import sys, time
from pathlib import Path
from services.common.run_directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]), "shoal-run-")
(directory.path / "rank.log").write_text("of a rank")
print(directory.path, flush=True)
time.sleep(600)
"""


def test_the_living_keep_theirs_and_the_dead_do_not(tmp_path: Path) -> None:
    other = tmp_path / "shoal-rank"
    other.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, tmp_path], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        first = RunDirectory(tmp_path, "shoal-run-")
        assert {*tmp_path.iterdir()} == {other, left, first.path}
        owner.kill()
        owner.wait()
    second = RunDirectory.beside(f"unix:{tmp_path}/worker.sock", "shoal-run-")
    assert {*tmp_path.iterdir()} == {other, first.path, second.path}
    first.remove()
    second.remove()
    assert [*tmp_path.iterdir()] == [other]


async def test_a_worker_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    def directories() -> list[Path]:
        return [path for path in tmp_path.iterdir() if path.is_dir()]

    async with agent(tmp_path) as killed:
        (left,) = directories()
        os.kill(killed.process.pid, signal.SIGKILL)
        assert await killed.wait_for_exit() == -signal.SIGKILL
        assert left.exists()
        async with agent(tmp_path) as ended:
            assert len(directories()) == 1
            assert not left.exists()
            ended.process.terminate()
            assert await ended.wait_for_exit() == 0
    assert not directories()
