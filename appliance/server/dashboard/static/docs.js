// The documentation: a list of topics, and the one that the address names behind its #.

import { documentOf } from "./markdown.js";

const LINK = /\]\(([a-z-]+)\.md\)/g; // to another topic
const place = document.getElementById("topic");
const list = document.getElementById("topics");
const names = (await (await fetch("docs/topics.txt")).text()).trim().split("\n");

async function show() {
  const name = names.includes(location.hash.slice(1)) ? location.hash.slice(1) : names[0];
  const response = await fetch(`docs/${name}.md`);
  const here = `${location.origin}${location.pathname}`;
  const text = (await response.text()).replace(/<!--.*?-->\n/g, "").replace(LINK, `](${here}#$1)`);
  place.replaceChildren(...documentOf(text));
  for (const link of place.querySelectorAll("a")) if (link.href.startsWith(here)) link.target = "";
  for (const link of list.querySelectorAll("a")) {
    link.toggleAttribute("aria-current", link.hash === `#${name}`);
  }
  window.scrollTo(0, 0);
}

for (const name of names) {
  const link = document.createElement("a");
  link.href = `#${name}`;
  link.textContent = name.replaceAll("-", " ");
  const item = document.createElement("li");
  item.append(link);
  list.append(item);
}
window.addEventListener("hashchange", show);
await show();
