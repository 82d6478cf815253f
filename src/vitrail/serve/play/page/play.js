// The game loop: the next action is sent after the frame of the last one arrived, at most at the chosen rate.

import { Keys } from "./keys.js";
import { connect } from "./link.js";
import { Screen } from "./screen.js";

const $ = (id) => document.getElementById(id);
const START_LABELS = { real: "first frame of the simulator", picture: "uploaded image", any: "random start image" };
const WINDOW = 3000; // milliseconds over which frames are counted
const LEGIBLE = 4000; // minimum milliseconds that an error is shown
const SEEDS = 2 ** 31;

const screen = new Screen($("views"));
const keys = new Keys(() => pump());
let hello = null; // what can be played
let link = null;
let running = false; // whether there is a world to act in
let waiting = false; // for a reply
let next = null; // request to send after the reply
let paused = false;
let over = false; // whether all worlds have ended
let sent = 0; // time at which the last action was due
let timer = 0;
let times = []; // arrival times of recent frames
let shown = 0; // time at which the last error was shown
let pointed = false; // whether the last input came from a pointer instead of a key

function open() {
  link?.close();
  running = waiting = false;
  next = null;
  let mine = null; // messages of an older socket are ignored
  const current = (heard) => (message) => (mine === link ? heard(message) : undefined);
  const heard = { hello: greeted, frame: seen, error: refused, end: ended };
  mine = link = connect(Object.fromEntries(Object.entries(heard).map(([name, call]) => [name, current(call)])));
}

function greeted(message) {
  hello = message;
  $("again").hidden = true;
  $("title").textContent = document.title = hello.title;
  $("rate").value = hello.rate;
  $("most").textContent = $("rate").value;
  $("upload").hidden = !hello.most_bytes;
  keys.offer(hello.actions, $("arrows"), $("codes"), hello.views.length > 1);
  screen.clear();
  offerStarts();
  $("hint").textContent = hints().join(" ");
  if ($("start").value) reset();
  else showError("The model has no start image.", "Upload an image.");
}

function offerStarts() {
  const starts = [...hello.choices, ...Array(hello.starts).keys()];
  const chosen = $("start").value;
  const option = (start) => new Option(START_LABELS[start] ?? `start image ${start + 1}`, JSON.stringify(start));
  $("start").replaceChildren(...starts.map(option));
  if (starts.some((start) => JSON.stringify(start) === chosen)) $("start").value = chosen;
}

function hints() {
  const arrows = hello.actions.some(({ keys }) => keys[0]?.startsWith("Arrow"));
  const digits = hello.actions.some(({ keys }) => keys[0]?.startsWith("Digit"));
  const both = hello.views.length > 1;
  const apart = both && arrows && !hello.actions.some(({ model, real }) => model && real);
  const alone = both && !apart ? hello.actions.filter(({ model }) => !model).map(({ name }) => name) : [];
  return [
    arrows ? "Arrow keys move." : "",
    digits ? "Digit keys are latent actions of the model." : "",
    apart ? "The model has no mapping from arrow keys to actions: they only move the simulator." : "",
    alone.length ? `The model has no action for ${alone.join(", ")}: only the simulator moves.` : "",
    hello.idle === null ? "The world pauses while no key is held." : "",
  ].filter(Boolean);
}

function reset() {
  const wanted = $("wanted").value.trim();
  if (!link || !$("start").value) return;
  if (!/^[0-9]*$/.test(wanted) || Number(wanted) >= SEEDS) {
    showError(`${wanted} is not a seed.`, `Give a whole number below ${SEEDS}.`);
    return;
  }
  ask(() => link.reset(JSON.parse($("start").value), wanted === "" ? null : Number(wanted)));
}

function ask(send) {
  if (waiting) {
    next = send;
    return;
  }
  waiting = true;
  hideError();
  send();
}

function answered() {
  const send = next;
  waiting = false;
  next = null;
  if (send) ask(send);
}

function seen(frame) {
  const now = performance.now();
  if (now - shown > LEGIBLE) hideError();
  running = true;
  answered();
  times = frame.step ? [...times.filter((time) => now - time < WINDOW), now] : [];
  const last = times.length - 1;
  $("fps").textContent = last > 1 ? ((1000 * last) / (times[last] - times[0])).toFixed(1) : "–";
  $("step").textContent = frame.step;
  $("seed").textContent = frame.seed;
  $("ms").textContent = frame.ms;
  if (frame.start === "picture" && !hello.choices.includes("picture")) {
    hello.choices.push("picture");
    offerStarts();
  }
  if (!frame.step) $("start").value = JSON.stringify(frame.start);
  screen.show(frame.views);
  over = frame.views.every((view) => view.ended);
  pump();
}

function pump() {
  clearTimeout(timer);
  if (!hello || !running || waiting || paused || over || document.hidden) return;
  const now = performance.now(), each = 1000 / Number($("rate").value);
  const early = sent + each - now;
  if (early > 1) {
    timer = setTimeout(pump, early);
    return;
  }
  const action = keys.take() ?? hello.idle;
  if (action === null) return;
  sent = early < -each ? now : sent + each; // late timers do not lower the rate, and long waits are not caught up
  waiting = true;
  link.step(action);
}

function refused({ problem, remedy, is_running: isRunning }) {
  running = isRunning;
  answered();
  showError(problem, remedy);
  pump();
}

function ended(reason) {
  running = waiting = false;
  link = null;
  // Before closing for a reason, the server usually sends an error.
  if (!reason) showError("The server has stopped.", "Start it again and reconnect.");
  else if ($("error").hidden) showError(`The server closed the connection: ${reason}.`, "Reconnect.");
  $("again").hidden = false;
}

function showError(problem, remedy) {
  $("error").textContent = `${problem}\n${remedy}`;
  $("error").hidden = false;
  shown = performance.now();
}

function hideError() {
  $("error").hidden = true;
}

async function upload(file) {
  if (!file || !link || !hello?.most_bytes) return;
  if (file.size > hello.most_bytes) {
    showError(`${file.name} has ${file.size.toLocaleString("en")} bytes.`, `The maximum is ${hello.most_bytes.toLocaleString("en")} bytes.`);
    return;
  }
  const bytes = await file.arrayBuffer();
  if (link) ask(() => link.picture(bytes));
}

// After a setting is changed with the pointer, keys control the game again. Keyboard users leave a setting by Tab.
function leave({ target }) {
  if (pointed) target.blur();
}

addEventListener("pointerdown", () => (pointed = true), true);
addEventListener("keydown", () => (pointed = false), true);
$("settings").addEventListener("submit", (event) => {
  event.preventDefault();
  $("wanted").blur();
  reset();
});
$("start").addEventListener("change", (event) => {
  leave(event);
  reset();
});
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Resume" : "Pause";
  keys.release();
  times = [];
  pump();
});
$("rate").addEventListener("input", () => {
  $("most").textContent = $("rate").value;
  pump();
});
$("rate").addEventListener("change", leave);
$("file").addEventListener("change", ({ target }) => {
  target.blur();
  upload(target.files[0]).finally(() => (target.value = ""));
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  upload(event.dataTransfer.files[0]);
});
document.addEventListener("visibilitychange", () => {
  keys.release();
  times = [];
  pump();
});
$("again").addEventListener("click", () => {
  hideError();
  open();
});
open();
