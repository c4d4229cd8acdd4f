
(() => {
  "use strict";
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const wantsDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : wantsDark.matches);
  const tell = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-pressed", String(isDark()));
    theme.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    tell();
  });
  wantsDark.addEventListener("change", tell);
  tell();

  const folds = [...document.querySelectorAll("details.fold")];
  let closed = []; // sections that only a printout shows
  addEventListener("beforeprint", () => {
    closed = folds.filter((fold) => !fold.open);
    closed.forEach((fold) => { fold.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((fold) => { fold.open = false; }));

  for (const name of document.querySelectorAll("details.full")) { // a tip with the full names
    const [short, ...full] = [...name.children];
    short.title = full.map((each) => each.textContent).join("\n");
  }

  const missing = (text) => text === "" || text === "-";
  const compare = (a, b, sign) => {
    const [x, y] = [a.dataset.v, b.dataset.v];
    if (x !== undefined && y !== undefined) return sign * (Number(x) - Number(y));
    if ((x === undefined) !== (y === undefined)) return x === undefined ? 1 : -1; // such as `refused`
    const [s, t] = [a.textContent, b.textContent];
    if (missing(s) !== missing(t)) return missing(s) ? 1 : -1; // what is not known comes last
    return sign * s.localeCompare(t, "en", { numeric: true });
  };
  const regroup = (table) => { // hide a value of the leading columns that the row above shows
    let above = [];
    for (const row of table.tBodies[0].rows) {
      if (row.hidden) continue;
      const leading = [...row.cells].slice(0, Number(table.dataset.groups ?? 0));
      const texts = leading.map((cell) => cell.textContent);
      let same = above.length > 0;
      leading.forEach((cell, at) => {
        same = same && texts[at] === above[at];
        cell.classList.toggle("same", same);
      });
      above = texts;
    }
  };
  for (const table of document.querySelectorAll("table")) {
    const body = table.tBodies[0];
    const original = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.firstElementChild.addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        const next = now === null ? "ascending" : now === "ascending" ? "descending" : null;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        let rows = original;
        if (next) {
          head.setAttribute("aria-sort", next);
          const sign = next === "ascending" ? 1 : -1;
          rows = [...original].sort((a, b) => compare(a.cells[column], b.cells[column], sign));
        }
        body.append(...rows);
        regroup(table);
      });
    });
  }
  for (const input of document.querySelectorAll(".filter input")) {
    const table = document.getElementById(input.getAttribute("aria-controls"));
    const rows = [...table.tBodies[0].rows];
    const output = input.closest(".filter").querySelector("output");
    const texts = rows.map((row) => row.textContent.toLowerCase());
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, place) => {
        row.hidden = !words.every((word) => texts[place].includes(word));
        shown += row.hidden ? 0 : 1;
      });
      regroup(table);
      output.textContent = words.length ? `${shown} of ${rows.length} rows` : `${rows.length} rows`;
    });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        input.value = "";
        input.dispatchEvent(new Event("input"));
      }
    });
  }
  // The titles of a table, and the names in it, take one line each if it then fits its box and does
  // not get taller. A table that is too wide even with wrapped titles gets narrow margins and, if this
  // is not enough, wraps within words. All tables are measured at once, because each change of a class
  // before a measurement costs a layout of the page.
  const boxes = [...document.querySelectorAll(".scroll:has(> table)")];
  const isTooWide = (box) => box.scrollWidth > box.clientWidth;
  const fit = () => {
    const shown = boxes.filter((box) => box.clientWidth);
    const mark = (some, name, on) => some.forEach((box) => box.firstElementChild.classList.toggle(name, on));
    for (const name of ["titles", "whole", "dense", "tight"]) mark(shown, name, false);
    const wide = shown.filter(isTooWide);
    mark(wide, "dense", true);
    const tryOn = (some, name) => {
      const heights = new Map(some.map((box) => [box, box.offsetHeight]));
      mark(some, name, true);
      mark(some.filter((box) => isTooWide(box) || box.offsetHeight > heights.get(box)), name, false);
    };
    mark(wide.filter(isTooWide), "tight", true);
    tryOn(shown.filter((box) => !wide.includes(box)), "titles");
    tryOn(shown, "whole");
  };
  fit();
  addEventListener("resize", fit);
  folds.forEach((fold) => fold.addEventListener("toggle", fit)); // a closed section has no sizes
  // A table or code that continues to the right fades out at its right edge.
  const observer = new ResizeObserver((entries) => entries.forEach(({ target }) => fade(target)));
  const fade = (box) => {
    box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  };
  for (const box of document.querySelectorAll(".scroll, pre")) {
    box.addEventListener("scroll", () => fade(box), { passive: true });
    observer.observe(box);
  }
})();
