// The socket. What goes over it is described in docs/play.md: texts are JSON, bytes are frames here and pictures there.

/** A frame's bytes → what is told of it, and the pixels of each view. */
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

/** `heard` has a function for hello, frame, error and end. */
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
