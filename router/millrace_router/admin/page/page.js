// Reads /workers, shows it, and reads it again. Names and texts come from elsewhere: they become text, never markup.
import { Card } from "./card.js";
import { Playground } from "./playground.js";

const PERIOD_MS = 2000, LONGEST_MS = 10000;
const find = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const total = (numbers) => numbers.reduce((one, other) => one + other, 0);
const sum = (list, field) => total(list.map((one) => one[field]));
const lower = (name, prefix) => (name ?? "").replace(prefix, "").toLowerCase();

function seconds(value) {
  return value < 1 ? `${digits.format(value * 1000)} ms` : `${digits.format(value)} s`;
}

// Series of a card (card.js): what the last span had, and estimates of all spans.
const now = (name, line, show = number.format) =>
  ({ name, line, show, value: (recent) => (recent.length ? line(recent.at(-1)) : undefined) });
const rate = (count) => now("per second", (span) => count(span) / span.seconds, digits.format);
const quantiles = (field) => ["p50", "p99"].map((name) =>
  ({ name, line: (span) => span[field]?.[name], show: seconds, value: (_, all) => all[field]?.[name] }));
const cards = [
  new Card("Output tokens", [rate((span) => span.output_tokens)]),
  new Card("Time to first token, 5 minutes", quantiles("ttft")),
  new Card("Requests", [now("active", (span) => span.active), now("queued", (span) => span.queued)]),
  new Card("Prompt tokens", [rate((span) => span.prompt_tokens)]),
  new Card("Inter-token latency, 5 minutes", quantiles("itl")),
  new Card("Requests that ended", [rate((span) => total(Object.values(span.requests)))]),
];

// Rows are arrays of cells. A cell is a text, or {text, kind (a class), why, used and of (a bar)}. What did not
// change is left as it is, so that a selection stays.
function fill(body, rows) {
  const columns = [...body.parentElement.tHead.rows[0].cells];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, i) => {
    const row = body.rows[i] ?? body.insertRow();
    cells.forEach((cell, j) => {
      const place = row.cells[j] ?? row.insertCell(), said = JSON.stringify(cell);
      if (place.said === said) return;
      place.said = said;
      place.className = columns[j].className;
      place.dataset.column = columns[j].textContent;
      place.replaceChildren(...content(typeof cell === "object" ? cell : { text: cell }));
    });
  });
}

function content({ text, kind, why, used, of }) {
  const parts = [];
  if (of) parts.push(Object.assign(document.createElement("progress"), { max: of, value: used, ariaLabel: text }));
  if (text !== "") parts.push(element("span", text, kind));
  if (why) parts.push(element("span", why, "why"));
  if (parts.length < 2) return parts;
  const whole = element("span", "");
  whole.append(...parts);
  return [whole];
}

function element(tag, text, kind = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className: kind });
}

function workerRow(worker) {
  const replicas = worker.load?.replicas ?? [];
  const of = sum(replicas, "pages_total"), used = of - sum(replicas, "pages_free") - sum(replicas, "pages_cached");
  const state = worker.reachable ? lower(worker.load.state, "WORKER_STATE_") : "unreachable";
  const kind = worker.routable ? "good" : worker.reachable ? "wait" : "bad";
  return [
    { text: worker.name || worker.address, why: worker.name ? worker.address : "" },
    [lower(worker.info?.role, "ROLE_"), lower(worker.load?.duty, "DUTY_")].filter((it) => it && it !== "unspecified").join(": "),
    { text: worker.leaving ? `${state}, leaving` : state, kind, why: worker.detail },
    ...["running", "waiting"].map((field) => (replicas.length ? number.format(sum(replicas, field)) : "")),
    number.format(worker.in_flight),
    of ? { text: `${number.format(used)} of ${number.format(of)}`, used, of } : "",
  ];
}

function pairRow(pair, names) {
  const kind = { ready: "good", refused: "bad" }[pair.state] ?? "wait";
  const name = (address) => names.get(address) || address, source = pair.source ? name(pair.source) : "itself";
  return [source, name(pair.worker), { text: pair.state, kind }, `${pair.attempts}`, pair.detail];
}

// Of a field that maps a reason to a number: reason, number in all spans, and how long ago it was seen.
function reasonRows(recent, all, field) {
  const rows = Object.entries(all[field]).map(([reason, count]) => {
    const since = recent.slice(recent.findLastIndex((span) => span[field][reason]) + 1);
    return [reason.toLowerCase().replaceAll("_", " "), number.format(count), ago(sum(since, "seconds"))];
  });
  return rows.sort();
}

function ago(passed) {
  return passed < 60 ? `${Math.round(passed)} s ago` : `${Math.round(passed / 60)} min ago`;
}

function showReasons(rows, name, none) {
  find(none).hidden = rows.length > 0;
  find(name).parentElement.hidden = rows.length === 0;
  fill(find(name), rows);
}

function say(id, text) {  // what is said again would be read aloud again
  if (find(id).textContent !== text) find(id).textContent = text;
}

function showState(text, kind) {
  say("state", text);
  find("state").className = `badge ${kind}`;
}

function show({ workers, pairs, router }) {
  const all = router.last_minutes ?? { requests: {}, retries: {} };
  showState(...(router.ready ? ["ready", "good"] : ["not ready", "bad"]));
  say("model", [...new Set(workers.map((worker) => worker.info?.model).filter(Boolean))].join(", "));
  for (const card of cards) card.show(router.recent, all);
  const routable = workers.filter((worker) => worker.routable).length;
  say("workers-sum", `${routable} of ${workers.length} get requests`);
  fill(find("worker-rows"), workers.map(workerRow));
  const ready = pairs.filter((pair) => pair.state === "ready");
  say("pairs-sum", `${ready.length} of ${pairs.length} ready`);
  const names = new Map(workers.map((worker) => [worker.address, worker.name]));
  const rest = pairs.filter((pair) => pair.state !== "ready");
  fill(find("pair-rows"), [...rest, ...ready].map((pair) => pairRow(pair, names)));
  showReasons(reasonRows(router.recent, all, "requests"), "end-rows", "no-ends");
  const retries = reasonRows(router.recent, all, "retries");
  if (all.retries_refused) retries.push(["refused by the retry budget", number.format(all.retries_refused), ""]);
  showReasons(retries, "retry-rows", "no-retries");
}

function showTrouble(text) {
  say("trouble", text);
  find("trouble").hidden = text === "";
}

async function refresh() {
  try {
    const answer = await fetch("workers", { signal: AbortSignal.timeout(LONGEST_MS) });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error.message);
    show(body);
    playground.found(body.router);
    showTrouble("");
  } catch (error) {
    showTrouble(`The router does not answer: ${error.message}. What is below is older.`);
    showState("no answer", "bad");
  }
  setTimeout(refresh, PERIOD_MS);
}

const playground = new Playground(find);
find("cards").append(...cards.map((card) => card.root));
refresh();
