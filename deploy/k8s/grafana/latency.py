"""The dashboard of a request's time: as a client sees it, and where it goes."""

from __future__ import annotations

from deploy.k8s.grafana.model import Dashboard, Panel, Query, Section
from deploy.k8s.grafana.queries import JOBS, LATE, mean, quantiles, rate

_SEEN = Section(
    "As a client sees it",
    [
        Panel(
            "Time to first token",
            "s",
            [Query(rate("shoal_gateway_time_to_first_token_seconds_bucket", by="le"), "{{le}}")],
            "How many requests got their first piece within which time.",
            "heatmap",
            12,
        ),
        Panel(
            "Time to first token",
            "s",
            quantiles("shoal_gateway_time_to_first_token_seconds"),
            "From arrival at the gateway.",
            width=12,
        ),
        Panel(
            "Between pieces",
            "s",
            quantiles("shoal_gateway_inter_chunk_seconds"),
            "Pauses inside streams; a fault shows here.",
        ),
        Panel(
            "Whole request",
            "s",
            quantiles("shoal_gateway_request_seconds"),
            "From arrival to the end.",
        ),
        Panel(
            "Late first tokens",
            "percentunit",
            [Query(LATE, "later than 2.5 s")],
            "The share above the objective.",
        ),
    ],
)

_PHASES = Section(
    "Where the time goes",
    [
        Panel(
            "Mean by phase",
            "s",
            [
                Query(mean("shoal_tokenizer_encode_seconds"), "encode"),
                Query(mean("vllm:request_queue_time_seconds"), "queue"),
                Query(mean("vllm:request_prefill_time_seconds"), "prefill"),
                Query(mean("vllm:request_decode_time_seconds"), "decode"),
            ],
            "Tokenizer, then the worker's queue, prefill and decode.",
            stacked=True,
        ),
        Panel(
            "Queue in the worker",
            "s",
            quantiles("vllm:request_queue_time_seconds"),
            "From submission to the first batch.",
        ),
        Panel(
            "Queue in the gateway",
            "s",
            quantiles("shoal_gateway_queue_seconds"),
            "Of requests that found every worker full; the others are not in it.",
        ),
        Panel(
            "Encode",
            "s",
            quantiles("shoal_tokenizer_encode_seconds"),
            "Chat template and tokenizer, queueing included.",
        ),
        Panel(
            "Prefill",
            "s",
            quantiles("vllm:request_prefill_time_seconds"),
            "From the first batch to the first token.",
        ),
        Panel(
            "Decode",
            "s",
            quantiles("vllm:request_decode_time_seconds"),
            "From the first token to the last.",
        ),
    ],
)

_LENGTHS = Section(
    "How long requests are",
    [
        Panel(
            "Prompt",
            "short",
            quantiles("vllm:request_prompt_tokens"),
            "Tokens.",
            width=12,
        ),
        Panel(
            "Output",
            "short",
            quantiles("vllm:request_generation_tokens"),
            "Tokens.",
            width=12,
        ),
    ],
)

LATENCY = Dashboard(
    "shoal-latency", "Shoal / Request latency", {"job": JOBS}, [_SEEN, _PHASES, _LENGTHS]
)
