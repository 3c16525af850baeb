// Answers in Markdown, while they are still written. The library only takes text apart; what is
// shown is made here, element by element, so no text of a model can ever become markup.

import MarkdownIt from "./markdown-it.js";

const SCHEMES = ["http:", "https:", "mailto:"];
const FIRST_HEADING = 2; // levels that a model's headings stand below those of the page

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.validateLink = (url) => address(url) !== null; // else the source is shown as it is
parser.inline.ruler.before("escape", "math", takeMath);

// An answer that grows. What is written is drawn once a frame, and of the document only what has
// changed: what a person has selected or is about to click stays.
export class Answer {
  constructor(element, onDrawn) {
    this.element = element;
    this.onDrawn = onDrawn;
    this.text = "";
    this.waiting = 0;
    this.begin();
  }

  begin() {
    this.known = {}; // link definitions
    this.settled = 0; // characters that are drawn for good
    this.first = 0; // child of the element from which on it may change
  }

  append(text) {
    this.text += text.replace(/\r\n?/g, "\n"); // as the library counts lines
    this.waiting ||= requestAnimationFrame(() => this.draw());
  }

  // All is there: draw it as a whole, since its end may say what its beginning means.
  end() {
    this.begin();
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.waiting);
    this.waiting = 0;
    const rest = this.text.slice(this.settled);
    const tokens = parser.parse(rest, this.known);
    const nodes = elements(tokens);
    for (const node of nodes) node.dir ||= "auto"; // a block reads as its first letters do
    adopt(this.element, nodes, this.first);
    const last = tokens.findLast((token) => token.level === 0 && token.nesting >= 0);
    if (last?.map?.[0] > 0) { // only the last block can still change
      this.settled += rest.split("\n", last.map[0]).reduce((sum, line) => sum + line.length + 1, 0);
      this.first += nodes.length - 1;
    }
    this.onDrawn();
  }
}

// A whole text whose lines end where they end for its writer only.
export function documentOf(text) {
  return elements(parser.parse(text, {}), " ");
}

// The nodes that tokens stand for; `line` is what becomes of the end of a line, a break if empty.
function elements(tokens, line = "") {
  const root = document.createDocumentFragment(), open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) open.push(token.hidden ? parent : begin(token, parent));
    else if (token.type === "inline") parent.append(...elements(token.children, line));
    else if (line && token.type === "softbreak") parent.append(line);
    else parent.append(leaf(token));
  }
  return [...root.childNodes];
}

// What a token opens, added to its parent; the element that takes what it holds.
function begin(token, parent) {
  const kind = token.type.replace("_open", "");
  switch (kind) {
    case "heading": return add(parent, `h${Math.min(6, Number(token.tag[1]) + FIRST_HEADING)}`);
    case "paragraph": return add(parent, "p");
    case "blockquote": return add(parent, "blockquote");
    case "bullet_list": return add(parent, "ul");
    case "ordered_list": {
      const list = add(parent, "ol");
      list.start = Number(token.attrGet("start") ?? 1);
      return list;
    }
    case "list_item": return add(parent, "li");
    case "table": {
      const frame = add(parent, "div", "table");
      frame.tabIndex = 0; // it may be wider than the page
      return add(frame, "table");
    }
    case "thead": case "tbody": case "tr": return add(parent, kind);
    case "th": case "td": {
      const side = /text-align:(left|center|right)/.exec(token.attrGet("style") ?? "")?.[1];
      return add(parent, kind, side);
    }
    case "em": case "strong": case "s": return add(parent, kind);
    case "link": {
      const link = add(parent, "a");
      const url = address(token.attrGet("href"));
      if (url !== null) lead(link, url);
      return link;
    }
    default: return add(parent, "span");
  }
}

function leaf(token) {
  switch (token.type) {
    case "fence": return codeBlock(token.content, token.info.trim().split(/\s/)[0]);
    case "code_block": return codeBlock(token.content, "");
    case "code_inline": return element("code", "", token.content);
    case "math": return element("code", "math", token.content);
    case "hr": return element("hr");
    case "softbreak": case "hardbreak": return element("br");
    case "image": { // what it is and where; it is not fetched
      const link = element("a", "", token.content || "picture");
      const url = address(token.attrGet("src"));
      if (url !== null) lead(link, url);
      return link;
    }
    default: return document.createTextNode(token.content);
  }
}

function codeBlock(text, language) {
  const block = element("div", "code"), head = add(block, "div", "code-head");
  block.dir = "ltr";
  add(head, "span").textContent = language;
  const button = add(head, "button", "copy quiet");
  button.type = "button";
  button.textContent = "Copy";
  const frame = add(block, "pre");
  frame.tabIndex = 0;
  frame.append(element("code", "", text));
  return block;
}

function element(name, kind = "", text = "") {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  if (name === "code") made.dir = "ltr";
  return made;
}

function add(parent, name, kind) {
  const made = element(name, kind);
  parent.append(made);
  return made;
}

function lead(link, url) {
  link.href = url;
  link.title = url;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
}

// A whole address of a kind that only shows something, or null.
function address(text) {
  try {
    const url = new URL(text);
    return SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

// Formulas are shown as they were written: Markdown would take their signs for its own.
const MATH = /^(?:\\\((.{1,2000}?)\\\)|\\\[(.{1,2000}?)\\\]|\$\$(.{1,2000}?)\$\$|\$(?!\s)([^$\n]*[^$\s\\])\$(?!\d))/s;

function takeMath(state, silent) {
  if (!"$\\".includes(state.src[state.pos])) return false;
  const found = MATH.exec(state.src.slice(state.pos, state.posMax));
  if (found === null) return false;
  if (!silent) state.push("math", "", 0).content = found.slice(1).find((part) => part !== undefined).trim();
  state.pos += found[0].length;
  return true;
}

// Make the children of an element, from one of them on, equal to others; what is equal stays.
function adopt(parent, nodes, first = 0) {
  nodes.forEach((node, index) => {
    const old = parent.childNodes[first + index];
    if (old === undefined) parent.append(node);
    else if (!become(old, node)) old.replaceWith(node);
  });
  while (parent.childNodes.length > first + nodes.length) parent.lastChild.remove();
}

function become(old, node) {
  if (old.nodeName !== node.nodeName) return false;
  if (old.nodeType === Node.TEXT_NODE) {
    if (node.data.startsWith(old.data)) old.appendData(node.data.slice(old.data.length));
    else old.data = node.data;
    return true;
  }
  const names = new Set([...old.getAttributeNames(), ...node.getAttributeNames()]);
  for (const name of names) if (old.getAttribute(name) !== node.getAttribute(name)) return false;
  adopt(old, [...node.childNodes]);
  return true;
}
