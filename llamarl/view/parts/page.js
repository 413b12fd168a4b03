// Shows the rollouts of a run. All that is shown stands in the hash of the address, so a link shows
// the same. Texts of models and prompts get into the page by textContent only.
"use strict";

const PAGE = 200; // rollouts that the list grows by
const KEYS = ["prompt", "text", "outcome", "sort", "step_from", "step_to", "reward_from", "reward_to",
  "length_from", "length_to", "staleness_from", "staleness_to"];
const COUNTS = { // of an episode, in words; other numbers have the names that a recipe gave them
  resumed: "turns after the first", kept: "of these, still in the cache", malformed: "calls that did not parse",
  overlong: "observations that did not fit", restarts: "times begun again", environment_s: "seconds with the environment",
};
const RANGES = [["step", "step"], ["reward", "reward"], ["length", "num_tokens"], ["staleness", "staleness"]];

const at = (id) => document.getElementById(id);
let data, shownRows = PAGE, found = [];
const byRow = new Map();

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

async function readData() {
  const bytes = Uint8Array.from(atob(at("data").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// The state: an object of texts, which is the hash.
const state = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

function go(changes, isStep = true) {
  const next = { ...state(), ...changes };
  for (const key of Object.keys(next)) if (next[key] === "" || next[key] == null) delete next[key];
  const hash = `#${new URLSearchParams(next)}`;
  if (hash === location.hash || (hash === "#" && !location.hash)) return;
  if (isStep) location.hash = hash;
  else { history.replaceState(null, "", hash); show(); }
}

const number = (value, digits = 4) => value == null ? "-" : String(Number(value.toPrecision(digits)));
const place = (prompt, isHeldOut) => {
  const file = prompt.prompt_file, isSet = isHeldOut && Object.hasOwn(data.sets, file);
  return `${isSet ? data.sets[file] : file}:${prompt.prompt_id}`;
};
const question = (rollout) => data.prompts[rollout.prompt].question;
const answer = (rollout) => (rollout.turns || []).map((turn) => turn.content).join("\n")
  || (rollout.tokens ? rollout.tokens.texts.join("") : "");
const outcomeOf = (rollout) => rollout.reason ? `${rollout.outcome}: ${rollout.reason}` : rollout.outcome;
const grade = (rollout) => rollout.correct == null ? "" : rollout.correct ? "good" : "bad";

function isWanted(rollout, wanted) {
  if (wanted.outcome && outcomeOf(rollout) !== wanted.outcome) return false;
  const has = (text, part) => !part || text.toLowerCase().includes(part.toLowerCase());
  const prompt = data.prompts[rollout.prompt];
  if (!has(`${place(prompt)} ${rollout.prompt_text}`, wanted.prompt)) return false;
  if (!has(answer(rollout), wanted.text)) return false;
  return RANGES.every(([name, field]) => {
    const [from, to] = [wanted[`${name}_from`], wanted[`${name}_to`]];
    if (from === undefined && to === undefined) return true;
    const value = rollout[field];
    return value != null && (from === undefined || value >= Number(from)) && (to === undefined || value <= Number(to));
  });
}

function choose(wanted) {
  const chosen = data.rollouts.filter((rollout) => isWanted(rollout, wanted));
  const key = wanted.sort || "step";
  if (key === "step") return chosen; // the order of the data
  const value = (rollout) => rollout[key] == null ? -Infinity : rollout[key];
  return chosen.sort((a, b) => value(b) - value(a));
}

const shownOf = (wanted) => byRow.get(wanted.row) || found[0];

function showList(wanted) {
  found = choose(wanted);
  const current = shownOf(wanted);
  at("count").textContent = `${found.length.toLocaleString("en")} of ${data.rollouts.length.toLocaleString("en")} rollouts`;
  const items = found.slice(0, shownRows).map((rollout) => {
    const facts = make("div", { class: "facts" });
    const say = (text, kind = "") => facts.append(Object.assign(make("span", { class: kind }), { textContent: text }));
    say(rollout.is_held_out ? `version ${rollout.step}` : `step ${rollout.step}`);
    say(`reward ${number(rollout.reward)}`, `mark ${grade(rollout)}`);
    say(`${rollout.num_tokens} tokens`);
    if (rollout.staleness != null) say(`stale ${rollout.staleness}`);
    if (rollout.outcome !== "trained") say(outcomeOf(rollout));
    const line = make("div", { class: "question" });
    line.textContent = question(rollout);
    return make("li", { "data-row": rollout.row_id, tabindex: 0, "aria-current": rollout === current }, line, facts);
  });
  at("list").replaceChildren(...items);
  at("more").hidden = found.length <= shownRows;
}

function section(parent, label, text, kind = "") {
  const block = make("div", { class: `text ${kind}` });
  block.textContent = text;
  parent.append(Object.assign(make("div", { class: "speaker" }), { textContent: label }), block);
  return block;
}

// JSON over several lines; as it stands where a browser cannot read it: Python writes NaN.
function spread(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text;
  }
}

function showFacts(article, rollout, prompt) {
  const list = make("dl");
  const say = (name, value, kind = "") => {
    if (value == null || value === "") return;
    const text = make("dd", { class: kind });
    text.textContent = value;
    list.append(make("div", {}, Object.assign(make("dt"), { textContent: name }), text));
  };
  say("prompt", place(prompt, rollout.is_held_out));
  say("outcome", outcomeOf(rollout));
  say("reward", number(rollout.reward), `mark ${grade(rollout)}`);
  const parts = Object.entries(rollout.rewards);
  if (parts.length > 1) for (const [name, value] of parts) say(`reward ${name}`, number(value));
  say("advantage", rollout.advantage == null ? null : number(rollout.advantage));
  say("finish", rollout.finish);
  say("tokens", `${rollout.num_tokens} after ${rollout.num_prompt_tokens}`);
  if (rollout.version_min != null) {
    say("written by versions", rollout.version_min === rollout.version_max ? rollout.version_min : `${rollout.version_min} to ${rollout.version_max}`);
  }
  if (rollout.outcome === "trained") say("trained at version", rollout.version);
  say("staleness", rollout.staleness);
  for (const [name, value] of Object.entries(rollout.numbers)) {
    say(Object.hasOwn(COUNTS, name) ? COUNTS[name] : name, number(value));
  }
  say("error", rollout.error, "bad");
  article.append(list);
}

function showTokens(article, rollout, mode) {
  const bar = make("div", { class: "bar", id: "colours" }, Object.assign(make("span"), { textContent: "colour tokens by" }));
  for (const name of COLOURS) {
    const button = make("button", { type: "button", "data-colour": name, "aria-pressed": name === mode });
    button.textContent = name;
    bar.append(button);
  }
  const legend = make("div", { id: "legend" });
  for (const [colour, text] of legendOf(mode, rollout)) {
    const swatch = make("span", { class: "swatch" });
    swatch.style.backgroundColor = colour;
    const entry = make("span", {}, swatch);
    entry.append(text);
    legend.append(entry);
  }
  if (!rollout.tokens.trainer_logprobs && ["ratio", "clip", "difference"].includes(mode)) {
    legend.append("The trainer had no pass over this rollout, so there is nothing to colour.");
  }
  article.append(bar, legend);
  let turn = 0;
  for (const { isObserved, tokens } of turnsOf(rollout)) {
    const block = section(article, isObserved ? "observation" : `model, turn ${++turn}`, "", isObserved ? "observation" : "");
    block.append(...tokens.map((i) => tokenElement(rollout, i, mode)));
  }
}

function showRollout(wanted) {
  const article = at("rollout"), rollout = shownOf(wanted);
  article.replaceChildren();
  if (!rollout) return;
  article.dataset.row = rollout.row_id;
  const prompt = data.prompts[rollout.prompt];
  const title = rollout.is_held_out ? `evaluation of version ${rollout.step}` : `step ${rollout.step}, group ${rollout.group_id}`;
  article.append(Object.assign(make("h2"), { textContent: `rollout ${rollout.row_id}, ${title}` }));
  const siblings = data.rollouts.filter((other) => rollout.is_held_out
    ? other.is_held_out && other.prompt === rollout.prompt : other.group_id === rollout.group_id);
  if (siblings.length > 1) {
    const words = rollout.is_held_out ? "the same prompt at version" : "its group, by reward";
    const bar = make("div", { class: "bar" }, Object.assign(make("span"), { textContent: words }));
    for (const other of siblings) {
      const button = make("button", { type: "button", "data-row": other.row_id, "aria-pressed": other === rollout, class: grade(other) });
      button.textContent = rollout.is_held_out ? other.step : number(other.reward);
      bar.append(button);
    }
    article.append(bar);
  }
  showFacts(article, rollout, prompt);
  section(article, "prompt", rollout.prompt_text);
  if (rollout.tokens) showTokens(article, rollout, wanted.colour || "version");
  else {
    for (const turn of rollout.turns || []) section(article, turn.role, turn.content, turn.role === "observation" ? "observation" : "");
    const words = rollout.turns ? "The tokens of this rollout are not in the page." : "This rollout was never scored, so its text is not there.";
    article.append(Object.assign(make("p", { class: "speaker" }), { textContent: words }));
  }
  if (prompt.fields !== "{}") section(article, "row of the prompt file", spread(prompt.fields));
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function drawCurve(name, points, wanted) {
  const width = 170, height = 34, steps = points.map((point) => point[0]), values = points.map((point) => point[1]);
  const first = Math.min(...steps), last = Math.max(...steps), low = Math.min(0, ...values), high = Math.max(1e-9, ...values);
  const x = (step) => last > first ? (step - first) / (last - first) * width : width / 2;
  const y = (value) => height - (value - low) / (high - low || 1) * (height - 3); // room for the width of a line
  const picture = svg("svg", { width, height, "data-first": first, "data-last": last });
  if (wanted.step_from && wanted.step_from === wanted.step_to) {
    picture.append(svg("rect", { class: "chosen", x: x(Number(wanted.step_from)) - 3, y: 0, width: 6, height }));
  }
  picture.append(svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }));
  picture.append(svg("polyline", { class: "curve", points: points.map(([s, v]) => `${x(s).toFixed(1)},${y(v).toFixed(1)}`).join(" ") }));
  if (points.length < 40) for (const [s, v] of points) picture.append(svg("circle", { class: "point", r: 2, cx: x(s), cy: y(v) }));
  const caption = make("figcaption");
  const change = Object.assign(make("b"), { textContent: `${number(values[0], 3)} to ${number(values[values.length - 1], 3)}` });
  caption.append(`${name} `, change, ` over steps ${first} to ${last}`);
  return make("figure", { "data-curve": name }, picture, caption);
}

function showCurves(wanted) {
  const names = { reward: "reward", accuracy: "accuracy", evaluation: "held-out accuracy" };
  const drawn = Object.entries(data.curves).filter(([, points]) => points.length > 0);
  at("curves").replaceChildren(...drawn.map(([name, points]) => drawCurve(names[name], points, wanted)));
}

function showEvaluations(wanted) {
  const versions = new Set(), rows = new Map();
  for (const rollout of data.rollouts.filter((each) => each.is_held_out)) {
    versions.add(rollout.step);
    if (!rows.has(rollout.prompt)) rows.set(rollout.prompt, new Map());
    const found = rows.get(rollout.prompt);
    found.set(rollout.step, [...(found.get(rollout.step) || []), rollout]);
  }
  const columns = [...versions].sort((a, b) => a - b);
  const head = make("tr", {}, ...["line", "prompt", ...columns.map((v) => `version ${v}`)].map((text) => Object.assign(make("th"), { textContent: text })));
  const isRight = (cell) => 2 * cell.filter((each) => each.correct).length >= cell.length;
  const kinds = {
    wrong: (cells) => !isRight(cells[cells.length - 1]),
    learnt: (cells) => !isRight(cells[0]) && isRight(cells[cells.length - 1]),
    lost: (cells) => isRight(cells[0]) && !isRight(cells[cells.length - 1]),
  };
  const kind = kinds[wanted.kind] || (() => true);
  const chosen = [...rows].filter(([, found]) => kind(columns.map((v) => found.get(v)).filter(Boolean)))
    .sort(([a], [b]) => data.prompts[a].prompt_file.localeCompare(data.prompts[b].prompt_file)
      || data.prompts[a].prompt_id - data.prompts[b].prompt_id);
  const isOneFile = new Set([...rows.keys()].map((index) => data.prompts[index].prompt_file)).size < 2;
  at("num-prompts").textContent = `${chosen.length.toLocaleString("en")} of ${rows.size.toLocaleString("en")} prompts`;
  at("kind").value = wanted.kind in kinds ? wanted.kind : "";
  at("prompts").replaceChildren(head, ...chosen.map(([index, found]) => {
    const prompt = data.prompts[index], text = make("td", { class: "question" });
    text.textContent = prompt.question;
    const line = Object.assign(make("td"), { textContent: isOneFile ? prompt.prompt_id : place(prompt, true) });
    return make("tr", {}, line, text, ...columns.map((version) => {
      const cell = make("td");
      for (const rollout of found.get(version) || []) {
        const button = make("button", { type: "button", "data-row": rollout.row_id, class: `mark ${grade(rollout)}` });
        button.textContent = number(rollout.reward);
        cell.append(button);
      }
      return cell;
    }));
  }));
}

function show() {
  const wanted = state(), tab = wanted.tab === "evaluations" ? "evaluations" : "rollouts";
  for (const name of ["rollouts", "evaluations"]) {
    at(name).hidden = name !== tab;
    at(`tab-${name}`).setAttribute("aria-pressed", name === tab);
  }
  for (const key of KEYS) {
    const input = at("filters").elements[key], value = wanted[key] || (key === "sort" ? "step" : "");
    if (input.value !== value) input.value = value;
  }
  showTip(null);
  showCurves(wanted);
  if (tab === "evaluations") showEvaluations(wanted);
  else {
    showList(wanted);
    showRollout(wanted);
  }
  document.body.dataset.shown = location.hash; // what the page shows now
}

function listen() {
  addEventListener("hashchange", show);
  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("filters").addEventListener("input", (event) => {
    shownRows = PAGE;
    go({ [event.target.name]: event.target.name === "sort" && event.target.value === "step" ? "" : event.target.value }, false);
  });
  at("kind").addEventListener("change", (event) => go({ kind: event.target.value }));
  at("more").addEventListener("click", () => { shownRows += PAGE; showList(state()); });
  addEventListener("click", (event) => {
    const target = event.target.closest("[data-row], [data-tab], [data-colour], svg");
    if (!target || target.id === "rollout") return;
    const { row, tab, colour, first, last } = target.dataset;
    if (row) go({ row, tab: "" });
    else if (tab) go({ tab: tab === "rollouts" ? "" : tab });
    else if (colour) go({ colour: colour === "version" ? "" : colour });
    else if (first) {
      const box = target.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
      const step = String(Math.round(Number(first) + share * (Number(last) - Number(first))));
      const isSame = state().step_from === step && state().step_to === step;
      go({ step_from: isSame ? "" : step, step_to: isSame ? "" : step, tab: "" });
    }
  });
  addEventListener("mouseover", (event) => showTip(event.target.closest ? event.target.closest("[data-token]") : null));
  addEventListener("keydown", (event) => {
    if (event.target.closest("input, select")) return;
    const item = event.target.closest("li[data-row]");
    if (event.key === "Enter" && item) return go({ row: item.dataset.row });
    const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!by || state().tab || !found.length) return;
    event.preventDefault();
    const now = found.findIndex((rollout) => String(rollout.row_id) === at("rollout").dataset.row);
    const next = found[Math.max(0, Math.min(found.length - 1, now + by))];
    go({ row: String(next.row_id) });
    const shown = document.querySelector(`#list [data-row="${next.row_id}"]`);
    if (shown) shown.scrollIntoView({ block: "nearest" });
  });
}

async function start() {
  data = await readData();
  for (const rollout of data.rollouts) byRow.set(String(rollout.row_id), rollout);
  document.title = `${data.run}: rollouts`;
  at("run").textContent = data.run;
  const shown = data.rollouts.length.toLocaleString("en"), all = data.num_found.toLocaleString("en");
  at("shown").textContent = data.rollouts.length < data.num_found
    ? `${shown} of the ${all} kept rollouts, spread evenly; llamarl view --max_rollouts and --max_tokens show more`
    : `${all} kept rollouts`;
  const outcomes = [...new Set(data.rollouts.map(outcomeOf))].sort();
  at("filters").elements.outcome.append(...["", ...outcomes].map((name) => Object.assign(make("option", { value: name }), { textContent: name || "any" })));
  listen();
  show();
}

start().catch((error) => {
  at("error").hidden = false;
  at("error").textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`;
});
