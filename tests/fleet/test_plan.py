"""What a fleet consists of, as a pure function of its configuration."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.common.config import env_name, parse
from services.common.errors import StartupError
from services.fleet import config as fleet_config
from services.fleet.config import FleetConfig
from services.fleet.plan import ServiceSpec, plan_fleet, service_environment
from services.gateway.config import GatewayConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig

FIXED_FLAGS = [
    "--model",
    "--served-model-name",
    "--host",
    "--port",
    "--grpc-port",
    "--workers",
    "--tokenizers",
    "--detokenizers",
    "--tp",
    "--page-size",
    "--num-pages",
    "--max-model-len",
    "--max-running-requests",
    "--max-queue",
    "--max-prefill-tokens",
    "--schedule",
    "--disable-overlap",
    "--cache",
    "--attention-backend",
    "--dtype",
    "--engine",
]

RUN = Path("/run/f")


def _read(cls: type, spec: ServiceSpec) -> object:
    """The config that a spec's process will have."""
    start = spec.command.index(spec.role) + 1
    return parse(cls, spec.command[start:], prog="p", description="d")


def test_the_promised_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(FleetConfig, ["--help"], prog="shoal serve", description="d")
    text = capsys.readouterr().out
    assert [flag for flag in FIXED_FLAGS if f"{flag} " not in text] == []


def test_each_service_gets_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_config, "available_cores", lambda: 8)
    config = FleetConfig(
        model="m.gguf", workers=2, tokenizers=1, detokenizers=2, tp=2, page_size=1, port=0,
        schedule="decode-first", disable_overlap=True, grpc_port=-1, log_format="json",
    )  # fmt: skip
    specs = {spec.name: spec for spec in plan_fleet(config, RUN)}
    assert list(specs) == [
        *("gateway", "tokenizer-0", "detokenizer-0", "detokenizer-1", "worker-0", "worker-1")
    ]
    assert specs["detokenizer-1"].command[:4] == (sys.executable, "-m", "services", "detokenizer")
    assert _read(GatewayConfig, specs["gateway"]) == GatewayConfig(
        port=0,
        grpc_port=-1,
        admin_address="unix:/run/f/gateway.admin.sock",
        gateway_id="gateway",
        model="m.gguf",
        log_format="json",
        tokenizer_addresses=("unix:/run/f/tokenizer-0.sock",),
        detokenizer_addresses=("unix:/run/f/detokenizer-0.sock", "unix:/run/f/detokenizer-1.sock"),
        worker_addresses=("unix:/run/f/worker-0.sock", "unix:/run/f/worker-1.sock"),
    )
    assert _read(TokenizerConfig, specs["tokenizer-0"]) == TokenizerConfig(
        address="unix:/run/f/tokenizer-0.sock",
        admin_address="unix:/run/f/tokenizer-0.admin.sock",
        model="m.gguf",
        log_format="json",
    )
    assert _read(WorkerConfig, specs["worker-1"]) == WorkerConfig(
        address="unix:/run/f/worker-1.sock",
        admin_address="unix:/run/f/worker-1.admin.sock",
        model="m.gguf",
        log_format="json",
        tp=2,
        page_size=1,
        schedule="decode-first",
        disable_overlap=True,
        num_threads=2,
    )


def test_several_gateways_share_the_ports_and_keep_apart_what_is_theirs() -> None:
    specs = plan_fleet(FleetConfig(gateways=2, port=8000), RUN)
    read = [_read(GatewayConfig, spec) for spec in specs if spec.role == "gateway"]
    gateways = [config for config in read if isinstance(config, GatewayConfig)]
    assert [spec.name for spec in specs[:2]] == ["gateway-0", "gateway-1"]
    assert [gateway.gateway_id for gateway in gateways] == ["gateway-0", "gateway-1"]
    assert all(gateway.reuse_port and gateway.port == 8000 for gateway in gateways)
    assert len({gateway.admin_address for gateway in gateways}) == 2


def test_keys_reach_the_gateway_alone_and_by_no_command_line() -> None:
    config = FleetConfig(api_key=("alice:k-1", "k-2"), tls_cert="c", tls_key="k")
    gateway, *others = plan_fleet(config, RUN)
    assert gateway.environment == {"SHOAL_API_KEY": "alice:k-1,k-2"}
    assert not any(spec.environment for spec in others)
    for spec in (gateway, *others):
        assert "k-1" not in " ".join(spec.command)
        assert "k-1" not in repr(spec)
        assert ("--tls-cert=c" in spec.command) == (spec is gateway)
    assert service_environment({"SHOAL_API_KEY": "k-1"}) == {}
    assert "k-1" not in repr(config)


def test_a_core_is_never_divided_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_config, "available_cores", lambda: 2)
    *_, worker = plan_fleet(FleetConfig(workers=3), RUN)
    assert "--num-threads=1" in worker.command


def test_no_detokenizers_is_a_mode() -> None:
    specs = plan_fleet(FleetConfig(detokenizers=0), RUN)
    assert [spec.role for spec in specs] == ["gateway", "tokenizer", "worker"]


def test_a_long_directory_is_refused() -> None:
    with pytest.raises(StartupError, match="too long for a unix socket"):
        plan_fleet(FleetConfig(), Path("/" + "x" * 90))


def test_services_do_not_read_the_fleets_own_variables() -> None:
    kept = {"PATH": "/bin", "SHOAL_KV_TYPE": "8", "SHOAL_PARENT_PID": "1"}
    taken = {env_name(name): "1" for name in ("port", "workers", "address", "worker_addresses")}
    assert service_environment(kept | taken) == kept


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"workers": 0}, "--workers 0 is out of range: at least 1"),
        ({"detokenizers": -1}, "--detokenizers -1 is out of range: at least 0"),
        ({"port": 70000}, "--port 70000 is out of range: 0 to 65535"),
        ({"port": 9, "grpc_port": 9}, "both 9"),
        ({"page_size": 3}, "--page-size 3"),
        ({"tp": 0}, "--tp 0 is out of range: at least 1"),
        ({"drain_timeout": -1.0}, "--drain-timeout -1.0 is out of range: at least 0"),
        ({"tls_cert": "c"}, "--tls-cert and --tls-key need each other"),
        ({"tls_ca": "c"}, "--tls-ca needs --tls-cert"),
    ],
)
def test_wrong_numbers_are_refused_before_anything_starts(
    values: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        FleetConfig(**values)  # type: ignore[arg-type]
