// All curves, of one run or of several over each other.
import { choice, el, replace } from "./dom.js";
import { Chart, movingCards, overlaid, setSmoothing } from "./charts.js";
import { constantsOf } from "./about.js";

let words = "";

// Of a page with one run, its metrics have the colours; with several, the runs have, also while one of them is shown.
function cardsOf(runs, state) {
  const moving = movingCards(runs.map(({ overview }) => overview));
  if (state.names.length === 1) return moving[0];
  return overlaid(runs.map(({ name, place }, at) => ({ name, place, cards: moving[at] })));
}

export async function showCurves(place, state) {
  const found = await Promise.all(state.shown.map(async (run) => ({
    name: state.names[run], place: state.places[run], overview: await state.overview(run),
  })));
  const cards = cardsOf(found, state);
  const shown = new Map(cards.map((card) => [`${card.title}\n${card.unit}`, new Chart(card)]));
  const filter = el("input", { type: "search", placeholder: "Title of a chart", "aria-label": "Show charts with this title", value: words });
  const apply = () => {
    words = filter.value.toLowerCase();
    for (const [key, chart] of shown) {
      const card = chart.card;
      chart.element.hidden = !`${key} ${card.series.map(({ metric }) => metric ?? "").join(" ")}`.toLowerCase().includes(words);
    }
  };
  filter.addEventListener("input", apply);
  const smooth = choice([["", "as declared"], ["0", "none"], ["0.6", "0.6"], ["0.8", "0.8"], ["0.9", "0.9"], ["0.97", "0.97"]], state.smoothing ?? "",
    (value) => { state.smoothing = value; setSmoothing(value === "" ? null : Number(value)); }, "Smoothing");
  replace(place,
    el("div", { class: "tools" }, filter, el("label", {}, "Smoothing ", smooth), el("span", { class: "dim" }, "Drag to zoom in all charts, double-click to reset")),
    !cards.length && el("p", { class: "empty" }, "No curves were recorded."),
    el("div", { class: "charts" }, [...shown.values()].map((chart) => chart.element)),
    found.map(({ overview }) => constantsOf(overview.curves)),
    found.map(({ overview }) => overview.curves.left_out > 0 && el("p", { class: "empty" },
      `${overview.curves.left_out} more charts are left out; their metrics are in the table of all metrics.`)));
  apply();
  return async () => {
    // What was added is drawn in place; new charts need a new page.
    const now = await Promise.all(state.shown.map(async (run) => ({ name: state.names[run], place: state.places[run], overview: await state.overview(run) })));
    const fresh = cardsOf(now, state);
    if (fresh.length !== shown.size) return showCurves(place, state);
    for (const card of fresh) shown.get(`${card.title}\n${card.unit}`)?.update(card);
    return null;
  };
}
