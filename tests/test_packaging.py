"""What is installed where: parts without torch, generated code, the promise of field numbers."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Refuses the packages that an installation without the worker extra lacks.
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "safetensors"):
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""

WITHOUT_TORCH = (
    "services.gateway.__main__",
    "services.tokenizer.__main__",
    "services.worker.__main__",
    "services.fleet.__main__",
    "services.client.chat.__main__",
)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_it_imports_without_torch(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"{BLOCK}\nimport {module}"], check=True, cwd=ROOT)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_it_never_loads_torch(module: str) -> None:
    code = f"import sys, {module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_gateway_and_tokenizer_extras_do_not_ask_for_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    light = project["dependencies"] + extras["gateway"] + extras["tokenizer"]
    assert not [name for name in light if name.startswith(("torch", "transformers"))]
    assert "torch==2.13.0" in extras["worker"]


def test_every_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = set(project["dependencies"])
    for name, extra in project["optional-dependencies"].items():
        wanted |= set(extra) if name != "cuda" else set()  # CI has no GPU
    locked = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    names = {
        match.group().lower()
        for requirement in wanted
        if (match := re.match(r"[A-Za-z0-9._-]+", requirement))
    }
    assert names - {"shoal"} - locked == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy so that nothing here changes."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*pip, str(directory), str(source)], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_brings_protos_stubs_the_page_and_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for suffix in (".proto", "_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"):
        assert f"protos/worker{suffix}" in names
    assert "services/py.typed" in names
    assert {f"services/gateway/web/bundle/{name}" for name in ("app.js", "licenses.txt")} <= {
        *names
    }
    assert not [name for name in names if name.endswith(".jsx") or "node_modules" in name]
    assert any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "bench", "tools"))]


@pytest.mark.slow
def test_an_installed_wheel_runs_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    site = next((home / "lib").glob("python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    # Its dependencies come from this environment, the package itself must not.
    here = Path(pytest.__file__).parent.parent
    (site / "dependencies.pth").write_text(f"{here}\n")
    code = (
        f"{BLOCK}\nimport protos.worker_pb2_grpc, services.gateway.__main__ as gateway\n"
        "print(gateway.__file__)"
    )
    python = home / "bin" / "python"
    result = subprocess.run(
        [python, "-E", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(result.stdout.strip()).is_relative_to(home)
