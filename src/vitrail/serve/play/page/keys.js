// The current action, from keys held together or from a button under a pointer.

const SIGNS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓" };
const PLACES = { ArrowUp: "1 / 2", ArrowLeft: "2 / 1", ArrowRight: "2 / 3", ArrowDown: "3 / 2" };

export class Keys {
  /** `changed` is called when an action starts. */
  constructor(changed) {
    this.actions = [];
    this.held = []; // held keys, in the order of pressing
    this.button = null; // the action of the held button
    this.tapped = null; // an action that may end before it is read
    this.changed = changed;
    addEventListener("keydown", (event) => this.down(event));
    addEventListener("keyup", (event) => this.up(event.code));
    addEventListener("blur", () => this.release());
  }

  /** Show the buttons of the actions. `beside`: whether a model and a simulator are played together. */
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
      button.title = "only moves the simulator";
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
      if (event.detail) return; // pointer clicks are handled by pointerdown; this is Enter or a screen reader
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

  /** The action with the most keys among those whose keys are all held; ties go to the latest key. */
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

  /** Take the current action, or null. */
  take() {
    const action = this.meant() ?? this.tapped;
    this.tapped = null;
    return action;
  }
}
