"use strict";
// Draws the curves of the page. State: the visible range of steps, the step under the pointer, the runs that are shown.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const data = JSON.parse(document.getElementById("curve-data").textContent);
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const reset = document.getElementById("reset");
  const smooth = document.getElementById("smooth");
  const hidden = new Set();
  const log = data.charts.map((chart) => chart.log);
  let range = null, cursor = null, keyboard = false;

  const color = (run) => `var(--c${run % 8})`;
  const make = (name, attributes, parent, text) => {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const short = (value) => {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    return String(Number(value.toPrecision(4)));
  };
  const brief = (value) => {
    const size = Math.abs(value), scaled = (by, unit) => `${Number((value / by).toPrecision(4))}${unit}`;
    return size >= 1e9 ? scaled(1e9, "G") : size >= 1e6 ? scaled(1e6, "M") : size >= 1e4 ? scaled(1e3, "k") : short(value);
  };
  const quantile = (values, share) => values.sort((a, b) => a - b)[Math.round(share * (values.length - 1))];
  const ticks = (low, high, count) => {
    const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((size) => size * power >= rough) * power;
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-12) + 1e-300; at++) found.push(Number((at * step).toPrecision(12)));
    return found;
  };
  const decades = (low, high) => {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), found = [];
    if (last - first < 1) return ticks(low, high, 4).filter((value) => value > 0);
    const every = Math.ceil((last - first) / 5);
    for (let at = first; at <= last; at += every) found.push(10 ** at);
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
  const visible = (chart) => chart.series.filter((one) => !hidden.has(one.run));
  const whole = () => {
    let low = Infinity, high = -Infinity;
    for (const chart of data.charts) for (const one of visible(chart)) {
      low = Math.min(low, one.x[0]);
      high = Math.max(high, one.x[one.x.length - 1]);
    }
    return low < high ? [low, high] : [low - 1, low + 1];
  };

  const draw = (figure) => {
    const number = Number(figure.dataset.chart), chart = data.charts[number];
    const svg = figure.querySelector("svg"), width = svg.clientWidth, height = svg.clientHeight;
    if (!width) return;
    svg.replaceChildren();
    const box = { left: 46, right: width - 10, top: 10, bottom: height - 22 };
    const [first, last] = range || whole();
    const shown = visible(chart).map((one) => {
      const y = Number(smooth.value) && one.x.length > 8 ? smoothed(one.y, Number(smooth.value)) : one.y;
      let from = one.x.findIndex((step) => step >= first), to = one.x.length;
      if (from < 0) from = one.x.length - 1;
      while (to > from + 1 && one.x[to - 1] > last) to--;
      return { ...one, y, raw: one.y, from: Math.max(0, from - 1), to: Math.min(one.x.length, to + 1) };
    });
    let low = Infinity, high = -Infinity;
    for (const one of shown) {
      for (let at = one.from; at < one.to; at++) { low = Math.min(low, one.raw[at]); high = Math.max(high, one.raw[at]); }
      if (one.low && one.to > one.from) {  // the band counts but for its few largest peaks, which are cut off
        low = Math.min(low, quantile(one.low.slice(one.from, one.to), 0.01));
        high = Math.max(high, quantile(one.high.slice(one.from, one.to), 0.99));
      }
    }
    if (low > high) { make("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg, "no run is shown"); return; }
    const positive = low > 0;
    const byDecade = log[number] && positive;
    const button = figure.querySelector("button.log");
    if (button) { button.hidden = !positive; button.setAttribute("aria-pressed", String(byDecade)); }
    if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= byDecade ? 0.5 * low : pad; high += pad; }
    else if (!byDecade) { const pad = (high - low) * 0.05; low = low >= 0 && low < pad * 4 ? 0 : low - pad; high += pad; }
    else { const pad = (high / low) ** 0.04; low /= pad; high *= pad; }
    const X = (step) => box.left + ((step - first) / (last - first)) * (box.right - box.left);
    const unit = (value) => byDecade ? Math.log(Math.max(value, low * 1e-3) / low) / Math.log(high / low) : (value - low) / (high - low);
    const Y = (value) => box.bottom - unit(value) * (box.bottom - box.top);
    for (const value of byDecade ? decades(low, high) : ticks(low, high, 4)) {
      make("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(value), y2: Y(value) }, svg);
      make("text", { x: box.left - 6, y: Y(value) + 4, "text-anchor": "end" }, svg, brief(value));
    }
    for (const step of ticks(first, last, Math.max(2, Math.min(6, width / 90)))) {
      if (step !== Math.round(step)) continue;
      const x = X(step), anchor = x > box.right - 20 ? "end" : "middle";
      make("text", { x: Math.min(x, box.right), y: height - 6, "text-anchor": anchor }, svg, step.toLocaleString("en"));
    }
    const clip = make("clipPath", { id: `clip${number}` }, make("defs", {}, svg));
    make("rect", { x: box.left - 4, y: box.top - 4, width: box.right - box.left + 8, height: box.bottom - box.top + 8 }, clip);
    const plot = make("g", { "clip-path": `url(#clip${number})` }, svg);
    const path = (one, values) => {
      let line = "";
      for (let at = one.from; at < one.to; at++) line += `${line ? "L" : "M"}${X(one.x[at]).toFixed(1)} ${Y(values[at]).toFixed(1)}`;
      return line;
    };
    for (const one of shown) {
      const group = make("g", { style: `--color: ${color(one.run)}` }, plot);
      if (one.low) {
        let back = "";
        for (let at = one.to - 1; at >= one.from; at--) back += `L${X(one.x[at]).toFixed(1)} ${Y(one.low[at]).toFixed(1)}`;
        make("path", { class: "band", d: `${path(one, one.high)}${back}Z` }, group);
      }
      if (one.y !== one.raw) make("path", { class: "curve faint", d: path(one, one.raw) }, group);
      make("path", { class: "curve", d: path(one, one.y) }, group);
      if (one.x.length <= 40) for (let at = one.from; at < one.to; at++) make("circle", { class: "dot", cx: X(one.x[at]), cy: Y(one.y[at]), r: 3 }, group);
    }
    const line = make("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" }, svg);
    const chosen = make("rect", { class: "chosen", y: box.top, height: box.bottom - box.top, visibility: "hidden" }, svg);
    const dots = make("g", {}, plot);
    figure.state = { X, Y, shown, line, chosen, dots, box, first, last };
    point(figure);
  };

  const point = (figure) => {
    const { X, Y, shown, line, dots, first, last } = figure.state || {};
    if (!shown) return;
    const readout = figure.querySelector(".readout"), parts = [];
    const at = cursor === null ? last : Math.min(last, Math.max(first, cursor));
    dots.replaceChildren();
    const steps = new Set();
    for (const one of shown) {
      const place = nearest(one.x, at), ended = cursor !== null && (at < one.x[0] || at > one.x[one.x.length - 1]);
      if (!ended || shown.length === 1) steps.add(one.x[place]);
      parts.push([one.run, ended && shown.length > 1 ? "–" : short(one.y[place])]);
      if (cursor !== null && !ended) {
        const dot = { class: "dot", style: `--color: ${color(one.run)}`, cx: X(one.x[place]), cy: Y(one.y[place]), r: 3.5 };
        make("circle", dot, dots);
      }
    }
    const [step] = steps;
    line.setAttribute("visibility", cursor === null ? "hidden" : "visible");
    if (cursor !== null && step !== undefined) { line.setAttribute("x1", X(step)); line.setAttribute("x2", X(step)); }
    const several = steps.size > 1 && cursor === null;
    readout.replaceChildren(step === undefined ? "" : several ? "last" : `step ${step.toLocaleString("en")}`);
    readout.setAttribute("aria-live", keyboard && figure.contains(document.activeElement) ? "polite" : "off");
    for (const [run, value] of parts) {
      const shownValue = document.createElement("b");
      if (data.runs.length > 1) shownValue.style.setProperty("--color", color(run));
      shownValue.textContent = value;
      readout.append(shownValue);
    }
  };

  const drawAll = () => { reset.hidden = range === null; figures.forEach(draw); };
  const pointAll = () => figures.forEach(point);
  const zoom = (low, high) => { range = low === null ? null : [low, high]; cursor = null; drawAll(); };

  for (const figure of figures) {
    const svg = figure.querySelector("svg");
    const stepAt = (event) => {
      const { box, first, last } = figure.state, x = event.clientX - svg.getBoundingClientRect().left;
      return first + Math.min(1, Math.max(0, (x - box.left) / (box.right - box.left))) * (last - first);
    };
    let pressed = null;
    svg.addEventListener("pointermove", (event) => {
      if (!figure.state) return;
      keyboard = false;
      cursor = stepAt(event);
      if (pressed !== null) {
        const { X, chosen } = figure.state, from = X(Math.min(pressed, cursor)), to = X(Math.max(pressed, cursor));
        chosen.setAttribute("x", from); chosen.setAttribute("width", to - from); chosen.setAttribute("visibility", "visible");
      }
      pointAll();
    });
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0 && figure.state) { pressed = stepAt(event); svg.setPointerCapture(event.pointerId); event.preventDefault(); svg.focus(); }
    });
    svg.addEventListener("pointerup", (event) => {
      if (pressed === null) return;
      const { X } = figure.state, to = stepAt(event), from = pressed;
      pressed = null;
      figure.state.chosen.setAttribute("visibility", "hidden");
      if (Math.abs(X(to) - X(from)) > 8) zoom(Math.min(from, to), Math.max(from, to));
    });
    svg.addEventListener("pointerleave", () => { if (pressed === null) { cursor = null; pointAll(); } });
    svg.addEventListener("dblclick", () => zoom(null));
    svg.addEventListener("keydown", (event) => {
      if (!figure.state || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
      event.preventDefault();
      keyboard = true;
      const { shown, first, last } = figure.state;
      if (event.key === "Escape") { cursor = null; zoom(null); return; }
      const steps = shown.length ? shown[0].x : [first, last];
      const at = cursor === null ? steps.length - 1 : nearest(steps, cursor);
      const places = { ArrowLeft: at - (cursor !== null), ArrowRight: at + 1, Home: 0, End: steps.length - 1 };
      cursor = steps[Math.min(steps.length - 1, Math.max(0, places[event.key]))];
      pointAll();
    });
    const button = figure.querySelector("button.log");
    if (button) button.addEventListener("click", () => { const number = figure.dataset.chart; log[number] = !log[number]; draw(figure); });
    new ResizeObserver(() => draw(figure)).observe(svg);
  }
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
