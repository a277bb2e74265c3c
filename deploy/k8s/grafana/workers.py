"""The dashboard of workers: engine, KV cache, requests."""

from __future__ import annotations

from deploy.k8s.grafana.model import Dashboard, Panel, Query, Section
from deploy.k8s.grafana.queries import JOBS, WORKER, quantiles, rate, share, total

_WORKERS = 'label_values(vllm:num_requests_running{job="$job"}, instance)'
_ENGINE = Section(
    "Engine",
    [
        Panel(
            "Requests",
            "short",
            [
                Query(
                    total("shoal_worker_requests", WORKER, "instance, state"),
                    "{{instance}} {{state}}",
                )
            ],
            "Running: they hold KV pages. Waiting: for pages or a place in the batch.",
        ),
        Panel(
            "Tokens",
            "short",
            [
                Query(
                    rate("vllm:generation_tokens_total", WORKER, "instance"),
                    "{{instance}} generated",
                ),
                Query(rate("vllm:prompt_tokens_total", WORKER, "instance"), "{{instance}} prompt"),
            ],
            "Tokens a second.",
        ),
        Panel(
            "Tokens in a batch",
            "short",
            [Query(f"shoal_worker_batch_tokens{{{WORKER}}}", "{{instance}}")],
            "Of the last step: one a decoding request, many a prompt.",
        ),
        Panel(
            "Step time",
            "s",
            quantiles("shoal_worker_step_seconds", WORKER),
            "How long a step takes; every stream waits for it.",
        ),
        Panel(
            "Steps",
            "ops",
            [Query(rate("shoal_worker_steps_total", WORKER, "instance"), "{{instance}}")],
            "Steps a second.",
        ),
        Panel(
            "Busy and bubble",
            "percentunit",
            [
                Query(
                    rate("shoal_worker_busy_seconds_total", WORKER, "instance"), "{{instance}} busy"
                ),
                Query(
                    rate("shoal_worker_bubble_seconds_total", WORKER, "instance"),
                    "{{instance}} bubble",
                ),
            ],
            "How much of the time the engine computes, and stands idle with work waiting.",
        ),
    ],
)

_CACHE = Section(
    "KV cache",
    [
        Panel(
            "Pages",
            "short",
            [Query(f'sum by (state) (shoal_worker_pages{{{WORKER},state!="total"}})', "{{state}}")],
            "Free, evictable (prefix cache alone), locked and in flight make up the pool.",
            stacked=True,
        ),
        Panel(
            "In use",
            "percentunit",
            [Query(f"vllm:kv_cache_usage_perc{{{WORKER}}}", "{{instance}}")],
            "At 1, running requests are preempted.",
        ),
        Panel(
            "Preempted and late",
            "ops",
            [
                Query(
                    rate("vllm:num_preemptions_total", WORKER, "instance"), "{{instance}} preempted"
                ),
                Query(
                    rate("shoal_worker_late_requests_total", WORKER, "instance"),
                    "{{instance}} late",
                ),
            ],
            "Requests that lost their pages; requests dropped as their deadline could not be met.",
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            [
                Query(
                    share(
                        "vllm:prefix_cache_hits_total",
                        "vllm:prefix_cache_queries_total",
                        WORKER,
                        "instance",
                    ),
                    "{{instance}}",
                )
            ],
            "The share of looked-up prompt tokens that were there.",
        ),
        Panel(
            "Abort to free pages",
            "s",
            quantiles("shoal_abort_to_kv_free_seconds", WORKER),
            "From an abort's receipt; two steps and 50 ms are the promise.",
        ),
        Panel(
            "Grammars",
            "ops",
            [
                Query(rate("shoal_worker_grammars_compiled_total", WORKER), "compiled"),
                Query(rate("shoal_worker_grammar_cache_hits_total", WORKER), "known already"),
                Query(rate("shoal_worker_grammars_refused_total", WORKER), "refused"),
            ],
            "Of structured output.",
        ),
    ],
)

_WORKER_REQUESTS = Section(
    "Requests",
    [
        Panel(
            "Time to first token",
            "s",
            quantiles("vllm:time_to_first_token_seconds", WORKER),
            "From submission to the worker.",
        ),
        Panel(
            "Between tokens",
            "s",
            quantiles("vllm:inter_token_latency_seconds", WORKER),
            "Of eight requests at a time.",
        ),
        Panel(
            "Ended",
            "reqps",
            [
                Query(
                    rate("vllm:request_success_total", WORKER, "finished_reason"),
                    "{{finished_reason}}",
                )
            ],
            "By how; abort: the client left.",
            stacked=True,
        ),
    ],
)

WORKERS = Dashboard(
    "shoal-worker",
    "Shoal / Workers",
    {"job": JOBS, "instance": _WORKERS},
    [_ENGINE, _CACHE, _WORKER_REQUESTS],
)
