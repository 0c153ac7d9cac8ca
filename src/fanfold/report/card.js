// The card of one channel: what it computes here, what its value writes, what triggers it, where else it is strong.

let opener = null;

function openCard(focus) {
  opener = document.activeElement;
  byId("card").classList.add("open");
  byId("card").scrollTop = 0;
  if (focus) byId("card-title").focus({ preventScroll: true });
}

function closeCard() {
  byId("card").classList.remove("open");
  const row = document.querySelector(`tr[data-channel="${state.channel}"] button`);
  (row ?? opener)?.focus({ preventScroll: true });
}

function drawCard() {
  const [layer, channel] = state.channel.split(":").map(Number);
  const value = doc.values?.[state.channel];
  const one = position().layers.find((each) => each.layer === layer)?.channels.find((each) => each.channel === channel);
  fill(byId("card"),
    h("header", {}, h("h2", { id: "card-title", tabindex: "-1" }, "Channel ", h("span", {}, state.channel)),
      h("button", { type: "button", class: "quiet close", onclick: closeCard }, "Close")),
    h("p", { class: "soft small" }, `Layer ${layer}, channel ${channel}${doc.model.d_ff ? ` of ${whole(doc.model.d_ff)}` : ""}`),
    equation(one, value), valueEnds(one, value), triggers(), places(layer, channel));
}

/** The channel's numbers at the chosen token. */
function equation(one, value) {
  const at = token(doc.tokens[position().position].text);
  if (!one) return h("p", { class: "small" }, "At ", at, " it is not among the strongest channels that this report keeps.");
  const row = (name, text) => [h("dt", { class: "soft" }, name), h("dd", {}, text)];
  const gated = known(one.gate);
  return [h("h3", {}, "At ", at), h("dl", { class: "equation" },
    gated && row("gate", short(one.gate)),
    row(gated ? "content" : "key · x", short(one.content)),
    row(gated ? "coefficient m = gate × content" : "coefficient m", short(one.coefficient)),
    value && known(value.norm) && row("length of its value ‖v‖", short(value.norm)),
    row("size |m| · ‖v‖", short(one.size)),
    effects() && known(one.effect) && row(["effect on ", token(position().token.text)], h("b", { class: one.effect < 0 ? "down" : "up" }, signed(one.effect, 3))))];
}

function valueEnds(one, value) {
  if (!value) return null;
  const list = (pairs) => h("ol", {}, (pairs ?? []).map(([text, score]) => h("li", {}, h("span", {}, token(text)), h("span", { class: "number" }, signed(score)))));
  return [h("h3", {}, "Its value v"),
    one?.coefficient < 0 && h("p", { class: "small" }, "The coefficient is negative here: −v is written, and the two ends trade places."),
    h("div", { class: "ends" },
      h("div", {}, h("h4", { class: "up" }, "+ promotes"), list(value.promoted)),
      h("div", {}, h("h4", { class: "down" }, "− suppresses"), list(value.suppressed)))];
}

function triggers() {
  if (!doc.triggers) {
    return [h("h3", {}, "Triggers"), h("p", { class: "soft small" }, "No index was given, so nothing is known of what makes this channel fire elsewhere. “fanfold index” makes one from text.")];
  }
  const kept = doc.triggers[state.channel];
  if (!kept) return [h("h3", {}, "Triggers"), h("p", { class: "soft small" }, "None in the index.")];
  const list = (items) => h("ol", { class: "triggers" }, items.map((item) => h("li", {}, excerpt(item.text), h("span", { class: "number soft" }, short(item.coefficient)))));
  return [h("h3", {}, "Triggers"),
    h("dl", { class: "facts small" },
      known(kept.frequency) && h("div", {}, h("dt", {}, "fires in"), h("dd", {}, `${percent(kept.frequency)} of tokens`)),
      known(kept.mean) && h("div", {}, h("dt", {}, "mean coefficient"), h("dd", {}, short(kept.mean)))),
    kept.positive?.length > 0 && list(kept.positive),
    kept.negative?.length > 0 && [h("h3", {}, "Triggers of its negative end"), list(kept.negative)]];
}

/** The tokens of the prompt at which this channel is among the strongest. */
function places(layer, channel) {
  const found = doc.positions.flatMap((at) => {
    const one = at.layers.find((each) => each.layer === layer)?.channels.find((each) => each.channel === channel);
    return one ? [{ at: at.position, coefficient: one.coefficient }] : [];
  });
  const others = found.filter((each) => each.at !== position().position);
  if (!others.length) return null;
  const on = scale(found.map((each) => each.coefficient));
  return [h("h3", {}, "Coefficient at other tokens"), h("div", { class: "places" }, others.map((each) => [
    h("button", { type: "button", onclick: () => choosePosition(each.at) }, token(doc.tokens[each.at].text, false)),
    bar(each.coefficient, on), h("span", { class: "number" }, short(each.coefficient))]))];
}
