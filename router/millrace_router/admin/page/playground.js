// One chat request to the public HTTP API. The key stays in its field: nothing stores it, and no form is submitted.
const OF_CHART = "kubectl port-forward deployment/millrace-router 8001 8000";

export class Playground {
  constructor(find) {
    this.find = find;
    this.sending = null;  // what ends the request that runs
    find("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.sending) this.sending.abort(); else this.send();
    });
  }

  // router: of /workers
  found(router) {
    this.url = `${router.http_tls ? "https" : "http"}://${location.hostname}:${router.http_port}`;
    this.find("api").textContent = `${this.url}/v1/chat/completions`;
    this.find("send").disabled = false;
  }

  async send() {
    const { find } = this, begun = performance.now();
    this.sending = new AbortController();
    find("send").textContent = "Stop";
    find("answer").textContent = find("facts").textContent = "";
    try {
      const answer = await this.ask(this.sending.signal);
      if (!answer.ok) throw new Error(await refusal(answer));
      await this.read(answer.body, begun);
    } catch (error) {
      find("facts").textContent = error.name === "AbortError" ? "Stopped." : error.message;
    } finally {
      this.sending = null;
      find("send").textContent = "Send";
    }
  }

  async ask(signal) {
    const value = (name) => this.find(name).value, key = value("key").trim();
    const body = {
      messages: [{ role: "user", content: value("message") }], max_tokens: Number(value("max-tokens")),
      temperature: Number(value("temperature")), stream: true, stream_options: { include_usage: true },
    };
    const headers = new Headers({ "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) });
    const options = { method: "POST", headers, body: JSON.stringify(body), signal, credentials: "omit" };
    try {
      return await fetch(`${this.url}/v1/chat/completions`, options);
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error(await this.why(error));
    }
  }

  // The browser does not tell a refusal from silence. An answer that no page may read shows which it was.
  async why(error) {
    if (location.hostname.startsWith("[")) return "The playground needs this page at a name or an IPv4 address.";
    try {
      await fetch(`${this.url}/health`, { mode: "no-cors", credentials: "omit" });
    } catch {
      return `Nothing answers at ${this.url} (${error.message}). On Kubernetes forward both ports: ${OF_CHART}`;
    }
    return `The router does not let this page read answers. Add "${location.origin}" to its setting connections.cors.`;
  }

  async read(body, begun) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let first, usage, rest = "";
    for (let read = await reader.read(); !read.done; read = await reader.read()) {
      const events = (rest + read.value).split("\n\n");
      rest = events.pop();
      for (const event of events.filter((text) => text.startsWith("data: {"))) {
        const data = JSON.parse(event.slice(6));
        if (data.error) throw new Error(data.error.message);
        const delta = data.choices[0]?.delta ?? {}, text = (delta.reasoning_content ?? "") + (delta.content ?? "");
        if (text) first ??= performance.now();
        this.find("answer").append(text);
        usage = data.usage ?? usage;
      }
    }
    const ended = performance.now(), took = ((ended - begun) / 1000).toFixed(2);
    const wait = Math.round((first ?? ended) - begun);
    const tokens = usage?.completion_tokens ?? 0;
    this.find("facts").textContent = `${tokens} tokens in ${took} s, the first text after ${wait} ms`;
  }
}

async function refusal(answer) {
  const message = await answer.json().then((body) => body.error.message, () => answer.statusText);
  return `${answer.status}: ${message}${answer.status === 401 ? ". Type an API key." : ""}`;
}
