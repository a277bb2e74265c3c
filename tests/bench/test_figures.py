"""What benchmarks have in common: rounds, tables, files, aims, pictures and the page of them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as everything
from bench import bars, bookkeeping, encode, figures, page, plots
from bench.figures import Rounds, table

README = Path(__file__).parents[2] / "bench" / "README.md"


@dataclasses.dataclass(frozen=True)
class Flags:
    json: str = ""
    rounds: int = 3


def of(rows: dict[str, dict[str, list[float]]]) -> Rounds:
    """Rounds with these values."""
    rounds = Rounds()
    for measure, row in rows.items():
        for system, values in row.items():
            for value in values:
                rounds.add(system, measure, value)
    return rounds


def test_ratios_are_those_of_each_round() -> None:
    rounds = Rounds()
    for ours, theirs in ((10.0, 5.0), (30.0, 10.0), (8.0, 8.0)):  # a slow round slows both
        rounds.add("shoal", "events/s", ours)
        rounds.add("peer", "events/s", theirs)
    assert rounds.ratio("shoal", "peer", "events/s") == 2.0
    assert rounds.spread("shoal", "events/s") == (8.0, 30.0)
    lines = table(rounds).splitlines()
    assert "| events/s | 10 (8 to 30) | 8 (5 to 10) |" in lines
    assert "| events/s | 2 |" in lines


def test_a_curve_is_in_the_order_of_its_x() -> None:
    rounds = of({"us, 16": {"shoal": [3.0, 1.0]}, "us, 2": {"shoal": [5.0]}, "s, 2": {"a": [1.0]}})
    assert rounds.curve("shoal", "us") == [(2.0, 5.0, 5.0, 5.0), (16.0, 2.0, 1.0, 3.0)]


def test_a_file_has_the_values_and_what_they_belong_to(tmp_path: Path) -> None:
    path = tmp_path / "new" / "one.json"
    rounds = of({"us, 2": {"shoal": [5.0, 6.0]}})
    figures.finish("one", Flags(json=str(path)), rounds)
    report = json.loads(path.read_text())
    assert report["bench"] == "one"
    assert report["flags"]["rounds"] == 3
    assert set(report["machine"]) > {"date", "cpu", "python", "shoal", "torch"}
    assert Rounds.from_json(report["rounds"]).as_json() == rounds.as_json()


def test_aims_are_judged_by_shoals_two_forms() -> None:
    systems = {"shoal": [32.0], bars.GATEWAY_DECODES: [38.0], bars.MINI: [10.0]}
    rounds = of({"events/s, 64": systems, "added p50 ms, 1": systems})
    lines = bars.table(rounds).splitlines()
    assert len(lines) == 4  # smg was not there
    assert lines[2].endswith("| 3.2, met | 3.8, **not met** |")  # 3, but 4 with the gateway
    assert lines[3].endswith("| 3.2, **not met** | 3.8, **not met** |")
    assert bars.table(of({"events/s, 64": {"shoal": [1.0]}})) == ""


def test_the_engines_aims_are_judged_round_by_round() -> None:
    row = {"shoal int8": [12.0, 26.0], "openvino genai": [9.0, 20.0], "transformers": [11.0, 2.0]}
    fleet = {"shoal int8": [10.0], "shoal int8, fleet": [9.5]}
    single = {"shoal int8": [9.0], "llama.cpp": [10.0]}
    rounds = of({"8 streams": row, "32 streams": fleet, "single": single})
    lines = bars.engine_table(rounds).splitlines()
    assert "| shoal int8: 8 streams, at least 1.2 of the best peer | 1.2, **not met** |" in lines
    assert "| shoal int8, fleet: 32 streams, at least 0.92 of shoal int8 | 0.95, met |" in lines
    stretch = "| shoal int8: single, at least 1 of llama.cpp (a stretch) | 0.9, **not met** |"
    assert stretch in lines
    assert sum(line.endswith("| not measured |") for line in lines) == len(bars.ENGINE_BARS) - 3


def modules() -> list[str]:
    """Every benchmark that the README names."""
    return re.findall(r"^\| `python -m (bench\.\S+)`", README.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", modules())
def test_every_benchmark_can_write_a_file(name: str) -> None:
    module = importlib.import_module(f"{name}.__main__" if name.endswith("_peers") else name)
    configs = [
        value
        for value in vars(module).values()
        if dataclasses.is_dataclass(value) and getattr(value, "__module__", "") == module.__name__
    ]
    assert any("json" in {field.name for field in dataclasses.fields(one)} for one in configs)


def test_one_command_runs_every_benchmark_that_needs_no_gpu() -> None:
    named = {name.rpartition(".")[2] for name in modules()}
    assert set(everything.QUICK) == named - {"gpu"}
    config = everything.AllConfig(output="/out", smg_python="/smg/python", rounds=5)
    wire = everything.command(config, "wire")
    assert wire[1:3] == ["-m", "bench.peers.wire"]
    assert {"--rounds=5", "--json=/out/wire.json", "--smg-python=/smg/python"} <= set(wire)
    assert "--scale=0.05" in everything.command(dataclasses.replace(config, quick=True), "wire")
    with pytest.raises(ValueError, match="none of wire"):
        everything.AllConfig(only=("nonesuch",))


def report(bench: str, **more: Any) -> dict[str, Any]:
    return {"bench": bench, "machine": figures.machine(), "flags": {"rounds": 2}, **more}


REPORTS = {
    "wire": of(
        {
            f"{measure}, {streams}": {"shoal": [9.0, 8.0], bars.MINI: [4.0, 3.0]}
            for measure in (
                "events/s",
                "tokens/s",
                "CPU us a token",
                "added p50 ms",
                "added p99 ms",
            )
            for streams in (1, 64)
        }
    ),
    "growth": of(
        {f"gateway, CPU us a token, {streams}": {"shoal": [9.0, 8.0]} for streams in (1, 16)}
    ),
    "encode": of(
        {
            **{
                f"{measure}, {threads}": {encode.ONE: [9.0, 8.0], "2 processes": [9.5]}
                for measure in ("thousand tokens/s", "CPU us a token")
                for threads in (1, 2)
            },
            "short prompt, p50 ms, alone": {encode.ONE: [1.0]},
            "short prompt, p50 ms, beside 9 words": {encode.ONE: [1.5]},
        }
    ),
    "bookkeeping": of(
        {
            **{f"{bookkeeping.STEP}, {n}": {"shoal": [80.0]} for n in (1, 1024)},
            **{f"{bookkeeping.MATCH}, {n}": {"shoal": [9.0]} for n in (10, 100_000)},
        }
    ),
    "roofline": of(
        {
            "decode": {"shoal": [10.0, 9.0], "packed": [9.0, 8.1]},
            "attention": {"shoal": [5.0, 4.0], "sum": [2.0, 1.6]},
        }
    ),
    "default_fleet": of(
        {
            measure: {f"{n} at once": [3.0, 4.0] for n in (1, 2)}
            for measure in ("output tokens/s", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms")
        }
    ),
}
ENGINE = {
    clock: {name: {"single": [9.0, 8.0], "8 streams": [20.0]} for name in ("shoal none", "other")}
    for clock in ("seconds", "cpu")
}


def test_the_page_is_renewed_where_there_are_figures(tmp_path: Path) -> None:
    for name, rounds in REPORTS.items():
        text = json.dumps(report(name, rounds=rounds.as_json()))
        (tmp_path / f"{name}.json").write_text(text)
    engine = {"machine": figures.machine(), "config": {"rounds": 3}, "figures": ENGINE}
    (tmp_path / "engine_peers.json").write_text(json.dumps(engine))
    (tmp_path / "default_fleet.html").write_text("<p>shoal bench</p>")
    (tmp_path / "docs").mkdir()
    copy = tmp_path / "docs" / "benchmarks.md"
    names = [*REPORTS, "engine_peers", "gateways"]
    blocks = [f"<!-- figures: {name} -->\nold {name}\n<!-- end -->\n" for name in names]
    copy.write_text("# Before\n" + "\nbetween\n".join(blocks) + "after\n")
    assert page.fill(copy, tmp_path) == names[:-1]
    text = copy.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("after\n")
    assert "old gateways" in text  # there is no file of it
    assert re.findall("old (?!gateways)", text) == []
    assert "| CPU us a token, 1 | 8.5 (8 to 9) | 3.5 (3 to 4) |" in text
    assert "| shoal none | 8.5 (8 to 9) | 20 (20 to 20) |" in text
    assert "| attention, at least 0.5 of the limit | 0.4, **not met** |" in text
    assert "](images/bench-default_fleet.html)" in text
    assert (copy.parent / "images" / "bench-default_fleet.html").exists()
    images = re.findall(r"\]\((images/\S+\.svg)\)", text)
    assert len(images) == sum(map(len, plots.PICTURES.values()))
    for image in images:
        drawn = (copy.parent / image).read_text()
        assert figures.machine()["date"] in drawn
        assert "<svg" in drawn
    (again,) = plots.draw(report("growth", rounds=REPORTS["growth"].as_json()), tmp_path)
    assert again.read_text() == (copy.parent / "images" / again.name).read_text()


def test_the_pages_blocks_are_those_of_benchmarks() -> None:
    named = re.findall(r"<!-- figures: (\w+) -->", page.PAGE.read_text())
    assert set(plots.PICTURES) <= set(named) <= set(everything.QUICK)
    assert page.PAGE.read_text().count("<!-- end -->") == len(named)
