// The page: sends images to the endpoint beside it, and shows what it answers. Texts of others (labels, file names,
// messages) are only ever set as text.
const AT_ONCE = 4; // requests
const ASKED = 200; // most labels of an answer
const ROWS = 60; // most labels in the table
const PROBABLE = 5; // labels that are shown where none is given
const MAX_BYTES = 32e6;
const TRIES = 6; // where the server is busy
const EXAMPLES = [
  { file: "coffee.jpg", name: "Coffee", shows: ["cup", "spoon", "dining table"] },
  { file: "cat.jpg", name: "Cat", shows: ["cat"] },
  { file: "astronaut.jpg", name: "Astronaut", shows: ["person"] },
];

const find = (selector) => document.querySelector(selector);
const make = (name, settings = {}, ...inside) => {
  const made = Object.assign(document.createElement(name), settings);
  made.append(...inside);
  return made;
};
const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

let images = []; // { name, file, url, answer, error }, in the order in which they came
let chosen = null; // the one that is shown
let lit = null; // the label whose part of the image is lit up
let begun = 0; // when the images that are under way were added
let before = 0; // how many were done by then
let running = 0; // requests under way

// The endpoint.

const ask = async (path, options = {}) => {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const reply = await fetch(path, { ...options, headers });
  if (reply.status === 401) askForToken();
  return reply;
};

const askForToken = () => {
  find("#key").hidden = false;
  find("#token").focus();
};

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

const tag = async (image) => {
  if (image.file.size > MAX_BYTES) {
    throw new Error(`${image.name}: ${Math.round(image.file.size / 1e6)} MB are more than the limit of 32 MB; shrink it`);
  }
  await image.file.slice(0, 1).arrayBuffer().catch(() => {
    throw new Error(`${image.name}: it cannot be read; drop a file`); // a folder, or a file that has gone
  });
  for (let tries = 1; ; tries++) {
    const form = new FormData();
    form.append("file", image.file, image.name);
    const reply = await ask(`api/predict?top_k=${ASKED}`, { method: "POST", body: form });
    if (reply.status === 503 && tries < TRIES) {
      await pause(tries);
      continue;
    }
    const answer = await reply.json();
    if (!reply.ok) throw new Error(answer.error);
    return answer;
  }
};

const work = async () => {
  while (running < AT_ONCE) {
    const next = images.find((image) => !image.begun);
    if (!next) break;
    next.begun = true;
    running++;
    tag(next)
      .then((answer) => (next.answer = answer))
      .catch((error) => {
        next.error = error instanceof TypeError ? `${next.name}: the server cannot be reached; is it running?` : error.message;
      })
      .finally(() => {
        running--;
        show();
        work();
      });
  }
};

// What comes in.

const add = (files) => {
  if (!files.length) return;
  if (!running) [begun, before] = [performance.now(), images.length];
  const added = [...files].map((file) => ({ name: file.name, file, url: URL.createObjectURL(file) }));
  images.push(...added);
  chosen = added[0];
  lit = null;
  show();
  work();
};

const clear = () => {
  for (const image of images) URL.revokeObjectURL(image.url);
  [images, chosen, lit] = [[], null, null];
  show();
  find("#file").focus();
};

// What is decided.

const threshold = () => (find("#fitted").checked ? null : Number(find("#threshold").value));

const judge = (tag) => {
  const limit = threshold() ?? tag.threshold;
  const whole = tag.patch_prob === null ? tag.prob : tag.image_prob; // without parts, the calibrated one decides
  return { ...tag, threshold: limit, given: tag.prob > limit, byWhole: whole > limit };
};

const choose = (image) => image.answer.tags.map(judge).filter((tag) => tag.given);

// What is shown.

const show = () => {
  document.body.classList.toggle("filled", images.length > 0);
  showProgress();
  showStrip();
  showImage();
  showTags();
};

const showProgress = () => {
  const done = images.filter((image) => image.answer || image.error).length;
  const place = find("#progress");
  place.hidden = done === images.length || images.length - before < 2;
  const [bar, text] = place.children;
  bar.max = images.length - before;
  bar.value = done - before;
  const seconds = (performance.now() - begun) / 1000;
  const left = done > before ? Math.ceil((seconds / (done - before)) * (images.length - done)) : null;
  text.textContent = `${done - before} of ${images.length - before} tagged${left === null ? "" : `, about ${left} s left`}`;
};

const showStrip = () => {
  const strip = find("#strip");
  strip.hidden = images.length < 2;
  images.forEach((image, place) => {
    if (!strip.children[place]) {
      const picture = make("img", { src: image.url, alt: "", loading: "lazy", decoding: "async" });
      strip.append(make("li", {}, make("button", { type: "button", title: image.name }, picture)));
    }
    const button = strip.children[place].firstChild;
    const state = image.error ? "failed" : image.answer ? "done" : "waiting";
    button.className = state;
    button.setAttribute("aria-pressed", String(image === chosen));
    button.setAttribute("aria-label", `${image.name}, ${state === "done" ? "tagged" : state}`);
    button.onclick = () => select(image);
  });
  while (strip.children.length > images.length) strip.lastChild.remove();
};

const select = (image) => {
  [chosen, lit] = [image, null];
  show();
};

const showImage = () => {
  const figure = find("#image");
  figure.hidden = !chosen || Boolean(chosen.error);
  const seen = figure.querySelector("img");
  if (figure.hidden) {
    seen.removeAttribute("src");
    return;
  }
  if (seen.src !== chosen.url) {
    figure.querySelector(".blind")?.remove();
    seen.hidden = false;
    seen.src = chosen.url;
  }
  const size = chosen.answer ? `, ${chosen.answer.size[1]} x ${chosen.answer.size[0]} pixels` : "";
  seen.alt = `${chosen.name}${size}`;
  showLight();
};

const cannotShow = () => {
  const seen = find("#image img");
  if (!chosen || seen.hidden) return;
  seen.hidden = true;
  seen.after(make("p", { className: "blind", textContent: `Your browser cannot show ${chosen.name}.` }));
};

const showLight = () => {
  const [spot, caption] = [find("#image .spot"), find("#image figcaption")];
  const tag = chosen?.answer?.tags.find((tag) => tag.label === lit && tag.box);
  spot.hidden = !tag;
  for (const button of document.querySelectorAll("#tags .tag")) {
    button.setAttribute("aria-pressed", String(Boolean(tag) && button.textContent === lit));
  }
  const parts = chosen?.answer?.tags.some((tag) => tag.box);
  caption.textContent = parts
    ? "Select a tag to see which part of the image speaks most for it."
    : chosen?.answer
      ? "This model looks at the whole image only."
      : "";
  if (!tag) return;
  const [rows, columns] = chosen.answer.size;
  const [left, top, right, bottom] = tag.box;
  spot.style.left = `${(100 * left) / columns}%`;
  spot.style.top = `${(100 * top) / rows}%`;
  spot.style.width = `${(100 * (right - left)) / columns}%`;
  spot.style.height = `${(100 * (bottom - top)) / rows}%`;
  const place = tag.weights.indexOf(Math.max(...tag.weights));
  const share = Math.round(100 * tag.weights[place]);
  caption.textContent = `${tag.label}: the ${namePart(place, tag.weights.length)} speaks most for it (${share} % of what all parts say).`;
};

const namePart = (place, parts) => {
  const grid = Math.round(Math.sqrt(parts));
  const [row, column] = [Math.floor(place / grid), place % grid];
  if (grid === 1) return "part that was enlarged";
  if (grid === 2) return `${["top", "bottom"][row]} ${["left", "right"][column]} part`;
  return `part in row ${row + 1}, column ${column + 1} of ${grid} x ${grid}`;
};

const showTags = () => {
  const [summary, place] = [find("#summary"), find("#tags")];
  const answered = images.some((image) => image.answer);
  find("#actions").hidden = !images.length;
  find("#limits").hidden = !answered;
  for (const name of ["csv", "json"]) find(`#${name}`).disabled = !answered;
  find("#copy").disabled = !chosen?.answer;
  find("#said").textContent = "";
  if (!chosen || chosen.error || !chosen.answer) {
    place.replaceChildren();
    const text = chosen ? chosen.error || `Tagging ${chosen.name} …` : "No image yet.";
    tell(summary, chosen?.error ? "wrong" : "", text);
    return;
  }
  const every = chosen.answer.tags.map(judge);
  const given = every.filter((tag) => tag.given);
  const names = given.slice(0, ROWS).flatMap((tag, place) => [place ? ", " : "", isolate(tag.label)]);
  if (given.length) tell(summary, "", `${count(given.length, "tag")}: `, ...names);
  else tell(summary, "", "No tag: no label is above its threshold.");
  const worth = every.filter((tag) => tag.given || tag.byWhole);
  place.replaceChildren(makeTable(worth.length ? worth : every.slice(0, PROBABLE), worth.length > 0));
  if (worth.length > ROWS) place.append(make("p", { textContent: `and ${worth.length - ROWS} more labels` }));
  showLight();
};

const isolate = (text) => make("bdi", { textContent: text }); // a label may be written from right to left

const tell = (place, kind, ...words) => {
  const told = make("p", { className: kind }, ...words);
  if (place.firstElementChild?.outerHTML === told.outerHTML) return; // nothing new to read out
  place.replaceChildren(told);
};

const makeTable = (tags, worth) => {
  const parts = tags.some((tag) => tag.patch_prob !== null);
  const heads = [
    ["Tag", ""],
    ["Probability", parts ? "image and parts" : "whole image"],
    ...(parts ? [["Whole image", "alone"], ["Parts", "alone"]] : []),
  ].map(([name, note]) => make("th", { scope: "col" }, name, note ? make("small", { textContent: ` ${note}` }) : ""));
  return make(
    "table",
    {},
    make("caption", {
      textContent: worth ? "The most probable first." : "No label is above its threshold; these are the most probable.",
    }),
    make("thead", {}, make("tr", {}, ...heads)),
    make("tbody", {}, ...tags.slice(0, ROWS).map((tag) => makeRow(tag, parts))),
  );
};

const makeRow = (tag, parts) => {
  const name = tag.box ? make("button", { type: "button", className: "tag", textContent: tag.label }) : isolate(tag.label);
  if (tag.box) {
    name.setAttribute("aria-pressed", "false");
    name.onclick = () => light(lit === tag.label ? null : tag.label);
  }
  const note = tag.given === tag.byWhole ? "" : tag.given ? " not by the whole image alone" : " by the whole image alone only";
  const cells = [makeCell("both", tag.prob, tag, tag.given)];
  if (parts && tag.patch_prob !== null) {
    cells.push(makeCell("whole", tag.image_prob, tag, tag.byWhole), makeCell("parts", tag.patch_prob, tag, false));
  }
  const head = make("th", { scope: "row" }, name, note ? make("small", { className: "note", textContent: note }) : "");
  return make("tr", { className: tag.given ? "given" : "lost" }, head, ...cells);
};

const makeCell = (kind, value, tag, above) => {
  const bar = make("span", { className: "bar", ariaHidden: "true" });
  bar.style.setProperty("--value", value);
  bar.style.setProperty("--threshold", tag.threshold);
  const tick = above
    ? make("span", { className: "tick" }, make("span", { ariaHidden: "true", textContent: " ✓" }), make("span", { className: "unseen", textContent: " given" }))
    : "";
  return make("td", { className: kind }, make("span", { className: "value", textContent: value.toFixed(2) }), tick, bar);
};

const light = (label) => {
  lit = label;
  showLight();
};

// What goes out.

const copy = async () => {
  const text = choose(chosen).map((tag) => tag.label).join(", ");
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { value: text }); // the clipboard is closed to pages of other machines without TLS
    find("#actions").append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  find("#said").textContent = "Copied.";
};

const download = (name, kind, text) => {
  const url = URL.createObjectURL(new Blob([text], { type: kind }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
};

// A cell that begins like a formula would be one in a spreadsheet.
const quote = (text) => `"${text.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;

const downloadCsv = () => {
  const rows = images.filter((image) => image.answer).map((image) => {
    const tags = choose(image);
    return [image.name, tags.map((tag) => tag.label).join("|"), tags.map((tag) => tag.prob.toFixed(4)).join("|")];
  });
  const lines = [["picture", "labels", "probs"], ...rows].map((row) => row.map(quote).join(","));
  download("tags.csv", "text/csv", `${lines.join("\r\n")}\r\n`);
};

const downloadJson = () => {
  const answers = images.filter((image) => image.answer).map((image) => ({
    ...image.answer,
    tags: choose(image).map(({ given, byWhole, ...tag }) => tag),
  }));
  download("tags.json", "application/json", `${JSON.stringify(answers, null, 1)}\n`);
};

// The start.

const showModel = async () => {
  const reply = await ask("api/model").catch(() => null);
  if (!reply?.ok) return;
  const model = await reply.json();
  find("#key").hidden = true;
  find("#model").textContent = `${model.name || "Model"} · ${count(model.labels.length, "label")}`;
  const known = new Set(model.labels);
  const examples = EXAMPLES.filter((example) => example.shows.some((label) => known.has(label)));
  find("#examples").hidden = examples.length === 0;
  find("#examples ul").replaceChildren(...examples.map(makeExample));
};

const makeExample = ({ file, name }) => {
  const button = make("button", { type: "button" }, make("img", { src: file, alt: "" }), name);
  button.onclick = async () => {
    const reply = await fetch(file);
    add([new File([await reply.blob()], file, { type: "image/jpeg" })]);
    find("#work").scrollIntoView({ block: "nearest" });
  };
  return make("li", {}, button);
};

const readToken = () => {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", location.pathname); // so that it is not seen, shared or kept
};

const repeat = () => {
  for (const image of images) if (image.error) [image.error, image.begun] = [null, false];
  show();
  work();
};

find("#file").addEventListener("change", (event) => {
  add(event.target.files);
  event.target.value = ""; // so that the same file can be chosen again
});
document.addEventListener("dragover", (event) => {
  event.preventDefault(); // else a file would take the place of the page
  document.body.classList.add("dragging");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dragging");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  add(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => add(event.clipboardData.files));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") light(null);
});
find("#image img").addEventListener("error", cannotShow);
find("#fitted").addEventListener("change", show);
find("#threshold").addEventListener("input", (event) => {
  find("#limits output").textContent = Number(event.target.value).toFixed(2);
  find("#fitted").checked = false;
  show();
});
find("#copy").addEventListener("click", copy);
find("#csv").addEventListener("click", downloadCsv);
find("#json").addEventListener("click", downloadJson);
find("#clear").addEventListener("click", clear);
find("#key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", find("#token").value);
  showModel().then(repeat);
});
readToken();
showModel();
