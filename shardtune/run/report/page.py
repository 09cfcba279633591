"""The page of a report: sections of escaped HTML, one style, one script, the curves as JSON."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from shardtune.config.secrets import without_secrets
from shardtune.config.shown import as_written
from shardtune.errors import cut, legible
from shardtune.run.display import OF_OTHERS, RIGHT, UNPARSED, count, shown
from shardtune.run.html import Html, document, element, facts, joined, table
from shardtune.run.report.content import (
    Answers,
    as_yaml,
    changed_keys,
    chosen_settings,
    data_rows,
    environment,
    final_metrics,
    read_answers,
    saves,
    seconds,
    shown_events,
    state,
    trained_parameters,
    whole_recipe,
)
from shardtune.run.report.curves import MOST_CHARTS, Chart, Decimated, drawn, read_charts
from shardtune.run.status import duration
from shardtune.run.stored_run import StoredRun
from shardtune.run.verified import read_verified
from shardtune.run.versions import installed_version

GENERATOR = "shardtune report"
"""By which a page of ours is recognised."""
GROUPS: Mapping[str, str] = {"training": "Training", "evaluations": "Evaluations", "more": "Speed, memory, tokens"}
LETTERS = 600
COLORS = 8
MOST_TILES = 8
VERDICTS: Mapping[bool | None, tuple[str, str]] = {True: ("right", "good"), False: ("wrong", "bad")}
OUTCOMES: Mapping[str, str] = {"passed": "good", "failed": "bad"}


def page(runs: Sequence[StoredRun]) -> str:
    """A whole page about one or several runs."""
    charts = read_charts(runs)
    sections = [
        ("Summary", _summary(runs, charts)),
        ("Curves", _curves(runs, charts)),
        ("Answers", _answers(read_answers(runs))),
        ("Data", _data(runs)),
        ("Recipe", _recipe(runs)),
        ("Environment", _environment(runs)),
        ("Events", _events(runs)),
        ("Verified", _verified(runs)),
    ]
    sections = [(title, content) for title, content in sections if content]
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    links = [element("a", title, href=f"#{title.lower()}") for title, _ in sections]
    parts = [element("section", element("h2", title, id=title.lower()), body) for title, body in sections]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    footer = (
        f"Written by shardtune {installed_version('shardtune')} on {made}. This page is one file and loads nothing."
    )
    body = joined([_header(runs, name), element("nav", *links), element("main", *parts), element("footer", footer)])
    content = {"runs": [run.name for run in runs], "charts": [chart.to_json() for chart in drawn(charts)]}
    return _document(cut(name), without_secrets(body), without_secrets(_json(content)))


def _document(title: str, body: str, data: str) -> str:
    script, style = _part("page.js"), _part("page.css")
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # Nothing but the script below is executed, and nothing is loaded, whatever a row or a name holds.
    scripts = f'<script type="application/json" id="curve-data">{data}</script>\n<script>{script}</script>'
    generator = element("meta", name="generator", content=GENERATOR)
    return document(f"{title} · shardtune", style, f"{body}\n{scripts}", policy=policy, head=[generator])


def _json(value: object) -> str:
    """JSON that cannot end the element that it is in."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(script: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


@cache
def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _header(runs: Sequence[StoredRun], name: str) -> Html:
    if len(runs) > 1:
        return element("header", element("h1", f"{len(runs)} runs"), element("p", *_swatches(runs), class_="controls"))
    run = runs[0]
    told, kind = state(run)
    finished = run.finished or {}
    about = f"after step {int(finished['step']):,}, {finished.get('ended') or 'as planned'}" if finished else ""
    heading = element("h1", name, " ", element("span", told, class_=f"chip {kind}".strip()))
    return element("header", heading, element("p", about or _model(run), class_="quiet"))


def _swatches(runs: Sequence[StoredRun]) -> list[Html]:
    return [element("span", _swatch(number), run.name, class_="run") for number, run in enumerate(runs)]


def _swatch(number: int) -> Html:
    """The colour of a run; it is striped where colours begin again, as the line is dashed."""
    stripes = f" again-{min(number // COLORS, 2)}" if number >= COLORS else ""
    return element("span", class_=f"swatch{stripes}", style=f"--color: var(--c{number % COLORS})")


def _model(run: StoredRun) -> str:
    """What is trained: a model's directory or name, otherwise the class that makes it, or the name of its kind."""
    if "actor.model.model_path" in run.manifest.get("in_memory", ()):
        return "a model in memory"
    keys = ("model.model_path", "model.adapter", "worker", "model.model_type")
    named = [str(name) for key in keys if (name := run.settings.get(f"actor.{key}")) is not None]
    return "/".join(named[0].rstrip("/").split("/")[-2:]) if named else ""


def _summary(runs: Sequence[StoredRun], charts: Sequence[Chart]) -> Html:
    if len(runs) > 1:
        return _side_by_side(runs, [_facts(run, number, charts) for number, run in enumerate(runs)])
    tiles, known = _tiles(runs[0], charts), _facts(runs[0], 0, charts)
    shown_already = {title.partition(",")[0] for title, _ in tiles} | {"state"}
    rest = {name: value for name, value in known.items() if name not in shown_already}
    boxes = [element("div", element("b", value), element("span", name), class_="tile") for name, value in tiles]
    return joined([element("div", *boxes, class_="tiles"), facts(rest)])


def _side_by_side(runs: Sequence[StoredRun], known: Sequence[Mapping[str, str]]) -> Html:
    """Names and values of several runs, a column for each."""
    names = dict.fromkeys(name for one in known for name in one)
    return table(["", *(run.name for run in runs)], [[name, *(one.get(name, "") for one in known)] for name in names])


def _tiles(run: StoredRun, charts: Sequence[Chart]) -> list[tuple[str, str]]:
    """The numbers that matter first: evaluations before and after, the loss, speed and time."""
    found = []
    for name, value, before in _evaluations(run, 0, charts):
        if not name.endswith((*OF_OTHERS, UNPARSED)) and len(found) < MOST_TILES // 2:
            then = "" if before is None else f", before training {_metric(name, before)}"
            found.append((f"{name}{then}", _metric(name, value)))
    curves = {chart.name: chart.curves[0] for chart in charts if 0 in chart.curves}
    if "train/loss" in curves:
        loss = curves["train/loss"]
        first = f", the first {loss.first:.4g}" if loss.values else ""
        found.append((f"last training loss{first}", loss.last_shown))
    took = seconds(run)
    if took is not None:
        found.append(("duration", duration(took)))
    for unit in ("tokens", "samples"):
        speed = curves.get(f"perf/{unit}_per_second")
        if speed is not None and speed.values:
            found.append((f"{unit}/s, median", f"{_median(speed.to_json()['y']):,.0f}"))
    return found[:MOST_TILES]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _evaluations(run: StoredRun, number: int, charts: Sequence[Chart]) -> list[tuple[str, float, float | None]]:
    """Metrics of evaluations, answers first: the value of `final/`, or the last one, and that before training."""
    final, found = final_metrics(run), []
    for chart in charts:
        curve = chart.curves.get(number)
        if curve is None or chart.group != "evaluations" or not curve.values:
            continue
        before = curve.first if curve.steps[0] == 0 else None
        found.append((chart.name, final.get(chart.name, curve.last), before))
    found += [(name, value, None) for name, value in final.items() if name not in {name for name, *_ in found}]
    return sorted(found, key=lambda one: (not one[0].endswith(RIGHT), not one[0].endswith("/loss")))


def _metric(name: str, value: float) -> str:
    if name.endswith(("accuracy", "success")) and 0 <= value <= 1:
        return f"{round(100 * value, 2):g}\u00a0%"
    return shown(name, value) if abs(value) < 1e4 else f"{value:.4g}"


def _facts(run: StoredRun, number: int, charts: Sequence[Chart]) -> dict[str, str]:
    settings, data = run.settings, run.manifest.get("data", {})
    told, _ = state(run)
    curves = {chart.name: chart.curves[number] for chart in charts if number in chart.curves}
    finished, took = run.finished, seconds(run)
    last = max((curve.steps[-1] for curve in curves.values() if curve.steps), default=0)
    found = {
        "state": ": ".join(filter(None, [told, str((finished or {}).get("ended") or "")])),
        "model": _model(run),
        "trained parameters": count(trained_parameters(run)),
        "adapter": str(settings.get("actor.model.lora.peft.peft_type", "LoRA"))
        if settings.get("actor.model.is_lora")
        else "",
        "steps": f"{int(finished['step'] if finished else last):,}",
        "rows of an epoch": "" if data.get("rows_per_epoch") is None else f"{data['rows_per_epoch']:,}",
        "rows of a step": as_written(settings.get("actor.global_batch_size")),
        "ranks": str(run.manifest.get("world_size", "")),
        "numbers": ", ".join(f"{name} {dtype}" for name, dtype in run.manifest.get("dtypes", {}).items()),
        "duration": "" if took is None else duration(took),
    }
    if settings.get("actor.global_batch_tokens"):
        found["rows of a step"] = f"up to {settings['actor.global_batch_tokens']} tokens"
    for name, value, before in _evaluations(run, number, charts):
        found[name] = f"{'' if before is None else f'{_metric(name, before)} → '}{_metric(name, value)}"
    for name, label in (("train/loss", "training loss"), ("train/grad_norm", "gradient norm")):
        if name in curves:
            found[label] = _course(curves[name])
    if (memory := curves.get("perf/peak_memory_gb")) is not None and memory.values:
        found["peak memory"] = f"{memory.largest:.2f} GB"
    return {name: value for name, value in found.items() if value}


def _course(curve: Decimated) -> str:
    """A metric from its first value to its last, and what was not finite."""
    missing = f"{curve.missing:,} not finite" if curve.missing else ""
    if not curve.values:
        return missing
    return ", ".join(filter(None, [f"{curve.first:.4g} → {curve.last_shown}", f"at most {curve.largest:.4g}", missing]))


def _left_out(charts: Sequence[Chart]) -> Html:
    """The metrics that the page does not draw, by the reason."""
    shown_ones = drawn(charts)
    empty = [chart.name for chart in charts if not any(curve.values for curve in chart.curves.values())]
    further = [chart.name for chart in charts if chart not in shown_ones and chart.name not in empty]
    lines = (("without a finite value", empty), (f"beyond the first {MOST_CHARTS}, in metrics.jsonl", further))
    return joined(
        element("p", f"Not drawn, {why}: {', '.join(names)}.", class_="quiet") for why, names in lines if names
    )


def _curves(runs: Sequence[StoredRun], charts: Sequence[Chart]) -> Html:
    if not charts:
        return element("p", "No metrics were logged.", class_="quiet")
    toggles = [
        element(
            "button",
            *(_swatch(number), run.name),
            type="button",
            class_="run",
            data_run=number,
            aria_pressed="true",
        )
        for number, run in enumerate(runs)
    ]
    slider = element("input", type="range", id="smooth", min=0, max="0.98", step="0.02", value=0)
    controls = element(
        "div",
        *(toggles if len(runs) > 1 else []),
        element("label", "smooth ", slider),
        element("button", "reset zoom", type="button", id="reset", hidden=True),
        element("span", "drag to zoom, double-click to reset; arrow keys move the cursor"),
        class_="controls",
    )
    scriptless = element("noscript", element("p", "The curves are drawn by the script of this page."))
    parts: list[str] = [controls, scriptless]
    for group, title in GROUPS.items():
        figures = [_figure(place, chart) for place, chart in enumerate(drawn(charts)) if chart.group == group]
        if figures:
            grid = element("div", *figures, class_="charts")
            folded = group == "more"
            parts.append(
                element("details", element("summary", title), grid) if folded else joined([element("h3", title), grid])
            )
    return joined([*parts, _left_out(charts)])


def _figure(place: int, chart: Chart) -> Html:
    curves = list(chart.curves.values())
    told = "; ".join(
        f"from {curve.first:.4g} to {curve.last:.4g} at step {curve.steps[-1]:,}" for curve in curves if curve.values
    )
    missing = sum(curve.missing for curve in curves)
    caption = element(
        "figcaption",
        element("span", chart.name, class_="name"),
        element("button", "log", type="button", class_="log", aria_label="logarithmic axis"),
        element("span", f"{missing:,} not finite", class_="chip bad") if missing else "",
        element("span", class_="readout"),
    )
    drawing = element("svg", role="img", tabindex=0, aria_label=f"{chart.name}: {told}")
    return element("figure", caption, drawing, data_chart=place)


def _answers(sets: Sequence[Answers]) -> Html:
    parts: list[str] = []
    for answers in sets:
        if answers.name:
            parts.append(element("h3", answers.name))
        if len(answers.rows) < answers.total:
            parts.append(element("p", f"{len(answers.rows)} of the {answers.total:,} questions.", class_="quiet"))
        parts.append(element("div", *(_answer(answers, row) for row in answers.rows), class_="answers"))
    return joined(parts)


def _answer(answers: Answers, row: tuple[str, str | None, Sequence[tuple[str, bool | None]]]) -> Html:
    question, expected, given = row
    lines: list[str] = []
    for column, (text, correct) in zip(answers.columns, given, strict=True):
        verdict, kind = VERDICTS.get(correct, ("", ""))
        chip = [" ", element("span", verdict, class_=f"chip {kind}")] if verdict else []
        lines += [element("dt", column, title=column), element("dd", legible(text, LETTERS) or "(nothing)", *chip)]
    if expected is not None:
        lines += [element("dt", "expected"), element("dd", legible(expected, LETTERS), class_="quiet")]
    return element("div", element("p", legible(question, LETTERS)), element("dl", *lines), class_="answer")


def _each(runs: Sequence[StoredRun], parts: Sequence[Html]) -> Html:
    """A part for each run, under its name where there are several; runs with the same part share it."""
    if len(runs) == 1:
        return parts[0]
    shared: dict[str, list[str]] = {}
    for run, part in zip(runs, parts, strict=True):
        shared.setdefault(str(part), []).append(run.name)
    return joined(
        joined([element("h3", "all runs" if len(names) == len(runs) else ", ".join(names)), Html(part)])
        for part, names in shared.items()
    )


def _data(runs: Sequence[StoredRun]) -> Html:
    parts = []
    for run in runs:
        rows = data_rows(run)
        header = ["for", "file", "rows", "used", "left out or changed", "hash of the file"]
        known = table(header, rows, numbers=(2, 3))
        parts.append(known if rows else element("p", "The run's own code reads its data; there is no record of rows."))
    return _each(runs, parts)


def _recipe(runs: Sequence[StoredRun]) -> Html:
    if len(runs) == 1:
        chosen = element("pre", as_yaml(chosen_settings(runs[0])), tabindex=0)
        note = element("p", "What differs from the defaults:", class_="quiet")
        return joined([note, chosen, _folded("the whole recipe", whole_recipe(runs[0]))])
    changed = changed_keys(runs)
    rows = [[key, *(as_written(value) for value in values)] for key, values in changed.items()]
    known = table(["key", *(run.name for run in runs)], rows) if rows else element("p", "All keys are the same.")
    pages = [_folded(f"the recipe of {run.name}", as_yaml(chosen_settings(run))) for run in runs]
    return joined([element("p", "What differs between the runs:", class_="quiet"), known, *pages])


def _folded(title: str, text: str) -> Html:
    return element("details", element("summary", title), element("pre", text, tabindex=0))


def _environment(runs: Sequence[StoredRun]) -> Html:
    known = [environment(run) for run in runs]
    return facts(known[0]) if len(runs) == 1 else _side_by_side(runs, known)


def _events(runs: Sequence[StoredRun]) -> Html:
    parts = []
    for run in runs:
        rows = shown_events(run)
        known = table(["time, UTC", "event", "step", "ranks", "reason"], rows, numbers=(2, 3))
        found = [known] if rows else [element("p", "None were recorded.", class_="quiet")]
        saved = saves(run)
        parts.append(joined([*found, element("p", saved, class_="quiet")] if saved else found))
    return _each(runs, parts)


def _verified(runs: Sequence[StoredRun]) -> Html:
    parts = []
    for run in runs:
        rows = [
            [
                one.claim,
                element("span", one.outcome, class_=f"chip {OUTCOMES.get(one.outcome, '')}".strip()),
                one.text,
                one.at,
            ]
            for one in read_verified(run.path)
        ]
        text = element("p", "Nothing verified yet: ", element("code", "shardtune verify all RECIPE"))
        known = table(["claim", "outcome", "", "at"], rows) if rows else text
        scores = "The scores of final/ are of its files: they were loaded again after training, then evaluated."
        parts.append(joined([known, element("p", scores, class_="quiet") if final_metrics(run) else ""]))
    return _each(runs, parts)
