"""Configs as command lines and as environment variables."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.client.bench.config import BenchConfig
from services.client.chat.config import ChatConfig
from services.client.doctor.config import DoctorConfig
from services.client.top.config import TopConfig
from services.common.bounds import Bounds, above, at_least, below, between
from services.common.config import (
    borrow,
    build_parser,
    env_name,
    flag_name,
    option,
    options,
    parse,
    secret_environment,
    share,
    to_argv,
)
from services.fleet.config import FleetConfig
from services.fleet.planner.config import PlanConfig
from services.gateway.config import GatewayConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig

CONFIGS: list[type] = [FleetConfig, GatewayConfig, TokenizerConfig, WorkerConfig, ChatConfig]


@dataclass(frozen=True)
class Sample:
    """One field of every kind."""

    text: str = option("", "some text", group="first")
    size: int = option(4, "a size", group="first", bounds=at_least(0))
    ratio: float = option(0.5, "a ratio: 50% or so", group="second")
    limit: float | None = option(None, "maybe a limit", group="second")
    fast: bool = option(False, "go fast", group="second")
    safe: bool = option(True, "be safe", group="second")
    kind: Literal["a", "b"] = option("a", "which kind", group="second")
    names: tuple[str, ...] = option((), "names, comma-separated", metavar="NAME,...")


def read(cls: type[Any], *argv: str) -> Any:
    return parse(cls, argv, prog="shoal test", description="A test.")


words = st.text(st.characters(exclude_characters=",\0", exclude_categories=["Cs"]), min_size=1)
samples = st.builds(
    Sample,
    text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    size=st.integers(0, 10**9),
    ratio=st.floats(allow_nan=False),
    limit=st.none() | st.floats(allow_nan=False),
    fast=st.booleans(),
    safe=st.booleans(),
    kind=st.sampled_from(["a", "b"]),
    names=st.lists(words.map(str.strip).filter(bool)).map(tuple),
)


@given(samples)
def test_to_argv_is_undone_by_parse(sample: Sample) -> None:
    assert read(Sample, *to_argv(sample)) == sample


@pytest.mark.parametrize("cls", CONFIGS)
def test_defaults_need_no_flags(cls: type[Any]) -> None:
    assert to_argv(cls()) == []
    assert read(cls) == cls()


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_option_has_a_help_text_with_its_default(cls: type[Any]) -> None:
    # Without any blank: lines are broken at hyphens too.
    text = "".join(build_parser(cls, prog="p", description="d").format_help().split())
    for field in options(cls):
        assert flag_name(field.name) in text
        assert field.metadata["help"][:20].replace(" ", "") in text
        shown = field.default not in (None, "", ()) and not isinstance(field.default, bool)
        if shown and "default" not in field.metadata["help"]:
            assert f"(default:{field.default})" in text, field.name


@pytest.mark.parametrize("cls", [*CONFIGS, BenchConfig, DoctorConfig, PlanConfig, TopConfig])
def test_every_number_has_bounds_which_its_default_keeps(cls: type[Any]) -> None:
    hints = typing.get_type_hints(cls)
    for field in options(cls):
        if {int, float} & {hints[field.name], *typing.get_args(hints[field.name])}:
            bounds = field.metadata["bounds"]
            assert bounds is not None, field.name
            assert field.default is None or bounds.hold(field.default)


def test_the_help_tells_bounds_and_a_mistake_repeats_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        "a size; at least 0 (default: 4)"
        in build_parser(Sample, prog="p", description="d").format_help()
    )
    for value in ("0", "-1", "1e308", "inf"):
        with pytest.raises(SystemExit, match="2"):
            parse(WorkerConfig, [f"--memory-ratio={value}"], prog="p", description="d")
        said = f"--memory-ratio {float(value)} is out of range: above 0 and at most 1"
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("value", ["1" + "0" * 400, "9223372036854775808"])
def test_a_number_beyond_all_counting_is_out_of_range(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(GatewayConfig, f"--max-requests={value}")
    assert "is out of range: at least 1 and below 2^63 (see" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        read(GatewayConfig, "--drain-timeout=inf")
    assert "inf is out of range: at least 0 and below 2^63 (see" in capsys.readouterr().err


def test_a_misspelt_flag_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for word, said in (
        ("--prot=1", "unrecognized arguments: --prot=1; did you mean --port? (see"),
        ("--xyzzy", "unrecognized arguments: --xyzzy (see"),
    ):
        with pytest.raises(SystemExit, match="2"):
            read(GatewayConfig, word)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bounds", "text", "inside", "outside"),
    [
        (at_least(1), "at least 1", (1, 1e9, 2**63 - 1), (0, 2**63, 10**400, math.inf)),
        (below(1, least=0), "at least 0 and below 1", (0, 0.99), (-0.1, 1, math.nan)),
        (above(0), "above 0", (0.1,), (0, -1, math.inf)),
        (above(0, math.inf), "above 0", (0.1, math.inf), (0, math.nan)),
        (between(-1, 65535), "-1 to 65535", (-1, 65535), (-2, 65536)),
    ],
)
def test_bounds(
    bounds: Bounds, text: str, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    assert str(bounds) == text
    assert all(bounds.hold(value) for value in inside)
    assert not any(bounds.hold(value) for value in outside)


def test_the_environment_fills_gaps_and_a_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"size": "7", "fast": "yes", "kind": "b", "names": "x, y", "limit": "2"}
    for name, value in values.items():
        monkeypatch.setenv(env_name(name), value)
    assert read(Sample, "--size", "9") == Sample(
        size=9, fast=True, kind="b", names=("x", "y"), limit=2.0
    )


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("size", "big", "environment variable SHOAL_SIZE: "),
        ("fast", "perhaps", "SHOAL_FAST: 'perhaps' is not a boolean; say true or false"),
        ("kind", "c", "SHOAL_KIND: choose from a, b"),
        ("size", "-1", "--size -1 is out of range: at least 0"),
    ],
)
def test_a_bad_variable_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    sentence: str,
) -> None:
    monkeypatch.setenv(env_name(name), value)
    with pytest.raises(SystemExit, match="2"):
        read(Sample)
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--size", "big"], "argument --size: 'big' is not a whole number"),
        (["--size=-2"], "--size -2 is out of range: at least 0"),
        (["--kind", "c"], "argument --kind: invalid choice: 'c'"),
        (["--siz", "3"], "unrecognized arguments: --siz 3"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_a_bad_flag_is_one_sentence(
    capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(Sample, *argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"shoal test: {sentence}")
    assert line.endswith("(see shoal test --help)")


def test_help_groups_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read(Sample, "--help")
    text = capsys.readouterr().out
    assert text.index("first:") < text.index("--size") < text.index("second:")
    assert "50% or so" in text
    assert "--no-safe" in text


def test_a_borrowed_field_has_the_lenders_default_help_and_choices() -> None:
    @dataclass(frozen=True)
    class Borrower:
        size: int = borrow(Sample, "size", group="mine")
        kind: str = borrow(Sample, "kind", help="another text")

    size, kind = dataclasses.fields(Borrower)
    assert (size.default, size.metadata["help"], size.metadata["group"]) == (4, "a size", "mine")
    assert kind.metadata["help"] == "another text"
    assert kind.metadata["choices"] == ("a", "b")
    assert share(Sample, Borrower(size=6), text="own") == Sample(size=6, text="own")


@pytest.mark.parametrize("cls", CONFIGS)
def test_hints_resolve(cls: type[Any]) -> None:
    assert set(typing.get_type_hints(cls)) == {field.name for field in dataclasses.fields(cls)}


@dataclass(frozen=True)
class Secretive:
    keys: tuple[str, ...] = option((), "keys", secret=True)
    names: tuple[str, ...] = option((), "names")


def test_a_list_may_be_repeated_and_take_commas() -> None:
    argv = ["--names=a,b", "--names", "c", "--keys=k"]
    assert parse(Secretive, argv, prog="p", description="d") == Secretive(("k",), ("a", "b", "c"))


def test_secrets_reach_a_child_by_its_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Secretive(("k-1", "k-2"), ("a",))
    assert to_argv(config) == ["--names=a"]
    assert "k-1" not in repr(config)
    for name, value in secret_environment(config).items():
        monkeypatch.setenv(name, value)
    assert parse(Secretive, to_argv(config), prog="p", description="d") == config
    assert secret_environment(Secretive()) == {}
