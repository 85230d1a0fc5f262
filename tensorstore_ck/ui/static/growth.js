// Draws what saves have put into a store over time.
"use strict";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function bytesText(bytes) {
  if (bytes == null) return "–";
  let unit = 0;
  while (bytes >= 1024 && unit < UNITS.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit ? bytes.toFixed(1) : bytes} ${UNITS[unit]}`;
}

// "2025-11-24 08:00:00.000", whatever the language of the browser.
const timeText = (seconds) => new Date(seconds * 1000).toISOString().slice(0, -1).replace("T", " ");

// Dates, or times with the date below where a day begins.
function timeTicks(splits, increment) {
  const seen = new Set(), digits = increment < 1 ? 12 : increment < 60 ? 8 : 5;
  return splits.map((seconds) => {
    const [date, time] = timeText(seconds).split(" ");
    if (increment >= 86400) return date;
    const isNew = !seen.has(date);
    seen.add(date);
    return `${time.slice(0, digits)}${isNew ? `\n${date}` : ""}`;
  });
}

function drawGrowth() {
  const at = document.getElementById("growth");
  const data = document.getElementById("growth-data");
  if (!at || !data) return;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const size = () => ({ width: at.clientWidth, height: 256 });
  const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
  const steps = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
  const increments = UNITS.flatMap((_, unit) => steps.map((step) => step * 1024 ** unit));
  at.replaceChildren();
  const plot = new uPlot({
    ...size(),
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    scales: { y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.05] } },
    series: [
      { label: "Until (UTC)", value: (_, seconds) => (seconds == null ? "–" : timeText(seconds).slice(0, 19)) },
      { label: "Put in all", stroke: css("--series-1"), fill: css("--soft"), width: 2, paths: uPlot.paths.stepped({ align: 1 }), value: (_, bytes) => bytesText(bytes) },
    ],
    axes: [
      { ...axis, space: 100, values: (_, splits, __, ___, increment) => timeTicks(splits, increment) },
      { ...axis, size: 80, incrs: increments, values: (_, splits) => splits.map(bytesText) },
    ],
  }, JSON.parse(data.textContent), at);
  at.uplot = plot;  // for who looks from outside: what is drawn
  const watching = new ResizeObserver(() => { if (plot.width !== at.clientWidth) plot.setSize(size()); });
  watching.observe(at);
  return () => { watching.disconnect(); plot.destroy(); };
}

document.addEventListener("DOMContentLoaded", () => {
  let remove = drawGrowth();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { remove?.(); remove = drawGrowth(); });
});
