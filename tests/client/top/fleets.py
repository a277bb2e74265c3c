"""Fleets to look at."""

from __future__ import annotations

from typing import Any

from services.gateway.watch.shapes import (
    EngineFigures,
    FleetSnapshot,
    GatewayFigures,
    Instance,
    Minute,
    Percentiles,
)


def engine(**changes: Any) -> EngineFigures:
    values: dict[str, Any] = {
        "running": 3,
        "waiting": 1,
        "max_running": 256,
        "pages": 100,
        "pages_free": 50,
        "pages_evictable": 20,
        "page_size": 16,
        "preempted": 0,
        "prefix_hit_rate": 0.25,
        "tokens_in_per_s": 10.0,
        "tokens_out_per_s": 1234.0,
        "busy": 0.9,
        "bubble": 0.01,
        "step_s": 0.005,
        "tensor_parallel": 1,
        "max_model_len": 4096,
    }
    return EngineFigures(**{**values, **changes})


def instance(service: Any, address: str, **changes: Any) -> Instance:
    values: dict[str, Any] = {
        "state": "ready",
        "since": 40.0,
        "epoch": "e",
        "model": "tiny",
        "version": "0.1.0",
        "outstanding": 2,
        "heard": 99.9,
        "detail": "",
    }
    return Instance(service=service, address=address, **{**values, **changes})


def fleet(*instances: Instance) -> FleetSnapshot:
    minute = Minute(
        ttft=Percentiles(9, 0.05, 0.08, 0.2),
        itl=Percentiles(0),
        requests=9,
        errors=1,
        cancelled=2,
        tokens_in=100,
        tokens_out=200,
        resumes=3,
    )
    gateway = GatewayFigures(
        id="gw-1",
        version="0.1.0",
        started=10.0,
        ready=True,
        draining=False,
        reasons=[],
        streams=4,
        queued=1,
        max_requests=1000,
        local_decoder=False,
        tokens_in_per_s=20.0,
        tokens_out_per_s=2345.0,
        minute=minute,
    )
    return FleetSnapshot(now=100.0, time=1.8e9, gateway=gateway, instances=list(instances))


FLEET = fleet(
    instance("worker", "unix:/w0", engine=engine()),
    instance("worker", "unix:/w1", state="dead", since=97.0, detail="connection refused"),
    instance("worker", "unix:/w2", engine=engine(running=9, pages_free=0, tokens_out_per_s=1.0)),
    instance("tokenizer", "unix:/t0", outstanding=7),
)
