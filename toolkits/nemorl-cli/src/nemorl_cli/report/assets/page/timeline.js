// One step: seconds of its phases, and its responses side by side, by time, with the weights that made them.
import { hue, placesOf, swatch } from "./colours.js";
import { choice, el, replace, short } from "./dom.js";
import { source } from "./source.js";

export async function showTimeline(place, state) {
  const [{ steps }, overview] = await Promise.all([state.steps(state.run), state.overview(state.run)]);
  const own = steps.filter((step) => step.split === "train");
  if (!own.length) {
    replace(place, el("p", { class: "empty" }, "No training rollouts were recorded, or none yet."));
    return async () => showTimeline(place, state);
  }
  const asked = own.findIndex((step) => step.step === Number(state.params.step));
  let index = asked < 0 ? own.length - 1 : asked;
  const slider = el("input", { type: "range", min: "0", max: String(own.length - 1), "aria-label": "Step" }), number = el("output", {});
  const body = el("div", {});
  let order = "";
  const draw = async () => {
    const { step } = own[index];
    slider.value = String(index);
    replace(number, `step ${step}`);
    state.remember({ step });
    const found = await source.responses(state.run, { split: "train", step, only: [], search: "", sort: order, descending: order !== "began_s", limit: 512, offset: 0 });
    if (own[index].step === step) replace(body, phasesOf(overview.time.chart, step), rowsOf(found, step, state));
  };
  slider.addEventListener("input", () => { index = Number(slider.value); draw(); });
  replace(place, el("div", { class: "tools" }, el("span", { class: "stepper" }, slider, number),
    el("label", {}, "Sort ", choice([["", "by group"], ["began_s", "by beginning"], ["seconds", "by seconds"], ["total_tokens", "by tokens"], ["reward", "by reward"]], "", (value) => { order = value; draw(); }, "Sort by"))), body);
  await draw();
  const key = (name) => {
    if (name !== "ArrowLeft" && name !== "ArrowRight") return false;
    index = Math.max(0, Math.min(own.length - 1, index + (name === "ArrowLeft" ? -1 : 1)));
    draw();
    return true;
  };
  return Object.assign(async () => null, { key });
}

function phasesOf(chart, step) {
  const at = chart ? chart.steps.indexOf(step) : -1;
  if (at < 0) return el("p", { class: "empty" }, "No seconds of this step's phases are drawn here.");
  const places = placesOf(chart.series.map(({ label }) => label));
  const phases = chart.series.map(({ label, values }, index) => ({ label, seconds: values[at], place: places[index] })).filter(({ seconds }) => seconds > 0);
  const whole = phases.reduce((sum, { seconds }) => sum + seconds, 0);
  const bar = el("div", { class: "bar" }, phases.map(({ label, seconds, place }) => {
    const part = swatch(hue(place), { title: `${label}: ${short(seconds)} s` });
    part.style.width = `${(100 * seconds) / whole}%`;
    return part;
  }));
  return el("section", {}, el("h2", {}, `Seconds of the step: ${short(whole)}`), bar, el("div", { class: "chips" },
    phases.map(({ label, seconds, place }) => el("span", { class: "chip" }, swatch(hue(place), { class: "dot" }), `${label} `, el("b", {}, `${short(seconds)} s`)))));
}

function rowsOf({ rows, total }, step, state) {
  const timed = rows.filter((row) => row.seconds !== null && row.seconds !== undefined);
  const versions = [...new Set(rows.flatMap((row) => row.weight_versions ?? []))].sort((a, b) => a - b);
  const painted = (used) => {
    const shades = (used.length ? used : versions).map(hue);
    return shades.length > 1 ? `linear-gradient(90deg, ${shades.join(", ")})` : `linear-gradient(${shades[0]}, ${shades[0]})`;
  };
  const drawn = timed.length ? byTime(timed, painted) : byTokens(rows, painted);
  return el("section", {}, el("h2", {}, `Responses of the step (${rows.length}${total > rows.length ? ` of ${total}` : ""})`),
    el("p", { class: "empty" }, drawn.told, " Colour is the version of the weights; where several made one response, from the oldest to the newest:"),
    el("div", { class: "chips" }, versions.map((version) => el("span", { class: "chip" }, swatch(hue(version), { class: "dot" }), `weights ${version}`)), drawn.kinds),
    el("div", { class: "lanes" }, drawn.axis, rows.map((row) => laneOf(row, drawn.parts(row), step, state))));
}

// Seconds since the step began; where rollouts run ahead of it, from before.
function byTime(rows, painted) {
  const first = Math.min(0, ...rows.map((row) => row.began_s)), last = Math.max(...rows.map((row) => row.ended_s), first + 1e-3);
  const seconds = rows.map((row) => row.seconds).sort((a, b) => a - b), share = (moment) => (100 * (moment - first)) / (last - first);
  const place = (part, from, to) => {
    part.style.left = `${share(from)}%`;
    part.style.width = `${share(to) - share(from)}%`;
    return part;
  };
  const parts = (row) => {
    if (row.seconds === null || row.seconds === undefined) return [];
    const made = (row.spans ?? []).map(([own, from, to]) => {
      const part = place(el("i", { class: own ? "own" : "asked" }), from, to), whole = row.ended_s - row.began_s, rest = whole - (to - from);
      if (own) {
        part.style.background = painted(row.weight_versions ?? []);
        part.style.backgroundSize = `${(100 * whole) / Math.max(to - from, 1e-9)}% 100%`;
        part.style.backgroundPosition = `${rest > 0 ? (100 * (from - row.began_s)) / rest : 0}% 0`;
      }
      return part;
    });
    return [place(el("i", { class: "whole" }), row.began_s, row.ended_s), made];
  };
  const longest = seconds[seconds.length - 1], median = seconds[Math.floor(seconds.length / 2)];
  return {
    parts,
    told: `Left to right is time: seconds since the step began. Episodes took ${short(median)} s in the median, ${short(longest)} s at most; the last was scored at ${short(last)} s.`,
    kinds: [el("span", { class: "chip" }, el("i", { class: "dot asked" }), "environment"), el("span", { class: "chip" }, el("i", { class: "dot whole" }), "waits, or is scored")],
    axis: axisOf(first, last, share),
  };
}

function axisOf(first, last, share) {
  const rough = (last - first) / 5, size = 10 ** Math.floor(Math.log10(rough)), each = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= rough);
  const ticks = [];
  for (let number = Math.ceil(first / each - 1e-9); number * each <= last; number++) ticks.push(number * each);
  return el("div", { class: "lane axis", "aria-hidden": "true" }, el("span", { class: "track" }, ticks.map((tick) => {
    const mark = el("span", { class: tick === 0 ? "tick begin" : "tick" }, tick === 0 && first < 0 ? "step begins" : `${short(Number(tick.toPrecision(6)))} s`);
    mark.style.left = `${share(tick)}%`;
    return mark;
  })), el("span", { class: "told" }));
}

// Records of versions that kept no times.
function byTokens(rows, painted) {
  const longest = Math.max(1, ...rows.map((row) => row.total_tokens ?? 0)), share = (tokens) => (100 * tokens) / longest;
  const parts = (row) => {
    const prompt = el("i", { class: "asked" }), wrote = el("i", { class: "own" }), before = row.prompt_tokens ?? 0;
    prompt.style.width = `${share(before)}%`;
    wrote.style.left = `${share(before)}%`;
    wrote.style.width = `${share(Math.max(0, (row.total_tokens ?? 0) - before))}%`;
    wrote.style.background = painted(row.weight_versions ?? []);
    return [prompt, wrote];
  };
  return { parts, axis: null, kinds: [el("span", { class: "chip" }, el("i", { class: "dot asked" }), "prompt")],
    told: `Left to right are tokens, ${longest.toLocaleString("en")} at most: these records hold no times.` };
}

function laneOf(row, parts, step, state) {
  const used = row.weight_versions ?? [], took = row.seconds === null || row.seconds === undefined ? "" : `, from ${short(row.began_s)} to ${short(row.ended_s)} s`;
  const said = `${row.sample_id}: ${row.prompt_tokens} tokens of prompt, ${row.tokens} of the policy, ${row.num_turns} turns, reward ${short(row.reward)}, weights ${used.join(", ")}${took}`;
  return el("a", { class: `lane ${row.right ? "right" : "wrong"}`, title: said, "aria-label": said, href: state.link("samples", { split: row.split, step, id: row.sample_id }) },
    el("span", { class: "track" }, parts),
    el("span", { class: "told" }, row.filtered && el("span", { class: "mark mid" }, row.filtered.replace("_", " ")),
      row.finish_reason === "length" && el("span", { class: "mark bad" }, "cut"), row.num_turns > 1 && el("span", { class: "dim" }, `${row.num_turns} turns`)));
}
