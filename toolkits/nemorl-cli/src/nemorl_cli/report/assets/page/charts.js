// Curves with uPlot. All charts zoom together, in step; an average is drawn over faint raw values.
import { colour, dashed, lineKey, placesOf, turnOf } from "./colours.js";
import { cssValue, el, replace, short, visible } from "./dom.js";

const HEIGHT = 190;
const SMOOTH_FROM = 20; // points; below, a moving average hides more than it shows
const WHOLE = [1, 2, 5].flatMap((n) => [...Array(8).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b);
const drawn = new Set();
let zoom = null; // [first, last] step
let smoothing = null; // 0 to 0.99; null: over a tenth of the run

export function setSmoothing(value) {
  smoothing = value;
  for (const chart of drawn) chart.draw();
}

export function redrawAll() {
  for (const chart of drawn) chart.draw();
}

export function forget() {
  for (const chart of drawn) chart.destroy();
  drawn.clear();
}

export function movingAverage(values, keep = null) {
  // Exponential, corrected for its start at zero.
  const kept = keep ?? 1 - Math.min(1, 2 / (values.length / 10 + 1));
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = kept * sum + (1 - kept) * value;
    weight = kept * weight + (1 - kept);
    return weight ? sum / weight : value;
  });
}

function ticks(_, values) {
  const size = Math.max(...values.map(Math.abs));
  if (size < 0.01 || size >= 1e6) return values.map((v) => (v ? Number(v.toPrecision(3)).toExponential().replace("e+", "e") : "0"));
  return values.map((v) => (size >= 10000 ? `${+(v / 1000).toFixed(1)}k` : String(+v.toFixed(4))));
}

function lines(card) {
  const out = [];
  const places = placesOf(card.series.map(nameOf));
  card.series.forEach(({ label, values, place, dash = 0 }, index) => {
    place ??= places[index];
    const many = values.filter((v) => v !== null).length >= SMOOTH_FROM;
    const line = { label, values, stroke: colour(place), width: 2, few: !many, dash: dashed(turnOf(place) + dash) };
    const wanted = smoothing === null ? card.smooth : smoothing > 0;
    if (wanted && many) {
      out.push({ ...line, alpha: 0.27, width: 1, dash: [], faint: true });
      out.push({ ...line, label: `${label}, smoothed`, values: movingAverage(values, smoothing) });
    } else out.push(line);
  });
  return out;
}

function areas(card) {
  // The topmost sum is drawn first, so that each area covers the ones above it.
  const total = new Array(card.series[0].values.length).fill(0), places = placesOf(card.series.map(nameOf));
  const layers = card.series.map(({ label, values }, index) => ({
    label, values: values.map((v, at) => (total[at] += v)), own: values, stroke: colour(places[index]), fill: colour(places[index]), width: 0, few: false,
  }));
  return layers.reverse();
}

function shareZoom(plot, key) {
  if (key !== "x" || plot.isFollowing) return;
  const { min, max } = plot.scales.x;
  const steps = plot.data[0];
  zoom = min <= steps[0] && max >= steps[steps.length - 1] ? null : [min, max];
  for (const { plot: other } of drawn) if (other && other !== plot) follow(other);
}

function follow(plot) {
  const steps = plot.data[0];
  if (!steps.length) return;
  plot.isFollowing = true;
  plot.batch(() => plot.setScale("x", zoom ? { min: zoom[0], max: zoom[1] } : { min: steps[0], max: steps[steps.length - 1] }));
  plot.isFollowing = false;
}

// A dashed line and a triangle at its top, at each step at which an alert was raised.
function drawAlerts(plot, alerts) {
  const { ctx, bbox } = plot, size = 5 * devicePixelRatio;
  ctx.save();
  for (const { step, severity } of alerts) {
    const x = plot.valToPos(step, "x", true), top = bbox.top;
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = cssValue(severity === "error" ? "--bad" : "--mid");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([size, size]);
    ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + bbox.height); ctx.stroke();
    ctx.beginPath(); ctx.moveTo(x - size, top); ctx.lineTo(x + size, top); ctx.lineTo(x, top + 1.6 * size); ctx.fill();
  }
  ctx.restore();
}

function options(card, shown, width) {
  const axis = { stroke: cssValue("--dim"), font: "11px system-ui", grid: { stroke: cssValue("--line"), width: 1 }, ticks: { show: false } };
  const series = shown.map((line) => ({
    label: visible(line.label), stroke: line.stroke, fill: line.fill, width: line.width, dash: line.dash, alpha: line.alpha ?? 1, spanGaps: true,
    points: { show: line.few, size: 6, fill: line.stroke },
    value: (_, value, __, at) => short(at === null ? (line.own ?? line.values).findLast((v) => v !== null) : (line.own ?? line.values)[at]),
  }));
  return {
    width, height: HEIGHT, series: [{ label: "step", value: (_, v) => String(v ?? card.steps[card.steps.length - 1] ?? "") }, ...series],
    scales: { x: { time: false }, y: card.stacked ? { range: (_, __, max) => [0, max * 1.05 || 1] } : {} },
    axes: [{ ...axis, space: 60, incrs: WHOLE, values: ticks, size: 26 },
           { ...axis, size: 52, values: ticks, label: card.unit ? visible(card.unit) : null, labelSize: 18, labelGap: 0, labelFont: axis.font }],
    cursor: { sync: { key: "steps" }, points: { size: 7 }, y: false },
    legend: { live: true, markers: { width: 0, fill: (_, index) => lineKey(shown[index - 1].stroke, shown[index - 1].dash) } },
    hooks: { setScale: [shareZoom], draw: [(plot) => drawAlerts(plot, card.alerts)] },
  };
}

const alertWords = ({ run, step, rule, value, limit }) => `${run ? `${run}, ` : ""}step ${step}, ${rule}: ${short(value)}${limit && ` (${limit})`}`;

function told(card) {
  return card.series.map(({ label, values }) => {
    const known = values.filter((v) => v !== null);
    return `${label}: ${short(known[0])} at first, ${short(known[known.length - 1])} at last`;
  }).concat(card.alerts.map((alert) => `alert at ${alertWords(alert)}`)).join("; ");
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) entry.target.chart?.draw();
}, { rootMargin: "300px" });
const sized = new ResizeObserver((entries) => {
  for (const { target } of entries) target.chart?.resize();
});

// A figure with one chart; it is drawn when it comes near the window.
export class Chart {
  constructor(card) {
    this.place = el("div", { class: "plot", role: "img" });
    this.words = el("div", {});
    this.after = el("div", {});
    this.element = el("figure", { class: "card" }, this.words, this.place, this.after);
    this.place.chart = this;
    this.plot = null;
    this.update(card);
    drawn.add(this);
    seen.observe(this.place);
    sized.observe(this.place);
  }

  update(card) {
    this.card = card;
    this.place.setAttribute("aria-label", `${card.title}. ${told(card)}`);
    replace(this.words, el("h3", {}, card.title), el("div", { class: "hint" }, card.meaning));
    replace(this.after, card.alerts.map((alert) => el("div", { class: `note raised ${alert.severity}` }, el("i", {}, "▼ "), alertWords(alert))),
      card.notes.map((note) => el("div", { class: "note" }, note)),
      card.watch_for && el("div", { class: "watch" }, el("b", {}, "Watch for "), card.watch_for));
    if (this.plot) this.draw();
  }

  draw() {
    if (!this.place.clientWidth) return;
    seen.unobserve(this.place);
    this.plot?.destroy();
    const shown = this.card.stacked ? areas(this.card) : lines(this.card);
    this.plot = new uPlot(options(this.card, shown, this.place.clientWidth), [this.card.steps, ...shown.map((line) => line.values)], this.place);
    shown.forEach((line, index) => { if (line.faint) this.place.querySelectorAll(".u-series")[index + 1].classList.add("faint"); });
    if (zoom) follow(this.plot);
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  destroy() {
    seen.unobserve(this.place);
    sized.unobserve(this.place);
    this.plot?.destroy();
  }
}

// The cards of a run that move, and those that move in another of the runs: a curve that keeps its value is one, too.
export function movingCards(overviews) {
  const keys = new Set(overviews.flatMap(({ curves, efficiency }) => [...curves.moving, ...efficiency.curves.moving].map(keyOf)));
  return overviews.map(({ curves, efficiency }) => [...curves.moving, ...curves.still, ...efficiency.curves.moving, ...efficiency.curves.still]
    .filter((card) => keys.has(keyOf(card))));
}

const keyOf = ({ title, unit }) => `${title}\n${unit}`;

const nameOf = ({ metric, label }) => metric ?? label;

// Cards of several runs with the same title and unit, as one; each run has a colour, each of its curves a dash.
export function overlaid(cardsOfRuns) {
  const found = new Map();
  for (const { name, place, cards } of cardsOfRuns) {
    for (const card of cards) {
      const key = keyOf(card);
      if (!found.has(key)) found.set(key, { ...card, curves: [], alerts: [] });
      found.get(key).alerts.push(...card.alerts.map((alert) => ({ ...alert, run: name })));
      card.series.forEach(({ label, metric, values }) => {
        const said = card.series.length > 1 ? `${name} · ${label}` : name;
        found.get(key).curves.push({ label: said, metric, place, points: new Map(card.steps.map((step, at) => [step, values[at]])) });
      });
    }
  }
  return [...found.values()].map((card) => {
    const steps = [...new Set(card.curves.flatMap((curve) => [...curve.points.keys()]))].sort((a, b) => a - b);
    const metrics = [...new Set(card.curves.map(nameOf))];
    const series = card.curves.map(({ points, ...curve }) => ({ ...curve, dash: metrics.indexOf(nameOf(curve)), values: steps.map((step) => points.get(step) ?? null) }));
    return { ...card, steps, series };
  });
}

export const charts = (cards) => el("div", { class: "charts" }, cards.map((card) => new Chart(card).element));

export function blocks(given) {
  return given.map((block) => {
    if (block.kind === "charts") return charts(block.charts);
    if (block.kind === "table") return table(block.columns, block.rows);
    return el("p", { class: "said" }, block.text);
  });
}

export function table(columns, rows, kind = "plain") {
  const head = el("tr", {}, columns.map((column) => el("th", {}, column)));
  return el("div", { class: "scroll" }, el("table", { class: kind }, head,
    rows.map((row) => el("tr", {}, row.map((value) => el("td", {}, value))))));
}
