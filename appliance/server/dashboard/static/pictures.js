// Pictures that go with the next message: chosen, pasted or dropped.

import { byId } from "./api.js";

const shelf = byId("shelf");
let waiting = []; // { file, url }
let isRead = false; // by the model
let refuse = () => {}; // called with why a picture is not taken

export function meet(reads, onRefused) {
  isRead = reads;
  refuse = onRefused;
  byId("picture").hidden = !reads;
  if (!reads) drop(take());
}

// Return the pictures of the next message, which leave the shelf.
export function take() {
  const taken = waiting;
  waiting = [];
  shelf.replaceChildren();
  return taken;
}

export function putBack(pictures) {
  for (const picture of pictures) add(picture);
}

// Give the memory of pictures back that are not shown any more.
export function drop(pictures) {
  for (const { url } of pictures) URL.revokeObjectURL(url);
}

export function shown(picture) {
  const image = document.createElement("img");
  image.src = picture.url;
  image.alt = picture.file.name;
  image.title = picture.file.name;
  return image;
}

// Return the part of a message, with the file's bytes.
export function partOf({ file }) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ type: "image_url", image_url: { url: reader.result } });
    reader.onerror = () => reject(new Error(`${file.name} cannot be read any more`));
    reader.readAsDataURL(file);
  });
}

function add(picture) {
  waiting.push(picture);
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.ariaLabel = `Take ${picture.file.name} away`;
  button.append(shown(picture));
  button.addEventListener("click", () => {
    waiting = waiting.filter((one) => one !== picture);
    button.remove();
    drop([picture]);
  });
  shelf.append(button);
}

function attach(files) {
  const pictures = [...files].filter(({ type }) => type.startsWith("image/"));
  if (pictures.length === 0) return false;
  if (!isRead) refuse("this model reads texts only");
  else for (const file of pictures) add({ file, url: URL.createObjectURL(file) });
  return true;
}

byId("picture").addEventListener("click", () => byId("picture-file").click());

byId("picture-file").addEventListener("change", (event) => {
  if (event.target.files.length > 0 && !attach(event.target.files)) refuse("these files are no pictures");
  event.target.value = ""; // the same file may be chosen again
  byId("prompt").focus();
});

byId("prompt").addEventListener("paste", (event) => {
  // Office programs put a picture of copied text beside it.
  if (!event.clipboardData.getData("text/plain") && attach(event.clipboardData.files)) event.preventDefault();
});

const chat = byId("chat");
chat.addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) event.preventDefault();
});
chat.addEventListener("drop", (event) => {
  if (event.dataTransfer.files.length === 0) return;
  event.preventDefault(); // the browser would leave the page and show the file
  if (!attach(event.dataTransfer.files)) refuse("only pictures can be dropped here");
});
