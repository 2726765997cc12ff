// Browsers start no Worker for a page that was opened from disk. There the search runs in a hidden
// frame, which gets what the search needs of a worker: messages in both directions.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = (this.inside = frame.contentWindow);
      const load = (source) =>
        new Promise((resolve, reject) => {
          const element = inside.document.createElement("script");
          Object.assign(element, { src: source, onload: resolve, onerror: reject });
          inside.document.head.append(element);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      this.loaded = load(new URL(script, document.baseURI));
    }

    postMessage(data) {
      const { inside } = this;
      this.loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
