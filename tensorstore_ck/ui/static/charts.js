// Draws the metrics of a branch by step: its line, what it left behind, and what happened at which step.
"use strict";

const NOTE_COLOURS = { tag: "--series-4", pin: "--series-5", mark: "--bad", restart: "--quiet", back: "--series-2", branch: "--series-3" };
const NEAR_PIXELS = 5;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) => {
  if (value == null) return "–";
  const size = Math.abs(value);
  return size >= 1e6 || (size > 0 && size < 1e-4) ? value.toExponential(5).replace(/\.?0*e\+?/, "e") : Number(value.toPrecision(6)).toString();
};
const steps = (step) => `step ${step.toLocaleString("en")}`;
const finite = (values) => values.filter((value) => value != null);

function summary(chart) {
  const { line, not_finite: lost, abandoned, abandoned_runs: runs } = chart;
  const values = finite(line.values);
  const said = [];
  if (values.length) {
    const last = line.values.findLastIndex((value) => value != null);
    const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
    said.push(`${values.length.toLocaleString("en")} values, ${short(line.values[last])} at ${steps(line.steps[last])}, lowest ${short(low)}, highest ${short(high)}`);
  }
  if (lost.length) said.push(`${lost.length} NaN or infinite`);
  if (runs) said.push(`${runs} abandoned ${runs === 1 ? "run" : "runs"}${runs > abandoned.length ? `, the newest ${abandoned.length} drawn` : ""}`);
  return said.join("; ") || "No snapshot of this branch has it.";
}

// Vertical lines over the whole height: red and dotted where a value is NaN or infinite, and one for each note.
function annotations(chart, notes) {
  const vertical = (u, step, colour, dash, flag) => {
    const { ctx, bbox } = u, x = u.valToPos(step, "x", true), dot = devicePixelRatio;
    if (!(x >= bbox.left && x <= bbox.left + bbox.width)) return;
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.lineWidth = dot;
    ctx.setLineDash(dash.map((length) => length * dot));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (!flag) return;
    ctx.beginPath();
    ctx.moveTo(x - 5 * dot, bbox.top - 10 * dot);
    ctx.lineTo(x + 5 * dot, bbox.top - 10 * dot);
    ctx.lineTo(x, bbox.top - 1 * dot);
    ctx.fill();
  };
  return {
    hooks: {
      drawAxes: (u) => {
        u.ctx.save();
        for (const note of notes) vertical(u, note.step, css(NOTE_COLOURS[note.kind]), [2, 3], true);
        for (const point of chart.not_finite) vertical(u, point.step, css("--bad"), [1, 2], false);
        u.ctx.restore();
      },
    },
  };
}

// As wide as its widest label, so that none is cut.
function widthOfLabels(u, labels, index, cycle) {
  const axis = u.axes[index];
  if (cycle > 1) return axis._size;
  u.ctx.font = axis.font[0];
  const widest = (labels ?? []).reduce((most, label) => Math.max(most, u.ctx.measureText(label).width), 0);
  return Math.ceil(axis.ticks.size + axis.gap + widest / devicePixelRatio);
}

// What all charts of metrics by step have.
function plain(at) {
  const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
  return {
    width: at.clientWidth,
    height: 272,
    legend: { show: false },
    padding: [14, 32, 0, 0],
    cursor: { y: false, points: { size: 7 } },
    scales: { x: { time: false } },
    axes: [
      { ...axis, values: (_, splits) => splits.map((step) => (Number.isInteger(step) ? step.toLocaleString("en") : "")) },
      { ...axis, size: widthOfLabels, values: (_, splits) => splits.map((value) => (value == null ? "" : short(value))) },
    ],
  };
}

function options(chart, notes, at, wanted) {
  const abandoned = { stroke: css("--quiet"), width: 1.5, dash: [4, 4], alpha: 0.8, points: { size: 4 } };
  const values = [chart.line, ...chart.abandoned].flatMap((points) => finite(points.values));
  const log = wanted.log && values.every((value) => value > 0);
  return {
    ...plain(at),
    scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
    series: [
      { label: "step" },
      { label: chart.metric, stroke: css("--series-1"), width: 2, points: { size: 5 } },
      ...chart.abandoned.map(() => ({ label: "abandoned", ...abandoned, show: wanted.abandoned })),
    ],
    plugins: [annotations(chart, notes)],
  };
}

function draw(figure, chart, notes, wanted) {
  const at = figure.querySelector(".chart"), reading = figure.querySelector(".reading");
  const parts = [chart.line, ...chart.abandoned], said = summary(chart);
  const roots = parts.map((part) => new Map(part.steps.map((step, index) => [step, part.roots[index]])));
  const lost = new Map(chart.not_finite.map((point) => [point.step, point.value]));
  at.replaceChildren();
  at.setAttribute("aria-label", `${chart.metric}: ${said}`);
  reading.textContent = said;
  if (parts.every((part) => part.steps.length === 0)) return null;
  const plot = new uPlot(options(chart, notes, at, wanted), uPlot.join(parts.map((part) => [part.steps, part.values])), at);
  const under = () => {
    const index = plot.cursor.idx;
    if (index == null) return null;
    const step = plot.data[0][index];
    const part = parts.findIndex((_, number) => roots[number].has(step) && plot.series[number + 1].show);
    return { step, root: part < 0 ? null : roots[part].get(step), value: part < 0 ? null : plot.data[part + 1][index], isAbandoned: part > 0 };
  };
  plot.over.addEventListener("mousemove", () => {
    const found = under();
    if (!found) return;
    const near = notes.filter((note) => Math.abs(plot.valToPos(note.step, "x") - plot.cursor.left) <= NEAR_PIXELS);
    const value = found.value == null ? lost.get(found.step) ?? "–" : short(found.value);
    const happened = [...new Set(near.map((note) => `${steps(note.step)}: ${note.text}`))];
    reading.textContent = [`${steps(found.step)}: ${value}${found.isAbandoned ? ", abandoned" : ""}`, ...happened].join("; ");
  });
  plot.over.addEventListener("mouseleave", () => { reading.textContent = said; });
  plot.over.addEventListener("click", () => {
    const found = under();
    if (found?.root && plot.select.width === 0) location.assign(`${figure.parentElement.dataset.snapshot}?at=${found.root}`);
  });
  at.uplot = plot;  // for who looks from outside: what is drawn
  return plot;
}

// Reads the data at the URLs, draws them with `drawAll`, which returns plots, and again when they, colours or the width change.
// Returns a function that draws again what was read.
function keepDrawn(place, urls, drawAll) {
  let plots = [], texts = [];
  const again = () => {
    const zooms = plots.map((plot) => (plot?.isZoomed ? { ...plot.scales.x } : null));
    for (const plot of plots) plot?.destroy();
    plots = drawAll(texts.map((text) => JSON.parse(text)));
    for (const [index, plot] of plots.entries()) {
      if (!plot) continue;
      plot.hooks.setSelect = [() => { plot.isZoomed = true; }];
      plot.over.addEventListener("dblclick", () => { plot.isZoomed = false; });
      const zoom = zooms[index];
      if (zoom) { plot.setScale("x", { min: zoom.min, max: zoom.max }); plot.isZoomed = true; }
    }
  };
  const read = async () => {
    const answers = await Promise.all(urls.map((url) => fetch(url)));
    const failed = answers.find((answer) => !answer.ok);
    if (failed) throw new Error(failed.status);
    const fresh = await Promise.all(answers.map((answer) => answer.text()));
    if (fresh.some((text, index) => text !== texts[index])) {
      texts = fresh;
      again();
    }
  };
  place.setAttribute("aria-busy", "true");
  read().then(() => {
    document.addEventListener("tsck:look", () => read().catch(() => {}));  // the next look tries again
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    new ResizeObserver(() => {
      for (const plot of plots) {
        const width = plot?.root.parentElement.clientWidth;
        if (plot && plot.width !== width) plot.setSize({ width, height: plot.height });
      }
    }).observe(place);
  }, (error) => {
    place.textContent = `The metrics cannot be read now (${error.message}): load the page again.`;
  }).finally(() => place.removeAttribute("aria-busy"));
  return again;
}

function drawCharts() {
  const place = document.getElementById("charts"), controls = document.getElementById("chart-controls");
  if (!place) return;
  const figures = [...place.querySelectorAll("figure")];
  const again = keepDrawn(place, [place.dataset.series], ([{ charts, notes }]) => {
    controls.hidden = false;
    const wanted = { log: controls.querySelector("[name=log]").checked, abandoned: controls.querySelector("[name=abandoned]").checked };
    const on = new Set([...controls.querySelectorAll("[name=notes]:checked")].map((box) => box.value));
    return charts.map((chart, index) => draw(figures[index], chart, notes.filter((note) => on.has(note.kind)), wanted));
  });
  controls.addEventListener("change", again);
}

document.addEventListener("DOMContentLoaded", drawCharts);
