"""What a worker pod is told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from services.common.bounds import above, at_least, between
from services.common.config import borrow, check_bounds, option
from services.common.cores import available_cores
from services.common.tls import TlsFiles, TlsOptions
from services.common.tracing import TracingOptions

_SERVER = "server"
_MODEL = "model"
_SCHEDULE = "scheduling"
_CACHE = "KV cache"
_PARALLEL = "parallelism"


@dataclass(frozen=True)
class WorkerConfig:
    """The agent's and the ranks' configuration; the ranks get the agent's, unchanged.

    Zero means "work it out" where the help says so; the resolved values are in
    `services.worker.core.EngineInfo`, never written back here.
    """

    address: str = option(
        "127.0.0.1:50051", "where the gRPC server listens: host:port or unix:/path", group=_SERVER
    )
    admin_address: str = option(
        "",
        "where /livez, /readyz, /metrics and /loglevel are served over HTTP; default: nowhere",
        group=_SERVER,
    )
    drain_timeout: float = option(
        30.0, "seconds that running requests get after SIGTERM", group=_SERVER, bounds=at_least(0)
    )
    drain: Literal["finish", "handoff"] = option(
        "finish",
        "what draining does with requests: finish them, or hand them back at once, to be"
        " continued by another worker",
        group=_SERVER,
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe log line shown", group=_SERVER
    )
    log_format: Literal["auto", "json", "human"] = option(
        "auto", "form of log lines; auto is human on a terminal, json elsewhere", group=_SERVER
    )

    model: str = option(
        "",
        "hub id, local directory or .gguf file; default: the embedded SmolLM2-135M-Instruct",
        group=_MODEL,
    )
    served_model_name: str = option(
        "", "the model's name in requests; default: the last part of --model", group=_MODEL
    )
    engine: Literal["torch", "fake"] = option(
        "torch",
        "torch runs the model; fake makes tokens from a hash, without weights",
        group=_MODEL,
    )
    fake_step_ms: float = option(
        0.0,
        "with --engine fake: how long each step takes, in milliseconds",
        group=_MODEL,
        bounds=at_least(0),
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto",
        "what computes; auto is cuda where torch sees a GPU and FlashInfer is installed",
        group=_MODEL,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "weights, activations and KV; auto is float32 on a CPU, on a GPU the checkpoint's own"
        " type or bfloat16",
        group=_MODEL,
    )
    quantization: Literal["none", "int8"] = option(
        "none",
        "weights and the products' inputs; int8 is quicker and a little less exact, CPU only",
        group=_MODEL,
    )
    attention_backend: Literal["auto", "cpu", "flashinfer", "torch_reference"] = option(
        "auto",
        "attention kernels; auto is flashinfer on a GPU and cpu elsewhere: native ones where a"
        " C++ compiler is, else torch's",
        group=_MODEL,
    )
    disable_cuda_graph: bool = option(
        False, "on a GPU, launch every kernel of a decode step anew", group=_MODEL
    )
    cuda_graph_max_batch: int = option(
        256,
        "on a GPU, the largest decode batch that is a CUDA graph",
        group=_MODEL,
        bounds=at_least(0),
    )
    max_model_len: int = option(
        0,
        "the most tokens of prompt and output together; default: the model's context, or what"
        " the KV pool holds if that is less",
        group=_MODEL,
        bounds=at_least(0),
    )

    schedule: Literal["prefill-first", "decode-first", "mixed"] = option(
        "mixed", "what a batch is made of first", group=_SCHEDULE
    )
    max_running_requests: int = option(
        256, "the most requests in a batch", group=_SCHEDULE, bounds=at_least(1)
    )
    max_queue: int = option(
        2048,
        "the most requests waiting; more are refused with 429",
        group=_SCHEDULE,
        bounds=at_least(1),
    )
    max_prefill_tokens: int = option(
        0,
        "the most prompt tokens in one batch; longer prompts are cut into chunks (default: 512,"
        " on a GPU 8192)",
        group=_SCHEDULE,
        bounds=at_least(0),
    )
    disable_overlap: bool = option(
        False, "run scheduling and the model one after the other", group=_SCHEDULE
    )

    deterministic: bool = option(
        False,
        "the same bits alone and in company, in chunks, preempted, resumed and without overlap,"
        " on one kind of machine; CPU and float32 only",
        group=_SCHEDULE,
    )

    grammar_timeout: float = option(
        2.0,
        "seconds of processor time that compiling a request's grammar may take",
        group=_SCHEDULE,
        bounds=above(0),
    )
    grammar_cache: int = option(
        256, "compiled grammars that are kept", group=_SCHEDULE, bounds=at_least(1)
    )

    cache: Literal["radix", "none"] = option(
        "radix", "radix shares the KV of common prefixes; none does not", group=_CACHE
    )
    page_size: int = option(
        16, "tokens a KV page: a power of two", group=_CACHE, bounds=between(1, 64)
    )
    num_pages: int = option(
        0,
        "KV pages; default: what a quarter of the memory holds, at most 4 GiB; on a GPU what"
        " --memory-ratio leaves",
        group=_CACHE,
        bounds=at_least(0),
    )
    memory_ratio: float = option(
        0.9,
        "share of a GPU's free memory for weights, activations, CUDA graphs and KV together",
        group=_CACHE,
        bounds=above(0, 1),
    )

    tp: int = option(1, "tensor-parallel ranks", group=_PARALLEL, bounds=at_least(1))
    nnodes: int = option(
        1,
        "hosts that share the tensor-parallel ranks evenly; each runs a worker",
        group=_PARALLEL,
        bounds=at_least(1),
    )
    node_rank: int = option(
        0,
        "which of the hosts this is: 0 serves, the others only compute",
        group=_PARALLEL,
        bounds=at_least(0),
    )
    rendezvous: str = option(
        "", "with --nnodes: where host 0 is reached by the others, host:port", group=_PARALLEL
    )
    check_ranks: bool = option(
        False, "for debugging: compare what the ranks compute after each step", group=_PARALLEL
    )
    num_threads: int = option(
        0,
        "CPU threads a rank; default: all cores divided by the ranks",
        group=_PARALLEL,
        bounds=at_least(0),
    )

    otlp_endpoint: str = borrow(TracingOptions, "otlp_endpoint")
    tls_cert: str = borrow(TlsOptions, "tls_cert")
    tls_key: str = borrow(TlsOptions, "tls_key")
    tls_ca: str = borrow(TlsOptions, "tls_ca")

    def __post_init__(self) -> None:
        check_bounds(self)
        self._check_nodes()
        self.tls.check()
        if self.page_size not in (1, 2, 4, 8, 16, 32, 64):
            raise ValueError(f"--page-size {self.page_size} is not a power of two")
        if self.device == "cpu" and self.attention_backend == "flashinfer":
            raise ValueError("--attention-backend flashinfer needs --device cuda")
        if self.device == "cuda" and self.attention_backend == "cpu":
            raise ValueError("--attention-backend cpu does not run on --device cuda")
        if self.device == "cuda" and self.quantization != "none":
            raise ValueError("--quantization is for --device cpu")
        if self.device == "cuda" and self.deterministic:
            raise ValueError("--deterministic is for --device cpu")

    @property
    def tls(self) -> TlsFiles:
        """What the gRPC server listens with."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)

    def _check_nodes(self) -> None:
        if self.tp % self.nnodes:
            raise ValueError(f"--tp {self.tp} cannot be shared by --nnodes {self.nnodes} hosts")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank {self.node_rank} is not one of --nnodes {self.nnodes}")
        if self.nnodes > 1 and not self.rendezvous.rpartition(":")[2].isdigit():
            raise ValueError("--nnodes needs --rendezvous host:port")

    @property
    def local_ranks(self) -> int:
        """The ranks on this host."""
        return self.tp // self.nnodes


def num_threads(config: WorkerConfig) -> int:
    """CPU threads a rank: the flag, else OMP_NUM_THREADS, else the cores over the ranks.

    The agent gives its ranks their number in OMP_NUM_THREADS.
    """
    if config.num_threads:
        return config.num_threads
    inherited = os.environ.get("OMP_NUM_THREADS", "")
    if inherited.isdigit() and int(inherited) > 0:
        return int(inherited)
    return max(1, available_cores() // config.local_ranks)
