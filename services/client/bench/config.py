"""What `shoal bench` is told. Names and meanings are those of `vllm bench serve` where it has them.

Nothing here sends a request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.client.endpoint import EndpointOptions, check_headers, check_url
from services.common.bounds import above, at_least, below
from services.common.config import borrow, check_bounds, option
from services.common.numerals import read_float

_LOAD = "load"
_DATA = "data"
_REQUEST = "requests"
_RESULT = "results"

SYNTHETIC = ("random", "shared-prefix", "multi-turn")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class BenchConfig:
    """The configuration of one run, or of a sweep."""

    url: str = borrow(EndpointOptions, "url")
    api_key: tuple[str, ...] = borrow(EndpointOptions, "api_key")
    header: tuple[str, ...] = borrow(EndpointOptions, "header")
    tls_ca: str = borrow(EndpointOptions, "tls_ca")
    model: str = option("", "model to ask; default: the first one served", group="server")

    num_prompts: int = option(
        100, "requests in a run, each turn being one", group=_LOAD, bounds=at_least(1)
    )
    concurrency: int | None = option(
        None,
        "requests in flight: a closed loop, each sends its next as soon as it is answered; with"
        " --request-rate, the most at once (default: 8 in a closed loop, else no limit)",
        group=_LOAD,
        bounds=at_least(1),
    )
    request_rate: float | None = option(
        None,
        "open loop: requests a second, sent by the clock whether or not others are answered;"
        " inf: all at once. Default: a closed loop, or the times in a trace",
        group=_LOAD,
        bounds=above(0, math.inf),
    )
    burstiness: float = option(
        1.0,
        "shape of the gamma distribution of the times between requests: 1 is Poisson, less is"
        " burstier, more is steadier",
        group=_LOAD,
        bounds=above(0),
    )
    trace_speed: float = option(
        1.0, "how many times faster a trace is played", group=_LOAD, bounds=above(0)
    )
    warmup: int = option(2, "requests before the measured ones", group=_LOAD, bounds=at_least(0))
    seed: int = option(
        0, "of the prompts and of the times; default: 0", group=_LOAD, bounds=at_least(0)
    )
    sweep_rates: tuple[str, ...] = option(
        (), "several runs, one for each of these --request-rate", group=_LOAD, metavar="RATES"
    )
    sweep_concurrency: tuple[str, ...] = option(
        (), "several runs, one for each of these --concurrency", group=_LOAD, metavar="NUMBERS"
    )

    dataset_name: Literal[
        "random", "shared-prefix", "multi-turn", "mooncake", "azure", "sharegpt"
    ] = option(
        "random",
        "random words; shared-prefix: with one of --num-prefixes before them; multi-turn:"
        " conversations; mooncake (JSONL) and azure (CSV): traces of lengths and times; sharegpt:"
        " conversations in JSON",
        group=_DATA,
    )
    dataset_path: str = option("", "file of the data set", group=_DATA, metavar="FILE")
    input_len: int = option(
        256, "tokens a prompt, without its prefix", group=_DATA, bounds=at_least(1)
    )
    output_len: int | None = option(
        None,
        "the most tokens of an answer (default: 64, or as long as in the data set)",
        group=_DATA,
        bounds=at_least(1),
    )
    range_ratio: float = option(
        0.0,
        "lengths are drawn evenly from (1 - r) to (1 + r) of the asked; default: 0, always as"
        " asked",
        group=_DATA,
        bounds=below(1, least=0),
    )
    prefix_len: int | None = option(
        None,
        "tokens before each prompt that others share (default: 256 for shared-prefix, else 0)",
        group=_DATA,
        bounds=at_least(0),
    )
    num_prefixes: int = option(4, "different prefixes", group=_DATA, bounds=at_least(1))
    turns: int = option(4, "turns of a conversation of multi-turn", group=_DATA, bounds=at_least(1))
    think_time: float = option(
        0.0,
        "seconds between an answer and the next turn; default: 0",
        group=_DATA,
        bounds=at_least(0),
    )
    tokenizer: str = option(
        "",
        "model whose tokenizer counts the prompts' tokens, as for `shoal serve --model`, or"
        " 'embedded'; default: the server is asked how many tokens words have",
        group=_DATA,
        metavar="MODEL",
    )

    endpoint: Literal["chat", "completions"] = option(
        "chat", "/chat/completions or /completions", group=_REQUEST
    )
    ignore_eos: bool = option(
        False,
        "have the model go on to the asked length (servers that do not know the field may refuse)",
        group=_REQUEST,
    )
    temperature: float | None = option(
        None, "0 is greedy; default: the server's", group=_REQUEST, bounds=at_least(0)
    )
    extra_body: str = option(
        "", "more fields of each request, as a JSON object", group=_REQUEST, metavar="JSON"
    )
    stream_usage: bool = option(
        True,
        "ask for the server's token counts (stream_options); without, events with text are counted",
        group=_REQUEST,
    )
    timeout: float = option(
        600.0, "seconds until a request counts as failed", group=_REQUEST, bounds=above(0)
    )

    goodput: tuple[str, ...] = option(
        (),
        "limits in milliseconds, as ttft:200 tpot:50 e2el:2000; goodput is the rate of requests"
        " that keep all of them",
        group=_RESULT,
        metavar="METRIC:MS",
        many=True,
    )
    metric_percentiles: tuple[str, ...] = option(
        ("50", "90", "99"), "percentiles to tell", group=_RESULT, metavar="P"
    )
    output_json: str = option("", "file for the figures", group=_RESULT, metavar="FILE")
    output_jsonl: str = option(
        "", "file for a line about each request", group=_RESULT, metavar="FILE"
    )
    report: str = option(
        "", "file for a report in HTML, with curves", group=_RESULT, metavar="FILE"
    )
    progress: bool = option(True, "show a progress bar, on a terminal", group=_RESULT)
    self_test: bool = option(
        False,
        "measure this client alone: how many tokens a second it can take in on one core",
        group=_RESULT,
    )

    def __post_init__(self) -> None:
        check_url(self.url)
        check_headers(self.header)
        check_bounds(self)
        self._check_data()
        if self.sweep_rates and self.sweep_concurrency:
            raise ValueError("--sweep-rates and --sweep-concurrency cannot be given together")
        _ = self.rates, self.concurrencies, self.percentiles, self.slos, self.extra

    def _check_data(self) -> None:
        if (self.dataset_name in SYNTHETIC) == bool(self.dataset_path):
            needs = "takes no" if self.dataset_path else "needs a"
            raise ValueError(f"--dataset-name {self.dataset_name} {needs} --dataset-path")

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates of a sweep, in requests a second."""
        return tuple(_positive("--sweep-rates", text) for text in self.sweep_rates)

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The numbers of requests in flight of a sweep."""
        values = [_positive("--sweep-concurrency", text) for text in self.sweep_concurrency]
        if any(not value.is_integer() for value in values):
            raise ValueError("--sweep-concurrency takes whole numbers")
        return tuple(map(int, values))

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to tell, each from 0 to 100."""
        values = tuple(_number("--metric-percentiles", text) for text in self.metric_percentiles)
        if any(not 0 <= value <= 100 for value in values):
            raise ValueError("--metric-percentiles must be from 0 to 100")
        return values

    @property
    def slos(self) -> dict[str, float]:
        """The limits of goodput, in seconds, by metric."""
        limits: dict[str, float] = {}
        for item in self.goodput:
            name, colon, text = item.partition(":")
            if not colon or name not in GOODPUT_METRICS:
                known = ", ".join(GOODPUT_METRICS)
                raise ValueError(f"--goodput {item!r} is not METRIC:MS with METRIC of {known}")
            limits[name] = _positive("--goodput", text) / 1000
        return limits

    @property
    def extra(self) -> dict[str, object]:
        """The fields of --extra-body."""
        if not self.extra_body:
            return {}
        try:
            value = json.loads(self.extra_body)
        except ValueError as error:
            raise ValueError(f"--extra-body is not JSON: {error}")
        if not isinstance(value, dict):
            raise ValueError("--extra-body must be a JSON object")
        return value


def _positive(flag: str, text: str) -> float:
    value = _number(flag, text)
    if value <= 0:
        raise ValueError(f"{flag} takes numbers above 0, not {text}")
    return value


def _number(flag: str, text: str) -> float:
    try:
        value = read_float(text)
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not a number")
    if math.isnan(value):
        raise ValueError(f"{flag}: {text!r} is not a number")
    return value


def label(values: Sequence[float]) -> str:
    """Numbers as they were typed."""
    return ", ".join(f"{value:g}" for value in values)
