"use strict";
// The page is complete without this script, which adds a theme switch, tooltips, sorting, and the choice of a column and a row.
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  root.classList.add("js");

  // --- theme ---
  const button = document.getElementById("theme");
  const remember = (value) => { try { localStorage.setItem("viper-theme", value); } catch { /* a private window */ } };
  const recall = () => { try { return localStorage.getItem("viper-theme"); } catch { return null; } };
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(isDark()));
  };
  if (recall()) root.dataset.theme = recall();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    label();
  });
  label();

  // --- tooltips: the <title> of a mark, without the browser's delay ---
  const tip = document.getElementById("tip");
  for (const title of all("svg title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  const hide = () => { tip.hidden = true; };
  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest && event.target.closest("[data-tip]");
    if (!mark) return hide();
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - width - 8);
    const above = event.clientY - height - 12;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 4 ? above : event.clientY + 18}px`;
  });
  document.addEventListener("scroll", hide, true);

  // --- sorting ---
  const sortKey = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.sort ?? cell.textContent.trim();
    return text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  for (const control of all("table.sortable button.sort")) {
    control.addEventListener("click", () => {
      const head = control.closest("th");
      const body = head.closest("table").tBodies[0];
      const direction = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      const keyed = [...body.rows].map((row) => [sortKey(row, head.cellIndex), row]);
      keyed.sort(([a], [b]) => sign * compare(a, b));
      body.append(...keyed.map(([, row]) => row));
    });
  }

  // --- one column at a time ---
  const effects = all("figure.effect");
  const select = document.getElementById("effect");
  if (select) {
    const show = () => effects.forEach((figure, k) => figure.classList.toggle("chosen", k === Number(select.value)));
    select.addEventListener("change", show);
    show();
  }

  // --- decisions: what acting from a threshold on gets right and wrong ---
  const slider = document.getElementById("threshold");
  if (data.decisions && slider) {
    const { steps, numbers, marks, first } = data.decisions;
    const [alarm, miss, budget] = ["cost-fp", "cost-fn", "budget"].map((id) => document.getElementById(id));
    const cost = (input) => (input.value === "" ? null : Math.max(0, Number(input.value)));
    const short = (x) => x.toLocaleString("en", { maximumSignificantDigits: 4 });
    const decide = (k) => {
      slider.value = String(k);
      slider.setAttribute("aria-valuetext", steps[k].threshold);
      for (const place of all("[data-decision]")) place.textContent = steps[k][place.dataset.decision];
      for (const end of ["x1", "x2"]) document.getElementById("threshold-mark").setAttribute(end, marks[k]);
      const [, alarms, misses] = numbers[k];
      const [a, m] = [cost(alarm), cost(miss)];
      const total = (a ?? 1) * alarms + (m ?? 1) * misses;
      document.getElementById("decision-cost").textContent = a === null && m === null ? "" :
        `${short(alarms)} false alarms and ${short(misses)} misses cost ${short(total)} in all.`;
    };
    const byCost = () => {
      const [a, m] = [cost(alarm) ?? 1, cost(miss) ?? 1];
      if (!(a + m > 0)) return;
      const away = numbers.map(([t]) => Math.abs(t - a / (a + m)));
      decide(away.indexOf(Math.min(...away)));
    };
    const byBudget = () => {
      if (budget.value === "") return;
      const within = numbers.findIndex(([, , , acted]) => acted <= Number(budget.value));
      decide(within < 0 ? numbers.length - 1 : within);
    };
    slider.addEventListener("input", () => decide(Number(slider.value)));
    for (const input of [alarm, miss]) input.addEventListener("input", byCost);
    budget.addEventListener("input", byBudget);
    decide(first);
  }

  // --- one row: the density of s(f), f ~ N(theta, tau^2), averaged over a window around each p, 2 % of the axis wide ---
  const logit = (p) => Math.log(p) - Math.log1p(-p);
  const normalMass = (from, to, panels = 64) => { // by Simpson's rule; the mass beyond 9 is negligible
    const [a, b] = [from, to].map((z) => Math.min(9, Math.max(-9, z)));
    const step = (b - a) / panels;
    let sum = 0;
    for (let k = 0; k <= panels; k += 1) {
      const weight = k === 0 || k === panels ? 1 : k % 2 ? 4 : 2;
      sum += weight * Math.exp(-0.5 * (a + k * step) ** 2);
    }
    return (sum * step) / 3 / Math.sqrt(2 * Math.PI);
  };
  const smear = 0.01; // charts.SMEAR
  const density = (theta, tau, [start, end] = [0, 1], steps = 200) => Array.from({ length: steps + 1 }, (_, k) => {
    const p = start + ((end - start) * k) / steps;
    const half = smear * (end - start);
    const [low, high] = [Math.max(start, p - half), Math.min(end, p + half)];
    const [from, to] = [low, high].map((x) => (logit(x) - theta) / Math.max(tau, 1e-6));
    return [p, normalMass(from, to) / (high - low)];
  });
  const [left, right, top, floor] = [20, 400, 14, 194]; // the frame of charts.density_chart
  const points = (list) => list.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
  const draw = (row) => {
    const { ends: [start, end], ticks } = data.axes[row.axis];
    const curve = density(row.theta, row.tau, [start, end]);
    const highest = Math.max(...curve.map(([, h]) => h));
    const across = (p) => left + ((p - start) / (end - start)) * (right - left);
    const place = ([p, h]) => [across(p), floor - (0.96 * h * (floor - top)) / highest];
    const half = smear * (end - start);
    const inside = curve.filter(([p]) => p >= row.low - half && p <= row.high + half).map(place);
    document.getElementById("density-line").setAttribute("d", `M${points(curve.map(place))}`);
    const edges = [[inside[0][0], floor], ...inside, [inside[inside.length - 1][0], floor]];
    document.getElementById("density-band").setAttribute("d", `M${points(edges)}Z`);
    const mean = document.getElementById("density-mean");
    for (const side of ["x1", "x2"]) mean.setAttribute(side, across(row.mean).toFixed(1));
    all("#density .tick").forEach((tick, k) => { tick.textContent = ticks[k]; });
  };
  const choose = (id) => {
    const row = data.rows[id];
    if (!row) return;
    draw(row);
    document.getElementById("row-name").textContent = row.name;
    document.getElementById("row-text").textContent = row.text;
    document.getElementById("row-note").textContent = row.note;
    for (const pick of all("button.pick")) pick.setAttribute("aria-pressed", String(pick.dataset.row === id));
    for (const person of all(".person")) person.classList.toggle("chosen", person.dataset.row === id);
  };
  if (data.rows) {
    for (const mark of all("[data-row]")) mark.addEventListener("click", () => choose(mark.dataset.row));
    choose(data.first);
  }
  window.viperReport = { density };
})();
