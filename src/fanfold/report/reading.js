// The page of a reading: what is chosen (token, layer, channel), and everything that is not layers, channels or heat.

const doc = data();
const state = { index: doc.positions.length - 1, layer: null, channel: null, shown: PAGE };

const position = () => doc.positions[state.index];
const effects = () => doc.effects !== false;
const explained = (at) => doc.positions.some((one) => one.position === at);

function choosePosition(at) {
  const index = doc.positions.findIndex((one) => one.position === at);
  if (index < 0 || index === state.index) return;
  state.index = index;
  state.shown = PAGE;
  draw();
  const top = position().predictions?.[0];
  say(`Token ${at}, ${plain(doc.tokens[at].text)}${top ? `: first prediction ${plain(top.text)}, ${percent(top.p)}` : ""}`);
}

/** One layer's channels, or all of them for null. The focus stays on what was used, which is drawn anew. */
function chooseLayer(layer) {
  const held = document.activeElement?.closest("#layers, #channels-choice")?.id;
  state.layer = layer;
  state.shown = PAGE;
  drawLayers();
  drawLayer();
  drawChannels();
  markHeat();
  markSelective();
  if (held === "layers") byId("layers").querySelector("button[tabindex='0']")?.focus({ preventScroll: true });
  if (held === "channels-choice") (byId("channels-choice").querySelector("button") ?? byId("channels").querySelector("button"))?.focus({ preventScroll: true });
}

function chooseChannel(key) {
  state.channel = key;
  for (const row of byId("channels").querySelectorAll("tbody tr")) row.classList.toggle("chosen", row.dataset.channel === key);
  drawCard();
  openCard(true);
}

function drawPrompt() {
  const box = byId("prompt");
  fill(box, doc.tokens.map((one, at) => h("button", { type: "button", role: "radio", "aria-checked": "false", "data-at": at, disabled: !explained(at), "aria-label": `token ${at}: ${plain(one.text)}`, onclick: () => choosePosition(at) },
    token(one.text), h("small", {}, at))));
  const items = () => [...box.querySelectorAll("button:not(:disabled)")];
  promptStop = roving(box, items, { both: true, moved: (item) => choosePosition(Number(item.dataset.at)) });
}
let promptStop = () => {};

const focusPosition = () => byId("prompt").querySelector("[aria-checked='true']").focus();

function markPrompt() {
  for (const item of byId("prompt").children) item.setAttribute("aria-checked", String(Number(item.dataset.at) === position().position));
  promptStop(byId("prompt").querySelector("[aria-checked='true']"));
}

/** The finding in words: the prediction, since which layer it leads, who pushed most. */
function verdict() {
  const here = position();
  const top = here.predictions?.[0];
  const out = [];
  if (top) out.push("At ", token(doc.tokens[here.position].text), " the first prediction is ", token(top.text), `, with ${percent(top.p)}. `);
  if (!effects() || !here.token) return out;
  const decided = decidedAt(here.layers);
  const last = here.layers.at(-1)?.rank;
  if (top && top.id !== here.token.id) out.push("Explained is ", token(here.token.text), known(last) ? `, at rank ${whole(last)}. ` : ". ");
  if (decided !== null) out.push(decided === here.layers[0].layer ? "It leads after every layer. " : decided === here.layers.at(-1).layer ? h("span", {}, "It takes the lead in the last layer, ", h("b", {}, `${decided}`), ". ") : h("span", {}, "It leads from ", h("b", {}, `layer ${decided}`), " on. "));
  const parts = here.layers.flatMap((layer) => [["the FFN of layer", layer.layer, layer.ffn], ["attention in layer", layer.layer, layer.attention]]);
  const best = parts.filter(([, , effect]) => effect > 0).sort((a, b) => b[2] - a[2]).slice(0, 2);
  if (best.length) out.push("Pushed most by ", best.map(([what, layer, effect], i) => [i ? " and " : "", `${what} ${layer} (${signed(effect)})`]), ".");
  return out;
}

function drawPrediction() {
  const here = position();
  fill(byId("verdict"), verdict());
  const rows = here.predictions ?? [];
  const on = scale([0, ...rows.map((one) => one.p)]);
  byId("prediction").hidden = !rows.length && !effects();
  fill(byId("predictions"), rows.length > 0 && h("table", {}, h("caption", {}, "Predictions"), h("tbody", {}, rows.map((one) => h("tr", { class: one.id === here.token?.id ? "chosen" : null },
    h("td", { class: "name" }, token(one.text)), h("td", {}, bar(one.p, on, "size")), h("td", { class: "amount number" }, percent(one.p)))))));
  fill(byId("parts"), effects() && here.token && partsTable(here));
}

function partsTable(here) {
  const attention = sum(here.layers.map((layer) => layer.attention));
  const ffn = sum(here.layers.map((layer) => layer.ffn));
  const all = [["Embedding", here.embedding], ["Attention", attention], ["FFNs", ffn], ["Constant", here.constant || null]].filter(([, value]) => known(value));
  const on = scale(all.map(([, value]) => value));
  const strongest = here.layers.flatMap((layer) => layer.channels).sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect)).slice(0, 10);
  const side = (sign) => sum(strongest.map((one) => Math.max(0, sign * one.effect))) * sign;
  const row = ([name, value]) => h("tr", {}, h("td", { class: "name" }, name), h("td", {}, bar(value, on)), h("td", { class: "amount number" }, signed(value)));
  return [h("table", {}, h("caption", {}, "Where its logit, less the mean, comes from"), h("tbody", {}, all.map(row)),
    h("tfoot", {}, h("tr", {}, h("td", { class: "name" }, "Sum"), h("td", { class: "soft small" }, logitCheck(here)), h("td", { class: "amount number" }, h("b", {}, signed(here.sum)))))),
  strongest.length > 0 && h("p", { class: "soft small more" }, `Of the FFNs’ ${signed(ffn)}: among the ${strongest.length} strongest channels, those that raise it add ${signed(side(1))}, those that lower it ${signed(side(-1))}.`)];
}

/** Does the sum of the parts give the model's own logit? */
function logitCheck(here) {
  if (!known(here.total) || !known(here.sum)) return null;
  const off = Math.abs(here.sum - here.total);
  return off <= 2e-3 * Math.max(1, Math.abs(here.total)) ? "✓ as the model’s" : h("b", { class: "down" }, `⚠ the model’s is ${signed(here.total)}`);
}

function drawNotes() {
  const rules = doc.sum_rule ?? [];
  const broken = rules.filter((rule) => !rule.holds);
  const item = (sign, bad, text) => h("li", { class: bad ? "bad" : null }, h("span", { class: "sign", "aria-hidden": "true" }, sign), h("span", {}, text));
  const largest = rules.reduce((worst, rule) => (!worst || rule.error / rule.allowed > worst.error / worst.allowed ? rule : worst), null);
  const out = [];
  if (rules.length && !broken.length) out.push(item("✓", false, `Channels and bias add up to the FFN’s output in ${rules.length === 1 ? "the one layer" : `all ${rules.length} layers`} (largest error ${short(largest.error, 2)}, allowed ${short(largest.allowed, 2)}).`));
  byId("broken").hidden = !broken.length;
  byId("broken").textContent = `⚠ In ${broken.length === 1 ? "one layer" : `${broken.length} layers`} the channels do not add up to the FFN’s output: ${broken.map((rule) => rule.layer).join(", ")}. Their numbers cannot be trusted.`;
  for (const rule of broken) out.push(item("⚠", true, `In layer ${rule.layer} the channels do not add up to the FFN’s output (error ${short(rule.error, 2)}, allowed ${short(rule.allowed, 2)}).`));
  out.push(...(doc.notes ?? []).filter((text) => effects() || !text.includes(doc.effects_why_not)).map((text) => item("·", false, text)));
  byId("checked").hidden = !out.length;
  fill(byId("notes"), out);
}

function draw() {
  markPrompt();
  drawPrediction();
  drawLayers();
  drawLayer();
  drawChannels();
  if (state.channel) drawCard();
  byId("card").hidden = !state.channel;
  markHeat();
  markSelective();
}

byId("refused").hidden = effects();
if (!effects()) byId("refused").textContent = `Effects on logits are not shown: ${doc.effects_why_not ?? "no reason given"}. Sizes are shown instead.`;
drawPrompt();
drawHeat();
drawSelective();
drawNotes();
state.channel = channelsHere()[0]?.key ?? null;
draw();
startSearch();
