"""What `shoal top` is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from services.client.endpoint import EndpointOptions, check_headers, check_url
from services.common.bounds import at_least
from services.common.config import borrow, check_bounds, option

ServiceFilter = Literal["all", "worker", "tokenizer", "detokenizer"]
SortKey = Literal["service", "state", "open", "running", "waiting", "pages", "hits", "out", "busy"]
SERVICE_FILTERS: tuple[ServiceFilter, ...] = get_args(ServiceFilter)
SORT_KEYS: tuple[SortKey, ...] = get_args(SortKey)

_VIEW = "view"


@dataclass(frozen=True)
class TopConfig:
    """The configuration of the fleet view."""

    url: str = borrow(EndpointOptions, "url", help="base of a Shoal gateway's API")
    api_key: tuple[str, ...] = borrow(EndpointOptions, "api_key")
    header: tuple[str, ...] = borrow(EndpointOptions, "header")
    tls_ca: str = borrow(EndpointOptions, "tls_ca")

    interval: float = option(
        1.0, "seconds between two looks at the fleet", group=_VIEW, bounds=at_least(0.1)
    )
    service: str = option(
        "all", "show the instances of this service alone", group=_VIEW, choices=SERVICE_FILTERS
    )
    sort: str = option(
        "service",
        "order of the lines: service (then address), or the column with the most first",
        group=_VIEW,
        choices=SORT_KEYS,
    )
    once: bool = option(
        False, "print one table and leave, as where there is no terminal", group=_VIEW
    )
    json: bool = option(
        False,
        "print what the gateway tells (GET /fleet), one line a look; with --once a single line",
        group=_VIEW,
    )

    def __post_init__(self) -> None:
        check_url(self.url)
        check_headers(self.header)
        check_bounds(self)
