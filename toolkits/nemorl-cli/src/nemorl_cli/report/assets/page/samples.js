// Steps, their groups, and the responses of each; filters, orders and a search over all steps.
import { brief, choice, el, later, mean, percent, put, replace, short } from "./dom.js";
import { strip } from "./media.js";
import { showTranscript } from "./transcript.js";
import { source } from "./source.js";

const SORTS = [["", "as recorded"], ["reward", "reward"], ["advantage", "advantage"], ["mismatch", "mismatch"], ["gradient", "gradient weight"],
  ["kl", "KL to the reference"], ["tokens", "tokens"], ["num_turns", "turns"], ["seconds", "seconds"]];
const FILTERS = [["all_wrong", "group all wrong"], ["all_right", "group all right"], ["mixed", "group mixed"], ["wrong", "wrong"],
  ["truncated", "truncated"], ["filtered", "trains nothing"]];
const PAGE = 200; // rows of a list that goes over all steps

export async function showSamples(place, state) {
  const { steps, of_steps: ofSteps, parts, problem } = await state.steps(state.run);
  if (!steps.length) {
    replace(place, problem && el("p", { class: "problem" }, problem), el("p", { class: "empty" }, "No rollouts were recorded, or none yet. A run that samples keeps them in records/."));
    return async () => showSamples(place, state);
  }
  const view = new Samples(place, state, steps, ofSteps, parts);
  await view.load(true);
  return Object.assign(() => view.refresh(), { key: (name) => view.key(name) });
}

class Samples {
  constructor(place, state, steps, ofSteps, parts) {
    Object.assign(this, { place, state, steps, ofSteps });
    const given = state.params, splits = [...new Set(steps.map((step) => step.split))].sort();
    const split = splits.includes(given.split) ? given.split : splits.includes("train") ? "train" : splits[0];
    this.wanted = {
      split, step: given.step === undefined ? this.last(split) : Number(given.step), all: given.all === "1", sort: given.sort ?? "",
      descending: given.up !== "1", only: (given.only ?? "").split(",").filter((name) => FILTERS.some(([known]) => known === name)), search: given.q ?? "",
    };
    this.open = given.id ?? null;
    this.rows = [];
    this.asking = 0;
    this.tools = this.makeTools(splits, parts);
    this.about = el("div", { class: "about-step" });
    this.list = el("div", { class: "list", role: "listbox", "aria-label": "Responses", tabindex: "0" });
    this.detail = el("div", { class: "detail" }, el("p", { class: "empty" }, "Choose a response: j and k go through them."));
    replace(place, this.tools, this.about, el("div", { class: "sides-by-side" }, this.list, this.detail));
  }

  last(split) {
    return this.steps.findLast((step) => step.split === split).step;
  }

  own() {
    return this.steps.filter((step) => step.split === this.wanted.split);
  }

  makeTools(splits, parts) {
    const { wanted } = this, change = (name) => (value) => { wanted[name] = value; this.load(); };
    this.slider = el("input", { type: "range", min: "0", "aria-label": "Step", oninput: later(() => this.moveTo(Number(this.slider.value)), 30) });
    this.number = el("output", {});
    this.search = el("input", { type: "search", placeholder: "Search all steps   /", "aria-label": "Search", value: wanted.search });
    this.search.addEventListener("input", later(() => { wanted.search = this.search.value; this.load(); }, 150));
    const order = el("button", { title: "Turn the order round", onclick: () => { wanted.descending = !wanted.descending; replace(order, arrow()); this.load(); } });
    const arrow = () => (wanted.descending ? "↓ high first" : "↑ low first");
    put(order, arrow());
    const sorts = [...SORTS, ...parts.map((name) => [`part:${name}`, name.replace(/^metrics\//, "")])];
    const everywhere = el("input", { type: "checkbox", onchange: () => { wanted.all = everywhere.checked; this.load(); } });
    everywhere.checked = wanted.all;
    const filters = FILTERS.map(([name, label]) => {
      const box = el("input", { type: "checkbox", onchange: () => {
        wanted.only = box.checked ? [...wanted.only, name] : wanted.only.filter((other) => other !== name);
        this.load();
      } });
      box.checked = wanted.only.includes(name);
      return el("label", { class: "filter" }, box, label);
    });
    return el("div", { class: "tools" },
      splits.length > 1 && choice(splits.map((name) => [name, name]), wanted.split, (value) => { wanted.split = value; wanted.step = this.last(value); this.load(); }, "Split"),
      el("span", { class: "stepper" }, el("button", { "aria-label": "Step before", onclick: () => this.move(-1) }, "‹"), this.slider,
        el("button", { "aria-label": "Next step", onclick: () => this.move(1) }, "›"), this.number),
      el("label", {}, "Sort ", choice(sorts, wanted.sort, change("sort"), "Sort by")), order,
      el("label", { class: "filter" }, everywhere, "all steps"), this.search, el("div", { class: "filters" }, filters));
  }

  move(by) {
    const own = this.own(), now = own.findIndex((step) => step.step === this.wanted.step);
    this.moveTo(Math.max(0, Math.min(own.length - 1, now + by)));
  }

  moveTo(index) {
    const step = this.own()[index].step;
    if (step === this.wanted.step) return;
    this.wanted.step = step;
    this.load();
  }

  isFlat() {
    return this.wanted.all || this.wanted.search.trim() !== "" || this.wanted.sort !== "";
  }

  async load(keep = false) {
    const { wanted } = this, asking = ++this.asking, everywhere = wanted.all || wanted.search.trim() !== "";
    if (!keep) this.open = null;
    this.remember();
    this.showStep();
    const asked = { split: wanted.split, step: everywhere ? null : wanted.step, only: wanted.only, search: wanted.search, sort: wanted.sort,
      descending: wanted.descending, limit: everywhere ? PAGE : 5000, offset: 0 };
    let found;
    try {
      found = await source.responses(this.state.run, asked);
    } catch (error) {
      found = { total: 0, rows: [], problem: error.message };
    }
    if (asking !== this.asking) return; // a later question was asked meanwhile
    this.rows = found.rows;
    this.showList(found);
    const chosen = this.rows.findIndex((row) => row.sample_id === this.open);
    if (this.rows.length) await this.select(Math.max(0, chosen), false);
    else replace(this.detail, el("p", { class: "empty" }, "Nothing to show."));
  }

  remember() {
    const { wanted } = this;
    this.state.remember({ split: wanted.split, step: wanted.step, all: wanted.all ? "1" : "", sort: wanted.sort, up: wanted.descending ? "" : "1",
      only: wanted.only.join(","), q: wanted.search, id: this.open ?? "" });
  }

  showStep() {
    const own = this.own(), index = own.findIndex((step) => step.step === this.wanted.step), step = own[index];
    this.slider.max = String(own.length - 1);
    this.slider.value = String(index);
    replace(this.number, `step ${this.wanted.step} of ${own[own.length - 1].step}`);
    if (!step) return;
    const facts = [["reward", short(step.reward)], ["right", percent(step.right)], ["all wrong", `${step.all_wrong} of ${step.groups} groups`],
      ["all right", `${step.all_right}`], ["truncated", `${step.truncated} of ${step.records}`], ["tokens", short(step.tokens)], ["largest mismatch", short(step.mismatch)]];
    const left = this.ofSteps > this.steps.length && `This page holds ${this.steps.length} of ${this.ofSteps} recorded steps; nemorl view shows all.`;
    replace(this.about, el("div", { class: "chips" }, facts.map(([name, value]) => el("span", { class: "chip" }, `${name} `, el("b", {}, value)))),
      this.problem && el("p", { class: "problem" }, this.problem), step.damage && el("p", { class: "problem" }, `A file of this step cannot be read: ${step.damage}`), left && el("p", { class: "empty" }, left));
  }

  showList({ total, rows, problem }) {
    const said = problem ?? (total > rows.length ? `${rows.length} of ${total.toLocaleString("en")} responses` : `${total.toLocaleString("en")} responses`);
    const flat = this.isFlat();
    const groups = new Map();
    rows.forEach((row, index) => {
      const key = `${row.split} ${row.step} ${row.group_id}`;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push([row, index]);
    });
    this.items = [];
    replace(this.list, el("div", { class: "count" }, said), flat ? rows.map((row, index) => this.item(row, index, true))
      : [...groups.values()].map((members) => this.group(members)));
  }

  group(members) {
    const [first] = members[0], wholeGroup = members.length === first.group_size;
    return el("section", { class: "group" }, el("div", { class: "group-head" }, strip(this.state.run, first.media?.slice(0, first.prompt_media ?? 0)), el("span", { class: "prompt-line", dir: "auto" }, brief(first.prompt) || "(no prompt)"),
      el("span", { class: "dim" }, `${first.group_right} of ${first.group_size} right · mean ${short(mean(members.map(([row]) => row.reward)))}${wholeGroup ? "" : ` · ${members.length} shown`}`)),
      members.map(([row, index]) => this.item(row, index, false)));
  }

  item(row, index, flat) {
    const value = this.wanted.sort.startsWith("part:") ? null : row[this.wanted.sort];
    const made = el("div", { class: `item ${row.right ? "right" : "wrong"}`, role: "option", "aria-selected": "false", id: `item-${index}`, onclick: () => this.select(index, true) },
      el("span", { class: "score" }, short(row.reward)),
      el("span", { class: "words", dir: "auto" }, flat && el("span", { class: "dim" }, `${row.step} · ${brief(row.prompt, 40)} → `), brief(row.response) || "(empty)"),
      el("span", { class: "marks" }, value !== undefined && value !== null && this.wanted.sort !== "reward" && el("b", {}, short(value)),
        row.finish_reason === "length" && el("span", { class: "mark bad", title: "cut by the limit" }, "cut"),
        row.filtered && el("span", { class: "mark mid", title: `trains nothing: ${row.filtered}` }, "out")));
    this.items[index] = made;
    return made;
  }

  async select(index, scroll) {
    const row = this.rows[index];
    if (!row) return;
    this.items[this.at]?.setAttribute("aria-selected", "false");
    this.at = index;
    this.items[index].setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", `item-${index}`);
    this.items[index].scrollIntoView({ block: "nearest" });
    this.open = row.sample_id;
    this.remember();
    const asking = ++this.asking;
    try {
      const whole = await source.response(this.state.run, row);
      if (asking !== this.asking) return;
      showTranscript(this.detail, this.state.run, { ...row, ...whole }, this.wanted.search.replaceAll('"', " ").split(/\s+/).filter(Boolean));
      if (scroll && matchMedia("(max-width: 760px)").matches) this.detail.scrollIntoView({ behavior: "smooth" });
    } catch (error) {
      replace(this.detail, el("p", { class: "problem" }, error.message));
    }
  }

  key(name) {
    if (name === "j" || name === "ArrowDown") this.select(Math.min(this.rows.length - 1, (this.at ?? -1) + 1), false);
    else if (name === "k" || name === "ArrowUp") this.select(Math.max(0, (this.at ?? 1) - 1), false);
    else if (name === "ArrowLeft" || name === "h") this.move(-1);
    else if (name === "ArrowRight" || name === "l") this.move(1);
    else if (name === "/") this.search.focus();
    else return false;
    return true;
  }

  // Steps that were added show on the slider; what is looked at stays.
  async refresh() {
    const found = await this.state.steps(this.state.run);
    const wasLast = this.wanted.step === this.last(this.wanted.split) && this.at === 0;
    this.steps = found.steps;
    this.ofSteps = found.of_steps;
    this.problem = found.problem;
    if (wasLast && !this.isFlat() && this.wanted.step !== this.last(this.wanted.split)) {
      this.wanted.step = this.last(this.wanted.split);
      await this.load();
    } else this.showStep();
    return null;
  }
}
