// The WebSocket. docs/play.md describes its protocol: text messages are JSON, binary messages are frames and images.

/** Unpack a binary frame: its header with the pixels of each view. */
export function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const frame = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let at = 4 + length;
  for (const view of frame.views) {
    const size = view.width * view.height * 3;
    view.rgb = new Uint8Array(buffer, at, size);
    at += size;
  }
  return frame;
}

/** Connect to the server. `heard` has handlers for hello, frame, error and end. */
export function connect(heard) {
  const socket = new WebSocket(`ws://${location.host}/play`);
  socket.binaryType = "arraybuffer";
  socket.onmessage = ({ data }) => {
    const message = typeof data === "string" ? JSON.parse(data) : unpack(data);
    heard[message.is](message);
  };
  socket.onclose = ({ reason }) => heard.end(reason);
  return {
    reset: (start, seed) => socket.send(JSON.stringify({ do: "reset", start, seed })),
    step: (action) => socket.send(JSON.stringify({ do: "step", action })),
    picture: (bytes) => socket.send(bytes),
    close: () => socket.close(),
  };
}
