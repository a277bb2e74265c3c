"""The flags of `shoal bench`: vLLM's spellings, and one sentence for each mistake."""

from __future__ import annotations

import pytest

from services.client.bench.config import BenchConfig
from services.common.config import parse


def config_of(*argv: str) -> BenchConfig:
    return parse(BenchConfig, argv, prog="shoal bench", description="")


def test_goodput_as_vllm_spells_it_and_with_commas() -> None:
    words = config_of("--goodput", "ttft:200", "tpot:50", "--num-prompts", "3")
    commas = config_of("--goodput", "ttft:200,tpot:50")
    assert words.slos == commas.slos == {"ttft": 0.2, "tpot": 0.05}
    assert words.num_prompts == 3


def test_headers_keep_their_commas_and_may_be_repeated() -> None:
    config = config_of("--header", "Accept: a, b", "--header", "X-Key=c")
    assert config.header == ("Accept: a, b", "X-Key=c")


def test_a_sweep_is_a_list_of_rates() -> None:
    assert config_of("--sweep-rates", "1,2,inf").rates == (1.0, 2.0, float("inf"))
    assert config_of("--sweep-concurrency", "1,4").concurrencies == (1, 4)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--goodput", "speed:3"], "--goodput 'speed:3' is not METRIC:MS with METRIC of ttft"),
        (["--goodput", "ttft:x"], "--goodput: 'x' is not a number"),
        (["--request-rate", "0"], "--request-rate 0.0 is out of range: above 0"),
        (["--burstiness", "nan"], "--burstiness: 'nan' is not a number"),
        (["--concurrency", "0"], "--concurrency 0 is out of range: at least 1"),
        (["--range-ratio", "1"], "--range-ratio 1.0 is out of range: at least 0 and below 1"),
        (["--dataset-name", "mooncake"], "--dataset-name mooncake needs a --dataset-path"),
        (["--dataset-path", "x"], "--dataset-name random takes no --dataset-path"),
        (["--sweep-rates", "1,-2"], "--sweep-rates takes numbers above 0, not -2"),
        (["--sweep-rates", "1", "--sweep-concurrency", "1"], "cannot be given together"),
        (["--sweep-concurrency", "1.5"], "--sweep-concurrency takes whole numbers"),
        (["--metric-percentiles", "101"], "--metric-percentiles must be from 0 to 100"),
        (["--extra-body", "[1]"], "--extra-body must be a JSON object"),
        (["--header", "nonsense"], "is not of the form 'Name: value'"),
        (["--url", "localhost:8000"], "does not start with http:// or https://"),
        (["--url", "http://localhost:abc"], "--url 'http://localhost:abc' is no URL: Port"),
        (["--url", "http://localhost:65536"], "--url 'http://localhost:65536' is no URL: Port"),
        (["--url", "http://[::1"], "--url 'http://[::1' is no URL: Invalid IPv6 URL"),
        (["--url", "http://a\x01b"], "is no URL: Invalid non-printable ASCII character"),
    ],
)
def test_a_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as end:
        config_of(*argv)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
