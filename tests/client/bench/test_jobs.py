"""What is asked: made up, or read from files in the forms that the traces have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.client.bench.config import BenchConfig
from services.client.bench.jobs import make_jobs, warmup_jobs
from services.client.bench.words import ModelCounter, TextMaker, counted
from services.common.errors import StartupError

WORDS = TextMaker()  # a token a word


def lengths(config: BenchConfig) -> list[list[int]]:
    return [[len(turn.text.split()) for turn in job.turns] for job in make_jobs(config, WORDS)]


def test_random_prompts_have_their_length_and_differ() -> None:
    config = BenchConfig(num_prompts=5, input_len=30, output_len=7)
    jobs = make_jobs(config, WORDS)
    assert lengths(config) == [[30]] * 5
    assert len({job.turns[0].text for job in jobs}) == 5
    assert {job.turns[0].max_tokens for job in jobs} == {7}
    assert jobs == make_jobs(config, WORDS)


def test_lengths_are_drawn_within_the_ratio() -> None:
    config = BenchConfig(num_prompts=300, input_len=100, output_len=50, range_ratio=0.5)
    found = [row[0] for row in lengths(config)]
    outputs = [job.turns[0].max_tokens for job in make_jobs(config, WORDS)]
    assert (min(found) >= 50, max(found) <= 150) == (True, True)
    assert max(found) - min(found) > 90
    assert (min(outputs) >= 25, max(outputs) <= 75) == (True, True)


def test_shared_prefixes_go_round() -> None:
    config = BenchConfig(
        dataset_name="shared-prefix", num_prompts=6, prefix_len=20, num_prefixes=2, input_len=5
    )
    prefixes = [" ".join(job.turns[0].text.split()[:20]) for job in make_jobs(config, WORDS)]
    assert lengths(config) == [[25]] * 6
    assert prefixes[0] == prefixes[2] == prefixes[4] != prefixes[1] == prefixes[3]


def test_each_turn_of_a_conversation_counts_as_a_prompt() -> None:
    config = BenchConfig(dataset_name="multi-turn", num_prompts=7, turns=3, input_len=4)
    assert lengths(config) == [[4, 4, 4], [4, 4, 4], [4]]


def test_warm_up_prompts_are_none_of_the_measured() -> None:
    config = BenchConfig(num_prompts=20, warmup=3, input_len=8)
    measured = {job.turns[0].text for job in make_jobs(config, WORDS)}
    warm = [job.turns[0].text for job in warmup_jobs(config, WORDS)]
    assert len(warm) == 3
    assert not measured & set(warm)


@pytest.mark.parametrize("model", ["embedded", "byte"])
def test_a_tokenizer_makes_lengths_exact(model: str) -> None:
    """Also where a word has several tokens: bytes."""
    counter = ModelCounter(model)
    config = BenchConfig(num_prompts=8, input_len=123)
    jobs = make_jobs(config, counted(counter))
    assert [counter.count(job.turns[0].text) for job in jobs] == [123] * 8


def test_mooncake_shares_what_its_hash_ids_share(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 9000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 9, "hash_ids": [1, 3, 4]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    config = BenchConfig(dataset_name="mooncake", dataset_path=str(path), trace_speed=2.0)
    early, late = make_jobs(config, WORDS)
    assert (early.at, late.at) == (0.0, 3.0)
    assert (early.turns[0].max_tokens, late.turns[0].max_tokens) == (9, 5)
    first, second = early.turns[0].text.split(), late.turns[0].text.split()
    assert (len(first), len(second)) == (1100, 600)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]


def test_mooncake_without_hash_ids_shares_nothing_and_keeps_its_length(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1500, "output_length": 5}
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, [row, {**row, "hash_ids": []}])))
    config = BenchConfig(dataset_name="mooncake", dataset_path=str(path))
    assert lengths(config) == [[1500], [1500]]
    first, second = (job.turns[0].text.split() for job in make_jobs(config, WORDS))
    blocks = [tuple(words[at : at + 100]) for words in (first, second) for at in (0, 512, 1024)]
    assert len(set(blocks)) == 6


def test_azure_times_have_seven_digits_or_a_zone(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109\r\n"
        "2023-11-16 18:16:00+00:00,10,0\r\n"
    )
    config = BenchConfig(dataset_name="azure", dataset_path=str(path))
    jobs = make_jobs(config, WORDS)
    assert [job.at for job in jobs] == pytest.approx([0.0, 4.314579, 13.31941], abs=1e-6)
    assert [job.turns[0].max_tokens for job in jobs] == [44, 109, 1]
    assert lengths(config) == [[374], [396], [10]]


@pytest.mark.parametrize("in_lines", [True, False])
def test_sharegpt_asks_first_questions(tmp_path: Path, in_lines: bool) -> None:
    rows = [
        {
            "id": "a",
            "conversations": [
                {"from": "system", "value": "be brief"},
                {"from": "human", "value": "What is a shoal?"},
                {"from": "gpt", "value": "Many fish that swim together."},
                {"from": "human", "value": "More?"},
            ],
        },
        {"conversations": [{"from": "gpt", "value": "alone"}]},
        {"messages": [{"role": "user", "content": "2"}, {"role": "assistant", "content": "four"}]},
    ]
    path = tmp_path / "chats.json"
    path.write_text("\n".join(map(json.dumps, rows)) if in_lines else json.dumps(rows))
    config = BenchConfig(dataset_name="sharegpt", dataset_path=str(path))
    turns = [job.turns[0] for job in make_jobs(config, WORDS)]
    asked = sorted((turn.text, turn.max_tokens) for turn in turns)
    assert asked == [("2", 1), ("What is a shoal?", 7)]


def test_sharegpt_takes_other_rows_for_another_seed(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "a"}]}
        for n in range(1000)
    ]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(rows))

    def asked(seed: int) -> list[str]:
        config = BenchConfig(
            dataset_name="sharegpt", dataset_path=str(path), num_prompts=10, seed=seed
        )
        return [job.turns[0].text for job in make_jobs(config, WORDS)]

    assert asked(0) == asked(0)
    assert not set(asked(0)) & set(asked(1))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("mooncake", "{}", "is no mooncake data set: a row has no 'input_length'"),
        ("mooncake", "oops", "is no mooncake data set"),
        ("mooncake", "", "has no request"),
        ("azure", "a,b\n1,2\n", "its columns are"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3\n", "line 2 has"),
        ("sharegpt", "[3]", "is no sharegpt data set"),
        ("sharegpt", '[{"messages": ["hi"]}]', "is no sharegpt data set"),
    ],
)
def test_a_file_of_another_form_is_refused(
    tmp_path: Path, name: str, text: str, sentence: str
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    config = BenchConfig(dataset_name=name, dataset_path=str(path))  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=sentence):
        make_jobs(config, WORDS)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    config = BenchConfig(dataset_name="azure", dataset_path=str(tmp_path / "none"))
    with pytest.raises(StartupError, match=r"cannot read --dataset-path .*: No such file"):
        make_jobs(config, WORDS)
