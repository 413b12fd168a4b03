// The tokens of a rollout: their numbers, their colours, and what is said of each.

const COLOURS = ["none", "version", "ratio", "advantage", "clip", "difference", "log-prob"];
const HUES = [210, 30, 140, 280, 350, 80, 180, 240];
const BLUE = 210, ORANGE = 28, GREEN = 145, RED = 358;

// A colour that lies over light and dark backgrounds; strength 0 to 1.
const tint = (hue, strength) => `hsl(${hue} 85% 50% / ${(0.08 + 0.5 * Math.min(1, strength)).toFixed(3)})`;

function facts(rollout, i) {
  const tokens = rollout.tokens, get = (name) => tokens[name] ? tokens[name][i] : null;
  const mu = get("generator_logprobs"), pi = get("trainer_logprobs");
  const difference = mu == null || pi == null ? null : pi - mu;
  return {
    id: tokens.response_ids[i], version: tokens.token_versions[i], mu, pi, ref: get("ref_logprobs"),
    difference, ratio: difference == null ? null : Math.exp(difference),
    weight: get("loss_weights"), clipped: get("clipped"),
  };
}

function colourOf(mode, rollout, one) {
  if (mode === "version") {
    return tint(HUES[(rollout.version_max - one.version) % HUES.length], 0.6);
  }
  if (mode === "ratio") {
    if (one.ratio == null) return "";
    return tint(one.ratio > 1 ? ORANGE : BLUE, Math.abs(one.difference) / Math.log(2));
  }
  if (mode === "advantage") {
    if (rollout.advantage == null || one.weight === 0) return "";
    return tint(rollout.advantage < 0 ? RED : GREEN, Math.abs(rollout.advantage));
  }
  if (mode === "clip") return one.clipped == null ? "" : one.clipped ? tint(RED, 1) : one.weight ? tint(GREEN, 0.1) : "";
  if (mode === "difference") return one.difference == null ? "" : tint(ORANGE, Math.abs(one.difference) / 0.5);
  if (mode === "log-prob") return one.mu == null ? "" : tint(RED, -one.mu / 4);
  return "";
}

function legendOf(mode, rollout) {
  if (mode === "version") {
    const versions = [...new Set(rollout.tokens.token_versions.filter((v) => v >= 0))].sort((a, b) => a - b);
    return versions.map((version) => [colourOf("version", rollout, { version }), `version ${version}`]);
  }
  const texts = {
    ratio: [[tint(BLUE, 1), "ratio 0.5 or less"], [tint(BLUE, 0), "1"], [tint(ORANGE, 1), "2 or more"]],
    advantage: [[tint(RED, 1), "advantage -1 or less"], [tint(GREEN, 1), "1 or more"]],
    clip: [[tint(RED, 1), "clipped"], [tint(GREEN, 0.1), "trained"]],
    difference: [[tint(ORANGE, 0), "no difference of log-probs"], [tint(ORANGE, 1), "0.5 or more"]],
    "log-prob": [[tint(RED, 0), "log-prob 0"], [tint(RED, 1), "-4 or less"]],
  };
  return texts[mode] || [];
}

function turnsOf(rollout) {
  const { token_versions: versions, texts } = rollout.tokens, turns = [];
  texts.forEach((_, i) => {
    const isObserved = versions[i] < 0, last = turns[turns.length - 1];
    if (last && last.isObserved === isObserved) last.tokens.push(i);
    else turns.push({ isObserved, tokens: [i] });
  });
  return turns;
}

function tokenElement(rollout, i, mode) {
  const element = make("span", { class: "token", "data-token": i });
  element.textContent = rollout.tokens.texts[i];
  const one = facts(rollout, i);
  if (one.version >= 0) {
    element.style.backgroundColor = colourOf(mode, rollout, one);
    if (one.weight === 0) element.classList.add("out");
  }
  return element;
}

function showTip(target) {
  const tip = at("tip"), rollout = byRow.get(at("rollout").dataset.row);
  tip.hidden = !target || !rollout;
  if (tip.hidden) return;
  const i = Number(target.dataset.token), one = facts(rollout, i);
  const lines = [`${JSON.stringify(rollout.tokens.texts[i])}  id ${one.id}  token ${i + 1} of ${rollout.num_tokens}`];
  if (one.version < 0) lines.push("observation: no version wrote it");
  else {
    const age = rollout.outcome === "trained" ? `, staleness ${rollout.version - one.version}` : "";
    lines.push(`version     ${one.version}${age}`, `generator   ${number(one.mu, 6)}`);
    if (one.pi != null) {
      lines.push(`trainer     ${number(one.pi, 6)}`, `difference  ${number(one.difference)}`, `ratio       ${number(one.ratio)}`);
    }
    if (one.ref != null) lines.push(`reference   ${number(one.ref, 6)}`);
    if (one.weight != null) lines.push(`weight      ${one.weight}${one.clipped ? ", clipped" : ""}`);
    if (rollout.advantage != null) lines.push(`advantage   ${number(rollout.advantage)}`);
  }
  tip.textContent = lines.join("\n");
  const box = target.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = box.bottom + tip.offsetHeight + 8 > innerHeight ? `${box.top - tip.offsetHeight - 6}px` : `${box.bottom + 6}px`;
}
