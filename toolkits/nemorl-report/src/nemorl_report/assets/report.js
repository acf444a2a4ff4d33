"use strict";
// Draws the curves from the JSON beside this script. All text goes in as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = 190;
const SMOOTH_FROM = 20; // points; below, a moving average hides more than it shows
const WHOLE = [1, 2, 5].flatMap((n) => [...Array(8).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b);
const drawn = [];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index) => css(`--c${(index % 8) + 1}`);

function movingAverage(values) {
  // Exponential, over roughly a tenth of the run, corrected for its start at zero.
  const keep = 1 - Math.min(1, 2 / (values.length / 10 + 1));
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

function stack(series) {
  const total = new Array(series[0].values.length).fill(0);
  return series.map(({ label, values }) => ({ label, values: values.map((v, i) => (total[i] += v)), own: values }));
}

const short = (value) => {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 7 : 4, maximumFractionDigits: 4 });
};
function ticks(_, values) {
  const size = Math.max(...values.map(Math.abs));
  if (size < 0.01 || size >= 1e6) return values.map((v) => (v ? Number(v.toPrecision(3)).toExponential().replace("e+", "e") : "0"));
  return values.map((v) => (size >= 10000 ? `${+(v / 1000).toFixed(1)}k` : String(+v.toFixed(4))));
}

function curves(card) {
  const out = [];
  card.series.forEach(({ label, values }, index) => {
    const many = values.filter((v) => v !== null).length >= SMOOTH_FROM;
    const line = { label, values, stroke: colour(index), width: 2, few: !many };
    if (card.smooth && many) {
      out.push({ ...line, stroke: colour(index) + "55", width: 1 });
      out.push({ ...line, label: card.series.length > 1 ? `${label}, smoothed` : "smoothed", values: movingAverage(values) });
    } else out.push(line);
  });
  return out;
}

const own = (line) => line.own ?? line.values; // of a stacked layer, without what lies below it

function areas(card) {
  // The topmost sum is drawn first, so that each area covers the ones above it.
  return stack(card.series).map((layer, index) => ({
    ...layer, stroke: colour(index), fill: colour(index), width: 0, few: false,
  })).reverse();
}

function options(card, lines, width, group) {
  const axis = { stroke: css("--dim"), font: "11px system-ui", grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
  const series = lines.map((line) => ({
    label: line.label, stroke: line.stroke, fill: line.fill, width: line.width, spanGaps: true,
    points: { show: line.few, size: 6, fill: line.stroke },
    value: (_, value, __, at) => short(at === null ? own(line).findLast((v) => v !== null) : own(line)[at]),
  }));
  return {
    width, height: HEIGHT, series: [{ label: "step", value: (_, v) => String(v ?? card.steps[card.steps.length - 1]) }, ...series],
    scales: { x: { time: false }, y: card.stacked ? { range: (_, __, max) => [0, max * 1.05 || 1] } : {} },
    axes: [{ ...axis, space: 60, incrs: WHOLE, values: ticks, size: 26 },
           { ...axis, size: 52, values: ticks, label: card.unit || null, labelSize: 18, labelGap: 0, labelFont: axis.font }],
    cursor: { sync: { key: group }, points: { size: 7 }, y: false },
    legend: { live: true, markers: { width: 0, fill: (_, index) => lines[index - 1]?.stroke } },
  };
}

function make(tag, text, parent) {
  const element = document.createElement(tag);
  element.textContent = text;
  parent.append(element);
  return element;
}

function summary(card) {
  return card.series.map(({ label, values }) => {
    const known = values.filter((v) => v !== null);
    return `${label}: ${short(known[0])} at first, ${short(known[known.length - 1])} at last`;
  }).join("; ");
}

function add(card, parent, group) {
  const figure = make("figure", "", parent);
  figure.className = "card";
  make("h3", card.title, figure);
  make("div", card.meaning, figure).className = "hint";
  const place = make("div", "", figure);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", `${card.title}. ${summary(card)}`);
  for (const note of card.notes) make("div", note, figure).className = "note";
  if (card.watch_for) {
    const watch = make("div", "", figure);
    watch.className = "watch";
    make("b", "Watch for ", watch);
    watch.append(card.watch_for);
  }
  drawn.push({ card, place, group, plot: null });
}

function draw(item) {
  item.plot?.destroy();
  const lines = item.card.stacked ? areas(item.card) : curves(item.card);
  const columns = [item.card.steps, ...lines.map((line) => line.values)];
  item.plot = new uPlot(options(item.card, lines, item.place.clientWidth, item.group), columns, item.place);
}

for (const place of document.querySelectorAll("[data-charts]")) {
  const group = place.dataset.charts;
  for (const card of data[group].charts) add(card, place, group);
}
for (const place of document.querySelectorAll("[data-still]")) {
  for (const card of data[place.dataset.still].still) add(card, place, place.dataset.still);
}
for (const place of document.querySelectorAll("[data-timing]")) {
  const card = data[place.dataset.timing].timing;
  if (card) add(card, place, place.dataset.timing);
}
drawn.forEach(draw);

const resize = new ResizeObserver(() => {
  for (const { place, plot } of drawn) {
    if (place.clientWidth && place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: HEIGHT });
  }
});
drawn.forEach(({ place }) => resize.observe(place));
for (const query of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(query).addEventListener("change", () => drawn.forEach(draw));
}
