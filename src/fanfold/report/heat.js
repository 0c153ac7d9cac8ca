// Layer × token: the size of every FFN's update beside its residual, on a logarithmic scale; and the selective response.

/** A logarithmic scale about the median, eight times up and down at most. A first token that serves as a sink, and the
    layers that make it one, are hundreds of times away from all the rest, which would be left one colour. */
function heatScale() {
  const all = doc.heat.flat().filter((value) => value > 0).sort((a, b) => a - b);
  const at = (share) => all[Math.round(share * (all.length - 1))] ?? 1;
  const low = Math.max(at(0.02), at(0.5) / 8);
  const high = Math.max(Math.min(at(0.98), at(0.5) * 8), 1.01 * low);
  const much = (value) => (value > 0 ? Math.max(0, Math.min(1, Math.log(value / low) / Math.log(high / low))) : 0);
  return { low, high, much, ticks: [0, 1, 2, 3, 4, 5, 6].map((step) => low * (high / low) ** (step / 6)) };
}

/** How many times the residual's length, in few digits. */
const times = (value) => `${short(value, 2)}×`;

function drawHeat() {
  const count = doc.tokens.length;
  const layers = doc.heat[0]?.length ?? 0;
  const on = heatScale();
  const grid = h("div", { class: "heat", role: "grid", "aria-label": "Update size by layer and token", "--tokens": count, "--cell": layers > 40 ? "0.625rem" : layers > 16 ? "0.875rem" : "1.25rem" });
  grid.append(h("div", { role: "row" }, h("span", { role: "columnheader" }), doc.tokens.map((one, at) => h("div", { class: "column", role: "columnheader", "data-at": at, title: plain(one.text) }, token(one.text, false)))));
  const cells = [];
  for (let layer = 0; layer < layers; layer++) {
    const row = h("div", { role: "row" }, h("span", { class: "row", role: "rowheader", "data-layer": layer }, layers <= 16 || layer % 5 === 0 ? layer : ""));
    for (let at = 0; at < count; at++) {
      const value = doc.heat[at]?.[layer];
      const label = `layer ${layer}, token ${at} ${plain(doc.tokens[at].text)}: ${known(value) ? times(value) : "–"}`;
      const cell = h("div", { class: "cell", role: "gridcell", tabindex: "-1", "aria-label": label, "--much": `${100 * on.much(value ?? 0)}%` });
      cell.at = at;
      cell.layer = layer;
      cells.push(cell);
      row.append(cell);
    }
    grid.append(row);
  }
  const readout = h("output", {});
  const read = (event) => event.target.layer !== undefined && (readout.textContent = event.target.getAttribute("aria-label"));
  const go = (cell) => {
    if (cell.layer === undefined) return;
    chooseLayer(cell.layer);
    choosePosition(cell.at);
  };
  grid.addEventListener("pointermove", read);
  grid.addEventListener("focusin", read);
  grid.addEventListener("click", (event) => go(event.target));
  grid.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && event.target.layer !== undefined && (event.preventDefault(), go(event.target)));
  // A grid of one column still moves up and down: `roving` takes the number of columns.
  heatStop = roving(grid, () => cells, { columns: () => count });
  heatStop(cells[0]);
  fill(byId("heat"), grid, h("div", { class: "heat-key" },
    h("span", { class: "ramp" }, `${times(on.low)} or less`, on.ticks.map((value) => h("i", { "--much": `${100 * on.much(value)}%` })), `${times(on.high)} or more`),
    h("span", {}, "of the residual’s length, log scale"), readout));
  // Labels of columns that are too narrow to read are left out; the line below the map names the square.
  const fit = () => grid.classList.toggle("narrow", grid.clientWidth / (count + 1) < 13);
  new ResizeObserver(fit).observe(grid);
  fit();
}
let heatStop = () => {};

function markHeat() {
  const at = position().position;
  for (const item of byId("heat").querySelectorAll(".chosen")) item.classList.remove("chosen");
  byId("heat").querySelector(`.column[data-at="${at}"]`)?.classList.add("chosen");
  byId("heat").querySelector(`.row[data-layer="${state.layer}"]`)?.classList.add("chosen");
  const cell = [...byId("heat").querySelectorAll(".cell")].find((one) => one.at === at && one.layer === state.layer);
  cell?.classList.add("chosen");
  if (cell) heatStop(cell);
}

// Selective response. -------------------------------------------------------------------------------------------------

const MEASURES = [
  ["nonzero", "Not exactly zero", "share of channels with m ≠ 0"],
  ["above_cett", "Needed", "share of channels left when the smallest are dropped, up to a fifth of the output (CETT)"],
  ["participation", "Participation ratio", "how many equal channels would be as spread out"],
  ["top10_share", "Ten largest channels", "their share of all sizes |m| · ‖v‖"],
];

function drawSelective() {
  const rows = doc.selective ?? [];
  const measures = MEASURES.filter(([key]) => rows.some((row) => known(row[key])));
  byId("selective").hidden = !measures.length;
  if (!measures.length) return;
  // Shares run from 0 to 1; a ratio in channels runs to its largest.
  const tops = Object.fromEntries(measures.map(([key]) => [key, Math.max(...rows.map((row) => row[key] ?? 0))]));
  const text = (key, value) => (tops[key] <= 1 ? percent(value) : short(value));
  fill(byId("selective-charts"), measures.map(([key, name, what]) => {
    const end = tops[key] <= 1 ? 1 : tops[key];
    const least = Math.min(...rows.map((row) => row[key] ?? 0));
    const title = [h("h3", {}, name), h("p", { class: "soft small" }, what)];
    if (least === tops[key] && rows.length > 1) return h("figure", { class: "chart" }, title, h("p", { class: "same" }, `${text(key, least)} in every layer`));
    return h("figure", { class: "chart", role: "img", "aria-label": `${name}: ${rows.map((row) => `layer ${row.layer} ${text(key, row[key])}`).join(", ")}` }, title,
      h("div", { class: "plot" }, rows.map((row) => h("i", { "data-layer": row.layer, title: `layer ${row.layer}: ${text(key, row[key])}`, "--long": `${(100 * (row[key] ?? 0)) / end}%` }))),
      h("div", { class: "axis" }, h("span", {}, `layer ${rows[0].layer}`), h("span", {}, `${text(key, least)} – ${text(key, tops[key])}`), h("span", {}, `${rows.at(-1).layer}`)));
  }), h("details", { class: "numbers" }, h("summary", {}, "The same as numbers"),
    h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Layer"), measures.map(([, name]) => h("th", { scope: "col", class: "number" }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, h("td", {}, row.layer), measures.map(([key]) => h("td", { class: "number" }, text(key, row[key])))))))));
}

function markSelective() {
  for (const column of byId("selective-charts").querySelectorAll("i")) column.classList.toggle("chosen", Number(column.dataset.layer) === state.layer);
}
