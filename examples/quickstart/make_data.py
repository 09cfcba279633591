"""Write the quickstart's data set: arithmetic asked in words, answered with column working.

Two files of chat rows (`{"messages": [user, assistant]}`), one JSON object a line:

    train.jsonl     38,400 problems to learn from
    heldout.jsonl   500 problems to be examined on

Three kinds of problem (a sum, a difference, a sum and then a difference), each asked in six ways, with operands from 1
to 99. What makes the held-out score worth reading: every unordered pair of operands belongs to one file or the other.
If `heldout.jsonl` asks for 47 and 85 in one problem, or meets them halfway through one, then `train.jsonl` never does.

The answer shows its working from the ones to the hundreds, as one does on paper, and ends with `#### <number>`:

    What is 47 plus 85?                   47+85: 7+5=12, 4+8+1=13 #### 132
    Subtract 85 from 132.                 132-85: 2-5=7 borrow, 3-8-1=4 borrow, 1-0-1=0 #### 47
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, zip_longest
from pathlib import Path

TOP = 99  # the largest operand
ONE_DIGIT_SHARE = 0.15  # further operands drawn from 1 to 9, which are rare between 1 and 99
HELD_OUT_SHARE = 0.15  # of all pairs of numbers
TRAIN_ROWS = 38_400
HELDOUT_ROWS = 500

PHRASINGS = {
    "sum": (
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "How much is {a} and {b} together?",
        "Increase {a} by {b}. What do you get?",
        "Tom has {a} apples and gets {b} more. How many apples does he have now?",
    ),
    "difference": (
        "What is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "What is the difference between {a} and {b}?",
        "Take {b} away from {a}. What is left?",
        "Decrease {a} by {b}. What do you get?",
        "Anna has {a} coins and spends {b}. How many coins does she have left?",
    ),
    "sum then difference": (
        "What is {a} plus {b} minus {c}?",
        "Add {a} and {b}, then subtract {c}.",
        "Subtract {c} from the sum of {a} and {b}.",
        "Start with {a}, add {b} and take away {c}. What do you get?",
        "Increase {a} by {b}, then decrease it by {c}. What do you get?",
        "A bus has {a} people. Then {b} get on and {c} get off. How many people are on the bus now?",
    ),
}

Pair = tuple[int, int]


@dataclass(frozen=True)
class Problem:
    """One problem: `kind` is a key of PHRASINGS, `working` the steps of the answer, `result` its number."""

    kind: str
    question: str
    working: str
    result: int

    def row(self) -> dict:
        """The problem as a row of chat messages."""
        answer = f"{self.working} #### {self.result}"
        return {
            "messages": [
                {"role": "user", "content": self.question},
                {"role": "assistant", "content": answer},
            ]
        }


def unordered(x: int, y: int) -> Pair:
    """The two numbers, smaller first."""
    return (min(x, y), max(x, y))


def choose_held_out_pairs(rng: random.Random) -> frozenset[Pair]:
    """Choose the pairs that only held-out problems may combine. A first sum reaches 198, so pairs go that far."""
    pairs = [(x, y) for y in range(1, 2 * TOP + 1) for x in range(1, y + 1)]
    return frozenset(rng.sample(pairs, round(HELD_OUT_SHARE * len(pairs))))


def columns(x: int, y: int) -> Iterator[Pair]:
    """The digits of x and y in pairs, ones first; the shorter number is filled with zeros."""
    for p, q in zip_longest(reversed(str(x)), reversed(str(y)), fillvalue="0"):
        yield int(p), int(q)


def add(x: int, y: int) -> str:
    """Column addition: `47+85: 7+5=12, 4+8+1=13`, the 1 being carried."""
    steps, carry = [], 0
    for p, q in columns(x, y):
        total = p + q + carry
        steps.append(f"{p}+{q}{'+1' if carry else ''}={total}")
        carry = total // 10
    return f"{x}+{y}: {', '.join(steps)}"


def subtract(x: int, y: int) -> str:
    """Column subtraction, x not below y: `132-85: 2-5=7 borrow, 3-8-1=4 borrow, 1-0-1=0`."""
    steps, borrow = [], 0
    for p, q in columns(x, y):
        left = p - q - borrow
        steps.append(f"{p}-{q}{'-1' if borrow else ''}={left % 10}{' borrow' if left < 0 else ''}")
        borrow = int(left < 0)
    return f"{x}-{y}: {', '.join(steps)}"


def draw_operand(rng: random.Random) -> int:
    """Draw an operand from 1 to TOP, one-digit numbers more often than their share."""
    return rng.randint(1, 9 if rng.random() < ONE_DIGIT_SHARE else TOP)


def draw_operands(kind: str, rng: random.Random) -> tuple[int, ...]:
    """Draw (a, b) or (a, b, c) such that no result is negative."""
    while True:
        a, b, c = (draw_operand(rng) for _ in range(3))
        if kind == "sum":
            return a, b
        if kind == "difference":
            return max(a, b), min(a, b)
        if a + b >= c:
            return a, b, c


def pairs_of(operands: tuple[int, ...]) -> set[Pair]:
    """The pairs a problem combines: those among its operands, and its first sum with the number taken from it."""
    pairs = {unordered(x, y) for x, y in combinations(operands, 2)}
    if len(operands) == 3:
        a, b, c = operands
        pairs.add(unordered(a + b, c))
    return pairs


def ask(kind: str, operands: tuple[int, ...], phrasing: str) -> Problem:
    """Put the operands into the phrasing, and work out the answer."""
    question = phrasing.format(**dict(zip("abc", operands, strict=False)))
    a, b = operands[:2]
    if kind == "sum":
        return Problem(kind, question, add(a, b), a + b)
    if kind == "difference":
        return Problem(kind, question, subtract(a, b), a - b)
    c = operands[2]
    return Problem(kind, question, f"{add(a, b)}; {subtract(a + b, c)}", a + b - c)


def draw_problem(kind: str, rng: random.Random, held_out: frozenset[Pair], *, of_held_out: bool) -> Problem:
    """Draw a problem of this kind whose pairs all lie inside `held_out` (or all outside it)."""
    while True:
        operands = draw_operands(kind, rng)
        pairs = pairs_of(operands)
        if pairs <= held_out if of_held_out else pairs.isdisjoint(held_out):
            return ask(kind, operands, rng.choice(PHRASINGS[kind]))


def problems(count: int, rng: random.Random, held_out: frozenset[Pair], *, of_held_out: bool) -> list[Problem]:
    """Draw `count` different problems, each kind as often as the others."""
    found: dict[str, Problem] = {}
    kinds = list(PHRASINGS)
    while len(found) < count:
        # The kind is fixed before its pairs are tried: a third number makes a fit rarer, not the kind.
        problem = draw_problem(kinds[len(found) % len(kinds)], rng, held_out, of_held_out=of_held_out)
        found.setdefault(problem.question, problem)
    return list(found.values())


def make(train_rows: int = TRAIN_ROWS, heldout_rows: int = HELDOUT_ROWS, seed: int = 0) -> tuple[list, list]:
    """Make both lists of problems; the same arguments give the same lists on every machine."""
    held_out = choose_held_out_pairs(random.Random(f"pairs {seed}"))
    train = problems(train_rows, random.Random(f"train {seed}"), held_out, of_held_out=False)
    heldout = problems(heldout_rows, random.Random(f"heldout {seed}"), held_out, of_held_out=True)
    return train, heldout


def write(path: Path, rows: list[Problem]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(problem.row()) + "\n" for problem in rows), encoding="utf-8")
    print(f"{path}: {len(rows):,} rows, for example: {rows[0].question}  {rows[0].working} #### {rows[0].result}")


def main() -> None:
    """Write train.jsonl and heldout.jsonl."""
    parser = argparse.ArgumentParser(description="Write the quickstart's data set.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "made", help="directory to write to")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train, heldout = make(seed=args.seed)
    write(args.out / "train.jsonl", train)
    write(args.out / "heldout.jsonl", heldout)


if __name__ == "__main__":
    main()
