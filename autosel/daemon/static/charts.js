// Draws what stands in the page as data, in the page's colours, light or dark.
"use strict";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Apart from the accent: muted, told apart by hue and lightness also by those who do not see red and green alike.
const LIGHT = ["#1f5fc4", "#c2571a", "#2a8a6e", "#8a4fb0", "#9a7b12", "#5a6772"];
const DARK = ["#7aaeff", "#f0965c", "#5cc9a7", "#c79bea", "#d9bc5a", "#a3b0bb"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const palette = () => (dark.matches ? DARK : LIGHT);
const clear = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");

function layout(height, more) {
  const axis = { gridcolor: colour("--rule"), linecolor: colour("--rule"), zeroline: false, tickfont: { size: 11 } };
  return {
    height,
    margin: { l: 76, r: 14, t: 10, b: 42 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--ink") },
    hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--rule"), font: { color: colour("--ink") } },
    showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 } },
    ...more,
    xaxis: { ...axis, ...more.xaxis },
    yaxis: { ...axis, ...more.yaxis },
  };
}

// Ticks of a logarithmic axis that people read: 1, 2, 5 of each decade, or the decades alone.
function decades(low, high, fine) {
  const found = [];
  for (let at = 10 ** Math.floor(Math.log10(low)); at <= high * 1.01; at *= 10) {
    for (const step of fine ? [1, 2, 5] : [1]) if (at * step >= low * 0.99 && at * step <= high * 1.01) found.push(at * step);
  }
  return found;
}
const text = (value) => (value >= 1000 ? value.toLocaleString("en").replaceAll(",", "\u2009") : String(Number.isInteger(value) ? value : Number(value.toPrecision(3))));
// Ticks of a short range: steps of 1, 2 or 5 of a power of ten, about four of them.
function between(low, high) {
  const rough = (high - low) / 4 || high / 10 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((s) => s * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 0.01); i * step <= high * 1.001; i++) found.push(Number((i * step).toPrecision(6)));
  return found;
}
function ticks(values, most = 12) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const wide = decades(low, high, false);
  let found = wide.length >= 3 ? wide : decades(low, high, true);
  if (found.length < 3) found = between(low, high);
  while (found.length > most) found = found.filter((_, i) => i % 2 === 0);
  return { tickvals: found, ticktext: found.map(text) };
}

const powers = (low, high) => {
  const found = [];
  for (let at = 2 ** Math.floor(Math.log2(low)); at <= high * 1.5; at *= 2) found.push(at);
  return found.length > 12 ? found.filter((_, i) => i % 2 === 0) : found;
};

function times(data, height) {
  const traces = [];
  const xs = data.series.flatMap((s) => s.x);
  data.series.forEach((s, i) => {
    const hue = s.baseline ? colour("--dim") : palette()[i % 6];
    const group = s.name;
    if (s.x.length > 1) {
      const band = { x: [...s.x, ...[...s.x].reverse()], y: [...s.hi, ...[...s.lo].reverse()] };
      traces.push({ ...band, legendgroup: group, fill: "toself", fillcolor: clear(hue.startsWith("#") ? hue : "#888888", 0.18), line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false });
    }
    const up = s.hi.map((h, k) => h - s.y[k]);
    const down = s.y.map((y, k) => y - s.lo[k]);
    traces.push({
      x: s.x, y: s.y, name: s.name + (s.baseline ? " (baseline)" : ""), legendgroup: group, mode: "lines+markers",
      line: { color: hue, width: s.baseline ? 1.4 : 1.8, dash: s.baseline ? "dot" : "solid" }, marker: { size: 5, color: hue },
      error_y: s.x.length > 1 ? undefined : { type: "data", array: up, arrayminus: down, color: hue },
      customdata: s.lo.map((lo, k) => [lo, s.hi[k], s.p95[k]]),
      hovertemplate: `${s.name} at %{x}<br>%{y:.4g} us (%{customdata[0]:.4g} .. %{customdata[1]:.4g}), p95 %{customdata[2]:.4g}<extra></extra>`,
    });
  });
  if (data.roofline) {
    traces.push({ x: data.roofline.x, y: data.roofline.y, name: "roofline: the operands, read once", mode: data.roofline.x.length > 1 ? "lines" : "markers", line: { color: colour("--ink"), width: 2.2 }, marker: { symbol: "line-ew-open", size: 24, color: colour("--ink") }, hovertemplate: "roofline at %{x}: %{y:.4g} us<extra></extra>" });
  }
  const marks = data.crossovers.map((c) => ({ type: "line", x0: c.x, x1: c.x, yref: "paper", y0: 0, y1: 1, line: { color: colour("--accent"), width: 1, dash: "dash" } }));
  const notes = data.crossovers.map((c, i) => ({ x: Math.log10(c.x), y: 1 - 0.05 * (i % 6), yref: "paper", yanchor: "top", xanchor: "left", text: ` ${c.to}`, showarrow: false, font: { size: 11, color: colour("--accent") } }));
  const sizes = powers(Math.min(...xs), Math.max(...xs));
  const ys = [...data.series.flatMap((s) => [...s.lo, ...s.hi]), ...(data.roofline ? data.roofline.y : [])];
  return [traces, layout(height, {
    xaxis: { type: "log", title: { text: data.axis }, tickvals: sizes, ticktext: sizes.map(text) },
    yaxis: { type: "log", title: { text: "time of a call, us" }, ...ticks(ys) },
    shapes: marks, annotations: notes,
  })];
}

function forest(data, height, width) {
  const hues = data.names.map((n) => (n === data.winner ? colour("--accent") : n === data.baseline ? colour("--dim") : palette()[5]));
  const names = data.names.map((n) => (n === data.baseline ? `${n} (baseline)` : n));
  const trace = {
    x: data.median, y: names, mode: "markers", marker: { size: 8, color: hues },
    error_x: { type: "data", array: data.hi.map((h, i) => h - data.median[i]), arrayminus: data.median.map((m, i) => m - data.lo[i]), color: colour("--dim"), thickness: 1.4, width: 4 },
    customdata: data.lo.map((lo, i) => [lo, data.hi[i], data.p95[i]]),
    hovertemplate: "%{y}<br>%{x:.4g} us (%{customdata[0]:.4g} .. %{customdata[1]:.4g}), p95 %{customdata[2]:.4g}<extra></extra>",
  };
  return [[trace], layout(height, {
    showlegend: false, margin: { l: 8, r: 14, t: 4, b: 34 },
    xaxis: { type: "log", title: { text: "us, logarithmic", font: { size: 11 } }, ...ticks([...data.lo, ...data.hi], width < 420 ? 3 : 12), tickangle: 0 },
    yaxis: { autorange: "reversed", automargin: true },
  })];
}

function tokens(data, height) {
  const traces = data.series.flatMap((s, i) => [
    { x: s.x, y: s.y, name: s.name, mode: "lines+markers", line: { color: palette()[i % 6] }, customdata: s.sequence, hovertemplate: "certificate %{customdata}: %{y:.4g} tok/s<extra></extra>" },
    { x: s.x, y: s.baseline, name: "its baseline", mode: "lines+markers", marker: { size: 4 }, line: { color: palette()[i % 6], dash: "dot", width: 1 }, showlegend: i === 0, hovertemplate: "baseline %{y:.4g} tok/s<extra></extra>" },
  ]);
  const rates = data.series.flatMap((s) => [...s.y, ...s.baseline.filter((y) => y !== null)]);
  const far = Math.max(...rates) > 20 * Math.min(...rates);
  const scale = far ? { type: "log", ...ticks(rates) } : { rangemode: "tozero" };
  const title = { text: `tokens per second${far ? ", logarithmic" : ""}` };
  return [traces, layout(height, { xaxis: { type: "date" }, yaxis: { title, ...scale } })];
}

const KINDS = { times, forest, tokens };

function draw() {
  for (const place of document.querySelectorAll(".chart")) {
    const data = JSON.parse(document.getElementById(`${place.id}-data`).textContent);
    const [traces, look] = KINDS[data.kind](data, Number(place.dataset.height), place.clientWidth);
    Plotly.react(place, traces, look, { displayModeBar: false, responsive: true });
  }
}

draw();
dark.addEventListener("change", draw);
