// Which action is meant: by keys held together, or by a button under a pointer or a finger.

const SIGNS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓" };
const PLACES = { ArrowUp: "1 / 2", ArrowLeft: "2 / 1", ArrowRight: "2 / 3", ArrowDown: "3 / 2" };

export class Keys {
  /** `changed` is called whenever an action begins. */
  constructor(changed) {
    this.actions = [];
    this.held = []; // keys, the latest last
    this.button = null; // the action of the button that is held
    this.tapped = null; // an action that may be over before anyone asks
    this.changed = changed;
    addEventListener("keydown", (event) => this.down(event));
    addEventListener("keyup", (event) => this.up(event.code));
    addEventListener("blur", () => this.release());
  }

  /** `beside` is whether a model and a simulator are played together. */
  offer(actions, arrows, codes, beside) {
    this.actions = actions;
    this.release();
    arrows.replaceChildren();
    codes.replaceChildren();
    actions.forEach((action, number) => {
      const arrow = action.keys.length === 1 && SIGNS[action.keys[0]];
      const digit = action.keys.length === 0 || action.keys[0].startsWith("Digit");
      const alone = beside && !action.model;
      if (arrow) arrows.append(this.made(number, arrow, action.name, alone, PLACES[action.keys[0]]));
      else if (digit) codes.append(this.made(number, action.name, action.model ? `action ${action.name}` : action.name, alone));
    });
  }

  made(number, sign, label, alone, area) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = sign;
    button.setAttribute("aria-label", label);
    if (alone) {
      button.classList.add("alone");
      button.title = "moves the simulator alone";
    }
    if (area) button.style.gridArea = area;
    const end = () => {
      if (this.button === number) this.button = null;
      button.classList.remove("held");
    };
    button.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      button.setPointerCapture(event.pointerId);
      button.classList.add("held");
      this.button = this.tapped = number;
      this.changed();
    });
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) button.addEventListener(name, end);
    button.addEventListener("click", (event) => {
      if (event.detail) return; // a pointer's click was told by its going down; this is Enter or a screen reader
      this.tapped = number;
      this.changed();
    });
    return button;
  }

  down(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest?.("input, select")) return;
    if (!this.actions.some((action) => action.keys.includes(event.code))) return;
    event.preventDefault();
    if (event.repeat) return;
    this.held = [...this.held.filter((key) => key !== event.code), event.code];
    this.tapped = this.meant();
    this.changed();
  }

  up(code) {
    this.held = this.held.filter((key) => key !== code);
  }

  release() {
    this.held = [];
    this.button = this.tapped = null;
  }

  /** Of the actions whose keys are all held, one of the most keys; of several, that of the latest key. */
  meant() {
    if (this.button !== null) return this.button;
    let best = null, worth = -1;
    this.actions.forEach(({ keys }, number) => {
      if (!keys.length || !keys.every((key) => this.held.includes(key))) return;
      const value = keys.length * 1000 + Math.max(...keys.map((key) => this.held.indexOf(key)));
      if (value > worth) [best, worth] = [number, value];
    });
    return best;
  }

  /** The action to do now, or null. */
  take() {
    const action = this.meant() ?? this.tapped;
    this.tapped = null;
    return action;
  }
}
