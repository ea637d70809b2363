// Redraws the parts of a page that changed: those with an id and `data-live`. Without it the page is whole, and still.
"use strict";

const line = document.getElementById("line");
let asked = 0;

function state(word, kind) {
  line.textContent = word;
  line.className = `state ${kind}`;
}

// At most one look a second, however much happens.
function soon() {
  if (!asked) asked = setTimeout(redraw, 1000);
}

async function redraw() {
  asked = 0;
  const parts = document.querySelectorAll("[data-live]");
  if (!parts.length || document.activeElement?.closest("form")) return;
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of parts) {
    const now = page.getElementById(part.id);
    if (now && now.innerHTML !== part.innerHTML) {
      part.replaceChildren(...now.childNodes);
      part.classList.remove("fresh");
      void part.offsetWidth;
      part.classList.add("fresh");
    }
  }
}

// --- the tune that is under way ------------------------------------------------------------------------------------

const USUAL = { fingerprint: [0, 0.03], parity: [0.03, 0.32], screening: [0.35, 0.25], confirming: [0.6, 0.4] };

function left(live) {
  const [word, number] = live.stage.split(" ");
  const share = USUAL[word];
  if (!share) return "";
  let within = live.total ? live.done / live.total : 0;
  if (word === "confirming") within = (Number(number) - 1 + within) / 3;
  const done = share[0] + share[1] * within;
  return done < 0.1 ? "" : `, about ${Math.round((live.seconds * (1 - done)) / done)} s left`;
}

function progress(live) {
  const box = document.getElementById("live");
  if (!live || !box) return soon();
  const put = (part, text) => {
    const place = box.querySelector(`[data-part=${part}]`);
    if (place) place.textContent = text;
  };
  put("stage", live.stage);
  put("count", live.total > 1 ? `${live.done}/${live.total}` : "");
  put("detail", live.detail);
  put("seconds", Math.round(live.seconds));
  put("decided", live.decided);
  put("eta", left(live));
  const bar = box.querySelector("progress");
  bar.max = live.total || 1;
  bar.value = live.done;
  field(live.races || []);
}

// Live candidates: how far ahead of the baseline each is in the session under way, with the spread of its pairs.
function field(rows) {
  const place = document.getElementById("field");
  if (!place) return;
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const word of ["workload", "candidate", "pairs", "baseline's time over its own", "80 % of pairs"]) {
    const cell = document.createElement("th");
    cell.textContent = word;
    head.append(cell);
  }
  const body = table.createTBody();
  for (const row of rows) {
    const cells = body.insertRow();
    const texts = [row.workload, row.candidate, row.pairs, `${row.median.toFixed(2)}x`];
    for (const text of [...texts, `${row.lo.toFixed(2)} .. ${row.hi.toFixed(2)}`]) {
      const cell = cells.insertCell();
      cell.textContent = text;
      cell.className = "num";
    }
  }
  place.replaceChildren(...(rows.length ? [table] : []));
}

// --- events --------------------------------------------------------------------------------------------------------

const source = new EventSource("/v1/events");
source.onopen = () => state("live", "live");
source.onerror = () => state("no daemon", "lost");
for (const kind of ["decision", "epoch", "fault", "facts", "job", "commands"]) source.addEventListener(kind, soon);
source.addEventListener("live", (event) => progress(JSON.parse(event.data)));

// --- what changes something ----------------------------------------------------------------------------------------

async function act(event) {
  event.preventDefault();
  const form = event.target;
  const given = new FormData(form);
  const verb = given.get("verb");
  const body = { reason: given.get("reason") };
  if ((verb === "pin" || verb === "promote") && given.get("candidate")) body.candidate = given.get("candidate");
  if (!confirm(`${verb} decision ${form.dataset.id}?`)) return;
  const headers = { "Content-Type": "application/json" };
  if (given.get("token")) headers.Authorization = `Bearer ${given.get("token")}`;
  const answer = await fetch(`/v1/decisions/${form.dataset.id}/${verb}`, { method: "POST", headers, body: JSON.stringify(body) });
  const found = await answer.json();
  const told = form.querySelector("output");
  if (answer.ok) {
    location.assign(`/decisions/${found.decision_id}`);
  } else {
    told.textContent = [found.error.what, found.error.why, found.error.todo].filter(Boolean).join(": ");
  }
}

for (const form of document.querySelectorAll("form.act[data-id]")) form.addEventListener("submit", act);

document.querySelector("[data-verify]")?.addEventListener("click", async (event) => {
  const told = event.target.parentElement.querySelector("output");
  told.textContent = "...";
  const found = await (await fetch("/v1/certificates/verify")).json();
  told.textContent = found.valid
    ? `${found.certificates} certificates hold, ${found.signed} signed; head ${found.head.slice(0, 12)}`
    : `${found.what}: ${found.why}`;
});
