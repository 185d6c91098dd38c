// Sends a chosen or dropped file to the server; `trigger` starts an event of this component, whose place `element` is.
const read = (file) =>
  new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.split(",", 2)[1] ?? "");
    reader.onerror = () => resolve(null); // a folder, or a file that has gone
    reader.readAsDataURL(file);
  });

const send = async (file) => {
  if (!file) return;
  const small = file.size <= Number(element.querySelector("input").dataset.limit);
  trigger("upload", { name: file.name, size: file.size, content: small ? await read(file) : null });
};

element.addEventListener("change", (event) => {
  send(event.target.files[0]);
  event.target.value = ""; // so that the same file can be chosen again
});
// Dropped beside its place, a file would take the place of the page.
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  send(event.dataTransfer.files[0]);
});
