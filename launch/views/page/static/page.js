// Draws the charts of the page of a run, follows the run by server-sent events, and filters rollouts.
// Texts enter the page as text only.
"use strict";
(() => {
  const COLOURS = ["#3b7dd8", "#e07a1f", "#2a9d5c", "#c0392b", "#8e5bd0", "#8c6d46", "#d0549e", "#7f8a94",
    "#a3a818", "#1aa7b8", "#5f7fb0", "#d89b6a"];
  const USES = { "training": "#2a9d5c", "rollouts": "#3b7dd8", "rewards": "#8e5bd0", "idle work": "#1aa7b8",
    "other": "#9aa0a6", "away": "#00000000" };
  const WAITS = ["#e07a1f", "#f0a830", "#c0392b", "#d0549e", "#a3a818", "#8c6d46"];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const plots = new Map();
  let page = JSON.parse(document.getElementById("data").textContent);

  const make = (name, text) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const shown = (value) => {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (size >= 1e9) return (value / 1e9).toPrecision(3) + " G";
    if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
    if (size >= 1e4) return (value / 1e3).toPrecision(3) + " k";
    if (size !== 0 && size < 1e-3) return value.toExponential(1);
    return String(+value.toPrecision(4));
  };

  function draw(place, chart) {
    const old = plots.get(chart.name);
    if (old) old.destroy();
    const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 },
      ticks: { stroke: style("--line"), width: 1 }, font: "12px system-ui, sans-serif",
      values: (_, ticks) => ticks.map(shown) };
    const series = chart.series.map((each, i) => ({
      label: each.label, stroke: COLOURS[i % COLOURS.length], width: 1.5, spanGaps: chart.joined,
      points: { show: chart.xs.length < 40 }, value: (_, value) => shown(value),
    }));
    const options = {
      width: Math.max(200, place.clientWidth), height: 230, legend: { live: true },
      scales: { x: { time: false }, y: { range: (_, low, high) => limits(chart, low, high) } },
      series: [{ label: chart.x, value: (_, value) => shown(value) }, ...series],
      axes: [{ ...axis, label: chart.x, labelSize: 18, labelFont: axis.font },
        { ...axis, size: 62, label: chart.y, labelSize: 18, labelFont: axis.font }],
    };
    plots.set(chart.name, new uPlot(options, [chart.xs, ...chart.series.map((each) => each.values)], place));
  }

  function limits(chart, low, high) {
    if (low === null || high === null) return [0, 1];
    if (chart.zero) return [Math.min(0, low), high > 0 ? high * 1.05 : 1];
    const margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    return [low - margin, high + margin];
  }

  function colourOf(use, uses) {
    if (use in USES) return USES[use];
    return WAITS[uses.filter((each) => !(each in USES)).indexOf(use) % WAITS.length];
  }

  function lanes(place, found) {
    const canvas = place.querySelector("canvas") || place.appendChild(make("canvas"));
    canvas.className = "lanes";
    const ratio = window.devicePixelRatio || 1, row = found.names.length > 40 ? 8 : 18, foot = 18;
    const width = Math.max(200, place.clientWidth), height = found.names.length * row + foot;
    canvas.style.height = height + "px";
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "Use of time by node; the table below has the totals");
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const left = Math.min(120, width / 4), bins = found.bins, step = (width - left) / bins;
    pen.fillStyle = style("--text");
    found.names.forEach((name, i) => {
      if (row > 10 || i % 4 === 0) pen.fillText(name.slice(0, 18), 0, i * row + 1 + row / 2, left - 6);
    });
    found.names.forEach((_, i) => {
      const used = new Array(bins).fill(0), top = i * row + 1;
      found.uses.forEach((use, k) => {
        const shares = found.shares[i][k];
        if (!shares.length || use === "away") return;
        pen.fillStyle = colourOf(use, found.uses);
        for (let bin = 0, next; bin < bins; bin = next) {
          const share = shares[bin], below = used[bin];
          for (next = bin; next < bins && shares[next] === share && used[next] === below; next++) {
            used[next] += share;
          }
          if (!share) continue;
          const bottom = top + (1 - below / 100) * (row - 2), size = (share / 100) * (row - 2);
          pen.fillRect(left + bin * step, bottom - size, (next - bin - 1) * step + Math.ceil(step), size);
        }
      });
    });
    pen.fillStyle = style("--dim");
    pen.fillText("0", left, height - 8);
    pen.textAlign = "right";
    pen.fillText(found.end, width, height - 8);
    const key = place.querySelector(".key") || place.appendChild(make("div"));
    key.className = "key";
    key.replaceChildren(...found.uses.filter((use) => use !== "away").map((use) => {
      const entry = make("span"), mark = make("i");
      mark.style.background = colourOf(use, found.uses);
      entry.append(mark, use);
      return entry;
    }));
  }

  function drawAll() {
    for (const section of page.sections) {
      for (const chart of section.charts) {
        const place = document.getElementById("chart-" + chart.name);
        if (place) draw(place, chart);
      }
      const place = section.lanes && document.getElementById("lanes");
      if (place) lanes(place, section.lanes);
    }
  }

  function fill(table, found) {
    const cells = (row, kind) => {
      const made = make("tr");
      row.forEach((text) => {
        const cell = make(kind, text);
        if (text.length > 40) cell.className = "long";
        made.append(cell);
      });
      return made;
    };
    const head = make("thead"), body = make("tbody");
    head.append(cells(found.columns, "th"));
    body.append(...found.rows.map((row) => cells(row, "td")));
    table.replaceChildren(head, body);
  }

  function update(found) {
    const places = (one) => one.sections.map((each) => each.name + ":" +
      [...each.charts, ...each.tables].map((part) => part.name)).join();
    if (places(found) !== places(page)) {
      location.reload();  // a part has come or gone
      return;
    }
    page = found;
    for (const section of page.sections) {
      for (const table of section.tables) {
        const place = document.getElementById("table-" + table.name);
        if (place) fill(place, table);
      }
    }
    const alerts = document.getElementById("alerts");
    alerts.replaceChildren(...page.alerts.map((text) => make("li", text)));
    drawAll();
  }

  function filter(form) {
    const number = (name, otherwise) => {
      const value = form.elements[name].value.trim();
      return value === "" || !Number.isFinite(+value) ? otherwise : +value;
    };
    const [least, most] = [number("least_reward", -Infinity), number("most_reward", Infinity)];
    const [shortest, node] = [number("least_length", 0), form.elements.node.value.trim()];
    const text = form.elements.text.value;
    const limited = least !== -Infinity || most !== Infinity;
    let count = 0;
    for (const each of document.querySelectorAll("details.rollout")) {
      const reward = each.dataset.reward === "" ? NaN : +each.dataset.reward;
      const fits = (!limited || (reward >= least && reward <= most)) && +each.dataset.length >= shortest &&
        (node === "" || each.dataset.node === node) && (text === "" || each.textContent.includes(text));
      each.hidden = !fits;
      count += fits;
    }
    document.getElementById("rollouts-shown").textContent = count + " shown";
  }

  drawAll();
  dark.addEventListener("change", drawAll);
  let pending = 0;
  window.addEventListener("resize", () => {
    clearTimeout(pending);
    pending = setTimeout(drawAll, 200);
  });
  const form = document.getElementById("filters");
  if (form) {
    form.hidden = false;
    form.addEventListener("input", () => filter(form));
    form.addEventListener("submit", (event) => event.preventDefault());
  }
  const live = document.getElementById("live");
  if ("have" in live.dataset) {
    const source = new EventSource("events?have=" + live.dataset.have);  // no message with what is here
    source.onopen = () => { live.textContent = "live"; };
    source.onmessage = (event) => update(JSON.parse(event.data));
    source.onerror = () => { live.textContent = "not connected: trying again"; };
  }
})();
