// Shared by every page: data, elements, tokens, numbers, bars, keyboard, theme. Text enters the page only as text.

const data = () => JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

/** An element: h("p", {class: "soft", onclick: f}, "text", child, [children]). Nullish children are left out. */
function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const fill = (element, ...children) => element.replaceChildren(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));

function say(text) {
  byId("live").textContent = text;
}

// Tokens. -------------------------------------------------------------------------------------------------------------

// What cannot be seen: spaces at the ends, controls, separators, marks that change the direction of text.
const HIDDEN = /^ +| +$|[\u0000-\u001f\u007f-\u009f\u00a0\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffe\uffff]/g;

function shown(character) {
  const code = character.charCodeAt(0);
  if (character[0] === " ") return "␣".repeat(character.length);
  if (character === "\n") return "↵";
  if (character === "\t") return "⇥";
  if (code < 32) return String.fromCharCode(0x2400 + code);
  if (code === 127) return "␡";
  return `⟨${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** A token as text on one line, hidden characters made visible: for labels that are attributes. */
const plain = (text) => (text === "" ? "∅" : text.replace(HIDDEN, shown));

/** A token as an element; `cut` shortens long ones with an ellipsis, the whole is in its title. */
function token(text, cut = true) {
  const out = h("bdi", { class: cut ? "token cut" : "token", title: text.length > 14 ? plain(text) : null });
  if (text === "") out.append(h("i", {}, "∅"));
  let last = 0;
  for (const match of text.matchAll(HIDDEN)) {
    out.append(text.slice(last, match.index), h("i", {}, shown(match[0])));
    last = match.index + match[0].length;
  }
  out.append(text.slice(last));
  return out;
}

// Numbers. ------------------------------------------------------------------------------------------------------------

const known = (value) => typeof value === "number";
const minus = (text) => text.replace("-", "−");

/** +1.23, −0.40; "–" when there is none. */
function signed(value, decimals = 2) {
  if (!known(value)) return "–";
  return minus((value < 0 ? "" : "+") + value.toFixed(decimals));
}

/** Three significant digits. */
function short(value, digits = 3) {
  if (!known(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return minus(value.toExponential(digits - 1).replace("e+", "e").replace("e-", "e−"));
  return size >= 10 ** digits ? minus(Math.round(value).toLocaleString("en-US")) : minus(value.toPrecision(digits));
}

function percent(value) {
  if (!known(value)) return "–";
  const hundred = 100 * value;
  if (value > 0 && hundred < 0.01) return "<0.01\u202f%";
  return `${hundred.toFixed(hundred < 1 ? 2 : hundred < 99.95 ? 1 : 0)}\u202f%`;
}

const whole = (value) => (known(value) ? value.toLocaleString("en-US") : "–");
const sum = (values) => values.reduce((total, value) => total + (known(value) ? value : 0), 0);
/** Decimals that show three digits of the largest of `values`. */
const decimals = (values) => Math.max(0, Math.min(4, 2 - Math.floor(Math.log10(Math.max(1e-3, ...values.map((value) => Math.abs(value || 0)))))));

// Bars. ---------------------------------------------------------------------------------------------------------------

/** A scale over `values` that holds zero: {zero, place(value)} in per cent of the width. */
function scale(values) {
  const low = Math.min(0, ...values.filter(known));
  const high = Math.max(0, ...values.filter(known));
  const span = high - low || 1;
  return { low, high, zero: (-low / span) * 100, place: (value) => ((value - low) / span) * 100 };
}

/** A bar from zero to `value`; `kind` "size" for what has no sign. */
function bar(value, on, kind = value < 0 ? "down" : "up") {
  const box = h("div", { class: "bar", "aria-hidden": "true", "--zero": `${on.zero}%` });
  if (known(value) && value !== 0) {
    const [from, to] = [Math.min(0, value), Math.max(0, value)].map(on.place);
    box.append(h("i", { class: kind, "--at": `${from}%`, "--long": `${to - from}%` }));
  }
  return box;
}

// Keyboard. -----------------------------------------------------------------------------------------------------------

/** One tab stop for many elements: arrow keys, Home and End move among `items()`; `columns` > 1 makes it a grid.
    `moved(item)` is called after a move. Returns a function that makes one of them the tab stop. */
function roving(box, items, { columns = () => 1, both = false, moved = () => {} } = {}) {
  const stop = (chosen) => {
    for (const item of items()) item.tabIndex = item === chosen ? 0 : -1;
  };
  box.addEventListener("keydown", (event) => {
    const all = items();
    const at = all.indexOf(event.target);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const wide = columns();
    const steps = { ArrowDown: wide, ArrowUp: -wide };
    if (both || wide > 1) Object.assign(steps, { ArrowRight: 1, ArrowLeft: -1 });
    let to = at + (steps[event.key] ?? NaN);
    if (event.key === "Home") to = 0;
    if (event.key === "End") to = all.length - 1;
    if (!(to >= 0 && to < all.length)) {
      if (event.key in steps) event.preventDefault();
      return;
    }
    event.preventDefault();
    stop(all[to]);
    all[to].focus();
    moved(all[to]);
  });
  box.addEventListener("focusin", (event) => items().includes(event.target) && stop(event.target));
  return stop;
}

// Theme: the system's, until the button is used; kept where the browser lets a page keep something. ------------------

function theme() {
  const button = byId("theme");
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const label = () => (button.textContent = dark() ? "Light theme" : "Dark theme");
  try {
    const kept = localStorage.getItem("fanfold-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch {
    // A sandboxed frame keeps nothing.
  }
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    label();
    try {
      localStorage.setItem("fanfold-theme", root.dataset.theme);
    } catch {
      // As above.
    }
  });
  system.addEventListener("change", label);
  label();
}
theme();
