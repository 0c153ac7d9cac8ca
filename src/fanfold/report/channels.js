// The strongest channels at the chosen token, over all layers or of one layer.

const PAGE = 12;

/** Every channel kept at the chosen token, strongest first. */
function channelsHere() {
  const strength = effects() ? (one) => Math.abs(one.effect ?? 0) : (one) => one.size ?? 0;
  return position().layers
    .filter((layer) => state.layer === null || layer.layer === state.layer)
    .flatMap((layer) => layer.channels.map((one) => ({ ...one, layer: layer.layer, key: `${layer.layer}:${one.channel}` })))
    .sort((a, b) => strength(b) - strength(a));
}

/** The tokens that a channel raises and lowers at this token: its value's ends, exchanged when the coefficient is
    negative. */
function pushes(one) {
  const value = doc.values?.[one.key];
  if (!value) return null;
  const ends = [value.promoted ?? [], value.suppressed ?? []].map((pairs) => pairs.map((pair) => pair[0]));
  return one.coefficient < 0 ? { raises: ends[1], lowers: ends[0] } : { raises: ends[0], lowers: ends[1] };
}

function drawChannels() {
  const here = position();
  fill(byId("channels-lead"), effects()
    ? ["Ordered by their effect on ", token(here.token.text), ". The tokens are what the channel raises and lowers here, its sign taken into account."]
    : "Ordered by size |m| · ‖v‖. The tokens are what the channel raises and lowers here, its sign taken into account.");
  const choice = (text, on, layer) => h("button", { type: "button", "aria-pressed": String(on), onclick: () => chooseLayer(layer) }, text);
  fill(byId("channels-choice"), state.layer !== null && [choice("All layers", false, null), choice(`Layer ${state.layer}`, true, state.layer)]);
  const all = channelsHere();
  fill(byId("channels"), all.length ? channelTable(all) : h("p", { class: "soft" }, "No channels were kept here."));
}

function channelTable(all) {
  const measure = effects() ? "effect" : "size";
  const on = scale(all.map((one) => one[measure]));
  const digits = decimals(all.map((one) => one[measure]));
  const rows = all.map((one, index) => channelRow(one, index >= PAGE && state.shown <= PAGE, measure, on, digits));
  const head = h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "index" }, "Channel"),
    h("th", { scope: "col", class: "amount number" }, measure), h("th", { class: "bars" }),
    h("th", { scope: "col", class: "coefficient amount number" }, "coeff."),
    h("th", { scope: "col", class: "pushes" }, "raises and lowers here"),
    doc.triggers && h("th", { scope: "col", class: "said" }, "strongest trigger")));
  const table = h("table", { class: "channels", "aria-labelledby": "channels-title" }, head, h("tbody", {}, rows));
  const stop = roving(table, () => [...table.querySelectorAll("tr:not([hidden]) button")]);
  stop(table.querySelector("button"));
  const more = all.length > PAGE && h("button", { type: "button", class: "quiet more", onclick: () => {
    state.shown = state.shown > PAGE ? PAGE : all.length;
    drawChannels();
    byId("channels").querySelector(".more").focus();
  } }, state.shown > PAGE ? "Show fewer" : `Show all ${all.length} kept at this token`);
  return [table, more];
}

function channelRow(one, hidden, measure, on, digits) {
  const push = pushes(one);
  const text = measure === "effect" ? signed(one.effect, digits) : short(one.size);
  const line = (sign, name, tokens) => h("div", { class: "line" }, h("span", { class: `sign ${name}`, "aria-label": sign === "+" ? "raises" : "lowers" }, sign),
    tokens.length ? tokens.slice(0, 8).map((each) => token(each, false)) : "–");
  return h("tr", { "data-channel": one.key, hidden, class: state.channel === one.key ? "chosen" : null, onclick: () => chooseChannel(one.key) },
    h("td", { class: "index" }, h("button", { type: "button", "aria-label": `Channel ${one.key}, ${measure} ${text}` }, one.key)),
    h("td", { class: "amount number" }, text),
    h("td", { class: "bars" }, bar(one[measure], on, measure === "size" ? "size" : undefined)),
    h("td", { class: "coefficient amount number soft" }, short(one.coefficient)),
    h("td", { class: "pushes" }, push ? [line("+", "up", push.raises), line("−", "down", push.lowers)] : h("span", { class: "soft" }, "value not read")),
    doc.triggers && h("td", { class: "said" }, strongest(one)));
}

/** The first trigger of the end at which the channel fires here. */
function strongest(one) {
  const kept = doc.triggers[one.key];
  const first = kept && (one.coefficient < 0 ? kept.negative : kept.positive)?.[0];
  return first ? excerpt(brief(first.text)) : h("span", { class: "soft" }, "–");
}

/** Only the nearest words beside the peak token, for a table. */
function brief(pieces) {
  const peak = pieces.findIndex((piece) => piece[1]);
  return pieces.map(([text, is], i) => {
    if (is || peak < 0) return [text, is];
    const line = text.replace(/\s+/g, " ");
    if (i < peak) return [line.length > 48 ? `…${line.slice(-46).replace(/^\S*\s/, "")}` : line, false];
    return [line.length > 24 ? `${line.slice(0, 22).replace(/\s\S*$/, "")}…` : line, false];
  });
}

/** A trigger's context on one line, the peak token marked. */
function excerpt(pieces) {
  const start = pieces.findIndex(([text, peak]) => peak || text.trim());
  return h("bdi", { class: "trigger" }, pieces.slice(Math.max(0, start)).map(([whole, peak], i) => {
    const text = i || peak ? whole : whole.trimStart();
    // Running text: spaces are spaces; only what else cannot be seen is made visible.
    return peak ? h("mark", {}, ...token(text, false).childNodes) : text.replace(HIDDEN, (found) => (found[0] === " " ? found : shown(found)));
  }));
}
