// Where the page's data comes from: its server, or the element `data` of a single file. Both answer the same questions:
//   info()                 {title, tiles, runs: [{name}], live, written, position}
//   overview(run)          what nemorl_cli.report.viewing.overview makes of it; extra(run) likewise
//   steps(run)             {steps, of_steps, parts}: summaries of the recorded steps
//   responses(run, wanted) {total, rows}; wanted: {split, step, only, search, sort, descending, limit, offset}
//   response(run, row)     one record whole
//   media(run, item)       {small, full}: addresses of a thumbnail, or of a sound to play, and of the file; or null
//   differences(run, other) settings of two runs
//   listen(from, told)     calls told({kind, run, …}) when something is added

const NAMES = ["reward", "advantage", "kl", "mismatch", "gradient", "tokens", "prompt_tokens", "total_tokens", "num_turns", "began_s", "seconds"];

async function asked(path, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const answer = await fetch(`api/${path}?${query}`);
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error ?? answer.statusText);
  return data;
}

function served() {
  return {
    info: () => asked("info"),
    overview: (run) => asked(`runs/${run}/overview`),
    extra: (run) => asked(`runs/${run}/extra`),
    steps: (run) => asked(`runs/${run}/steps`),
    responses: (run, wanted) => asked(`runs/${run}/responses`, { ...wanted, only: wanted.only.join(",") }),
    response: (run, row) => asked(`runs/${run}/response`, { split: row.split, step: row.step, id: row.sample_id }),
    media(run, item) {
      const full = `api/runs/${run}/media/${encodeURIComponent(item.digest)}`;
      return { small: item.kind === "image" ? `${full}?small=1` : full, full };
    },
    differences: (run, other) => asked(`runs/${run}/differences`, { other }),
    listen(from, told) {
      const stream = new EventSource(`api/stream?from=${encodeURIComponent(from)}`);
      stream.onmessage = (message) => told(JSON.parse(message.data));
      stream.onopen = () => told({ kind: "connected" });
      stream.onerror = () => told({ kind: "disconnected" });
    },
  };
}

const TESTS = {
  all_wrong: (row) => row.group_right === 0,
  all_right: (row) => row.group_right === row.group_size,
  mixed: (row) => row.group_right > 0 && row.group_right < row.group_size,
  wrong: (row) => !row.right,
  truncated: (row) => row.finish_reason === "length",
  filtered: (row) => row.filtered !== null,
};

function sortValue(row, sort) {
  if (NAMES.includes(sort)) return row[sort];
  const name = sort.replace(/^part:/, "");
  return (name.startsWith("metrics/") ? row.metrics[name.slice(8)] : row.components[name]) ?? null;
}

export function chosen(records, wanted) {
  const words = [...wanted.search.matchAll(/"([^"]*)"?|([^\s"]+)/g)].map((found) => (found[1] ?? found[2]).toLowerCase());
  const holds = (row) => {
    const text = [row.prompt, row.response, row.answer, ...row.turns.map((turn) => turn.text)].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const rows = records.filter((row) => (!wanted.split || row.split === wanted.split)
    && (wanted.step === null || row.step === wanted.step)
    && wanted.only.every((name) => TESTS[name](row)) && (!words.length || holds(row)));
  if (wanted.sort) {
    const sign = wanted.descending ? -1 : 1;
    rows.sort((a, b) => {
      const [one, other] = [sortValue(a, wanted.sort), sortValue(b, wanted.sort)];
      if (one === null || other === null) return (one === null) - (other === null);
      return sign * (one - other);
    });
  }
  return rows;
}

function inside(data) {
  const found = async (value) => value;
  const partsOf = (run) => [...new Set(data.runs[run].records.flatMap((row) => [
    ...Object.keys(row.components), ...Object.keys(row.metrics).map((name) => `metrics/${name}`)]))].sort();
  return {
    info: () => found({ ...data, live: false, position: "", runs: data.runs.map(({ name }) => ({ name })) }),
    overview: (run) => found(data.runs[run].overview),
    extra: (run) => found(data.runs[run].extra),
    steps: (run) => found({ steps: data.runs[run].steps, of_steps: data.runs[run].of_steps, parts: partsOf(run) }),
    responses(run, wanted) {
      const rows = chosen(data.runs[run].records, wanted);
      return found({ total: rows.length, rows: rows.slice(wanted.offset, wanted.offset + wanted.limit) });
    },
    response: (run, row) => found(data.runs[run].records.find((one) => one.sample_id === row.sample_id
      && one.split === row.split && one.step === row.step)),
    media: (run, item) => data.runs[run].media?.[item.digest] ?? { small: null, full: null },
    differences: () => Promise.reject(new Error("two runs are compared by `nemorl view` and `nemorl compare`")),
    listen() {},
  };
}

const embedded = document.getElementById("data");
export const source = embedded ? inside(JSON.parse(embedded.textContent)) : served();
