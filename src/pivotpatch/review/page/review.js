// The page of a review. Every decision is kept here until the server says that it is on the disk, and only then comes the
// next image. Texts of others (labels, file names, messages) are only ever set as text.
const PRESENT = 1;
const ABSENT = 0;
const UNSURE = -1;
const AGAIN = 1500; // milliseconds until a server that is gone is asked again
const TOLD = 15000; // between two looks at the progress, which also keep what is open
const FOUND = 7; // labels that are offered
const KEYS = "1234567890";

const find = (selector) => document.querySelector(selector);
const make = (name, settings = {}, ...inside) => {
  const made = Object.assign(document.createElement(name), settings);
  made.append(...inside);
  return made;
};
const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const draw = () => [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
const keep = (store, name, value) => store.getItem(name) ?? (store.setItem(name, value), value);

const tab = keep(sessionStorage, "tab", draw());
let about = null; // what is reviewed
let shown = null; // the image: { image, name, size, rows, ... }
let lit = null; // the label whose pivot patch is framed
let grid = null; // { label, claimed, cells: [{ image, name, marked }], left }
let mode = "one";
let busy = false;
let running = Promise.resolve();
const blobs = new Map(); // addresses of images that were fetched

const who = () => find("#who").value.trim() || "reviewer";

// The server.

class Gone extends Error {}

const ask = async (path, said) => {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const options = said ? { method: "POST", headers, body: JSON.stringify({ tab, who: who(), ...said }) } : { headers };
  let reply;
  try {
    reply = await fetch(`api/${path}`, options);
  } catch {
    throw new Gone("The server cannot be reached; is it running?");
  }
  if (reply.status === 401) {
    find("#key").hidden = false;
    find("#token").focus();
  }
  if (reply.ok) return path.startsWith("image/") ? reply.blob() : reply.json();
  const { error } = await reply.json().catch(() => ({ error: `the server answers ${reply.status}` }));
  throw reply.status >= 500 ? new Gone(error) : new Error(error);
};

// Do something that the server must answer, as often as it takes.
const insist = async (work) => {
  for (;;) {
    try {
      await flush();
      const answer = await work();
      complain("");
      return answer;
    } catch (error) {
      if (!(error instanceof Gone)) {
        complain(error.message);
        return null;
      }
      const left = listKept().length;
      const kept = left ? ` ${count(left, "decision")} ${left === 1 ? "is" : "are"} kept here and will be sent when it is back.` : "";
      complain(`${error.message}${kept}`);
      await wait(AGAIN);
    }
  }
};

const complain = (text) => {
  const place = find("#wrong");
  if (place.textContent === text) return;
  place.textContent = text;
  place.hidden = !text;
};

// One thing at a time: a second Enter must not answer for an image that is not seen yet. What is patient waits its turn.
const once = (work, patient = false) => {
  if (busy && !patient) return running;
  busy = true;
  find("main").setAttribute("aria-busy", "true");
  const mine = running.catch(() => {}).then(work).finally(() => {
    if (running !== mine) return; // another waits
    busy = false;
    find("main").removeAttribute("aria-busy");
  });
  running = mine;
  return mine;
};

// Decisions, each under a name of its own, so that several tabs share the store.

const listKept = () =>
  Object.keys(localStorage).filter((name) => about && name.startsWith(`review/${about.id}/`)).sort();

const decide = (modeName, states) => {
  const id = draw();
  const place = `review/${about.id}/${String(Date.now()).padStart(15, "0")}-${id}`;
  localStorage.setItem(place, JSON.stringify({ id, who: who(), mode: modeName, states }));
};

const flush = async () => {
  for (const name of listKept()) {
    const held = localStorage.getItem(name);
    if (held === null) continue;
    try {
      await ask("decide", JSON.parse(held));
    } catch (error) {
      if (error instanceof Gone || /token/.test(error.message)) throw error;
      complain(`A decision was refused: ${error.message}`);
    }
    localStorage.removeItem(name);
  }
};

const fetchImage = (image, small) => {
  const path = `image/${image}${small ? "?small=1" : ""}`;
  if (!blobs.has(path)) {
    blobs.set(path, ask(path).then((blob) => URL.createObjectURL(blob)).catch(() => (blobs.delete(path), "")));
    if (blobs.size > 200) {
      const [oldest, url] = blobs.entries().next().value;
      blobs.delete(oldest);
      url.then((address) => URL.revokeObjectURL(address));
    }
  }
  return blobs.get(path);
};

// Image by image.

const load = async (said = {}, states = null) => {
  const found = await insist(() => ask("next", said));
  if (!found) return;
  await tell();
  if (found.image === null) {
    shown = null;
    setMode("end");
    return;
  }
  shown = found;
  for (const row of shown.rows) row.state = states?.[row.label] ?? row.state;
  for (const label of Object.keys(states ?? {})) {
    if (!shown.rows.some((row) => row.label === label)) await addRow(label, states[label]);
  }
  const url = await fetchImage(shown.image);
  const seen = find("#one img");
  seen.src = url;
  find(".frame").style.setProperty("--ratio", shown.size[1] / shown.size[0]);
  seen.alt = `${shown.name}, ${shown.size[1]} x ${shown.size[0]} pixels`;
  find("#one figcaption").textContent = shown.name;
  setMode("one");
  closeAdding();
  lit = null;
  const first = shown.rows.findIndex((row) => row.reason === shown.reason);
  showRows();
  light(shown.rows[first]?.label ?? null);
  find("#done").focus({ preventScroll: true });
  if (shown.ahead !== null && shown.ahead !== undefined) {
    fetchImage(shown.ahead);
    ask("ahead", { image: shown.ahead }).catch(() => {});
  }
};

const showRows = () => {
  const place = find("#tags");
  const focused = [...place.querySelectorAll("button")].indexOf(document.activeElement);
  place.replaceChildren(...shown.rows.map(makeRow));
  if (focused >= 0) place.querySelectorAll("button")[focused]?.focus();
  light(lit);
};

const WORDS = { [PRESENT]: ["✓", "yes", "true"], [ABSENT]: ["✕", "no", "false"], [UNSURE]: ["?", "unknown", "mixed"] };

const makeRow = (row, place) => {
  const [mark, word, pressed] = WORDS[row.state];
  const prob = row.prob === null ? "" : row.prob.toFixed(2);
  const tag = make(
    "button",
    { type: "button", className: "tag", title: row.reason },
    place < KEYS.length ? make("kbd", { textContent: KEYS[place] }) : make("span", { className: "number" }),
    make("span", { className: "mark", textContent: mark }),
    make("bdi", { className: "name", textContent: row.label }),
    make("small", { textContent: `${row.given === 1 ? "given " : ""}${prob}` }),
  );
  tag.setAttribute("aria-pressed", pressed);
  tag.setAttribute("aria-label", `${row.label}: ${word}${prob ? `, probability ${prob}` : ""}`);
  tag.onclick = () => toggle(row);
  tag.onfocus = () => light(row.label);
  tag.onmouseenter = () => light(row.label);
  const unsure = make("button", { type: "button", className: "unsure", textContent: "?" });
  unsure.setAttribute("aria-label", `${row.label}: cannot tell`);
  unsure.setAttribute("aria-pressed", String(row.state === UNSURE));
  unsure.onclick = () => set(row, row.state === UNSURE ? ABSENT : UNSURE);
  const item = make("li", {}, tag, unsure);
  item.dataset.label = row.label;
  return item;
};

const set = (row, state) => {
  row.state = state;
  lit = row.label;
  showRows();
};

const toggle = (row) => set(row, row.state === PRESENT ? ABSENT : PRESENT);

const light = (label) => {
  lit = label;
  const row = shown?.rows.find((each) => each.label === label);
  for (const item of find("#tags").children) item.classList.toggle("lit", item.dataset.label === label);
  find("#reason").textContent = row ? row.reason : shown?.reason ?? "";
  const spot = find(".spot");
  spot.hidden = !row?.box;
  if (spot.hidden) return;
  const [rows, columns] = shown.size;
  const [left, top, right, bottom] = row.box;
  spot.style.left = `${(100 * left) / columns}%`;
  spot.style.top = `${(100 * top) / rows}%`;
  spot.style.width = `${(100 * (right - left)) / columns}%`;
  spot.style.height = `${(100 * (bottom - top)) / rows}%`;
};

const finish = () =>
  once(async () => {
    if (!shown) return;
    const states = Object.fromEntries(shown.rows.map((row) => [row.label, row.state]));
    decide("image", { [shown.name]: states });
    await load();
  });

const skip = () => once(() => load(shown ? { put_off: shown.image } : {}));

const undo = () =>
  once(async () => {
    const answer = await insist(() => ask("undo", {}));
    if (!answer?.undone) {
      if (answer) complain("There is nothing of yours to take back.");
      return;
    }
    const { image, states, label, cells } = answer.undone;
    if (label) {
      openGrid({ label, claimed: grid?.claimed ?? true, cells, left: cells.length });
      await tell();
    } else if (image !== null) await load({ image }, states);
    else await load();
  }, true);

// Adding a label.

const openAdding = () => {
  find("#adding").hidden = false;
  find("#added").value = "";
  offer();
  find("#added").focus();
};

const closeAdding = () => {
  find("#adding").hidden = true;
};

const matches = () => {
  const typed = find("#added").value.trim().toLowerCase();
  const open = about.labels.filter((label) => !shown.rows.some((row) => row.label === label));
  const starts = open.filter((label) => label.toLowerCase().startsWith(typed));
  return [...starts, ...open.filter((label) => !starts.includes(label) && label.toLowerCase().includes(typed))].slice(0, FOUND);
};

const offer = (at = 0) => {
  const found = matches();
  find("#found").replaceChildren(
    ...found.map((label, place) => {
      const item = make("li", { textContent: label, id: `found-${place}` });
      item.setAttribute("role", "option");
      item.setAttribute("aria-selected", String(place === at));
      item.onclick = () => take(label);
      return item;
    }),
  );
  find("#added").setAttribute("aria-expanded", String(found.length > 0));
  find("#added").setAttribute("aria-activedescendant", found.length ? `found-${at}` : "");
};

const take = async (label) => {
  closeAdding();
  if (label) await insist(() => addRow(label, PRESENT));
  showRows();
  light(label ?? lit);
  find("#done").focus({ preventScroll: true });
};

const addRow = async (label, state) => {
  const row = await ask("add", { image: shown.image, label });
  shown.rows.push({ ...row, state });
};

const typeAhead = (event) => {
  const options = [...find("#found").children];
  const at = options.findIndex((option) => option.getAttribute("aria-selected") === "true");
  if (event.key === "ArrowDown") offer(Math.min(at + 1, options.length - 1));
  else if (event.key === "ArrowUp") offer(Math.max(at - 1, 0));
  else if (event.key === "Enter") options[at] && take(options[at].textContent);
  else if (event.key === "Escape") take(null);
  else return;
  event.preventDefault();
};

// One label of many images.

const openGrid = (found) => {
  grid = found;
  for (const cell of grid.cells) {
    const before = cell.state ?? (grid.claimed ? PRESENT : ABSENT);
    cell.marked = before === (grid.claimed ? ABSENT : PRESENT);
  }
  find("#label").value = grid.label;
  setMode("many");
  showGrid();
  find("#cells button")?.focus();
};

const fetchGrid = async (label, claimed = true, either = false) => {
  let found = await insist(() => ask("grid", { label, claimed }));
  if (either && found && !found.cells.length) found = await insist(() => ask("grid", { label, claimed: !claimed }));
  if (!found) return;
  await tell();
  openGrid(found);
};

const loadGrid = (label, claimed) => once(() => fetchGrid(label, claimed), true);

const showGrid = () => {
  const { label, claimed, cells, left } = grid;
  find("#claimed").checked = claimed;
  find("#missed").checked = !claimed;
  find("#asked").textContent = cells.length
    ? `${claimed ? `Are these all “${label}”? Mark those that are not.` : `Is any of these “${label}”? Mark those that are.`} ${count(left, "image")} left.`
    : `No image is left that ${claimed ? "is tagged" : "is not tagged"} “${label}”.`;
  find("#all").disabled = !cells.length;
  find("#cells").replaceChildren(...cells.map(makeCell));
};

const makeCell = (cell) => {
  const picture = make("img", { alt: "", decoding: "async" });
  fetchImage(cell.image, true).then((url) => (picture.src = url));
  const button = make("button", { type: "button" }, picture, make("span", { className: "mark" }), make("small", { textContent: cell.reason }));
  const paint = () => {
    const yes = cell.marked !== grid.claimed;
    button.className = yes ? "yes" : "no";
    button.querySelector(".mark").textContent = yes ? "✓" : "✕";
    button.setAttribute("aria-pressed", String(cell.marked));
    button.setAttribute("aria-label", `${cell.name}: ${yes ? "" : "no "}${grid.label}`);
  };
  button.onclick = () => {
    cell.marked = !cell.marked;
    paint();
  };
  paint();
  return make("li", {}, button);
};

const answerGrid = async () => {
  if (busy || !grid?.cells.length) return;
  const states = grid.cells.map((cell) => [cell.name, { [grid.label]: cell.marked !== grid.claimed ? PRESENT : ABSENT }]);
  decide("grid", Object.fromEntries(states));
  await loadGrid(grid.label, grid.claimed);
};

const moveInGrid = (key) => {
  const buttons = [...find("#cells").querySelectorAll("button")];
  const at = buttons.indexOf(document.activeElement);
  const first = buttons[0]?.getBoundingClientRect().top;
  const columns = Math.max(buttons.filter((button) => button.getBoundingClientRect().top === first).length, 1);
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[key];
  buttons[at < 0 ? 0 : Math.min(Math.max(at + step, 0), buttons.length - 1)]?.focus();
};

const moveInTags = (key) => {
  const buttons = [...find("#tags").querySelectorAll(".tag")];
  const at = buttons.indexOf(document.activeElement);
  const next = at < 0 ? (key === "ArrowDown" ? 0 : buttons.length - 1) : at + (key === "ArrowDown" ? 1 : -1);
  buttons[Math.min(Math.max(next, 0), buttons.length - 1)]?.focus();
};

// All of the page.

const setMode = (name) => {
  mode = name;
  for (const each of ["one", "many", "end"]) find(`#${each}`).hidden = each !== name;
  find("#to-one").setAttribute("aria-pressed", String(name !== "many"));
  find("#to-many").setAttribute("aria-pressed", String(name === "many"));
};

const switchMode = () =>
  once(() => {
    if (mode === "many") return load(shown ? { image: shown.image } : {});
    return fetchGrid(lit && about.labels.includes(lit) ? lit : grid?.label ?? about.labels[0], true, true);
  }, true);

const spell = (seconds) => {
  if (seconds < 90) return `${Math.ceil(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
};

const tell = async () => {
  const told = await ask("progress", {}).catch(() => null);
  if (!told) return;
  const [bar, text] = find("#progress").children;
  bar.max = Math.max(told.all, 1);
  bar.value = told.done;
  const parts = [`${told.done.toLocaleString("en")} of ${count(told.all, "image")}`, `${told.today.toLocaleString("en")} today`];
  if (told.per_hour !== null) parts.push(`${told.per_hour.toLocaleString("en")} per hour`, `${spell(told.seconds_left)} left`);
  if (told.people > 1) parts.push(`${told.people} people`);
  text.textContent = parts.join(" · ");
  for (const name of ["#undo", "#undo-many", "#undo-end"]) find(name).disabled = !told.undo;
  if (told.fault) complain(`The table is not written (${told.fault}); the decisions are safe in the journal.`);
};

const press = (event) => {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || !about) return;
  if (target.matches("input:not([type=radio]), textarea, select")) return;
  const digit = /^Digit(\d)$/.exec(event.code ?? "")?.[1] ?? (KEYS.includes(key) ? key : null);
  const row = mode === "one" && digit !== null ? shown?.rows[KEYS.indexOf(digit)] : null;
  if (row && busy) return; // it would change an image that is answered already
  if (row) event.shiftKey ? set(row, UNSURE) : toggle(row);
  else if (key === "Enter") {
    if (target.matches("button") && !target.closest("#tags, #cells") && !target.matches("#done, #all")) return; // its own
    if (mode === "one") finish();
    else if (mode === "many") answerGrid();
  } else if (key === "u" || key === "U" || key === "Backspace") undo();
  else if (key === "g" || key === "G") switchMode();
  else if (mode === "many" && key.startsWith("Arrow") && !target.matches("input")) moveInGrid(key);
  else if (mode === "one" && (key === "ArrowUp" || key === "ArrowDown")) moveInTags(key);
  else if (mode === "one" && (key === "a" || key === "A" || key === "/")) openAdding();
  else if (mode === "one" && (key === "s" || key === "S" || key === "ArrowRight")) skip();
  else if (mode === "one" && key === "?") lit && set(shown.rows.find((each) => each.label === lit), UNSURE);
  else if (key === "Escape") light(null);
  else return;
  event.preventDefault();
};

const start = async () => {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname); // so that it is not seen, shared or kept
  }
  about = await insist(() => ask("review"));
  if (!about) return;
  find("#key").hidden = true;
  find("#about").textContent = `${about.source} · ${about.model} · ${count(about.labels.length, "label")} · to ${about.out}`;
  find("#end code").textContent = about.out;
  find("#label").replaceChildren(...about.labels.map((label) => make("option", { value: label, textContent: label })));
  await once(() => load());
};

find("#who").value = keep(localStorage, "who", `reviewer-${draw().slice(0, 4)}`);
find("#who").addEventListener("change", () => localStorage.setItem("who", who()));
find("#done").onclick = finish;
find("#skip").onclick = skip;
find("#add").onclick = openAdding;
find("#all").onclick = answerGrid;
for (const name of ["#undo", "#undo-many", "#undo-end"]) find(name).onclick = undo;
find("#to-one").onclick = () => mode === "many" && switchMode();
find("#to-many").onclick = () => mode !== "many" && switchMode();
find("#label").addEventListener("change", (event) => loadGrid(event.target.value, grid?.claimed ?? true));
find("#claimed").addEventListener("change", () => loadGrid(grid.label, true));
find("#missed").addEventListener("change", () => loadGrid(grid.label, false));
find("#added").addEventListener("input", () => offer());
find("#added").addEventListener("keydown", typeAhead);
find("#adding").addEventListener("submit", (event) => event.preventDefault());
find("#key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", find("#token").value);
  start();
});
document.addEventListener("keydown", press);
setInterval(tell, TOLD);
start();
