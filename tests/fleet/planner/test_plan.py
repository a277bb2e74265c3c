"""`shoal plan`: its sizes against an engine's, and its values against the chart."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.fleet.planner import report
from services.fleet.planner.__main__ import main
from services.fleet.planner.config import PlanConfig
from services.fleet.planner.memory import plan
from services.worker.config import WorkerConfig
from services.worker.engine.loading import load_model
from services.worker.layers.parallel import Parallel
from tests.deploy.charts import CHART, find_helm
from tests.worker.models.checkpoints import save_tiny

GIB = 1 << 30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny(directory, "qwen3", shard="100KB")
    return directory


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as end:
        main(argv)
    return (end.value.code, *capsys.readouterr())


def test_an_engine_comes_to_the_same(tiny: Path) -> None:
    planned = plan(PlanConfig(model=str(tiny), max_running_requests=8))
    loaded = load_model(
        WorkerConfig(model=str(tiny), max_running_requests=8, device="cpu"),
        Parallel(),
        lambda phase, done, total: None,
    )
    assert planned.pages == loaded.info.num_pages
    assert planned.max_model_len == loaded.info.max_model_len == 512
    assert planned.page_size == loaded.info.page_size
    assert planned.requests(512) == 8
    assert 0 < planned.stored_bytes <= planned.weights  # both in float32, without padding


def test_a_gpu_is_filled_and_no_more() -> None:
    config = PlanConfig(gpu="l4", max_running_requests=4096)
    planned = plan(config)
    used = planned.weights + planned.activations + planned.graphs + planned.kv
    assert 0.89 * planned.total < used <= 0.9 * planned.total
    assert planned.total < 23_034 << 20
    assert planned.token_bytes == 2 * 30 * 3 * 64 * 2
    assert planned.requests(8192) == planned.pages // 512


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["--tp", "2"], 1, "9 attention heads, which cannot be divided over --tp 2"),
        (["--tp", "7"], 1, "9 attention heads, which cannot be divided over --tp 7"),
        (["--memory-gib", "0.1"], 1, "weights take 0.61 GiB in float32, and this machine lets a"),
        (["--gpu", "l4", "--memory-gib", "1"], 1, "that --memory-ratio 0.9 leaves of 1.00 GiB"),
        (["--gpu", "l4", "--dtype", "float32"], 1, "FlashInfer computes bfloat16 and float16"),
        (["--model", "no/such"], 1, "get it with: hf download no/such"),
        (["--context", "40960"], 1, "--context 40,960 is more than SmolLM2-135M-Instruct allows a"
         " request: 8,192 tokens"),
        (["--model", "/nonesuch"], 1, "model /nonesuch does not exist"),
        (["--gpu", "mi300x"], 2, "argument --gpu: invalid choice: 'mi300x'"),
        (["--page-size", "3"], 2, "--page-size 3 is not a power of two"),
    ],
)  # fmt: skip
def test_what_would_not_be_served(
    capsys: pytest.CaptureFixture[str], argv: list[str], status: int, said: str
) -> None:
    code, out, err = _run(capsys, *argv)
    assert (code, out) == (status, "")
    (line,) = err.splitlines()
    assert said in line


def test_a_cut_file_is_said(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tiny, tmp_path / "cut")
    shard = sorted((tmp_path / "cut").glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    code, _, err = _run(capsys, "--model", str(tmp_path / "cut"))
    assert code == 1
    assert "is cut short" in err


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--gpu", "h100", "--context", "4096", "--max-running-requests", "64")
    code, text, _ = _run(capsys, *argv)
    assert code == 0
    code, out, _ = _run(capsys, *argv, "--json")
    assert code == 0
    planned = json.loads(out)
    assert planned["requests_at_once"] == {"4096": 64}
    assert f"{planned['pages']:,} pages" in text
    assert "all that 64 requests of 8,192 tokens can use (--max-running-requests)" in text
    assert "4,096                 64   as many as --max-running-requests\n" in text
    assert planned["flags"] == ["--device=cuda", "--max-running-requests=64"]
    assert "shoal serve --device=cuda --max-running-requests=64" in text


@pytest.mark.parametrize(
    "config",
    [PlanConfig(), PlanConfig(gpu="h100", tp=3, max_model_len=4096, page_size=32)],
    ids=["cpu", "gpu"],
)
def test_the_chart_takes_the_values(config: PlanConfig, tmp_path: Path) -> None:
    helm = find_helm()
    if helm is None:
        pytest.skip("there is no helm")
    planned = plan(config)
    values = tmp_path / "values.yaml"
    values.write_text(report.helm(planned, config))
    done = subprocess.run(
        [helm, "template", "shoal", str(CHART), "--namespace", "llm", "-f", str(values)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    (worker,) = [
        item
        for item in objects
        if item["kind"] == "Deployment" and item["metadata"]["name"] == "shoal-worker"
    ]
    container = worker["spec"]["template"]["spec"]["containers"][0]
    _check_container(container, config, planned.kv)


def _check_container(container: dict[str, Any], config: PlanConfig, kv: int) -> None:
    limits = container["resources"]["limits"]
    if config.gpu == "cpu":
        assert int(limits["memory"].removesuffix("Gi")) * GIB / 4 >= kv
    else:
        assert int(limits["nvidia.com/gpu"]) == 3
        settings = json.dumps(container)
        assert "4096" in settings
        assert "page" in settings.lower()


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys\n"
        "from services.__main__ import main\n"
        "try: main(['plan', '--gpu', 'h100'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'rich', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
