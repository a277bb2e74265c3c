"""The fleet as text: one line an instance. Knows of no terminal, no clock and no gateway."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from services.client.top.config import SERVICE_FILTERS, SORT_KEYS, ServiceFilter, SortKey
from services.gateway.watch.shapes import EngineFigures, FleetSnapshot, GatewayFigures, Instance

_KEPT = 24  # samples of a sparkline
_BAR = 10
_SPARKS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "starting": "yellow",
    "ready": "green",
    "draining": "cyan",
    "breaker-open": "magenta",
    "dead": "bold red",
}
_WORST_FIRST = ("dead", "breaker-open", "draining", "starting", "ready")
_SERVICES = ("worker", "tokenizer", "detokenizer")
_HEADS = (
    "service", "address", "state", "for", "open", "run", "wait", "pages", "hits", "in/s", "out/s",
    "", "busy",
)  # fmt: skip
_RIGHT = frozenset(("for", "open", "run", "wait", "hits", "in/s", "out/s", "busy"))
_SPARK = _HEADS.index("")
_GIVE_WAY = {_SPARK: 4, _HEADS.index("address"): 8}  # columns in this order, down to so much

_ORDERS: dict[SortKey, Callable[[Instance], float]] = {
    "service": lambda one: 0.0,
    "state": lambda one: _WORST_FIRST.index(one.state),
    "open": lambda one: -one.outstanding,
    "running": lambda one: -(one.engine.running if one.engine else -1),
    "waiting": lambda one: -(one.engine.waiting if one.engine else -1),
    "pages": lambda one: -(held_pages(one.engine) / max(1, one.engine.pages) if one.engine else -1),
    "hits": lambda one: -((one.engine.prefix_hit_rate or 0.0) if one.engine else -1),
    "out": lambda one: -(one.engine.tokens_out_per_s if one.engine else -1),
    "busy": lambda one: -(one.engine.busy if one.engine else -1),
}


@dataclass(slots=True)
class Choices:
    """What the person who looks has chosen."""

    service: ServiceFilter = "all"
    sort: SortKey = "service"

    def press(self, key: str) -> None:
        """`s` and `S` go through the orders, `f` through the services."""
        if key in ("s", "S"):
            step = 1 if key == "s" else -1
            self.sort = SORT_KEYS[(SORT_KEYS.index(self.sort) + step) % len(SORT_KEYS)]
        elif key == "f":
            place = SERVICE_FILTERS.index(self.service) + 1
            self.service = SERVICE_FILTERS[place % len(SERVICE_FILTERS)]


@dataclass(slots=True)
class Series:
    """The last output rates of each instance, for the sparklines."""

    rates: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, snapshot: FleetSnapshot) -> None:
        """Takes in a look at the fleet; instances that have gone are forgotten."""
        kept: dict[str, deque[float]] = {}
        for one in snapshot.instances:
            if one.engine is not None:
                rates = self.rates.get(one.address, deque(maxlen=_KEPT))
                rates.append(one.engine.tokens_out_per_s)
                kept[one.address] = rates
        self.rates = kept


def screen(snapshot: FleetSnapshot, choices: Choices, series: Series) -> RenderableType:
    """The gateway's lines and a table of its instances."""
    return Group(
        *_gateway(snapshot), Text(), _Instances(snapshot, choices, series), *_details(snapshot)
    )


@dataclass(frozen=True, slots=True)
class _Instances:
    """The table, as wide as there is room for."""

    snapshot: FleetSnapshot
    choices: Choices
    series: Series

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _table(self.snapshot, self.choices, self.series, options.max_width)


def chosen(snapshot: FleetSnapshot, choices: Choices) -> list[Instance]:
    """The instances to show, in order."""
    shown = [one for one in snapshot.instances if choices.service in ("all", one.service)]
    order = _ORDERS[choices.sort]
    return sorted(shown, key=lambda one: (order(one), _SERVICES.index(one.service), one.address))


def held_pages(engine: EngineFigures) -> int:
    """Pages that requests hold."""
    return engine.pages - engine.pages_free - engine.pages_evictable


def bar(engine: EngineFigures) -> str:
    """The KV pool: held by requests, in the prefix cache alone, free."""
    pages = max(1, engine.pages)
    held = round(_BAR * held_pages(engine) / pages)
    used = round(_BAR * (engine.pages - engine.pages_free) / pages)
    return "█" * held + "▒" * (used - held) + "░" * (_BAR - used)


def sparkline(values: Sequence[float]) -> str:
    """The values as bars, the highest of them full."""
    top = max(values, default=0.0) or 1.0
    return "".join(_SPARKS[min(7, int(value / top * 7.999))] for value in values)


def span(seconds: float) -> str:
    """A duration in two or three characters and a unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _gateway(snapshot: FleetSnapshot) -> list[Text]:
    gateway = snapshot.gateway
    minute = gateway.minute
    state = "draining" if gateway.draining else "ready" if gateway.ready else "starting"
    first = Text.assemble(
        ("gateway ", "bold"),
        f"{gateway.id or '-'}  ",
        (state, _STYLES[state]),
        f" for {span(snapshot.now - gateway.started)}  Shoal {gateway.version}",
    )
    if gateway.reasons:
        first.append(f"  {'; '.join(gateway.reasons)}", "yellow")
    flow = Text(
        f"requests {gateway.streams} of {gateway.max_requests} in flight, {gateway.queued} queued"
        f"   tokens/s {gateway.tokens_in_per_s:,.0f} in, {gateway.tokens_out_per_s:,.0f} out"
    )
    last = Text(
        f"last minute: {minute.requests} requests, {minute.errors} errors, {minute.cancelled}"
        f" cancelled, {minute.resumes} resumes   TTFT {_times(gateway, 'ttft')}"
        f"   ITL {_times(gateway, 'itl')}"
    )
    return [first, flow, last]


def _times(gateway: GatewayFigures, name: str) -> str:
    found = gateway.minute.ttft if name == "ttft" else gateway.minute.itl
    if found.p50 is None or found.p99 is None:
        return "-"
    return f"p50 {found.p50 * 1000:.0f} p99 {found.p99 * 1000:.0f} ms"


def _table(snapshot: FleetSnapshot, choices: Choices, series: Series, width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    rows = [
        _cells(one, snapshot.now, series.rates.get(one.address, ()))
        for one in chosen(snapshot, choices)
    ]
    widths = _widths([max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)], width)
    for head, fits in zip(_HEADS, widths, strict=True):
        justify: JustifyMethod = "right" if head in _RIGHT else "left"
        table.add_column(head, justify=justify, no_wrap=True, overflow="ellipsis", width=fits)
    for row in rows:
        row[_SPARK] = str(row[_SPARK])[-widths[_SPARK] :]  # the newest
        table.add_row(*row)
    return table


def _widths(wanted: list[int], width: int) -> list[int]:
    """Of columns with a blank between them: in a narrow terminal some give way, the others never
    do."""
    excess = sum(wanted) + len(wanted) - 1 - width
    for column, least in _GIVE_WAY.items():
        given = max(0, min(excess, wanted[column] - least))
        wanted[column] -= given
        excess -= given
    return wanted


def _details(snapshot: FleetSnapshot) -> list[Text]:
    """A line about each instance that says why it is not ready."""
    return [
        Text(f"{one.address}: {one.detail}", "yellow", no_wrap=True, overflow="ellipsis")
        for one in snapshot.instances
        if one.detail
    ]


def _cells(one: Instance, now: float, rates: Sequence[float]) -> list[Text | str]:
    begin: list[Text | str] = [
        one.service,
        Text(one.address),
        Text(one.state, style=_STYLES[one.state]),
        span(now - one.since),
        str(one.outstanding),
    ]
    engine = one.engine
    if engine is None:
        return [*begin, *[""] * 8]
    hits = engine.prefix_hit_rate
    return [
        *begin,
        f"{engine.running}/{engine.max_running}",
        str(engine.waiting),
        f"{bar(engine)} {held_pages(engine) / max(1, engine.pages):.0%}",
        "-" if hits is None else f"{hits:.0%}",
        f"{engine.tokens_in_per_s:,.0f}",
        f"{engine.tokens_out_per_s:,.0f}",
        sparkline(rates),
        f"{engine.busy:.0%}",
    ]
