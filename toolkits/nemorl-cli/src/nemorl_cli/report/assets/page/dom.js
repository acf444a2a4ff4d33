// Elements, text and numbers. Whatever a run says becomes a text node here, and never markup.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

// Control characters, and those that turn the direction of what follows, as escapes.
export function visible(text) {
  return String(text).replace(HIDDEN, (found) => {
    const code = found.charCodeAt(0).toString(16);
    return code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
  });
}

// An element. `props`: class, title, on* listeners, others are attributes; false and null leave one out.
export function el(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) {
      made.setAttribute(name, value === true ? "" : visible(value));
    }
  }
  put(made, ...children);
  return made;
}

export function put(parent, ...children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return parent;
}

export function replace(parent, ...children) {
  parent.replaceChildren();
  return put(parent, ...children);
}

// A number for people: four significant digits, a dash where there is none.
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 7 : 4, maximumFractionDigits: 4 });
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value === 1 || value === 0 ? 0 : 1)}%`);

export function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

// The beginning of a text on one line.
export function brief(text, most = 120) {
  const line = String(text ?? "").slice(0, 2 * most).replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most)}…` : line;
}

export function choice(options, value, onchange, label) {
  const made = el("select", { "aria-label": label, onchange: () => onchange(made.value) });
  for (const [name, said] of options) put(made, el("option", { value: name }, said));
  made.value = value;
  return made;
}

export function later(call, wait) {
  let timer = null;
  return () => {
    timer ??= setTimeout(() => { timer = null; call(); }, wait);
  };
}

export const cssValue = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
