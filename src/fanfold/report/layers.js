// Layer by layer: what attention and FFN of every layer add to the explained token's logit, and the token's rank after
// each layer. Where effects are refused: the size of each FFN's update instead.

/** The first layer after which the token is at rank 1 and stays there; null if it does not end at rank 1. */
function decidedAt(layers) {
  let at = null;
  for (const layer of layers) {
    if (layer.rank !== 1) at = null;
    else at ??= layer.layer;
  }
  return at;
}

function drawLayers() {
  const here = position();
  const box = byId("layers");
  fill(byId("layers-lead"), effects()
    ? ["What each part adds directly to the logit of ", token(here.token.text), ", less what it adds to all logits on average: bars to the right raise it, bars to the left lower it. ", decidedAt(here.layers) !== null && ["★ marks the layer from which ", token(here.token.text), " leads. "], "Choose a layer to see its channels."]
    : "How long what each FFN writes is beside the residual that enters its block. Choose a layer to see its channels.");
  const rows = effects() ? effectRows(here) : sizeRows(here);
  fill(box, h("table", { class: "layers", "aria-labelledby": "layers-title" }, rows));
  const table = box.firstChild;
  const buttons = () => [...table.querySelectorAll("button")];
  const stop = roving(table, buttons);
  stop(table.querySelector("tr.chosen button") ?? buttons()[0]);
}

function layerRow(layer, label, cells, props = {}) {
  const chosen = state.layer === layer.layer;
  const classes = [chosen && "chosen", props.class].filter(Boolean).join(" ");
  return h("tr", { class: classes || null, "data-layer": layer.layer, onclick: () => chooseLayer(chosen ? null : layer.layer) },
    h("td", { class: "index" }, h("button", { type: "button", "aria-pressed": String(chosen), "aria-label": label }, `${layer.layer}`)),
    cells);
}

function effectRows(here) {
  const all = [here.embedding, here.constant, ...here.layers.flatMap((layer) => [layer.attention, layer.ffn])];
  const on = scale(all);
  const digits = decimals(all);
  const decided = decidedAt(here.layers);
  const ranked = here.layers.some((layer) => known(layer.rank));
  const worst = Math.max(2, ...here.layers.map((layer) => layer.rank ?? 1));
  const across = (rank) => 94 - (88 * Math.log(rank)) / Math.log(worst);
  let total = here.embedding ?? 0;
  const fixed = (name, value) => h("tr", { class: "fixed" }, h("td", { class: "index" }, name),
    h("td", { class: "amount number" }, signed(value, digits)), h("td", {}, bar(value, on)), h("td", { class: "amount" }), h("td"),
    h("td", { class: "so-far number" }, signed(total, digits)), h("td", { class: "path" }), h("td", { class: "rank" }), h("td", { class: "reads" }));
  const rows = [fixed("embedding", here.embedding)];
  here.layers.forEach((layer, index) => {
    total += (layer.attention ?? 0) + (layer.ffn ?? 0);
    const is = layer.layer === decided;
    const label = `Layer ${layer.layer}: attention ${signed(layer.attention, digits)}, FFN ${signed(layer.ffn, digits)}${known(layer.rank) ? `, rank ${layer.rank}` : ""}${is ? ", leads from here on" : ""}`;
    rows.push(layerRow(layer, label, [
      h("td", { class: "amount number" }, signed(layer.attention, digits)), h("td", {}, bar(layer.attention, on)),
      h("td", { class: "amount number" }, signed(layer.ffn, digits)), h("td", {}, bar(layer.ffn, on)),
      h("td", { class: "so-far number soft" }, signed(total, digits)),
      h("td", { class: "path" }, ranked && rankPath(here.layers, index, across)),
      h("td", { class: `rank number${is ? " flag" : layer.rank === 1 ? "" : " soft"}` }, is ? "★ " : "", whole(layer.rank)),
      h("td", { class: "reads" }, layer.top_after && [token(layer.top_after[0]), " ", h("span", { class: "soft" }, percent(layer.top_after[1]))]),
    ], { class: is ? "decided" : null }));
  });
  if (here.constant) {
    total += here.constant;
    rows.push(fixed("constant", here.constant));
  }
  const head = h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "index" }, "Layer"),
    h("th", { class: "amount" }), h("th", { scope: "col" }, "Attention"), h("th", { class: "amount" }), h("th", { scope: "col" }, "FFN"),
    h("th", { scope: "col", class: "so-far amount number" }, "so far"),
    h("th", { class: "path" }, ranked && h("span", { class: "ends" }, h("span", {}, whole(worst)), h("span", {}, "1"))), h("th", { scope: "col", class: "rank number" }, ranked ? "rank" : ""),
    h("th", { scope: "col", class: "reads" }, ranked ? "first choice after" : "")));
  const sums = ["attention", "ffn"].map((part) => signed(sum(here.layers.map((layer) => layer[part])), digits));
  const foot = h("tfoot", {}, h("tr", {}, h("td", { class: "index" }, "sum"),
    sums.map((text) => [h("td", { class: "amount number" }, text), h("td", {}, h("span", { class: "narrow" }, text))]),
    h("td", { class: "so-far number" }, signed(total, digits)), h("td", { class: "path" }), h("td", { class: "rank" }), h("td", { class: "reads" })));
  return [head, h("tbody", {}, rows), foot];
}

/** One row's piece of the line that the token's rank follows down the layers (log scale, rank 1 at the right). */
function rankPath(layers, index, across) {
  const at = (i) => (known(layers[i]?.rank) ? across(layers[i].rank) : null);
  const here = at(index);
  if (here === null) return null;
  const points = [];
  if (at(index - 1) !== null) points.push(`${(at(index - 1) + here) / 2},0`);
  points.push(`${here},50`);
  if (at(index + 1) !== null) points.push(`${(at(index + 1) + here) / 2},100`);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(svg.namespaceURI, "polyline");
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return h("div", {}, svg, h("span", { class: layers[index].rank === 1 ? "dot first" : "dot", "--at": `${here}%` }));
}

function sizeRows(here) {
  const beside = (layer) => (layer.residual_norm ? layer.update_norm / layer.residual_norm : null);
  const on = scale(here.layers.map(beside));
  const tops = scale([0, 1]);
  const head = h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "index" }, "Layer"),
    h("th", { class: "amount" }), h("th", { scope: "col" }, "update beside residual"),
    h("th", { class: "amount" }), h("th", { scope: "col" }, "ten largest channels’ share of all sizes")));
  const rows = here.layers.map((layer) => layerRow(layer, `Layer ${layer.layer}: update ${percent(beside(layer))} of the residual`, [
    h("td", { class: "amount number" }, percent(beside(layer))), h("td", {}, bar(beside(layer), on, "size")),
    h("td", { class: "amount number" }, percent(layer.top10_share)), h("td", {}, bar(layer.top10_share, tops, "size")),
  ]));
  return [head, h("tbody", {}, rows)];
}

/** What is known of the chosen layer, under the table. */
function drawLayer() {
  const layer = position().layers.find((one) => one.layer === state.layer);
  byId("layer").hidden = !layer;
  if (!layer) return;
  const fact = (name, value) => value !== null && value !== "–" && h("div", {}, h("dt", {}, name), h("dd", {}, value));
  fill(byId("layer"),
    h("h3", {}, `Layer ${layer.layer}`),
    h("dl", { class: "facts small" },
      effects() && fact("attention", signed(layer.attention)), effects() && fact("FFN", signed(layer.ffn)), layer.bias ? fact("of which bias", signed(layer.bias)) : null,
      fact("update ‖y‖", short(layer.update_norm)), fact("residual ‖h‖", short(layer.residual_norm)),
      known(layer.top10_share) && fact("ten largest channels", `${percent(layer.top10_share)} of all sizes`)),
    layer.update_tokens?.length > 0 && h("p", { class: "small" }, h("span", { class: "soft" }, "Its FFN’s update points to "), tokenList(layer.update_tokens.map((pair) => pair[0]))),
    layer.top_after && h("p", { class: "small" }, h("span", { class: "soft" }, "Read after this layer, the first choice is "), token(layer.top_after[0]), " ", percent(layer.top_after[1])));
}

const tokenList = (texts) => h("span", { class: "tokens" }, texts.map((text) => token(text)));
