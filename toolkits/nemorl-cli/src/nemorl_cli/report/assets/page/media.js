// Images and sounds that a response shows: small beside its text, whole when clicked; their tokens are one chip.
import { el } from "./dom.js";
import { source } from "./source.js";

const TINY = 96; // pixels of an image that is shown larger, each pixel by itself

const named = (item) => [item.kind, item.size, `${item.digest.slice(0, 4)}…`].filter(Boolean).join(" ");

// The item itself, or its name where the page has no more than that.
export function mediaOf(run, item) {
  const { small, full } = source.media(run, item), away = { href: full, target: "_blank", rel: "noreferrer" };
  const name = () => el("span", { class: "dim" }, named(item));
  if (!small) return full ? el("a", away, named(item)) : name();
  if (item.kind === "audio") return el("audio", { controls: true, preload: "none", src: small, "aria-label": named(item) });
  const image = el("img", {
    class: "thumb", src: small, alt: named(item), title: named(item),
    onload: () => image.classList.toggle("tiny", Math.max(image.naturalWidth, image.naturalHeight) <= TINY),
    onerror: () => image.replaceWith(name()),
  });
  return full ? el("a", { ...away, "aria-label": `${named(item)}, in full size` }, image) : image;
}

// An item among the text or the tokens of a turn.
export function shownItem(run, item, tokens) {
  return el("span", { class: "shown-item" }, mediaOf(run, item),
    el("span", { class: "chip", title: named(item) }, `[${item.kind} ${tokens} token${tokens === 1 ? "" : "s"}]`));
}

// The items of a prompt in one line, where it is named; null where it shows none.
export function strip(run, items) {
  return items?.length > 0 && el("span", { class: "strip" }, items.map((item) => mediaOf(run, item)));
}
