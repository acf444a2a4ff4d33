// The page: which run and which view, in the address after #, so that a view can be linked to; keys; what is added live.
import { hue, dashed, lineKey, placesOf, swatch, turnOf } from "./colours.js";
import { choice, el, later, replace } from "./dom.js";
import { forget, redrawAll } from "./charts.js";
import { source } from "./source.js";
import { showEvents, showOverview, tilesOf } from "./about.js";
import { showCurves } from "./curves.js";
import { showSamples } from "./samples.js";
import { showTimeline } from "./timeline.js";
import { showConfig } from "./settings.js";

const VIEWS = { overview: showOverview, curves: showCurves, samples: showSamples, timeline: showTimeline, config: showConfig, events: showEvents };
const KEYS = [["1 to 6", "views"], ["j k, arrows down and up", "next and previous response"], ["arrows left and right", "previous and next step"],
  ["/", "search"], ["?", "these keys"], ["Esc", "leave a field, close this"]];
const REFRESH_MS = 2000; // at most this often, while the run goes on

class State {
  constructor(info) {
    this.names = info.runs.map((run) => run.name);
    this.places = placesOf(this.names);
    this.run = info.live ? 0 : this.names.length - 1; // of stages, the last
    this.shown = info.live ? this.names.map((_, run) => run) : [this.run];
    this.params = {};
    this.view = "overview";
    this.kept = new Map();
  }

  cached(what, run) {
    const key = `${what} ${run}`;
    if (!this.kept.has(key)) {
      const asked = source[what](run);
      asked.catch(() => this.kept.delete(key)); // asked again, next time
      this.kept.set(key, asked);
    }
    return this.kept.get(key);
  }

  overview(run) { return this.cached("overview", run); }
  extra(run) { return this.cached("extra", run); }
  steps(run) { return this.cached("steps", run); }

  link(view, params) {
    const known = Object.entries({ run: this.run, ...params }).filter(([, value]) => value !== "" && value !== undefined && value !== null);
    return `#${view}?${new URLSearchParams(known)}`;
  }

  remember(params) {
    this.params = Object.fromEntries(Object.entries({ ...this.params, ...params }).map(([name, value]) => [name, String(value)]).filter(([, value]) => value !== ""));
    history.replaceState(null, "", this.link(this.view, this.params));
  }

  read() {
    const [view, query] = location.hash.slice(1).split("?");
    this.view = Object.hasOwn(VIEWS, view) ? view : "overview";
    this.params = Object.fromEntries(new URLSearchParams(query ?? ""));
    const run = Number(this.params.run ?? this.run);
    if (Number.isInteger(run) && run >= 0 && run < this.names.length) this.run = run;
  }
}

class App {
  constructor(root, info) {
    this.info = info;
    this.state = new State(info);
    this.main = el("main", {});
    this.links = el("span", { class: "links" });
    this.runs = el("span", { class: "runs" });
    this.light = el("span", { class: "light", title: "" });
    this.help = this.makeHelp();
    replace(root, el("nav", {}, el("b", {}, "nemorl"), this.links, this.light, el("button", { class: "quiet", "aria-label": "Keys", onclick: () => this.help.showModal() }, "?")),
      el("header", {}, el("h1", {}, info.title), info.tiles.length > 0 && tilesOf(info.tiles), this.runs), this.main, this.help,
      el("footer", {}, info.written ? `Written by nemorl, ${info.written}.` : "Read from the run's directory; nothing there is changed."));
    window.addEventListener("hashchange", () => this.show());
    document.addEventListener("keydown", (event) => this.key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  }

  makeHelp() {
    const made = el("dialog", { "aria-label": "Keys" }, el("h2", {}, "Keys"), el("table", {}, KEYS.map(([key, what]) => el("tr", {}, el("td", {}, el("kbd", {}, key)), el("td", {}, what)))),
      el("button", { onclick: () => made.close() }, "Close"));
    return made;
  }

  bar() {
    const { state } = this;
    replace(this.links, Object.keys(VIEWS).map((view) => el("a", { href: state.link(view, {}), "aria-current": view === state.view ? "page" : null }, view[0].toUpperCase() + view.slice(1))));
    if (state.names.length < 2) return;
    const boxes = state.names.map((name, run) => {
      const box = el("input", { type: "checkbox", onchange: () => {
        state.shown = box.checked ? [...state.shown, run].sort((a, b) => a - b) : state.shown.filter((other) => other !== run);
        if (!state.shown.length) state.shown = [state.run];
        this.show();
      } });
      box.checked = state.shown.includes(run);
      const place = state.places[run];
      return el("label", { class: "run" }, box, swatch(lineKey(hue(place), dashed(turnOf(place))), { class: "key" }), name);
    });
    replace(this.runs, state.view === "curves" ? ["Curves of ", boxes] : el("label", {}, "Run ",
      choice(state.names.map((name, run) => [String(run), name]), String(state.run), (value) => { location.hash = `#${state.view}?run=${value}`; }, "Run")));
  }

  async show() {
    const { state } = this;
    state.read();
    this.bar();
    forget();
    const showing = (this.showing = (this.showing ?? 0) + 1);
    const place = el("div", { class: `view ${state.view}` }, el("p", { class: "empty" }, "Reading …"));
    replace(this.main, place);
    this.refreshView = null;
    this.isReading = true;
    this.isBehind = false;
    try {
      const refresh = await VIEWS[state.view](place, state);
      if (showing === this.showing) this.refreshView = refresh ?? null;
      document.body.dataset.ready = state.view;
    } catch (error) {
      replace(place, el("p", { class: "problem" }, `This cannot be shown: ${error.message}`));
    }
    if (showing !== this.showing) return;
    this.isReading = false;
    if (this.isBehind) this.refresh();
  }

  key(event) {
    const isTyping = event.target.matches("input:not([type=range]):not([type=checkbox]), select, textarea");
    if (event.key === "Escape" && isTyping) event.target.blur();
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || this.help.open) return;
    const view = Object.keys(VIEWS)[Number(event.key) - 1];
    if (event.key === "?") this.help.showModal();
    else if (view) location.hash = this.state.link(view, {});
    else if (event.key === "/" && !this.main.querySelector(".samples")) location.hash = this.state.link("samples", {});
    else if (this.keyOfView(event.key)) event.preventDefault();
    if (["?", "/"].includes(event.key)) event.preventDefault();
  }

  keyOfView(name) {
    return this.refreshView?.key?.(name) ?? false;
  }

  async refresh() {
    this.state.kept.clear();
    if (this.isReading) this.isBehind = true; // what is being read may be of before
    else if (this.refreshView) {
      const key = this.refreshView.key, next = await this.refreshView();
      if (next) this.refreshView = next;
      else if (key) this.refreshView.key = key;
    } else if (this.state.view === "events") this.show();
  }

  listen() {
    const refresh = later(() => this.refresh(), REFRESH_MS);
    source.listen(this.info.position, (message) => {
      const isOpen = message.kind !== "disconnected";
      this.light.className = `light ${isOpen ? "on" : "off"}`;
      this.light.title = isOpen ? "live: what the run adds is shown" : "the server does not answer";
      if (!["connected", "disconnected"].includes(message.kind)) refresh();
    });
  }
}

async function begin() {
  const root = document.getElementById("app");
  try {
    const app = new App(root, await source.info());
    await app.show();
    app.listen();
  } catch (error) {
    replace(root, el("p", { class: "problem" }, `The page cannot start: ${error.message}`));
  }
}

begin();
