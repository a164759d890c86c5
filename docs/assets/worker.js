// A worker for pages that are opened from a file, where browsers refuse real ones: a frame with the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.importScripts = () => undefined;
      inside.postMessage = (data) => this.later(data, (event) => {
        this.dispatchEvent(event);
        this.onmessage?.(event);
      });
      const script = inside.document.createElement("script");
      script.src = new URL(url, location.href).href;
      script.onload = () => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      };
      inside.document.body.append(script);
    }
    postMessage(data) {
      if (!this.ready) return void this.waiting.push(data);
      this.later(data, (event) => this.frame.contentWindow.dispatchEvent(event));
    }
    later(data, deliver) {
      // As from a real worker: a copy, and not before the sender has ended what it is doing.
      const event = new MessageEvent("message", { data: structuredClone(data) });
      setTimeout(() => deliver(event));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
