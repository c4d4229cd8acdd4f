(() => {
  "use strict";
  const AXIS = 22, NAME = 16, ROW = 26, GAP = 8, SMALLEST = 20; // heights in pixels; a view in ns
  const STEPS = [1, 2, 5];
  const ns = (value, step, most = value) => { // `most` decides about the unit
    const [unit, size] = most >= 1e6 ? ["ms", 1e6] : most >= 1e3 ? ["µs", 1e3] : ["ns", 1];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
    return `${(value / size).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
  };
  const brief = (value) => { // as in the tables: three significant figures
    const rounded = Number(value.toPrecision(3));
    const [unit, size] = rounded >= 1e9 ? ["s", 1e9] : rounded >= 1e6 ? ["ms", 1e6] : ["µs", 1e3];
    const digits = rounded ? Math.min(Math.max(2 - Math.floor(Math.log10(rounded / size)), 0), 3) : 0;
    return `${(rounded / size).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
  };

  for (const figure of document.querySelectorAll("figure.timeline")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const canvas = figure.querySelector("canvas");
    const tip = figure.querySelector(".tip");
    const output = figure.querySelector("output");
    const pen = canvas.getContext("2d");
    const lanes = data.lanes.map(({ name, spans, visited }) => {
      const marks = [];
      let last = 0;
      for (let at = 0; at < spans.length; at += 5) {
        last += spans[at];
        marks.push({ start: last, end: last + spans[at + 1], name: data.texts[spans[at + 2]], full: data.full[spans[at + 2]],
          detail: data.texts[spans[at + 3]], series: data.series[spans[at + 4]] });
      }
      return { name, marks, visited, longest: marks.reduce((most, mark) => Math.max(most, mark.end - mark.start), 0) };
    });
    const marked = lanes.filter((lane) => lane.visited)
      .flatMap((lane) => lane.marks.filter((mark) => mark.series.marked))
      .sort((one, other) => one.start - other.start);
    let height = AXIS;
    for (const lane of lanes) { // a lane without a name belongs to the one above
      if (!lane.name) height -= GAP;
      lane.top = height + (lane.name ? NAME : 1);
      height = lane.top + ROW + GAP;
    }
    let [from, to, width, waiting, chosen] = [0, data.length, 1, false, null];

    const x = (time) => ((time - from) / (to - from)) * width;
    const time = (place) => from + (place / width) * (to - from);
    const first = (lane, moment) => { // index of the first mark that may reach into the view
      let [low, high] = [0, lane.marks.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (lane.marks[middle].start < moment - lane.longest) low = middle + 1; else high = middle;
      }
      return low;
    };
    const fitted = (text, room) => { // the text, or its start and an ellipsis
      if (pen.measureText(text).width <= room) return text;
      let [low, high] = [0, text.length];
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (pen.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle; else high = middle - 1;
      }
      return low > 2 ? `${text.slice(0, low)}…` : "";
    };
    const draw = () => {
      waiting = false;
      const scale = window.devicePixelRatio || 1;
      width = canvas.clientWidth || 1;
      canvas.width = width * scale;
      canvas.height = height * scale;
      canvas.style.height = `${height}px`;
      pen.scale(scale, scale);
      const style = getComputedStyle(figure);
      const [ink, soft, line, band] = ["--ink", "--soft", "--line", "--band"].map((name) => style.getPropertyValue(name));
      pen.font = `12px ${style.fontFamily}`;
      pen.textBaseline = "middle";
      const rough = ((to - from) * 90) / width;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = power * (STEPS.find((each) => each * power >= rough) || 10);
      for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
        pen.fillStyle = line;
        pen.fillRect(Math.round(x(tick)), AXIS - 4, 1, height);
        pen.fillStyle = soft;
        const text = ns(tick, step, to);
        const room = pen.measureText(text).width;
        if (x(tick) + room < width) pen.fillText(text, Math.max(x(tick) + 3, 0), 9);
      }
      for (const lane of lanes) {
        const { top } = lane;
        pen.fillStyle = band;
        pen.fillRect(0, top, width, ROW);
        pen.fillStyle = ink;
        pen.fillText(fitted(lane.name, width - 4), 2, top - NAME / 2);
        const begin = first(lane, from);
        for (const pass of [false, true]) { // marked series last, so that they stay visible
          let covered = -1; // right end of what this pass has drawn: marks within a pixel merge
          for (let at = begin; at < lane.marks.length && lane.marks[at].start <= to; at += 1) {
            const mark = lane.marks[at];
            if (mark.end < from || mark.series.marked !== pass) continue;
            const left = Math.max(x(mark.start), 0);
            const right = Math.min(Math.max(x(mark.end), left + 1), width);
            if (right <= covered) continue;
            covered = right < left + 1.5 ? Math.ceil(left) + 1 : right;
            pen.fillStyle = mark.series.color;
            const thin = right - left > 3 ? 0.5 : 0; // a gap between neighbours
            pen.fillRect(left, top, right - left - thin, ROW);
            if (mark === chosen) {
              pen.strokeStyle = ink;
              pen.lineWidth = 2;
              pen.strokeRect(left + 1, top + 1, Math.max(right - left - 2, 1), ROW - 2);
            }
            const name = right - left > 40 ? fitted(mark.name, right - left - 8) : "";
            if (name) {
              pen.fillStyle = mark.series.ink;
              pen.fillText(name, left + 4, top + ROW / 2 + 1);
            }
          }
        }
      }
      output.textContent = `${ns(from, (to - from) / 200, to)} to ${ns(to, (to - from) / 200)}`;
      figure.dataset.from = from;
      figure.dataset.to = to;
    };
    const redraw = () => {
      if (!waiting) requestAnimationFrame(draw);
      waiting = true;
    };
    const show = (start, end) => {
      const length = Math.min(Math.max(end - start, SMALLEST), data.length);
      from = Math.min(Math.max(start, 0), data.length - length);
      to = from + length;
      redraw();
    };
    const zoom = (factor, place = width / 2) => {
      const center = time(place);
      show(center - (center - from) / factor, center + (to - center) / factor);
    };
    const move = (part) => show(from + part * (to - from), to + part * (to - from));
    const at = (left, top) => { // the shortest mark at a place, within 3 pixels
      const lane = lanes.find((each) => top >= each.top && top <= each.top + ROW);
      if (!lane) return null;
      const reach = (3 * (to - from)) / width;
      let best = null;
      for (let index = first(lane, time(left) - reach); index < lane.marks.length; index += 1) {
        const mark = lane.marks[index];
        if (mark.start > time(left) + reach) break;
        if (mark.end < time(left) - reach) continue;
        const far = Math.max(mark.start - time(left), time(left) - mark.end, 0);
        if (!best || far < best.far || (far === best.far && mark.series.marked)) best = { mark, far };
      }
      return best && best.mark;
    };
    const tell = (mark, left, top) => {
      if (mark !== chosen) { chosen = mark; redraw(); }
      tip.hidden = !mark;
      if (!mark) return;
      const lines = [mark.full || mark.name, `${brief(mark.end - mark.start)} from ${brief(mark.start)}`, mark.series.name, mark.detail];
      tip.replaceChildren(...lines.filter(Boolean).map((text, number) => {
        const part = document.createElement(number ? "span" : "b");
        part.textContent = text;
        return part;
      }));
      tip.style.left = `${Math.max(Math.min(left + 12, width - tip.offsetWidth), 0)}px`;
      tip.style.top = `${top + 16}px`;
    };
    const next = () => {
      if (!marked.length) return;
      const after = chosen && chosen.series.marked ? chosen.start : from - 1;
      const mark = marked.find((each) => each.start > after) || marked[0];
      const room = Math.max((mark.end - mark.start) * 6, SMALLEST);
      show((mark.start + mark.end) / 2 - room, (mark.start + mark.end) / 2 + room);
      tell(mark, x(mark.start), lanes.find((each) => each.marks.includes(mark)).top + ROW - 12);
    };
    const actions = { in: () => zoom(2), out: () => zoom(0.5), reset: () => show(0, data.length), next };
    for (const button of figure.querySelectorAll("[data-do]")) {
      button.addEventListener("click", () => actions[button.dataset.do]());
    }
    const keys = { "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.reset, Home: actions.reset,
      n: next, N: next, ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
      ArrowUp: actions.in, ArrowDown: actions.out, Escape: () => tell(null) };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
      event.preventDefault();
      keys[event.key]();
    });
    canvas.addEventListener("wheel", (event) => { // without Ctrl and before a click, the page scrolls
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!event.ctrlKey && !event.metaKey && !sideways && document.activeElement !== canvas) return;
      event.preventDefault();
      if (sideways) move(event.deltaX / width); else zoom(2 ** (-event.deltaY / 200), event.offsetX);
    }, { passive: false });
    const touches = new Map();
    canvas.addEventListener("pointerdown", (event) => {
      touches.set(event.pointerId, event.offsetX);
      canvas.setPointerCapture(event.pointerId);
      tell(at(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = touches.get(event.pointerId);
      if (before === undefined) {
        tell(at(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
        return;
      }
      const other = [...touches].find(([id]) => id !== event.pointerId);
      if (other) { // two fingers: keep the moments below both of them
        const [one, fixed] = [time(before), time(other[1])];
        const apart = event.offsetX - other[1];
        if (Math.abs(apart) > 5) {
          const scale = Math.abs((one - fixed) / apart);
          show(fixed - other[1] * scale, fixed + (width - other[1]) * scale);
        }
      } else if (Math.abs(event.offsetX - before) > 0) {
        move((before - event.offsetX) / width);
        if (Math.abs(event.offsetX - before) > 3) tell(null);
      }
      touches.set(event.pointerId, event.offsetX);
    });
    for (const kind of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(kind, (event) => touches.delete(event.pointerId));
    }
    canvas.addEventListener("pointerleave", () => { if (!touches.size) tell(null); });
    new ResizeObserver(redraw).observe(canvas);
    new MutationObserver(redraw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    matchMedia("print").addEventListener("change", draw);
    draw();
  }
})();
