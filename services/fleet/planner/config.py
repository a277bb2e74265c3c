"""What `shoal plan` is told."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.bounds import at_least
from services.common.config import borrow, check_bounds, option, share
from services.fleet.planner.gpus import CPU, GPUS
from services.worker.config import WorkerConfig

_WHERE = "where it would run"
_OUTPUT = "output"
_MODEL = "model"


@dataclass(frozen=True)
class PlanConfig:
    """The worker's flags that change a plan, and the machine to plan for."""

    model: str = borrow(
        WorkerConfig,
        "model",
        help="local directory, .gguf file or the hub id of a model in the local cache; default: the"
        " embedded SmolLM2-135M-Instruct",
    )
    dtype: str = borrow(WorkerConfig, "dtype")
    quantization: str = borrow(WorkerConfig, "quantization")
    max_model_len: int = borrow(WorkerConfig, "max_model_len", group=_MODEL)

    gpu: str = option(CPU, "the GPU, or cpu", group=_WHERE, choices=(CPU, *GPUS))
    memory_gib: float = option(
        0.0,
        "GiB that are free on each GPU, or that a process may use of a machine without; default:"
        " the GPU's, or this machine's",
        group=_WHERE,
        bounds=at_least(0),
    )
    tp: int = borrow(WorkerConfig, "tp", group=_WHERE)

    context: int = option(
        0,
        "tokens of prompt and output of a request, to say how many fit; default: some lengths up"
        " to the model's context",
        group="requests",
        bounds=at_least(0),
    )
    max_running_requests: int = borrow(WorkerConfig, "max_running_requests")
    max_prefill_tokens: int = borrow(WorkerConfig, "max_prefill_tokens")
    page_size: int = borrow(WorkerConfig, "page_size")
    memory_ratio: float = borrow(WorkerConfig, "memory_ratio")
    disable_cuda_graph: bool = borrow(WorkerConfig, "disable_cuda_graph")
    cuda_graph_max_batch: int = borrow(WorkerConfig, "cuda_graph_max_batch")

    json: bool = option(False, "print the plan as JSON", group=_OUTPUT)
    helm: bool = option(False, "print values for the Helm chart, as YAML", group=_OUTPUT)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.json and self.helm:
            raise ValueError("--json and --helm are two forms: choose one")
        self.worker()

    def worker(self) -> WorkerConfig:
        """The worker that is planned. Raises ValueError for flags it would refuse."""
        device = "cpu" if self.gpu == CPU else "cuda"
        return share(WorkerConfig, self, device=device)
