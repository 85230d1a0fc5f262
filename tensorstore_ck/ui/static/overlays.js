// Draws metrics of several branches over each other, by step. It needs charts.js, for axes, colours and numbers.
"use strict";

function overlayOptions(lines, marks, lost, at) {
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
    for (const { step, colour } of marks) down(u, step, css(`--series-${colour}`), [5, 3]);
    for (const step of lost) down(u, step, css("--bad"), [1, 2]);
    u.ctx.restore();
  };
  const series = lines.map(({ name, colour }) => ({ label: name, stroke: css(`--series-${colour}`), width: 2, points: { size: 5 }, spanGaps: true }));
  return { ...plain(at), series: [{ label: "step" }, ...series], plugins: [{ hooks: { drawAxes } }] };
}

function drawOverlay(figure, charts, lines, marks) {
  const at = figure.querySelector(".chart"), reading = figure.querySelector(".reading");
  const lost = charts.flatMap((chart) => chart.not_finite.filter((point) => !point.abandoned).map((point) => point.step));
  const said = lines.map(({ name }, index) => `${name}: ${finite(charts[index].line.values).length.toLocaleString("en")} values`).join("; ");
  at.replaceChildren();
  at.setAttribute("aria-label", `${charts[0].metric}: ${said}`);
  reading.textContent = said;
  if (charts.every((chart) => chart.line.steps.length === 0)) return null;
  const data = uPlot.join(charts.map((chart) => [chart.line.steps, chart.line.values]));
  const plot = new uPlot(overlayOptions(lines, marks, lost, at), data, at);
  plot.over.addEventListener("mousemove", () => {
    const index = plot.cursor.idx;
    if (index == null) return;
    const values = lines.map(({ name }, number) => `${name} ${short(plot.data[number + 1][index])}`);
    reading.textContent = `${steps(plot.data[0][index])}: ${values.join(", ")}`;
  });
  plot.over.addEventListener("mouseleave", () => { reading.textContent = said; });
  at.uplot = plot;  // for who looks from outside: what is drawn
  return plot;
}

function drawOverlays() {
  const place = document.getElementById("overlays");
  if (!place) return;
  const { lines, marks } = JSON.parse(place.dataset.overlay);
  const figures = [...place.querySelectorAll("figure")];
  keepDrawn(place, lines.map(({ series }) => series), (found) =>
    figures.map((figure, index) => drawOverlay(figure, found.map((branch) => branch.charts[index]), lines, marks)));
}

document.addEventListener("DOMContentLoaded", drawOverlays);
