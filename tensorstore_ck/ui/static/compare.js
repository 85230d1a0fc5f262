// Draws metrics of two snapshots' branches over each other by step. It needs charts.js, for colours and numbers.
"use strict";

function overlayOptions(names, marked, lost, at) {
  const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
  const colours = { old: css("--series-2"), new: css("--series-1") };
  const down = (u, step, colour, dash) => {
    const { ctx, bbox } = u, x = u.valToPos(step, "x", true);
    if (!(x >= bbox.left && x <= bbox.left + bbox.width)) return;
    ctx.strokeStyle = colour;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  };
  const drawAxes = (u) => {
    u.ctx.save();
    for (const { side, step } of marked) down(u, step, colours[side], [5, 3]);
    for (const step of lost) down(u, step, css("--bad"), [1, 2]);
    u.ctx.restore();
  };
  return {
    width: at.clientWidth,
    height: 272,
    legend: { show: false },
    padding: [14, 12, 0, 0],
    cursor: { y: false, points: { size: 7 } },
    scales: { x: { time: false } },
    axes: [
      { ...axis, values: (_, splits) => splits.map((step) => (Number.isInteger(step) ? step.toLocaleString("en") : "")) },
      { ...axis, size: 72, values: (_, splits) => splits.map((value) => (value == null ? "" : short(value))) },
    ],
    series: [{ label: "step" }, ...names.map(({ side, name }) => ({ label: name, stroke: colours[side], width: 2, points: { size: 5 } }))],
    plugins: [{ hooks: { drawAxes } }],
  };
}

function drawOverlay(figure, charts, names, marked) {
  const at = figure.querySelector(".chart"), reading = figure.querySelector(".reading");
  const lost = charts.flatMap((chart) => chart.not_finite.filter((point) => !point.abandoned).map((point) => point.step));
  const said = names.map(({ name }, index) => `${name}: ${finite(charts[index].line.values).length.toLocaleString("en")} values`).join("; ");
  at.replaceChildren();
  at.setAttribute("aria-label", `${charts[0].metric}: ${said}`);
  reading.textContent = said;
  if (charts.every((chart) => chart.line.steps.length === 0)) return null;
  const data = uPlot.join(charts.map((chart) => [chart.line.steps, chart.line.values]));
  const plot = new uPlot(overlayOptions(names, marked, lost, at), data, at);
  plot.over.addEventListener("mousemove", () => {
    const index = plot.cursor.idx;
    if (index == null) return;
    const values = names.map(({ name }, number) => `${name} ${short(plot.data[number + 1][index])}`);
    reading.textContent = `${steps(plot.data[0][index])}: ${values.join(", ")}`;
  });
  plot.over.addEventListener("mouseleave", () => { reading.textContent = said; });
  at.uplot = plot;  // for who looks from outside: what is drawn
  return plot;
}

async function drawOverlays() {
  const place = document.getElementById("overlays");
  if (!place) return;
  const wanted = place.dataset;
  const isOne = wanted.oldName === wanted.newName;
  const answers = await Promise.all((isOne ? [wanted.new] : [wanted.old, wanted.new]).map((url) => fetch(url)));
  if (!answers.every((answer) => answer.ok)) {
    place.textContent = "The metrics cannot be read now: load the page again.";
    return;
  }
  const found = await Promise.all(answers.map((answer) => answer.json()));
  const names = (isOne ? ["new"] : ["old", "new"]).map((side) => ({ side, name: wanted[`${side}Name`] }));
  const marked = ["old", "new"].filter((side) => wanted[`${side}Step`] !== "").map((side) => ({ side, step: Number(wanted[`${side}Step`]) }));
  const figures = [...place.querySelectorAll("figure")];
  let plots = [];
  const drawAll = () => {
    for (const plot of plots) plot?.destroy();
    plots = figures.map((figure, index) => drawOverlay(figure, found.map((each) => each.charts[index]), names, marked));
  };
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  new ResizeObserver(() => {
    for (const [index, plot] of plots.entries()) {
      const width = figures[index].querySelector(".chart").clientWidth;
      if (plot && plot.width !== width) plot.setSize({ width, height: plot.height });
    }
  }).observe(place);
}

document.addEventListener("DOMContentLoaded", drawOverlays);
