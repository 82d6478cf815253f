// One loop: an action goes out when the frame of the last has come, and not before its time.

import { Keys } from "./keys.js";
import { connect } from "./link.js";
import { Screen } from "./screen.js";

const $ = (id) => document.getElementById(id);
const SAID = { real: "the simulator's beginning", picture: "the picture given", any: "one by chance" };
const WINDOW = 3000; // milliseconds over which frames are counted
const LEGIBLE = 4000; // milliseconds that an error stays, however well the world goes on
const SEEDS = 2 ** 31;

const screen = new Screen($("views"));
const keys = new Keys(() => pump());
let hello = null; // what can be played
let link = null;
let begun = false; // there is a world to act in
let waiting = false; // for an answer
let next = null; // what is asked as soon as it has come
let paused = false;
let over = false; // nothing moves any more
let sent = 0; // when the last action was due
let timer = 0;
let times = []; // when the frames of the last seconds came
let told = 0; // when the last error was shown
let pointed = false; // the last that was used is a pointer, not a key

function open() {
  link?.close();
  begun = waiting = false;
  next = null;
  let mine = null; // what an older socket still says is not heard
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
  else tell("This world has no picture to start from.", "Give one of yours.");
}

function offerStarts() {
  const starts = [...hello.choices, ...Array(hello.starts).keys()];
  const chosen = $("start").value;
  const option = (start) => new Option(SAID[start] ?? `picture ${start + 1} of the model`, JSON.stringify(start));
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
    arrows ? "Arrows move." : "",
    digits ? "Digits are the model's own actions." : "",
    apart ? "Nobody has told what the arrows are to the model: they move the simulator alone." : "",
    alone.length ? `The model has no action for ${alone.join(", ")}: the simulator moves alone.` : "",
    hello.idle === null ? "Time stands still while no key is held." : "",
  ].filter(Boolean);
}

function reset() {
  const wanted = $("wanted").value.trim();
  if (!link || !$("start").value) return;
  if (!/^[0-9]*$/.test(wanted) || Number(wanted) >= SEEDS) {
    tell(`${wanted} is no seed.`, `Seeds are whole numbers below ${SEEDS}.`);
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
  hush();
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
  if (now - told > LEGIBLE) hush();
  begun = true;
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
  if (!hello || !begun || waiting || paused || over || document.hidden) return;
  const now = performance.now(), each = 1000 / Number($("rate").value);
  const early = sent + each - now;
  if (early > 1) {
    timer = setTimeout(pump, early);
    return;
  }
  const action = keys.take() ?? hello.idle;
  if (action === null) return;
  sent = early < -each ? now : sent + each; // a timer that is late slows nothing, and a long wait is made up by nothing
  waiting = true;
  link.step(action);
}

function refused({ problem, remedy, begun: goes }) {
  begun = goes;
  answered();
  tell(problem, remedy);
  pump();
}

function ended(reason) {
  begun = waiting = false;
  link = null;
  // Where the server closes it for a reason, it mostly has said more before.
  if (!reason) tell("The server has gone.", "Start it again, and connect again.");
  else if ($("error").hidden) tell(`The server has closed the connection: ${reason}.`, "Connect again.");
  $("again").hidden = false;
}

function tell(problem, remedy) {
  $("error").textContent = `${problem}\n${remedy}`;
  $("error").hidden = false;
  told = performance.now();
}

function hush() {
  $("error").hidden = true;
}

async function upload(file) {
  if (!file || !link || !hello?.most_bytes) return;
  if (file.size > hello.most_bytes) {
    tell(`${file.name} has ${file.size.toLocaleString("en")} bytes.`, `At most ${hello.most_bytes.toLocaleString("en")} are read.`);
    return;
  }
  const bytes = await file.arrayBuffer();
  if (link) ask(() => link.picture(bytes));
}

// Keys steer again once a setting is made. Who makes it by keys still needs them there, and leaves it by Tab.
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
  $("pause").textContent = paused ? "Go on" : "Pause";
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
  hush();
  open();
});
open();
