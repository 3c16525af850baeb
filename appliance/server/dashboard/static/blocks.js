// The block map on a canvas: a square for a block, or for a few neighbours where there are many.

const LARGEST = 16, SMALLEST = 4; // side of a square in device-independent pixels
const NO_OWNER = 0xffff;
const FREE = 0, CACHED = 1;
// Hues that stay apart with any kind of colour vision (Okabe and Ito), one per sequence in turn.
const OWNERS = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"];

export class BlockMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.cells = new Uint32Array(0);
    this.epoch = null;
    this.wanted = false;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  async take({ epoch, num_blocks, cells }) {
    const packed = Uint8Array.from(atob(cells), (character) => character.charCodeAt(0));
    const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const words = new DataView(await new Response(plain).arrayBuffer());
    this.cells = Uint32Array.from({ length: num_blocks }, (_, block) => words.getUint32(4 * block, true));
    this.epoch = epoch;
    this.draw();
  }

  change({ epoch, runs }) {
    if (epoch !== this.epoch) return;
    for (const [start, length, cell] of runs) this.cells.fill(cell, start, start + length);
    this.draw();
  }

  draw() {
    if (this.wanted) return;
    this.wanted = true;
    requestAnimationFrame(() => {
      this.wanted = false;
      this.paint();
    });
  }

  paint() {
    const { canvas, cells } = this;
    const scale = devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * scale);
    canvas.height = Math.round(canvas.clientHeight * scale);
    const fit = (side) => Math.floor(canvas.width / side) * Math.floor(canvas.height / side);
    let side = Math.round(LARGEST * scale);
    while (side > SMALLEST * scale && fit(side) < cells.length) side--;
    const columns = Math.max(1, Math.floor(canvas.width / side));
    const squares = Math.min(fit(side), cells.length);
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const plain = { free: colour("--free"), cached: colour("--cached"), shared: colour("--shared") };
    const gap = cells.length <= squares ? 1 : 0;
    for (let square = 0; square < squares; square++) {
      // Neighbours that share a square show the one that matters most.
      const first = Math.floor((square * cells.length) / squares);
      const end = Math.max(first + 1, Math.floor(((square + 1) * cells.length) / squares));
      let shown = cells[first];
      for (let block = first + 1; block < end; block++) {
        if (weight(cells[block]) > weight(shown)) shown = cells[block];
      }
      context.fillStyle = fill(shown, plain);
      context.fillRect((square % columns) * side, Math.floor(square / columns) * side, side - gap, side - gap);
    }
  }
}

const stateOf = (cell) => cell & 0xf;
const referencesOf = (cell) => (cell >>> 8) & 0xff;

function weight(cell) {
  const state = stateOf(cell);
  return state === FREE ? 0 : state === CACHED ? 1 : referencesOf(cell) > 1 ? 3 : 2;
}

function fill(cell, plain) {
  const owner = cell >>> 16;
  switch (weight(cell)) {
    case 0: return plain.free;
    case 1: return plain.cached;
    case 3: return plain.shared;
    default: return owner === NO_OWNER ? plain.shared : OWNERS[owner % OWNERS.length];
  }
}
