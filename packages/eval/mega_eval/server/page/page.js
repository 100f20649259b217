"use strict";
const $ = (id) => document.getElementById(id);
const FIELDS = ["mode", "system", "temperature", "top_p", "max_tokens", "seed", "tools", "probabilities", "theme"];
const STORE = "mega.chats", SETTINGS = "mega.settings", MOST = 50; // conversations kept
let models = [], running = null, chats = [], chat = null, pictures = [];

const make = (tag, options = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), options);
  node.append(...children);
  return node;
};
const button = (text, act, title = "") => make("button", { type: "button", onclick: act, title }, text);

// ---- state, kept in the browser

function save() {
  chats = [chat, ...chats.filter((one) => one !== chat)].filter((one) => one.turns.length).slice(0, MOST);
  for (let kept = chats; ; kept = kept.slice(0, -1)) {
    try { localStorage.setItem(STORE, JSON.stringify(kept)); return; }
    catch { if (kept.length < 2) return; } // full: the oldest conversations go first
  }
}

function load(key, empty) {
  try { return JSON.parse(localStorage.getItem(key)) || empty; } catch { return empty; }
}

function saveSettings() {
  const values = { model: $("model").value };
  for (const id of FIELDS) values[id] = $(id).type === "checkbox" ? $(id).checked : $(id).value;
  localStorage.setItem(SETTINGS, JSON.stringify(values));
  sessionStorage.setItem("mega.key", $("key").value);
  document.documentElement.dataset.theme = $("theme").value;
  $("text").placeholder = $("mode").value === "chat" ? "Message" : "Text to continue";
}

function loadSettings() {
  const values = load(SETTINGS, {});
  for (const id of FIELDS) if (id in values) $(id).type === "checkbox" ? ($(id).checked = values[id]) : ($(id).value = values[id]);
  $("key").value = sessionStorage.getItem("mega.key") || "";
  saveSettings();
  return values.model;
}

function openChat(one) {
  if (running) running.abort();
  chat = one || { turns: [] };
  $("chats").hidden = $("chats").hidden || innerWidth < 832;
  show();
  listChats();
  $("text").focus();
}

function listChats() {
  const rows = chats.map((one) => {
    const first = one.turns.find((turn) => turn.role === "user");
    const remove = () => { chats = chats.filter((other) => other !== one); localStorage.setItem(STORE, JSON.stringify(chats)); one === chat ? openChat() : listChats(); };
    const row = make("div", { className: one === chat ? "now" : "" }, button((first && first.content.slice(0, 60)) || "…", () => openChat(one)), button("×", remove, "Delete the conversation"));
    row.lastChild.ariaLabel = "Delete the conversation";
    return row;
  });
  $("chats").replaceChildren(...(rows.length ? rows : [make("p", { className: "quiet" }, "No conversations yet.")]));
}

// ---- server

const headers = () => {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: "Bearer " + key } : {}) };
};

async function problem(response) {
  try { return (await response.json()).error.message; } catch { return "HTTP " + response.status; }
}

async function loadModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw new Error(await problem(response));
  const chosen = $("model").value || load(SETTINGS, {}).model;
  models = (await response.json()).data;
  $("model").replaceChildren(...models.map((one) => make("option", { value: one.id }, one.parent ? `${one.id} (adapter)` : one.id)));
  if (models.some((one) => one.id === chosen)) $("model").value = chosen;
  showModel();
}

function currentModel() { return models.find((one) => one.id === $("model").value); }

function showModel() {
  const model = currentModel();
  $("add-picture").hidden = !(model && model.images);
  $("status").textContent = model ? `${model.max_model_len} tokens of context` : "";
}

function messagesOf(turns) {
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.role === "user" && turn.pictures && turn.pictures.length)
      messages.push({ role: "user", content: [...turn.pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: turn.content }] });
    else if (turn.role === "user") messages.push({ role: "user", content: turn.content });
    else if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.id, content: turn.content });
    else {
      const calls = turn.calls && turn.calls.length ? { tool_calls: turn.calls } : {};
      const reasoning = turn.reasoning ? { reasoning_content: turn.reasoning } : {};
      messages.push({ role: "assistant", content: turn.content, ...reasoning, ...calls });
    }
  }
  return messages;
}

function requestOf(turns) {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const body = {
    model: $("model").value, stream: true, stream_options: { include_usage: true }, max_tokens: number("max_tokens"),
    temperature: number("temperature"), top_p: number("top_p"), seed: number("seed"),
  };
  if ($("mode").value === "text") {
    const scores = $("probabilities").checked ? { logprobs: 8 } : {};
    return ["v1/completions", { ...body, max_tokens: body.max_tokens || 128, ...scores, prompt: turns[turns.length - 1].content }];
  }
  const tools = $("tools").value.trim();
  if (tools) body.tools = JSON.parse(tools);
  if ($("probabilities").checked) Object.assign(body, { logprobs: true, top_logprobs: 8 });
  return ["v1/chat/completions", { ...body, messages: messagesOf(turns) }];
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const one of events) if (one.startsWith("data: ") && one !== "data: [DONE]") yield JSON.parse(one.slice(6));
  }
}

async function answer() {
  if (running) return;
  const turn = { role: "assistant", content: "", reasoning: "", calls: [], tokens: [], model: $("model").value };
  const start = performance.now(), control = new AbortController(), own = chat;
  running = control;
  $("send").hidden = !($("stop").hidden = false);
  $("status").textContent = "";
  try {
    if (!models.length) await loadModels();
    const [path, body] = requestOf(chat.turns);
    chat.turns.push(turn);
    show();
    const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: control.signal });
    if (!response.ok) throw new Error(await problem(response));
    for await (const part of eventsOf(response)) {
      if (part.error) throw new Error(part.error.message);
      for (const choice of part.choices) extend(turn, choice);
      if (part.usage) {
        const count = part.usage.completion_tokens, seconds = (performance.now() - start) / 1000;
        turn.usage = `${part.usage.prompt_tokens} + ${count} tokens, ${(count / seconds).toFixed(1)} tokens/s`;
      }
      if (own === chat) showLast();
    }
  } catch (error) {
    if (!chat.turns.includes(turn) && own === chat) chat.turns.push(turn);
    turn.error = error.name === "AbortError" ? "stopped" : error.message;
  }
  if (!turn.tokens.length) delete turn.tokens;
  running = null;
  $("send").hidden = !($("stop").hidden = true);
  if (own === chat) { save(); show(); listChats(); }
}

function extend(turn, choice) {
  const delta = choice.delta || { content: choice.text };
  turn.content += delta.content || "";
  turn.reasoning += delta.reasoning_content || "";
  for (const call of delta.tool_calls || []) {
    if (!turn.calls[call.index]) turn.calls[call.index] = { id: call.id, type: "function", function: { name: call.function.name, arguments: "" } };
    turn.calls[call.index].function.arguments += call.function.arguments || "";
  }
  turn.tokens.push(...tokensOf(choice.logprobs));
  if (choice.finish_reason === "length") turn.cut = true;
}

// ---- token probabilities: {text, logprob, top: [[text, logprob], ...]}

function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((one) => ({ bytes: one.bytes, logprob: one.logprob, top: one.top_logprobs.map((other) => [other.token, other.logprob]) }));
  return logprobs.tokens.map((text, at) => ({ text, logprob: logprobs.token_logprobs[at], top: Object.entries(logprobs.top_logprobs[at] || {}) }));
}

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 0.01 ? share.toFixed(2) + " %" : share.toExponential(1) + " %";
};
const visible = (text) => (text === "" ? "(nothing)" : text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥"));

function showTip(token, node) {
  const rows = [...token.top].sort((a, b) => b[1] - a[1]).map(([text, logprob]) =>
    make("tr", { className: logprob === token.logprob ? "own" : "" }, make("td", {}, make("code", {}, visible(text))), make("td", {}, percent(logprob))));
  $("tip").replaceChildren(make("table", {}, make("tr", {}, make("th", {}, "Token"), make("th", {}, "Probability")), ...rows));
  $("tip").hidden = false;
  const place = node.getBoundingClientRect(), box = $("tip").getBoundingClientRect();
  $("tip").style.left = Math.max(4, Math.min(place.left, innerWidth - box.width - 4)) + "px";
  $("tip").style.top = (place.bottom + box.height + 8 < innerHeight ? place.bottom + 4 : Math.max(4, place.top - box.height - 4)) + "px";
}

function tokenNodes(tokens) {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const box = make("div", { className: "tokens" });
  for (const token of tokens) {
    const text = token.bytes ? decoder.decode(Uint8Array.from(token.bytes), { stream: true }) : token.text;
    const node = make("span", { tabIndex: 0, title: percent(token.logprob) }, text || "·");
    node.style.backgroundColor = `hsl(${Math.round(130 * Math.exp(token.logprob))} 75% 50% / .35)`;
    for (const kind of ["mouseenter", "focus", "click"]) node.addEventListener(kind, () => showTip(token, node));
    for (const kind of ["mouseleave", "blur"]) node.addEventListener(kind, () => { $("tip").hidden = true; });
    box.append(node);
  }
  return box;
}

// ---- turns

function bodyOf(turn, waits) {
  const nodes = [];
  if (turn.reasoning) {
    const details = make("details", { open: waits && !turn.content }, make("summary", {}, "Reasoning"), make("div", { className: "thought" }, turn.reasoning));
    nodes.push(details);
  }
  const said = make("div", { className: "said" });
  if (turn.tokens && turn.tokens.length && $("probabilities").checked) said.append(tokenNodes(turn.tokens));
  else if (turn.role === "assistant" && $("mode").value === "chat") said.append(...Markdown.render(turn.content));
  else said.append(turn.content);
  for (const url of turn.pictures || []) said.prepend(make("img", { src: url, alt: "image of the message" }));
  if (waits && !turn.calls.length) said.classList.add("waits");
  nodes.push(said);
  for (const call of turn.calls || []) {
    if (!call) continue;
    let shown = call.function.arguments;
    try { shown = JSON.stringify(JSON.parse(shown), null, 2); } catch { /* not complete yet */ }
    nodes.push(make("details", { open: true, className: "call" }, make("summary", {}, `Calls ${call.function.name}`), make("pre", {}, shown)));
  }
  if (turn.error) nodes.push(make("div", { className: turn.error === "stopped" ? "quiet" : "error" }, turn.error));
  return nodes;
}

function actsOf(turn, at) {
  const acts = [button("Copy", () => navigator.clipboard && navigator.clipboard.writeText(turn.content))];
  if (turn.role === "user") acts.push(button("Edit", () => edit(at)));
  if (turn.role === "assistant") acts.push(button("Retry", () => retry(at)));
  const facts = [turn.model, turn.usage, turn.cut ? "cut at the limit" : ""].filter(Boolean).join(" · ");
  return make("div", { className: "acts" }, ...acts, ...(turn.role === "assistant" && facts ? [make("span", { className: "quiet" }, facts)] : []));
}

function turnNode(turn, at) {
  const waits = running !== null && at === chat.turns.length - 1 && turn.role === "assistant";
  if (turn.role === "tool")
    return make("article", { className: "tool" }, make("details", {}, make("summary", {}, `Result of ${turn.name}`), make("pre", {}, turn.content)));
  return make("article", { className: turn.role }, ...bodyOf(turn, waits), ...(waits ? [] : [actsOf(turn, at)]));
}

function show() {
  const nodes = chat.turns.map(turnNode);
  const last = chat.turns[chat.turns.length - 1];
  if (last && last.role === "assistant" && last.calls.length && !running) nodes.push(resultForm(last));
  $("turns").replaceChildren(...(nodes.length ? nodes : [make("p", { className: "empty" }, "Ask the model something.")]));
  $("turns").scrollTop = $("turns").scrollHeight;
}

function showLast() {
  const follows = $("turns").scrollHeight - $("turns").scrollTop - $("turns").clientHeight < 80;
  const at = chat.turns.length - 1, node = $("turns").children[at];
  if (node) node.replaceWith(turnNode(chat.turns[at], at));
  if (follows) $("turns").scrollTop = $("turns").scrollHeight;
}

function resultForm(turn) {
  const fields = turn.calls.map((call) => make("textarea", { className: "result", rows: 2, ariaLabel: `Result of ${call.function.name}`, placeholder: `Result of ${call.function.name}` }));
  const go = button("Send results", () => {
    turn.calls.forEach((call, at) => chat.turns.push({ role: "tool", id: call.id, name: call.function.name, content: fields[at].value }));
    answer();
  });
  return make("div", { className: "results" }, ...fields, go);
}

function edit(at) {
  if (running) running.abort();
  const turn = chat.turns[at];
  const field = make("textarea", { value: turn.content, rows: 3, ariaLabel: "Edited message" });
  const go = () => {
    chat.turns = [...chat.turns.slice(0, at), { ...turn, content: field.value }];
    answer();
  };
  field.onkeydown = (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); go(); } if (event.key === "Escape") show(); };
  $("turns").children[at].replaceChildren(make("div", { className: "edit" }, field, make("div", { className: "acts" }, button("Send", go), button("Cancel", show))));
  field.focus();
}

function retry(at) {
  if (running) return;
  chat.turns = chat.turns.slice(0, at);
  answer();
}

function send() {
  const text = $("text").value;
  if (running || (!text.trim() && !pictures.length)) return;
  const images = pictures.length ? { pictures } : {};
  chat.turns.push({ role: "user", content: text, ...images });
  [$("text").value, pictures] = ["", []];
  showPictures();
  grow();
  answer();
}

// ---- images, dropped, pasted or chosen; only for models that take them

function addPictures(files) {
  const model = currentModel();
  if (!model || !model.images) { $("status").textContent = "This model does not take images."; return; }
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    const reader = new FileReader();
    reader.onload = () => { pictures.push(reader.result); showPictures(); };
    reader.readAsDataURL(file);
  }
}

function showPictures() {
  $("pictures").replaceChildren(...pictures.map((url, at) => {
    const remove = button("", () => { pictures.splice(at, 1); showPictures(); }, "Remove the image");
    remove.append(make("img", { src: url, alt: "image to send" }));
    return remove;
  }));
}

// ---- events

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = $("text").scrollHeight + 2 + "px";
}

function toggle(panel, opener) {
  $(panel).hidden = !$(panel).hidden;
  $(opener).ariaExpanded = String(!$(panel).hidden);
}

$("form").onsubmit = (event) => { event.preventDefault(); send(); };
$("text").oninput = grow;
$("text").onkeydown = (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } };
$("stop").onclick = () => running && running.abort();
$("new").onclick = () => openChat();
$("menu").onclick = () => toggle("chats", "menu");
$("open-settings").onclick = () => toggle("settings", "open-settings");
$("model").onchange = () => { saveSettings(); showModel(); };
$("key").onchange = () => { saveSettings(); loadModels().catch(fail); };
$("picture").onchange = () => { addPictures($("picture").files); $("picture").value = ""; };
$("settings").addEventListener("change", () => { saveSettings(); if (!running) show(); });
document.onkeydown = (event) => {
  if (event.key === "Escape" && running) running.abort();
  if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) { event.preventDefault(); openChat(); }
};
document.ondragover = (event) => { event.preventDefault(); document.body.classList.add("dropping"); };
document.ondragleave = () => document.body.classList.remove("dropping");
document.ondrop = (event) => { event.preventDefault(); document.body.classList.remove("dropping"); addPictures(event.dataTransfer.files); };
document.onpaste = (event) => { const files = [...event.clipboardData.files]; if (files.length) addPictures(files); };

const fail = (error) => { $("status").textContent = error.message; };
loadSettings();
chats = load(STORE, []);
openChat(chats[0]);
loadModels().catch(fail);
