"use strict";
// Draws the curves of the page. State: the visible range of steps, the step under the cursor, the runs that are hidden.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const DOTS = 40;  // a curve of fewer points gets a dot at each
  const data = JSON.parse(document.getElementById("curve-data").textContent);
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const reset = document.getElementById("reset");
  const smooth = document.getElementById("smooth");
  const hidden = new Set();
  const logarithmic = data.charts.map((chart) => chart.log);
  let range = null;
  let cursor = null;
  let byKeyboard = false;

  // Numbers.

  const COLORS = 8;
  const color = (run) => `var(--c${run % COLORS})`;
  const dashes = (run) => ["", "6 3", "2 3"][Math.min(2, Math.floor(run / COLORS))];  // where colours begin again
  const grouped = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
  const short = (value) => {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    return size >= 1000 ? grouped(value) : String(Number(value.toPrecision(4)));
  };
  const brief = (value) => {
    const scales = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
    const [by, unit] = scales.find(([by]) => Math.abs(value) >= Math.max(by, 1e4)) || [];
    return by ? `${Number((value / by).toPrecision(4))}${unit}` : short(value);
  };
  const quantile = (values, share) => values.sort((a, b) => a - b)[Math.round(share * (values.length - 1))];
  const ticks = (low, high, count) => {
    const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((size) => size * power >= rough) * power;
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, at) => Number(((first + at) * step).toPrecision(12)));
  };
  const decades = (low, high) => {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), found = [];
    if (last - first < 1) return ticks(low, high, 4).filter((value) => value > 0);
    for (let at = first; at <= last; at += Math.ceil((last - first) / 5)) found.push(10 ** at);
    return found;
  };
  const smoothed = (values, factor) => {
    let sum = 0, weight = 0;
    return values.map((value) => {
      sum = factor * sum + (1 - factor) * value;
      weight = factor * weight + (1 - factor);
      return sum / weight;
    });
  };
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle; else high = middle;
    }
    return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
  };

  // Drawing.

  const make = (name, attributes, parent, text) => {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const visible = (chart) => chart.series.filter((one) => !hidden.has(one.run));
  const whole = () => {
    const all = data.charts.flatMap(visible);
    const low = Math.min(...all.map((one) => one.x[0])), high = Math.max(...all.map((one) => one.x[one.x.length - 1]));
    return low < high ? [low, high] : [low - 1, low + 1];
  };
  // The curves that are shown, and which of their points lie in the range, with one more on each side.
  const curvesOf = (chart, first, last) => visible(chart).map((one) => {
    const factor = Number(smooth.value);
    const y = factor && one.x.length > 8 ? smoothed(one.y, factor) : one.y;
    const from = one.x.findIndex((step) => step >= first), behind = one.x.findIndex((step) => step > last);
    const to = behind < 0 ? one.x.length : behind;
    return { ...one, y, raw: one.y, from: Math.max(0, (from < 0 ? to : from) - 1), to: Math.min(one.x.length, to + 1) };
  });
  // The values that the axis has to hold: of a band all but its few largest peaks, which are cut off.
  const extent = (curves) => {
    const values = curves.flatMap((one) => {
      const cut = (points) => points.slice(one.from, one.to);
      return one.low ? [...cut(one.raw), quantile(cut(one.low), 0.01), quantile(cut(one.high), 0.99)] : cut(one.raw);
    });
    return [Math.min(...values), Math.max(...values)];
  };
  const padded = (low, high, byDecade) => {
    if (byDecade) {
      const factor = Math.max(high / low, 1.2) ** 0.04;
      return low === high ? [low / 2, high * 2] : [low / factor, high * factor];
    }
    const pad = (high - low) * 0.05 || Math.abs(low) * 0.1 || 1;
    return [low >= 0 && low < pad * 4 ? 0 : low - pad, high + pad];
  };

  const draw = (figure) => {
    const number = Number(figure.dataset.chart), svg = figure.querySelector("svg");
    const width = svg.clientWidth, height = svg.clientHeight;
    if (!width) return;
    svg.replaceChildren();
    figure.state = null;
    const [first, last] = range || whole(), curves = curvesOf(data.charts[number], first, last);
    if (!curves.length) {
      make("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg, "no run is shown");
      figure.querySelector(".readout").replaceChildren();
      return;
    }
    const [least, most] = extent(curves), byDecade = logarithmic[number] && least > 0;
    const button = figure.querySelector("button.log");
    button.hidden = least <= 0;
    button.setAttribute("aria-pressed", String(byDecade));
    const [low, high] = padded(least, most, byDecade);
    const box = { left: 46, right: width - 10, top: 10, bottom: height - 22 };
    const share = byDecade
      ? (value) => Math.log(Math.max(value, low * 1e-3) / low) / Math.log(high / low)
      : (value) => (value - low) / (high - low);
    const X = (step) => box.left + ((step - first) / (last - first)) * (box.right - box.left);
    const Y = (value) => box.bottom - share(value) * (box.bottom - box.top);
    drawAxes(svg, box, X, Y, byDecade ? decades(low, high) : ticks(low, high, 4), ticks(first, last, box.right / 95));
    const clip = make("clipPath", { id: `clip${number}` }, make("defs", {}, svg));
    const inside = { x: box.left - 4, y: box.top - 4, width: box.right - box.left + 8, height: box.bottom - box.top + 8 };
    make("rect", inside, clip);
    const plot = make("g", { "clip-path": `url(#clip${number})` }, svg);
    for (const one of curves) drawCurve(make("g", { style: `--color: ${color(one.run)}` }, plot), one, X, Y);
    const line = make("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" }, svg);
    const chosen = { class: "chosen", y: box.top, height: box.bottom - box.top, visibility: "hidden" };
    figure.state = { X, Y, curves, line, chosen: make("rect", chosen, svg), dots: make("g", {}, plot), box, first, last };
    point(figure);
  };

  const drawAxes = (svg, box, X, Y, values, steps) => {
    for (const value of values) {
      make("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(value), y2: Y(value) }, svg);
      make("text", { x: box.left - 6, y: Y(value) + 4, "text-anchor": "end" }, svg, brief(value));
    }
    for (const step of steps.filter(Number.isInteger)) {
      const x = X(step), anchor = x > box.right - 20 ? "end" : "middle";
      make("text", { x: Math.min(x, box.right), y: box.bottom + 16, "text-anchor": anchor }, svg, grouped(step));
    }
  };

  const drawCurve = (group, one, X, Y) => {
    const places = Array.from({ length: one.to - one.from }, (_, at) => one.from + at);
    const spot = (values) => (at) => `${X(one.x[at]).toFixed(1)} ${Y(values[at]).toFixed(1)}`;
    const gaps = new Set(one.gaps), pieces = [];  // no line leads over values that are not finite
    for (const at of places) {
      if (!pieces.length || gaps.has(at)) pieces.push([]);
      pieces[pieces.length - 1].push(at);
    }
    const trace = (piece, values) => `M${(piece.length > 1 ? piece : [...piece, ...piece]).map(spot(values)).join("L")}`;
    const path = (values) => pieces.map((piece) => trace(piece, values)).join("");
    if (one.low) {
      const band = (piece) => `${trace(piece, one.high)}L${[...piece].reverse().map(spot(one.low)).join("L")}Z`;
      make("path", { class: "band", d: pieces.map(band).join("") }, group);
    }
    if (one.y !== one.raw) make("path", { class: "curve faint", d: path(one.raw) }, group);
    make("path", { class: "curve", d: path(one.y), "stroke-dasharray": dashes(one.run) }, group);
    if (one.x.length > DOTS) return;
    for (const at of places) make("circle", { class: "dot", cx: X(one.x[at]), cy: Y(one.y[at]), r: 3 }, group);
  };

  // The cursor: the nearest point of each curve, and its value above the chart; without one the last values.
  const point = (figure) => {
    if (!figure.state) return;
    const { X, Y, curves, line, dots, first, last } = figure.state;
    const at = cursor === null ? last : Math.min(last, Math.max(first, cursor)), steps = new Set(), values = [];
    dots.replaceChildren();
    for (const one of curves) {
      const place = nearest(one.x, at), outside = at < one.x[0] || at > one.x[one.x.length - 1];
      const ended = cursor !== null && outside && curves.length > 1;
      values.push([one.run, ended ? "–" : short(one.y[place])]);
      if (ended) continue;
      steps.add(one.x[place]);
      const spot = { class: "dot", style: `--color: ${color(one.run)}`, cx: X(one.x[place]), cy: Y(one.y[place]), r: 3.5 };
      if (cursor !== null) make("circle", spot, dots);
    }
    const [step] = steps;
    line.setAttribute("visibility", cursor === null || step === undefined ? "hidden" : "visible");
    if (step !== undefined) for (const end of ["x1", "x2"]) line.setAttribute(end, X(step));
    write(figure.querySelector(".readout"), steps.size > 1 && cursor === null ? "last" : stepText(step), values);
    const speaks = byKeyboard && figure.contains(document.activeElement);
    figure.querySelector(".readout").setAttribute("aria-live", speaks ? "polite" : "off");
  };
  const stepText = (step) => (step === undefined ? "" : `step ${grouped(step)}`);
  const write = (readout, label, values) => {
    readout.replaceChildren(label);
    for (const [run, value] of values) {
      const shown = document.createElement("b");
      if (data.runs.length > 1) shown.style.setProperty("--color", color(run));
      shown.textContent = value;
      readout.append(shown);
    }
  };

  const drawAll = () => {
    reset.hidden = range === null;
    figures.forEach(draw);
  };
  const moveTo = (step) => {
    cursor = step;
    figures.forEach(point);
  };
  const zoom = (chosen) => {
    range = chosen;
    cursor = null;
    drawAll();
  };

  // Mouse, touch and keys.

  const listen = (figure) => {
    const svg = figure.querySelector("svg");
    let pressed = null;
    const stepAt = (event) => {
      const { box, first, last } = figure.state, x = event.clientX - svg.getBoundingClientRect().left;
      return first + Math.min(1, Math.max(0, (x - box.left) / (box.right - box.left))) * (last - first);
    };
    const mark = (from, to) => {
      const { X, chosen } = figure.state;
      chosen.setAttribute("x", X(Math.min(from, to)));
      chosen.setAttribute("width", Math.abs(X(to) - X(from)));
      chosen.setAttribute("visibility", "visible");
    };
    svg.addEventListener("pointermove", (event) => {
      if (!figure.state) return;
      byKeyboard = false;
      moveTo(stepAt(event));
      if (pressed !== null) mark(pressed, cursor);
    });
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button !== 0 || !figure.state) return;
      pressed = stepAt(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointerup", (event) => {
      if (pressed === null) return;
      const from = pressed, to = stepAt(event), { X, chosen } = figure.state;
      pressed = null;
      chosen.setAttribute("visibility", "hidden");
      if (Math.abs(X(to) - X(from)) > 8) zoom([Math.min(from, to), Math.max(from, to)]);
    });
    svg.addEventListener("pointerleave", () => pressed === null && moveTo(null));
    svg.addEventListener("dblclick", () => zoom(null));
    svg.addEventListener("keydown", (event) => {
      if (!figure.state || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
      event.preventDefault();
      byKeyboard = true;
      if (event.key === "Escape") {
        zoom(null);
        return;
      }
      const steps = figure.state.curves[0].x, end = steps.length - 1, at = cursor === null ? end : nearest(steps, cursor);
      const places = { ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(end, at + 1), Home: 0, End: end };
      moveTo(steps[places[event.key]]);
    });
    figure.querySelector("button.log").addEventListener("click", () => {
      logarithmic[figure.dataset.chart] = !logarithmic[figure.dataset.chart];
      draw(figure);
    });
    new ResizeObserver(() => draw(figure)).observe(svg);
  };

  figures.forEach(listen);
  for (const button of document.querySelectorAll("button[data-run]")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      if (!hidden.delete(run)) hidden.add(run);
      button.setAttribute("aria-pressed", String(!hidden.has(run)));
      drawAll();
    });
  }
  smooth.addEventListener("input", drawAll);
  reset.addEventListener("click", () => zoom(null));
  document.documentElement.classList.add("drawn");
  drawAll();
})();
