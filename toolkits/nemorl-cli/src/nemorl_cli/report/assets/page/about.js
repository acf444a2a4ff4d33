// The run as a whole: headline numbers, where the time goes, the same prompts early and late, plugins' sections, events.
import { hue, placesOf, swatch } from "./colours.js";
import { el, replace, short } from "./dom.js";
import { Chart, blocks, charts } from "./charts.js";
import { strip } from "./media.js";

const SVG = "http://www.w3.org/2000/svg";

export function tilesOf(tiles) {
  return el("div", { class: "tiles" }, tiles.map(({ label, value, note }) => el("div", { class: "tile" },
    el("div", { class: "label" }, label), el("div", { class: "value" }, value), note && el("div", { class: "note" }, note))));
}

export function headerOf({ facts, tiles }) {
  return [
    el("div", { class: "facts" }, el("span", { class: `status ${facts.status}` }, facts.status), el("b", {}, facts.algorithm),
      el("span", {}, facts.model), facts.versions.map(([name, version]) => el("span", {}, `${name} ${version}`))),
    tilesOf(tiles),
  ];
}

function section(title, ...content) {
  return el("section", {}, el("h2", {}, title), content);
}

function timeOf({ phases, validation, chart }) {
  if (!phases.length) return el("p", { class: "empty" }, "No step times were recorded.");
  const places = placesOf(phases.map(({ name }) => name));
  const bar = el("div", { class: "bar" }, phases.map((phase, index) => {
    const part = swatch(hue(places[index]), { title: `${phase.name} ${phase.percent}` });
    part.style.width = `${phase.width}%`;
    return part;
  }));
  const rows = phases.map((phase, index) => el("tr", {}, el("td", {}, swatch(hue(places[index]), { class: "dot" }), phase.name),
    el("td", {}, phase.share), el("td", {}, `${phase.mean_s} s`)));
  const table = el("table", { class: "timing" }, el("tr", {}, ["Phase", "Share", "Mean per step"].map((name) => el("th", {}, name))), rows);
  return el("div", { class: "split" },
    el("div", {}, bar, table, validation && el("p", { class: "empty" }, `Validation took ${validation} besides.`)),
    el("div", {}, chart && new Chart(chart).element));
}

// Rules on metrics that held: when, on what, the value and its limit, what the run did, and what to do.
function alertsOf(alerts, state) {
  if (!alerts.length) return null;
  const chip = (name, value) => el("span", { class: "chip" }, `${name} `, el("b", {}, value));
  return section(alerts.length > 1 ? `${alerts.length} alerts` : "One alert", el("div", { class: "alerts" }, alerts.map((alert) => el("article", { class: `alert ${alert.severity}` },
    el("div", { class: "about" }, el("b", {}, alert.rule), el("a", { href: state.link("samples", { step: alert.step }) }, `step ${alert.step}`), el("code", {}, alert.metric)),
    el("div", { class: "chips" }, chip("value", short(alert.value)), alert.limit && chip("limit", alert.limit), chip("action", alert.action),
      chip("over", alert.until === null ? "not yet" : `at step ${alert.until}`)),
    el("div", { class: "advice" }, alert.advice)))));
}

export function constantsOf(cards) {
  return cards.still.length > 0 && el("details", { class: "still" }, el("summary", {}, `Did not change: ${cards.constants}`), charts(cards.still));
}

function efficiencyOf({ line, curves }) {
  return [el("p", { class: line ? "line" : "empty" }, line || "No speeds were recorded."), charts(curves.moving), constantsOf(curves)];
}

function samplesOf({ summary, pairs }, run) {
  if (!pairs.length) return el("p", { class: "empty" }, "No samples were recorded.");
  return [
    el("p", { class: "empty" }, `${summary}; the first ${pairs.length} are shown, in the order they were recorded.`),
    pairs.map((pair) => el("article", { class: "pair" }, el("div", { class: "prompt" }, strip(run, pair.media), pair.prompt),
      pair.answer !== null && pair.answer !== undefined && el("div", { class: "answer" }, "expected ", el("code", {}, pair.answer)),
      el("div", { class: "sides" }, pair.sides.map((side) => el("div", { class: `sample r${side.level}` },
        el("div", { class: "about" }, el("b", {}, `step ${side.step}`), el("span", { class: "reward" }, `reward ${side.reward}`), el("span", {}, side.about)),
        el("div", { class: "response" }, side.response)))))),
  ];
}

function spark(points) {
  if (!points) return "";
  const svg = document.createElementNS(SVG, "svg"), line = document.createElementNS(SVG, "polyline");
  for (const [name, value] of [["class", "spark"], ["width", "90"], ["height", "20"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
  line.setAttribute("points", points);
  svg.append(line);
  return svg;
}

function metricsOf(rows) {
  if (!rows.length) return el("p", { class: "empty" }, "No metrics were recorded.");
  const head = el("tr", {}, ["Metric", "", "Last", "Min", "Max", "Step"].map((name) => el("th", {}, name)));
  return el("div", { class: "scroll" }, el("table", { class: "metrics" }, head, rows.map((row) => el("tr", {},
    el("td", { title: row.meaning || null }, el("code", {}, row.name)), el("td", {}, spark(row.line)),
    [row.last, row.min, row.max, row.step].map((value) => el("td", {}, value))))));
}

export async function showOverview(place, state) {
  const overview = await state.overview(state.run), head = el("div", {});
  const top = ({ header, alerts }) => replace(head, headerOf(header), alertsOf(alerts, state));
  const more = el("div", {}, el("p", { class: "empty" }, "Reading samples …"));
  top(overview);
  replace(place, head, section("Where the time goes", timeOf(overview.time)),
    section("Efficiency", efficiencyOf(overview.efficiency)), more, section("All metrics", metricsOf(overview.metrics)));
  const { samples, sections } = await state.extra(state.run);
  replace(more, section("Samples, before and after", samplesOf(samples, state.run)),
    sections.map(({ title, blocks: given }) => section(title, blocks(given))));
  return async () => {
    top(await state.overview(state.run));
    return null;
  };
}

export async function showEvents(place, state) {
  const { alerts, events, header } = await state.overview(state.run);
  const rows = events.rows.map((row) => el("tr", { class: row.warns ? "warning" : null },
    [row.when, row.event, row.details].map((value) => el("td", {}, value))));
  replace(place, alertsOf(alerts, state), section(events.title,
    el("p", {}, "The run is ", el("span", { class: `status ${header.facts.status}` }, header.facts.status), reason(events.rows)),
    !rows.length && el("p", { class: "empty" }, "No events were recorded."),
    events.hidden > 0 && el("p", { class: "empty" }, `${events.hidden} earlier events are in events.jsonl.`),
    el("div", { class: "scroll tall" }, el("table", { class: "plain events" }, rows))));
}

function reason(rows) {
  const last = rows.findLast((row) => /stop|fail|finish|error/.test(row.event));
  return last ? [": ", last.event, last.details && ` (${last.details})`] : "";
}
