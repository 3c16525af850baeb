// Server-sent events from the body of a fetch, which unlike EventSource can send a key.

const MAX_FRAME = 16 * 2 ** 20; // characters; a snapshot of many blocks has a few million

export async function* readFrames(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
        const frame = parse(rest.slice(0, end));
        if (frame !== null) yield frame;
      }
      if (rest.length > MAX_FRAME) throw new Error("a frame of the server has no end");
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have ended by itself
  }
}

function parse(text) {
  let name = "message", data = null;
  for (const line of text.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data = (data === null ? "" : data + "\n") + line.slice(5).trimStart();
  }
  return data === null ? null : { name, data };
}
