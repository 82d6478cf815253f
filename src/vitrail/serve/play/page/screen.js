// The worlds side by side, each pixel scaled by a whole number.

const LARGEST = 512, GAP = 16, SMALLEST = 160;

export class Screen {
  constructor(place) {
    this.place = place;
    this.views = new Map();
  }

  show(views) {
    for (const view of views) {
      const { canvas, caption } = this.views.get(view.name) ?? this.add(view.name);
      if (canvas.width !== view.width || canvas.height !== view.height) this.size(canvas, view, views.length);
      const image = new ImageData(view.width, view.height);
      for (let from = 0, to = 0; from < view.rgb.length; to += 4) {
        image.data[to] = view.rgb[from++];
        image.data[to + 1] = view.rgb[from++];
        image.data[to + 2] = view.rgb[from++];
        image.data[to + 3] = 255;
      }
      canvas.getContext("2d").putImageData(image, 0, 0);
      const told = view.reward === null ? "" : ` · reward ${view.reward}${view.ended ? " · ended: reset to continue" : ""}`;
      caption.textContent = view.name + told;
    }
  }

  add(name) {
    const figure = document.createElement("figure");
    const made = { canvas: document.createElement("canvas"), caption: document.createElement("figcaption") };
    made.canvas.dataset.name = name;
    made.canvas.setAttribute("role", "img");
    made.canvas.setAttribute("aria-label", `${name}: the last frame`);
    figure.append(made.canvas, made.caption);
    this.place.append(figure);
    this.views.set(name, made);
    return made;
  }

  size(canvas, { width, height }, count) {
    canvas.width = width;
    canvas.height = height;
    const beside = (this.place.clientWidth + GAP) / count - GAP;
    const room = Math.min(Math.max(beside, SMALLEST), this.place.clientWidth, LARGEST);
    canvas.style.width = `${width * Math.max(1, Math.floor(room / Math.max(width, height)))}px`;
  }

  clear() {
    this.place.replaceChildren();
    this.views.clear();
  }
}
