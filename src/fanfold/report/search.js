// Search over the prompt's tokens, channels ("12:345"), what values promote and suppress, and triggers.

const MOST = 7; // results of each kind

function searchIndex() {
  const low = (text) => text.toLowerCase();
  return {
    tokens: doc.tokens.map((one, at) => ({ text: low(one.text), at })),
    values: Object.entries(doc.values ?? {}).map(([key, value]) => ({ key, promoted: (value.promoted ?? []).map(([text]) => low(text)), suppressed: (value.suppressed ?? []).map(([text]) => low(text)) })),
    triggers: Object.entries(doc.triggers ?? {}).flatMap(([key, kept]) => [...(kept.positive ?? []), ...(kept.negative ?? [])].map((one) => ({ key, one, text: low(one.text.map(([text]) => text).join("")) }))),
  };
}

/** What a query finds: [{go, what, why}], exact matches before partial ones. */
function find(index, query) {
  const wanted = query.trim().toLowerCase();
  if (!wanted) return [];
  const channel = (key, why) => ({ go: () => chooseChannel(key, true), what: key, why });
  if (/^\d+:\d*$/.test(wanted)) return index.values.filter(({ key }) => key.startsWith(wanted)).sort((a, b) => a.key.length - b.key.length).slice(0, 2 * MOST).map(({ key }) => channel(key, ["value: ", tokenList((doc.values[key].promoted ?? []).slice(0, 4).map(([text]) => text))]));
  const places = index.tokens.filter(({ text }) => text.includes(wanted)).slice(0, MOST).map(({ at }) => ({ go: () => (choosePosition(at), focusPosition()), what: token(doc.tokens[at].text), why: `token ${at} of the prompt`, off: !explained(at) }));
  const end = (name) => index.values
    .map(({ key, [name]: texts }) => ({ key, at: texts.findIndex((text) => text.includes(wanted)), texts }))
    .filter(({ at }) => at >= 0)
    .sort((a, b) => (a.texts[a.at].trim() === wanted ? 0 : 1) - (b.texts[b.at].trim() === wanted ? 0 : 1) || a.at - b.at)
    .slice(0, MOST)
    .map(({ key, at }) => channel(key, [`its value ${name === "promoted" ? "promotes" : "suppresses"} `, token(doc.values[key][name][at][0], false)]));
  const said = index.triggers.filter(({ text }) => text.includes(wanted)).slice(0, MOST).map(({ key, one }) => channel(key, ["fires at ", excerpt(one.text)]));
  return [...places, ...end("promoted"), ...end("suppressed"), ...said];
}

function startSearch() {
  const index = searchIndex();
  const input = byId("find");
  const list = byId("found");
  let results = [];
  let at = -1;

  const mark = (to) => {
    at = to;
    [...list.children].forEach((item, i) => item.setAttribute("aria-selected", String(i === at)));
    if (at >= 0) {
      list.children[at].scrollIntoView({ block: "nearest" });
      input.setAttribute("aria-activedescendant", `found-${at}`);
    } else input.removeAttribute("aria-activedescendant");
  };
  const close = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    mark(-1);
  };
  const take = (i) => {
    if (!results[i] || results[i].off) return;
    close();
    results[i].go();
  };
  const look = () => {
    const query = input.value;
    results = find(index, query);
    if (!query.trim()) return close();
    const nothing = h("li", { class: "none", role: "option", "aria-disabled": "true" }, `Nothing found. Searched: the prompt, the ${whole(index.values.length)} channels kept here, their tokens${doc.triggers ? " and triggers" : ""}.`);
    fill(list, results.length ? results.map((one, i) => h("li", { id: `found-${i}`, role: "option", onclick: () => take(i) }, h("span", { class: "what" }, one.what), h("span", { class: "why" }, one.why))) : nothing);
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    say(`${results.length} found`);
    mark(results.length ? 0 : -1);
  };
  input.addEventListener("input", look);
  input.addEventListener("focus", () => input.value.trim() && look());
  input.addEventListener("blur", (event) => !list.contains(event.relatedTarget) && close());
  list.addEventListener("pointerdown", (event) => event.preventDefault()); // keeps the focus in the box until the click
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if (!list.hidden) event.stopPropagation();
      close();
    } else if (event.key === "Enter") take(at);
    else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && results.length && !list.hidden) {
      event.preventDefault();
      mark((at + (event.key === "ArrowDown" ? 1 : -1) + results.length) % results.length);
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(event.target.tagName) && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      input.focus();
    } else if (event.key === "Escape") closeCard();
  });
}
