"""The quickstart's data set keeps what its score relies on: disjoint pairs, right answers, nothing to guess."""

import importlib.util
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart" / "make_data.py"


def load_script():
    """Import make_data.py, which lies outside any package."""
    spec = importlib.util.spec_from_file_location("quickstart_make_data", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_data = load_script()


@pytest.fixture(scope="module")
def rows():
    """The problems as they are shipped: (train, heldout)."""
    return make_data.make()


PATTERNS = [
    (kind, number, re.compile(re.sub(r"\\{([abc])\\}", r"(?P<\1>\\d+)", re.escape(phrasing))))
    for kind, phrasings in make_data.PHRASINGS.items()
    for number, phrasing in enumerate(phrasings)
]


def kind_of(question: str) -> tuple[str, int, tuple[int, ...]]:
    """Read a question with the phrasings alone: its kind, the phrasing's number, and (a, b[, c])."""
    for kind, number, pattern in PATTERNS:
        if match := pattern.fullmatch(question):
            return kind, number, tuple(int(match[name]) for name in sorted(match.groupdict()))
    raise AssertionError(f"no phrasing gives {question!r}")


def expected(kind: str, numbers: tuple[int, ...]) -> int:
    """The right result, computed here from the question alone."""
    if kind == "sum":
        return numbers[0] + numbers[1]
    if kind == "difference":
        return numbers[0] - numbers[1]
    return numbers[0] + numbers[1] - numbers[2]


def pairs_of(kind: str, numbers: tuple[int, ...]) -> set[frozenset[int]]:
    """All unordered pairs among a question's operands, and the pair its second step combines."""
    pairs = {frozenset((x, y)) for i, x in enumerate(numbers) for y in numbers[i + 1 :]}
    if kind == "sum then difference":
        pairs.add(frozenset((numbers[0] + numbers[1], numbers[2])))
    return pairs


@pytest.fixture(scope="module")
def readings(rows):
    """What each question says, in the order of `rows`."""
    return tuple([kind_of(problem.question) for problem in problems] for problems in rows)


@pytest.mark.lengthy
def test_sizes_and_every_question_is_asked_once(rows):
    train, heldout = rows
    assert len(train) == 38_400
    assert len(heldout) == 500
    questions = [problem.question for problem in train + heldout]
    assert len(set(questions)) == len(questions)


@pytest.mark.lengthy
def test_every_final_answer_is_right(rows, readings):
    for problem, (kind, _, numbers) in zip(rows[0] + rows[1], readings[0] + readings[1], strict=True):
        answer = problem.row()["messages"][1]["content"]
        found = re.search(r"#### (-?\d+)$", answer)
        assert found is not None
        assert int(found[1]) == expected(kind, numbers)


@pytest.mark.lengthy
def test_no_pair_of_operands_is_in_both_files(readings):
    train, heldout = (
        set().union(*(pairs_of(kind, numbers) for kind, _, numbers in questions)) for questions in readings
    )
    assert train
    assert heldout
    assert not train & heldout


@pytest.mark.lengthy
def test_operands_reach_99_and_both_files_hold_all_kinds_evenly(readings):
    for questions in readings:
        assert max(max(numbers) for _, _, numbers in questions) == 99
        assert min(min(numbers) for _, _, numbers in questions) >= 1
        counts = Counter(kind for kind, _, _ in questions)
        assert len(counts) == 3
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.lengthy
def test_each_kind_is_asked_in_at_least_five_ways(readings):
    for questions in readings:
        ways = Counter((kind, number) for kind, number, _ in questions)
        for kind in make_data.PHRASINGS:
            asked = [count for (other, _), count in ways.items() if other == kind]
            assert len(asked) >= 5
            assert min(asked) > len(questions) / 3 / 6 / 2


@pytest.mark.lengthy
def test_the_best_constant_answer_is_nearly_always_wrong(rows):
    _, heldout = rows
    (_, most), *_ = Counter(problem.result for problem in heldout).most_common(1)
    assert most / len(heldout) < 0.05


@pytest.mark.parametrize(
    ("working", "text"),
    [
        (lambda: make_data.add(47, 85), "47+85: 7+5=12, 4+8+1=13"),
        (lambda: make_data.add(5, 13), "5+13: 5+3=8, 0+1=1"),
        (lambda: make_data.subtract(132, 85), "132-85: 2-5=7 borrow, 3-8-1=4 borrow, 1-0-1=0"),
        (lambda: make_data.subtract(9, 9), "9-9: 9-9=0"),
    ],
)
def test_working_is_column_arithmetic(working, text):
    assert working() == text


def test_working_spells_the_result():
    rng = random.Random(0)
    for _ in range(300):
        x, y = sorted((rng.randint(1, 198), rng.randint(1, 99)), reverse=True)
        for text, result in ((make_data.add(x, y), x + y), (make_data.subtract(x, y), x - y)):
            written = [int(column) for column in re.findall(r"=(\d+)", text)]
            top, *lower = reversed(written)
            assert int(str(top) + "".join(str(digit % 10) for digit in lower)) == result


@pytest.mark.lengthy
def test_same_seed_same_problems_other_seed_others():
    first, again, other = (make_data.make(60, 20, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_files_are_chat_rows(tmp_path, rows):
    path = tmp_path / "heldout.jsonl"
    make_data.write(path, rows[1])
    written = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert written == [problem.row() for problem in rows[1]]
    assert [message["role"] for message in written[0]["messages"]] == ["user", "assistant"]
