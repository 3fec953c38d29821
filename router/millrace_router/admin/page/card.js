// A figure: the values of one or two series, and their lines over the last minutes.
const WIDTH = 300, HEIGHT = 80, SPANS = 60;  // HEIGHT and WIDTH as in the template's viewBox

export class Card {
  // series: {name, value (recent, all → number), line (one span's traffic → number), show (number → text)}, where
  // undefined is no number.
  constructor(title, series) {
    this.root = document.getElementById("card").content.firstElementChild.cloneNode(true);
    const part = (name) => this.root.querySelector(name);
    Object.assign(this, { series, top: part(".top"), paths: this.root.querySelectorAll("path") });
    part(".title").textContent = title;
    this.values = series.map(({ name }) => {
      const [value, about] = [document.createElement("b"), document.createElement("small")];
      Object.assign(about, { textContent: name, className: series.length > 1 ? "line" : "" });
      part(".values").append(value, about);
      return value;
    });
  }

  show(recent, all) {
    const lines = this.series.map(({ line }) => recent.map(line));
    const top = ceiling(Math.max(0, ...lines.flat().filter(Number.isFinite)));
    this.top.textContent = top ? this.series[0].show(top) : "";
    this.series.forEach(({ value, show }, i) => {
      const found = value(recent, all);
      this.values[i].textContent = found === undefined ? "–" : show(found);
      this.paths[i].setAttribute("d", path(lines[i], top || 1));
    });
  }
}

// The next of 1, 2, 5, 10, 20, …, however small; 0 of 0.
function ceiling(value) {
  if (!value) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((times) => times * power).find((bound) => bound >= value * 0.999);
}

// Of values of successive spans, the last one at the right. undefined makes a gap, and a value between gaps a dot.
function path(values, top) {
  const place = (value, i) => {
    const x = ((SPANS - values.length + i) / (SPANS - 1)) * WIDTH;
    return `${x.toFixed(1)} ${(HEIGHT * (1 - value / top)).toFixed(1)}`;
  };
  return values.map((value, i) => {
    if (value === undefined) return "";
    const goes = values[i - 1] !== undefined, alone = !goes && values[i + 1] === undefined;
    return `${goes ? "L" : "M"}${place(value, i)}${alone ? "h1" : ""}`;
  }).join("");
}
