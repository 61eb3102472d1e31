"use strict";
// Text is set as text, never as markup: names of replicas come from the network.

const PERIOD_MS = 1000;
const HISTORY = 120;
const rates = [];

const byId = (id) => document.getElementById(id);
const made = (tag, text, className = "") => {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
};
const number = (value, digits = 0) => Number(value ?? 0).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const share = (value) => (value === null ? "–" : `${number(100 * value, 1)} %`);

function showTotals(totals) {
  const items = [
    ["replicas ready", `${totals.num_ready}/${totals.num_replicas}`],
    ["tokens/s", number(totals.tokens_per_s, 1)],
    ["running", number(totals.running)],
    ["waiting", number(totals.waiting)],
    ["oldest in queue", `${number(totals.queue_age_s, 1)} s`],
    ["next first token", `${number(1000 * totals.predicted_ttft_s)} ms`],
    ["steps from graphs", share(totals.graph_share)],
    ["prompt cached", share(totals.cache_share)],
  ];
  byId("totals").replaceChildren(...items.map(([title, value]) => {
    const item = document.createElement("div");
    item.append(made("dt", title), made("dd", value));
    return item;
  }));
}

function showRates(rate) {
  rates.push(rate);
  if (rates.length > HISTORY) rates.shift();
  const top = Math.max(...rates, 1e-9);
  byId("rate").setAttribute("points", rates.map((value, place) => `${place},${98 - 94 * value / top}`).join(" "));
}

function showReplicas(replicas) {
  const tiers = [...new Set(replicas.flatMap((one) => (one.load?.tiers ?? []).map((tier) => tier.tier)))].sort((a, b) => a - b);
  const titles = ["replica", "state", ...tiers.map((tier) => `≤${tier}`), "run", "wait", "tok/s", "step ms", "blocks", "graphs"];
  byId("titles").replaceChildren(...titles.map((title) => made("th", title)));
  byId("replicas").replaceChildren(...replicas.map((one) => {
    const row = document.createElement("tr");
    const load = one.load ?? {};
    const slots = Object.fromEntries((load.tiers ?? []).map((tier) => [tier.tier, `${tier.running}+${tier.free_slots}`]));
    const state = one.breaker === "open" || one.breaker === "half_open" ? `${one.state} ${one.breaker}` : one.state;
    row.append(made("td", one.replica), made("td", state, one.state), ...tiers.map((tier) => made("td", slots[tier] ?? "–")));
    const cells = load.total_blocks
      ? [number(load.running), number(load.waiting), number(load.tokens_per_s, 1), number(load.step_ms, 2), `${load.total_blocks - load.free_blocks}/${load.total_blocks}`, load.readiness]
      : Array(6).fill("–");
    row.append(...cells.map((cell) => made("td", cell)));
    return row;
  }));
}

async function refresh() {
  try {
    const response = await fetch("pool.json", { signal: AbortSignal.timeout(5000) });
    if (!response.ok) throw new Error(`the router answered ${response.status}`);
    const pool = await response.json();
    byId("who").textContent = `${pool.server.role} ${pool.server.id}, version ${pool.server.version}`;
    byId("stale").hidden = true;
    showTotals(pool.totals);
    showRates(pool.totals.tokens_per_s);
    showReplicas(pool.replicas);
  } catch (error) {
    byId("stale").textContent = `no new numbers: ${error.message}`;
    byId("stale").hidden = false;
  }
  setTimeout(refresh, PERIOD_MS);
}

refresh();
