"""The dashboard of a fleet as a whole.

Gateways and workers are told apart by their metrics' names, so that one job holds them all.
What every gateway reports of the same workers is taken by `max`.
"""

from __future__ import annotations

from deploy.k8s.grafana.model import Dashboard, Panel, Query, Section
from deploy.k8s.grafana.queries import JOB, JOBS, LATE, quantiles, rate, share, total

_WAITING = total("vllm:num_requests_waiting") + " + " + total("shoal_gateway_requests_queued")


def _ready(peer: str, title: str) -> Panel:
    expr = f'max (shoal_gateway_peers_ready{{{JOB},peer="{peer}"}})'
    return Panel(
        title, "short", [Query(expr)], f"As the gateway sees it that has most {peer}s.", "stat", 4
    )


_NOW = Section(
    "Now",
    [
        _ready("worker", "Workers ready"),
        _ready("tokenizer", "Tokenizers ready"),
        _ready("detokenizer", "Detokenizers ready"),
        Panel(
            "Targets down",
            "short",
            [Query(f"count(up{{{JOB}}}) - sum(up{{{JOB}}})")],
            "Processes that do not answer Prometheus.",
            "stat",
            4,
        ),
        Panel(
            "Running",
            "short",
            [Query(total("vllm:num_requests_running"))],
            "Requests that hold KV pages.",
            "stat",
            4,
        ),
        Panel(
            "Waiting",
            "short",
            [Query(_WAITING)],
            "Requests that wait in workers and gateways.",
            "stat",
            4,
        ),
    ],
)

_TRAFFIC = Section(
    "Traffic",
    [
        Panel(
            "Requests",
            "reqps",
            [Query(rate("shoal_gateway_request_seconds_count"), "ended")],
            "Requests that ended, however they did.",
        ),
        Panel(
            "Errors",
            "reqps",
            [Query(rate("shoal_gateway_errors_total", by="code"), "{{code}}")],
            "By the code that the client was told.",
            stacked=True,
        ),
        Panel(
            "Tokens",
            "short",
            [
                Query(rate("shoal_gateway_output_tokens_total"), "output"),
                Query(rate("shoal_tokenizer_tokens_total"), "prompt"),
                Query(rate("vllm:prompt_tokens_total"), "prompt, computed"),
            ],
            "Tokens a second; of a prompt, what the prefix cache holds is not computed.",
        ),
        Panel(
            "In flight",
            "short",
            [
                Query(total("shoal_gateway_requests_in_flight", by="kind"), "{{kind}}"),
                Query(total("shoal_gateway_requests_queued"), "queued in gateways"),
                Query(total("vllm:num_requests_waiting"), "waiting in workers"),
                Query(f"{total('shoal_gateway_requests_held')} or vector(0)", "held for a worker"),
            ],
            "Requests that gateways hold, and those of them that wait.",
        ),
        Panel(
            "Time to first token",
            "s",
            quantiles("shoal_gateway_time_to_first_token_seconds"),
            "From a request's arrival at the gateway to its first piece.",
        ),
        Panel(
            "Late first tokens",
            "percentunit",
            [Query(LATE, "later than 2.5 s")],
            "The share that the alerts ShoalFirstTokenLate... burn the budget by.",
        ),
    ],
)

_CAPACITY = Section(
    "Capacity",
    [
        Panel(
            "KV cache in use",
            "percentunit",
            [Query(f"vllm:kv_cache_usage_perc{{{JOB}}}", "{{instance}}")],
            "Pages of running requests; what only the prefix cache holds counts as free.",
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            [
                Query(
                    share(
                        "vllm:prefix_cache_hits_total",
                        "vllm:prefix_cache_queries_total",
                        by="instance",
                    ),
                    "{{instance}}",
                )
            ],
            "The share of looked-up prompt tokens that were there.",
        ),
        Panel(
            "Running by worker",
            "short",
            [Query(f"vllm:num_requests_running{{{JOB}}}", "{{instance}}")],
            "How evenly the router shares requests out.",
            stacked=True,
        ),
    ],
)

_FAULTS = Section(
    "Faults",
    [
        Panel(
            "Moves",
            "ops",
            [
                Query(rate("shoal_gateway_resumes_total", by="peer"), "{{peer}} lost"),
                Query(rate("shoal_gateway_handoffs_total", by="peer"), "{{peer}} drained"),
                Query(rate("shoal_gateway_reencodes_total"), "tokenizer lost"),
            ],
            "Requests that went on at another instance.",
        ),
        Panel(
            "Refusals by workers",
            "ops",
            [Query(rate("shoal_gateway_retries_total", by="outcome"), "{{outcome}}")],
            "Tried at another worker (made), or past the retry budget (denied).",
        ),
        Panel(
            "Circuit breakers",
            "short",
            [Query(f"max by (state) (shoal_gateway_breakers{{{JOB}}})", "{{state}}")],
            "Workers by the state of their breaker.",
            stacked=True,
        ),
    ],
)

_PROCESSES = Section(
    "Processes",
    [
        Panel(
            "CPU",
            "short",
            [Query(f"rate(process_cpu_seconds_total{{{JOB}}}[$__rate_interval])", "{{instance}}")],
            "Cores. A worker's ranks are processes of their own and are not in it.",
        ),
        Panel(
            "Memory",
            "bytes",
            [Query(f"process_resident_memory_bytes{{{JOB}}}", "{{instance}}")],
            "Resident memory. A worker's ranks are not in it.",
        ),
        Panel(
            "Tasks and files",
            "short",
            [
                Query(f"shoal_asyncio_tasks{{{JOB}}}", "tasks of {{instance}}"),
                Query(f"process_open_fds{{{JOB}}}", "files of {{instance}}"),
            ],
            "What goes up and stays up is a leak.",
        ),
    ],
)

FLEET = Dashboard(
    "shoal-fleet",
    "Shoal / Fleet",
    {"job": JOBS},
    [_NOW, _TRAFFIC, _CAPACITY, _FAULTS, _PROCESSES],
)
