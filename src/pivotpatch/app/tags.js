// Lights up the pivot patch of the tag that is chosen. `element` is the table's place, `watch` tells of a new table.
const find = (name) => document.querySelector(`#picture ${name}`);

const light = (tag) => {
  for (const button of element.querySelectorAll("button.tag")) {
    button.setAttribute("aria-pressed", String(button === tag));
  }
  const [figure, spot, caption] = [".seen", ".spot", "figcaption"].map(find);
  if (!figure) return;
  spot.hidden = !tag;
  spot.dataset.label = tag ? tag.dataset.label : "";
  caption.textContent = tag ? tag.dataset.says : caption.dataset.usual;
  if (!tag) return;
  const [columns, rows] = figure.dataset.size.split(" ").map(Number);
  const [left, top, right, bottom] = tag.dataset.box.split(" ").map(Number);
  spot.style.left = `${(100 * left) / columns}%`;
  spot.style.top = `${(100 * top) / rows}%`;
  spot.style.width = `${(100 * (right - left)) / columns}%`;
  spot.style.height = `${(100 * (bottom - top)) / rows}%`;
};

element.addEventListener("click", (event) => {
  const tag = event.target.closest("button.tag");
  if (tag) light(tag.getAttribute("aria-pressed") === "true" ? null : tag);
});
element.addEventListener("keydown", (event) => {
  if (event.key === "Escape") light(null);
});
watch("value", () => {
  const label = find(".spot")?.dataset.label;
  const buttons = [...element.querySelectorAll("button.tag")];
  light((label && buttons.find((button) => button.dataset.label === label)) || null);
});
