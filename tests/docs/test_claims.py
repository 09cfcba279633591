"""The figures of the README are those that docs/benchmarks.md has from the last runs."""

from __future__ import annotations

import re

from tests.support.doc_blocks import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    """What a benchmark wrote between its marks."""
    return RESULTS[RESULTS.index(f"<!-- {name} -->") : RESULTS.index(f"<!-- /{name} -->")]


def table(name: str) -> list[dict[str, str]]:
    """The rows of a section's table, by the heads of its columns."""
    heads, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section(name).splitlines()
        if line.startswith("|")
    ]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def claim(bench: str) -> str:
    """The row of the README about a benchmark."""
    found = [line for line in README.splitlines() if line.startswith("| **") and f"`bench/{bench}.py`" in line]
    assert len(found) == 1, bench
    return found[0]


def within(line: str) -> list[float]:
    """The bounds that a claim gives, in order."""
    return [float(number) for number in re.findall(r"within (\d[\d.]*e-\d+)", line)]


def largest(rows: list[dict[str, str]], *columns: str) -> float:
    return max(float(row[column]) for row in rows for column in columns)


def test_parity():
    exact = [row for row in table("numbers") if row["precision"] == "fp64"]
    losses, weights = within(claim("parity"))
    assert largest(exact, "loss", "gradient norm") <= losses
    assert largest(exact, "weights") <= weights
    assert len({row["model"] for row in exact}) == 4
    assert len({row["ranks x rows"] for row in exact}) == 5


def test_layouts():
    rows = table("layouts")
    exact = [row for row in rows if row["precision"] == "fp64"]
    losses, weights = within(claim("layouts"))
    assert f"{len(rows)} runs" in claim("layouts")
    assert largest(exact, "loss") <= losses
    assert largest(exact, "weights") <= weights
    assert {row["ranks"] for row in exact} == {"1", "2", "4"}


def test_resume_and_kill():
    same = [row for row in table("resume") if row["ranks"] in ("1 -> 1", "2 -> 2")]
    assert len(same) == 2
    for row in same:
        assert f"each of {row['resumed at steps']} steps" in claim("resume")
        assert row["found"].startswith("bitwise")
    rows = table("kill")
    assert (
        f"{sum(int(row['trials']) for row in rows)} kills and signals of {len({row['signal'] for row in rows})} kinds"
        in (claim("kill"))
    )
    assert all(row["bitwise in the end"] == row["trials"] for row in rows)
    assert all(row["lost steps"] == "0" for row in rows if row["signal"] != "SIGKILL")


def test_damage():
    result = re.search(r"(\d+) damages, (\d+) found; each of these runs .* ended with the same bits", section("damage"))
    assert result is not None
    assert result[1] == result[2]
    assert f"{result[1]} damages (" in claim("damage")
    assert f"{result[2]} found" in claim("damage")


def test_speed_and_memory():
    (trl,) = [row for row in table("throughput-fp32") if row[""] == "trl"]
    faster = float(trl["shardtune is faster by"].partition(" ")[0])
    assert f"{faster:.1f} times the tokens per second" in claim("throughput")
    assert f"in {trl['memory ratio']} of its memory" in claim("throughput")


def test_lora():
    rows = table("lora")
    assert f"{len(rows)} runs" in claim("lora")
    assert largest(rows, "loss", "gradient norm", "adapter's weights") <= within(claim("lora"))[0]


def test_images_and_actions():
    rows = table("vision-memory")
    assert len(rows) == 8
    assert {row["exact"] for row in rows} == {"1.000"}
    bounds = re.search(r"from 0.01 to between (\S+) and (\S+) ", claim("vision"))
    assert bounds is not None
    exchanged = [float(row["loss, pictures exchanged"]) for row in rows]
    assert [float(bounds[1]), float(bounds[2])] == [round(min(exchanged), 1), round(max(exchanged), 1)]
    assert largest(rows, "loss") < 0.015
    success = {row["model"]: float(row["success"]) for row in table("vla_reach")}
    assert f"in {success['trained'] * 100:.0f} of 100 episodes" in claim("vla_reach")
    assert success["untrained"] == 0
    seconds = re.search(r"took (\d+) s of CPU", section("vla_reach"))
    assert seconds is not None
    assert f"after {seconds[1]} s of CPU time" in claim("vla_reach")
